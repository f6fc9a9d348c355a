"""From any text source to batches of token ids: load, clean, tokenise, collate.

    texts = load_texts("sentences.txt.gz")
    texts, report = clean_texts(texts)
    tokens, report.truncated = tokenize_texts(texts, tokenizer, max_length=32)
    collator = ContrastiveCollator(tokenizer)  # features -> (B, V, L)

Texts stay on disk (memory-mapped Arrow files in the cache of `datasets`); what is held in memory are a digest
of each text while cleaning, and the numbers of the rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import unicodedata
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, Value
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from csl_hf.text_sources import load_texts

__all__ = [
    "CleaningReport",
    "ContrastiveCollator",
    "clean_texts",
    "load_texts",
    "take_samples",
    "tokenize_texts",
]

logger = logging.getLogger(__name__)

# Part of the cache key: raise it when the same text comes to be tokenised differently.
TOKENS_VERSION = 1
BATCH_SIZE = 1000


@dataclass
class CleaningReport:
    """How many texts a source gave and why some were left out.

    `rows_read == null + empty + duplicates + kept`. `truncated` is the share (0 to 1) of the kept texts that
    were cut off at `max_length` tokens; both are None until the texts are tokenised.
    """

    rows_read: int
    null: int = 0
    empty: int = 0
    duplicates: int = 0
    kept: int = 0
    truncated: float | None = None
    max_length: int | None = None

    def summary(self) -> str:
        """Return the report as one line of English."""
        line = (
            f"{self.rows_read:,} texts read, {self.kept:,} kept; "
            f"dropped: {self.null:,} null, {self.empty:,} empty, {self.duplicates:,} repeated"
        )
        if self.truncated is not None:
            limit = "" if self.max_length is None else f" at {self.max_length} tokens"
            line += f"; {self.truncated:.1%} of the kept texts cut off{limit}"
        return line

    def to_dict(self) -> dict[str, int | float | None]:
        """Return the fields as a dict that JSON can hold."""
        return asdict(self)


def clean_texts(dataset: Dataset, min_texts: int = 2) -> tuple[Dataset, CleaningReport]:
    """Drop null, empty and repeated texts; return the rest, unchanged and in order, and a report.

    Empty is what holds only white space. Two texts are the same if they are equal after stripping outer white
    space and Unicode normalisation (NFC); the first one is kept. They are compared by digests of 128 bits.

    Raises:
        ValueError: a row is no string (names row and type), or fewer than `min_texts` texts are left.
    """
    report = CleaningReport(rows_read=len(dataset))
    seen: set[bytes] = set()
    kept = array("q")
    position = 0
    with tqdm(total=len(dataset), desc="Cleaning", unit=" texts") as bar:
        for batch in dataset.with_format(None).iter(BATCH_SIZE):
            rows = batch.get("row") or range(position, position + len(batch["text"]))
            for text, row in zip(batch["text"], rows, strict=True):
                if _is_new(text, row, seen, report):
                    kept.append(position)
                position += 1
            bar.update(len(batch["text"]))
    report.kept = len(kept)
    if report.kept < min_texts:
        raise ValueError(
            f"{report.kept} distinct texts are left, at least {min_texts} are needed ({report.summary()}). "
            "Check the source and --text_column."
        )
    if report.kept < report.rows_read:
        dataset = dataset.select(np.frombuffer(kept, dtype=np.int64))
    logger.info("%s", report.summary())
    return dataset, report


def _is_new(text: Any, row: int, seen: set[bytes], report: CleaningReport) -> bool:
    """Tell whether to keep `text`; count it in `report` otherwise."""
    if text is None:
        report.null += 1
        return False
    if not isinstance(text, str):
        raise ValueError(
            f"Row {row} holds {type(text).__name__} ({str(text)[:40]!r}), expected a string or null. "
            "Choose the column with the texts with --text_column."
        )
    stripped = text.strip()
    if not stripped:
        report.empty += 1
        return False
    digest = hashlib.blake2b(unicodedata.normalize("NFC", stripped).encode(), digest_size=16).digest()
    if digest in seen:
        report.duplicates += 1
        return False
    seen.add(digest)
    return True


def take_samples(dataset: Dataset, n: int | None, seed: int | None = None) -> Dataset:
    """Return the first `n` rows, or `n` random ones in random order if a seed is given; for None, all.

    An `n` above the number of rows takes them all and is logged. ValueError if `n` is below 1.
    """
    if n is None:
        return dataset
    if n < 1:
        raise ValueError(f"max_train_samples is {n}, expected at least 1 (or leave it out to take all texts).")
    if n > len(dataset):
        logger.warning(
            "max_train_samples is %s, but there are only %s texts: taking all.", f"{n:,}", f"{len(dataset):,}"
        )
    if seed is not None:
        dataset = dataset.shuffle(seed=seed)
    return dataset.select(range(min(n, len(dataset))))


def tokenize_texts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    num_proc: int = 1,
    *,
    keep_text: bool = False,
    cache_dir: str | os.PathLike | None = None,
) -> tuple[Dataset, float]:
    """Tokenise `text` to at most `max_length` tokens, special ones included; return also the share cut off.

    The result has the columns `input_ids` (list of int32), `row`, `text_id` (int64, 0 to 2^63 - 1: a hash of
    `input_ids`, so that equal model inputs have equal ids in every run) and, with `keep_text`, `text`. It is
    cached on disk by the data, the tokenizer, `max_length` and `keep_text`, whatever `num_proc` is.

    Args:
        dataset: with the columns `text` (no null) and `row`, as from `clean_texts`.
        cache_dir: by default the cache of `datasets`, also for data from elsewhere, which may be read-only.

    Raises:
        ValueError: no texts, `max_length` leaves no room, or a text gives no token (names the row).
    """
    if not len(dataset):
        raise ValueError("There are no texts to tokenise. Expected a dataset as from clean_texts.")
    special = tokenizer.num_special_tokens_to_add()
    if max_length <= special:
        raise ValueError(f"max_length is {max_length}, but the tokenizer adds {special} special tokens: give more.")
    # The default fingerprint of `map` is not stable: calling a tokenizer changes its state. `_fingerprint`
    # names the data; `datasets` has no public name for it.
    identity = _tokenizer_identity(tokenizer)
    key = _digest([TOKENS_VERSION, dataset._fingerprint, identity, max_length, keep_text])
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "csl_hf_tokens"
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"text": dataset.features["text"]} if keep_text else {}
    columns |= {"row": Value("int64"), "input_ids": datasets.List(Value("int32"))}
    columns |= {"text_id": Value("int64"), "truncated": Value("bool")}
    tokens = dataset.select_columns(["text", "row"]).map(
        _tokenize_batch,
        batched=True,
        batch_size=BATCH_SIZE,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        remove_columns=None if keep_text else ["text"],
        features=Features(columns),
        num_proc=num_proc if num_proc > 1 else None,
        new_fingerprint=key,
        cache_file_name=str(folder / f"{key}.arrow"),
        desc="Tokenising",
    )
    truncated_share = pc.mean(tokens.data.column("truncated")).as_py()
    return tokens.remove_columns("truncated"), truncated_share


def _tokenize_batch(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list]:
    encoded = tokenizer(batch["text"], truncation=True, max_length=max_length)
    input_ids = encoded["input_ids"]
    if not all(input_ids):
        row = batch["row"][input_ids.index([])]
        raise ValueError(f"The text of row {row} gives no tokens with this tokenizer. Remove it.")
    if encoded.encodings is not None:
        truncated = [bool(encoding.overflowing) for encoding in encoded.encodings]
    else:  # A tokenizer written in Python does not keep what it cut off.
        whole = tokenizer(batch["text"], verbose=False)["input_ids"]
        truncated = [len(ids) > max_length for ids in whole]
    return {"input_ids": input_ids, "text_id": [_text_id(ids) for ids in input_ids], "truncated": truncated}


def _text_id(input_ids: list[int]) -> int:
    digest = hashlib.blake2b(np.asarray(input_ids, dtype="<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Name what decides the ids a tokenizer gives, whatever it was called with before."""
    if not tokenizer.is_fast:
        return datasets.fingerprint.Hasher.hash(tokenizer)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["truncation"] = backend["padding"] = None
    return _digest([type(tokenizer).__name__, tokenizer.truncation_side, backend])


def _digest(parts: list) -> str:
    """Return a fingerprint, equal in every process, of what JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@dataclass
class ContrastiveCollator:
    """Put texts together as a batch of views for contrastive learning.

    Each feature has `text_id`, `row` and either `input_ids` (one text; it is repeated `num_views` times, and
    dropout makes the views differ) or `views` (`num_views` lists of token ids, special tokens included).

    Returns a dict of int64 tensors; L is the longest view of the batch, rounded up to `pad_to_multiple_of`:
        input_ids, attention_mask: (B, V, L); text_id, row: (B,).

    Raises:
        ValueError: no padding token, `views` in some features only, or not `num_views` of them.
    """

    tokenizer: PreTrainedTokenizerBase
    num_views: int = 2
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if self.num_views < 1:
            raise ValueError(f"num_views is {self.num_views}, expected at least 1.")
        if self.tokenizer.pad_token_id is None:
            raise ValueError("The tokenizer has no padding token. Set one: tokenizer.pad_token = tokenizer.eos_token.")

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        padded = pad_without_fast_tokenizer_warning(
            self.tokenizer,
            {"input_ids": self._flat_views(features)},
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_attention_mask=True,
            return_tensors="pt",
        )
        shape = (len(features), self.num_views, -1)
        batch = {name: padded[name].view(shape) for name in ("input_ids", "attention_mask")}  # (B*V, L) -> (B, V, L)
        for name in ("text_id", "row"):
            batch[name] = torch.tensor([feature[name] for feature in features], dtype=torch.int64)
        return batch

    def _flat_views(self, features: list[dict[str, Any]]) -> list[list[int]]:
        """Return the B * V lists of token ids, all views of one text beside each other."""
        given = ["views" in feature for feature in features]
        if not any(given):
            return [feature["input_ids"] for feature in features for _ in range(self.num_views)]
        if not all(given):
            row = features[given.index(False)].get("row")
            raise ValueError(
                f"Only some texts of the batch have 'views' (row {row} has none). Give them to all or none."
            )
        for feature in features:
            if len(feature["views"]) != self.num_views:
                raise ValueError(
                    f"Row {feature.get('row')} has {len(feature['views'])} views, expected num_views = "
                    f"{self.num_views}. Make them agree."
                )
        return [view for feature in features for view in feature["views"]]
