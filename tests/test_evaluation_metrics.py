"""Metrics: hand-derived values, agreement with SciPy, permutation, chance, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, rankdata, spearmanr

from csl_hf.evaluation import (
    cosine_similarity_pairs,
    mean_reciprocal_rank,
    ranks_of_relevant,
    recall_at_k,
    spearman,
)
from csl_hf.evaluation.encoding import encode_texts


def test_ranks_by_hand():
    """Documents at 0, 30, 90 degrees; queries at 10, 20, 50.

    Query 10: distances 10, 20, 80 -> its document (0) is 1st.
    Query 20: distances 20, 10, 70 -> its document (30) is 1st.
    Query 50: distances 50, 20, 40 -> its document (90) is 2nd.
    """
    ranks = ranks_of_relevant(at_degrees([10, 20, 50]), at_degrees([0, 30, 90]))
    assert ranks.tolist() == [1, 1, 2] and ranks.dtype == np.int64
    # The lengths of the vectors do not matter.
    scaled = ranks_of_relevant(at_degrees([10, 20, 50]) * [[3], [0.01], [7]], at_degrees([0, 30, 90]) * 5)
    assert scaled.tolist() == [1, 1, 2]


def at_degrees(angles):
    radians = np.deg2rad(np.asarray(angles, dtype=float))
    return np.stack([np.cos(radians), np.sin(radians)], axis=1)


def test_ties_count_against_the_relevant_document():
    # 0 and 20 degrees are equally far from 10; the third document is far.
    assert ranks_of_relevant(at_degrees([10, 10, 170]), at_degrees([0, 20, 180])).tolist() == [2, 2, 1]
    collapsed = np.ones((7, 3)) + 1e-13 * np.arange(7)[:, None]
    assert ranks_of_relevant(collapsed, collapsed).tolist() == [7] * 7


def test_ranks_over_several_blocks_equal_a_sort(monkeypatch):
    generator = np.random.default_rng(0)
    queries, documents = generator.normal(size=(600, 8)), generator.normal(size=(600, 8))
    similarity = (queries / np.linalg.norm(queries, axis=1, keepdims=True)) @ (
        documents / np.linalg.norm(documents, axis=1, keepdims=True)
    ).T
    expected = [int(np.argsort(-row).tolist().index(i)) + 1 for i, row in enumerate(similarity)]
    assert ranks_of_relevant(queries, documents).tolist() == expected


def test_ranks_follow_a_permutation_of_the_pairs():
    generator = np.random.default_rng(1)
    queries, documents = generator.normal(size=(50, 4)), generator.normal(size=(50, 4))
    order = generator.permutation(50)
    ranks = ranks_of_relevant(queries, documents)
    assert len(set(ranks.tolist())) > 5
    assert ranks_of_relevant(queries[order], documents[order]).tolist() == ranks[order].tolist()


def test_torch_and_bfloat16_embeddings():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(20, 4, generator=generator).bfloat16().requires_grad_()
    documents = torch.randn(20, 4, generator=generator).bfloat16()
    expected = ranks_of_relevant(queries.detach().double().numpy(), documents.double().numpy())
    assert ranks_of_relevant(queries, documents).tolist() == expected.tolist()


def test_mrr_and_recall_by_hand():
    """Ranks 1, 2, 4, 11: MRR@10 = (1 + 1/2 + 1/4 + 0) / 4 = 0.4375; within 1: 1/4, within 10: 3/4."""
    ranks = np.array([1, 2, 4, 11])
    assert mean_reciprocal_rank(ranks) == pytest.approx(0.4375)
    assert mean_reciprocal_rank(ranks, k=11) == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 11) / 4)
    assert recall_at_k(ranks, 1) == 0.25 and recall_at_k(ranks, 10) == 0.75 and recall_at_k(ranks, 11) == 1.0


def test_chance_level_of_random_embeddings():
    generator = np.random.default_rng(2)
    ranks = ranks_of_relevant(generator.normal(size=(2000, 16)), generator.normal(size=(2000, 16)))
    assert abs(ranks.mean() - 1000.5) < 50  # standard error about 13
    assert recall_at_k(ranks, 200) == pytest.approx(0.1, abs=0.03)
    # H_10 / 2000 = 0.00146
    assert mean_reciprocal_rank(ranks) < 0.006


def test_spearman_by_hand_and_with_ties():
    """Ranks 1 2 3 4 against 2 1 3 4: 1 - 6 (1 + 1) / (4 * 15) = 0.8."""
    assert spearman([0.1, 0.2, 0.3, 9.0], [2, 1, 3, 4]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1.0)
    generator = np.random.default_rng(3)
    scores, gold = generator.normal(size=100), generator.integers(0, 6, size=100)
    assert spearman(scores, gold) == pytest.approx(spearmanr(scores, gold).statistic)
    assert spearman(scores, gold) == pytest.approx(pearsonr(rankdata(scores), rankdata(gold)).statistic)
    assert spearman(np.exp(scores), gold * 100) == pytest.approx(spearman(scores, gold))  # order only


@pytest.mark.parametrize(
    ("scores", "gold", "message"),
    [
        ([1.0, 1.0, 1.0], [1, 2, 3], "All 3 scores equal 1"),
        ([1.0, 2.0, 3.0], [5, 5, 5], "All 3 gold equal 5"),
        ([1.0, np.nan, np.inf], [1, 2, 3], "2 of 3 scores are not finite"),
        ([1.0, 2.0], [1, 2, 3], "same length"),
        ([1.0], [1.0], "at least 2"),
    ],
)
def test_spearman_errors(scores, gold, message):
    with pytest.raises(ValueError, match=message):
        spearman(scores, gold)


def test_cosine_of_pairs():
    """(1, 0) with (1, 1): 1/sqrt 2; (0, 2) with (0, -3): -1; (3, 4) with (4, 3): 24/25."""
    a, b = np.array([[1.0, 0], [0, 2], [3, 4]]), np.array([[1.0, 1], [0, -3], [4, 3]])
    assert cosine_similarity_pairs(a, b) == pytest.approx([2**-0.5, -1.0, 0.96])
    assert cosine_similarity_pairs(torch.tensor(a), torch.tensor(b)) == pytest.approx([2**-0.5, -1.0, 0.96])


def test_bad_embeddings_are_counted():
    good, bad = np.ones((5, 2)), np.ones((5, 2))
    bad[1] = 0
    bad[2, 0], bad[4, 1] = np.nan, np.inf
    with pytest.raises(ValueError, match="Of 5 document embeddings, 2 are not finite and 1 have length zero"):
        ranks_of_relevant(good, bad)
    with pytest.raises(ValueError, match="2 are not finite and 1 have length zero"):
        cosine_similarity_pairs(bad, good)
    for other in (np.ones((4, 2)), np.ones((5, 3))):
        with pytest.raises(ValueError, match="both sides need the same"):
            ranks_of_relevant(good, other)
    with pytest.raises(ValueError, match="expected"):
        ranks_of_relevant(np.ones(5), np.ones(5))


def test_bad_ranks():
    for ranks, k in (([], 10), ([0, 1], 10), ([1], 0)):
        with pytest.raises(ValueError):
            mean_reciprocal_rank(np.array(ranks), k)
        with pytest.raises(ValueError):
            recall_at_k(np.array(ranks), k)


def test_encode_texts_encodes_each_text_once_and_keeps_the_order():
    calls = []

    def encode(texts):
        calls.append(list(texts))
        return torch.tensor([[float(len(text)), ord(text[0])] for text in texts])

    embeddings = encode_texts(encode, ["ccc", "a", "bb", "a", "d"], batch_size=2)
    assert embeddings.tolist() == [[3, 99], [1, 97], [2, 98], [1, 97], [1, 100]]
    assert calls == [["a", "d"], ["bb", "ccc"]]  # of similar length, at most two
    with pytest.raises(ValueError, match=r"shape \(1, 2\) for 2 texts"):
        encode_texts(lambda texts: np.ones((1, 2)), ["a", "b"])
    with pytest.raises(ValueError, match="no texts"):
        encode_texts(encode, [])
    with pytest.raises(ValueError, match="batch_size is 0"):
        encode_texts(encode, ["a"], batch_size=0)
