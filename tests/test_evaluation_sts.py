"""STS files and the STS evaluator: hand-derived values, agreement with sentence-transformers, errors."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from csl_hf.evaluation import StsEvaluator, load_sts, read_sts_file

TEXT = 'score\tsentence1\tsentence2\n5.0\tA "quoted cat.\tThe cat.\u2028Still it.\n\n0\tNo.\tYes.\n'
ROWS = (['A "quoted cat.', "No."], ["The cat.\u2028Still it.", "Yes."], [5.0, 0.0])


def test_read_plain_gzip_and_other_layouts(tmp_path):
    (tmp_path / "a.tsv").write_text(TEXT, encoding="utf-8")
    with gzip.open(tmp_path / "a.tsv.gz", "wt", encoding="utf-8", newline="") as file:
        file.write(TEXT)
    other = "\ufeffsubset\tsentence2\tsentence1\tscore\r\nx\tYes.\tNo.\t1e0\r\n"  # byte-order mark, CRLF
    (tmp_path / "b.tsv").write_bytes(other.encode())
    assert read_sts_file(tmp_path / "a.tsv") == ROWS
    assert read_sts_file(str(tmp_path / "a.tsv.gz")) == ROWS
    assert load_sts(tmp_path / "a.tsv") == ROWS
    assert read_sts_file(tmp_path / "b.tsv") == (["No."], ["Yes."], [1.0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"score\tleft\tright\n1\ta\tb\n", r"no column sentence1, sentence2; .* names: score, left, right"),
        (b"", "no column sentence1, sentence2, score; .* nothing"),
        (b"score\tsentence1\tsentence2\n", "no pairs"),
        (b"score\tsentence1\tsentence2\n1\ta\tb\n\nhigh\ta\tb\n", "line 4: the score 'high'"),
        (b"score\tsentence1\tsentence2\nnan\ta\tb\n", "line 2: the score 'nan' is not a finite number"),
        (b"score\tsentence1\tsentence2\n1\ta\n", "line 2: 2 fields where the header has 3"),
        (b"score\tsentence1\tsentence2\n1\t\xff\tb\n", "not UTF-8"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "bad.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_sts_file(path)


def test_missing_and_cut_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        load_sts(tmp_path / "none.tsv")
    content = TEXT + "".join(f"{i % 6}\tSentence {i}.\tSentence {i * i}.\n" for i in range(200))
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(content.encode())[:-12])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        read_sts_file(tmp_path / "cut.tsv.gz")
    (tmp_path / "plain.tsv.gz").write_text(TEXT, encoding="utf-8")
    with pytest.raises(ValueError, match="not a whole gzip file"):
        read_sts_file(tmp_path / "plain.tsv.gz")


def test_load_from_a_dataset(tmp_path):
    """A folder stands in for a Hub id: both go through datasets.load_dataset."""
    folder = tmp_path / "stsb"
    folder.mkdir()
    for split, score in (("validation", 0.5), ("test", 0.25)):
        (folder / f"{split}.csv").write_text(f"sentence1,sentence2,score\nOne.,Two.,{score}\nA.,B.,1.0\n")
    assert load_sts(folder) == (["One.", "A."], ["Two.", "B."], [0.5, 1.0])
    assert load_sts(folder, split="test") == (["One.", "A."], ["Two.", "B."], [0.25, 1.0])
    (folder / "validation.csv").write_text("a,b\n1,2\n")
    (folder / "test.csv").unlink()
    with pytest.raises(ValueError, match="no column sentence1, sentence2, score; its columns are a, b"):
        load_sts(folder)


def test_unreachable_dataset(monkeypatch):
    def unreachable(name, split):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match="'someone/nothing' is not a file, and no dataset .*no network"):
        load_sts("someone/nothing")


def lookup(vectors):
    return lambda texts: np.stack([vectors[text] for text in texts])


def test_evaluator_by_hand():
    """Cosines of the pairs: (a, b) 0, (a, c) 1/sqrt 2, (a, a) 1, (c, d) -1.

    Gold 1, 2, 3, 0 has the same order: 100. Gold 2, 1, 3, 0 exchanges two neighbours: 80.
    """
    vectors = {"a": np.array([1.0, 0]), "b": np.array([0.0, 2]), "c": np.array([3.0, 3]), "d": -np.ones(2)}
    pairs = (["a", "a", "a", "c"], ["b", "c", "a", "d"])
    encode = lookup(vectors)
    assert StsEvaluator(*pairs, [1, 2, 3, 0])(encode) == pytest.approx({"stsb_dev_spearman": 100})
    evaluator = StsEvaluator(*pairs, [2, 1, 3, 0], name="x")
    assert evaluator(encode) == pytest.approx({"x_spearman": 80})
    assert evaluator.primary_metric == "x_spearman" and evaluator.greater_is_better is True


def random_pairs(n: int = 80):
    generator = np.random.default_rng(0)
    texts = [f"text {i}" for i in range(30)]
    vectors = {text: generator.normal(size=5) for text in texts}
    # No pair of a text with itself: there sentence-transformers breaks ties by rounding errors.
    first, second = np.array([generator.choice(texts, 2, replace=False) for _ in range(n)]).T.tolist()
    return first, second, generator.uniform(0, 5, n).tolist(), vectors


class StubModel:
    similarity_fn_name = "cosine"

    def __init__(self, vectors):
        self.vectors = vectors
        self.model_card_data = type("Card", (), {"set_evaluation_metrics": lambda *args, **kwargs: None})()

    def encode(self, texts, **kwargs):
        return np.stack([self.vectors[text] for text in texts])


def test_equals_sentence_transformers():
    first, second, scores, vectors = random_pairs()
    theirs = EmbeddingSimilarityEvaluator(first, second, scores, write_csv=False, main_similarity="cosine")
    ours = StsEvaluator(first, second, scores)(lookup(vectors))["stsb_dev_spearman"]
    assert abs(ours) > 1
    assert ours == pytest.approx(100 * theirs(StubModel(vectors))["spearman_cosine"], abs=1e-6)


def test_order_of_pairs_and_of_sides_does_not_matter_and_texts_are_encoded_once():
    first, second, scores, vectors = random_pairs()
    seen: list[str] = []

    def encode(texts):
        seen.extend(texts)
        return torch.tensor(lookup(vectors)(texts))

    value = StsEvaluator(first, second, scores, batch_size=7)(encode)["stsb_dev_spearman"]
    assert sorted(seen) == sorted(set(first + second))
    order = np.random.default_rng(1).permutation(len(first))
    shuffled = [[side[i] for i in order] for side in (second, first, scores)]
    assert StsEvaluator(*shuffled)(encode)["stsb_dev_spearman"] == pytest.approx(value)


def test_pairs_of_equal_sentences_tie():
    """Cosine 1 for each of twelve equal pairs, whatever the vectors: their mean rank is shared."""
    first, second, scores, vectors = random_pairs(20)
    equal = list(vectors)[:12]
    scores += np.linspace(0, 5, 12).tolist()
    cosines = [cosine(vectors[a], vectors[b]) for a, b in zip(first, second, strict=True)] + [1.0] * 12
    value = StsEvaluator(first + equal, second + equal, scores)(lookup(vectors))["stsb_dev_spearman"]
    assert value == pytest.approx(100 * spearmanr(cosines, scores).statistic)


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def test_evaluator_errors():
    with pytest.raises(ValueError, match="have 1, 2 and 2 entries"):
        StsEvaluator(["a"], ["b", "c"], [1, 2])
    with pytest.raises(ValueError, match="at least 2"):
        StsEvaluator(["a"], ["b"], [1])
    with pytest.raises(ValueError, match="All 2 scores equal 1: .*collapsed"):
        StsEvaluator(["a", "b"], ["c", "d"], [1, 2])(lambda texts: np.ones((len(texts), 3)))
    with pytest.raises(ValueError, match="are not finite"):
        StsEvaluator(["a", "b"], ["c", "d"], [1, 2])(lambda texts: np.full((len(texts), 3), np.nan))


@pytest.mark.shared
def test_shared_files_have_the_published_sizes(shared_dir):
    sizes = {"stsb-dev": 1500, "stsb-test": 1379, "sts16": 1186, "sickr-test": 4927}
    for name, rows in sizes.items():
        first, second, scores = read_sts_file(shared_dir / "data" / "sts" / f"{name}.tsv")
        assert len(first) == len(second) == len(scores) == rows
        assert 0 <= min(scores) < max(scores) <= 5


def test_file_without_an_order_is_named(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text("score\tsentence1\tsentence2\n1\ta\tb\n1\tc\td\n")
    with pytest.raises(ValueError, match="dev.tsv has 2 pairs, all with the score 1.0"):
        load_sts(path)
    with pytest.raises(FileNotFoundError, match="name of the STS file is empty"):
        load_sts("")
