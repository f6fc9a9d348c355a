"""Evaluation of sentence encoders: an evaluator is called with ``encode``, list of N texts -> (N, d)."""

from csl_hf.evaluation.metrics import (
    cosine_similarity_pairs,
    mean_reciprocal_rank,
    ranks_of_relevant,
    recall_at_k,
    spearman,
)
from csl_hf.evaluation.retrieval import RetrievalEvaluator
from csl_hf.evaluation.sts import StsEvaluator, load_sts, read_sts_file

__all__ = [
    "RetrievalEvaluator",
    "StsEvaluator",
    "cosine_similarity_pairs",
    "load_sts",
    "mean_reciprocal_rank",
    "ranks_of_relevant",
    "read_sts_file",
    "recall_at_k",
    "spearman",
]
