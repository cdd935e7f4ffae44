from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from zoo.data import Dataset
from zoo.data.rows import ListRows, Subset, check, open_rows, parts, split
from zoo.errors import DataError


def read(raw):
    """What a task does with a path: the content, unless it is broken."""
    with open(raw, "rb") as file:
        if file.read() == b"broken":
            raise DataError(f"{raw!r} is damaged; get a complete copy of it")


IMAGES = SimpleNamespace(
    name="image-classification", suffixes=(".png", ".jpg"), datasets={}, read=read
)
TEXTS = SimpleNamespace(name="text-classification", datasets={}, read=len)


def folder(root, **classes):
    for name, files in classes.items():
        (root / name).mkdir(parents=True)
        for file in files:
            (root / name / file).parent.mkdir(exist_ok=True)
            (root / name / file).write_bytes(b"x")
    return root


# --- folders


def test_a_folder_of_classes_gives_its_files_in_the_order_of_the_names(tmp_path):
    folder(tmp_path, dog=["2.png", "1.JPG", "notes.txt", ".hidden.png"], cat=["deep/3.png"])
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README.md").write_text("no class")
    rows = open_rows(tmp_path, IMAGES)
    assert rows.classes == ("cat", "dog")
    assert [rows[i] for i in range(len(rows))] == [
        (str(tmp_path / "cat/deep/3.png"), 0),
        (str(tmp_path / "dog/1.JPG"), 1),
        (str(tmp_path / "dog/2.png"), 1),
    ]
    assert rows[-1] == rows[2]
    assert type(rows[0][1]) is int
    assert rows.counts().tolist() == [1, 2]
    assert "dog/2.png" in rows.where(2)
    with pytest.raises(IndexError):
        rows[3]


def test_the_ids_are_those_of_the_model_that_is_continued(tmp_path):
    folder(tmp_path, b=["1.png"], a=["2.png"])
    rows = open_rows(tmp_path, IMAGES, classes=["b", "x", "a"])
    assert (rows.classes, rows.targets.tolist()) == (("b", "x", "a"), [2, 0])
    with pytest.raises(DataError, match=r"'a' .* is no class of the model;.* it has 'b, aa'"):
        open_rows(tmp_path, IMAGES, classes=["b", "aa"])


def test_an_empty_class_is_a_class(tmp_path):
    rows = open_rows(folder(tmp_path, full=["1.png"], bare=[]), IMAGES)
    assert (rows.classes, rows.counts().tolist()) == (("bare", "full"), [0, 1])


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ({}, "holds no folders; make one for each class"),
        ({"a": ["x.wav"]}, r"ends in \.png, \.jpg"),
    ],
)
def test_a_folder_without_images_says_what_belongs_there(tmp_path, classes, said):
    (tmp_path / "loose.png").write_bytes(b"x")
    with pytest.raises(DataError, match=said):
        open_rows(folder(tmp_path, **classes), IMAGES)


def test_a_task_on_text_takes_no_folder_of_classes(tmp_path):
    with pytest.raises(DataError, match="text-classification takes a table"):
        open_rows(folder(tmp_path, a=["1.png"]), TEXTS)


# --- parts


@pytest.mark.parametrize("held", ["val", "valid", "validation", "dev"])
def test_folders_of_parts_are_found(tmp_path, held):
    for part in ("train", held, "test"):
        folder(tmp_path / part, a=[f"{part}.png"])
    found = parts(tmp_path)
    assert found == {
        "train": str(tmp_path / "train"),
        "validation": str(tmp_path / held),
        "test": str(tmp_path / "test"),
    }
    assert open_rows(tmp_path, IMAGES).raw(0).endswith("train.png")
    assert open_rows(found["validation"], IMAGES).raw(0).endswith(f"{held}.png")


def test_classes_may_be_called_train_and_test(tmp_path):
    folder(tmp_path, train=["1.png"], test=["2.png"])
    assert parts(tmp_path) == {"train": str(tmp_path)}
    assert open_rows(tmp_path, IMAGES).classes == ("test", "train")
    folder(tmp_path, car=["3.png"])
    assert open_rows(tmp_path, IMAGES).classes == ("car", "test", "train")


def test_tables_of_parts_are_found(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,x\n")
    assert parts(tmp_path) == {"train": str(tmp_path / "train.csv")}
    (tmp_path / "dev.tsv").write_text("text\tlabel\nb\tx\n")
    assert parts(tmp_path)["validation"] == str(tmp_path / "dev.tsv")
    assert open_rows(tmp_path, TEXTS)[0] == ("a", 0)
    (tmp_path / "val.csv").write_text("text,label\nb,x\n")
    with pytest.raises(DataError, match="both mean validation"):
        parts(tmp_path)


# --- tables


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_tables_give_texts_and_classes(tmp_path, suffix):
    path = tmp_path / f"reviews.{suffix}"
    records = [("fine, really", "pos"), ("bad", "neg"), ("", "pos"), ('so "so"', "neg")]
    texts, labels = zip(*records, strict=True)
    if suffix == "csv":
        path.write_text('review,label\n"fine, really",pos\nbad,neg\n"",pos\n"so ""so""",neg\n')
    elif suffix == "tsv":
        path.write_text("review\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in records))
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps({"label": b, "review": a}) + "\n" for a, b in records))
    else:
        parquet.write_table(pa.table({"review": texts, "label": labels}), path, row_group_size=3)
    rows = open_rows(path, TEXTS)
    assert rows.classes == ("neg", "pos")
    assert [rows[i] for i in range(4)] == [(a, int(b == "pos")) for a, b in records]
    assert rows.where(1) == f"reviews.{suffix}, row 1"
    assert rows.describe(1) == "bad"


def test_pairs_and_scores(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("id,a,b,how much\n7,x,y,4.5\n8,u,v,0\n")
    task = SimpleNamespace(name="sentence-embedding", target="number", datasets={})
    rows = open_rows(path, task, text_column="a, b", label_column="how much")
    assert (rows.classes, rows[0], rows[1]) == (None, (("x", "y"), 4.5), (("u", "v"), 0.0))
    assert rows.describe(0) == "x | y"
    path.write_text("a,b,score\nx,y,much\n")
    with pytest.raises(DataError, match="row 0 has 'much'; the task learns a finite number"):
        open_rows(path, task)


def test_a_published_set_is_read_as_its_reader_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    info = {"info": {"features": {"label": {"names": ["no", "yes"]}}}}
    table = pa.table(
        {"img": [{"bytes": b"0", "path": ""}, {"bytes": b"1", "path": ""}], "label": [1, 0]}
    ).replace_schema_metadata({"huggingface": json.dumps(info)})
    parquet.write_table(table, tmp_path / "x.parquet")
    examples = [(b"0", 1), (b"1", 0)]
    options = {
        "name": "x",
        "files": {"train": "x.parquet"},
        "home": "",
        "read": lambda path: examples,
    }
    for columns in ((), ("img", "label")):
        task = SimpleNamespace(datasets={"x": Dataset(columns=columns, **options)})
        rows = open_rows("x/train", task)
        assert [rows[i] for i in range(2)] == examples
        assert rows.where(1) == "x/train, row 1"
    assert rows.classes == ("no", "yes")
    assert open_rows("x/train", task, classes=["a", "b"]).classes == ("a", "b")
    with pytest.raises(DataError, match="has no split 'trian'; did you mean 'train'"):
        open_rows("x/trian", task)
    task = SimpleNamespace(datasets={"x": Dataset(columns=("image", "label"), **options)})
    with pytest.raises(DataError, match="lacks the column image; get the published"):
        open_rows("x/train", task)


def test_a_damaged_published_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    dataset = Dataset(
        name="x", files={"train": "x.parquet"}, read=iter, home="", columns=("a", "b")
    )
    with pytest.raises(DataError, match=r"x\.parquet' is damaged; get the published file"):
        open_rows("x/train", SimpleNamespace(datasets={"x": dataset}))


def test_a_place_that_is_not_there_names_the_nearest_set(tmp_path):
    task = SimpleNamespace(
        datasets={"cifar10": SimpleNamespace(name="cifar10", files={"train": "", "test": ""})}
    )
    with pytest.raises(DataError, match=r"no 'cifar/train'; did you mean 'cifar10/train'") as error:
        open_rows("cifar/train", task)
    assert len(error.value.line) <= 200
    (tmp_path / "x.doc").write_text("")
    with pytest.raises(DataError, match=r"x\.doc' is no table; give a folder, or a file"):
        open_rows(tmp_path / "x.doc", task)


# --- splitting


def numbered(*counts, classes=None):
    targets = [label for label, n in enumerate(counts) for _ in range(n)]
    names = classes or tuple("abcdefgh"[: len(counts)])
    return ListRows("some", list(enumerate(targets)), names)


def test_a_split_is_exact_stratified_and_a_function_of_the_seed():
    rows = numbered(100, 50, 7)
    kept, held = split(rows, 0.2, 3)
    assert held.counts().tolist() == [20, 10, 1]
    assert len(held) == round(0.2 * 157)
    raws = [part.raw(i) for part in (kept, held) for i in range(len(part))]
    assert sorted(raws) == list(range(157))
    again, other = split(rows, 0.2, 3)[1], split(rows, 0.2, 4)[1]
    assert np.array_equal(held.indices, again.indices)
    assert not np.array_equal(held.indices, other.indices)
    assert (kept.classes, held.name) == (rows.classes, "some, held out")


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.9])
@pytest.mark.parametrize("counts", [(2, 2, 2), (5, 3, 10), (40, 2), (9,)])
def test_every_class_keeps_an_item_and_the_held_out_part_has_its_size(share, counts):
    kept, held = split(numbered(*counts), share, 0)
    assert kept.counts().min() >= 1
    assert len(held) == min(round(share * sum(counts)), sum(counts) - len(counts))


def test_the_only_item_of_a_class_is_trained_on():
    with pytest.warns(UserWarning, match="1 classes have one item, .* 'b'"):
        kept, held = split(numbered(10, 1, 10), 0.3, 0)
    assert kept.counts()[1] == 1
    assert held.counts().tolist() == [3, 0, 3]


def test_numbers_are_split_too():
    rows = ListRows("scores", [(i, i / 7) for i in range(50)])
    kept, held = split(rows, 0.2, 0)
    assert (len(kept), len(held)) == (40, 10)


@pytest.mark.parametrize("share", [0, 1, -0.5, 20])
def test_other_shares_are_refused(share):
    with pytest.raises(DataError, match="between 0 and 1"):
        split(numbered(10), share, 0)


def test_too_few_items_to_split_are_refused():
    with pytest.warns(UserWarning, match="one item"), pytest.raises(DataError, match="too few"):
        split(numbered(1, 1), 0.5, 0)


def test_a_subset_of_a_subset_knows_where_its_items_are():
    inner = Subset(Subset(numbered(10), np.arange(5, 10)), np.array([1, 3]))
    assert [inner[0], inner[1]] == [(6, 0), (8, 0)]
    assert inner.where(1) == "some, row 8"


# --- checking


def test_broken_files_are_left_out_and_reported(tmp_path):
    folder(tmp_path, a=["1.png", "2.png", "3.jpg"], b=["4.png", "5.png"], c=["6.png"], d=[])
    for broken in ("a/2.png", "b/5.png", "c/6.png"):
        (tmp_path / broken).write_bytes(b"broken")
    rows = open_rows(tmp_path, IMAGES)
    report, left = check(rows, IMAGES)
    assert [index for index, _, _ in report.unreadable] == [1, 4, 5]
    assert [left.raw(i)[-5:] for i in range(len(left))] == ["1.png", "3.jpg", "4.png"]
    assert (report.items, report.empty, report.single) == (6, ["c", "d"], ["b"])
    assert report.formats == {".png": 5, ".jpg": 1}
    lines = report.lines()
    assert len(lines) == 3 + 2 + 1 + 1
    assert "2.png" in lines[0]
    assert "is damaged" in lines[0]
    assert lines[-1] == "mixed formats, all read alike: 5 .png, 1 .jpg"


def test_rows_in_order_are_given_back_as_they_are(tmp_path):
    rows = open_rows(folder(tmp_path, a=["1.png", "2.png"], b=["3.png", "4.png"]), IMAGES)
    report, left = check(rows, IMAGES)
    assert report.lines() == []
    assert left is rows


def test_nothing_readable_is_an_error(tmp_path):
    (folder(tmp_path, a=["1.png"]) / "a/1.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="none of the 1 items") as error:
        check(open_rows(tmp_path, IMAGES), IMAGES)
    assert "is damaged" in error.value.details[0]


# Answers that are texts


Answering = SimpleNamespace(name="text-to-text", target="text", datasets={})


@pytest.mark.parametrize(
    ("header", "options"),
    [
        ("source,target", {}),
        ("input,output", {}),
        ("Question,Answer", {}),
        ("english,deutsch", {}),
        ("a,b,c", {"text_column": "a", "label_column": "b"}),
    ],
)
def test_a_table_of_texts_and_answers(tmp_path, header, options):
    path = tmp_path / "pairs.csv"
    rest = ",x" if header.count(",") == 2 else ""
    path.write_text(f"{header}\none,eins{rest}\n12,zwölf{rest}\n")
    rows = open_rows(path, Answering, **options)
    assert [rows[i] for i in range(2)] == [("one", "eins"), ("12", "zwölf")]
    assert rows.classes is None


def test_answers_that_are_missing_or_no_texts_are_named(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("source,target\none,eins\ntwo,\n")
    with pytest.raises(DataError, match="1 rows have no label, the first is row 1"):
        open_rows(path, Answering)
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"source": "one", "target": 1}\n')
    with pytest.raises(DataError, match="row 0 has 1; the task learns a text"):
        open_rows(path, Answering)
    path.write_text('{"a": "one", "b": "eins", "c": "x"}\n')
    with pytest.raises(DataError, match="--text-column"):
        open_rows(path, Answering)
