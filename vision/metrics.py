"""How near a mask is to another: overlap, distances of surfaces in mm, volumes in ml.

Masks are label maps: bool, or whole numbers of which one is meant. Logits and probabilities are
refused; which threshold they want is nobody's guess.

Where a mask is empty no metric is defined by its formula, and leaving such cases out rewards a
network that finds nothing. So each function has to be told by ``empty`` what two empty masks are,
one empty mask is the worst value (0 of an overlap; infinity, or the diagonal, of a distance), and
`summarise` counts all of them.

A surface is the voxels of a mask with a face neighbour outside; beyond the volume is outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zoo.errors import ConfigError, DataError, shown

LabelMap = np.ndarray | Tensor  # bool or whole numbers, with any number of axes
Mask = NDArray[np.bool_]
Distances = NDArray[np.float64]


def dice(
    prediction: LabelMap, reference: LabelMap, *, empty: Literal["one", "nan"], label: int = 1
) -> float:
    """Dice coefficient 2|A ∩ B| / (|A| + |B|), in [0, 1].

    Args:
        prediction: Label map.
        reference: Label map of the same shape.
        empty: What two empty masks give: 1 or NaN. If one alone is empty, that is 0.
        label: The value that is meant; True is 1.

    Raises:
        DataError: Floats, or other shapes.
        ConfigError: `empty` is something else.
    """
    a, b = _masks(label, prediction, reference)
    return _share(2 * int((a & b).sum()), int(a.sum()) + int(b.sum()), empty)


def iou(
    prediction: LabelMap, reference: LabelMap, *, empty: Literal["one", "nan"], label: int = 1
) -> float:
    """Intersection over union (Jaccard index), in [0, 1]; arguments are those of `dice`."""
    a, b = _masks(label, prediction, reference)
    return _share(int((a & b).sum()), int((a | b).sum()), empty)


def surface_dice(
    prediction: LabelMap,
    reference: LabelMap,
    spacing: Sequence[float],
    *,
    tolerance: float,
    empty: Literal["one", "nan"],
    label: int = 1,
) -> float:
    """Share of both surfaces that lies within `tolerance` mm of the other, in [0, 1] (NSD).

    Args:
        prediction: Label map.
        reference: Label map of the same shape.
        spacing: Size of a voxel along every axis in mm.
        tolerance: In mm, 0 or more.
        empty: As in `dice`.
        label: The value that is meant.

    Raises:
        DataError: As `dice`.
        ConfigError: As `dice`, or `spacing` or `tolerance` is out of range.

    Source: Nikolov et al. 2018, https://arxiv.org/abs/1809.04430, with voxels for surface elements.
    """
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance is {shown(tolerance)}; it takes mm, 0 or more")
    a, b = _masks(label, prediction, reference)
    lengths = _spacing(spacing, a)
    if not a.any() or not b.any():
        return _share(0, int(a.any()) + int(b.any()), empty)
    distances = np.concatenate(_surface_distances(a, b, lengths))
    return _share(int((distances <= tolerance).sum()), len(distances), empty)


def hausdorff(
    prediction: LabelMap,
    reference: LabelMap,
    spacing: Sequence[float],
    *,
    empty: Literal["nan", "penalty"],
    percentile: float | None = None,
    convention: Literal["directed", "pooled"] = "directed",
    label: int = 1,
) -> float:
    """Hausdorff distance of two surfaces in mm, or a percentile of it; HD95 has 95.

    Args:
        prediction: Label map.
        reference: Label map of the same shape.
        spacing: Size of a voxel along every axis in mm.
        empty: What empty masks give. "nan": NaN for two, infinity for one, which is never near.
            "penalty": 0 for two, for one the diagonal of the volume.
        percentile: In [0, 100], interpolated linearly; none is the maximum.
        convention: Two are in use. "directed" is the larger of the percentiles of both directions
            (MONAI, DeepMind), "pooled" the percentile of all distances together (medpy).
        label: The value that is meant.

    Raises:
        DataError: As `dice`.
        ConfigError: `spacing`, `percentile` or a choice is out of range.
    """
    if convention not in ("directed", "pooled"):
        raise ConfigError(f"convention is {shown(convention)}; it is 'directed' or 'pooled'")
    a, b = _masks(label, prediction, reference)
    lengths = _spacing(spacing, a)
    far = _far(a, b, lengths, empty)
    if not a.any() or not b.any():
        return far
    both = _surface_distances(a, b, lengths)
    if convention == "pooled":
        return distance_percentile(np.concatenate(both), percentile)
    return max(distance_percentile(distances, percentile) for distances in both)


def average_surface_distance(
    prediction: LabelMap,
    reference: LabelMap,
    spacing: Sequence[float],
    *,
    empty: Literal["nan", "penalty"],
    label: int = 1,
) -> float:
    """Mean over both surfaces of the distance to the other in mm (ASSD).

    Arguments and errors are those of `hausdorff`.
    """
    a, b = _masks(label, prediction, reference)
    lengths = _spacing(spacing, a)
    far = _far(a, b, lengths, empty)
    if not a.any() or not b.any():
        return far
    return float(np.concatenate(_surface_distances(a, b, lengths)).mean())


def volume_ml(mask: LabelMap, spacing: Sequence[float], *, label: int = 1) -> float:
    """Volume of a label in ml.

    Args:
        mask: Label map.
        spacing: Size of a voxel along every axis in mm.
        label: The value that is meant.

    Raises:
        DataError: As `dice`.
        ConfigError: `spacing` is out of range.
    """
    (voxels,) = _masks(label, mask)
    return int(voxels.sum()) * math.prod(_spacing(spacing, voxels)) / 1000


def volume_error_ml(
    prediction: LabelMap, reference: LabelMap, spacing: Sequence[float], *, label: int = 1
) -> float:
    """Volume of the prediction less that of the reference in ml; errors are those of `dice`."""
    a, b = _masks(label, prediction, reference)
    return volume_ml(a, spacing) - volume_ml(b, spacing)


def surface_distances(
    prediction: LabelMap, reference: LabelMap, spacing: Sequence[float], *, label: int = 1
) -> tuple[Distances, Distances]:
    """Distance in mm of every surface voxel to the other surface.

    Args:
        prediction: Label map that is not empty.
        reference: Label map of the same shape that is not empty.
        spacing: Size of a voxel along every axis in mm.
        label: The value that is meant.

    Returns:
        Those of the prediction's surface and those of the reference's.

    Raises:
        DataError: As `dice`, or a mask is empty.
        ConfigError: `spacing` is out of range.
    """
    a, b = _masks(label, prediction, reference)
    if not a.any() or not b.any():
        empty = "prediction" if b.any() else "reference" if a.any() else "prediction and reference"
        raise DataError(f"label {label} is empty in {empty}; it has no surface to measure from")
    return _surface_distances(a, b, _spacing(spacing, a))


def distance_percentile(distances: Distances | Sequence[float], percentile: float | None) -> float:
    """A percentile of distances, interpolated linearly; without one their maximum.

    Raises:
        ConfigError: `percentile` is not in [0, 100].
    """
    if percentile is not None and not 0 <= percentile <= 100:
        raise ConfigError(f"percentile is {shown(percentile)}; it takes a number in [0, 100]")
    return float(np.percentile(distances, 100 if percentile is None else percentile))


@dataclass(frozen=True)
class Summary:
    """A metric over many cases; no case is left out of the counts.

    Attributes:
        mean: Over the cases whose value is a number, infinity included; NaN without any.
        defined: Those cases.
        missed: Cases where the reference has the label and the prediction does not.
        false_alarms: Cases where the prediction alone has it.
        both_empty: Cases where neither has it.
    """

    mean: float
    defined: int
    missed: int
    false_alarms: int
    both_empty: int


def summarise(
    metric: Callable[[Mask, Mask], float],
    cases: Iterable[tuple[LabelMap, LabelMap]],
    *,
    label: int = 1,
) -> Summary:
    """A metric over cases with what there was of empty masks.

    Args:
        metric: Of two masks, as ``partial(dice, empty="one")``.
        cases: Predictions with their references; they are streamed.
        label: The value that is meant.

    Raises:
        DataError: As `dice`.
    """
    values: list[float] = []
    missed = false_alarms = both_empty = 0
    for prediction, reference in cases:
        a, b = _masks(label, prediction, reference)
        found, there = bool(a.any()), bool(b.any())
        missed += there and not found
        false_alarms += found and not there
        both_empty += not found and not there
        values.append(metric(a, b))
    defined = [value for value in values if not math.isnan(value)]
    mean = sum(defined) / len(defined) if defined else math.nan
    return Summary(mean, len(defined), missed, false_alarms, both_empty)


def surface(mask: Mask) -> Mask:
    """Voxels of a mask with a face neighbour outside of it."""
    inside = mask.copy()
    for axis in range(mask.ndim):
        line = np.moveaxis(mask, axis, 0)
        kept = np.moveaxis(inside, axis, 0)
        kept[1:] &= line[:-1]
        kept[:-1] &= line[1:]
        kept[[0, -1]] = False
    return mask & ~inside


def _surface_distances(a: Mask, b: Mask, spacing: tuple[float, ...]) -> tuple[Distances, Distances]:
    from scipy.ndimage import distance_transform_edt

    either = a | b
    box = []  # all surfaces lie in it, so distances are the same and cost less
    for axis in range(either.ndim):
        others = tuple(i for i in range(either.ndim) if i != axis)
        (places,) = np.nonzero(either.any(others))
        box.append(slice(int(places[0]), int(places[-1]) + 1))
    one, other = surface(a[tuple(box)]), surface(b[tuple(box)])
    to_other, to_one = (distance_transform_edt(~s, sampling=spacing) for s in (other, one))
    return to_other[one], to_one[other]


def _masks(label: int, *maps: LabelMap) -> list[Mask]:
    """Where each map has the label."""
    arrays = []
    for given in maps:
        array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
        if array.dtype.kind not in "bui":
            raise DataError(
                f"a mask is {array.dtype}; it takes bool or the whole number of each voxel's "
                "class: logits.argmax(1), or probabilities > 0.5"
            )
        if array.ndim == 0:
            raise DataError(f"a mask is the number {shown(array.item())}; it takes an array")
        arrays.append(array == label)
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise DataError(
            f"masks are {' and '.join(str(a.shape) for a in arrays)}; both need one shape"
        )
    return arrays


def _share(part: int, whole: int, empty: str) -> float:
    if empty not in ("one", "nan"):
        raise ConfigError(f"empty is {shown(empty)}; it is 'one' or 'nan', for two empty masks")
    if whole:
        return part / whole
    return 1.0 if empty == "one" else math.nan


def _far(a: Mask, b: Mask, spacing: tuple[float, ...], empty: str) -> float:
    """What `empty` makes of the distance of masks of which at least one is empty."""
    if empty not in ("nan", "penalty"):
        raise ConfigError(f"empty is {shown(empty)}; it is 'nan' or 'penalty', for empty masks")
    if not a.any() and not b.any():
        return math.nan if empty == "nan" else 0.0
    diagonal = math.hypot(*(n * s for n, s in zip(a.shape, spacing, strict=True)))
    return math.inf if empty == "nan" else diagonal


def _spacing(spacing: Sequence[float], mask: Mask) -> tuple[float, ...]:
    lengths = tuple(float(length) for length in spacing)
    if len(lengths) != mask.ndim or not all(0 < length < math.inf for length in lengths):
        raise ConfigError(
            f"spacing is {shown(lengths)}; it takes a length in mm above 0 for each of the "
            f"{mask.ndim} axes"
        )
    return lengths
