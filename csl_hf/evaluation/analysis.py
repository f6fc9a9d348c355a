"""Geometry of embeddings: what shows a collapse before any benchmark does. Pure functions of tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Mean squared distance of positive pairs on the unit sphere (Wang and Isola 2020).

    Args:
        x, y: (N, d) embeddings; row i of ``y`` is the positive of row i of ``x``. Norms do not matter.

    Returns:
        Scalar in [0, 4]; lower is better. 0 also when everything has collapsed to one point: read it beside
        :func:`uniformity`.
    """
    return (F.normalize(x, dim=-1) - F.normalize(y, dim=-1)).square().sum(dim=-1).mean()


def uniformity(x: Tensor, t: float = 2.0) -> Tensor:
    """Log of the mean Gaussian potential of all pairs on the unit sphere (Wang and Isola 2020).

    Args:
        x: (N, d) embeddings, N >= 2. Norms do not matter.
        t: sharpness of the potential, 2 in the paper.

    Returns:
        Scalar in [-4t, 0]; lower is better, 0 is a collapse to one point.

    Raises:
        ValueError: fewer than two rows.
    """
    cosines = _pair_cosines(x)
    return (-t * (2 - 2 * cosines)).logsumexp(dim=0) - torch.log(cosines.new_tensor(float(len(cosines))))


def mean_cosine(x: Tensor) -> Tensor:
    """Mean cosine of all pairs of different rows.

    Args:
        x: (N, d) embeddings, N >= 2.

    Returns:
        Scalar in [-1, 1]; near 1 means a narrow cone.

    Raises:
        ValueError: fewer than two rows.
    """
    return _pair_cosines(x).mean()


def effective_rank(x: Tensor) -> Tensor:
    """Exponential of the entropy of the normalised singular values of the centred embeddings (Roy and Vetterli 2007).

    Args:
        x: (N, d) embeddings.

    Returns:
        Scalar in [1, min(N - 1, d)], how many directions are really in use; 0 if all rows are equal.
    """
    centred = (x - x.mean(dim=0)).to(torch.promote_types(x.dtype, torch.float32))
    values = torch.linalg.svdvals(centred)
    # Rows that are equal up to rounding span nothing: compare with the scale of x, not with zero.
    if values.sum() <= torch.finfo(values.dtype).eps * x.norm() * len(values):
        return values.new_zeros(())
    shares = values / values.sum()
    return torch.special.entr(shares).sum().exp()


def embedding_statistics(x: Tensor, y: Tensor) -> dict[str, float]:
    """The four figures above for two views (N, d) of the same texts; the last three of the first view."""
    return {
        "alignment": alignment(x, y).item(),
        "uniformity": uniformity(x).item(),
        "mean_cosine": mean_cosine(x).item(),
        "effective_rank": effective_rank(x).item(),
    }


def _pair_cosines(x: Tensor) -> Tensor:
    """(N (N - 1) / 2,) cosines of the pairs of different rows."""
    if x.ndim != 2 or len(x) < 2:
        raise ValueError(f"Got embeddings of shape {tuple(x.shape)}; expected (N, d) with at least two rows.")
    x = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    rows, columns = torch.triu_indices(len(x), len(x), offset=1, device=x.device)
    return (x @ x.T)[rows, columns]
