"""The scripts end to end: what a user types, what lies in the folder, what unusable input says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, tiny_config
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, RobertaModel

from csl_hf.arguments import ContrastiveTrainingArguments, DataArguments, ModelArguments
from csl_hf.configuration import ContrastiveConfig
from csl_hf.output_folder import only_writer, prepare_output_dir
from csl_hf.recipe import load_model, run_training

SETTINGS = """
model_name_or_path: {backbone}
train_file: [{train}]
eval_sts_file: {sts}
max_length: 24
num_neighbors: 4
global_batch_size: 16
max_steps: 12
learning_rate: 1.0e-3
head_learning_rate: 1.0e-2
eval_strategy: steps
eval_steps: 3
save_strategy: steps
save_steps: 3
save_total_limit: 2
load_best_model_at_end: true
logging_steps: 3
report_to: none
dataloader_pin_memory: false
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_backbone, sentences):
    """Training texts with a repeated and an empty line, STS pairs, and a config that names them."""
    folder = tmp_path_factory.mktemp("inputs")
    train, sts, config = folder / "train.txt", folder / "stsb-dev.tsv", folder / "run.yaml"
    train.write_text("\n".join([*sentences, sentences[0], ""]) + "\n")
    pairs = [f"{i % 6}\t{a}\t{b}" for i, (a, b) in enumerate(zip(sentences, sentences[::-1], strict=True))]
    sts.write_text("\n".join(["score\tsentence1\tsentence2", *pairs]) + "\n")
    config.write_text(SETTINGS.format(backbone=tiny_backbone, train=train, sts=sts))
    return {"train": train, "sts": sts, "config": config, "backbone": tiny_backbone, "folder": folder}


def script(name: str, *arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "examples" / name), *arguments],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """A whole run of run_vascl.py: (folder, stdout)."""
    folder = tmp_path_factory.mktemp("out") / "my-model"
    process = script("run_vascl.py", "--config", str(inputs["config"]), "--output_dir", str(folder))
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    return folder, output


@pytest.mark.slow
def test_run_vascl_leaves_a_sentence_transformer_with_card_log_and_plot(finished, sentences):
    folder, output = finished
    model = SentenceTransformer(str(folder), device="cpu")
    embeddings = model.encode(sentences[:4])
    assert embeddings.shape == (4, 32) and np.abs(embeddings[0] - embeddings[1]).max() > 1e-3
    backbone = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    assert isinstance(backbone, RobertaModel)
    assert not any("head" in name for name in load_file(folder / "model.safetensors"))
    assert (folder / "training_log.png").read_bytes().startswith(b"\x89PNG")
    log = json.loads((folder / "training_log.json").read_text())
    assert {"loss/nt_xent", "loss/neighborhood", "effective_rank"} <= {key for entry in log for key in entry}
    results = json.loads((folder / "run_results.json").read_text())
    assert results["data"]["duplicates"] == 1 and results["data"]["empty"] == 1 and results["data"]["kept"] == 64
    assert "| before |" in output and "finds" in output and 'SentenceTransformer("' in output


@pytest.mark.slow
def test_exported_weights_are_those_of_the_best_checkpoint(finished, inputs):
    from csl_hf.evaluation import StsEvaluator, read_sts_file

    folder, _ = finished
    results = json.loads((folder / "run_results.json").read_text())
    log = json.loads((folder / "training_log.json").read_text())
    by_step = {e["step"]: e["eval_stsb_dev_spearman"] for e in log if "eval_stsb_dev_spearman" in e}
    evaluator = StsEvaluator(*read_sts_file(inputs["sts"]), name="stsb_dev")
    exported = evaluator(SentenceTransformer(str(folder), device="cpu").encode)["stsb_dev_spearman"]
    assert exported == pytest.approx(results["after"]["stsb_dev_spearman"], abs=1e-3)
    best = max(by_step, key=by_step.get)
    assert results["best_step"] == best
    assert results["after"]["stsb_dev_spearman"] == pytest.approx(by_step[best], abs=1e-6)
    assert len(set(by_step.values())) > 1
    exported = load_file(folder / "model.safetensors")
    saved = load_file(folder / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(value, saved[f"roberta.{name}"]) for name, value in exported.items())


@pytest.mark.slow
def test_card_states_the_measured_numbers_and_no_training_text(finished, sentences):
    folder, _ = finished
    card = (folder / "README.md").read_text()
    results = json.loads((folder / "run_results.json").read_text())
    for metrics in (results["before"], results["after"]):
        assert f"{metrics['stsb_dev_spearman']:.3f}" in card
    assert f"value: {round(results['after']['stsb_dev_spearman'], 4)}" in card
    assert "run_vascl.py" in card and "zhang-etal-2022" in card and "my-model" in card
    assert not any(sentence in card for sentence in sentences)
    assert str(folder.parent) not in card.split("## How it was made")[0]
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0 and "tensor" in done.stdout, done.stderr


@pytest.mark.slow
def test_run_killed_with_sigkill_resumes_to_the_same_weights(finished, inputs, tmp_path):
    folder = tmp_path / "killed"
    arguments = ["--config", str(inputs["config"]), "--output_dir", str(folder), "--show_searches", "False"]
    process = script("run_vascl.py", *arguments)
    deadline = time.monotonic() + 200
    while not (folder / "checkpoint-6").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (folder / "run_results.json").exists()
    process = script("run_vascl.py", *arguments, "--resume_from_checkpoint", "True")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-4000:]
    whole, resumed = (torch.load(f / "checkpoint-12" / "optimizer.pt")["state"] for f in (finished[0], folder))
    assert all(torch.equal(whole[key]["exp_avg"], resumed[key]["exp_avg"]) for key in whole) and len(whole) > 10
    for name in ("model.safetensors", "checkpoint-12/model.safetensors"):
        expected, found = load_file(finished[0] / name), load_file(folder / name)
        assert all(torch.equal(expected[key], found[key]) for key in expected) and expected.keys() == found.keys()


@pytest.mark.slow
def test_two_processes_use_the_global_batch_and_write_one_set_of_files(inputs, tmp_path):
    folder = tmp_path / "two"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"),
            *(str(REPOSITORY / "examples" / "run_vascl.py"), "--config", str(inputs["config"])),
            *("--output_dir", str(folder), "--show_searches", "False", "--max_steps", "3"),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stderr.count("Training in 2 process(es) of 1 thread(s), 16 texts in each global batch") == 1
    results = json.loads((folder / "run_results.json").read_text())
    assert (results["processes"], results["texts_per_batch"], results["steps"]) == (2, 16, 3)
    assert process.stdout.count("| before |") == 1
    assert SentenceTransformer(str(folder), device="cpu").encode(["a"]).shape == (1, 32)
    assert "torchrun --nproc_per_node 2" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_script_ends_with_a_message_and_keeps_the_folder(finished, inputs):
    folder, _ = finished
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    process = script("run_simcse.py", "--config", str(inputs["config"]), "--output_dir", str(folder))
    _, errors = process.communicate(timeout=200)
    last = errors.strip().splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in errors
    assert last.startswith("FileExistsError") and "is not empty" in last and "--overwrite_output_dir" in last
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def run(inputs, folder, model=None, data=None, objective=None, **training):
    options = dict(
        output_dir=str(folder), global_batch_size=16, max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    ) | training  # fmt: skip
    return run_training(
        "SimCSE",
        ModelArguments(**{"model_name_or_path": str(inputs["backbone"])} | (model or {})),
        DataArguments(
            **{"train_file": [str(inputs["train"])], "eval_sts_file": str(inputs["sts"]), "max_length": 24}
            | (data or {})
        ),
        ContrastiveConfig(**{"num_neighbors": 4} | (objective or {})),
        ContrastiveTrainingArguments(**options),
    )


@pytest.mark.parametrize("pooling", ["cls", "avg_first_last"])
def test_info_nce_with_other_poolings_exports_what_it_trained(inputs, tmp_path, pooling):
    objective = {"pooling": pooling, "head": "none", "loss": "info_nce", "neighborhood_weight": 0.0}
    result, trainer = run(inputs, tmp_path / "m", objective=objective, learning_rate=1e-2)
    exported = SentenceTransformer(result.output_dir, device="cpu")
    texts = ["The cat saw a red boat.", "Nine apples."]
    tokens = trainer.processing_class(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        live = trainer.model.eval()(tokens["input_ids"], tokens["attention_mask"]).embeddings
    torch.testing.assert_close(torch.from_numpy(exported.encode(texts)), live, atol=1e-6, rtol=1e-5)
    assert result.before != result.after
    assert "gao-etal-2021-simcse" in (tmp_path / "m" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": {"train_file": ["nothing-here.txt"]}}, FileNotFoundError, "nothing-here.txt"),
        ({"data": {"max_length": 63}}, ValueError, "--max_length 63 is out of range.*3 to 62 tokens"),
        ({"data": {"max_seq_length": 500}}, ValueError, "--max_seq_length 500 is out of range"),
        ({"model": {"model_name_or_path": "no/such-model"}}, FileNotFoundError, "no/such-model is neither a folder"),
        ({"model": {"dropout": 0.0}}, ValueError, "drops nothing in training"),
        ({"objective": {"num_neighbors": 16}}, ValueError, "num_neighbors=16 needs at least 17"),
        ({"data": {"eval_sts_file": "nowhere.tsv"}}, FileNotFoundError, "nowhere.tsv"),
        ({"max_steps": -1, "num_train_epochs": 0.0}, ValueError, "No step was taken"),
        ({"data": {"max_train_samples": 1}}, ValueError, "--max_train_samples 1"),
        (
            {"metric_for_best_model": "stsb_accuracy", "greater_is_better": True},
            ValueError,
            "'stsb_accuracy' is not measured; there are: stsb_dev_spearman",
        ),
    ],
)
def test_unusable_input_is_named_before_anything_is_written(inputs, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        run(inputs, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_texts_that_are_equal_once_cut_off_are_refused_or_warned_of(inputs, tmp_path, caplog):
    same, half = tmp_path / "same.txt", tmp_path / "half.txt"
    beginning = "The same long beginning of every text there is, "
    same.write_text("".join(f"{beginning}{i}\n" for i in range(40)))
    half.write_text(same.read_text() + inputs["train"].read_text())
    with pytest.raises(ValueError, match="All 40 texts are the same tokens at --max_length 8"):
        run(inputs, tmp_path / "a", data={"train_file": [str(same)], "max_length": 8})
    run(inputs, tmp_path / "b", data={"train_file": [str(half)], "max_length": 8})
    assert re.search(r"\d\d\.\d% of the texts equal another one at --max_length 8", caplog.text)


def test_unsupported_backbone_names_the_supported_ones(tmp_path, tiny_tokenizer):
    config = tiny_config("bert").to_dict() | {"model_type": "distilbert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'distilbert' model.*bert, roberta"):
        load_model(ModelArguments(model_name_or_path=str(tmp_path)), ContrastiveConfig())


def test_overwriting_replaces_checkpoints_and_leaves_other_files(inputs, tmp_path):
    folder = tmp_path / "out"
    (folder / "checkpoint-900").mkdir(parents=True)
    (folder / "checkpoint-mine").mkdir()
    (folder / "notes.txt").write_text("mine")
    options = dict(save_strategy="steps", save_steps=1)
    with pytest.raises(FileExistsError, match="is not empty"):
        run(inputs, folder, **options)
    with pytest.raises(ValueError, match="--max_length 63"):  # a mistake costs nothing that was there
        run(inputs, folder, data={"max_length": 63}, overwrite_output_dir=True, **options)
    with pytest.raises(ValueError, match="'nonsense' is not measured"):
        wrong = dict(metric_for_best_model="nonsense", greater_is_better=True)
        run(inputs, folder, overwrite_output_dir=True, **wrong, **options)
    with pytest.raises(ValueError, match="would delete .*the model to start from"):
        run(inputs, folder, model={"model_name_or_path": str(folder / "x")}, overwrite_output_dir=True, **options)
    assert (folder / "checkpoint-900").exists()
    run(inputs, folder, overwrite_output_dir=True, **options)
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2", "checkpoint-mine"]
    assert not list(folder.glob(".*"))
    assert (folder / "notes.txt").read_text() == "mine"


def test_resuming_elsewhere_needs_an_empty_folder(inputs, tmp_path):
    options = dict(save_strategy="steps", save_steps=1)
    run(inputs, tmp_path / "first", **options)
    checkpoint = str(tmp_path / "first" / "checkpoint-1")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        run(inputs, tmp_path / "second", resume_from_checkpoint=checkpoint, **options)
    result, _ = run(inputs, tmp_path / "third", resume_from_checkpoint=checkpoint, **options)
    assert (result.resumed_from, result.steps) == (1, 2)
    assert "since it was resumed at step 1" in (tmp_path / "third" / "README.md").read_text()
    first, third = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "third"))
    assert all(torch.equal(first[key], third[key]) for key in first)


def test_other_settings_than_the_checkpoints_are_warned_of(inputs, tmp_path, caplog):
    result, trainer = run(inputs, tmp_path / "first", objective={"pooling": "max"})
    trainer.model.save_pretrained(tmp_path / "saved")
    trainer.processing_class.save_pretrained(tmp_path / "saved")
    caplog.clear()
    load_model(ModelArguments(model_name_or_path=str(tmp_path / "saved")), ContrastiveConfig())
    assert "pooling: max -> mean" in caplog.text


def test_command_in_the_card_holds_no_token(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    from common import command_line

    arguments = ["run.py", "--token", "hf_secret", "--hub_token=hf_secret", "--hub-token", "hf_secret", "--seed", "3"]
    line = command_line(arguments, processes=1)
    assert "secret" not in line and line.startswith("accelerate launch run.py --token ...") and "--seed 3" in line
    assert command_line(["run.py"], processes=2) == "torchrun --nproc_per_node 2 run.py"


def test_second_run_in_one_folder_is_refused_and_harms_nothing(inputs, tmp_path):
    folder = tmp_path / "out"
    args = ContrastiveTrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
    prepare_output_dir(args)
    with only_writer(args):
        (folder / ".saving-checkpoint-4").mkdir()
        with pytest.raises(FileExistsError, match="Another run is writing into"):
            run(inputs, folder, overwrite_output_dir=True)
        with pytest.raises(FileExistsError, match="is not empty"):
            run(inputs, folder)
        assert (folder / ".saving-checkpoint-4").is_dir()
    assert not list(folder.glob("*.lock"))


def test_backbone_with_missing_or_damaged_weights_is_refused(inputs, tmp_path):
    shutil.copytree(inputs["backbone"], tmp_path / "copy")
    path = tmp_path / "copy" / "model.safetensors"
    weights = {key: value for key, value in load_file(path).items() if "layer.1.output" not in key}
    save_file(weights, path, metadata={"format": "pt"})
    arguments = ModelArguments(model_name_or_path=str(tmp_path / "copy"))
    with pytest.raises(ValueError, match="lacks weights of its roberta backbone.*layer.1.output"):
        load_model(arguments, ContrastiveConfig())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="are damaged or do not fit"):
        load_model(arguments, ContrastiveConfig())


def test_output_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    for name in ("out", "out/below"):
        with pytest.raises(NotADirectoryError, match="there is a file in its place"):
            prepare_output_dir(ContrastiveTrainingArguments(output_dir=str(tmp_path / name), report_to="none"))


def test_shipped_backbone_is_what_the_demo_needs():
    folder = REPOSITORY / "model_cards" / "csl-tiny-roberta"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    model, tokenizer = load_model(ModelArguments(model_name_or_path=str(folder)), ContrastiveConfig())
    assert sum(p.numel() for p in model.base_model.parameters()) == pytest.approx(5.3e6, rel=0.05)
    assert Path(folder / "model.safetensors").stat().st_size < 25e6
    assert tokenizer.model_max_length == 128
