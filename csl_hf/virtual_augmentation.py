"""VaSCL section 3.2: the neighbourhood of each row, and the perturbation that confuses the row with it most."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def nearest_neighbors(embeddings: Tensor, k: int, similarity: str = "dot", exclude: Tensor | None = None) -> Tensor:
    """The K nearest rows of each row within the batch, N(i) (VaSCL section 3.2).

    Args:
        embeddings: (M, d) pooled embeddings of the first views of the global batch.
        k: neighbours wanted, >= 1. Fewer come back where a row has fewer candidates: K is then the smallest
            number of candidates that any row has, M - 1 without ``exclude``.
        similarity: ``dot`` (raw dot product, as in the authors' code) or ``cosine``.
        exclude: optional (M, M) bool, True where j may not be a neighbour of i (equal texts). A row is never
            its own neighbour.

    Returns:
        (M, K) int64, most similar first; K = 0 if some row has no candidate at all.

    Raises:
        ValueError: k < 1, an unknown similarity, or shapes that do not fit.
    """
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}; expected (M, d).")
    if k < 1:
        raise ValueError(f"k={k} must be at least 1.")
    num_rows = len(embeddings)
    if exclude is not None and exclude.shape != (num_rows, num_rows):
        raise ValueError(f"exclude has shape {tuple(exclude.shape)}; expected ({num_rows}, {num_rows}).")
    rows = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    if similarity == "cosine":
        rows = F.normalize(rows, dim=-1)
    elif similarity != "dot":
        raise ValueError(f"similarity={similarity!r} is unknown; choose dot or cosine.")
    forbidden = torch.eye(num_rows, dtype=torch.bool, device=rows.device)
    if exclude is not None:
        forbidden |= exclude
    with torch.autocast(device_type=rows.device.type, enabled=False):
        scores = (rows @ rows.T).masked_fill(forbidden, float("-inf"))  # (M, M)
    fewest_candidates = int((~forbidden).sum(dim=1).min())
    return scores.topk(min(k, fewest_candidates), dim=1).indices


def perturb(
    embeddings: Tensor,
    head: Callable[[Tensor], Tensor],
    neighbors: Tensor,
    radius: float | Tensor,
    temperature: float = 0.05,
    steps: int = 1,
    constraint: str = "sphere",
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""The perturbation that makes each row look least like itself among its neighbours (VaSCL Eq. 2-4).

    Starts from radius times a random direction (isotropic Gaussian) and climbs the gradient of

    .. math:: \ell_{N(i)}(z_i^\delta, z_i) = -\log \frac{e^{s(z_i^\delta, z_i)/\tau}}
        {e^{s(z_i^\delta, z_i)/\tau} + \sum_{k \in N(i)} e^{s(z_i^\delta, z_k)/\tau}}

    Nothing but the perturbation is differentiated: no ``.grad`` changes, and the result carries no graph.

    Args:
        embeddings: (M, d) pooled embeddings e.
        head: maps (M, d) embeddings to (M, p) unit-norm projections.
        neighbors: (M, K) int64 row indices, from :func:`nearest_neighbors`.
        radius: norm of the result, > 0, a float or a scalar tensor, in the units of ``embeddings``.
        temperature: divisor of the similarities, > 0.
        steps: gradient steps, >= 1; the authors take one.
        constraint: ``sphere``: a step goes to radius x the gradient's direction (the authors' code). ``ball``: a
            step of length radius is added to the last perturbation and projected back into the ball.
        generator: source of the random directions, on the CPU so that every device draws the same ones.

    Returns:
        (M, d) perturbations, without graph; norm = radius (``sphere``) or <= radius (``ball``). A row whose
        gradient is zero keeps its last perturbation.

    Raises:
        ValueError: radius or temperature not positive, steps < 1, an unknown constraint, or shapes that do not fit.
    """
    if not radius > 0 or not temperature > 0 or steps < 1:
        raise ValueError(
            f"radius={float(radius)} and temperature={temperature} must be greater than 0, steps={steps} at least 1."
        )
    if constraint not in ("sphere", "ball"):
        raise ValueError(f"constraint={constraint!r} is unknown; choose sphere or ball.")
    if embeddings.ndim != 2 or neighbors.ndim != 2 or len(neighbors) != len(embeddings):
        raise ValueError(
            f"Got embeddings {tuple(embeddings.shape)} and neighbors {tuple(neighbors.shape)}; expected (M, d), (M, K)."
        )
    embeddings = embeddings.detach()
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    noise = torch.randn(embeddings.shape, generator=generator, dtype=embeddings.dtype).to(embeddings.device)
    delta = radius * F.normalize(noise, dim=-1)
    with torch.autocast(device_type=embeddings.device.type, enabled=False):
        with torch.no_grad():
            z = head(embeddings)
        # (M, 1 + K, p): the row itself, which the perturbed row should find, then its neighbours
        candidates = torch.cat([z.unsqueeze(1), z[neighbors]], dim=1)
        for _ in range(steps):
            direction = _loss_direction(embeddings, delta, head, candidates, temperature)
            moved = radius * direction if constraint == "sphere" else _into_ball(delta + radius * direction, radius)
            delta = torch.where((direction == 0).all(dim=-1, keepdim=True), delta, moved)
    return delta


def _loss_direction(
    embeddings: Tensor,
    delta: Tensor,
    head: Callable[[Tensor], Tensor],
    candidates: Tensor,
    temperature: float,
) -> Tensor:
    """Unit gradient of Eq. 2 with respect to each row's perturbation, (M, d)."""
    with torch.enable_grad():
        delta = delta.detach().requires_grad_()
        logits = torch.einsum("mp,mcp->mc", head(embeddings + delta), candidates) / temperature
        targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        # Summed, not averaged: rows are independent, and a mean would push small gradients towards underflow.
        loss = F.cross_entropy(logits, targets, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, delta)
    largest = gradient.abs().amax(dim=-1, keepdim=True)
    # Scaled by the largest entry first, so that the norm of a tiny gradient does not underflow to zero.
    return F.normalize(torch.where(largest > 0, gradient / largest, gradient), dim=-1)


def _into_ball(delta: Tensor, radius: float | Tensor) -> Tensor:
    norm = delta.norm(dim=-1, keepdim=True)
    return torch.where(norm > radius, delta * (radius / norm), delta)
