"""Every source of texts: files, globs, folders, saved data sets, the Hub, the built-in corpus."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import sys
import types

import datasets
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from csl_hf import text_sources
from csl_hf.text_files import TextFileError
from csl_hf.text_sources import find_files, load_texts


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("three\n\nfour\n")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"text,label\nfive,1\n,2\n"))
    (tmp_path / "notes.md").write_text("not for training\n")
    (tmp_path / ".hidden.txt").write_text("not for training\n")
    return tmp_path


def test_one_file_with_row_numbers(folder):
    dataset = load_texts(str(folder / "b.txt"))
    assert dataset.to_dict() == {"text": ["three", "", "four"], "row": [0, 1, 2]}
    assert dataset.features == Features({"text": Value("string"), "row": Value("int64")})


def test_a_path_object_is_a_source_too(folder):
    assert load_texts(folder / "a.txt")["text"][:] == ["one", "two"]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_several_files_keep_their_order_and_number_their_rows_on(folder, num_proc):
    dataset = load_texts([str(folder / name) for name in ("b.txt", "a.txt", "c.csv.gz")], num_proc=num_proc)
    assert dataset["text"][:] == ["three", "", "four", "one", "two", "five", None]
    assert dataset["row"][:] == list(range(7))


def test_a_glob_is_sorted_and_a_file_named_twice_is_read_once(folder):
    dataset = load_texts([str(folder / "*.txt"), str(folder / "a.txt")])
    assert dataset["text"][:] == ["one", "two", "three", "", "four"]


def test_a_folder_gives_its_supported_files(folder):
    assert load_texts(str(folder))["text"][:] == ["one", "two", "three", "", "four", "five", None]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "part[1].txt").write_text("one\n")
    assert load_texts(str(tmp_path / "part[1].txt"))["text"][:] == ["one"]


def test_the_home_folder_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert find_files(["~/a.txt"]) == [str(folder / "a.txt")]


def test_texts_stay_on_disk(tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("".join(f"{number} {'word ' * 50}\n" for number in range(40_000)))
    before = pa.total_allocated_bytes()
    dataset = load_texts(str(path))
    assert dataset[39_999]["text"].startswith("39999 word")
    assert dataset[39_999]["row"] == 39_999
    assert pa.total_allocated_bytes() - before < path.stat().st_size / 10


def test_loading_again_reads_the_cache_until_the_file_changes(folder, monkeypatch):
    path = folder / "a.txt"
    first = load_texts(str(path))

    def must_not_read(*_):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(text_sources, "read_texts", must_not_read)
        again = load_texts(str(path))
    assert again["text"][:] == ["one", "two"]
    assert again._fingerprint == first._fingerprint

    size, stamp = path.stat().st_size, path.stat().st_mtime_ns
    path.write_text("1ne\ntwo\n")
    os.utime(path, ns=(stamp + 1, stamp + 1))
    assert path.stat().st_size == size
    changed = load_texts(str(path))
    assert changed["text"][:] == ["1ne", "two"]
    assert changed._fingerprint != first._fingerprint


def test_the_cache_keeps_columns_and_encodings_apart(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("text,body\né,b\n".encode("latin-1"))
    assert load_texts(str(path), encoding="latin-1")["text"][:] == ["é"]
    assert load_texts(str(path), encoding="cp437")["text"][:] == ["Θ"]
    assert load_texts(str(path), encoding="latin-1", text_column="body")["text"][:] == ["b"]


def _load_length(arguments):
    path, cache_dir = arguments
    return len(load_texts(path, cache_dir=cache_dir))


def test_two_processes_may_load_the_same_file_at_once(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a line of text\n" * 20_000)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_load_length, [(str(path), str(tmp_path / "cache"))] * 2, chunksize=1) == [20_000] * 2


def test_saved_dataset(tmp_path):
    Dataset.from_dict({"label": [1, 2], "sentence": ["a", None]}).save_to_disk(tmp_path / "saved")
    assert load_texts(str(tmp_path / "saved")).to_dict() == {"text": ["a", None], "row": [0, 1]}


def test_saved_dataset_dict_has_splits(tmp_path):
    parts = {
        "train": Dataset.from_dict({"text": ["a"]}),
        "dev": Dataset.from_dict({"text": ["b"], "row": [7]}),
    }
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert load_texts(str(tmp_path / "saved"))["text"][:] == ["a"]
    assert load_texts(str(tmp_path / "saved"), split="dev").to_dict() == {"text": ["b"], "row": [0]}
    with pytest.raises(ValueError, match="no split 'test'.*'train', 'dev'"):
        load_texts(str(tmp_path / "saved"), split="test")


def test_saved_dataset_that_is_damaged(tmp_path):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(ValueError, match="save_to_disk, but does not load .*Save it again"):
        load_texts(str(tmp_path / "saved"))


def test_wrong_column_of_a_dataset_names_the_columns(tmp_path):
    features = Features({"label": ClassLabel(names=["x"]), "a": Value("string"), "b": Value("large_string")})
    columns = {"label": [0], "a": ["p"], "b": ["q"]}
    Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    with pytest.raises(ValueError, match="no column 'body'.*'label', 'a', 'b'.*--text_column"):
        load_texts(path, text_column="body")
    with pytest.raises(ValueError, match="Cannot tell which column.*'label', 'a', 'b'.*--text_column"):
        load_texts(path)
    with pytest.raises(ValueError, match="'label' .* holds int64, expected strings.*'a', 'b'"):
        load_texts(path, text_column="label")
    assert load_texts(path, text_column="b")["text"][:] == ["q"]


def test_hub_id(monkeypatch, tmp_path):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return Dataset.from_dict({"sentence": ["a", "b"], "idx": [0, 1]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_texts("user/na.me")["text"][:] == ["a", "b"]
    load_texts("user/name:config-1", split="validation", cache_dir=tmp_path)
    assert calls == [
        (("user/na.me", None), {"split": "train", "cache_dir": None}),
        (("user/name", "config-1"), {"split": "validation", "cache_dir": tmp_path}),
    ]


def test_what_is_on_disk_is_never_fetched_from_the_hub(folder, monkeypatch):
    (folder / "user" / "name").mkdir(parents=True)
    (folder / "user" / "name" / "a.txt").write_text("local\n")
    monkeypatch.chdir(folder)
    assert load_texts("user/name")["text"][:] == ["local"]


def test_hub_that_cannot_be_reached_keeps_the_cause(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="'user/name' is neither a file.*no route to the Hub. Check") as error:
        load_texts("user/name:cfg")
    assert isinstance(error.value.__cause__, ConnectionError)
    with pytest.raises(FileNotFoundError, match="No file found for 'user/name.txt'"):
        load_texts("user/name.txt")


def test_builtin_corpus(monkeypatch):
    def load_builtin_corpus(dependencies=True, num_proc=1, cache_dir=None):
        assert (dependencies, num_proc, cache_dir) == (True, 2, "somewhere")
        return Dataset.from_dict({"text": ["a", "b"], "module": ["m", "m"]})

    stand_in = types.SimpleNamespace(load_builtin_corpus=load_builtin_corpus)
    monkeypatch.setitem(sys.modules, "csl_hf.builtin_corpus", stand_in)
    dataset = load_texts("builtin", num_proc=2, cache_dir="somewhere")
    assert dataset.to_dict() == {"text": ["a", "b"], "row": [0, 1]}


def test_nothing_there(tmp_path):
    for name in ("no.txt", "*.csv", "no/such/folder"):
        with pytest.raises(FileNotFoundError, match="No file found for .*looked for"):
            load_texts(str(tmp_path / name))
    with pytest.raises(ValueError, match="No text source given"):
        load_texts([])


def test_a_folder_without_text(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(FileNotFoundError, match="sub' holds no text file. Supported: .txt"):
        load_texts(str(folder / "sub"))


def test_unsupported_ending_lists_the_supported_ones(folder):
    with pytest.raises(TextFileError, match=r"notes.md': its ending is not one of .txt, .csv.*\.gz"):
        load_texts(str(folder / "*.md"))


def test_empty_file(folder):
    (folder / "empty.txt").touch()
    with pytest.raises(TextFileError, match=r"empty.txt' is empty \(0 bytes\)"):
        load_texts([str(folder / "a.txt"), str(folder / "empty.txt")])


@pytest.mark.parametrize("num_proc", [1, 2])
def test_faults_inside_a_file_come_through_as_they_are_and_leave_no_cache(folder, own_cache, num_proc):
    (folder / "bad.txt").write_bytes(b"fine\n" * 3000 + b"\xff\n")
    sources = [str(folder / "a.txt"), str(folder / "bad.txt")]
    for _ in range(2):  # a half-written cache would let the second attempt pass
        with pytest.raises(TextFileError, match=r"bad.txt' is not utf-8: byte 15000 .*--encoding"):
            load_texts(sources, num_proc=num_proc)
    assert not list(own_cache.rglob("*.arrow"))


def test_unknown_encoding_and_wrong_column_of_a_file(folder):
    with pytest.raises(ValueError, match="--encoding 'utf-9'"):
        load_texts(str(folder / "a.txt"), encoding="utf-9")
    with pytest.raises(ValueError, match="no column 'body'.*'text', 'label'"):
        load_texts(str(folder / "c.csv.gz"), text_column="body")


def test_builtin_stands_alone(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match="'builtin' cannot be combined"):
        load_texts(["builtin", str(tmp_path / "a.txt")])
