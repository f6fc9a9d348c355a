"""The retrieval evaluator: hand-derived values, agreement with sentence-transformers, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from csl_hf.evaluation import RetrievalEvaluator


def encoder(vectors: dict[str, np.ndarray], as_tensor: bool = False):
    """An encoder that looks its embeddings up."""

    def encode(texts: list[str]):
        stacked = np.stack([vectors[text] for text in texts])
        return torch.tensor(stacked) if as_tensor else stacked

    return encode


def random_task(n: int, seed: int = 0):
    """Pairs whose documents are noisy copies of their queries, so that ranks vary."""
    generator = np.random.default_rng(seed)
    queries, documents = [f"query {i}" for i in range(n)], [f"document {i}" for i in range(n)]
    base = generator.normal(size=(n, 6))
    noisy = base + 0.8 * generator.normal(size=(n, 6))
    vectors = {**dict(zip(queries, base, strict=True)), **dict(zip(documents, noisy, strict=True))}
    return queries, documents, vectors


@pytest.mark.parametrize("as_tensor", [False, True])
def test_by_hand(as_tensor):
    """q1 finds d1 first; q2 = (0, 1) has d1 = (1, .1) and d3 = (.2, 1) before d2 = (1, 0): ranks 1, 3, 1."""
    vectors = {"q1": (1, 0.1), "q2": (0, 1), "q3": (0.2, 1), "d1": (1, 0.1), "d2": (1, 0), "d3": (0.2, 1)}
    vectors = {name: np.array(value, dtype=float) for name, value in vectors.items()}
    evaluator = RetrievalEvaluator(["q1", "q2", "q3"], ["d1", "d2", "d3"], name="docs", batch_size=2)
    assert evaluator(encoder(vectors, as_tensor)) == pytest.approx(
        {"docs_mrr@10": (1 + 1 / 3 + 1) / 3, "docs_recall@1": 2 / 3, "docs_recall@10": 1.0}
    )
    assert evaluator.primary_metric == "docs_mrr@10" and evaluator.greater_is_better is True


class StubModel:
    """What sentence-transformers' evaluator asks of a model."""

    similarity_fn_name = "cosine"
    prompts: dict[str, str] = {}
    device = torch.device("cpu")

    def __init__(self, vectors):
        self.vectors = vectors
        self.model_card_data = type("Card", (), {"set_evaluation_metrics": lambda *args, **kwargs: None})()

    def encode(self, texts, **kwargs):
        return torch.tensor(np.stack([self.vectors[text] for text in texts]))

    encode_query = encode_document = encode

    def similarity(self, a, b):
        return torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(b, dim=-1).T


def test_equals_sentence_transformers():
    queries, documents, vectors = random_task(150)
    ours = RetrievalEvaluator(queries, documents)(encoder(vectors))
    assert 0.1 < ours["retrieval_recall@1"] < ours["retrieval_mrr@10"] < ours["retrieval_recall@10"] < 1
    theirs = InformationRetrievalEvaluator(
        {f"q{i}": text for i, text in enumerate(queries)},
        {f"d{i}": text for i, text in enumerate(documents)},
        {f"q{i}": {f"d{i}"} for i in range(len(queries))},
        mrr_at_k=[10],
        accuracy_at_k=[1, 10],
        write_csv=False,
    )(StubModel(vectors))
    assert ours["retrieval_mrr@10"] == pytest.approx(theirs["cosine_mrr@10"])
    assert ours["retrieval_recall@1"] == pytest.approx(theirs["cosine_accuracy@1"])
    assert ours["retrieval_recall@10"] == pytest.approx(theirs["cosine_accuracy@10"])


def test_order_of_the_pairs_does_not_matter():
    queries, documents, vectors = random_task(60, seed=1)
    order = np.random.default_rng(2).permutation(60)
    shuffled = RetrievalEvaluator([queries[i] for i in order], [documents[i] for i in order])
    metrics = RetrievalEvaluator(queries, documents)(encoder(vectors))
    assert shuffled(encoder(vectors)) == pytest.approx(metrics)
    wrong = RetrievalEvaluator(queries, documents[1:] + documents[:1])(encoder(vectors))
    assert wrong["retrieval_mrr@10"] < metrics["retrieval_mrr@10"] / 2


def test_a_collapsed_encoder_finds_nothing():
    queries, documents, _ = random_task(50)
    metrics = RetrievalEvaluator(queries, documents)(lambda texts: np.ones((len(texts), 4)))
    assert set(metrics.values()) == {0.0}


def test_errors():
    with pytest.raises(ValueError, match="2 queries and 1 documents"):
        RetrievalEvaluator(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="0 queries"):
        RetrievalEvaluator([], [])
    queries, documents, vectors = random_task(5)
    vectors["query 3"] = np.full(6, np.nan)
    with pytest.raises(ValueError, match="Of 5 query embeddings, 1 are not finite"):
        RetrievalEvaluator(queries, documents)(encoder(vectors))
