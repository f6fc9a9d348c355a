"""Training checkpoints that are whole or not there: staging, identity of a run, choice of the folder to resume."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, SchedulerType
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_NAME

from csl_hf.arguments import ContrastiveTrainingArguments
from csl_hf.files import STAGING_PREFIX
from csl_hf.modeling import DROPOUT_NAMES

RUN_IDENTITY_NAME = "csl_hf_run.json"
OUTDATED_PREFIX = ".replaced-"
_OTHER_CHECKPOINT = "Name an earlier checkpoint-N folder with --resume_from_checkpoint, or start anew."


def staging_folder(checkpoint: str | Path) -> Path:
    """Where a checkpoint is written before it is renamed. The name matches no checkpoint pattern."""
    checkpoint = Path(checkpoint)
    return checkpoint.with_name(STAGING_PREFIX + checkpoint.name)


def publish(staging: Path, checkpoint: Path) -> None:
    """Flush every file of ``staging`` to the disk and give the folder its final name in one step."""
    for path in staging.rglob("*"):
        if path.is_file():
            _fsync(path)
    _fsync(staging)
    if checkpoint.exists():
        # Resumed before this step and arrived here again: the older folder goes only when the new one is whole.
        outdated = checkpoint.with_name(OUTDATED_PREFIX + checkpoint.name)
        shutil.rmtree(outdated, ignore_errors=True)
        os.replace(checkpoint, outdated)
        os.replace(staging, checkpoint)
        shutil.rmtree(outdated)
    else:
        os.replace(staging, checkpoint)
    _fsync(checkpoint.parent)


def remove_staging(output_dir: str | Path) -> None:
    """Delete what a killed run left half-written, and put back what it was about to replace."""
    folders = [path for path in Path(output_dir).glob(".*") if path.is_dir() and not path.is_symlink()]
    for path in folders:
        if path.name.startswith(STAGING_PREFIX):
            shutil.rmtree(path)
    for path in folders:
        if not path.name.startswith(OUTDATED_PREFIX):
            continue
        original = path.with_name(path.name.removeprefix(OUTDATED_PREFIX))
        if original.exists():
            shutil.rmtree(path)
        else:
            os.replace(path, original)


def run_identity(model: PreTrainedModel, dataset: Dataset, args: ContrastiveTrainingArguments) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run: architecture, data, and what decides the batches."""
    config = model.config
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", *DROPOUT_NAMES, "contrastive")
    digest = blake2b(digest_size=16)
    if "text_id" in dataset.column_names:
        for batch in dataset.select_columns("text_id").with_format("numpy").iter(batch_size=100_000):
            digest.update(np.ascontiguousarray(batch["text_id"]).tobytes())
    return {
        "model": {name: getattr(config, name, None) for name in names},
        "data": {"texts": len(dataset), "digest": digest.hexdigest()},
        "texts_per_batch": args.texts_per_batch,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "processes": args.world_size,
        "bucket_size": args.rows_per_bucket,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "learning_rates": [args.learning_rate, args.head_learning_rate, SchedulerType(args.lr_scheduler_type).value],
        "seed": [args.seed, args.data_seed],
    }


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: str | bool | None) -> str | None:
    """The folder to resume from, or None.

    Args:
        output_dir: the run's folder, searched when ``resume_from_checkpoint`` is True.
        resume_from_checkpoint: a checkpoint folder, a truth value (also as text), or None.

    Raises:
        FileNotFoundError: no checkpoint there, or a folder that is none.
    """
    if resume_from_checkpoint in (None, False) or str(resume_from_checkpoint).lower() in (
        "false",
        "none",
        "",
    ):
        return None
    if str(resume_from_checkpoint).lower() == "true":
        last = get_last_checkpoint(str(output_dir)) if Path(output_dir).is_dir() else None
        if last is None:
            raise FileNotFoundError(
                f"--resume_from_checkpoint: {output_dir} holds no checkpoint-N folder. Start without it, or name the "
                "folder of a checkpoint."
            )
        return last
    if not (Path(resume_from_checkpoint) / TRAINER_STATE_NAME).is_file():
        raise FileNotFoundError(
            f"--resume_from_checkpoint {resume_from_checkpoint} is no training checkpoint (it has no "
            f"{TRAINER_STATE_NAME}). Name a checkpoint-N folder, or give the argument as `True` to take the last one."
        )
    return str(resume_from_checkpoint)


def checkpoint_step(checkpoint: str | Path) -> int:
    """Optimiser steps taken when the checkpoint was written.

    Raises:
        ValueError: its state cannot be read.
    """
    return int(_read_json(Path(checkpoint) / TRAINER_STATE_NAME)["global_step"])


def check_whole(checkpoint: str | Path, processes: int) -> None:
    """Refuse a checkpoint that lacks a file which resuming needs, or holds a damaged one.

    Raises:
        ValueError: naming the file.
    """
    folder = Path(checkpoint)
    _read_json(folder / TRAINER_STATE_NAME)
    rng = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    if not (folder / OPTIMIZER_NAME).is_file():
        raise ValueError(
            f"{folder} has no {OPTIMIZER_NAME} (was it written with --save_only_model?), so the run cannot be "
            "continued from it. To start from its weights, give it as --model_name_or_path."
        )
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME, *rng):
        # torch.save writes zip archives, whose directory stands at the end.
        if not zipfile.is_zipfile(folder / name):
            raise ValueError(f"{folder / name} is missing or damaged. {_OTHER_CHECKPOINT}")
    try:
        with safe_open(folder / SAFE_WEIGHTS_NAME, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{folder / SAFE_WEIGHTS_NAME} is missing or damaged ({error}). {_OTHER_CHECKPOINT}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}). {_OTHER_CHECKPOINT}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object. {_OTHER_CHECKPOINT}")
    return value


def check_identity(checkpoint: str | Path, identity: dict[str, Any]) -> None:
    """Refuse to resume another model's or another data set's run.

    Raises:
        ValueError: naming each difference, old and new.
    """
    path = Path(checkpoint) / RUN_IDENTITY_NAME
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} has no {RUN_IDENTITY_NAME}: it was not written by a csl_hf training run and cannot be "
            "resumed. To start from its weights, give it as --model_name_or_path."
        )
    saved = _read_json(path)
    current = json.loads(json.dumps(identity))
    differences = [
        f"{key}: {saved.get(key)} then, {current[key]} now" for key in current if saved.get(key) != current[key]
    ]
    if differences:
        raise ValueError(
            f"{checkpoint} belongs to another run and cannot be resumed with these arguments. "
            + "; ".join(differences)
            + ". Give the same arguments as then, or start anew in another --output_dir."
        )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
