"""ContrastiveTrainer: ``transformers.Trainer`` with a loss over the global batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint, rotate_checkpoints
from transformers.utils import logging

from csl_hf.arguments import ContrastiveTrainingArguments
from csl_hf.checkpoints import (
    RUN_IDENTITY_NAME,
    check_identity,
    check_whole,
    checkpoint_step,
    find_checkpoint,
    publish,
    remove_staging,
    run_identity,
    staging_folder,
)
from csl_hf.data import ContrastiveCollator
from csl_hf.distributed import gather, gather_with_gradient
from csl_hf.evaluation.analysis import embedding_statistics
from csl_hf.export import add_sentence_transformer_files, live_sentence_transformer
from csl_hf.files import write_json
from csl_hf.modeling import check_dropout
from csl_hf.objectives import contrastive_losses

logger = logging.get_logger(__name__)

Evaluator = Callable[..., dict[str, float]]


class ContrastiveTrainer(Trainer):
    """Trains a contrastive model on unlabelled texts.

    Both views of each text go through the encoder in one call (on a CPU in small groups of similar length). The
    embeddings of all processes are gathered, and every process computes the same losses on the same global batch.

    Args:
        model: a model of :mod:`csl_hf.modeling`.
        args: training arguments.
        train_dataset: rows with ``input_ids`` (or ``views``), ``text_id`` and ``row``, see :mod:`csl_hf.data`.
        processing_class: the tokenizer.
        evaluators: by name; each is a callable of ``encode`` (see :mod:`csl_hf.evaluation`), or an evaluator of
            sentence-transformers, which receives a SentenceTransformer. Both see the live weights.
        max_seq_length: tokens that evaluation and the saved folders read; default: all the backbone's positions.
        data_collator: default :class:`csl_hf.data.ContrastiveCollator`.
        **kwargs: as for ``transformers.Trainer``.

    Raises:
        ValueError: several GPUs in one process, a batch without enough neighbours, a backbone without dropout.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: ContrastiveTrainingArguments,
        train_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        evaluators: dict[str, Evaluator] | None = None,
        max_seq_length: int | None = None,
        data_collator: Callable[[list[dict]], dict[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"This process sees {args.n_gpu} GPUs and would use DataParallel, which finds neighbours and negatives "
                "within each GPU only. Start with `accelerate launch --num_processes "
                f"{args.n_gpu} ...` or `torchrun --nproc_per_node {args.n_gpu} ...`, or set CUDA_VISIBLE_DEVICES=0."
            )
        self.objective = model.contrastive_config
        self._check_batch_size(args)
        if "views" not in getattr(train_dataset, "column_names", ()):
            check_dropout(model)
        if processing_class is None:
            raise ValueError("processing_class is missing: give the tokenizer, which batches and saved folders need.")
        self.evaluators = dict(evaluators or {})
        self._choose_best_metric(args)
        self.max_seq_length = max_seq_length
        self.resumed_from = 0
        self._logged_losses: dict[str, list[Tensor]] = {}
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or ContrastiveCollator(processing_class),
            train_dataset=train_dataset,
            # Trainer refuses eval_strategy without an evaluation set; ours are the evaluators.
            eval_dataset=self.evaluators or None,
            processing_class=processing_class,
            **kwargs,
        )
        # The losses are means over one batch: Trainer must divide them by the accumulation steps.
        self.model_accepts_loss_kwargs = False
        self.loss_is_scaled_for_ga = False
        threads = f" of {torch.get_num_threads()} thread(s)" if args.device.type == "cpu" else ""
        logger.info(
            f"Training in {args.world_size} process(es){threads}, {args.texts_per_batch} texts in each global batch."
        )

    def _check_batch_size(self, args: ContrastiveTrainingArguments) -> None:
        needed = self.objective.num_neighbors + 1 if self.objective.uses_neighborhood else 2
        if args.texts_per_batch < needed:
            raise ValueError(
                f"The global batch has {args.texts_per_batch} texts, but "
                + (
                    f"num_neighbors={self.objective.num_neighbors} needs at least {needed}; raise --global_batch_size "
                    f"or lower --num_neighbors to {args.texts_per_batch - 1} at most."
                    if args.texts_per_batch >= 2
                    else "a contrastive loss needs at least 2: the others are the negatives. Raise --global_batch_size."
                )
            )

    def _choose_best_metric(self, args: ContrastiveTrainingArguments) -> None:
        """The first evaluator's own metric and direction, where the user has named none."""
        picks_best = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        if not picks_best or args.metric_for_best_model is not None:
            return
        for evaluator in self.evaluators.values():
            if getattr(evaluator, "primary_metric", None):
                args.metric_for_best_model = evaluator.primary_metric
                args.greater_is_better = getattr(evaluator, "greater_is_better", True)
                return
        raise ValueError(
            "The best checkpoint is asked for, but no evaluator says which metric to go by. Give evaluators, or "
            "--metric_for_best_model with --greater_is_better."
        )

    # Optimisation

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As the parent's, with ``head_learning_rate`` for the contrastive head."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        rate = self.args.head_learning_rate
        if is_new and rate is not None:
            named = (self.model if model is None else model).named_parameters()
            head = {id(parameter) for name, parameter in named if "head" in name.split(".")}
            for group in list(optimizer.param_groups):
                in_head = [parameter for parameter in group["params"] if id(parameter) in head]
                if in_head:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in head]
                    optimizer.add_param_group({**group, "params": in_head, "lr": rate})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The weighted sum of the losses of the global batch.

        Raises:
            FloatingPointError: a loss that is not finite, before it can reach the weights.
        """
        inputs = dict(inputs)
        text_ids, rows = inputs.pop("text_id", None), inputs.pop("row", None)
        outputs = model(**inputs, project=False, bucket_size=self.args.rows_per_bucket)
        embeddings = gather_with_gradient(outputs.embeddings)  # (M, V, d)
        if not torch.isfinite(embeddings).all():
            self._stop("The embeddings", rows)
        if text_ids is not None:
            text_ids = gather(text_ids)
        self._warn_of_few_neighbors(len(embeddings))
        head = self.accelerator.unwrap_model(model).head
        losses = contrastive_losses(embeddings, head, self.objective, text_ids, self._step_generator())
        loss = self._weighted_sum(losses)
        if not torch.isfinite(loss):
            self._stop("The loss", rows, losses)
        self._remember(losses, embeddings)
        return (loss, outputs) if return_outputs else loss

    def _weighted_sum(self, losses: dict[str, Tensor]) -> Tensor:
        weight = self.objective.neighborhood_weight
        warmup = self.objective.neighborhood_warmup_steps
        if warmup > 0:
            weight *= min(1.0, self.state.global_step / warmup)
        return sum(weight * value if name == "neighborhood" else value for name, value in losses.items())

    def _step_generator(self) -> torch.Generator:
        """Random directions that depend on the seed and the step only: equal in every process and after a resume."""
        step = self.state.global_step
        if step != getattr(self, "_generator_step", None):
            self._generator_step = step
            self._generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        return self._generator

    def _warn_of_few_neighbors(self, num_rows: int) -> None:
        if self.objective.uses_neighborhood and num_rows - 1 < self.objective.num_neighbors:
            logger.warning_once(
                f"A batch of {num_rows} texts has fewer than num_neighbors={self.objective.num_neighbors} neighbours; "
                "it uses those it has."
            )

    def _stop(self, what: str, rows: Tensor | None, losses: dict[str, Tensor] | None = None) -> None:
        values = ", ".join(f"{name}={value.item()}" for name, value in (losses or {}).items())
        last = get_last_checkpoint(self.args.output_dir)
        raise FloatingPointError(
            f"{what} of step {self.state.global_step + 1} became not finite{f' ({values})' if values else ''}; the "
            f"weights were not changed by this step. "
            + (f"The last checkpoint, {last}, is whole. " if last else "No checkpoint has been written yet. ")
            + "Lower the learning rate or --radius, or train in bf16 instead of fp16."
            + ("" if rows is None else f" Rows of the training source in this batch: {gather(rows).tolist()}.")
        )

    # Logging

    def _remember(self, losses: dict[str, Tensor], embeddings: Tensor) -> None:
        for name, value in losses.items():
            self._logged_losses.setdefault(name, []).append(value.detach())
        self._last_views = embeddings.detach()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the parent's, with each loss by its name and the collapse diagnostics."""
        if "loss" in logs:
            for name, values in self._logged_losses.items():
                logs[f"loss/{name}"] = torch.stack(values).mean().item()
            self._logged_losses = {}
            if len(self._last_views) > 1:
                logs.update(embedding_statistics(self._last_views[:, 0], self._last_views[:, 1]))
        super().log(logs, start_time)

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """:meth:`measure`, logged and reported to the callbacks as the parent's is.

        Returns:
            The metrics, each name prefixed with ``eval_``.

        Raises:
            ValueError: an ``eval_dataset``: what is measured are the trainer's evaluators.
        """
        if eval_dataset is not None:
            raise ValueError("evaluate() takes no eval_dataset here; give the trainer evaluators instead.")
        start = time.perf_counter()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.measure().items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(time.perf_counter() - start, 2)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self) -> dict[str, float]:
        """Run every evaluator on a SentenceTransformer that shares the live weights.

        The main process evaluates, the others wait for its figures, so that all agree on the best checkpoint.
        """
        results = [self._run_evaluators() if self.is_world_process_zero() else {}]
        if self.args.world_size > 1:
            broadcast_object_list(results)
        return results[0]

    def _run_evaluators(self) -> dict[str, float]:
        from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

        metrics: dict[str, float] = {}
        model = self.accelerator.unwrap_model(self.model)
        with live_sentence_transformer(model, self.processing_class, self.max_seq_length) as sentence_transformer:
            for name, evaluator in self.evaluators.items():
                if isinstance(evaluator, SentenceEvaluator):
                    result = evaluator(sentence_transformer)
                    result = result if isinstance(result, dict) else {name: result}
                else:
                    result = evaluator(sentence_transformer.encode)
                metrics.update({key: float(value) for key, value in result.items()})
        return metrics

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As the parent's; resumes only a run of the same model, data, batch and seed.

        Raises:
            FileNotFoundError: no checkpoint to resume from.
            ValueError: a checkpoint of another run.
        """
        if self.args.should_save:
            remove_staging(self.args.output_dir)
        self.accelerator.wait_for_everyone()
        checkpoint = self.checkpoint_to_resume(resume_from_checkpoint)
        self.resumed_from = 0 if checkpoint is None else checkpoint_step(checkpoint)
        return super().train(resume_from_checkpoint=checkpoint, **kwargs)

    def checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The folder to resume from, after making sure that it is whole and of this very run; None for a new run.

        Raises:
            FileNotFoundError: no checkpoint to resume from.
            ValueError: a checkpoint that is damaged, or of another run.
        """
        self._identity = run_identity(self.accelerator.unwrap_model(self.model), self.train_dataset, self.args)
        checkpoint = find_checkpoint(self.args.output_dir, resume_from_checkpoint)
        if checkpoint is not None:
            check_whole(checkpoint, self.args.world_size)
            check_identity(checkpoint, self._identity)
        return checkpoint

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        best = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.state.best_model_checkpoint is None and best.is_dir():
            self.state.best_model_checkpoint = str(best)  # the folder was moved since
        # Killed after its last checkpoint, a run has nothing left to train; the parent would take one step more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def loaded_step(self) -> int:
        """Optimiser step of the weights that the model holds after training: the best checkpoint's, or the last."""
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        return self.state.global_step if best is None else checkpoint_step(best)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The parent writes into the final folder, which a kill or a full disk would leave half-written. Here every
        # process writes into a staging folder that is renamed at the end; only then are older checkpoints deleted.
        self._refuse_broken_weights()
        self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        checkpoint = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staging = staging_folder(checkpoint)
        if self.args.should_save:
            remove_staging(run_dir)
        self.accelerator.wait_for_everyone()
        self.save_model(str(staging), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(staging))
            self._save_scaler(str(staging))
            self._save_rng_state(str(staging))
        self.accelerator.wait_for_everyone()
        if self.state.best_global_step:
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == checkpoint or best.exists():
                self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self._save_trainer_state(staging)
            publish(staging, checkpoint)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                # by time, not by step: after resuming an early checkpoint the newest has not the highest number
                use_mtime=True,
            )

    def _refuse_broken_weights(self) -> None:
        """A finite loss can have a gradient that is not: never let its weights replace a good checkpoint."""
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise FloatingPointError(
                    f"After step {self.state.global_step} the weight {name} is not finite, so no checkpoint was "
                    f"written; those in {self.args.output_dir} are from before. Lower the learning rate or --radius."
                )

    def _save_trainer_state(self, folder: Path) -> None:
        from transformers.trainer_callback import ExportableState

        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                stored = self.state.stateful_callbacks.get(name)
                if isinstance(stored, list):
                    stored.append(state)
                else:
                    self.state.stateful_callbacks[name] = state
        write_json(folder / RUN_IDENTITY_NAME, self._identity)
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model)
            folder = output_dir if output_dir is not None else self.args.output_dir
            add_sentence_transformer_files(folder, model, self.processing_class, self.max_seq_length)
