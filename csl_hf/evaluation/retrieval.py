"""Retrieval with one relevant document for each query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from csl_hf.evaluation.encoding import encode_texts
from csl_hf.evaluation.metrics import mean_reciprocal_rank, ranks_of_relevant, recall_at_k

if TYPE_CHECKING:
    from csl_hf.evaluation.encoding import Encode


class RetrievalEvaluator:
    """How well each query finds its own document among all documents, by cosine similarity.

    Args:
        queries: N texts.
        documents: N texts; ``documents[i]`` is the only relevant one for ``queries[i]``.
        name: Prefix of the metric names.
        batch_size: Most texts handed to the encoder at once.

    Calling the evaluator with ``encode`` (list of B texts -> (B, d) array or tensor) returns
    ``{name}_mrr@10``, ``{name}_recall@1`` and ``{name}_recall@10``, each between 0 and 1, higher is better.

    Raises:
        ValueError: If there are no pairs or the two lists differ in length; when called, if embeddings are
            not finite or have zero length.
    """

    greater_is_better = True

    def __init__(
        self, queries: Sequence[str], documents: Sequence[str], name: str = "retrieval", batch_size: int = 128
    ) -> None:
        if not queries or len(queries) != len(documents):
            raise ValueError(
                f"There are {len(queries)} queries and {len(documents)} documents; "
                "give as many of one as of the other, and at least one."
            )
        self.queries, self.documents = list(queries), list(documents)
        self.name, self.batch_size = name, batch_size
        self.primary_metric = f"{name}_mrr@10"

    def __call__(self, encode: Encode) -> dict[str, float]:
        ranks = ranks_of_relevant(
            encode_texts(encode, self.queries, self.batch_size),
            encode_texts(encode, self.documents, self.batch_size),
        )
        return {
            self.primary_metric: mean_reciprocal_rank(ranks, 10),
            f"{self.name}_recall@1": recall_at_k(ranks, 1),
            f"{self.name}_recall@10": recall_at_k(ranks, 10),
        }
