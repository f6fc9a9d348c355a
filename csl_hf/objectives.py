"""From pooled embeddings of the global batch to the losses of one step (VaSCL Eq. 6)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from csl_hf.configuration import ContrastiveConfig
from csl_hf.losses import info_nce, neighborhood_loss, nt_xent
from csl_hf.virtual_augmentation import nearest_neighbors, perturb

Head = Callable[[Tensor], Tensor]


def equal_rows(text_ids: Tensor) -> Tensor:
    """(M, M) bool, True where two rows hold the same text, from the (M,) ids of their texts."""
    return text_ids.unsqueeze(0) == text_ids.unsqueeze(1)


def contrastive_losses(
    embeddings: Tensor,
    head: Head,
    config: ContrastiveConfig,
    text_ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Every loss of one step, unweighted, by its name.

    Args:
        embeddings: (M, V, d) of the global batch, with graph. V = 2: two views of each text; V = 3 (``info_nce``
            only): anchor, positive, hard negative.
        head: maps (M, d) embeddings to (M, p) unit-norm projections.
        config: the objective's settings.
        text_ids: (M,) equal for rows of equal text: these are neither negatives nor neighbours of each other.
        generator: source of the random directions of the perturbation.

    Returns:
        ``{"nt_xent" or "info_nce": scalar}`` and, if it is used, ``"neighborhood": scalar``.

    Raises:
        ValueError: a number of views that the loss cannot use.
    """
    num_views = embeddings.shape[1]
    if num_views not in ((2, 3) if config.loss == "info_nce" else (2,)):
        raise ValueError(
            f"loss={config.loss!r} got {num_views} views of each text; nt_xent takes 2, info_nce takes 2, or 3 with "
            "a hard negative."
        )
    same_text = None if text_ids is None else equal_rows(text_ids)
    z1, z2, *rest = head(embeddings).unbind(dim=1)  # each (M, p)
    if config.loss == "nt_xent":
        losses = {"nt_xent": nt_xent(z1, z2, config.temperature, same_text)}
    else:
        hard_negatives = rest[0] if rest else None
        losses = {
            "info_nce": info_nce(z1, z2, hard_negatives, config.temperature, config.hard_negative_weight, same_text)
        }
    if config.uses_neighborhood:
        losses["neighborhood"] = virtual_neighborhood_loss(embeddings[:, 0], head, config, same_text, generator)
    return losses


def virtual_neighborhood_loss(
    embeddings: Tensor,
    head: Head,
    config: ContrastiveConfig,
    same_text: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """VaSCL section 3.2 on the first views: neighbourhood, perturbation, Eq. 5.

    Args:
        embeddings: (M, d) of the global batch, with graph.
        head: maps (M, d) embeddings to (M, p) unit-norm projections.
        config: neighbours, radius, steps and ``neighborhood_gradient``.
        same_text: (M, M) bool, True for rows of equal text.
        generator: source of the random directions.

    Returns:
        Scalar. With ``neighborhood_gradient="reference"`` its gradient reaches the head only, through the perturbed
        rows; with ``"paper"`` it reaches the embeddings too.
    """
    detached = embeddings.detach()
    neighbors = nearest_neighbors(detached, config.num_neighbors, config.neighbor_similarity, same_text)
    radius = config.radius
    if not config.radius_is_absolute:
        radius = radius * detached.norm(dim=-1).mean()
    delta = perturb(
        detached,
        head,
        neighbors,
        radius,
        temperature=config.temperature,
        steps=config.perturbation_steps,
        constraint=config.perturbation_constraint,
        generator=generator,
    )
    if config.neighborhood_gradient == "paper":
        z, z_aug = head(embeddings), head(embeddings + delta)
    else:
        with torch.no_grad():
            z = head(detached)
        z_aug = head(detached + delta)
    return neighborhood_loss(z, z_aug, neighbors, config.temperature)
