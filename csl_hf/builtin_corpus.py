"""An English corpus and a retrieval task that need no download: the documentation in the Python installation.

Every module of the standard library and of the installed distributions is parsed with :mod:`ast` (never
imported) and the prose of its docstrings is kept; ``pydoc_data.topics`` adds the language reference. About
8 % of the modules, chosen by a hash of their names, are held out: they never reach the corpus and give a
retrieval task in which the first sentence of a docstring must find the rest of that docstring.

The text cleaning is in :mod:`csl_hf.docstring_text`. The result is kept on disk, one folder per installation.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import json
import logging
import re
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets

from csl_hf.docstring_text import prose_sentences

logger = logging.getLogger(__name__)

# Part of the cache key: raise it whenever the cleaning, the split or the columns change.
FORMAT_VERSION = 2
HELD_OUT_PERCENT = 8
MIN_QUERY_WORDS, MIN_DOCUMENT_WORDS = 4, 8

# csl_hf's own text would make the corpus change with this package; the others are not run-time dependencies.
_EXCLUDED_DISTRIBUTIONS = {"csl-hf", "pip", "setuptools", "wheel"}
# Tests, copies of other distributions, and generated code hold little prose of their own.
_EXCLUDED_FOLDERS = {
    *("test", "tests", "testing", "idle_test", "conftest"),
    *("_vendor", "vendor", "vendored", "_vendored", "third_party", "externals"),
    *("generated", "_generated", "benchmarks"),
}
_MAX_SOURCE_BYTES = 1_000_000  # larger source files are generated tables
_CHECKSUM_FILE = "sha256.txt"
_TOPICS_MODULE = "pydoc_data.topics"
_CORPUS_FEATURES = datasets.Features({"text": datasets.Value("string"), "module": datasets.Value("string")})
_PAIR_FEATURES = datasets.Features({name: datasets.Value("string") for name in ("query", "document", "module")})


@dataclass(frozen=True)
class RetrievalTask:
    """Queries and documents of equal number; ``documents[i]`` is the only relevant one for ``queries[i]``.

    ``modules[i]`` is the module that pair i was taken from.
    """

    queries: list[str]
    documents: list[str]
    modules: list[str]

    def __len__(self) -> int:
        return len(self.queries)


def load_builtin_corpus(
    dependencies: bool = True, num_proc: int = 1, cache_dir: str | Path | None = None
) -> datasets.Dataset:
    """Return the training part of the built-in corpus.

    Args:
        dependencies: Also read the installed distributions, not only the standard library.
        num_proc: Processes that parse source files. The result does not depend on it.
        cache_dir: Folder for the cache. Default: ``csl_hf_builtin`` in the cache folder of ``datasets``.

    Returns:
        A dataset with columns ``text`` (one distinct sentence or line of prose, 4 to 80 words) and ``module``
        (dotted name of the first module it was found in), ordered by module name. No held-out module is in
        it, and no sentence that also occurs in a query or document of the retrieval task.
    """
    return _load(dependencies, num_proc, cache_dir)["train"]


def load_builtin_retrieval(
    dependencies: bool = True,
    max_pairs: int | None = 2000,
    num_proc: int = 1,
    cache_dir: str | Path | None = None,
) -> RetrievalTask:
    """Return the retrieval task made from the held-out modules.

    The query is the first sentence of a docstring (its summary), the document is the remaining prose of the
    same docstring. Queries are distinct and have at least 4 words, documents are distinct and have at least
    8; no document contains its query.

    Args:
        dependencies: Also read the installed distributions, not only the standard library.
        max_pairs: Keep at most this many pairs, always the same ones (chosen by a hash). None keeps all.
        num_proc: Processes that parse source files. The result does not depend on it.
        cache_dir: As for :func:`load_builtin_corpus`, which shares the cache.

    Raises:
        ValueError: If ``max_pairs`` is less than 1.
    """
    if max_pairs is not None and max_pairs < 1:
        raise ValueError(f"max_pairs is {max_pairs}; give a number of at least 1, or None for all pairs.")
    pairs = _load(dependencies, num_proc, cache_dir)["held_out"]
    # The cached pairs are in hash order, so that a prefix is a random sample of the modules.
    chosen = pairs[: len(pairs) if max_pairs is None else max_pairs]
    return RetrievalTask(chosen["query"], chosen["document"], chosen["module"])


# --- which modules -----------------------------------------------------------------------------------------


def is_held_out(module: str) -> bool:
    """Whether a module belongs to the held-out part: a stable hash of its dotted name decides."""
    return module != _TOPICS_MODULE and _stable_hash(module) % 100 < HELD_OUT_PERCENT


def find_stdlib_modules(root: Path) -> list[tuple[str, Path]]:
    """Return (dotted name, path) of the modules below ``root``, the folder of a standard library."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return list(_named_modules(root, files))


def find_dependency_modules(search_path: list[str] | None = None) -> list[tuple[str, Path]]:
    """Return (dotted name, path) of the modules of all distributions installed on ``search_path``.

    ``search_path`` is a list of folders; the default is ``sys.path``. A distribution without a list of files
    (some system packages) or of which only a link is installed (an editable install) adds nothing.
    """
    modules: list[tuple[str, Path]] = []
    for distribution in _distributions(search_path):
        files = [Path(file) for file in distribution.files or () if file.suffix == ".py"]
        modules += _named_modules(Path(str(distribution.locate_file(""))), files)
    return modules


def _named_modules(root: Path, files: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    for file in files:
        parts = file.with_suffix("").parts
        # Scripts outside the packages ("../../bin/x.py") and data folders are not importable names.
        if not all(part.isidentifier() for part in parts) or _EXCLUDED_FOLDERS.intersection(parts):
            continue
        if parts[-1].startswith("test_") or parts[-1].endswith("_test"):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts:
            yield ".".join(parts), root / file


def _distributions(search_path: list[str] | None = None) -> list[importlib.metadata.Distribution]:
    """Return the distributions in use, ordered by name: the first on the path wins, as in an import."""
    options = {} if search_path is None else {"path": search_path}
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(**options):
        # A damaged installation can leave a metadata folder without a name.
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and name not in _EXCLUDED_DISTRIBUTIONS:
            found.setdefault(name, distribution)
    return [found[name] for name in sorted(found)]


# --- from source files to sentences ------------------------------------------------------------------------


def read_docstrings(module: str, path: Path) -> list[str]:
    """Return the docstrings of a source file: module, classes and functions, in source order.

    Of ``pydoc_data.topics`` the values of its dictionary are returned.

    Raises:
        SyntaxError, ValueError, RecursionError: If the file is not valid Python for this interpreter.
        OSError: If it cannot be read.
    """
    source = path.read_bytes()
    collecting = gc.isenabled()
    gc.disable()  # a growing syntax tree has no garbage, and looking for some doubles the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's source files
            tree = ast.parse(source)
    finally:
        if collecting:
            gc.enable()
    if module == _TOPICS_MODULE:
        return [text for node in tree.body if isinstance(node, ast.Assign) for text in _string_values(node)]
    return [text for node in _definitions(tree) if (text := ast.get_docstring(node, clean=False))]


def _string_values(assignment: ast.Assign) -> list[str]:
    if not isinstance(assignment.value, ast.Dict):
        return []
    return [v.value for v in assignment.value.values if isinstance(v, ast.Constant) and isinstance(v.value, str)]


def _definitions(
    tree: ast.Module,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the nodes that can have a docstring, in source order.

    Only statements are visited (ast.walk also visits every expression, which takes several times as long),
    and with a list of our own: a chain of a thousand "elif" is too deep for a recursive function.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        children = [
            child for field in ("body", "handlers", "orelse", "finalbody") for child in _statements(node, field)
        ]
        waiting.extend(reversed(children))


def _statements(node: ast.AST, field: str) -> list[ast.AST]:
    # The "body" of a lambda or of a conditional expression is an expression.
    value = getattr(node, field, None)
    return value if isinstance(value, list) else []


def _read_module(module: str, path: str) -> dict[str, object]:
    """Return one row for ``Dataset.map``: the prose of each docstring, or why the file could not be read."""
    try:
        small = Path(path).stat().st_size <= _MAX_SOURCE_BYTES
        texts = read_docstrings(module, Path(path)) if small else []
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        return {"docstrings": [], "error": f"{type(error).__name__}: {error}"}
    return {"docstrings": [prose for text in texts if any(prose := prose_sentences(text))], "error": ""}


def build_builtin(modules: list[tuple[str, Path]], num_proc: int = 1) -> datasets.DatasetDict:
    """Read ``modules``; return the splits ``train`` and ``held_out`` with the columns that the cache has.

    ``held_out`` holds all retrieval pairs, in the order of a hash of the query.
    """
    if num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}; give a number of processes of at least 1.")
    # In hash order every process gets a similar share of the large packages.
    ordered = sorted(dict(modules).items(), key=lambda item: _stable_hash(item[0]))
    sources = datasets.Dataset.from_dict(
        {"module": [name for name, _ in ordered], "path": [str(path) for _, path in ordered]},
        features=datasets.Features({"module": datasets.Value("string"), "path": datasets.Value("string")}),
    )
    features = datasets.Features(
        {
            "module": datasets.Value("string"),
            "docstrings": datasets.List(datasets.List(datasets.Value("string"))),
            "error": datasets.Value("string"),
        }
    )
    rows = sources.map(
        _read_module,
        input_columns=["module", "path"],
        remove_columns=["path"],
        features=features,
        num_proc=min(num_proc, len(ordered)) if num_proc > 1 and len(ordered) > 1 else None,
        load_from_cache_file=False,
        desc="Reading the documentation of the Python installation",
    )
    found = sorted(rows.to_list(), key=lambda row: row["module"])
    unreadable = [row for row in found if row["error"]]
    if unreadable:
        example = f"{unreadable[0]['module']}: {unreadable[0]['error']}"
        logger.info("Skipped %d source files that could not be parsed, e.g. %s", len(unreadable), example)
    pairs = _retrieval_pairs([row for row in found if is_held_out(row["module"])])
    kept_out = {_key(text) for pair in pairs for text in (pair["query"], *pair.pop("sentences"))}
    corpus = _training_rows([row for row in found if not is_held_out(row["module"])], kept_out)
    return datasets.DatasetDict(
        train=_as_dataset(corpus, _CORPUS_FEATURES), held_out=_as_dataset(pairs, _PAIR_FEATURES)
    )


def _as_dataset(rows: list[dict[str, str]], features: datasets.Features) -> datasets.Dataset:
    # Dataset.from_list cannot make an empty dataset that has columns.
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=features)


def _training_rows(rows: list[dict], kept_out: set[str]) -> list[dict[str, str]]:
    corpus, seen, count = [], set(kept_out), 0
    for row in rows:
        for text in (text for sentences in row["docstrings"] for text in sentences if text):
            count += 1
            if _key(text) not in seen:
                seen.add(_key(text))
                corpus.append({"text": text, "module": row["module"]})
    logger.info("Built-in corpus: %d sentences, %d of them distinct and not held out", count, len(corpus))
    return corpus


def _retrieval_pairs(rows: list[dict]) -> list[dict]:
    """Return the usable pairs of the held-out modules, each with the ``sentences`` of its document.

    A query that stands before different documents, or a document behind different queries, has no single
    right answer: all pairs with it are left out.
    """
    pairs: dict[tuple[str, str], dict] = {}
    for row in rows:
        for summary, *sentences in row["docstrings"]:
            document = " ".join(sentences)
            long_enough = len(summary.split()) >= MIN_QUERY_WORDS and len(document.split()) >= MIN_DOCUMENT_WORDS
            if long_enough and _key(summary) not in _key(document):
                pair = {
                    "query": summary,
                    "document": document,
                    "module": row["module"],
                    "sentences": sentences,
                }
                pairs.setdefault((_key(summary), _key(document)), pair)
    queries = Counter(query for query, _ in pairs)
    documents = Counter(document for _, document in pairs)
    unique = [pair for (q, d), pair in pairs.items() if queries[q] == 1 and documents[d] == 1]
    return sorted(unique, key=lambda pair: (_stable_hash(pair["query"]), pair["query"]))


def _key(text: str) -> str:
    """Texts that differ only in case, or in the full stop at the end, count as equal."""
    return text.casefold().rstrip(".!?: ")


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


# --- the cache ---------------------------------------------------------------------------------------------


def _load(dependencies: bool, num_proc: int, cache_dir: str | Path | None) -> datasets.DatasetDict:
    root = Path(cache_dir) if cache_dir is not None else Path(datasets.config.HF_DATASETS_CACHE, "csl_hf_builtin")
    installed = [(d.metadata["Name"], d.version) for d in _distributions()] if dependencies else []
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, sys.version, installed]).encode()).hexdigest()[:16]

    def find_modules() -> list[tuple[str, Path]]:
        modules = find_stdlib_modules(Path(sysconfig.get_path("stdlib")))
        return find_dependency_modules() + modules if dependencies else modules

    return load_or_build(root / key, find_modules, num_proc)


def load_or_build(
    folder: Path, find_modules: Callable[[], list[tuple[str, Path]]], num_proc: int = 1
) -> datasets.DatasetDict:
    """Return what ``folder`` holds; build it from ``find_modules()`` if it is missing or damaged."""
    if folder.is_dir():
        try:
            return _read_cache(folder)
        except (OSError, ValueError) as error:  # the errors of pyarrow and json are ValueErrors
            logger.warning("The built-in corpus cached in %s is damaged (%s): building it again.", folder, error)
            shutil.rmtree(folder)
    splits = build_builtin(find_modules(), num_proc)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as temporary:
        written = Path(temporary, "splits")
        splits.save_to_disk(str(written))
        (written / _CHECKSUM_FILE).write_text(_checksum(written))
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has just built the same
                raise
    return _read_cache(folder)


def _read_cache(folder: Path) -> datasets.DatasetDict:
    if (folder / _CHECKSUM_FILE).read_text() != _checksum(folder):
        raise ValueError("its files do not have the checksum they were written with")
    return datasets.DatasetDict.load_from_disk(str(folder))


def _checksum(folder: Path) -> str:
    """Return a checksum of the saved splits, without what ``Dataset.map`` adds to the folder later."""
    checksum = hashlib.sha256()
    for path in sorted([*folder.glob("*/data-*.arrow"), *folder.rglob("*.json")]):
        checksum.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return checksum.hexdigest()
