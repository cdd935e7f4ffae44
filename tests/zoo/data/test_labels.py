from __future__ import annotations

import pytest

from zoo.data.labels import class_ids, numbers
from zoo.errors import DataError


@pytest.mark.parametrize(
    ("values", "names", "ids"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        (["10", "9", "-1"], ("-1", "9", "10"), [2, 1, 0]),
        ([1.0, 10, 2], ("1", "2", "10"), [0, 2, 1]),
        ([True, False], ("false", "true"), [1, 0]),
        (["10", "9", "x"], ("10", "9", "x"), [0, 1, 2]),
    ],
)
def test_classes_are_the_sorted_names_that_occur(values, names, ids):
    found, targets = class_ids(values, "x.csv")
    assert (found, targets.tolist()) == (names, ids)


def test_classes_may_be_given_and_labels_be_their_ids():
    wanted = ["neg", "pos"]
    for values in (["pos", "neg", "pos"], [1, 0, 1], ["1", "0", "1"]):
        names, targets = class_ids(values, "x", classes=wanted)
        assert (names, targets.tolist()) == (("neg", "pos"), [1, 0, 1])
    # Names that are numbers are names.
    assert class_ids(["1", "0"], "x", classes=["1", "0"])[1].tolist() == [0, 1]
    for values, stranger in ((["pos", "good"], "good"), (["2", "0"], "0")):
        with pytest.raises(DataError, match=f"'{stranger}' is no class of the model"):
            class_ids(values, "x", classes=wanted)


def test_names_that_a_file_states_are_those_of_its_ids():
    names, targets = class_ids([1, 1], "x", hub=("neg", "pos"))
    assert (names, targets.tolist()) == (("neg", "pos"), [1, 1])
    assert class_ids([1, 0], "x", hub=("neg", "pos"), classes=("pos", "neg"))[1].tolist() == [0, 1]
    assert class_ids([5, 0], "x", hub=("neg", "pos"))[0] == ("0", "5")


@pytest.mark.parametrize("function", [class_ids, numbers])
def test_missing_labels_are_counted(function):
    with pytest.raises(DataError, match="2 rows have no label, the first is row 1"):
        function(["1", None, ""], "x")
    with pytest.raises(DataError, match="no rows"):
        function([], "x")


def test_numbers_are_finite():
    assert numbers(["1", 2, 0.5], "x").tolist() == [1.0, 2.0, 0.5]
    for wrong in ("a", "nan", float("inf"), [1]):
        with pytest.raises(DataError, match="row 1 has"):
            numbers(["1", wrong], "x")
