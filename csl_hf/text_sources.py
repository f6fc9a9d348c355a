"""Loading any source of texts: files, folders, saved data sets, the Hub, the built-in corpus."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import datasets
import numpy as np
from datasets import Dataset, DatasetDict, Features, Value
from datasets.exceptions import DatasetGenerationError, DatasetsError

from csl_hf.text_files import (
    SUPPORTED,
    TextFileError,
    check_encoding,
    choose_schema_column,
    file_kind,
    read_texts,
)

logger = logging.getLogger(__name__)

# Part of the cache key: raise it when the same file comes to be read differently.
READER_VERSION = 1
HUB_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?")


def load_texts(
    source: str | Sequence[str],
    *,
    text_column: str | None = None,
    split: str = "train",
    encoding: str = "utf-8",
    cache_dir: str | os.PathLike | None = None,
    num_proc: int = 1,
) -> Dataset:
    """Load `source` as a dataset with the columns `text` (str or None) and `row` (int64).

    `row` is the number of the row in the whole source, counted from 0 over all files before any cleaning.

    Args:
        source: files or globs (.txt, .csv, .tsv, .jsonl, .json with one object a line, .parquet; each also
            .gz), a folder of such files, a folder written by `save_to_disk`, a Hub id `user/name` or
            `user/name:config`, or `builtin` for the built-in corpus. What exists on disk is never taken for a
            Hub id. Several sources may be given as a list, if they are files, globs or folders of files.
        text_column: the column to train on; by default `text`, else `sentence`, else the only one with text.
        split: the split of a DatasetDict or of a Hub data set.
        encoding: of the text files; a byte order mark is removed.
        cache_dir: where the Arrow files go; by default the cache of `datasets`.
        num_proc: processes to read several files with.

    Raises:
        FileNotFoundError: nothing there.
        TextFileError (a ValueError): a file that is empty, binary, corrupt, malformed or in another encoding.
        ValueError: a wrong column or split, or a Hub data set that cannot be loaded.
    """
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    sources = [os.fspath(one) for one in sources]
    if not sources:
        raise ValueError("No text source given. Expected files, a folder, a Hub id or 'builtin'.")
    if len(sources) > 1 and "builtin" in sources and not os.path.exists("builtin"):
        raise ValueError("'builtin' cannot be combined with other sources; give it alone.")
    if len(sources) > 1:
        return _load_files(find_files(sources), text_column, encoding, cache_dir, num_proc)

    name = sources[0]
    path = os.path.expanduser(name)
    if name == "builtin" and not os.path.exists(path):
        from csl_hf.builtin_corpus import load_builtin_corpus

        dataset = load_builtin_corpus(num_proc=num_proc, cache_dir=cache_dir)
        return _text_and_row(dataset, text_column, "the built-in corpus")
    if _is_saved_dataset(path):
        return _text_and_row(_load_saved(path, split), text_column, f"'{name}'")
    hub_id = HUB_ID.fullmatch(name)
    if hub_id and not os.path.exists(path) and file_kind(name) is None:
        dataset = _load_from_hub(hub_id["name"], hub_id["config"], split, cache_dir)
        return _text_and_row(dataset, text_column, f"'{name}' on the Hub")
    return _load_files(find_files(sources), text_column, encoding, cache_dir, num_proc)


def _load_files(
    files: list[str],
    text_column: str | None,
    encoding: str,
    cache_dir: str | os.PathLike | None,
    num_proc: int,
) -> Dataset:
    check_encoding(encoding)
    stamps = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in files]
    try:
        dataset = Dataset.from_generator(
            _generate_texts,
            features=Features({"text": Value("string")}),
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
            gen_kwargs={"files": files, "text_column": text_column, "encoding": encoding},
            num_proc=min(num_proc, len(files)),
            fingerprint=_fingerprint([READER_VERSION, stamps, text_column, encoding]),
        )
    except DatasetGenerationError as error:
        # The reader's own message says more than "An error occurred while generating the dataset".
        cause = error.__cause__
        if isinstance(cause, ValueError | OSError):
            raise cause from cause.__cause__
        if num_proc > 1:  # A worker process sends its error without the cause: meet it again in this one.
            return _load_files(files, text_column, encoding, cache_dir, num_proc=1)
        raise
    return _text_and_row(dataset, "text", "the text files")


def _generate_texts(files: list[str], text_column: str | None, encoding: str) -> Iterator[dict[str, str | None]]:
    for path in files:
        for text in read_texts(path, text_column, encoding):
            yield {"text": text}


def _fingerprint(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _is_saved_dataset(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))


def _load_saved(path: str, split: str) -> Dataset:
    try:
        loaded = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"'{path}' looks like a folder of Dataset.save_to_disk, but does not load ({error}). Save it again."
        ) from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        there = ", ".join(map(repr, loaded))
        raise ValueError(f"'{path}' has no split {split!r}. Choose one of those it has: {there}.")
    return loaded[split]


def _load_from_hub(name: str, config: str | None, split: str, cache_dir: str | os.PathLike | None) -> Dataset:
    try:
        return datasets.load_dataset(name, config, split=split, cache_dir=cache_dir)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise ValueError(
            f"'{name}' is neither a file or folder here nor a data set of the Hub that can be loaded "
            f"(configuration {config or 'default'}, split {split}): {str(error).rstrip('.')}. "
            "Check the path or name and the connection; for a private data set run `hf auth login`."
        ) from error


def _text_and_row(dataset: Dataset, text_column: str | None, where: str) -> Dataset:
    """Reduce `dataset` to `text` and `row` without rewriting the texts."""
    column = choose_schema_column(dataset.data.schema, text_column, where)
    if not len(dataset):
        raise ValueError(f"{where} holds no rows. Give a source with texts.")
    texts = dataset.with_format(None).select_columns([column])
    if column != "text":
        texts = texts.rename_column(column, "text")
    return texts.add_column("row", np.arange(len(texts), dtype=np.int64))


def find_files(sources: Iterable[str]) -> list[str]:
    """Return the absolute paths of all files that `sources` (paths, globs, folders) name, each one once.

    The order is that of `sources`; the matches of a glob and the files of a folder are sorted by name. Of a
    folder only the supported, not hidden files directly inside it are taken.

    Raises:
        FileNotFoundError: nothing is there, or a folder holds no supported file.
        TextFileError: a file is empty or its ending is not supported.
    """
    files: dict[str, None] = {}
    for source in sources:
        for path in _expand(source):
            if file_kind(path) is None:
                raise TextFileError(f"Cannot read '{path}': its ending is not one of {SUPPORTED}.")
            if os.path.getsize(path) == 0:
                raise TextFileError(f"'{path}' is empty (0 bytes). Give a file with texts.")
            files[os.path.abspath(path)] = None
    return list(files)


def _expand(source: str) -> list[str]:
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        inside = (os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.startswith("."))
        files = [name for name in inside if os.path.isfile(name) and file_kind(name)]
        if not files:
            raise FileNotFoundError(f"The folder '{source}' holds no text file. Supported: {SUPPORTED}.")
        return files
    matches = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not matches:
        raise FileNotFoundError(
            f"No file found for '{source}' (looked for {os.path.abspath(path)}). "
            "Check the path, or quote the glob so that the shell does not expand it."
        )
    return matches
