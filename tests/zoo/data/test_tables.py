from __future__ import annotations

import pyarrow as pa
import pytest

from zoo.data.tables import choose_columns, read_table
from zoo.errors import DataError


def chosen(columns, *, text=None, label=None, pair=False):
    table = pa.table(columns)
    return choose_columns(table, "x.csv", text_column=text, label_column=label, pair=pair)


WORDS, NUMBERS = ["a", "b"], [1, 2]


@pytest.mark.parametrize(
    ("columns", "texts", "label"),
    [
        ({"text": WORDS, "label": NUMBERS}, ["text"], "label"),
        ({"Label": NUMBERS, "Tweet": WORDS}, ["Tweet"], "Label"),
        ({"idx": NUMBERS, "sentence": WORDS, "label": WORDS}, ["sentence"], "label"),
        ({"title": WORDS, "review": WORDS, "sentiment": WORDS}, ["review"], "sentiment"),
        ({"comment": WORDS, "stars": NUMBERS}, ["comment"], "stars"),
        ({"text_a": WORDS, "text_b": WORDS, "class": WORDS}, ["text_a", "text_b"], "class"),
        ({"text": WORDS, "label": NUMBERS, "score": NUMBERS}, ["text"], "label"),
        ({"img": [{"bytes": b"x"}] * 2, "label": NUMBERS}, ["img"], "label"),
    ],
)  # fmt: skip
def test_usual_columns_are_found(columns, texts, label):
    assert chosen(columns) == (texts, label)


@pytest.mark.parametrize(
    ("columns", "missing"),
    [
        ({"a": WORDS, "b": WORDS}, "--text-column and --label-column"),
        ({"a": WORDS, "b": WORDS, "label": WORDS}, "--text-column"),
        ({"text": WORDS, "kind": WORDS, "topic": WORDS}, "--label-column"),
        ({"text": WORDS}, "--label-column"),
        ({"text": WORDS, "category": WORDS, "score": NUMBERS}, "--label-column"),
    ],
)
def test_unclear_columns_are_asked_for(columns, missing):
    with pytest.raises(DataError, match=f"say which to use with {missing}") as error:
        chosen(columns)
    assert all(name in error.value.line for name in columns)
    assert len(error.value.line) <= 200


def test_stated_columns_are_taken():
    columns = {"a": WORDS, "b,c": WORDS, "d": WORDS, "label": NUMBERS}
    assert chosen(columns, text="a", label="d") == (["a"], "d")
    assert chosen(columns, text="b,c", label="d") == (["b,c"], "d")
    assert chosen(columns, text="a, d") == (["a", "d"], "label")
    assert chosen({"x": WORDS, "y": WORDS, "z": NUMBERS}, label="z", pair=True) == (["x", "y"], "z")
    for options in ({"text": "lable"}, {"text": "a,lable"}, {"label": "lable"}):
        with pytest.raises(DataError, match="no column 'lable'; did you mean 'label'"):
            chosen(columns, **options)


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.csv", 'text,label\n"two\nlines, ""so""",1\n', [("two\nlines, \"so\"", "1")]),
        ("b.csv", "text;label\nfine, really;007\n", [("fine, really", "007")]),
        ("c.csv", "\ufefftext,label\nb,1.50\n", [("b", "1.50")]),
        ("d.tsv", 'text\tlabel\n"open\t1\nnot" it\t0\n', [('"open', "1"), ('not" it', "0")]),
        ("e.tsv", 'text\tlabel\n"a ""b"""\t1\n', [('a "b"', "1")]),
        ("f.csv", "text,label\r\nNA,null\r\n", [("NA", "null")]),
        ("g.jsonl", '{"text": "a\\n", "label": 1}\n', [("a\n", 1)]),
    ],
)  # fmt: skip
def test_files_are_read_as_they_are_written(tmp_path, name, content, rows):
    path = tmp_path / name
    path.write_bytes(content.encode())
    table = read_table(path)
    assert list(zip(*(table.column(c).to_pylist() for c in ("text", "label")), strict=True)) == rows


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("b.csv", b"text,label\na,b,c\n"),
        ("c.csv", b"text,label\n\xff\xfe,1\n"),
        ("d.parquet", b"PAR1"),
        ("e.jsonl", b'{"text": \n'),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as error:
        read_table(tmp_path / name)
    assert len(error.value.line) <= 200
