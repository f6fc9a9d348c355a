"""The folder that a run writes into: never somebody else's, never two runs at once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from csl_hf.arguments import ContrastiveTrainingArguments
from csl_hf.checkpoints import find_checkpoint, remove_staging

LOCK_NAME = ".csl_hf.lock"


def prepare_output_dir(training_args: ContrastiveTrainingArguments, model_name_or_path: str = "") -> None:
    """Refuse to write into somebody's folder; make it otherwise.

    Raises:
        FileExistsError: it is not empty, and neither overwrite nor resume was asked for.
        FileNotFoundError: there is nothing to resume from.
        NotADirectoryError: it, or a folder above it, is a file.
        ValueError: overwriting it would delete the model to start from.
    """
    folder = Path(training_args.output_dir)
    continues = continues_in(training_args)
    is_used = folder.is_dir() and any(path.name != LOCK_NAME for path in folder.iterdir())
    if is_used and not continues and not training_args.overwrite_output_dir:
        raise FileExistsError(
            f"--output_dir {folder} is not empty. Name another folder, continue the run in it with "
            "--resume_from_checkpoint True, or replace it with --overwrite_output_dir."
        )
    if training_args.overwrite_output_dir and folder.resolve() in Path(model_name_or_path).resolve().parents:
        raise ValueError(
            f"--overwrite_output_dir would delete {model_name_or_path}, the model to start from. Name another folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"--output_dir {folder} cannot be a folder: there is a file in its place.") from error


@contextmanager
def only_writer(training_args: ContrastiveTrainingArguments) -> Iterator[None]:
    """Hold the output folder, so that two runs never write into one. The system frees it when a process dies.

    Raises:
        FileExistsError: another run holds it.
    """
    if not training_args.should_save:
        yield
        return
    path = Path(training_args.output_dir) / LOCK_NAME
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FileExistsError(
            f"Another run is writing into --output_dir {training_args.output_dir}. Wait for its end, or name another."
        ) from error
    try:
        remove_staging(training_args.output_dir)
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def continues_in(training_args: ContrastiveTrainingArguments) -> bool:
    """Whether the run resumes from a checkpoint in its own output folder."""
    checkpoint = find_checkpoint(training_args.output_dir, training_args.resume_from_checkpoint)
    return checkpoint is not None and Path(checkpoint).resolve().parent == Path(training_args.output_dir).resolve()


def clear_output_dir(training_args: ContrastiveTrainingArguments) -> None:
    """Delete an earlier run's checkpoints, which a new run would mix up with its own. Other files stay."""
    if continues_in(training_args):
        return
    for path in Path(training_args.output_dir).iterdir():
        is_checkpoint = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name)
        if is_checkpoint and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
