from __future__ import annotations

import pytest
import torch

import zoo
from zoo.cards import Card, TensorSpec
from zoo.config import build
from zoo.errors import CardError, ConfigError
from zoo.examples import axes, example_inputs, example_sizes, spelled, unseen_sizes

IMAGE = {
    "image": TensorSpec(
        dtype="float32",
        shape=("batch", 3, "height", "width"),
        example={"batch": 2, "height": 64, "width": 64},
    )
}
TEXT = {
    "input_ids": TensorSpec(
        dtype="int64", shape=("batch", "tokens"), example={"batch": 4, "tokens": 16}, range=(5, 9)
    ),
    "attention_mask": TensorSpec(dtype="int64", shape=("batch", "tokens"), mask=True),
}


def spec(**fields: object) -> dict[str, TensorSpec]:
    return {"x": build(TensorSpec, fields, where="x")}


def test_examples_have_the_sizes_and_dtypes_of_the_card() -> None:
    image = example_inputs(IMAGE)["image"]
    assert (image.shape, image.dtype) == ((2, 3, 64, 64), torch.float32)
    assert abs(image.mean()) < 0.05
    assert abs(image.std() - 1) < 0.05
    text = example_inputs(TEXT)
    assert list(text) == ["input_ids", "attention_mask"]
    assert {t.dtype for t in text.values()} == {torch.int64}


def test_sizes_replace_those_of_the_card_in_every_input() -> None:
    text = example_inputs(TEXT, {"tokens": 3})
    assert {tuple(t.shape) for t in text.values()} == {(4, 3)}


def test_integers_fill_their_range_and_stay_inside() -> None:
    ids = example_inputs(TEXT, {"batch": 50})["input_ids"]
    assert ids.unique().tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
def test_masks_start_with_valid_positions_and_their_first_row_is_full(dtype: str) -> None:
    specs = spec(dtype=dtype, shape=["batch", 2, "tokens"], mask=True)
    mask = example_inputs(specs, {"batch": 20, "tokens": 7})["x"]
    assert mask.dtype == getattr(torch, dtype)
    rows = mask.to(torch.int64).reshape(-1, 7)
    assert rows[0].tolist() == [1] * 7
    assert (rows.diff(dim=1) <= 0).all()
    assert set(rows.sum(dim=1).tolist()) == set(range(1, 8))


def test_booleans_that_are_no_mask_are_of_both_kinds() -> None:
    assert example_inputs(spec(dtype="bool", shape=[100]))["x"].unique().tolist() == [False, True]


def test_a_seed_means_the_same_tensors_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (example_inputs(IMAGE, seed=seed)["image"] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dynamic_axis_needs_an_example_or_a_size() -> None:
    specs = spec(dtype="float32", shape=["batch", "frames"], example={"batch": 2})
    with pytest.raises(CardError, match="dynamic axis 'frames'"):
        example_inputs(specs)
    assert example_inputs(specs, {"frames": 5})["x"].shape == (2, 5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dtype": "int64", "shape": [2]}, "range is None"),
        ({"dtype": "int64", "shape": [2], "range": [4, 4]}, r"range is \(4, 4\)"),
        (
            {"dtype": "bool", "shape": ["batch"], "example": {"bach": 2}},
            "the axis 'bach'; did you mean 'batch'",
        ),
        ({"dtype": "bool", "shape": ["batch"], "example": {"batch": 0}}, "'batch' is 0"),
    ],
)
def test_a_card_that_says_too_little_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(CardError, match=says):
        example_inputs(spec(**fields))


def test_inputs_that_disagree_about_an_axis_are_refused() -> None:
    other = spec(dtype="float32", shape=["batch"], example={"batch": 3})
    with pytest.raises(CardError, match=r"'batch' is 3; .* the same for every input"):
        example_sizes({**IMAGE, **other})


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"hight": 3}, "no input has an axis 'hight'; did you mean 'height'"),
        ({"height": 0}, "'height' is 0"),
        ({"height": 2.0}, r"'height' is 2\.0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        example_inputs(IMAGE, sizes)


def test_axes_are_named_once_in_order() -> None:
    assert axes(IMAGE) == ("batch", "height", "width")
    assert axes(TEXT) == ("batch", "tokens")
    assert axes(spec(dtype="float32", shape=[3, 4])) == ()


@pytest.mark.parametrize("specs", [IMAGE, TEXT], ids=["image", "text"])
def test_unseen_sizes_include_one_item_and_differ_from_the_example_and_each_other(
    specs: dict[str, TensorSpec],
) -> None:
    found = unseen_sizes(specs)
    base = example_sizes(specs)
    assert found == unseen_sizes(specs)
    assert len({tuple(sizes.values()) for sizes in [base, *found]}) == len(found) + 1 >= 6
    assert {sizes["batch"] for sizes in found} >= {1, 3, 7}
    for sizes in found:
        assert list(sizes) == list(base)
        assert all(sizes[axis] <= 1.5 * base[axis] for axis in base if axis != "batch")
        assert all(t.numel() for t in example_inputs(specs, sizes).values())


def test_unseen_images_are_odd_and_not_square_and_unseen_texts_go_down_to_one_token() -> None:
    images = unseen_sizes(IMAGE)
    assert {(s["height"], s["width"]) for s in images} == {(64, 64), (57, 91), (91, 57), (57, 57)}
    assert {s["tokens"] for s in unseen_sizes(TEXT)} == {16, 1, 23, 15}


def test_a_model_of_fixed_sizes_has_no_unseen_ones() -> None:
    assert unseen_sizes(spec(dtype="float32", shape=[3, 4])) == []


@pytest.mark.parametrize("name", zoo.list_models())
def test_every_card_says_enough_to_make_its_inputs(name: str) -> None:
    card: Card = zoo.card(name)
    for sizes in [example_sizes(card.inputs), *unseen_sizes(card.inputs)]:
        assert list(example_inputs(card.inputs, sizes)) == list(card.inputs)


def test_sizes_are_spelled_in_words() -> None:
    assert spelled({"batch": 1, "height": 57}) == "batch 1, height 57"
    assert spelled({}) == "fixed sizes"
