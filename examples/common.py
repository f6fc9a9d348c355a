"""What the training scripts share: arguments, the run, and what a person sees at its end."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path

import datasets
import transformers
from safetensors import SafetensorError
from transformers.trainer_utils import is_main_process

from csl_hf import SentenceTransformer
from csl_hf.arguments import ContrastiveTrainingArguments, DataArguments, ModelArguments, parse_arguments
from csl_hf.configuration import ContrastiveConfig
from csl_hf.evaluation.report import markdown_table
from csl_hf.recipe import BUILTIN, RunResult, read_source, run_training

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = (ModelArguments, DataArguments, ContrastiveConfig, ContrastiveTrainingArguments)
# For the built-in corpus. In texts of the user's own, three of them look for their neighbours.
QUERIES = ["open a file and read it", "turn text into numbers", "wait until a process has ended"]
SEARCHED_TEXTS = 3000

logger = logging.getLogger(__name__)


def main(method: str, default_config: Path, description: str) -> None:
    """Parse, train, report. Unusable arguments or texts end the script with a message; --log_level debug adds where."""
    try:
        arguments = parse_arguments(ARGUMENTS, default_config=default_config, description=description)
        model_args, data_args, objective, training_args = arguments
        set_verbosity(training_args)
        if not Path(model_args.model_name_or_path).exists() and (ROOT / model_args.model_name_or_path).is_dir():
            model_args.model_name_or_path = str(ROOT / model_args.model_name_or_path)  # started from elsewhere
        command = command_line(sys.argv, training_args.world_size)
        result, trainer = run_training(method, model_args, data_args, objective, training_args, command)
    except (OSError, ValueError, FloatingPointError, SafetensorError) as error:
        logger.debug("Where it happened:", exc_info=True)  # shown with --log_level debug
        sys.exit(f"{type(error).__name__}: {error}")
    if trainer.is_world_process_zero():
        report(result, data_args, model_args.cache_dir)


def command_line(argv: list[str], processes: int) -> str:
    """What reproduces the run, without secrets: it is published in the model card."""
    arguments = list(argv)
    for index, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if name.lstrip("-").replace("-", "_") in ("token", "hub_token"):
            if equals:
                arguments[index] = f"{name}=..."
            elif index + 1 < len(arguments):
                arguments[index + 1] = "..."
    launcher = ["torchrun", "--nproc_per_node", str(processes)] if processes > 1 else ["accelerate", "launch"]
    return shlex.join([*launcher, *arguments])


def set_verbosity(training_args: ContrastiveTrainingArguments) -> None:
    """Progress and messages of the main process only."""
    main_process = is_main_process(training_args.local_process_index)
    level = logging.INFO if main_process else logging.ERROR
    logging.basicConfig(format="%(message)s", level=logging.DEBUG if training_args.log_level == "debug" else level)
    for name in ("httpx", "filelock", "fsspec", "matplotlib", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if not main_process:
        transformers.utils.logging.set_verbosity_error()
        datasets.utils.logging.set_verbosity_error()
        datasets.disable_progress_bars()


def report(result: RunResult, data_args: DataArguments, cache_dir: str | None) -> None:
    """Metrics before and after, time, files, example searches."""
    sys.stdout.reconfigure(errors="replace")  # texts may hold what the terminal cannot show
    print()
    if result.after:
        print(markdown_table({"before": result.before, "after": result.after}))
    print(
        f"\nTrained {result.steps} steps in {result.train_seconds / 60:.1f} minutes; "
        f"exported step {result.best_step} to {result.output_dir}"
    )
    if data_args.show_searches:
        try:
            show_searches(result.output_dir, data_args, cache_dir)
        except (OSError, ValueError) as error:
            logger.warning(f"No example searches: {error}")
    print(f'\nUse it: SentenceTransformer("{result.output_dir}").encode(["..."])')


def show_searches(folder: str, data_args: DataArguments, cache_dir: str | None) -> None:
    """Nearest training texts of three queries, found with the folder that was just written."""
    model = SentenceTransformer.from_pretrained(folder)
    texts = read_source(data_args, cache_dir)
    # Spread over the source, not its beginning: neighbouring lines often come from one document.
    step = max(1, len(texts) // SEARCHED_TEXTS)
    texts = list(dict.fromkeys(text for text in texts[::step]["text"] if text and text.strip()))
    queries = QUERIES if data_args.train_file == [BUILTIN] else texts[:: max(1, len(texts) // 3)][:3]
    embeddings = model.encode(texts, show_progress_bar=False)
    for query, scores in zip(queries, model.similarity(model.encode(queries), embeddings), strict=True):
        print(f"\n{query[:100]!r} finds")
        best = [index for index in scores.argsort(descending=True).tolist() if texts[index] != query][:3]
        for index in best:
            print(f"  {scores[index]:.2f}  {texts[index][:100]!r}")


if __name__ == "__main__":
    raise SystemExit("This module is imported by the run_*.py scripts.")
