"""Contrastive models as sentence-transformers: a view of the live weights, and folders that anybody can load.

Both consist of sentence-transformers' own modules only (Transformer, Pooling and, for ``avg_first_last``,
WeightedLayerPooling), so that loading needs neither csl_hf nor ``trust_remote_code``. The contrastive head is
left behind: its only purpose is the training loss.
"""

from __future__ import annotations

import copy
import inspect
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer, WeightedLayerPooling
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from csl_hf.files import STAGING_PREFIX, write_json

# csl_hf's poolings at inference -> sentence-transformers' pooling modes.
_POOLING_MODES = {
    "mean": "mean",
    "cls": "cls",
    "cls_before_pooler": "cls",
    "max": "max",
    "avg_first_last": "mean",
}
# The keys that readers before sentence-transformers 6 (and servers written for their folders) look at.
_LEGACY_POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
}
# Backbones that number positions from pad_token_id + 1, and so never use the first ones.
_OFFSET_POSITIONS = {"camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"}
# A folder that a kill left incomplete must not load as something else: without modules.json
# sentence-transformers would fall back to the mean, without config.json nothing loads.
_MOVED_LAST = {"modules.json": 1, "config.json": 2}


class SentenceTransformer(sentence_transformers.SentenceTransformer):
    """sentence-transformers' class with the ``from_pretrained`` that users of transformers expect."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> SentenceTransformer:
        """Load a folder or a Hub id.

        Args:
            name_or_path: a folder with a sentence-transformers model, or a Hub id such as ``user/name``.
            **kwargs: as for ``sentence_transformers.SentenceTransformer``.
        """
        return cls(str(name_or_path), **kwargs)


def default_max_seq_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of tokens, special ones included, that both the backbone's positions and the tokenizer allow.

    RoBERTa numbers its positions from ``pad_token_id + 1``: of 514 positions 512 can be used.
    """
    positions = config.max_position_embeddings
    if config.model_type in _OFFSET_POSITIONS:
        positions -= config.pad_token_id + 1
    return min(positions, tokenizer.model_max_length)


def to_sentence_transformer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None = None
) -> sentence_transformers.SentenceTransformer:
    """A SentenceTransformer around the very parameters of ``model``: a later optimizer step is seen by it.

    It gives e, the pooled embeddings without the head, on the model's device and in its dtype, with cosine
    similarity and without prompts. ``encode`` leaves the backbone in evaluation mode, and ``avg_first_last``
    needs ``output_hidden_states`` in the backbone's config: during training use
    :func:`live_sentence_transformer`, which puts both back.

    Args:
        model: a contrastive model (``model.base_model``, ``model.config.contrastive["pooling"]``).
        tokenizer: its tokenizer; it is copied, never changed.
        max_seq_length: longer texts are cut to this many tokens. Default: :func:`default_max_seq_length`.

    Raises:
        ValueError: a length that is beyond the backbone's positions or leaves no room for a token.
    """
    backbone = model.base_model
    length = _checked_length(model.config, tokenizer, max_seq_length)
    modules = [_wrap_backbone(backbone, tokenizer, length), *_pooling_modules(model)]
    if len(modules) > 2:  # sentence-transformers passes on all layers only if the config asks for them
        backbone.config.output_hidden_states = True
    return SentenceTransformer(modules=modules, device=str(backbone.device), similarity_fn_name="cosine")


@contextmanager
def live_sentence_transformer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None = None
) -> Iterator[sentence_transformers.SentenceTransformer]:
    """:func:`to_sentence_transformer` for an evaluation in the middle of training.

    On leaving, every module of ``model`` is again in the mode (training or evaluation) that it was in, also
    after an error. The view is not to be used after that.
    """
    training = {module: module.training for module in model.modules()}
    config = model.base_model.config
    output_hidden_states = config.output_hidden_states
    try:
        yield to_sentence_transformer(model, tokenizer, max_seq_length)
    finally:
        config.output_hidden_states = output_hidden_states
        for module, flag in training.items():
            module.training = flag


def save_sentence_transformer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike[str],
    max_seq_length: int | None = None,
) -> None:
    """Write the model as a folder for ``SentenceTransformer(output_dir)`` and ``AutoModel.from_pretrained``.

    The folder holds the bare backbone (safetensors, no head), the tokenizer and sentence-transformers' files,
    but no README. Files of the same name are replaced, others stay. Everything is written to a scratch folder
    in ``output_dir`` first, so that no half-written file is ever found in it.

    Args:
        model: a contrastive model; it is not changed.
        tokenizer: its tokenizer.
        output_dir: folder to write, made if absent.
        max_seq_length: as for :func:`to_sentence_transformer`.

    Raises:
        ValueError: as for :func:`to_sentence_transformer`.
        OSError: the folder cannot be written.
    """
    length = _checked_length(model.config, tokenizer, max_seq_length)
    # A shallow copy shares the weights; its config is its own, since save_pretrained writes into it.
    backbone = copy.copy(model.base_model)
    backbone.config = copy.deepcopy(backbone.config)
    with _scratch_folder(Path(output_dir)) as scratch:
        backbone.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        _write_sentence_transformer_files(scratch, model, length)


def add_sentence_transformer_files(
    folder: str | os.PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None = None,
) -> None:
    """Make a training checkpoint loadable with ``SentenceTransformer(folder)``.

    The checkpoint's own files stay as they are, so that ``from_pretrained`` of the contrastive classes finds
    the head. SentenceTransformer does not use it: transformers reports its weights as unexpected, no more.

    Args:
        folder: holds what ``save_pretrained`` of ``model`` and ``tokenizer`` wrote.
        model: the contrastive model that was saved.
        tokenizer: its tokenizer.
        max_seq_length: as for :func:`to_sentence_transformer`.

    Raises:
        FileNotFoundError: ``folder`` is not such a checkpoint.
        ValueError: as for :func:`to_sentence_transformer`.
    """
    folder = Path(folder)
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no {name}, so it is not a checkpoint that can be completed. "
                "Call save_pretrained of the model and of its tokenizer with this folder first."
            )
    length = _checked_length(model.config, tokenizer, max_seq_length)
    with _scratch_folder(folder) as scratch:
        _write_sentence_transformer_files(scratch, model, length)


def _checked_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None) -> int:
    longest = default_max_seq_length(config, tokenizer)
    shortest = tokenizer.num_special_tokens_to_add() + 1
    length = longest if max_seq_length is None else max_seq_length
    if not shortest <= length <= longest:
        raise ValueError(
            f"max_seq_length={length} does not fit: this backbone and its tokenizer take {shortest} to "
            f"{longest} tokens, special ones included. Choose a length in that range, or none for the most."
        )
    return length


def _wrap_backbone(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Transformer:
    """sentence-transformers' Transformer around a model that is in memory.

    Its constructor only takes a folder. It is given one with the configuration and the tokenizer (so it has a
    tokenizer of its own), and a backbone in memory in place of the method that would load weights.
    """
    transformer = Transformer.__new__(Transformer)
    transformer._load_model = lambda *args, **kwargs: backbone
    with tempfile.TemporaryDirectory() as folder:
        backbone.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer.__init__(folder, max_seq_length=max_seq_length)
    del transformer._load_model  # back to the class's own
    return transformer


def _pooling_modules(model: PreTrainedModel) -> list[nn.Module]:
    pooling = model.config.contrastive["pooling"]
    if pooling not in _POOLING_MODES:
        raise ValueError(f"pooling={pooling!r} cannot be exported; known are {', '.join(_POOLING_MODES)}.")
    size, layers = model.config.hidden_size, model.config.num_hidden_layers
    modules: list[nn.Module] = [Pooling(size, pooling_mode=_POOLING_MODES[pooling])]
    if pooling == "avg_first_last":
        weights = torch.zeros(layers)  # of hidden_states[1:], the outputs of the layers
        weights[0] = weights[-1] = 1.0
        first_last = WeightedLayerPooling(
            size,
            num_hidden_layers=layers,
            layer_start=1,
            layer_weights=nn.Parameter(weights, requires_grad=False),
        )
        modules.insert(0, first_last)
    return modules


def _write_sentence_transformer_files(folder: Path, model: PreTrainedModel, max_seq_length: int) -> None:
    """modules.json and all that it refers to, as old readers know it and new ones translate it silently."""
    # Before version 6 an unknown key was an error, hence model_args and config_args rather than model_kwargs.
    transformer: dict[str, Any] = {"max_seq_length": max_seq_length, "do_lower_case": False}
    if "add_pooling_layer" in inspect.signature(type(model.base_model).__init__).parameters:
        # Otherwise AutoModel adds a pooler with random weights, and reports that they are missing.
        transformer["model_args"] = {"add_pooling_layer": False}
    entries = [("", "Transformer")]
    for module in _pooling_modules(model):
        name = type(module).__name__
        subfolder = folder / f"{len(entries)}_{name}"
        entries.append((subfolder.name, name))
        subfolder.mkdir()
        write_json(subfolder / "config.json", _pooling_config(module))
        if isinstance(module, WeightedLayerPooling):
            module.save_torch_weights(str(subfolder))
            transformer["config_args"] = {"output_hidden_states": True}
    write_json(folder / "sentence_bert_config.json", transformer)
    versions = {
        "sentence_transformers": sentence_transformers.__version__,
        "transformers": transformers.__version__,
        "pytorch": torch.__version__,
    }
    settings = {
        "model_type": "SentenceTransformer",
        "__version__": versions,
        "prompts": {"query": "", "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    write_json(folder / "config_sentence_transformers.json", settings)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(entries)
    ]
    write_json(folder / "modules.json", modules)


def _pooling_config(module: nn.Module) -> dict[str, Any]:
    # The dimension under its old name only: given both, version 6 warns that one is deprecated.
    config: dict[str, Any] = {"word_embedding_dimension": module.embedding_dimension}
    if isinstance(module, WeightedLayerPooling):
        return config | {"layer_start": module.layer_start, "num_hidden_layers": module.num_hidden_layers}
    legacy = {key: mode == module.pooling_mode for mode, key in _LEGACY_POOLING_KEYS.items()}
    return config | {"pooling_mode": module.pooling_mode} | legacy


@contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    """A folder inside ``folder`` whose files are moved up, one by one, when the block ends well."""
    # Inside, because ``folder`` may be a mount of its own: nothing can be renamed across its border.
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=folder) as name:
        scratch = Path(name)
        yield scratch
        files = [path.relative_to(scratch) for path in scratch.rglob("*") if path.is_file()]
        if Path("config.json") in files:
            (folder / "config.json").unlink(missing_ok=True)  # a mixture of old and new must not load either
        for file in sorted(files, key=lambda file: _MOVED_LAST.get(file.as_posix(), 0)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(scratch / file, folder / file)
