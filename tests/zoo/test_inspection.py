"""What is found in the caller's data."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

import zoo
from zoo import registry
from zoo.errors import ConfigError, DataError
from zoo.inspection import Request, fingerprint, look, places_of, reader_of
from zoo.training.recipe import AdamW


def test_a_published_set_brings_its_parts():
    request = Request(model="m", data="sst2/train")
    reader = registry.task_of(
        dataclasses.replace(zoo.card("all-minilm-l6-v2.sbert"), task="nlp.tasks:TextClassification")
    )
    assert places_of(request, reader) == {
        "train": "sst2/train",
        "validation": "sst2/validation",
    }


def picture(path, colour, seed=0):
    rng = np.random.default_rng(seed)
    pixels = np.clip(np.array(colour) + rng.integers(-30, 30, (20, 20, 3)), 0, 255)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path):
    """Two classes of ten pictures."""
    for number in range(10):
        picture(tmp_path / "photos" / "cat" / f"{number}.png", (200, 40, 40), number)
        picture(tmp_path / "photos" / "dog" / f"{number}.png", (40, 40, 200), number)
    return tmp_path / "photos"


def looked(data, **options):
    request = Request(model="resnet18", data=str(data), **options)
    return look(request, reader_of(zoo.card("resnet18"), request)[1])


def test_a_fifth_of_each_class_is_held_out(photos):
    rows, findings, left_out = looked(photos)
    assert rows["train"].counts().tolist() == [8, 8]
    assert rows["validation"].counts().tolist() == [2, 2]
    assert rows["train"].classes == ("cat", "dog")
    assert findings == ("20% of each class are held out for validation",)
    assert left_out == {"train": []}


def test_parts_that_are_there_are_used(photos, tmp_path):
    whole = tmp_path / "whole"
    for part in ("train", "val", "test"):
        (whole / part).mkdir(parents=True)
        for name in ("cat", "dog"):
            (whole / part / name).symlink_to(photos / name)
    rows, findings, _ = looked(whole)
    assert {part: len(found) for part, found in rows.items()} == {
        "train": 20,
        "validation": 20,
        "test": 20,
    }
    assert findings == ()
    rows, *_ = looked(photos, validation=str(whole / "test"))
    assert {part: len(found) for part, found in rows.items()} == {"train": 20, "validation": 20}


def test_what_is_wrong_with_a_folder_is_said_and_left_out(photos):
    for number, content in enumerate((b"", b"\x89PNG\r\n\x1a\n broken", b"<html>")):
        (photos / "dog" / f"broken{number}.png").write_bytes(content)
    (photos / "empty").mkdir()
    (photos / "dog" / "notes.txt").write_text("not a picture")
    picture(photos / "newt" / "only.jpg", (40, 200, 40))
    rows, findings, left_out = looked(photos)
    text = "\n".join(findings)
    assert len(left_out["train"]) == 3
    assert text.count("unreadable, left out") == 3
    assert "broken2.png" in text
    assert "'empty' has no readable item" in text
    assert "'newt' has one item" in text
    assert "mixed formats" in text
    assert rows["train"].classes == ("cat", "dog", "newt")
    assert rows["train"].counts().tolist() == [8, 8, 1]
    targets = {"cat": 0, "dog": 1, "newt": 2}
    for index in range(len(rows["train"])):
        path, target = rows["train"][index]
        assert targets[path.split("/")[-2]] == target


def test_known_unreadable_items_are_not_read_again(photos, monkeypatch):
    (photos / "dog" / "broken.png").write_bytes(b"")
    rows, _, left_out = looked(photos)
    request = Request(model="resnet18", data=str(photos))
    task = reader_of(zoo.card("resnet18"), request)[1]
    monkeypatch.setattr(task, "example", None)
    again, _, same = look(request, task, None, left_out)
    assert same == left_out
    for part, found in rows.items():
        assert [found[i] for i in range(len(found))] == [again[part][i] for i in range(len(found))]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: f.rename(f.parent / "gone"), "there is no"),
        (lambda f: (f / "cat").rename(f / "c\na\nt"), "is empty or unprintable; give it a name"),
        (lambda f: [p.unlink() for p in (f / "dog").iterdir()], "one class with items, 'cat'"),
        (lambda f: [p.write_bytes(b"x") for p in f.glob("*/*")], "none of the 20 items"),
        (
            lambda f: [p.rename(p.with_suffix(".txt")) for p in f.glob("*/*")],
            "no file in the folders",
        ),
    ],
)
def test_data_that_cannot_be_used_are_one_clear_line(photos, make, words):
    make(photos)
    with pytest.raises(DataError, match=words) as caught:
        looked(photos)
    assert len(caught.value.line) <= 200


def test_labels_of_the_validation_part_must_exist(photos, tmp_path):
    picture(tmp_path / "other" / "dogg" / "a.png", (0, 0, 0))
    with pytest.raises(
        DataError, match="'dogg' in 'other' is no class of the model; did you mean 'dog'"
    ):
        looked(photos, validation=str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("model", "task", "found"),
    [
        ("resnet18", "", ("", "image-classification")),
        ("all-minilm-l6-v2", "", ("text-classification", "text-classification")),
        ("bert-base-uncased", "", ("text-classification", "text-classification")),
        ("all-minilm-l6-v2", "sentence-embedding", ("", "sentence-embedding")),
    ],
)
def test_a_model_learns_to_classify_unless_it_is_told_otherwise(model, task, found):
    card = zoo.card(model)
    card = card.with_tag(next(iter(card.weights)))
    name, reader = reader_of(card, Request(model=model, data="x", task=task))
    assert (name, reader.name) == found


def test_a_task_that_is_not_there_is_named():
    with pytest.raises(
        ConfigError, match="'text-clasification'; did you mean 'text-classification'"
    ):
        reader_of(
            zoo.card("bert-base-uncased"), Request(model="b", data="x", task="text-clasification")
        )


def test_other_files_are_another_run(photos):
    before = fingerprint(str(photos))
    assert fingerprint(str(photos)) == before
    (photos / "cat" / "11.png").write_bytes(b"x")
    changed = fingerprint(str(photos))
    assert changed != before
    (photos / "cat" / "11.png").write_bytes(b"xy")
    assert fingerprint(str(photos)) != changed
    table = photos.parent / "a.csv"
    table.write_text("text,label\n")
    first = fingerprint(str(table))
    table.write_text("text,lable\n")
    assert fingerprint(str(table)) != first


def test_a_request_is_plain_json(photos):
    request = Request(
        model="m", data=str(photos), fields={"optimizer": AdamW(lr=0.1), "sizes": (1,)}
    )
    plain = request.plain()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["fields"]["sizes"] == [1]
    assert registry.located("m") == "m"


def test_a_share_may_be_held_out_in_place_of_a_part(photos):
    rows, findings, _ = looked(photos, validation="50%")
    assert [len(rows[part]) for part in ("train", "validation")] == [10, 10]
    assert findings == ("50% of each class are held out for validation",)
    for wrong in ("0%", "100%", "x%"):
        with pytest.raises(
            ConfigError, match=f"validation is '{wrong}'; it takes a place, or a share"
        ):
            looked(photos, validation=wrong)


def test_pairs_with_scores_have_no_classes(tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text(
        "a,b,score\n" + "\n".join(f"a film {i},a movie {i},{i % 6}" for i in range(10))
    )
    request = Request(model="m", data=str(table), task="sentence-embedding")
    _, reader = reader_of(zoo.card("all-minilm-l6-v2.sbert"), request)
    rows, findings, _ = look(request, reader)
    assert findings == ("20% are held out for validation",)
    assert [len(rows[part]) for part in ("train", "validation")] == [8, 2]
    assert rows["train"].classes is None
    assert rows["train"].name == "pairs.csv"


def test_the_classes_of_the_model_keep_their_order(photos):
    request = Request(model="resnet18", data=str(photos))
    task = reader_of(zoo.card("resnet18"), request)[1]
    rows, *_ = look(request, task, ("dog", "cat"))
    assert rows["train"].classes == ("dog", "cat")
    for index in range(len(rows["train"])):
        path, target = rows["train"][index]
        assert path.split("/")[-2] == ("dog", "cat")[target]
    rows, *_ = look(request, task, ("dog", "newt"))
    assert rows["train"].classes == ("cat", "dog")
