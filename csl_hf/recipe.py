"""The whole job of a training script: texts in, a measured SentenceTransformer folder with a model card out."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, set_seed

from csl_hf.arguments import ContrastiveTrainingArguments, DataArguments, ModelArguments
from csl_hf.checkpoints import OUTDATED_PREFIX, STAGING_PREFIX, find_checkpoint, write_json
from csl_hf.configuration import ContrastiveConfig
from csl_hf.data import CleaningReport, clean_texts, load_texts, take_samples, tokenize_texts
from csl_hf.export import default_max_seq_length, save_sentence_transformer
from csl_hf.model_card import ModelCardSettings, write_model_card
from csl_hf.modeling import AutoModelForContrastiveLearning, set_dropout
from csl_hf.trainer import ContrastiveTrainer, Evaluator

logger = logging.getLogger(__name__)

BUILTIN = "builtin"


@dataclass
class RunResult:
    """What a training run leaves, also written to ``run_results.json`` in its folder.

    Attributes:
        output_dir: the SentenceTransformer folder.
        before, after: metrics of the backbone and of the trained model, without the ``eval_`` prefix.
        data: counts of the cleaning, and the share of truncated texts.
        train_seconds: time of the training loop, with its evaluations and checkpoints.
        best_step: optimiser step of the exported weights.
        settings: every argument of the run.
    """

    output_dir: str
    before: dict[str, float]
    after: dict[str, float]
    data: dict[str, Any]
    train_seconds: float
    steps: int
    best_step: int
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
    """
    prepare_output_dir(training_args)
    set_seed(training_args.seed)
    model, tokenizer = load_model(model_args, objective)
    check_max_length(data_args, model.config, tokenizer)
    with training_args.main_process_first(desc="reading and tokenising the texts"):
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
    if training_args.overwrite_output_dir and training_args.should_save:
        clear_output_dir(training_args)
    before = _metrics(trainer.evaluate()) if evaluators else {}
    start = time.perf_counter()
    output = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    train_seconds = time.perf_counter() - start
    after = _metrics(trainer.evaluate()) if evaluators else {}
    best = trainer.state.best_global_step if training_args.load_best_model_at_end else None
    result = RunResult(
        output_dir=str(training_args.output_dir),
        before=before,
        after=after,
        data={"source": data_args.train_file, **report.to_dict()},
        train_seconds=round(train_seconds, 1),
        steps=output.global_step,
        best_step=best or output.global_step,
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


def prepare_output_dir(training_args: ContrastiveTrainingArguments) -> None:
    """Refuse to write into somebody's folder.

    Raises:
        FileExistsError: it is not empty, and neither overwrite nor resume was asked for.
        FileNotFoundError: there is nothing to resume from.
        NotADirectoryError: it is a file.
    """
    folder = Path(training_args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output_dir {folder} is a file; name a folder.")
    if find_checkpoint(folder, training_args.resume_from_checkpoint) is not None:
        return
    if folder.is_dir() and any(folder.iterdir()) and not training_args.overwrite_output_dir:
        raise FileExistsError(
            f"--output_dir {folder} is not empty. Name another folder, continue the run in it with "
            "--resume_from_checkpoint True, or replace it with --overwrite_output_dir."
        )


def clear_output_dir(training_args: ContrastiveTrainingArguments) -> None:
    """Delete an earlier run's checkpoints, which a new run would mix up with its own. Other files stay."""
    if find_checkpoint(training_args.output_dir, training_args.resume_from_checkpoint) is not None:
        return
    folder = Path(training_args.output_dir)
    for pattern in ("checkpoint-*", STAGING_PREFIX + "*", OUTDATED_PREFIX + "*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


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
    except OSError as error:
        raise FileNotFoundError(
            f"--model_name_or_path {name} is neither a folder with a transformers model (config.json, weights, "
            f"tokenizer) nor a model that the Hub gives. The loader said: {error}"
        ) from error
    if model_args.dropout is not None:
        set_dropout(config, model_args.dropout)
    model = AutoModelForContrastiveLearning.from_pretrained(name, config=config, contrastive=objective, **hub)
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


def load_dataset(
    data_args: DataArguments, model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, CleaningReport]:
    """Read, clean, cut to ``max_train_samples`` and tokenise the training texts."""
    workers = data_args.preprocessing_num_workers
    texts = load_texts(
        data_args.train_file if len(data_args.train_file) > 1 else data_args.train_file[0],
        text_column=data_args.text_column,
        split=data_args.train_split,
        encoding=data_args.encoding,
        cache_dir=model_args.cache_dir,
        num_proc=workers,
    )
    texts, report = clean_texts(texts)
    texts = take_samples(texts, data_args.max_train_samples)
    dataset, report.truncated = tokenize_texts(
        texts, tokenizer, data_args.max_length, num_proc=workers, cache_dir=model_args.cache_dir
    )
    report.max_length = data_args.max_length
    logger.info(f"Training texts: {report.summary()}")
    return dataset, report


def build_evaluators(data_args: DataArguments, cache_dir: str | None = None) -> dict[str, Evaluator]:
    """STS if a file is given; retrieval on held-out documentation for the built-in corpus. The first picks the best."""
    from csl_hf.builtin_corpus import load_builtin_retrieval
    from csl_hf.evaluation import RetrievalEvaluator, StsEvaluator, load_sts

    evaluators: dict[str, Evaluator] = {}
    if data_args.eval_sts_file is not None:
        evaluators["stsb_dev"] = StsEvaluator(*load_sts(data_args.eval_sts_file), name="stsb_dev")
    if data_args.eval_sts_file is None or BUILTIN in data_args.train_file:
        pairs = load_builtin_retrieval(num_proc=data_args.preprocessing_num_workers, cache_dir=cache_dir)
        evaluators["retrieval"] = RetrievalEvaluator(pairs.queries, pairs.documents, name="retrieval")
    return evaluators


def save_run(result: RunResult, trainer: ContrastiveTrainer, method: str, command: str | None) -> None:
    """Write the SentenceTransformer folder, the log, its plot, the results and the model card."""
    from csl_hf.evaluation.report import plot_training_log

    folder = Path(result.output_dir)
    save_sentence_transformer(trainer.model, trainer.processing_class, folder, max_seq_length=trainer.max_seq_length)
    write_json(folder / "training_log.json", trainer.state.log_history)
    plot_training_log(trainer.state.log_history, folder / "training_log.png")
    write_json(folder / "run_results.json", asdict(result))
    write_model_card(folder, ModelCardSettings.from_run(result, method, command))


def _metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Without prefix and bookkeeping."""
    return {
        name.removeprefix("eval_"): value for name, value in metrics.items() if name not in ("eval_runtime", "epoch")
    }
