"""Model cards that state what was done and measured, and nothing else."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from csl_hf import __version__
from csl_hf.evaluation.report import markdown_table
from csl_hf.files import write_text

if TYPE_CHECKING:
    from csl_hf.recipe import RunResult

TEMPLATE = Path(__file__).with_name("model_card_template.md")

# By the end of a metric's name.
METRIC_NOTES = {
    "_spearman": "`_spearman`: Spearman correlation x 100 between cosine and gold score of sentence pairs.",
    "retrieval_mrr@10": "`retrieval`: the first line of a docstring must find its own body among those of held-out "
    "modules of this Python installation.",
}

DATASET_NAMES = {"stsb_dev": "STS-B dev", "retrieval": "Held-out Python documentation"}

CITATIONS = {
    "VaSCL": """@inproceedings{zhang-etal-2022-virtual,
  title = {Virtual Augmentation Supported Contrastive Learning of Sentence Representations},
  author = {Zhang, Dejiao and Xiao, Wei and Zhu, Henghui and Ma, Xiaofei and Arnold, Andrew},
  booktitle = {Findings of the Association for Computational Linguistics: ACL 2022},
  year = {2022}
}""",
    "SimCSE": """@inproceedings{gao-etal-2021-simcse,
  title = {{SimCSE}: Simple Contrastive Learning of Sentence Embeddings},
  author = {Gao, Tianyu and Yao, Xingcheng and Chen, Danqi},
  booktitle = {Proceedings of the 2021 Conference on Empirical Methods in Natural Language Processing},
  year = {2021}
}""",
}


@dataclass
class ModelCardSettings:
    """Everything that the template prints. Make it with :meth:`from_run`."""

    name: str
    method: str
    base_model: str
    load_from: str
    dimension: int
    before: dict[str, float]
    after: dict[str, float]
    command: str | None
    settings_table: list[tuple[str, Any]]
    objective_note: str
    data_note: str
    steps: int
    best_step: int
    train_minutes: float
    resumed_from: int
    hardware: str
    versions: str
    max_length: int
    max_seq_length: int
    seed: int
    citation: str | None

    @property
    def table(self) -> str:
        """Metrics before and after, in Markdown."""
        return markdown_table({"before": self.before, "after": self.after})

    @property
    def metric_note(self) -> str:
        """What the metrics of the table are."""
        return " ".join(n for end, n in METRIC_NOTES.items() if any(metric.endswith(end) for metric in self.after))

    @classmethod
    def from_run(cls, result: RunResult, method: str, command: str | None = None) -> ModelCardSettings:
        """Settings from a finished run whose folder is already exported.

        Args:
            result: what the run left.
            method: ``VaSCL`` or ``SimCSE``.
            command: command line that reproduces it.
        """
        # Only what is loaded from the folder counts, so the figures that a user will see are read off it.
        from csl_hf.export import SentenceTransformer

        exported = SentenceTransformer.from_pretrained(result.output_dir, device="cpu")
        settings = result.settings
        training, data = settings["training"], settings["data"]
        return cls(
            name=Path(result.output_dir).resolve().name,
            method=method,
            base_model=_public_name(settings["model"]["model_name_or_path"]),
            load_from=Path(result.output_dir).resolve().name,
            dimension=exported.get_embedding_dimension(),
            before=result.before,
            after=result.after,
            command=command,
            settings_table=_settings_table(result),
            objective_note=_objective_note(settings["objective"]),
            data_note=_data_note(result.data, data),
            steps=result.steps,
            best_step=result.best_step,
            train_minutes=round(result.train_seconds / 60, 1),
            resumed_from=result.resumed_from,
            hardware=_hardware(),
            versions=f"csl_hf {__version__}, "
            + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers")),
            max_length=data["max_length"],
            max_seq_length=exported.max_seq_length,
            seed=training["seed"],
            citation=CITATIONS.get(method),
        )


def write_model_card(folder: str | Path, settings: ModelCardSettings) -> Path:
    """Render the card to ``README.md`` in ``folder``, without any network.

    Args:
        folder: the exported SentenceTransformer folder.
        settings: what to print.

    Returns:
        The path of the card.
    """
    results = [
        EvalResult(
            task_type="sentence-similarity",
            task_name="Sentence similarity",
            dataset_type=metric.rsplit("_", 1)[0],
            dataset_name=DATASET_NAMES.get(metric.rsplit("_", 1)[0], metric.rsplit("_", 1)[0]),
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, value in settings.after.items()
    ]
    data = ModelCardData(
        model_name=settings.name,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        base_model=settings.base_model if "/" in settings.base_model else None,
        tags=[
            "sentence-transformers",
            "feature-extraction",
            "unsupervised",
            "contrastive-learning",
            "csl_hf",
        ],
        eval_results=results or None,
    )
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), settings=settings)
    path = Path(folder) / "README.md"
    write_text(path, str(card))
    return path


def _settings_table(result: RunResult) -> list[tuple[str, Any]]:
    objective, training, data = (result.settings[name] for name in ("objective", "training", "data"))
    return [
        ("pooling", objective["pooling"]),
        ("head (training only)", objective["head"]),
        ("loss", objective["loss"]),
        ("temperature", objective["temperature"]),
        ("learning rate, backbone", training["learning_rate"]),
        ("learning rate, head", training["head_learning_rate"] or training["learning_rate"]),
        ("schedule", training["lr_scheduler_type"]),
        ("texts in a batch", f"{result.texts_per_batch} ({result.processes} process(es))"),
        ("tokens of a text", data["max_length"]),
        ("seed", training["seed"]),
    ]


def _public_name(source: str) -> str:
    """Hub ids as they are; of a path its last part, since nobody else has the folders before it."""
    return Path(source).resolve().name if Path(source).exists() else source


def _objective_note(objective: dict[str, Any]) -> str:
    if objective["neighborhood_weight"] == 0:
        return "No neighbourhood term: the two views of a text differ by dropout alone."
    unit = "" if objective["radius_is_absolute"] else " x the batch's mean embedding norm"
    return (
        f"Neighbourhood term (VaSCL Eq. 5), weight {objective['neighborhood_weight']}: "
        f"K = {objective['num_neighbors']} neighbours by {objective['neighbor_similarity']}, perturbation of norm "
        f"{objective['radius']}{unit}, {objective['perturbation_steps']} step(s), "
        f"`{objective['neighborhood_gradient']}` gradient."
    )


def _data_note(counts: dict[str, Any], data: dict[str, Any]) -> str:
    sources = ", ".join(_public_name(source) for source in counts["source"])
    sample = data["max_train_samples"]
    limit = "" if sample is None else f"; {sample:,} of them, drawn at random, were used"
    return (
        f"{sources}: {counts['rows_read']:,} texts read, {counts['kept']:,} kept (dropped: {counts['null']:,} null, "
        f"{counts['empty']:,} empty, {counts['duplicates']:,} repeated){limit}; {counts['truncated']:.1%} were cut off."
    )


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
