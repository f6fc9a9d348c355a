"""What the training scripts share: arguments, the run, and what a person sees at its end."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path

import datasets
import transformers
from transformers.trainer_utils import is_main_process

from csl_hf import SentenceTransformer
from csl_hf.arguments import ContrastiveTrainingArguments, DataArguments, ModelArguments, parse_arguments
from csl_hf.configuration import ContrastiveConfig
from csl_hf.data import load_texts
from csl_hf.evaluation.report import markdown_table
from csl_hf.recipe import run_training

ARGUMENTS = (ModelArguments, DataArguments, ContrastiveConfig, ContrastiveTrainingArguments)
QUERIES = ("open a file and read it", "turn text into numbers", "wait until a process has ended")
SEARCHED_TEXTS = 5000


def main(method: str, default_config: Path, description: str) -> None:
    """Parse, train, report. An unusable argument or text source ends the script with its message, not a traceback."""
    try:
        arguments = parse_arguments(ARGUMENTS, default_config=default_config, description=description)
        model_args, data_args, objective, training_args = arguments
        set_verbosity(training_args)
        command = shlex.join(["accelerate", "launch", *sys.argv])
        result, trainer = run_training(method, model_args, data_args, objective, training_args, command)
    except (OSError, ValueError, FloatingPointError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if trainer.is_world_process_zero():
        report(result, data_args)


def set_verbosity(training_args: ContrastiveTrainingArguments) -> None:
    """Progress and messages of the main process only."""
    main_process = is_main_process(training_args.local_process_index)
    logging.basicConfig(format="%(message)s", level=logging.INFO if main_process else logging.ERROR)
    for name in ("httpx", "filelock", "fsspec", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if main_process:
        transformers.utils.logging.set_verbosity_info()
        logging.getLogger("transformers").setLevel(logging.WARNING)
    else:
        transformers.utils.logging.set_verbosity_error()
        datasets.utils.logging.set_verbosity_error()
        datasets.disable_progress_bars()


def report(result, data_args: DataArguments) -> None:
    """Metrics before and after, time, files, example searches."""
    print()
    if result.after:
        print(markdown_table({"before": result.before, "after": result.after}))
    print(
        f"\nTrained {result.steps} steps in {result.train_seconds / 60:.1f} minutes; "
        f"exported step {result.best_step} to {result.output_dir}"
    )
    if data_args.show_searches:
        show_searches(result.output_dir, data_args)
    print(f'\nUse it: SentenceTransformer("{result.output_dir}").encode(["..."])')


def show_searches(folder: str, data_args: DataArguments) -> None:
    """Nearest training texts of three queries, found with the folder that was just written."""
    model = SentenceTransformer.from_pretrained(folder)
    source = data_args.train_file if len(data_args.train_file) > 1 else data_args.train_file[0]
    texts = load_texts(
        source, text_column=data_args.text_column, split=data_args.train_split, encoding=data_args.encoding
    )
    texts = [text for text in texts[:SEARCHED_TEXTS]["text"] if text]
    embeddings = model.encode(texts, show_progress_bar=False)
    for query, scores in zip(QUERIES, model.similarity(model.encode(QUERIES), embeddings), strict=True):
        print(f"\n{query!r} finds")
        for score, index in zip(*scores.topk(min(3, len(texts))), strict=True):
            print(f"  {score:.2f}  {texts[index][:100]}")


if __name__ == "__main__":
    raise SystemExit("This module is imported by the run_*.py scripts.")
