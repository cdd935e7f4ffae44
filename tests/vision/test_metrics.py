from __future__ import annotations

import math
import random
from functools import partial

import numpy as np
import pytest
import torch

from vision.metrics import (
    Summary,
    average_surface_distance,
    dice,
    distance_percentile,
    hausdorff,
    iou,
    summarise,
    surface,
    surface_dice,
    surface_distances,
    volume_error_ml,
    volume_ml,
)
from zoo.errors import ConfigError, DataError


def box(shape: tuple[int, ...], *spans: tuple[int, int]) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[tuple(slice(first, last + 1) for first, last in spans)] = True
    return mask


def plus(mask: np.ndarray, *places: tuple[int, ...]) -> np.ndarray:
    mask = mask.copy()
    for place in places:
        mask[place] = True
    return mask


SQUARES = box((8, 8), (2, 4), (2, 4)), box((8, 8), (2, 4), (3, 6))
VOXELS = plus(np.zeros((9,) * 3, bool), (3, 3, 3)), plus(np.zeros((9,) * 3, bool), (6, 7, 3))
CUBES = box((12,) * 3, (2, 6), (2, 6), (2, 6)), box((12,) * 3, (3, 7), (2, 6), (2, 6))
CUBE = box((12,) * 3, (3, 7), (3, 7), (3, 7))
FAR = CUBE, plus(CUBE, (11, 11, 11))
BORDER = np.ones((5, 5), bool), box((5, 5), (1, 4), (0, 4))
WHISKER = (
    box((20, 20), (5, 14), (5, 14)),
    plus(box((20, 20), (5, 14), (5, 14)), *[(0, i) for i in range(3)]),
)
SPIKE = (
    box((24, 24), (2, 13), (2, 13)),
    plus(box((24, 24), (2, 13), (2, 13)), *[(8, i) for i in range(14, 18)]),
)

GOLDEN = [  # masks, spacing, Dice, IoU, HD, HD95 directed, HD95 pooled, ASSD, surface Dice at 1 mm
    (SQUARES, (1, 1), 0.571429, 0.4, 2, 2, 2, 0.722222, 0.833333),
    (SQUARES, (1, 2), 0.571429, 0.4, 4, 4, 4, 1.333333, 0.555556),
    (VOXELS, (1, 1, 1), 0, 0, 5, 5, 5, 5, 0),
    (VOXELS, (3, 1, 1), 0, 0, *[9.848858] * 4, 0),
    (CUBES, (1, 1, 1), 0.8, 0.666667, 1, 1, 1, 0.346939, 1),
    (CUBES, (5, 1, 1), 0.8, 0.666667, 5, 5, 5, 1.377551, 0.734694),
    (FAR, (1, 1, 1), 0.996016, 0.992063, 6.928203, 0, 0, 0.035169, 0.994924),
    (BORDER, (1, 1), 0.888889, 0.8, 1, 1, 1, 0.266667, 1),
    (WHISKER, (1, 1), 0.985222, 0.970874, 7.071068, 5.888169, 0.0, 0.257402, 0.96),
]


@pytest.mark.parametrize(
    ("masks", "spacing", "dsc", "jaccard", "hd", "directed", "pooled", "assd", "nsd"), GOLDEN
)
def test_golden_values(masks, spacing, dsc, jaccard, hd, directed, pooled, assd, nsd) -> None:
    for one, other in (masks, masks[::-1]):
        far = partial(hausdorff, one, other, spacing, empty="nan")
        assert dice(one, other, empty="nan") == pytest.approx(dsc, abs=1e-6)
        assert iou(one, other, empty="nan") == pytest.approx(jaccard, abs=1e-6)
        assert far() == pytest.approx(hd, abs=1e-6)
        assert far(percentile=95) == pytest.approx(directed, abs=1e-6)
        assert far(percentile=95, convention="pooled") == pytest.approx(pooled, abs=1e-6)
        found = average_surface_distance(one, other, spacing, empty="nan")
        assert found == pytest.approx(assd, abs=1e-6)
        found = surface_dice(one, other, spacing, tolerance=1, empty="nan")
        assert found == pytest.approx(nsd, abs=1e-6)


def test_surface_voxels_of_a_square_with_a_spike() -> None:
    reference, prediction = SPIKE
    assert (surface(reference).sum(), surface(prediction).sum()) == (44, 47)
    far = partial(hausdorff, prediction, reference, (1, 1), empty="nan")
    assert far() == 4
    assert far(percentile=95) == pytest.approx(1.7)
    assert dice(prediction, reference, empty="nan") == pytest.approx(0.9863013698630136)
    to_reference, to_prediction = surface_distances(prediction, reference, (1, 1))
    assert distance_percentile(to_reference, 95) == pytest.approx(1.7)
    assert distance_percentile(to_prediction, 95) == 0


@pytest.mark.parametrize(("percentile", "expected"), [(0, 1.0), (95, 3.85), (None, 4.0)])
def test_percentile_0_is_the_least(percentile: float | None, expected: float) -> None:
    assert distance_percentile([1, 2, 3, 4], percentile) == pytest.approx(expected)


EMPTY = np.zeros((4, 4, 4), bool)
FIVE = plus(EMPTY, *[(1, 1, i) for i in range(4)], (2, 2, 2))
DIAGONAL = math.sqrt(8**2 + 4**2 + 4**2)


@pytest.mark.parametrize(
    ("prediction", "reference", "overlap", "nan", "penalty"),
    [
        (FIVE, EMPTY, (0.0, 0.0), math.inf, DIAGONAL),
        (EMPTY, FIVE, (0.0, 0.0), math.inf, DIAGONAL),
        (EMPTY, EMPTY, (1.0, math.nan), math.nan, 0.0),
        (FIVE, FIVE, (1.0, 1.0), 0.0, 0.0),
    ],
)
def test_empty_masks(prediction, reference, overlap, nan: float, penalty: float) -> None:
    spacing = (2.0, 1.0, 1.0)
    for metric in (dice, iou, partial(surface_dice, spacing=spacing, tolerance=1.0)):
        for empty, expected in zip(("one", "nan"), overlap, strict=True):
            found = metric(prediction, reference, empty=empty)
            assert found == pytest.approx(expected, nan_ok=True)
    hd95 = partial(hausdorff, percentile=95)
    for metric in (hausdorff, hd95, average_surface_distance):
        found = metric(prediction, reference, spacing, empty="nan")
        assert found == pytest.approx(nan, nan_ok=True)
        found = metric(prediction, reference, spacing, empty="penalty")
        assert found == pytest.approx(penalty)


def test_misses_and_false_alarms_are_counted() -> None:
    cases = [(FIVE, FIVE), (EMPTY, FIVE), (EMPTY, FIVE), (FIVE, EMPTY), (EMPTY, EMPTY)]
    found = summarise(partial(dice, empty="nan"), cases)
    assert found == Summary(mean=0.25, defined=4, missed=2, false_alarms=1, both_empty=1)
    assert summarise(partial(dice, empty="one"), cases).mean == pytest.approx(0.4)
    far = partial(hausdorff, spacing=(1, 1, 1), percentile=95, empty="nan")
    assert summarise(far, cases).mean == math.inf
    far = partial(far, empty="penalty")
    assert summarise(far, cases).mean == pytest.approx(3 * math.sqrt(48) / 5)
    assert math.isnan(summarise(partial(dice, empty="nan"), [(EMPTY, EMPTY)]).mean)


def test_volumes_are_in_ml() -> None:
    assert volume_ml(FIVE, (2, 3, 4)) == pytest.approx(5 * 24 / 1000)
    assert volume_error_ml(EMPTY, FIVE, (2, 3, 4)) == pytest.approx(-0.12)


def test_a_label_of_a_map_and_tensors() -> None:
    prediction = torch.tensor([[0, 1, 2, 2], [3, 3, 2, 0]])
    reference = torch.tensor([[0, 2, 2, 0], [3, 3, 2, 0]], dtype=torch.uint8)
    assert dice(prediction, reference, empty="one", label=2) == pytest.approx(2 / 3)
    assert dice(prediction, reference, empty="one", label=3) == 1
    assert dice(prediction, reference, empty="one", label=1) == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: dice(FIVE * 0.4, FIVE, empty="one"), DataError, "a mask is float64"),
        (lambda: dice(torch.zeros(4, 4, 4), FIVE, empty="one"), DataError, "a mask is float32"),
        (lambda: dice(FIVE[0], FIVE, empty="one"), DataError, "masks are (4, 4) and (4, 4, 4)"),
        (lambda: dice(np.array(1), np.array(1), empty="one"), DataError, "the number 1"),
        (lambda: dice(FIVE, FIVE, empty="zero"), ConfigError, "empty is 'zero'"),
        (lambda: hausdorff(FIVE, FIVE, (1, 1, 1), empty="one"), ConfigError, "empty is 'one'"),
        (lambda: hausdorff(FIVE, FIVE, (1, 1), empty="nan"), ConfigError, "spacing is (1.0, 1.0)"),
        (lambda: volume_ml(FIVE, (1, 1, 0)), ConfigError, "spacing is (1.0, 1.0, 0.0)"),
        (
            lambda: hausdorff(FIVE, FIVE, (1, 1, 1), empty="nan", percentile=101),
            ConfigError,
            "percentile is 101",
        ),
        (
            lambda: hausdorff(FIVE, FIVE, (1, 1, 1), empty="nan", convention="monai"),
            ConfigError,
            "convention is 'monai'",
        ),
        (
            lambda: surface_dice(FIVE, FIVE, (1, 1, 1), empty="nan", tolerance=-1.0),
            ConfigError,
            "tolerance is -1.0",
        ),
        (
            lambda: surface_distances(EMPTY, FIVE, (1, 1, 1)),
            DataError,
            "label 1 is empty in prediction; it has no surface",
        ),
    ],
)
@pytest.mark.untyped
def test_what_cannot_be_measured_is_refused(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in caught.value.line


def surface_points(mask: np.ndarray) -> np.ndarray:
    """By definition, neighbour by neighbour."""
    points = []
    for place in np.argwhere(mask):
        for axis in range(mask.ndim):
            for step in (-1, 1):
                other = place.copy()
                other[axis] += step
                outside = not 0 <= other[axis] < mask.shape[axis]
                if outside or not mask[tuple(other)]:
                    points.append(tuple(place))
    return np.array(sorted(set(points)))


def agree_with_all_pairs(count: int) -> None:
    draw = random.Random(0)
    for number in range(count):
        rng = np.random.default_rng(number)
        shape = [draw.randint(1, 8) for _ in range(draw.choice([2, 3]))]
        share, spacing = draw.uniform(0.05, 0.9), [draw.uniform(0.3, 5) for _ in shape]
        a, b = (rng.random(shape) < share for _ in range(2))
        a.flat[0] = b.flat[-1] = True
        one, other = surface_points(a) * spacing, surface_points(b) * spacing
        pairs = np.linalg.norm(one[:, None] - other[None], axis=-1)
        both = pairs.min(1), pairs.min(0)
        far = partial(hausdorff, a, b, spacing, empty="nan")
        assert far() == pytest.approx(max(d.max() for d in both), abs=1e-5)
        expected = max(np.percentile(d, 95) for d in both)
        assert far(percentile=95) == pytest.approx(expected, abs=1e-5)
        together = np.concatenate(both)
        expected = np.percentile(together, 95)
        assert far(percentile=95, convention="pooled") == pytest.approx(expected, abs=1e-5)
        found = average_surface_distance(a, b, spacing, empty="nan")
        assert found == pytest.approx(together.mean(), abs=1e-5)
        found = surface_dice(a, b, spacing, tolerance=1.7, empty="nan")
        assert found == pytest.approx((together <= 1.7).mean(), abs=1e-5)


def test_random_masks_agree_with_all_pairs() -> None:
    agree_with_all_pairs(40)


@pytest.mark.prove
def test_five_thousand_random_masks_agree_with_all_pairs() -> None:
    agree_with_all_pairs(5000)
