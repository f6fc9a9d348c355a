"""Reading of single files: what counts as a row, and what each fault says."""

from __future__ import annotations

import codecs
import csv
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from csl_hf.text_files import TextFileError, check_encoding, choose_text_column, file_kind, read_texts


def write(path, content: str | bytes):
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def read(path, **options):
    return list(read_texts(str(path), **options))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "one\ntwo, three\n"),
        ("a.csv", 'label,text\n1,one\n2,"two, three"\n'),
        ("a.tsv", "label\ttext\n1\tone\n2\ttwo, three\n"),
        ("a.jsonl", '{"text": "one"}\n\n{"text": "two, three", "label": 2}\n'),
        ("a.json", '{"text": "one"}\n{"text": "two, three"}\n'),
    ],
)
@pytest.mark.parametrize("gz", ["", ".gz"])
def test_each_text_format_plain_and_packed(tmp_path, name, content, gz):
    assert read(write(tmp_path / (name + gz), content)) == ["one", "two, three"]


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_parquet_plain_and_packed(tmp_path, gz):
    plain = tmp_path / "a.parquet"
    columns = {"id": [1, 2, 3], "text": ["one", None, "two"]}
    pq.write_table(pa.table(columns), plain, row_group_size=2)
    path = write(tmp_path / "packed.parquet.gz", plain.read_bytes()) if gz else plain
    assert read(path) == ["one", None, "two"]


def test_the_ending_decides_and_its_case_does_not_matter():
    assert file_kind("/x/A.TXT.GZ") == ".txt"
    assert file_kind("a.parquet.gz") == ".parquet"
    assert file_kind("a.docx") is None
    assert file_kind("txt") is None


def test_txt_lines_end_at_newline_only(tmp_path):
    odd = "a\u2028b\u2029c\x0bd\x0ce\x85f\x1cg\rh"
    assert read(write(tmp_path / "a.txt", f"{odd}\nnext\r\n\nlast")) == [odd, "next", "", "last"]


def test_tsv_has_no_quoting_and_keeps_odd_separators(tmp_path):
    content = 'text\tlabel\n"open\u2028quote\t1\n5" disk "x"\t2\r\n'
    assert read(write(tmp_path / "a.tsv", content)) == ['"open\u2028quote', '5" disk "x"']


def test_csv_fields_may_hold_line_ends_doubled_quotes_and_long_documents(tmp_path):
    long = "word " * 40_000  # beyond the default field limit of the csv module
    path = write(tmp_path / "a.csv", f'text,label\n"a\nb ""c""\u2028d",1\n{long},2\n')
    limit = csv.field_size_limit()
    assert read(path) == ['a\nb "c"\u2028d', long]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl"])
def test_byte_order_mark_is_removed(tmp_path, name):
    content = {"a.txt": "é one\n", "a.jsonl": '{"text": "é one"}\n'}.get(name, "text\né one\n")
    path = write(tmp_path / name, codecs.BOM_UTF8 + content.encode())
    assert read(path) == ["é one"]
    assert read(path, encoding="UTF8") == ["é one"]


def test_other_encodings(tmp_path):
    assert read(write(tmp_path / "a.txt", "é\n".encode("latin-1")), encoding="latin-1") == ["é"]
    assert read(write(tmp_path / "b.txt", "é\nö\n".encode("utf-16")), encoding="utf-16") == ["é", "ö"]


def test_null_rows(tmp_path):
    assert read(write(tmp_path / "a.jsonl", '{"text": null}\n{"x": 1}\n{"text": "a"}\n')) == [None, None, "a"]
    assert read(write(tmp_path / "a.csv", "text,label\n,1\nNA,2\nNone,3\n")) == [None, "NA", "None"]
    assert read(write(tmp_path / "a.tsv", "text\tlabel\n\t1\n \t2\n")) == [None, " "]


def test_the_column_is_text_then_sentence_then_the_only_one_with_text(tmp_path):
    assert read(write(tmp_path / "a.csv", "other,sentence,text\na,b,c\n")) == ["c"]
    assert read(write(tmp_path / "b.csv", "other,sentence\na,b\n")) == ["b"]
    assert read(write(tmp_path / "c.csv", "label,review\n1,a\n2,5\n")) == ["a", "5"]
    assert read(write(tmp_path / "d.jsonl", '{"id": 1, "review": null}\n{"id": 2, "review": "a"}\n')) == [
        None,
        "a",
    ]
    assert read(write(tmp_path / "e.csv", "text,body\na,b\n"), text_column="body") == ["b"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "first,second\na,b\n"),
        ("a.tsv", "first\tsecond\na\tb\n"),
        ("a.jsonl", '{"first": "a", "second": "b"}\n'),
    ],
)
def test_wrong_or_unclear_column_names_the_columns(tmp_path, name, content):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=r"no column 'body'; .*'first', 'second'.*--text_column"):
        read(path, text_column="body")
    with pytest.raises(ValueError, match=r"'first', 'second'.*--text_column"):
        read(path)


def test_a_txt_file_has_one_column(tmp_path):
    with pytest.raises(ValueError, match="no column 'body'; it has the columns 'text'"):
        read(write(tmp_path / "a.txt", "one\n"), text_column="body")


def test_parquet_column_without_strings(tmp_path):
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'text' .* holds int64, expected strings.*'body'"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_column="body") == ["a", "b"]


def test_a_column_taken_for_want_of_another_is_named(tmp_path, caplog):
    assert read(write(tmp_path / "a.tsv", "A first sentence.\nA second one.\n")) == ["A second one."]
    assert "Taking the column 'A first sentence.'" in caplog.text


def test_choose_text_column_without_any_text_column():
    with pytest.raises(ValueError, match="'a', 'b'"):
        choose_text_column(["a", "b"], [], None, "here")


@pytest.mark.parametrize("prefix", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("filler", [5, 3_000_000])
@pytest.mark.parametrize("gz", ["", ".gz"])
def test_not_utf8_names_the_byte(tmp_path, prefix, filler, gz):
    start = prefix + "é\n".encode() + b"x" * filler
    path = write(tmp_path / f"a.txt{gz}", start + b"\xe9 after\n")
    with pytest.raises(TextFileError, match=rf"not utf-8: byte {len(start)} .*\(0xe9\).*--encoding latin-1"):
        read(path)


def test_not_utf8_at_the_very_end(tmp_path):
    with pytest.raises(TextFileError, match="byte 4 "):
        read(write(tmp_path / "a.txt", b"abc\n\xc3"))


def test_utf16_is_named(tmp_path):
    with pytest.raises(TextFileError, match="--encoding utf-16"):
        read(write(tmp_path / "a.txt", "one\n".encode("utf-16")))
    with pytest.raises(TextFileError, match="NUL at byte 1.*--encoding utf-16"):
        read(write(tmp_path / "b.txt", "one\n".encode("utf-16-le")))
    with pytest.raises(TextFileError, match="not utf-16: the beginning"):
        read(write(tmp_path / "c.txt", b"plain\n"), encoding="utf-16")


@pytest.mark.parametrize(
    ("content", "kind"),
    [(gzip.compress(b"one\n"), "gzip"), (b"PK\x03\x04rest", "zip"), (None, "parquet")],
)
def test_a_binary_file_with_a_text_name(tmp_path, content, kind):
    if content is None:
        pq.write_table(pa.table({"text": ["one"]}), tmp_path / "a.parquet")
        content = (tmp_path / "a.parquet").read_bytes()
    for name in ("a.txt", "a.csv", "a.jsonl"):
        with pytest.raises(TextFileError, match=rf"binary file \({kind}\).*Supported: .txt"):
            read(write(tmp_path / name, content))


def test_a_text_may_begin_with_the_letters_of_a_binary_format(tmp_path):
    assert read(write(tmp_path / "a.txt", "PAR1 is a code.\n")) == ["PAR1 is a code."]


def test_nul_bytes_late_in_the_file(tmp_path):
    path = write(tmp_path / "a.txt", b"line\n" * 2000 + b"a\0b\n")
    with pytest.raises(TextFileError, match="binary file: NUL at line 2001"):
        read(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.parquet.gz"])
def test_damaged_gzip(tmp_path, name):
    packed = gzip.compress(bytes(range(1, 128)) * 3000, mtime=0)
    path = tmp_path / name
    path.write_bytes(packed[:-20])
    with pytest.raises(TextFileError, match=f"{name}' is cut off"):
        read(path)
    path.write_bytes(packed[:20] + b"\xff" * 40 + packed[60:])
    with pytest.raises(TextFileError, match=f"{name}' is not a sound gzip file"):
        read(path)
    path.write_bytes(b"not packed\n")
    with pytest.raises(TextFileError, match="drop .gz"):
        read(path)


def test_malformed_csv_names_the_line(tmp_path):
    with pytest.raises(TextFileError, match=r"a.csv', line 3: 3 fields, .* has 2 \('text', 'label'\)"):
        read(write(tmp_path / "a.csv", "text,label\na,1\nb, c,2\n"))
    with pytest.raises(TextFileError, match=r"row from line 3: malformed csv .*not closed"):
        read(write(tmp_path / "b.csv", 'text,label\na,1\n"b,2\nc,3\n'))
    with pytest.raises(TextFileError, match="line 2: 1 fields"):
        read(write(tmp_path / "a.tsv", "text\tlabel\na\n"))


def test_malformed_json_lines_name_the_line(tmp_path):
    with pytest.raises(TextFileError, match=r"a.jsonl', line 2, character 10: malformed JSON"):
        read(write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": b}\n'))
    with pytest.raises(TextFileError, match="line 1: a JSON list, expected one object on each line"):
        read(write(tmp_path / "b.json", '[{"text": "a"}]'))
    with pytest.raises(TextFileError, match=r"line 2: column 'text' holds list, expected a string or null"):
        read(write(tmp_path / "c.jsonl", '{"text": "a"}\n{"text": ["b"]}\n'))
    with pytest.raises(TextFileError, match="line 1: .*surrogate"):
        read(write(tmp_path / "d.jsonl", r'{"text": "a\ud800"}'))


def test_surrogate_pairs_in_json_are_characters(tmp_path):
    assert read(write(tmp_path / "a.jsonl", r'{"text": "\ud83d\ude00"}')) == ["\U0001f600"]


def test_damaged_parquet(tmp_path):
    with pytest.raises(TextFileError, match="not a sound parquet file"):
        read(write(tmp_path / "a.parquet", "text\n"))


@pytest.mark.parametrize(("name", "content"), [("a.csv", "text,label\n"), ("a.jsonl", "\n\n"), ("a.txt.gz", "")])
def test_a_file_without_rows(tmp_path, name, content):
    with pytest.raises(TextFileError, match=f"{name}' holds no rows"):
        read(write(tmp_path / name, content))


@pytest.mark.parametrize("encoding", ["utf-9", "hex"])
def test_unknown_encoding(encoding):
    with pytest.raises(ValueError, match=f"--encoding '{encoding}' is not a known text encoding"):
        check_encoding(encoding)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,text\none,two\n", "two columns have one name \\('text', 'text'\\)"),
        ("a.jsonl", '{"text": "a"}\n{"text": ' + "9" * 5000 + "}\n", "line 2: JSON that cannot be read"),
        ("b.jsonl", "[" * 100_000 + "\n", "line 1: JSON that cannot be read"),
    ],
)
def test_tables_that_cannot_be_read_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TextFileError, match=message):
        list(read_texts(str(path)))
