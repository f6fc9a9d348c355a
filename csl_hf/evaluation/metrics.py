"""Metrics as pure functions of arrays. Embeddings may be NumPy arrays or torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from csl_hf.evaluation.encoding import to_numpy

if TYPE_CHECKING:
    import torch

# Equal rows can differ by rounding after a matrix product: closer similarities than this count as equal.
_TIE = 1e-9
_QUERY_BLOCK = 256


def ranks_of_relevant(
    query_embeddings: np.ndarray | torch.Tensor, document_embeddings: np.ndarray | torch.Tensor
) -> np.ndarray:
    """Rank, for each query, of the one relevant document among all documents by cosine similarity.

    Parameters
    ----------
    query_embeddings : array of shape (N, d)
    document_embeddings : array of shape (N, d)
        Row i is the document that is relevant for query i.

    Returns
    -------
    ranks : int64 array of shape (N,)
        From 1 (best) to N. A tie counts against the relevant document: every document that is as similar as
        the relevant one (to within 1e-9) is placed before it. So an encoder that gives all texts the same
        embedding gets rank N for every query. With a single document the rank is 1.

    Raises
    ------
    ValueError
        If the shapes differ or are not (N, d), or if embeddings are not finite or have zero length.

    Notes
    -----
    Similarities are computed in double precision for 256 queries at a time: memory grows with N, not with N².
    """
    queries = _unit_rows(query_embeddings, "query embeddings")
    documents = _unit_rows(document_embeddings, "document embeddings")
    _require_equal_shapes(queries, documents)
    ranks = np.empty(len(queries), dtype=np.int64)
    for start in range(0, len(queries), _QUERY_BLOCK):
        similarity = queries[start : start + _QUERY_BLOCK] @ documents.T  # (block, N)
        rows = np.arange(len(similarity))
        relevant = similarity[rows, start + rows]
        # The relevant document itself is one of those counted: ranks begin at 1.
        ranks[start + rows] = (similarity >= relevant[:, None] - _TIE).sum(axis=1)
    return ranks


def mean_reciprocal_rank(ranks: np.ndarray, k: int = 10) -> float:
    """Mean over the queries of 1/rank, where a rank beyond ``k`` counts as 0 (MRR@k).

    Parameters
    ----------
    ranks : int array of shape (N,)
        1-based ranks, as from :func:`ranks_of_relevant`.
    k : int, default=10

    Returns
    -------
    float
        Between 0 (no relevant document among the first k) and 1 (all first); higher is better. By chance
        H_k/N for N >= k documents, where H_k = 1 + 1/2 + ... + 1/k.

    Raises
    ------
    ValueError
        If there is no rank, a rank is less than 1, or k is less than 1.
    """
    ranks = _checked_ranks(ranks, k)
    return float(np.where(ranks <= k, 1.0 / ranks, 0.0).mean())


def recall_at_k(ranks: np.ndarray, k: int) -> float:
    """Share of the queries whose relevant document is among the first ``k``.

    Parameters
    ----------
    ranks : int array of shape (N,)
        1-based ranks, as from :func:`ranks_of_relevant`.
    k : int

    Returns
    -------
    float
        Between 0 and 1; higher is better. By chance k/N; 1 whenever k is at least N.

    Raises
    ------
    ValueError
        If there is no rank, a rank is less than 1, or k is less than 1.
    """
    return float((_checked_ranks(ranks, k) <= k).mean())


def spearman(scores: np.ndarray, gold: np.ndarray) -> float:
    """Spearman's rank correlation between predicted scores and gold scores; ties get their mean rank.

    Parameters
    ----------
    scores, gold : arrays of shape (N,)

    Returns
    -------
    float
        Between -1 and 1; higher is better, 0 by chance. Only the order of the values matters.

    Raises
    ------
    ValueError
        If the shapes differ, there are fewer than 2 values, a value is not finite, or all values of one side
        are equal (the correlation is then not defined).
    """
    from scipy.stats import spearmanr

    scores, gold = to_numpy(scores), to_numpy(gold)
    if scores.ndim != 1 or scores.shape != gold.shape or len(scores) < 2:
        raise ValueError(
            f"scores and gold have shapes {scores.shape} and {gold.shape}; "
            "give two arrays of the same length, of at least 2 values."
        )
    for name, values in (("scores", scores), ("gold", gold)):
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise ValueError(f"{bad} of {len(values)} {name} are not finite (NaN or infinite).")
        if np.all(values == values[0]):
            raise ValueError(
                f"All {len(values)} {name} equal {values[0]:g}: the rank correlation is not defined. "
                "Predicted scores that are all equal mean that the encoder has collapsed."
            )
    return float(spearmanr(scores, gold).statistic)


def cosine_similarity_pairs(a: np.ndarray | torch.Tensor, b: np.ndarray | torch.Tensor) -> np.ndarray:
    """Cosine similarity of row i of ``a`` with row i of ``b``.

    Parameters
    ----------
    a, b : arrays of shape (N, d)

    Returns
    -------
    float64 array of shape (N,)
        Between -1 (opposite) and 1 (same direction).

    Raises
    ------
    ValueError
        If the shapes differ or are not (N, d), or if rows are not finite or have zero length.
    """
    a, b = _unit_rows(a, "embeddings of the first side"), _unit_rows(b, "embeddings of the second side")
    _require_equal_shapes(a, b)
    return np.clip((a * b).sum(axis=1), -1.0, 1.0)


def _unit_rows(array: np.ndarray | torch.Tensor, what: str) -> np.ndarray:
    rows = to_numpy(array)
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"The {what} have shape {rows.shape}; expected (N, d) with at least one row and column.")
    infinite = int((~np.isfinite(rows)).any(axis=1).sum())
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    zero = int((norms == 0).sum())
    if infinite or zero:
        raise ValueError(
            f"Of {len(rows)} {what}, {infinite} are not finite and {zero} have length zero, so that their "
            "cosine is not defined. Look for a diverged training run or for empty texts."
        )
    return rows / norms


def _require_equal_shapes(a: np.ndarray, b: np.ndarray) -> None:
    if a.shape != b.shape:
        raise ValueError(f"The embeddings have shapes {a.shape} and {b.shape}; both sides need the same (N, d).")


def _checked_ranks(ranks: np.ndarray, k: int) -> np.ndarray:
    ranks = np.asarray(ranks)
    if ranks.size == 0 or ranks.min() < 1:
        raise ValueError("Ranks must be given, and count from 1 (the best).")
    if k < 1:
        raise ValueError(f"k is {k}; give a number of at least 1.")
    return ranks
