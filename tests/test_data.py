"""Cleaning, sampling, tokenising and collating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from collections import Counter

import datasets
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer

from csl_hf import data
from csl_hf.data import (
    CleaningReport,
    ContrastiveCollator,
    clean_texts,
    load_texts,
    take_samples,
    tokenize_texts,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


def texts_of(texts: list) -> Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "row": datasets.Value("int64")})
    return Dataset.from_dict({"text": texts, "row": list(range(len(texts)))}, features=features)


# Cleaning


def test_cleaning_drops_null_empty_and_repeated_texts_and_keeps_the_first():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    texts = [None, "b", " \t\u2003", " a ", "a", "", decomposed, composed, "A"]
    cleaned, report = clean_texts(texts_of(texts))
    assert cleaned.to_dict() == {"text": ["b", " a ", decomposed, "A"], "row": [1, 3, 6, 8]}
    assert report == CleaningReport(rows_read=9, null=1, empty=2, duplicates=2, kept=4)


def test_cleaning_sees_repeats_across_batches(monkeypatch):
    monkeypatch.setattr(data, "BATCH_SIZE", 3)
    cleaned, report = clean_texts(texts_of([f"text {number % 7}" for number in range(20)]))
    assert cleaned["row"][:] == list(range(7))
    assert report.duplicates == 13


def test_clean_data_are_left_as_they_are():
    dataset = texts_of(["a", "b"])
    cleaned, _ = clean_texts(dataset)
    assert cleaned is dataset


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.none() | st.text(alphabet="ab \n\u00e9e\u0301", max_size=4), max_size=30))
def test_every_row_is_accounted_for(texts):
    cleaned, report = clean_texts(texts_of(texts), min_texts=0)
    assert report.kept + report.null + report.empty + report.duplicates == report.rows_read == len(texts)
    assert report.null == Counter(texts)[None]
    keys = [unicodedata.normalize("NFC", text.strip()) for text in cleaned["text"]]
    assert len(set(keys)) == len(keys) == report.kept
    assert set(keys) == {unicodedata.normalize("NFC", text.strip()) for text in texts if text and text.strip()}
    assert [texts[row] for row in cleaned["row"]] == cleaned["text"][:]


def test_too_few_distinct_texts_states_the_counts():
    with pytest.raises(ValueError, match=r"1 distinct .* at least 2 .*4 texts read.*1 null, 1 empty, 1 repeated"):
        clean_texts(texts_of(["a", None, " ", "a "]))
    with pytest.raises(ValueError, match="3 distinct .* at least 4"):
        clean_texts(texts_of(["a", "b", "c"]), min_texts=4)


@pytest.mark.parametrize(("values", "kind"), [([None, 5], "int"), ([None, ["a"]], "list")])
def test_rows_that_are_no_strings_name_row_and_type(values, kind):
    with pytest.raises(ValueError, match=f"Row 11 holds {kind} .*--text_column"):
        clean_texts(Dataset.from_dict({"text": values, "row": [10, 11]}))


def test_the_report_reads_well():
    report = CleaningReport(rows_read=1200, null=1, empty=2, duplicates=97, kept=1100)
    assert report.summary() == "1,200 texts read, 1,100 kept; dropped: 1 null, 2 empty, 97 repeated"
    report.truncated, report.max_length = 0.125, 32
    assert report.summary().endswith("97 repeated; 12.5% of the kept texts cut off at 32 tokens")
    assert json.loads(json.dumps(report.to_dict()))["truncated"] == 0.125


# Samples


def test_take_samples():
    dataset = texts_of(list("abcdefgh"))
    assert take_samples(dataset, None) is dataset
    assert take_samples(dataset, 3)["row"][:] == [0, 1, 2]
    drawn = take_samples(dataset, 5, seed=1)["row"][:]
    assert len(set(drawn)) == 5
    assert drawn == take_samples(dataset, 5, seed=1)["row"][:]
    assert drawn != take_samples(dataset, 5, seed=2)["row"][:]


def test_more_samples_than_texts_takes_all_and_says_so(caplog):
    assert len(take_samples(texts_of(["a", "b"]), 3)) == 2
    assert "only 2 texts" in caplog.text


@pytest.mark.parametrize("n", [0, -1])
def test_samples_below_one(n):
    with pytest.raises(ValueError, match=f"max_train_samples is {n}"):
        take_samples(texts_of(["a"]), n)


# Tokens


@pytest.mark.parametrize("num_proc", [1, 2])
def test_tokens_agree_with_the_tokenizer(tiny_tokenizer, sentences, num_proc):
    tokens, share = tokenize_texts(texts_of(sentences), tiny_tokenizer, 12, num_proc)
    expected = [tiny_tokenizer(text, truncation=True, max_length=12)["input_ids"] for text in sentences]
    assert tokens["input_ids"][:] == expected
    assert tokens["row"][:] == list(range(len(sentences)))
    assert set(tokens.column_names) == {"input_ids", "row", "text_id"}
    cut = [len(tiny_tokenizer(text)["input_ids"]) > 12 for text in sentences]
    assert 0 < sum(cut) < len(sentences)
    assert share == sum(cut) / len(sentences)


def test_a_text_that_just_fits_is_not_cut_off(tiny_tokenizer):
    length = len(tiny_tokenizer("abc")["input_ids"])
    assert tokenize_texts(texts_of(["abc"]), tiny_tokenizer, length)[1] == 0.0
    assert tokenize_texts(texts_of(["abc"]), tiny_tokenizer, length - 1)[1] == 1.0


def test_a_tokenizer_written_in_python_works_too():
    tokenizer = ByT5Tokenizer()
    tokens, share = tokenize_texts(texts_of(["abcdef", "abc", "abcd"]), tokenizer, 5)
    assert share == pytest.approx(1 / 3)
    assert [len(ids) for ids in tokens["input_ids"]] == [5, 4, 5]


def test_equal_model_inputs_have_equal_ids_and_others_do_not(tiny_tokenizer):
    texts = ["abc def ghi", "abc def ghX", "abc dXf ghi"]
    length = len(tiny_tokenizer("abc def gh")["input_ids"])
    first, second, third = tokenize_texts(texts_of(texts), tiny_tokenizer, length)[0]["text_id"]
    assert first == second != third
    whole = tokenize_texts(texts_of(texts), tiny_tokenizer, 62)[0]["text_id"][:]
    assert len(set(whole)) == 3
    assert all(0 <= number < 2**63 for number in whole)


def test_the_id_of_a_text_never_changes():
    """BLAKE2b with 8 bytes of struct.pack("<3q", 0, 5, 2), read as a little-endian number and halved."""
    assert data._text_id([0, 5, 2]) == 8864891151679905682


def test_the_text_can_be_kept(tiny_tokenizer):
    tokens, _ = tokenize_texts(texts_of(["a", "b"]), tiny_tokenizer, 8, keep_text=True)
    assert tokens["text"][:] == ["a", "b"]
    assert "text" not in tokenize_texts(texts_of(["a", "b"]), tiny_tokenizer, 8)[0].column_names


def arrow_files(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.arrow")}


def test_tokenising_is_cached(tiny_tokenizer, sentences, own_cache, monkeypatch):
    tokens, share = tokenize_texts(texts_of(sentences), tiny_tokenizer, 10)
    files = arrow_files(own_cache)
    assert len(files) == 1

    # Calls change the state of a tokenizer, which must not make its cache key another one.
    tiny_tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=4)

    with monkeypatch.context() as patch:
        patch.setattr(type(tiny_tokenizer), "__call__", None)
        for num_proc in (1, 2):
            again, share_again = tokenize_texts(texts_of(sentences), tiny_tokenizer, 10, num_proc)
            assert again.to_dict() == tokens.to_dict()
            assert share_again == share
    assert arrow_files(own_cache) == files


def test_the_cache_keeps_lengths_data_and_tokenizers_apart(tiny_tokenizer, sentences, own_cache):
    other = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer, pad_token="<pad>")
    other.truncation_side = "left"
    dataset = texts_of(sentences)
    results = [
        tokenize_texts(dataset, tiny_tokenizer, 10)[0],
        tokenize_texts(dataset, tiny_tokenizer, 9)[0],
        tokenize_texts(dataset.select(range(5, 20)), tiny_tokenizer, 10)[0],
        tokenize_texts(dataset, other, 10)[0],
    ]
    assert len(arrow_files(own_cache)) == 4
    assert len({str(tokens["input_ids"][:]) for tokens in results}) == 4


def test_the_cache_is_found_by_another_process(tmp_path, tiny_tokenizer, own_cache):
    (tmp_path / "a.txt").write_text("one\ntwo\ntwo\n\nthree\n")
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts, _ = clean_texts(load_texts(tmp_path / "a.txt"))
    tokens, _ = tokenize_texts(texts, AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), 8)
    files = arrow_files(own_cache)
    assert len(files) == 2

    script = (
        "import sys; from transformers import AutoTokenizer; from csl_hf.data import *\n"
        "texts, _ = clean_texts(load_texts(sys.argv[1]))\n"
        "tokens, _ = tokenize_texts(texts, AutoTokenizer.from_pretrained(sys.argv[2]), 8)\n"
        "print(tokens.to_dict())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.txt"), str(tmp_path / "tokenizer")]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(own_cache)}
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(tokens.to_dict())
    assert arrow_files(own_cache) == files


def test_max_length_without_room(tiny_tokenizer):
    with pytest.raises(ValueError, match="max_length is 2, but the tokenizer adds 2 special tokens"):
        tokenize_texts(texts_of(["a"]), tiny_tokenizer, 2)


def test_no_texts_to_tokenise(tiny_tokenizer):
    with pytest.raises(ValueError, match="no texts to tokenise"):
        tokenize_texts(texts_of([]), tiny_tokenizer, 8)


def test_a_text_without_tokens_names_its_row(tiny_tokenizer):
    bare = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer, pad_token="<pad>")
    bare.backend_tokenizer.post_processor = None
    with pytest.raises(ValueError, match="row 1 gives no tokens"):
        tokenize_texts(texts_of(["a", ""]), bare, 8)


# Batches


def test_one_text_is_repeated_as_views(tiny_tokenizer):
    features = [
        {"input_ids": [0, 7, 8, 9, 2], "text_id": 2**62, "row": 5},
        {"input_ids": [0, 7, 2], "text_id": 3, "row": 6},
    ]
    batch = ContrastiveCollator(tiny_tokenizer)(features)
    assert set(batch) == {"input_ids", "attention_mask", "text_id", "row"}
    pad = tiny_tokenizer.pad_token_id
    assert batch["input_ids"].tolist() == [[[0, 7, 8, 9, 2]] * 2, [[0, 7, 2, pad, pad]] * 2]
    assert batch["attention_mask"].tolist() == [[[1] * 5] * 2, [[1, 1, 1, 0, 0]] * 2]
    assert batch["text_id"].tolist() == [2**62, 3]
    assert batch["row"].tolist() == [5, 6]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_explicit_views_stay_with_their_text(tiny_tokenizer):
    features = [
        {"views": [[0, 7, 2], [0, 8, 9, 2], [0, 2]], "text_id": 1, "row": 0},
        {"views": [[0, 9, 2], [0, 6, 2], [0, 5, 2]], "text_id": 2, "row": 1},
    ]
    batch = ContrastiveCollator(tiny_tokenizer, num_views=3)(features)
    assert batch["input_ids"].shape == (2, 3, 4)
    for text, feature in enumerate(features):
        for view, ids in enumerate(feature["views"]):
            mask = batch["attention_mask"][text, view].bool()
            assert batch["input_ids"][text, view][mask].tolist() == ids


def test_padding_to_a_multiple(tiny_tokenizer):
    feature = {"input_ids": list(range(9)), "text_id": 1, "row": 0}
    batch = ContrastiveCollator(tiny_tokenizer, num_views=1, pad_to_multiple_of=8)([feature])
    assert batch["input_ids"].shape == (1, 1, 16)
    assert batch["attention_mask"].sum() == 9


def test_a_batch_of_loaded_texts(tmp_path, tiny_tokenizer, sentences):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(sentences))
    texts, report = clean_texts(load_texts(str(path)))
    tokens, report.truncated = tokenize_texts(texts, tiny_tokenizer, 62)
    batch = ContrastiveCollator(tiny_tokenizer)([tokens[row] for row in (3, 1)])
    assert batch["row"].tolist() == [3, 1]
    assert tiny_tokenizer.decode(batch["input_ids"][0, 1], skip_special_tokens=True) == sentences[3]


def test_collator_faults(tiny_tokenizer):
    plain = {"input_ids": [0, 2], "text_id": 1, "row": 4}
    views = {"views": [[0, 2], [0, 2]], "text_id": 1, "row": 5}
    with pytest.raises(ValueError, match=r"Only some .*row 4 has none"):
        ContrastiveCollator(tiny_tokenizer)([views, plain])
    with pytest.raises(ValueError, match=r"Row 5 has 2 views, expected num_views = 3"):
        ContrastiveCollator(tiny_tokenizer, num_views=3)([views])
    with pytest.raises(ValueError, match="num_views is 0"):
        ContrastiveCollator(tiny_tokenizer, num_views=0)
    bare = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no padding token"):
        ContrastiveCollator(bare)


@pytest.mark.shared
def test_the_long_documents_of_the_shared_data_load(shared_dir):
    dataset = load_texts(str(shared_dir / "data" / "long_text" / "20newsgroups.jsonl.gz"))
    _, report = clean_texts(dataset)
    assert report.empty == 34, "stated in the data's README"
