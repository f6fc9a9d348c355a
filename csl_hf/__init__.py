"""Sentence embeddings learned without labels, on the Hugging Face Trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from csl_hf.arguments import ContrastiveTrainingArguments, DataArguments, ModelArguments
    from csl_hf.configuration import ContrastiveConfig
    from csl_hf.export import SentenceTransformer, save_sentence_transformer, to_sentence_transformer
    from csl_hf.modeling import (
        AutoModelForContrastiveLearning,
        BertForContrastiveLearning,
        RobertaForContrastiveLearning,
    )
    from csl_hf.trainer import ContrastiveTrainer

__version__ = "0.1.0"

# Public name -> module. Resolved on first use, so that `import csl_hf` does not import transformers.
_MODULES = {
    "AutoModelForContrastiveLearning": "csl_hf.modeling",
    "BertForContrastiveLearning": "csl_hf.modeling",
    "ContrastiveConfig": "csl_hf.configuration",
    "ContrastiveTrainer": "csl_hf.trainer",
    "ContrastiveTrainingArguments": "csl_hf.arguments",
    "DataArguments": "csl_hf.arguments",
    "ModelArguments": "csl_hf.arguments",
    "RobertaForContrastiveLearning": "csl_hf.modeling",
    "SentenceTransformer": "csl_hf.export",
    "save_sentence_transformer": "csl_hf.export",
    "to_sentence_transformer": "csl_hf.export",
}

__all__ = [
    "AutoModelForContrastiveLearning",
    "BertForContrastiveLearning",
    "ContrastiveConfig",
    "ContrastiveTrainer",
    "ContrastiveTrainingArguments",
    "DataArguments",
    "ModelArguments",
    "RobertaForContrastiveLearning",
    "SentenceTransformer",
    "save_sentence_transformer",
    "to_sentence_transformer",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'csl_hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
