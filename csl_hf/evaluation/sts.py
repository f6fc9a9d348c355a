"""Semantic textual similarity: does the cosine of two sentences rank pairs as people do?"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from csl_hf.evaluation.encoding import encode_texts
from csl_hf.evaluation.metrics import cosine_similarity_pairs, spearman

if TYPE_CHECKING:
    from csl_hf.evaluation.encoding import Encode

COLUMNS = ("sentence1", "sentence2", "score")
_FILE_SUFFIXES = (".tsv", ".txt", ".csv", ".gz")


def read_sts_file(path: str | Path) -> tuple[list[str], list[str], list[float]]:
    """Read sentence pairs with gold scores from a tab-separated file, plain or ``.gz``.

    The first line names the columns, among them ``sentence1``, ``sentence2`` and ``score``, in any order.
    Quotation marks have no special meaning. Empty lines are skipped.

    Returns:
        First sentences, second sentences, scores: three lists of equal length.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not UTF-8, lacks a column (the error names those there are), holds no pair, or a
            line has the wrong number of fields or a score that is not a finite number (it names the line).
    """
    lines = _lines(Path(path))
    header = next(lines, (1, [""]))[1]
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; its first line names: "
            f"{', '.join(header) or 'nothing'}. Expected tab-separated columns {', '.join(COLUMNS)}."
        )
    first, second, score = (header.index(column) for column in COLUMNS)
    sentences1, sentences2, scores = [], [], []
    for number, fields in lines:
        if len(fields) != len(header):
            raise ValueError(f"{path}, line {number}: {len(fields)} fields where the header has {len(header)}.")
        sentences1.append(fields[first])
        sentences2.append(fields[second])
        scores.append(_score(fields[score], f"{path}, line {number}"))
    if not scores:
        raise ValueError(f"{path} has a header but no pairs.")
    return sentences1, sentences2, scores


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number from 1, fields) of the lines that are not empty."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give a tab-separated file with {', '.join(COLUMNS)}.")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # Only "\n" ends a line: sentences may hold other separators that Python takes for line ends.
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if text := line.rstrip("\r\n"):
                    yield number, text.split("\t")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}). Convert it to UTF-8.") from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}). Fetch it again.") from error


def _score(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{where}: the score {text!r} is not a finite number.")
    return value


def load_sts(path_or_hub_id: str | Path, split: str = "validation") -> tuple[list[str], list[str], list[float]]:
    """Load sentence pairs with gold scores from a file (see :func:`read_sts_file`) or the Hugging Face Hub.

    Args:
        path_or_hub_id: A file, or the id of a dataset with columns ``sentence1``, ``sentence2`` and
            ``score``, for example ``sentence-transformers/stsb``.
        split: The split of a Hub dataset; not used for a file.

    Raises:
        FileNotFoundError: If it is neither a file nor a dataset that can be reached.
        ValueError: As for :func:`read_sts_file`.
    """
    source = os.path.expanduser(path_or_hub_id)
    if not source:
        raise FileNotFoundError("The name of the STS file is empty. Give a tab-separated file or a dataset id.")
    if Path(source).is_file() or source.endswith(_FILE_SUFFIXES):
        return _with_an_order(read_sts_file(source), source)
    from datasets import load_dataset

    try:
        pairs = load_dataset(source, split=split)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{source!r} is not a file, and no dataset of that name could be loaded ({error}). "
            "Give a tab-separated file or the id of a dataset on the Hugging Face Hub."
        ) from error
    missing = [column for column in COLUMNS if column not in pairs.column_names]
    if missing:
        raise ValueError(
            f"The dataset {source} has no column {', '.join(missing)}; its columns are "
            f"{', '.join(pairs.column_names)}. Expected {', '.join(COLUMNS)}."
        )
    scores = [_score(str(value), f"{source}, row {row}") for row, value in enumerate(pairs["score"])]
    return _with_an_order((list(pairs["sentence1"]), list(pairs["sentence2"]), scores), source)


def _with_an_order(
    pairs: tuple[list[str], list[str], list[float]], source: str
) -> tuple[list[str], list[str], list[float]]:
    scores = pairs[2]
    if len(set(scores)) < 2:
        raise ValueError(
            f"{source} has {len(scores)} pairs, all with the score {scores[0]}: a rank correlation needs at least two "
            "pairs with different scores."
        )
    return pairs


class StsEvaluator:
    """Spearman correlation, times 100, between the cosine of each pair's embeddings and its gold score.

    Args:
        sentences1, sentences2: N texts each.
        scores: N gold scores, on any scale.
        name: Prefix of the metric name.
        batch_size: Most texts handed to the encoder at once.

    Calling the evaluator with ``encode`` (list of B texts -> (B, d) array or tensor) returns
    ``{name}_spearman``, between -100 and 100, higher is better. Every distinct sentence is encoded once.

    Raises:
        ValueError: If the lists differ in length or have fewer than 2 entries; when called, if embeddings are
            not finite or have zero length, or if all cosines or all gold scores are equal.
    """

    greater_is_better = True

    def __init__(
        self,
        sentences1: Sequence[str],
        sentences2: Sequence[str],
        scores: Sequence[float],
        name: str = "stsb_dev",
        batch_size: int = 128,
    ) -> None:
        if not len(sentences1) == len(sentences2) == len(scores) >= 2:
            raise ValueError(
                f"sentences1, sentences2 and scores have {len(sentences1)}, {len(sentences2)} and "
                f"{len(scores)} entries; give three lists of the same length, of at least 2."
            )
        self.sentences1, self.sentences2 = list(sentences1), list(sentences2)
        self.scores = np.asarray(scores, dtype=np.float64)
        self.batch_size = batch_size
        self.primary_metric = f"{name}_spearman"

    def __call__(self, encode: Encode) -> dict[str, float]:
        embeddings = encode_texts(encode, self.sentences1 + self.sentences2, self.batch_size)
        first, second = np.split(embeddings, 2)
        # Pairs of equal sentences (61 in STS12) must tie at 1, which rounding errors would prevent.
        cosines = np.round(cosine_similarity_pairs(first, second), 9)
        return {self.primary_metric: 100 * spearman(cosines, self.scores)}
