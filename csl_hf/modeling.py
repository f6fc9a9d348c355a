"""Backbone, pooling and contrastive head.

``e`` (embeddings) is what evaluation and export use. ``z`` (projections) exists for the loss only. A further
backbone is a class of two lines, see :class:`RobertaForContrastiveLearning`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    BertModel,
    BertPreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaModel,
)
from transformers import initialization as init
from transformers.models.roberta.modeling_roberta import RobertaPreTrainedModel
from transformers.utils import ModelOutput

from csl_hf.configuration import ContrastiveConfig

DROPOUT_NAMES = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass
class ContrastiveModelOutput(ModelOutput):
    """Output of a contrastive model.

    Attributes:
        embeddings: e, pooled token states, (B, V, d) for inputs of shape (B, V, L), (B, d) for (B, L).
        projections: z = h(e) / ||h(e)||, the same shape with p in place of d; None with ``project=False``.
    """

    embeddings: Tensor | None = None
    projections: Tensor | None = None


def pool(hidden_states: tuple[Tensor, ...], attention_mask: Tensor, pooling: str) -> Tensor:
    """One embedding for each text from its token states.

    Args:
        hidden_states: the embedding layer's output, then each layer's, every one (N, L, d).
            Only the last is used, and index 1 for ``avg_first_last``.
        attention_mask: (N, L), 1 for tokens, 0 for padding.
        pooling: one of :data:`csl_hf.configuration.POOLINGS`.

    Returns:
        (N, d), float32 at least.

    Raises:
        ValueError: an unknown pooling.
    """
    last = hidden_states[-1]
    last = last.to(torch.promote_types(last.dtype, torch.float32))
    if pooling in ("cls", "cls_before_pooler"):
        return last[:, 0]
    mask = attention_mask.unsqueeze(-1).to(last.dtype)  # (N, L, 1)
    if pooling == "max":
        return last.masked_fill(mask == 0, float("-inf")).amax(dim=1)
    if pooling == "avg_first_last":
        last = (hidden_states[1].to(last.dtype) + last) / 2
    elif pooling != "mean":
        raise ValueError(f"pooling={pooling!r} is unknown.")
    return (last * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout rate of a backbone's configuration that acts on hidden states or attention.

    Raises:
        ValueError: a rate outside [0, 1), or a configuration without any known rate.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout={rate} must be in [0, 1).")
    names = [name for name in DROPOUT_NAMES if hasattr(config, name)]
    if not names:
        raise ValueError(
            f"A {config.model_type!r} configuration has none of the dropout rates {', '.join(DROPOUT_NAMES)}."
        )
    for name in names:
        setattr(config, name, rate)


def _hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the ``from_pretrained`` options that say where a configuration is found."""
    names = ("revision", "cache_dir", "token", "local_files_only")
    return {name: options[name] for name in names if name in options}


class HeadLinear(nn.Linear):
    """Linear layer whose random initialisation depends on its own seed only, not on the global state."""

    def __init__(self, in_features: int, out_features: int, bias: bool, seed: int) -> None:
        self.seed = seed
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Kaiming-uniform weights (torch's default for linear layers), zero bias."""
        device = self.weight.device
        if device.type == "meta":
            return
        generator = torch.Generator(device).manual_seed(self.seed)
        init.kaiming_uniform_(self.weight, a=math.sqrt(5), generator=generator)
        if self.bias is not None:
            init.zeros_(self.bias)


class ContrastiveHead(nn.Module):
    """h: embeddings to unit-norm projections; used in training only.

    ``head="mlp"`` is Linear(d, d) - ReLU - Linear(d, p) without biases (VaSCL). ``pooling="cls"`` puts SimCSE's
    Linear(d, d) - tanh before it.
    """

    def __init__(self, hidden_size: int, config: ContrastiveConfig) -> None:
        super().__init__()
        seed = config.head_seed
        self.pooler = HeadLinear(hidden_size, hidden_size, True, seed) if config.pooling == "cls" else None
        self.dense = self.projection = None
        if config.head == "mlp":
            self.dense = HeadLinear(hidden_size, hidden_size, False, seed + 1)
            self.projection = HeadLinear(hidden_size, config.projection_dim, False, seed + 2)

    def forward(self, embeddings: Tensor) -> Tensor:
        """(..., d) embeddings to (..., p) projections of norm 1."""
        if self.pooler is not None:
            embeddings = torch.tanh(self.pooler(embeddings))
        if self.dense is not None:
            embeddings = self.projection(torch.relu(self.dense(embeddings)))
        return F.normalize(embeddings, dim=-1)


class ContrastiveLearningMixin:
    """A backbone with pooling and a contrastive head, for the left side of a ``PreTrainedModel`` base.

    A subclass names the bare transformer in ``backbone_class``; it is stored under the library's own
    ``base_model_prefix``, so that checkpoints of the plain backbone load without renaming.
    """

    backbone_class: type[PreTrainedModel]
    # A plain backbone has no contrastive head, and brings heads of its pretraining task: both are as they should be.
    _keys_to_ignore_on_load_missing = [r"^head\."]
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^cls\.", r"pooler\."]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        settings = ContrastiveConfig.from_dict(getattr(config, "contrastive", None) or {})
        config.contrastive = settings.to_dict()
        # The pooler of BERT and RoBERTa belongs to their pretraining task; its weights would only be dead freight.
        setattr(self, self.base_model_prefix, self.backbone_class(config, add_pooling_layer=False))
        self.head = ContrastiveHead(config.hidden_size, settings)
        self.post_init()

    @property
    def contrastive_config(self) -> ContrastiveConfig:
        """The objective's settings as stored in ``config.contrastive``."""
        return ContrastiveConfig.from_dict(self.config.contrastive)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        *model_args: Any,
        contrastive: ContrastiveConfig | Mapping[str, Any] | None = None,
        config: PreTrainedConfig | None = None,
        dtype: torch.dtype | str = torch.float32,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a plain backbone (with a fresh head) or a saved csl_hf model (with its head).

        Args:
            pretrained_model_name_or_path: folder or Hub id.
            contrastive: settings of the objective; a mapping changes single ones. Default: the saved ones.
            config: a configuration to use instead of the saved one.
            dtype: float32 by default, whatever the checkpoint holds: training in mixed precision keeps its
                master weights in float32.
            **kwargs: as for ``PreTrainedModel.from_pretrained``.

        Raises:
            ValueError: an unknown setting, or one outside its range.
        """
        if config is None:
            config = cls.config_class.from_pretrained(pretrained_model_name_or_path, **_hub_options(kwargs))
        if isinstance(contrastive, ContrastiveConfig):
            config.contrastive = contrastive.to_dict()
        elif contrastive is not None:
            config.contrastive = {**(getattr(config, "contrastive", None) or {}), **contrastive}
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, dtype=dtype, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, HeadLinear):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        project: bool = True,
        bucket_size: int | None = None,
    ) -> ContrastiveModelOutput:
        """Embed a batch of texts, or of V views of each text, in one pass of the encoder.

        Args:
            input_ids: (B, V, L) or (B, L) token ids.
            attention_mask: the same shape, 1 for tokens; default: all ones.
            token_type_ids: the same shape; default: the backbone's own.
            project: compute the projections as well.
            bucket_size: sort the rows by length and forward them in groups of this many, each only as wide as its
                longest row. The embeddings are the same; less work goes into padding. None: all rows at once.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        flat = {k: v.reshape(-1, v.shape[-1]) for k, v in inputs.items() if v is not None}  # each (B * V, L)
        embeddings = self._embed_in_buckets(flat, bucket_size) if bucket_size else self._embed(**flat)
        embeddings = embeddings.reshape(*input_ids.shape[:-1], -1)
        projections = self.head(embeddings) if project else None
        return ContrastiveModelOutput(embeddings=embeddings, projections=projections)

    def _embed(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """(N, L) token ids to (N, d) embeddings."""
        pooling = self.config.contrastive["pooling"]
        every_layer = pooling == "avg_first_last"
        output = self.base_model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=every_layer, **inputs
        )
        states = output.hidden_states if every_layer else (output.last_hidden_state,)
        return pool(states, attention_mask, pooling)

    def _embed_in_buckets(self, inputs: dict[str, Tensor], bucket_size: int) -> Tensor:
        """As :meth:`_embed`, rows of similar length together, results in the order of the rows."""
        mask = inputs["attention_mask"]
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        widths = (mask * places).amax(dim=1)  # place of the last token, also where padding is on the left
        order = widths.argsort(stable=True)
        buckets = order.split(bucket_size)
        # One transfer for all widths: on an accelerator each would wait for the device.
        width_of = widths[torch.stack([rows[-1] for rows in buckets])].tolist()
        embeddings = torch.cat(
            [
                self._embed(**{name: tensor[rows, :width] for name, tensor in inputs.items()})
                for rows, width in zip(buckets, width_of, strict=True)
            ]
        )
        return embeddings[order.argsort()]


class RobertaForContrastiveLearning(ContrastiveLearningMixin, RobertaPreTrainedModel):
    """RoBERTa and DistilRoBERTa with pooling and a contrastive head."""

    backbone_class = RobertaModel


class BertForContrastiveLearning(ContrastiveLearningMixin, BertPreTrainedModel):
    """BERT with pooling and a contrastive head."""

    backbone_class = BertModel


class AutoModelForContrastiveLearning:
    """Chooses the class by ``config.model_type``, never by the path's name."""

    _classes: dict[str, type[PreTrainedModel]] = {
        "roberta": RobertaForContrastiveLearning,
        "bert": BertForContrastiveLearning,
    }

    @classmethod
    def register(cls, model_type: str, model_class: type[PreTrainedModel]) -> None:
        """Make a further backbone known, e.g. ``register("xlm-roberta", XLMRobertaForContrastiveLearning)``."""
        cls._classes[model_type] = model_class

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, **kwargs: Any) -> PreTrainedModel:
        """As :meth:`ContrastiveLearningMixin.from_pretrained`, for the backbone that the configuration names.

        Raises:
            ValueError: a backbone that has no contrastive class.
        """
        config = kwargs.pop("config", None)
        if config is None:
            config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **_hub_options(kwargs))
        model_class = cls._for(config, pretrained_model_name_or_path)
        return model_class.from_pretrained(pretrained_model_name_or_path, config=config, **kwargs)

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> PreTrainedModel:
        """A model with random weights.

        Raises:
            ValueError: a backbone that has no contrastive class.
        """
        return cls._for(config, "the configuration")(config)

    @classmethod
    def _for(cls, config: PreTrainedConfig, source: str) -> type[PreTrainedModel]:
        if config.model_type not in cls._classes:
            raise ValueError(
                f"{source} is a {config.model_type!r} model; contrastive classes exist for "
                f"{', '.join(sorted(cls._classes))}. Use one of these backbones, or add a class for yours with "
                "AutoModelForContrastiveLearning.register (see RobertaForContrastiveLearning for the two lines)."
            )
        return cls._classes[config.model_type]


@torch.no_grad()
def check_dropout(model: PreTrainedModel) -> None:
    """Make sure that two forward passes of one text differ, as the two views of a text must.

    Raises:
        ValueError: they are identical: the backbone has no dropout.
    """
    was_training = model.training
    token = model.config.eos_token_id if isinstance(model.config.eos_token_id, int) else 1
    ids = torch.full((1, 2, 8), token, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model.train()
        first, second = model(ids, project=False).embeddings[0]
    model.train(was_training)
    if torch.equal(first, second):
        rates = {k: v for k, v in model.config.to_dict().items() if "drop" in k and isinstance(v, int | float)}
        raise ValueError(
            f"Two views of one text are identical: this {model.config.model_type} backbone drops nothing in training "
            f"(its configuration says {rates}). Set its dropout, e.g. --dropout 0.1, or use an explicit augmentation."
        )
