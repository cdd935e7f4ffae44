"""Confusion, curves and worst errors."""

from __future__ import annotations

import csv
import json
import math
import warnings

import numpy as np
import pytest
from PIL import Image

from zoo.errors import ConfigError, DataError
from zoo.reporting import (
    Confusion,
    Mistake,
    draw_confusion,
    draw_curves,
    read_records,
    write_worst,
)


def answer(*scores: float) -> list[dict]:
    """All classes, best first, as a pipeline gives them."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [{"index": i, "label": str(i), "score": scores[i]} for i in order]


@pytest.fixture
def confusion() -> Confusion:
    made = Confusion(["cat", "dog", "newt"])
    made.add("a", 0, answer(0.7, 0.2, 0.1))
    made.add("b", 0, answer(0.3, 0.6, 0.1))
    made.add("c", 1, answer(0.9, 0.04, 0.06))
    made.add("d", 1, answer(0.1, 0.8, 0.1))
    made.add("e", 1, answer(0.5, 0.4, 0.1))
    return made


def test_counts_have_the_true_class_in_rows(confusion):
    assert confusion.counts.tolist() == [[1, 1, 0], [2, 1, 0], [0, 0, 0]]
    assert confusion.total == 5
    assert confusion.accuracy == 0.4
    assert confusion.pairs() == [("dog", "cat", 2), ("cat", "dog", 1)]
    assert confusion.pairs(1) == [("dog", "cat", 2)]


def test_precision_and_recall_of_each_class(confusion):
    cat, dog, newt = confusion.of_classes()
    assert cat == ("cat", 2, 1 / 3, 1 / 2)
    assert dog == ("dog", 3, 1 / 2, 1 / 3)
    assert newt[:2] == ("newt", 0)
    assert all(map(math.isnan, newt[2:]))


def test_the_worst_error_has_the_least_probable_true_class(confusion):
    assert confusion.mistakes == [
        Mistake("c", "dog", "cat", 0.9, 0.04),
        Mistake("b", "cat", "dog", 0.6, 0.3),
        Mistake("e", "dog", "cat", 0.5, 0.4),
    ]


def test_only_so_many_errors_are_kept_and_ties_keep_their_order():
    made = Confusion(["cat", "dog"], worst=2)
    for name, own in (("a", 0.3), ("b", 0.1), ("c", 0.1), ("d", 0.1), ("e", 0.2)):
        made.add(name, 0, answer(own, 1 - own))
    assert [m.item for m in made.mistakes] == ["b", "c"]
    assert made.total == 5


def test_a_class_that_is_not_there_is_named():
    with pytest.raises(DataError, match=r"'x\.png' has the class 2; the model has 0 to 1"):
        Confusion(["a", "b"]).add("x.png", 2, answer(0.5, 0.5))
    with pytest.raises(ConfigError, match="1 classes cannot be confused"):
        Confusion(["a"])


def test_worst_errors_survive_csv(tmp_path):
    items = ['a,"b"\nc', "x\ud800y", "ü"]
    write_worst(tmp_path / "worst.csv", [Mistake(i, "t", "p", 0.75, 0.125) for i in items])
    with open(tmp_path / "worst.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["item"] for row in rows] == ['a,"b"\nc', "x\\ud800y", "ü"]
    assert (rows[0]["true"], rows[0]["predicted"], rows[0]["probability"]) == ("t", "p", "0.7500")
    assert float(rows[0]["true_probability"]) == 0.125


@pytest.mark.parametrize("classes", [2, 20, 41])
def test_the_matrix_is_a_picture(tmp_path, classes):
    made = Confusion([f"$ class_{i} $^" + "w" * 40 for i in range(classes)])
    scores = np.full(classes, 0.1 / classes)
    for target in range(classes):
        scores[:] = 0.1 / classes
        scores[target] = 0.9
        made.add("x", target, answer(*scores))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_confusion(tmp_path / "c.png", made, "$5_ 猫/validation")
    with Image.open(tmp_path / "c.png") as image:
        image.load()
        pixels = np.asarray(image.convert("RGB")).astype(int)
        assert image.format == "PNG"
    blue = (pixels[..., 2] - pixels[..., 0] > 60).sum()
    assert blue > 100  # the diagonal


def test_curves_draw_what_was_logged(tmp_path):
    records = [{"step": s, "loss": 1 / (s + 1), "lr": 0.1} for s in range(100)]
    records += [{"step": s, "validation/top1": s / 100} for s in (50, 99)]
    panels = (["loss", "validation/loss"], ["validation/top1"], ["absent"])
    draw_curves(tmp_path / "two.png", records, panels)
    draw_curves(tmp_path / "one.png", records, panels[:1])
    heights = [Image.open(tmp_path / f"{name}.png").height for name in ("one", "two")]
    assert heights[1] > heights[0] + 200
    with pytest.raises(DataError, match="nothing that could be drawn"):
        draw_curves(tmp_path / "none.png", records, panels[2:])


def test_records_of_a_killed_run_lack_only_their_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + '\n{"st')
    assert read_records(path) == [{"step": 1}]
    path.write_text('{"st\n' + json.dumps({"step": 1}) + "\n")
    with pytest.raises(DataError, match="line 1 of"):
        read_records(path)
    with pytest.raises(DataError, match="cannot read"):
        read_records(tmp_path / "absent")
