"""Answers for volumes of any size, from a network that sees a window at a time.

Every window's answer is weighed by a Gaussian, and the weights of all windows at a voxel are made
to add up to 1. The weight of a window is a product of one factor an axis, and windows lie on a
grid, so this holds along each axis by itself: weights are known before any window is computed, no
map of counts is kept, and an axis is finished before the next window begins.

Sums run in float32 whatever the dtype of the volume and of the answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Float32, Integer, Shaped, UInt8
from torch import Tensor

from vision.volumenet import Axes
from zoo.errors import ConfigError, DataError, shown

SIGMA = 1 / 8  # of the Gaussian over the window's size, as in nnU-Net
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AxisWindows:
    """The windows along one axis.

    Attributes:
        size: Voxels of the axis.
        window: Voxels of a window, at most `size`.
        starts: First voxel of every window, rising.
        weights: Float32 (windows, window); at every voxel those of all windows add up to 1.
    """

    size: int
    window: int
    starts: tuple[int, ...]
    weights: Tensor


def starts(size: int, window: int, overlap: float) -> tuple[int, ...]:
    """First voxels of the fewest windows, evenly spread, whose overlap is at least as asked.

    Args:
        size: Voxels of the axis.
        window: Voxels of a window.
        overlap: Share of a window that the next one covers again, in [0, 1).

    Source: nnU-Net v2, ``compute_steps_for_sliding_window``, in whole numbers: an overlap of 0.9
        leaves a tenth of 100 voxels, which is 10 and not the 9.99… of floats.
    """
    if window >= size:
        return (0,)
    step = max(1, math.floor(window * (1 - Fraction(str(overlap)))))
    count = -(-(size - window) // step) + 1
    # Rounded half up, in whole numbers.
    return tuple((2 * i * (size - window) + count - 1) // (2 * (count - 1)) for i in range(count))


def gaussian(window: int) -> Float32[Tensor, " window"]:
    """Weight of every voxel of a window by its distance from the middle; symmetric.

    The deviation is `SIGMA` of the window, whose ends so weigh e^-8 or more. Where three axes meet
    that is e^-24, far above the smallest float32.
    """
    distance = torch.arange(window, dtype=torch.float64) - (window - 1) / 2
    return torch.exp(-0.5 * (distance / (SIGMA * window)) ** 2).float()


def axis_windows(size: int, window: int, overlap: float) -> AxisWindows:
    """Windows of one axis with weights that add up to 1 at every voxel; see `starts`."""
    window = min(window, size)
    first = starts(size, window, overlap)
    bell = gaussian(window).double()
    total = torch.zeros(size, dtype=torch.float64)
    for start in first:
        total[start : start + window] += bell
    weights = torch.stack([bell / total[start : start + window] for start in first])
    return AxisWindows(size, window, first, weights.float())


def sliding_window(
    predict: Predict,
    volume: Shaped[Tensor, "batch channels depth height width"],
    window: Axes,
    *,
    overlap: float = 0.5,
    batch_size: int = 1,
) -> Float32[Tensor, "batch classes depth height width"]:
    """Answers for a whole volume, averaged over windows.

    Args:
        predict: From windows (batch, channels, *window) to answers (batch, classes, *window), of
            any floating dtype. An axis shorter than its window is padded at the end by its last
            voxel, and the answer there is cut off.
        volume: Of any dtype, which the windows have too.
        window: Voxels of depth, height and width that `predict` sees at once.
        overlap: Share of a window that the next one covers again, in [0, 1).
        batch_size: Windows that are predicted at once.

    Returns:
        On the device of the volume.

    Raises:
        ConfigError: `window`, `overlap` or `batch_size` is out of range.
        DataError: `volume` has other axes, or `predict` gives another size.
    """
    out: Tensor | None = None
    for slab, begin in slabs(predict, volume, window, overlap=overlap, batch_size=batch_size):
        if out is None:
            out = slab.new_zeros((*slab.shape[:2], *volume.shape[2:]))
        out[:, :, begin : begin + slab.shape[2]] = slab
    assert out is not None  # an axis has at least one window
    return out


def sliding_window_mask(
    predict: Predict,
    volume: Shaped[Tensor, "batch channels depth height width"],
    window: Axes,
    *,
    overlap: float = 0.5,
    batch_size: int = 1,
) -> UInt8[Tensor, "batch depth height width"]:
    """The most probable class of every voxel: ``sliding_window(...).argmax(1)``, bit for bit.

    Answers are kept for one slab of windows along depth, and are decided as soon as no later
    window reaches them, so memory does not grow with classes times volume but with classes times
    the window's depth: `peak_bytes` says with how much.

    Args:
        predict: As `sliding_window` takes it, and so are the other arguments.
        volume: Of any dtype.
        window: Voxels of depth, height and width that `predict` sees at once.
        overlap: Share of a window that the next one covers again, in [0, 1).
        batch_size: Windows that are predicted at once.

    Raises:
        ConfigError: As `sliding_window`.
        DataError: As `sliding_window`, or there are more than 256 classes.
    """
    mask = torch.empty(
        (volume.shape[0], *volume.shape[2:]), dtype=torch.uint8, device=volume.device
    )
    for slab, begin in slabs(predict, volume, window, overlap=overlap, batch_size=batch_size):
        if slab.shape[1] > 256:
            raise DataError(
                f"there are {slab.shape[1]} classes and a mask of bytes holds 256; take "
                "sliding_window(...).argmax(1)"
            )
        mask[:, begin : begin + slab.shape[2]] = most_probable(slab)
    return mask


def most_probable(
    answers: Float32[Tensor, "batch classes depth height width"],
) -> Integer[Tensor, "batch depth height width"]:
    """``answers.argmax(1)`` of finite answers, class by class.

    Which takes a third of the time, as each class lies in one piece of memory.
    """
    best = answers[:, 0].clone()
    kind = torch.uint8 if answers.shape[1] <= 256 else torch.int32
    mask = torch.zeros_like(best, dtype=kind)
    for label in range(1, answers.shape[1]):
        mask.masked_fill_(answers[:, label] > best, label)
        torch.maximum(best, answers[:, label], out=best)
    return mask


def peak_bytes(
    shape: tuple[int, int, int, int, int], classes: int, window: Axes, *, batch_size: int = 1
) -> int:
    """Bytes that `sliding_window_mask` holds at most beside the volume and inside `predict`.

    These are the sums of one slab, the answers of one call, in float32, and the mask; or, if it is
    more, what deciding a slab takes in place of a call.

    Args:
        shape: Of the volume: batch, channels, depth, height, width.
        classes: Classes of the answers.
        window: Voxels of depth, height and width that `predict` sees at once.
        batch_size: Windows that are predicted at once.
    """
    batch, channels, depth, height, width = shape
    layers = min(window[0], depth) * height * width
    call = 4 * batch_size * (classes + channels) * math.prod(window)
    decision = (4 + 1 + 1) * layers  # highest answer, class, and where another is higher
    return batch * (4 * classes * layers + max(call, decision) + depth * height * width)


def slabs(
    predict: Predict,
    volume: Shaped[Tensor, "batch channels depth height width"],
    window: Axes,
    *,
    overlap: float = 0.5,
    batch_size: int = 1,
) -> Iterator[tuple[Tensor, int]]:
    """Finished answers with their first voxel along depth, in order, without gap or overlap.

    A slab is to be used before the next one is asked for. Arguments and errors are those of
    `sliding_window`.
    """
    _check(volume, window, overlap, batch_size)
    sizes = volume.shape[2:]
    depth, height, width = (
        axis_windows(size, length, overlap) for size, length in zip(sizes, window, strict=True)
    )
    places = [*itertools.product(range(len(height.starts)), range(len(width.starts)))]
    rows = torch.stack([height.weights[i][:, None] * width.weights[j] for i, j in places])
    rows = rows.to(volume.device)
    layers = depth.weights.to(volume.device)
    sums: Tensor | None = None  # of the voxels from `begin` on, as deep as a window
    begin = 0
    for index, start in enumerate(depth.starts):
        if sums is not None and start > begin:
            yield sums[:, :, : start - begin], begin
            _shift(sums, start - begin)
        begin = start
        for first in range(0, len(places), batch_size):
            part = range(first, min(first + batch_size, len(places)))
            corners = [
                (start, height.starts[places[k][0]], width.starts[places[k][1]]) for k in part
            ]
            answers = _answers(predict, volume, window, corners)
            if sums is None:
                shape = (volume.shape[0], answers.shape[2], depth.window, *sizes[1:])
                sums = torch.zeros(shape, dtype=torch.float32, device=volume.device)
            for k, (_, top, left), answer in zip(part, corners, answers, strict=True):
                weight = layers[index][:, None, None] * rows[k]
                seen = sums[:, :, :, top : top + height.window, left : left + width.window]
                seen.addcmul_(answer.float(), weight)
    assert sums is not None
    yield sums, begin


def _shift(sums: Tensor, by: int) -> None:
    """Forget the first layers and begin as many new ones; slice by slice, to copy in place."""
    kept = sums.shape[2] - by
    for layer in range(kept):
        sums[:, :, layer] = sums[:, :, layer + by]
    sums[:, :, max(kept, 0) :] = 0


def _answers(
    predict: Predict, volume: Tensor, window: Axes, corners: list[tuple[int, int, int]]
) -> Tensor:
    """Answers of some windows, (windows, batch, classes, *window), cut to the volume."""
    parts = [
        volume[:, :, d : d + window[0], h : h + window[1], w : w + window[2]] for d, h, w in corners
    ]
    seen = parts[0].shape[2:]
    given = torch.cat(parts)
    for axis, (length, size) in enumerate(zip(window, seen, strict=True), 2):
        if size < length:  # by index, since padding by edges is not made for every dtype
            index = torch.arange(length, device=given.device).clamp_(max=size - 1)
            given = given.index_select(axis, index)
    answers = predict(given)
    if answers.shape[:1] + answers.shape[2:] != given.shape[:1] + given.shape[2:]:
        raise DataError(
            f"windows of {tuple(given.shape)} got answers of {tuple(answers.shape)}; all axes but "
            "the classes have to be the same"
        )
    answers = answers[:, :, : seen[0], : seen[1], : seen[2]]
    return answers.unflatten(0, (len(corners), volume.shape[0]))


def _check(volume: Tensor, window: Axes, overlap: float, batch_size: int) -> None:
    if volume.ndim != 5 or not volume.numel():
        raise DataError(
            f"the volume has shape {tuple(volume.shape)}; it takes (batch, channels, depth, "
            "height, width) with at least one voxel"
        )
    if len(window) != 3 or min(window) < 1:
        raise ConfigError(f"window is {shown(window)}; it takes three sizes in voxels, at least 1")
    if not 0 <= overlap < 1:
        raise ConfigError(f"overlap is {shown(overlap)}; it takes a share in [0, 1)")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {shown(batch_size)}; it takes at least 1")
