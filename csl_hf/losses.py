"""Contrastive losses as pure functions: unit-norm projections in, a scalar out.

Every loss is a cross-entropy over similarities divided by a temperature. Logits are computed in float32 at
least, whatever the dtype or the autocast state of the caller, because exp(1 / 0.05) overflows half precision.

Symbols: M rows in the global batch, p projection size, K neighbours of each row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def nt_xent(z1: Tensor, z2: Tensor, temperature: float = 0.05, mask: Tensor | None = None) -> Tensor:
    r"""Normalised-temperature cross-entropy over both directions (VaSCL Eq. 1; SimCLR).

    .. math:: -\frac{1}{2M} \sum_{i=1}^{2M} \log
        \frac{e^{s(z_i, z_{i'})/\tau}}{\sum_{j \neq i} e^{s(z_i, z_j)/\tau}}

    Args:
        z1: (M, p) unit-norm projections of the first views.
        z2: (M, p) unit-norm projections of the second views; row i is the positive of ``z1[i]``.
        temperature: divisor of the similarities, > 0.
        mask: optional (M, M) bool, True where two rows must not be each other's negatives (equal texts). The
            diagonal is ignored.

    Returns:
        Scalar, mean over the 2M anchors, >= 0; ln(2M - 1) when all similarities are equal.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    _check_pair(z1, z2, temperature, mask)
    num_rows = len(z1)
    z = torch.cat([z1, z2])  # (2M, p)
    logits = _logits(z, z, temperature)  # (2M, 2M)
    forbidden = torch.eye(2 * num_rows, dtype=torch.bool, device=z.device)
    if mask is not None:
        forbidden |= mask.repeat(2, 2)
    anchors = torch.arange(2 * num_rows, device=z.device)
    positives = (anchors + num_rows) % (2 * num_rows)
    forbidden[anchors, positives] = False
    return F.cross_entropy(logits.masked_fill(forbidden, float("-inf")), positives)


def info_nce(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    temperature: float = 0.05,
    hard_negative_weight: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    r"""InfoNCE in one direction, with optional hard negatives (SimCSE Eq. 1 and 5; SDA).

    The candidates of anchor i are the M positives and, if given, the M hard negatives. The anchor's own hard
    negative counts ``hard_negative_weight`` times: ln(weight) is added to its logit.

    Args:
        anchors: (M, p) unit-norm projections.
        positives: (M, p) unit-norm projections; row i belongs to anchor i.
        negatives: optional (M, p) unit-norm projections; row i contradicts anchor i.
        temperature: divisor of the similarities, > 0.
        hard_negative_weight: alpha > 0; 1 treats the own hard negative as any other.
        mask: optional (M, M) bool, True where positive j must not be a negative of anchor i (equal texts). The
            diagonal is ignored. Hard negatives are never masked: they contradict equal texts as well.

    Returns:
        Scalar, mean over the M anchors, >= 0; ln M (ln 2M with hard negatives) when all similarities are equal.

    Raises:
        ValueError: shapes that do not fit, or a temperature or weight that is not positive.
    """
    _check_pair(anchors, positives, temperature, mask)
    targets = torch.arange(len(anchors), device=anchors.device)
    logits = _logits(anchors, positives, temperature)  # (M, M)
    if mask is not None:
        forbidden = mask.clone()
        forbidden[targets, targets] = False
        logits = logits.masked_fill(forbidden, float("-inf"))
    if negatives is not None:
        _check_pair(anchors, negatives, temperature, None)
        if not hard_negative_weight > 0:
            raise ValueError(f"hard_negative_weight={hard_negative_weight} must be greater than 0.")
        hard = _logits(anchors, negatives, temperature)  # (M, M)
        own = torch.eye(len(anchors), dtype=hard.dtype, device=hard.device)
        logits = torch.cat([logits, hard + own * hard.new_tensor(hard_negative_weight).log()], dim=1)  # (M, 2M)
    return F.cross_entropy(logits, targets)


def neighborhood_loss(z: Tensor, z_aug: Tensor, neighbors: Tensor, temperature: float = 0.05) -> Tensor:
    r"""Discriminate each row and its virtual augmentation from its augmented neighbourhood (VaSCL Eq. 5).

    Both directions: z_i* must find z_i, and z_i must find z_i*, among the 2K rows {z_k, z_k* : k in N(i)}.

    Args:
        z: (M, p) unit-norm projections.
        z_aug: (M, p) unit-norm projections of the perturbed embeddings; row k was perturbed in k's own
            neighbourhood.
        neighbors: (M, K) int64, N(i): row indices into ``z`` that differ from i.
        temperature: divisor of the similarities, > 0.

    Returns:
        Scalar, mean of the 2M terms, >= 0; ln(2K + 1) when all similarities are equal. A value far above that
        says that the perturbation is too large.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    _check_pair(z, z_aug, temperature, None)
    if neighbors.ndim != 2 or len(neighbors) != len(z):
        raise ValueError(f"neighbors has shape {tuple(neighbors.shape)}; expected ({len(z)}, K).")
    clean = _logits(z, z, temperature)  # (M, M)
    crossed = _logits(z_aug, z, temperature)  # (M, M), row i*, column j
    augmented = _logits(z_aug, z_aug, temperature)  # (M, M)
    positive = crossed.diagonal().unsqueeze(1)  # (M, 1)
    from_augmented = torch.cat([positive, crossed.gather(1, neighbors), augmented.gather(1, neighbors)], dim=1)
    from_clean = torch.cat([positive, clean.gather(1, neighbors), crossed.T.gather(1, neighbors)], dim=1)
    logits = torch.cat([from_augmented, from_clean])  # (2M, 1 + 2K)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def _logits(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """Cosine similarities of unit-norm rows over the temperature, (len(a), len(b)), float32 or float64."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(device_type=a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype).T / temperature


def _check_pair(a: Tensor, b: Tensor, temperature: float, mask: Tensor | None) -> None:
    if a.ndim != 2 or a.shape != b.shape:
        raise ValueError(
            f"Got projections of shapes {tuple(a.shape)} and {tuple(b.shape)}; expected two of the same shape (M, p)."
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0.")
    if mask is not None and (mask.shape != (len(a), len(a)) or mask.dtype != torch.bool):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected bool of shape ({len(a)}, {len(a)})."
        )
