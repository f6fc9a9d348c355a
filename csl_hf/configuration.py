"""How a model is pooled, projected and trained: the part of the configuration that travels with the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

POOLINGS = ("mean", "cls", "cls_before_pooler", "max", "avg_first_last")
HEADS = ("mlp", "none")
LOSSES = ("nt_xent", "info_nce")
SIMILARITIES = ("dot", "cosine")
CONSTRAINTS = ("sphere", "ball")
NEIGHBORHOOD_GRADIENTS = ("reference", "paper")


def _option(default, text: str, choices: tuple[str, ...] | None = None):
    metadata = {"help": text}
    if choices is not None:
        metadata["choices"] = list(choices)
    return field(default=default, metadata=metadata)


@dataclass
class ContrastiveConfig:
    """Settings of the contrastive objective, kept in ``model.config.contrastive`` and parsed from the command line.

    The defaults are VaSCL's (pooling, head, losses, neighbourhood of 16) with a radius relative to the
    embeddings' norm, which fits any backbone.

    Raises:
        ValueError: a value outside its range, naming the value and the range.
    """

    _argument_group_name = "contrastive objective"

    pooling: str = _option(
        "mean",
        "How token states become one embedding. `cls` trains a Linear+tanh on top of the first token and drops it "
        "at inference (SimCSE); `avg_first_last` averages the first and the last layer.",
        POOLINGS,
    )
    head: str = _option(
        "mlp",
        "Contrastive head used in training only: `mlp` is Linear-ReLU-Linear (VaSCL), or `none`.",
        HEADS,
    )
    projection_dim: int = _option(128, "Output size of the `mlp` head (VaSCL: 128).")
    head_seed: int = _option(42, "Seed of the head's random initialisation.")
    loss: str = _option(
        "nt_xent", "`nt_xent` (VaSCL Eq. 1, both directions) or `info_nce` (SimCSE, one direction).", LOSSES
    )
    temperature: float = _option(0.05, "Temperature of every softmax over cosine similarities.")
    hard_negative_weight: float = _option(
        1.0, "Factor alpha on an anchor's own hard negative in `info_nce`; 1 treats it as any other negative."
    )
    neighborhood_weight: float = _option(
        1.0, "Factor on VaSCL's neighbourhood loss (Eq. 5); 1 as in Eq. 6, 0 turns it off (SimCSE)."
    )
    neighborhood_warmup_steps: int = _option(
        0, "Optimiser steps over which the neighbourhood factor rises linearly from 0. The paper has none."
    )
    num_neighbors: int = _option(16, "Neighbours K of each row, taken from the global batch (VaSCL: 16).")
    neighbor_similarity: str = _option(
        "dot",
        "Similarity that picks neighbours: `dot` of the pooled embeddings (VaSCL) or `cosine`.",
        SIMILARITIES,
    )
    radius: float = _option(
        0.1,
        "Norm of the perturbation, Delta of Eq. 3. A multiple of the batch's mean embedding norm unless "
        "--radius_is_absolute is given.",
    )
    radius_is_absolute: bool = _option(
        False, "Take --radius as it is. VaSCL: 15 for DistilRoBERTa and RoBERTa-base, 30 for RoBERTa-large."
    )
    perturbation_steps: int = _option(1, "Gradient steps that look for the worst perturbation (VaSCL: 1).")
    perturbation_constraint: str = _option(
        "sphere",
        "`sphere`: each step goes to radius x gradient direction (VaSCL). `ball`: each step adds to the last "
        "perturbation and is projected back into the ball.",
        CONSTRAINTS,
    )
    neighborhood_gradient: str = _option(
        "reference",
        "What the neighbourhood loss trains: `reference` only the head, through the perturbed rows (the authors' "
        "code); `paper` the encoder as well (the equations as printed).",
        NEIGHBORHOOD_GRADIENTS,
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("pooling", POOLINGS),
            ("head", HEADS),
            ("loss", LOSSES),
            ("neighbor_similarity", SIMILARITIES),
            ("perturbation_constraint", CONSTRAINTS),
            ("neighborhood_gradient", NEIGHBORHOOD_GRADIENTS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}.")
        for name, low in (
            ("projection_dim", 1),
            ("num_neighbors", 1),
            ("perturbation_steps", 1),
            ("neighborhood_warmup_steps", 0),
            ("neighborhood_weight", 0),
        ):
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}.")
        for name in ("temperature", "radius", "hard_negative_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ContrastiveConfig:
        """The settings in ``config.json``.

        Raises:
            ValueError: an unknown setting, or one outside its range.
        """
        known = [setting.name for setting in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"Unknown contrastive settings {', '.join(unknown)}; known are {', '.join(known)}.")
        return cls(**values)

    @property
    def uses_neighborhood(self) -> bool:
        """Whether the neighbourhood loss is part of the objective."""
        return self.neighborhood_weight > 0

    def to_dict(self) -> dict:
        """Plain values for ``config.json``."""
        return asdict(self)
