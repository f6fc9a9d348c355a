"""VaSCL against SimCSE at one budget: STS-B dev Spearman of the best checkpoint, mean and sd over seeds.

Every run is the command that a user would type (examples/run_vascl.py); only the named options differ. Runs that
are already in the results file are not repeated, so that a stopped benchmark continues where it was.

    python benchmarks/vascl_stsb.py --train_file ../shared/data/corpus/wiki_en_1m.part1.txt.gz \
        --sts_dir ../shared/data/sts --suite final --seeds 1 2 3 --jobs 2 --output benchmarks/results/vascl_stsb.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

from csl_hf.evaluation import StsEvaluator, read_sts_file
from csl_hf.export import SentenceTransformer
from csl_hf.files import write_json

ROOT = Path(__file__).resolve().parents[1]
STS_FILES = ("sts12", "sts13", "sts14", "sts15", "sts16", "sickr-test", "stsb-test")

BUDGET = ("backbone", "train_file", "max_train_samples", "max_steps", "bf16")


def vascl(gradient: str, radius: float, *options: str) -> list[str]:
    return ["--neighborhood_gradient", gradient, "--radius", str(radius), *options]


SIMCSE = ["--neighborhood_weight", "0"]
SUITES: dict[str, dict[str, list[str]]] = {
    # What the options do: one seed each, --max_steps 100. The final suite was chosen after a look at it.
    "explore": {
        "simcse": SIMCSE,
        "simcse no head": [*SIMCSE, "--head", "none"],
        "simcse dropout 0.2": [*SIMCSE, "--dropout", "0.2"],
        "paper r0.05": vascl("paper", 0.05),
        "paper r0.1": vascl("paper", 0.1),
        "reference r0.3": vascl("reference", 0.3),
        "reference r1.0": vascl("reference", 1.0),
        "reference r1.0 lr 3e-5": vascl("reference", 1.0, "--learning_rate", "3e-5"),
    },
    "final": {
        "SimCSE loss (neighbourhood off)": SIMCSE,
        "VaSCL, reference gradient, radius 0.1": vascl("reference", 0.1),
        "VaSCL, reference gradient, radius 0.3": vascl("reference", 0.3),
        "VaSCL, paper gradient, radius 0.1": vascl("paper", 0.1),
        "VaSCL, paper gradient, radius 0.3": vascl("paper", 0.3),
    },
}


def run_one(name: str, options: list[str], seed: int, args: argparse.Namespace, threads: int) -> dict:
    """Train one variant with one seed, measure the exported folder on the seven STS sets, return the figures."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=args.work_dir))
    command = [
        sys.executable, str(ROOT / "examples" / "run_vascl.py"),
        "--model_name_or_path", args.backbone,
        "--train_file", args.train_file,
        "--max_train_samples", str(args.max_train_samples),
        "--eval_sts_file", str(Path(args.sts_dir) / "stsb-dev.tsv"),
        "--output_dir", str(folder / "model"),
        "--show_searches", "False",
        "--disable_tqdm", "True",
        "--seed", str(seed), "--head_seed", str(seed),
        *(["--bf16", "--use_cpu"] if args.bf16 else []),
        *(["--max_steps", str(args.max_steps)] if args.max_steps else []),
        "--eval_steps", str(args.eval_steps), "--save_steps", str(args.eval_steps),
        *options,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    log = folder / "log.txt"
    with log.open("w") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    results = json.loads((folder / "model" / "run_results.json").read_text())
    history = json.loads((folder / "model" / "training_log.json").read_text())
    model = SentenceTransformer.from_pretrained(folder / "model", device="cpu")
    sts = {}
    for file in () if args.dev_only else STS_FILES:
        evaluator = StsEvaluator(*read_sts_file(Path(args.sts_dir) / f"{file}.tsv"), name=file)
        sts[file] = round(evaluator(model.encode)[f"{file}_spearman"], 3)
    shutil.rmtree(folder)
    return {
        "name": name,
        "seed": seed,
        "options": options,
        "backbone": results["before"]["stsb_dev_spearman"],
        "stsb_dev": results["after"]["stsb_dev_spearman"],
        "stsb_dev_by_step": {e["step"]: e["eval_stsb_dev_spearman"] for e in history if "eval_stsb_dev_spearman" in e},
        "best_step": results["best_step"],
        "steps": results["steps"],
        "sts": sts,
        "sts_average": round(mean(sts.values()), 3) if sts else None,
        "train_seconds": results["train_seconds"],
        "last_log": [e for e in history if "alignment" in e][-1],
    }


def table(runs: list[dict]) -> str:
    """Mean and sd over seeds of each variant, in Markdown."""
    lines = ["| | seeds | STS-B dev | average of seven STS tests |", "|---|---:|---:|---:|"]
    if runs:
        lines.append(f"| backbone | – | {runs[0]['backbone']:.2f} | |")
    for name in dict.fromkeys(run["name"] for run in runs):
        of_name = [run for run in runs if run["name"] == name]
        cells = [_mean_sd([run[key] for run in of_name]) for key in ("stsb_dev", "sts_average")]
        lines.append(f"| {name} | {len(of_name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean_sd(values: list[float | None]) -> str:
    if None in values:
        return "–"
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--sts_dir", required=True)
    parser.add_argument("--backbone", default="model_cards/csl-tiny-roberta")
    parser.add_argument("--suite", choices=SUITES, default="final")
    parser.add_argument("--only", nargs="+", help="names of variants, default: all of the suite")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--max_train_samples", type=int, default=50_000)
    parser.add_argument("--max_steps", type=int, default=None)
    parser.add_argument("--eval_steps", type=int, default=25)
    parser.add_argument(
        "--bf16", action="store_true", help="bfloat16 autocast on the CPU: about twice as fast on recent ones"
    )
    parser.add_argument("--dev_only", action="store_true", help="leave out the seven STS test sets")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each with its share of the cores")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "vascl_stsb.json")
    parser.add_argument("--work_dir", default=None, help="where the models are written while they are measured")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
    budget = {name: str(getattr(args, name)) for name in BUDGET}
    # A run is known by all that made it, so that one file never mixes budgets in one row.
    done = {(tuple(run["options"]), run["seed"]) for run in runs if run["budget"] == budget}
    variants = {k: v for k, v in SUITES[args.suite].items() if args.only is None or k in args.only}
    # Seeds outside, so that a stopped benchmark has compared every variant with the seeds it got through.
    waiting = [(n, o, s) for s in args.seeds for n, o in variants.items() if (tuple(o), s) not in done]
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    with ThreadPoolExecutor(args.jobs) as pool:
        for run in pool.map(lambda job: run_one(*job, args, threads), waiting):
            runs.append(run | {"budget": budget})
            write_json(args.output, {"runs": runs})
            print(
                f"{run['name']}, seed {run['seed']}: {run['stsb_dev']:.2f} in {run['train_seconds']:.0f} s",
                flush=True,
            )
    print(table([run for run in runs if run["budget"] == budget]))


if __name__ == "__main__":
    main()
