"""Command-line and YAML arguments of the training scripts."""

from __future__ import annotations

import json
import sys
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool


@dataclass
class ModelArguments:
    """Which backbone to start from."""

    _argument_group_name = "model"

    model_name_or_path: str = field(
        default="roberta-base", metadata={"help": "Backbone or csl_hf checkpoint: a folder or a Hub id."}
    )
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads and tokenised texts are kept."})
    dropout: float | None = field(
        default=None,
        metadata={
            "help": "Dropout of the backbone in training; default: its own. The two views of a text differ by dropout "
            "alone, so a backbone without any needs a value here."
        },
    )
    token: str | None = field(default=None, metadata={"help": "Hub token; default: the one of `hf auth login`."})


@dataclass
class DataArguments:
    """Which texts to learn from, and what to measure on."""

    _argument_group_name = "data"

    train_file: list[str] = field(
        default_factory=lambda: ["builtin"],
        metadata={
            "help": "Unlabelled texts: .txt (one text a line), .csv, .tsv, .jsonl, .parquet, each also .gz; several "
            "files, a glob, a folder, a saved datasets folder, a Hub id, or `builtin` (the documentation of this "
            "Python installation, no download).",
            "nargs": "+",
        },
    )
    text_column: str | None = field(
        default=None,
        metadata={"help": "Column that holds the text; default: text, sentence, or the only one."},
    )
    train_split: str = field(default="train", metadata={"help": "Split of a data set with several."})
    encoding: str = field(default="utf-8", metadata={"help": "Character encoding of text files."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Use N of the texts, drawn at random, always the same."}
    )
    max_length: int = field(
        default=32,
        metadata={"help": "Tokens of a text that training sees (the papers: 32); the rest is cut off."},
    )
    preprocessing_num_workers: int = field(default=1, metadata={"help": "Processes that read and tokenise."})
    eval_sts_file: str | None = field(
        default=None,
        metadata={
            "help": "Pairs with a similarity score (columns sentence1, sentence2, score): a .tsv file or a Hub id such "
            "as sentence-transformers/stsb. Measured as STS-B dev Spearman, and picks the best checkpoint, "
            "as in the VaSCL paper. Without it, a retrieval task on held-out Python documentation is measured."
        },
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Tokens that the exported model reads; default: all its positions."}
    )
    show_searches: bool = field(
        default=True, metadata={"help": "Show three example searches with the trained model at the end."}
    )

    def __post_init__(self) -> None:
        if isinstance(self.train_file, str):  # `train_file: my.txt` in a YAML file
            self.train_file = [self.train_file]


@dataclass
class ContrastiveTrainingArguments(TrainingArguments):
    """``transformers.TrainingArguments`` plus what contrastive training needs.

    Defaults that differ from the parent: ``remove_unused_columns=False`` (the collator needs every column),
    ``logging_nan_inf_filter=False`` (a loss that is not finite stops the run), ``logging_steps=10``,
    ``ddp_find_unused_parameters=False`` (every parameter is used in every step), ``data_seed=seed``,
    ``use_cpu=True`` where there is no accelerator.

    Raises:
        ValueError: values that contradict each other, each with what to change.
    """

    _argument_group_name = "training (transformers.TrainingArguments, then csl_hf's own)"

    head_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the contrastive head (VaSCL: 5e-4); default: --learning_rate."},
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Texts in one batch over all processes: these are each other's negatives and neighbours (VaSCL: "
            "1024). Sets --per_device_train_batch_size. Gradient accumulation does not add negatives."
        },
    )
    bucket_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows of a step are sorted by length and go through the encoder in groups of this many, each only "
            "as wide as its longest row: the same embeddings with less padding. 0: all rows at once. Default: 32 on a "
            "CPU, where small groups also stay in its caches; 0 elsewhere."
        },
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Start anew in an output folder that is not empty, replacing what is there."},
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay False: the collator needs every column."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Must stay False: a loss that is not finite stops the run."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Log the losses and diagnostics every N steps."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "False: every parameter takes part in every step."}
    )

    def __post_init__(self) -> None:
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            raise ValueError(
                f"metric_for_best_model={self.metric_for_best_model!r} was given without a direction. Add "
                "--greater_is_better True if a higher value is better, False if a lower one is (e.g. uniformity)."
            )
        if self.greater_is_better is not None and self.metric_for_best_model is None:
            raise ValueError("greater_is_better was given without metric_for_best_model; name the metric as well.")
        for name, low in (("gradient_accumulation_steps", 1), ("bucket_size", 0), ("global_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value} must be at least {low}.")
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True would change the number of negatives behind your back. Leave it out and "
                "lower --global_batch_size instead."
            )
        if not torch.accelerator.is_available():
            # Otherwise accelerate leaves the processes of torchrun apart on such a machine, each training alone.
            self.use_cpu = True
        chosen = self.metric_for_best_model
        super().__post_init__()
        if chosen is None:
            # The parent falls back to the evaluation loss, which does not exist here: the trainer asks its evaluators.
            self.metric_for_best_model = self.greater_is_better = None
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # torch would warn that there is nothing to pin for
        if self.data_seed is None:
            self.data_seed = self.seed
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns=True would hide text_id and row from the collator; leave it out.")
        if self.global_batch_size is not None:
            if self.global_batch_size % self.world_size:
                raise ValueError(
                    f"global_batch_size={self.global_batch_size} cannot be divided among {self.world_size} processes; "
                    f"choose a multiple of {self.world_size}."
                )
            self.per_device_train_batch_size = self.global_batch_size // self.world_size

    @property
    def rows_per_bucket(self) -> int:
        """``bucket_size`` with its default resolved for this device."""
        if self.bucket_size is not None:
            return self.bucket_size
        return 32 if self.device.type == "cpu" else 0

    @property
    def texts_per_batch(self) -> int:
        """Texts that see each other as negatives: the batch of all processes, without accumulation."""
        return self.per_device_train_batch_size * self.world_size


def parse_arguments(
    dataclass_types: Sequence[type],
    arguments: Sequence[str] | None = None,
    default_config: str | Path | None = None,
    description: str | None = None,
) -> tuple[Any, ...]:
    """Instances of the dataclasses, from a YAML or JSON file and the command line; the command line wins.

    Args:
        dataclass_types: as for ``HfArgumentParser``.
        arguments: default ``sys.argv[1:]``. ``--config FILE`` (or a first argument that ends in .yaml, .yml or
            .json) names the file.
        default_config: file used when none is named.
        description: shown by ``--help``.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file cannot be parsed, is no mapping, has an empty value, or keys that no dataclass knows.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        arguments.insert(0, "--config")
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    repeated = sorted({name for name in given if given.count(name) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} is given twice. Put several values behind one: --train_file a b")
    config_parser = ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML or JSON file with any of the arguments below; the command line wins.",
    )
    config, arguments = config_parser.parse_known_args(arguments)
    parser = HfArgumentParser(
        dataclass_types,
        description=description,
        parents=[config_parser],
        usage="%(prog)s [--config FILE] [--argument VALUE ...]",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    path = config.config or default_config
    if path is not None:
        parser.set_defaults(**read_config(path, parser))
    return parser.parse_args_into_dataclasses(arguments)[: len(dataclass_types)]


def read_config(path: str | Path, parser: HfArgumentParser) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, checked against the parser's arguments."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--config {path} does not exist; expected a YAML or JSON file of arguments.")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} holds a {type(values).__name__}; expected `argument: value` lines.")
    actions = {action.dest: action for action in parser._actions}
    unknown = sorted(map(str, set(values) - (set(actions) - {"config", "help"})))
    if unknown:
        raise ValueError(f"--config {path} has unknown arguments: {', '.join(unknown)}. `--help` lists the known ones.")
    return {name: _as_typed(value, actions[name], f"--config {path}, {name}") for name, value in values.items()}


def _as_typed(value: Any, action: Action, where: str) -> Any:
    """What the command line would give for the same value."""
    if value is None and action.default is not None:
        raise ValueError(f"{where}: the value is empty. Give one, or leave the line out.")
    if value is False and action.choices is not None and "no" in action.choices:
        return "no"  # YAML reads a bare `no` as false
    takes_boolean = isinstance(action.default, bool) or action.type is string_to_bool
    if isinstance(value, bool) and not takes_boolean:
        raise ValueError(f"{where}: {value} is a truth value; expected {_name(action.type)}. Quote it if it is a word.")
    if isinstance(value, list) and (action.nargs not in ("+", "*") or not value):
        raise ValueError(f"{where}: got the list {value}; expected {_name(action.type)}.")
    # argparse converts and checks defaults only if they are strings.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", "a value")
