from __future__ import annotations

import math

import pytest
import torch

from zoo.errors import CardError, ConfigError, DataError
from zoo.ranking import ranked


def test_the_best_class_comes_first_with_its_probability():
    (row,) = ranked(torch.tensor([[0.0, math.log(3.0)]]), ["no", "yes"], 5)
    assert [(r["label"], r["index"]) for r in row] == [("yes", 1), ("no", 0)]
    assert [r["score"] for r in row] == pytest.approx([0.75, 0.25], abs=1e-7)


def test_equal_classes_are_ordered_by_index_and_named_by_it_without_labels():
    (row,) = ranked(torch.zeros(1, 30), None, 30)
    assert [r["index"] for r in row] == list(range(30))
    assert row[7]["label"] == "7"


def test_classes_without_any_probability_left_keep_the_order_of_their_logits():
    (row,) = ranked(torch.tensor([[-3000.0, 0.0, -2000.0]]), None, 3)
    assert [r["index"] for r in row] == [1, 2, 0]
    assert [r["score"] for r in row] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_sum_to_one_in_every_precision(dtype):
    rows = ranked(torch.randn(4, 1000, generator=torch.manual_seed(0)).to(dtype), None, 1000)
    assert [sum(r["score"] for r in row) for row in rows] == pytest.approx([1.0] * 4, abs=1e-12)


def test_top_k_is_clipped_to_the_number_of_classes_and_no_rows_give_no_answers():
    assert [len(row) for row in ranked(torch.zeros(3, 2), None, 99)] == [2, 2, 2]
    assert ranked(torch.zeros(0, 2), None, 1) == []


@pytest.mark.parametrize("top_k", [0, -1, True, 1.0, "5", None])
def test_a_top_k_that_is_no_count_is_refused(top_k):
    with pytest.raises(ConfigError, match="at least 1"):
        ranked(torch.zeros(1, 2), None, top_k)


@pytest.mark.parametrize("labels", [[], ["a"], ["a", "b", "c"]])
def test_labels_that_do_not_match_the_classes_are_refused(labels):
    with pytest.raises(CardError, match=f"{len(labels)} labels for 2 classes"):
        ranked(torch.zeros(1, 2), labels, 1)


def test_nan_is_never_ranked():
    with pytest.raises(DataError, match="NaN"):
        ranked(torch.tensor([[0.0, float("nan")]]), None, 1)
