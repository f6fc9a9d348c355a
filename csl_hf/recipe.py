"""The whole job of a training script: texts in, a measured SentenceTransformer folder with a model card out."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, set_seed

from csl_hf.arguments import ContrastiveTrainingArguments, DataArguments, ModelArguments
from csl_hf.configuration import ContrastiveConfig
from csl_hf.data import CleaningReport, clean_texts, load_texts, take_samples, tokenize_texts
from csl_hf.export import default_max_seq_length, save_sentence_transformer
from csl_hf.files import write_json
from csl_hf.model_card import ModelCardSettings, write_model_card
from csl_hf.modeling import AutoModelForContrastiveLearning, set_dropout
from csl_hf.output_folder import clear_output_dir, only_writer, prepare_output_dir
from csl_hf.trainer import ContrastiveTrainer, Evaluator

logger = logging.getLogger(__name__)

BUILTIN = "builtin"


@dataclass
class RunResult:
    """What a training run leaves, also written to ``run_results.json`` in its folder.

    Attributes:
        output_dir: the SentenceTransformer folder.
        before, after: metrics of the backbone and of the exported model.
        data: counts of the cleaning, and the share of truncated texts.
        train_seconds: time of the training loop, with its evaluations and checkpoints, since the start or the resume.
        steps: optimiser steps of the whole run.
        resumed_from: step of the checkpoint that it was resumed from, 0 if it was not.
        best_step: optimiser step of the exported weights.
        texts_per_batch, processes: size of the global batch, and of how many processes.
        settings: every argument of the run.
    """

    output_dir: str
    before: dict[str, float]
    after: dict[str, float]
    data: dict[str, Any]
    train_seconds: float
    steps: int
    resumed_from: int
    best_step: int
    texts_per_batch: int
    processes: int
    settings: dict[str, Any] = field(default_factory=dict)


def run_training(
    method: str,
    model_args: ModelArguments,
    data_args: DataArguments,
    objective: ContrastiveConfig,
    training_args: ContrastiveTrainingArguments,
    command: str | None = None,
) -> tuple[RunResult, ContrastiveTrainer]:
    """Load, train, measure before and after, export.

    Args:
        method: name for the model card, e.g. ``VaSCL``.
        model_args, data_args, objective, training_args: the parsed arguments.
        command: the command line that reproduces the run, for the model card.

    Returns:
        The result and the trainer, whose model holds the exported weights.

    Raises:
        FileExistsError: an output folder that is not empty, without overwrite or resume.
        ValueError, FileNotFoundError: unusable arguments or data, each with what to change.
        FloatingPointError: training diverged.
    """
    with training_args.main_process_first(desc="looking at the output folder"):
        prepare_output_dir(training_args, model_args.model_name_or_path)
    with only_writer(training_args):
        return _run_in_prepared_folder(method, model_args, data_args, objective, training_args, command)


def _run_in_prepared_folder(
    method: str,
    model_args: ModelArguments,
    data_args: DataArguments,
    objective: ContrastiveConfig,
    training_args: ContrastiveTrainingArguments,
    command: str | None,
) -> tuple[RunResult, ContrastiveTrainer]:
    set_seed(training_args.seed)
    trainer, report = build_trainer(model_args, data_args, objective, training_args)
    before = trainer.measure()
    check_metric(training_args, before)
    checkpoint = trainer.checkpoint_to_resume(training_args.resume_from_checkpoint)
    # Nothing is deleted before every check has passed.
    if training_args.overwrite_output_dir and training_args.should_save:
        clear_output_dir(training_args)
    start = time.perf_counter()
    output = trainer.train(resume_from_checkpoint=checkpoint)
    train_seconds = round(time.perf_counter() - start, 1)
    if output.global_step == 0:
        raise ValueError(
            f"No step was taken: max_steps={training_args.max_steps}, "
            f"num_train_epochs={training_args.num_train_epochs}, {len(trainer.train_dataset)} texts in batches of "
            f"{training_args.texts_per_batch}. Nothing was exported."
        )
    result = RunResult(
        output_dir=str(training_args.output_dir),
        before=before,
        after=trainer.measure(),
        data={"source": data_args.train_file, **report.to_dict()},
        train_seconds=train_seconds,
        steps=output.global_step,
        resumed_from=trainer.resumed_from,
        best_step=trainer.loaded_step(),
        texts_per_batch=training_args.texts_per_batch,
        processes=training_args.world_size,
        settings={
            "method": method,
            "model": asdict(model_args) | {"token": None},
            "data": asdict(data_args),
            "objective": objective.to_dict(),
            "training": training_args.to_sanitized_dict(),
        },
    )
    if trainer.is_world_process_zero():
        save_run(result, trainer, method, command)
    trainer.accelerator.wait_for_everyone()
    return result, trainer


def build_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    objective: ContrastiveConfig,
    training_args: ContrastiveTrainingArguments,
) -> tuple[ContrastiveTrainer, CleaningReport]:
    """Model, texts and evaluators, read by the main process first, and the trainer around them."""
    with training_args.main_process_first(desc="reading and tokenising the texts"):
        model, tokenizer = load_model(model_args, objective)
        check_max_length(data_args, model.config, tokenizer)
        dataset, report = load_dataset(data_args, model_args, tokenizer)
        evaluators = build_evaluators(data_args, model_args.cache_dir)
    trainer = ContrastiveTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        evaluators=evaluators,
        max_seq_length=data_args.max_seq_length,
    )
    return trainer, report


def check_metric(training_args: ContrastiveTrainingArguments, measured: dict[str, float]) -> None:
    """Refuse a metric that no evaluation gives, before training and not after it.

    Raises:
        ValueError: naming those that there are.
    """
    metric = training_args.metric_for_best_model
    if metric is not None and metric.removeprefix("eval_") not in measured:
        raise ValueError(
            f"metric_for_best_model={metric!r} is not measured; there are: {', '.join(measured) or 'no metrics'}."
        )


def load_model(model_args: ModelArguments, objective: ContrastiveConfig):
    """Model in float32 and tokenizer.

    Raises:
        FileNotFoundError: neither a folder nor a model that the Hub gives.
        ValueError: an unsupported backbone.
    """
    hub = {"revision": model_args.revision, "cache_dir": model_args.cache_dir, "token": model_args.token}
    name = model_args.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(name, **hub)
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
    except (OSError, json.JSONDecodeError) as error:
        raise FileNotFoundError(
            f"--model_name_or_path {name} is neither a folder with a transformers model (config.json, weights, "
            f"tokenizer) nor a model that the Hub gives. The loader said: {error}"
        ) from error
    if model_args.dropout is not None:
        set_dropout(config, model_args.dropout)
    saved = getattr(config, "contrastive", None) or {}
    changed = [f"{k}: {saved[k]} -> {v}" for k, v in objective.to_dict().items() if k in saved and saved[k] != v]
    if changed:
        logger.warning(f"{name} was trained with other settings than this run: {', '.join(changed)}.")
    try:
        model, loading = AutoModelForContrastiveLearning.from_pretrained(
            name, config=config, contrastive=objective, output_loading_info=True, **hub
        )
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"The weights of {name} are damaged or do not fit its configuration (a csl_hf checkpoint needs the "
            f"--projection_dim it was made with). The loader said: {error}"
        ) from error
    missing = sorted(key for key in loading["missing_keys"] if not key.startswith("head."))
    if missing:
        raise ValueError(
            f"{name} lacks weights of its {config.model_type} backbone, which would be random: {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}. Give a folder that transformers' AutoModel loads completely."
        )
    return model, tokenizer


def check_max_length(data_args: DataArguments, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse lengths beyond the backbone's positions.

    Raises:
        ValueError: naming the argument and the limit.
    """
    limit = default_max_seq_length(config, tokenizer)
    for name in ("max_length", "max_seq_length"):
        length = getattr(data_args, name)
        if length is not None and not 3 <= length <= limit:
            raise ValueError(
                f"--{name} {length} is out of range: this backbone reads 3 to {limit} tokens (start and end included)."
            )


def read_source(data_args: DataArguments, cache_dir: str | None = None) -> Dataset:
    """The texts of ``--train_file`` as they are, before cleaning."""
    return load_texts(
        data_args.train_file,
        text_column=data_args.text_column,
        split=data_args.train_split,
        encoding=data_args.encoding,
        cache_dir=cache_dir,
        num_proc=data_args.preprocessing_num_workers,
    )


def load_dataset(
    data_args: DataArguments, model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, CleaningReport]:
    """Read, clean, cut to ``max_train_samples`` and tokenise the training texts."""
    workers = data_args.preprocessing_num_workers
    texts = read_source(data_args, model_args.cache_dir)
    texts, report = clean_texts(texts)
    # Drawn at random, because sources are often in some order (the built-in corpus in that of module names).
    texts = take_samples(texts, data_args.max_train_samples, seed=0)
    if len(texts) < 2:
        raise ValueError(
            f"--max_train_samples {data_args.max_train_samples} leaves nothing to contrast; use 2 or more."
        )
    dataset, report.truncated = tokenize_texts(
        texts, tokenizer, data_args.max_length, num_proc=workers, cache_dir=model_args.cache_dir
    )
    report.max_length = data_args.max_length
    check_distinct(dataset, data_args)
    logger.info(f"Training texts: {report.summary()}")
    return dataset, report


def check_distinct(dataset: Dataset, data_args: DataArguments) -> None:
    """Texts that are equal once they are cut off cannot be told apart, and are never each other's negatives.

    Raises:
        ValueError: all are equal.
    """
    distinct = len(np.unique(dataset.with_format("numpy")["text_id"]))
    if distinct < 2:
        raise ValueError(
            f"All {len(dataset)} texts are the same tokens at --max_length {data_args.max_length}. Raise it, or check "
            "that the model's folder holds its tokenizer."
        )
    repeated = 1 - distinct / len(dataset)
    if repeated > 0.01:
        logger.warning(f"{repeated:.1%} of the texts equal another one at --max_length {data_args.max_length}.")


def build_evaluators(data_args: DataArguments, cache_dir: str | None = None) -> dict[str, Evaluator]:
    """STS if a file is given; retrieval on held-out documentation for the built-in corpus. The first picks the best."""
    from csl_hf.builtin_corpus import load_builtin_retrieval
    from csl_hf.evaluation import RetrievalEvaluator, StsEvaluator, load_sts

    evaluators: dict[str, Evaluator] = {}
    if data_args.eval_sts_file is not None:
        name = sts_name(data_args.eval_sts_file)
        evaluators[name] = StsEvaluator(*load_sts(data_args.eval_sts_file), name=name)
    if data_args.eval_sts_file is None or BUILTIN in data_args.train_file:
        pairs = load_builtin_retrieval(num_proc=data_args.preprocessing_num_workers, cache_dir=cache_dir)
        evaluators["retrieval"] = RetrievalEvaluator(pairs.queries, pairs.documents, name="retrieval")
    return evaluators


def sts_name(source: str) -> str:
    """Name of its metric: ``stsb_dev`` for ``.../stsb-dev.tsv`` and for the Hub's ``sentence-transformers/stsb``."""
    if Path(source).exists():
        return re.sub(r"\W+", "_", Path(source).name.split(".")[0])
    return re.sub(r"\W+", "_", source.split("/")[-1]) + "_dev"


def save_run(result: RunResult, trainer: ContrastiveTrainer, method: str, command: str | None) -> None:
    """Write the SentenceTransformer folder, the log, its plot, the results and the model card."""
    from csl_hf.evaluation.report import plot_training_log

    folder = Path(result.output_dir)
    save_sentence_transformer(trainer.model, trainer.processing_class, folder, max_seq_length=trainer.max_seq_length)
    write_json(folder / "training_log.json", trainer.state.log_history)
    write_json(folder / "run_results.json", asdict(result))
    write_model_card(folder, ModelCardSettings.from_run(result, method, command))
    plot_training_log(trainer.state.log_history, folder / "training_log.png")
