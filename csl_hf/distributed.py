"""Collectives that keep the gradients of a global batch exact."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Whether more than one process takes part in this run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(rows: Tensor) -> Tensor:
    """Rows of all processes, in the order of their ranks, without gradient.

    Args:
        rows: (m, ...) of this process; m may differ between processes, the other sizes not.

    Returns:
        (M, ...) with M the sum of all m; ``rows`` itself in a single process.
    """
    if not is_distributed():
        return rows
    return _gather(rows, _row_counts(rows))


def gather_with_gradient(rows: Tensor) -> Tensor:
    """Rows of all processes, with an exact gradient for the rows of this one.

    Meant for a loss that every process computes in full, on the same global batch. Each process then holds the
    full gradient of the loss with respect to every row, so that no communication is needed on the way back: a
    process keeps the slice of its own rows. It is multiplied by the number of processes because
    DistributedDataParallel divides the sum of all parameter gradients by that number. Parameters used after
    the gather (the head) see the same full gradient in every process, which the same average leaves as it is.

    Args:
        rows: (m, ...) of this process, with graph.

    Returns:
        (M, ...), as :func:`gather`.
    """
    if not is_distributed():
        return rows
    return _GatherWithGradient.apply(rows)


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        counts = _row_counts(rows)
        start = sum(counts[: dist.get_rank()])
        ctx.own = slice(start, start + len(rows))
        return _gather(rows, counts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient[ctx.own] * dist.get_world_size()


def _row_counts(rows: Tensor) -> list[int]:
    own = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, own)
    return [int(count) for count in counts]


def _gather(rows: Tensor, counts: list[int]) -> Tensor:
    # all_gather wants equal shapes: the last batch of an epoch is padded here and cut again below.
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
