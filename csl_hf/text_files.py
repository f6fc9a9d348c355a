"""Reading text files: every format becomes an iterator of `str | None`, every fault a message.

Files are read as a stream, so memory does not grow with their size. A reader of our own stands in for the
loaders of `datasets` because those split a text file at a lone carriage return, leave a byte order mark in
the first text, turn the texts "NA" and "None" of a csv into null, and do not say where a fault lies.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

KINDS = (".txt", ".csv", ".tsv", ".jsonl", ".json", ".parquet")
SUPPORTED = ", ".join(KINDS) + ", each also with .gz"

# Rows looked at to find the columns of a file and which of them hold text.
HEAD_ROWS = 1000
# The csv module refuses fields above 131,072 characters; documents can be longer. The bound stays finite so
# that a quotation mark that is never closed does not draw the rest of a large file into memory.
MAX_CSV_FIELD = 1 << 24

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# First bytes that no text begins with.
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"PAR1\x15": "parquet",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"%PDF-": "PDF",
    b"\x89PNG": "PNG",
    b"ARROW1\0\0": "Arrow",
}


class TextFileError(ValueError):
    """A file that cannot be read as what its name says; the message names file, place and remedy."""


def file_kind(path: str) -> str | None:
    """Return the ending that decides how `path` is read (one of `KINDS`, `.gz` set aside), or None."""
    name = os.path.basename(path).lower().removesuffix(".gz")
    return next((kind for kind in KINDS if name.endswith(kind)), None)


def check_encoding(encoding: str) -> None:
    """Raise ValueError if `encoding` is not a text encoding that Python knows."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    except LookupError as error:
        raise ValueError(
            f"--encoding '{encoding}' is not a known text encoding. Examples: utf-8, utf-16, latin-1, cp1252."
        ) from error


def read_texts(path: str, text_column: str | None = None, encoding: str = "utf-8") -> Iterator[str | None]:
    """Yield the texts of one file in order; None where a row has no text.

    - `.txt`: one text a line. Lines end at "\\n" or "\\r\\n" only, so a text may hold any other separator.
    - `.csv` (quoted as usual) and `.tsv` (no quoting): the first line names the columns; an empty field is
      None; blank lines are no rows.
    - `.jsonl`, `.json`: one object a line; null or an absent key is None; blank lines are no rows.
    - `.parquet`: read by row group; `encoding` has no part in it.

    A byte order mark is removed. The column is chosen by `choose_text_column`.

    Raises:
        TextFileError: not decodable (names the byte), binary, corrupt, malformed (names the line), no rows.
        ValueError: the column cannot be chosen.
    """
    rows = 0
    with _gzip_errors(path):
        for text in _read_kind(path, text_column, encoding):
            rows += 1
            yield text
    if not rows:
        raise TextFileError(f"'{path}' holds no rows. Give a file with texts.")


def choose_schema_column(schema: pa.Schema, wanted: str | None, where: str) -> str:
    """Return `choose_text_column` for an Arrow schema; ValueError also if that column holds no strings."""
    text_columns = [field.name for field in schema if _is_text_type(field.type)]
    column = choose_text_column(schema.names, text_columns, wanted, where)
    if column not in text_columns:
        raise ValueError(
            f"Column {column!r} of {where} holds {schema.field(column).type}, expected strings. "
            f"Set --text_column to a column with text: {_quoted(text_columns) or 'there is none'}."
        )
    return column


def choose_text_column(columns: list[str], text_columns: list[str], wanted: str | None, where: str) -> str:
    """Return the column to train on: `wanted`, else `text`, else `sentence`, else the only text column.

    `text_columns` are those of `columns` that hold strings. ValueError names the columns there are.
    """
    there = f"it has the columns {_quoted(columns)}"
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"{where} has no column {wanted!r}; {there}. Set --text_column to one of them.")
        return wanted
    for name in ("text", "sentence"):
        if name in columns:
            return name
    if len(text_columns) != 1:
        raise ValueError(f"Cannot tell which column of {where} to train on; {there}. Name it with --text_column.")
    # Said aloud because a table without a header line would show here, its first text taken for a name.
    logger.warning("Taking the column %r of %s, the only one with text.", text_columns[0], where)
    return text_columns[0]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _read_kind(path: str, text_column: str | None, encoding: str) -> Iterator[str | None]:
    kind = file_kind(path)
    if kind == ".parquet":
        yield from _parquet_texts(path, text_column)
        return
    # csv needs the line ends inside quoted fields untouched; "\n" keeps a lone "\r" inside its line.
    with _open_text(path, encoding, newline="" if kind == ".csv" else "\n") as lines:
        if kind == ".txt":
            choose_text_column(["text"], ["text"], text_column, f"'{path}'")
            for line in lines:
                yield _without_line_end(line)
        elif kind == ".csv":
            yield from _column_texts(_table_records(_csv_rows(lines, path), path), path, text_column)
        elif kind == ".tsv":
            yield from _column_texts(_table_records(_tsv_rows(lines), path), path, text_column)
        else:
            yield from _column_texts(_json_records(lines, path), path, text_column)


def _without_line_end(line: str) -> str:
    return line.removesuffix("\n").removesuffix("\r")


def _open_binary(path: str) -> BinaryIO:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


@contextmanager
def _gzip_errors(path: str) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise TextFileError(f"'{path}' is cut off: the gzip stream has no end. Copy or download it again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TextFileError(
            f"'{path}' is not a sound gzip file ({error}). "
            "Copy it again, or drop .gz from its name if it is not packed."
        ) from error


@contextmanager
def _open_text(path: str, encoding: str, newline: str) -> Iterator[Iterator[str]]:
    # "utf-8-sig" is utf-8 without a leading byte order mark.
    codec = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
    with _open_binary(path) as raw:
        _refuse_binary(raw.read(4096), path, codec)
        raw.seek(0)
        try:
            with io.TextIOWrapper(raw, encoding=codec, newline=newline) as stream:
                yield _refuse_nul(stream, path)
        except UnicodeError as error:
            place = _first_bad_byte(path, codec)
            raise TextFileError(
                f"'{path}' is not {encoding}: {place} cannot be decoded. "
                "Save the file as UTF-8 or name its encoding, for example --encoding latin-1."
            ) from error


def _refuse_binary(head: bytes, path: str, codec: str) -> None:
    for magic, name in MAGIC.items():
        if head.startswith(magic):
            raise TextFileError(
                f"'{path}' is a binary file ({name}), but its name says text. "
                f"Unpack or convert it, or give it the ending of what it is. Supported: {SUPPORTED}."
            )
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and codec == "utf-8-sig":
        raise TextFileError(f"'{path}' is not utf-8: it begins with a UTF-16 mark. Use --encoding utf-16.")
    if b"\0" in head and "16" not in codec and "32" not in codec:
        raise TextFileError(_nul_message(path, f"byte {head.index(0)}"))


def _refuse_nul(lines: Iterable[str], path: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise TextFileError(_nul_message(path, f"line {number}"))
        yield line


def _nul_message(path: str, place: str) -> str:
    return (
        f"'{path}' looks like a binary file: NUL at {place}. Give a text file ({SUPPORTED}); "
        "if it is text in another encoding, name it, for example --encoding utf-16."
    )


def _first_bad_byte(path: str, codec: str) -> str:
    """Say where decoding fails (in a pass of its own: a TextIOWrapper does not tell its place)."""
    decoder = codecs.getincrementaldecoder(codec)()
    offset = 0
    with _open_binary(path) as raw:
        while True:
            chunk = raw.read(1 << 20)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # error.object is the chunk with what the decoder still held before it (or, after a byte order
                # mark, without those bytes).
                bad = offset + len(chunk) - len(error.object) + error.start
                unpacked = " of the unpacked file" if path.lower().endswith(".gz") else ""
                return f"byte {bad}{unpacked} (0x{error.object[error.start]:02x})"
            except UnicodeError as error:
                return f"the beginning ({error})"
            offset += len(chunk)
            if not chunk:
                return "some byte"


def _csv_rows(lines: Iterator[str], path: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, strict=True)
    limit = csv.field_size_limit(MAX_CSV_FIELD)
    try:
        while True:
            first_line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise TextFileError(
                    f"'{path}', row from line {first_line}: malformed csv ({error}). "
                    "Look for a quotation mark that is not closed or not doubled."
                ) from error
            yield first_line, fields
    finally:
        csv.field_size_limit(limit)


def _tsv_rows(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=1):
        line = _without_line_end(line)
        yield number, line.split("\t") if line else []


def _table_records(rows: Iterator[tuple[int, list[str]]], path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    header: list[str] | None = None
    for number, fields in rows:
        if not fields:
            continue
        if header is None:
            header = fields
            if len(set(header)) < len(header):
                raise TextFileError(f"'{path}': two columns have one name ({_quoted(header)}). Rename one of them.")
            continue
        if len(fields) != len(header):
            raise TextFileError(
                f"'{path}', line {number}: {len(fields)} fields, but the header has {len(header)} "
                f"({_quoted(header)}). Mend the line; in a .csv quote texts that hold a comma."
            )
        yield number, {name: field or None for name, field in zip(header, fields, strict=True)}


def _json_records(lines: Iterator[str], path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TextFileError(
                f"'{path}', line {number}, character {error.colno}: malformed JSON ({error.msg}). "
                "Expected one whole JSON object on each line (JSON Lines)."
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
            raise TextFileError(f"'{path}', line {number}: JSON that cannot be read ({error}).") from error
        if not isinstance(record, dict):
            raise TextFileError(
                f"'{path}', line {number}: a JSON {type(record).__name__}, expected one object on each line, "
                'for example {"text": "..."}.'
            )
        yield number, record


def _column_texts(
    records: Iterator[tuple[int, dict[str, Any]]], path: str, text_column: str | None
) -> Iterator[str | None]:
    head = list(islice(records, HEAD_ROWS))
    if not head:
        return
    columns = list(dict.fromkeys(name for _, record in head for name in record))
    text_columns = [name for name in columns if _holds_text([record.get(name) for _, record in head])]
    column = choose_text_column(columns, text_columns, text_column, f"'{path}'")
    for number, record in chain(head, records):
        text = record.get(column)
        if text is None:
            yield None
            continue
        if not isinstance(text, str):
            raise TextFileError(
                f"'{path}', line {number}: column {column!r} holds {type(text).__name__}, expected a string "
                f"or null. Mend the line or set --text_column to another of {_quoted(columns)}."
            )
        if LONE_SURROGATE.search(text):
            raise TextFileError(
                f"'{path}', line {number}: column {column!r} holds half of a surrogate pair "
                "(\\ud800 to \\udfff), which is no character. Remove it."
            )
        yield text


def _holds_text(values: list[Any]) -> bool:
    """True if the values are strings or null and not all of them numbers (a csv holds labels as strings)."""
    there = [value for value in values if value is not None]
    return all(isinstance(value, str) for value in there) and not all(_is_number(value) for value in there)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _parquet_texts(path: str, text_column: str | None) -> Iterator[str | None]:
    with _open_binary(path) as packed, tempfile.TemporaryFile() as unpacked:
        source = packed
        if path.lower().endswith(".gz"):
            # Parquet is read from its end, which a gzip stream cannot do without unpacking.
            shutil.copyfileobj(packed, unpacked)
            source = unpacked
        try:
            parquet = pq.ParquetFile(source)
            column = choose_schema_column(parquet.schema_arrow, text_column, f"'{path}'")
            for batch in parquet.iter_batches(columns=[column]):
                yield from batch.column(0).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise TextFileError(f"'{path}' is not a sound parquet file ({error}). Write or copy it again.") from error


def _is_text_type(kind: pa.DataType) -> bool:
    """True for the Arrow types whose values are `str` or None."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)
