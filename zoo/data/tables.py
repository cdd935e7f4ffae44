"""Tables of the user's own: CSV, TSV, parquet and JSON lines, with columns of any name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.errors import DataError, nearest, shown

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson", ".json")
BLOCK_BYTES = 1 << 24  # no row of a text file may be longer

# Names that columns usually have; a table that follows them needs no option.
TEXTS = ("text", "sentence", "content", "document", "review", "comment", "message", "tweet")
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
LABELS = ("label", "labels", "class", "category", "target", "score", "sentiment", "intent")
# Columns of a text and of the text that answers it.
ANSWERS = (
    ("source", "target"),
    ("input", "output"),
    ("text", "summary"),
    ("question", "answer"),
    ("text", "target"),
)
ROW_NUMBERS = ("", "idx", "id", "index", "unnamed: 0", "__index_level_0__")


def read_table(path: Path) -> Any:
    """The ``pyarrow.Table`` of a file; the fields of CSV and TSV stay text.

    Raises:
        DataError: The file cannot be read as what its name says.
    """
    import pyarrow

    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return read_parquet(path)
        if kind in (".csv", ".tsv"):
            return _read_delimited(path, kind)
        from pyarrow import json

        return json.read_json(
            path, json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
        ).combine_chunks()
    except pyarrow.ArrowInvalid as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{shown(path.name)} cannot be read as {kind[1:].upper()}: {shown(reason, 90)}; "
            "correct the file",
            str(path),
            str(error),
        ) from error
    except OSError as error:
        raise DataError(f"{shown(path.name)} cannot be read: {error}", str(path)) from error


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Some columns of a parquet file as a ``pyarrow.Table``; group by group, in half the memory."""
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        wanted = None if columns is None else list(columns)
        groups = [
            file.read_row_group(group, columns=wanted, use_threads=False)
            for group in range(file.num_row_groups)
        ]
        return pyarrow.concat_tables(groups) if groups else file.read(columns=wanted)


def choose_columns(
    table: Any,
    name: str,
    *,
    text_column: str | None,
    label_column: str | None,
    pair: bool = False,
    answer: bool = False,
) -> tuple[list[str], str]:
    """The columns of the input, two for pairs, and that of the label.

    Stated columns are taken. The others are found by usual names, or because there is no other
    candidate; anything less clear is an error, not a guess.

    Args:
        table: What `read_table` gave.
        name: Of the file, for messages.
        text_column: One name, or two with a comma between them.
        label_column: One name.
        pair: The task takes pairs.
        answer: The label is a text that answers another one; of two columns, the second.

    Raises:
        DataError: A stated column does not exist, or the columns are unclear.
    """
    names: list[str] = table.column_names
    if answer and text_column is None and label_column is None:
        lower = {name.lower(): name for name in names}
        usual = (p for p in ANSWERS if p[0] in lower and p[1] in lower)
        found = next(usual, tuple(name.lower() for name in names) if len(names) == 2 else None)
        if found:
            return [lower[found[0]]], lower[found[1]]
    if label_column is not None and label_column not in names:
        raise _no_column(name, label_column, names)
    label = label_column or _usual_label(names)
    if text_column is not None:
        texts = [text_column] if text_column in names else _split_names(text_column)
        for text in texts:
            if text not in names:
                raise _no_column(name, text, names)
        label = label_column or _usual_label([c for c in names if c not in texts])
    else:
        texts = _texts_among(table, [c for c in names if c != label], pair=pair)
    others = [c for c in names if c not in texts and c.lower() not in ROW_NUMBERS]
    if label is None and texts and len(others) == 1:
        label = others[0]
    if not texts or label is None:
        missing = [
            option
            for option, found in (("--text-column", texts), ("--label-column", label))
            if not found
        ]
        raise DataError(
            f"{shown(name)} has the columns {shown(', '.join(names), 80)}; say which to use with "
            f"{' and '.join(missing)}",
            f"columns: {', '.join(names)}",
        )
    return texts, label


def _read_delimited(path: Path, kind: str) -> Any:
    from pyarrow import csv

    with path.open("rb") as file:
        header = file.readline()
    if not header.strip():
        raise DataError(f"{shown(path.name)} is empty; give a file with a line of column names")
    delimiter = "\t" if kind == ".tsv" or b"\t" in header else ","
    if delimiter == "," and b"," not in header and b";" in header:
        delimiter = ";"
    # Published TSV files hold quotation marks as text. Where they are quotes they come in pairs.
    quoted = delimiter != "\t" or not _has_odd_quotes(path)
    parse = csv.ParseOptions(
        delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted
    )
    read = csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    with csv.open_csv(path, read_options=read, parse_options=parse) as file:
        names = file.schema.names
    import pyarrow

    convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    return csv.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)


def _has_odd_quotes(path: Path) -> bool:
    with path.open("rb") as file:
        return any(line.count(b'"') % 2 for line in file)


def _split_names(given: str) -> list[str]:
    return [part.strip() for part in given.split(",")][:2]


def _usual_label(names: Sequence[str]) -> str | None:
    """The column that is called as labels mostly are."""
    for among in (LABELS[:2], LABELS):
        usual = [name for name in names if name.lower() in among]
        if len(usual) == 1:
            return usual[0]
    return None


def _texts_among(table: Any, names: Sequence[str], *, pair: bool) -> list[str]:
    """The column, or the two of a pair, that hold the input; empty where that is unclear."""
    import pyarrow

    by_name = {name.lower(): name for name in names}
    for first, second in PAIRS:
        if first in by_name and second in by_name:
            return [by_name[first], by_name[second]]
    able = [
        name
        for name in names
        if name.lower() not in ROW_NUMBERS and _holds_input(pyarrow, table.schema.field(name).type)
    ]
    if len(able) == (2 if pair else 1):
        return able
    usual = [name for name in able if name.lower() in TEXTS]
    return usual if len(usual) == 1 and not pair else []


def _holds_input(pyarrow: Any, kind: Any) -> bool:
    """True for text, and for files as the hub lays them out: bytes, or a struct that has them."""
    if pyarrow.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    is_one_of = (
        pyarrow.types.is_string,
        pyarrow.types.is_large_string,
        pyarrow.types.is_binary,
        pyarrow.types.is_large_binary,
    )
    return any(test(kind) for test in is_one_of)


def _no_column(name: str, wanted: str, names: Sequence[str]) -> DataError:
    return DataError(
        f"{shown(name)} has no column {shown(wanted)};{nearest(wanted, names)} it has "
        f"{shown(', '.join(names), 80)}"
    )
