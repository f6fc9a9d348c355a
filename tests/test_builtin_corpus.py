"""The built-in corpus, on small installations in a temporary folder and on a slice of the real library."""

from __future__ import annotations

import json
import logging
import sysconfig
from pathlib import Path

import pytest

from csl_hf import builtin_corpus
from csl_hf.builtin_corpus import (
    build_builtin,
    find_dependency_modules,
    find_stdlib_modules,
    is_held_out,
    load_builtin_corpus,
    load_builtin_retrieval,
    load_or_build,
    read_docstrings,
)
from csl_hf.docstring_text import is_prose, prose_sentences, split_sentences

# --- cleaning ----------------------------------------------------------------------------------------------


def test_summary_and_body_of_a_wrapped_docstring():
    text = """Open a file and return
    a reader for it.

    The reader is closed with the file. It keeps
    its position."""
    assert prose_sentences(text) == [
        "Open a file and return a reader for it.",
        "The reader is closed with the file.",
        "It keeps its position.",
    ]


GOOGLE = """Scale the values of an array.

    Args:
        values (`list[float]`, *optional*, defaults to `None`):
            The values that are to be scaled,
            in any order.
        factor: How much larger the values become.
        **kwargs: Options that are passed on to the reader.

    Returns:
        tuple[int, str]: The number of values and the name of the scale.

    Example:
        ```python
        for it in the_list: print(it is not a sentence)
        ```
    """
NUMPY = """Scale the values of an array.

    Parameters
    ----------
    values : array_like of shape (n, m)
        The values that are to be scaled,
        in any order.
    factor : float, optional
        How much larger the values become.

    Returns
    -------
    array of the same shape as the input
        The number of values and the name of the scale.

    See Also
    --------
    shrink : Make all of the values smaller.

    Examples
    --------
    >>> scale([1, 2], 3)
    the printed result is not a sentence of the text
    """
SPHINX = """Scale the values of an array.

    :param values: The values that are to be scaled,
        in any order.
    :type values: list of the kind that one expects
    :param float factor: How much larger the values become.
    :return: The number of values and the name of the scale.

    .. code-block:: python

        this is not a sentence of the text

    .. deprecated:: 1.0 This is not a sentence of the text.
    """


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_layouts_give_the_same_prose(docstring):
    sentences = prose_sentences(docstring)
    sentences = [s for s in sentences if not s.startswith("Options")]
    assert sentences == [
        "Scale the values of an array.",
        "The values that are to be scaled, in any order.",
        "How much larger the values become.",
        "The number of values and the name of the scale.",
    ]


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("Use the ``open`` function of the `io` module.", "Use the open function of the io module."),
        ("See :func:`the one <a.b.c>` and :class:`~a.b.Name` here.", "See the one and Name here."),
        ("It is **not** an *easy* thing to do [1]_.", "It is not an easy thing to do."),
        ("Read [the guide](https://example.org/x) before the call.", "Read the guide before the call."),
        ("The *args and **kwargs are in the call.", None),
        ("The page is at https://example.org/x for now.", None),
        ("It sets x = 3 in the first step.", None),
        ("The object\u2019s \u201c__len__()\u201d is the first.", 'The object\'s "__len__()" is the first.'),
        (r"The value of \alpha is in the range.", None),
    ],
)
def test_inline_markup(marked, plain):
    assert prose_sentences(marked) == [plain or ""]


def test_admonitions_are_kept_and_list_items_stay_apart():
    text = """Summary of the thing here.

    .. note:: This is read by all of them.

    - the first of the items
    - the second of the items,
      on two lines

    +------+------------------------+
    | name | a cell of the table    |
    +------+------------------------+
    """
    assert prose_sentences(text)[1:] == [
        "This is read by all of them.",
        "the first of the items",
        "the second of the items, on two lines",
    ]


def test_the_summary_is_empty_where_the_docstring_begins_otherwise():
    assert prose_sentences("path: The file that is to be read.\n\nMore about it is said here.") == [
        "",
        "The file that is to be read.",
        "More about it is said here.",
    ]
    assert prose_sentences("") == [""]
    assert prose_sentences("Licensed under the Apache License.\n\nYou may not use this file.") == [""]


def test_split_sentences_respects_abbreviations():
    text = "Some files, e.g. Python ones, are read. See Fig. 3 of J. Smith. \"Quoted\" ones too! 'x' is last."
    assert split_sentences(text) == [
        "Some files, e.g. Python ones, are read.",
        "See Fig. 3 of J. Smith.",
        '"Quoted" ones too!',
        "'x' is last.",
    ]


def test_is_prose_bounds():
    assert not is_prose("one of three")  # three words
    assert is_prose("one of the four")
    assert is_prose(" ".join(["the"] * 80)) and not is_prose(" ".join(["the"] * 81))
    assert not is_prose("the 12 345 678 901 234 of 56")  # few letters
    assert not is_prose("alpha beta gamma delta")  # no function word
    assert not is_prose("it is cut (in the middle")


# --- modules -----------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def held_out_name() -> str:
    return next(f"shop.m{i}" for i in range(1000) if is_held_out(f"shop.m{i}"))


@pytest.fixture
def library(tmp_path, held_out_name) -> Path:
    """A package of 30 modules, of which one is held out, one is broken and one is a test."""
    names = [name for i in range(1000) if not is_held_out(name := f"shop.m{i}")][:30]
    root = tmp_path / "lib"
    docstring = '"""The module number {} is for sale.\n\nAll have a shared line.\n"""\n'
    files = {f"{name.replace('.', '/')}.py": docstring.format(n) for n, name in enumerate(names)}
    files[held_out_name.replace(".", "/") + ".py"] = '''
class Basket:
    """Hold what the customer is going to buy.

    A basket is emptied at the till. The sum of the prices is computed there, and it is then paid.
    """
    def pay(self):
        """Pay for the things in the basket.

        All have a shared line. The amount is taken from the account of the customer.
        """
if True:
    async def late(x):
        """Too short a body here.

        It is."""
'''
    files["shop/copy.py"] = 'def f():\n    """A basket is emptied at the till. This line is only in the copy."""\n'
    files["shop/broken.py"] = '"""This text is never read by anyone."""\ndef f(:\n'
    files["shop/nul.py"] = '"""This text is never read by anyone."""\n\0'
    files["shop/tests/test_x.py"] = '"""This text is in a test and left out."""\n'
    files["site-packages/other.py"] = '"""This text is of a dependency and left out."""\n'
    write(root, files)
    return root


def build(root: Path, num_proc: int = 1):
    return build_builtin(find_stdlib_modules(root), num_proc)


def test_corpus_and_pairs(library, held_out_name):
    assert not is_held_out("shop.copy")
    splits = build(library)
    texts = splits["train"]["text"]
    assert "The module number 7 is for sale." in texts
    assert "This line is only in the copy." in texts
    # Said in a held-out document, also if a training module says it too.
    assert "All have a shared line." not in texts and "A basket is emptied at the till." not in texts
    assert not any("left out" in text or "never read" in text for text in texts)
    assert len(set(texts)) == len(texts) == 31
    modules = list(splits["train"]["module"])
    assert modules == sorted(modules) and held_out_name not in modules
    pairs = {pair["query"]: pair["document"] for pair in splits["held_out"]}
    assert pairs == {
        "Hold what the customer is going to buy.": "A basket is emptied at the till. "
        "The sum of the prices is computed there, and it is then paid.",
        "Pay for the things in the basket.": "All have a shared line. "
        "The amount is taken from the account of the customer.",
    }
    assert set(splits["held_out"]["module"]) == {held_out_name}


def test_ambiguous_pairs_and_repeated_queries_are_left_out(tmp_path, held_out_name):
    body = "The body has enough words to be a document of its own{}."
    docstrings = [
        ("The same query is here.", body.format(" once")),
        ("The same query is here.", body.format(" twice")),
        ("One query of this document.", body.format("")),
        ("Another query of this document.", body.format("")),
        ("A copied query is here.", body.format(" and copied")),
        ("A copied query is here.", body.format(" and copied")),
        (
            "What the body repeats is dropped.",
            "It says that what the body repeats is dropped, word for word.",
        ),
    ]
    functions = [f'def f{n}():\n    """{q}\n\n    {d}"""\n' for n, (q, d) in enumerate(docstrings)]
    write(tmp_path, {held_out_name.replace(".", "/") + ".py": "".join(functions)})
    assert list(build(tmp_path)["held_out"]["query"]) == ["A copied query is here."]


def test_unreadable_files_are_counted(library, caplog):
    with caplog.at_level(logging.INFO, logger="csl_hf.builtin_corpus"):
        build(library)
    skipped = [record.getMessage() for record in caplog.records if "Skipped" in record.getMessage()]
    assert len(skipped) == 1 and skipped[0].startswith("Skipped 2 source files")
    assert "shop.broken" in skipped[0]


def test_result_does_not_depend_on_the_number_of_processes(library):
    one, two = build(library), build(library, num_proc=2)
    assert one["train"].to_list() == two["train"].to_list()
    assert one["held_out"].to_list() == two["held_out"].to_list()
    with pytest.raises(ValueError, match="num_proc is 0"):
        build(library, num_proc=0)


def test_the_split_is_stable_and_about_8_percent():
    # Fixed values: another hash would make the published numbers incomparable.
    assert [i for i in range(40) if is_held_out(f"package.module{i}")] == [15, 32, 34]
    share = sum(is_held_out(f"package.module{i}") for i in range(5000)) / 5000
    assert 0.07 < share < 0.09
    assert not is_held_out("pydoc_data.topics")


def test_definitions_are_found_in_order_and_deep_nesting_is_no_problem(tmp_path):
    chain = "if x == 0:\n    pass\n" + "".join(f"elif x == {n}:\n    pass\n" for n in range(1, 1500))
    text = '"""one"""\nclass A:\n    "two"\n    def f(self):\n        "three"\n        def g(): "four"\n' + chain
    text += 'try:\n    pass\nexcept ValueError:\n    async def h(): "five"\nx = lambda: "no"\n'
    write(tmp_path, {"m.py": text})
    try:
        found = read_docstrings("m", tmp_path / "m.py")
    except (RecursionError, SyntaxError, MemoryError) as error:  # the limit of this interpreter's own parser
        pytest.skip(f"this interpreter does not parse the chain: {error}")
    assert found == ["one", "two", "three", "four", "five"]


def test_topics_are_values_of_a_dictionary(tmp_path):
    write(tmp_path, {"topics.py": "topics = {'if': 'The first part ' 'of it.', 'for': 'The second.', 'n': 3}\n"})
    assert read_docstrings("pydoc_data.topics", tmp_path / "topics.py") == [
        "The first part of it.",
        "The second.",
    ]


def install(site: Path, name: str, files: dict[str, str], record: bool = True) -> None:
    """Write a distribution as an installer does."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    write(site, files | {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"})
    if record:
        write(site, {f"{info}/RECORD": "".join(f"{file},,\n" for file in [*files, "../../bin/run.py"])})


def test_dependencies_are_what_installers_recorded(tmp_path):
    source = '"""A docstring of some words."""\n'
    install(tmp_path, "Shop", {"shop/__init__.py": source, "shop/_vendor/copy.py": source, "shop/till.py": source})
    install(tmp_path, "csl-hf", {"csl_hf/losses.py": source})
    install(tmp_path, "setuptools", {"setuptools/build.py": source, "pkg_resources/__init__.py": source})
    install(tmp_path, "unlisted", {"unlisted.py": source}, record=False)
    write(tmp_path, {"stray.py": source, "empty-1.0.dist-info/RECORD": ""})
    assert find_dependency_modules([str(tmp_path)]) == [
        ("shop", tmp_path / "shop/__init__.py"),
        ("shop.till", tmp_path / "shop/till.py"),
    ]


# --- cache -------------------------------------------------------------------------------------------------


def test_cache_is_used_and_rebuilt_when_damaged(library, tmp_path, caplog):
    folder, calls = tmp_path / "cache" / "key", []

    def find():
        calls.append(1)
        return find_stdlib_modules(library)

    first = load_or_build(folder, find)["train"].to_list()
    assert load_or_build(folder, find)["train"].to_list() == first and len(calls) == 1
    damages = [
        lambda: (folder / "sha256.txt").unlink(),
        lambda: (folder / "dataset_dict.json").write_text("{"),
        lambda: cut(next(folder.glob("train/data-*.arrow"))),
        lambda: next(folder.glob("held_out/data-*.arrow")).unlink(),
    ]
    for number, damage in enumerate(damages, start=2):
        damage()
        assert load_or_build(folder, find)["train"].to_list() == first
        assert len(calls) == number
    assert caplog.text.count("is damaged") == len(damages)
    assert [path.name for path in folder.parent.iterdir()] == ["key"]  # no unfinished folder is left


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def test_a_cached_map_does_not_count_as_damage(library, tmp_path, caplog):
    splits = load_or_build(tmp_path / "key", lambda: find_stdlib_modules(library))
    splits["train"].map(lambda row: {"length": len(row["text"])})
    assert list((tmp_path / "key").glob("train/cache-*.arrow"))
    load_or_build(tmp_path / "key", lambda: pytest.fail("built again"))
    assert not caplog.text


def test_a_failed_build_leaves_nothing_behind(library, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_corpus, "_checksum", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_or_build(tmp_path / "cache" / "key", lambda: find_stdlib_modules(library))
    assert list((tmp_path / "cache").iterdir()) == []


# --- the real library --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slice_of_stdlib():
    root = Path(sysconfig.get_path("stdlib"))
    packages = ("json", "email", "logging", "unittest", "asyncio", "argparse", "pathlib", "importlib")
    return [module for module in find_stdlib_modules(root) if module[0].split(".")[0] in packages]


def test_slice_of_the_standard_library(slice_of_stdlib):
    splits = build_builtin(slice_of_stdlib)
    texts, pairs = list(splits["train"]["text"]), splits["held_out"].to_list()
    assert len(texts) > 1000 and len(set(texts)) == len(texts)
    assert not any(is_held_out(module) for module in splits["train"]["module"])
    assert not any(mark in text for text in texts for mark in ("``", ">>>", "::", ":param", "  "))
    assert all(4 <= len(text.split()) <= 80 for text in texts)
    assert len(pairs) >= 5 and all(is_held_out(pair["module"]) for pair in pairs)
    held_out = {s for pair in pairs for s in (pair["query"], *split_sentences(pair["document"]))}
    assert held_out.isdisjoint(texts)
    assert all(pair["query"].lower() not in pair["document"].lower() for pair in pairs)


def test_public_functions_share_one_cache(monkeypatch, tmp_path, library):
    monkeypatch.setattr(builtin_corpus, "find_stdlib_modules", lambda root: find_stdlib_modules(library))
    corpus = load_builtin_corpus(dependencies=False, cache_dir=tmp_path)
    assert corpus.column_names == ["text", "module"] and len(corpus) == 31
    monkeypatch.setattr(builtin_corpus, "find_stdlib_modules", lambda root: pytest.fail("built again"))
    task = load_builtin_retrieval(dependencies=False, cache_dir=tmp_path)
    assert len(task) == len(task.queries) == len(task.documents) == len(task.modules) == 2
    one = load_builtin_retrieval(dependencies=False, max_pairs=1, cache_dir=tmp_path)
    assert one.queries == task.queries[:1] and one.documents == task.documents[:1]
    with pytest.raises(ValueError, match="max_pairs is 0"):
        load_builtin_retrieval(dependencies=False, max_pairs=0, cache_dir=tmp_path)
    assert json.dumps(task.queries)  # plain strings, not views of the dataset
