"""What a network for a set of volumes looks like, planned from sizes and spacings alone.

Pure functions of numbers, so that a plan can be looked through, tested and saved. Axes are
superior, anterior and right.

Source: Isensee et al. 2021, https://doi.org/10.1038/s41592-020-01008-z, methods ("Rule-based
parameters"), with memory counted instead of measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vision.unet3d import kernels_and_strides
from vision.volumenet import Axes, total_stride
from vision.volumes import Spacing, size_at
from zoo.errors import ConfigError, shown

ANISOTROPIC = 3.0  # ratio of spacings from which slices count as thick
WIDTH = 32  # channels of the finest stage; each further stage has twice as many, up to `WIDEST`
WIDEST = 320
BATCH = (2, 8)  # items of a step: least, most
KEPT = 4  # copies of each map that a step keeps: of convolution, norm, rectifier and its gradient


@dataclass(frozen=True, kw_only=True)
class VolumePlan:
    """A network and what it is fed with.

    Attributes:
        spacing: Size of a voxel in mm that all volumes are brought to.
        patch: Voxels that the network sees at once.
        kernels: Of every stage.
        strides: At the entry of every stage.
        channels: Of every stage.
        depths: Residual blocks of every stage.
        batch_size: Patches of a step.
        bytes: Estimate of what a step takes beside the parameters.
    """

    spacing: Spacing
    patch: Axes
    kernels: tuple[Axes, ...]
    strides: tuple[Axes, ...]
    channels: tuple[int, ...]
    depths: tuple[int, ...]
    batch_size: int
    bytes: int

    @property
    def config(self) -> dict[str, Any]:
        """Fields of a `UNet3DConfig`."""
        names = ("kernels", "strides", "channels", "depths")
        return {name: getattr(self, name) for name in names}

    @property
    def line(self) -> str:
        """The plan in one line, for people."""
        patch, mm = ("x".join(f"{n:g}" for n in axes) for axes in (self.patch, self.spacing))
        return f"planned: patches of {patch} voxels of {mm} mm, {len(self.channels)} stages"


def target_spacing(spacings: Sequence[Spacing], shapes: Sequence[Axes]) -> Spacing:
    """The median of all spacings; of thick slices the tenth percentile, to lose less of them.

    Slices are thick where their axis has voxels more than three times as long as the shortest and
    fewer of them than a third of the others.
    """
    if not spacings or len(spacings) != len(shapes):
        raise ConfigError(
            f"there are {len(spacings)} spacings and {len(shapes)} sizes; a plan takes as many of "
            "both, at least 1"
        )
    median, size = np.median(spacings, axis=0), np.median(shapes, axis=0)
    thick = int(np.argmax(median))
    others = np.delete(np.arange(3), thick)
    if (
        median[thick] > ANISOTROPIC * median[others].min()
        and ANISOTROPIC * size[thick] < size[others].min()
    ):
        median[thick] = max(
            float(np.percentile([s[thick] for s in spacings], 10)), median[others].max()
        )
    depth, height, width = (float(length) for length in median)
    return depth, height, width


def stage_channels(stages: int, width: int = WIDTH) -> tuple[int, ...]:
    """Channels of every stage: doubled from stage to stage up to `WIDEST`."""
    return tuple(min(width * 2**stage, WIDEST) for stage in range(stages))


def activation_bytes(patch: Axes, strides: Sequence[Axes], channels: Sequence[int]) -> int:
    """Bytes that a training step of one patch keeps in float32, the parameters not counted.

    Each stage has about six maps, of encoder, decoder and their join, and each map `KEPT` copies.
    """
    total, size = 0, list(patch)
    for stride, width in zip(strides, channels, strict=True):
        size = [math.ceil(n / step) for n, step in zip(size, stride, strict=True)]
        total += 6 * KEPT * 4 * width * math.prod(size)
    return total


def make_plan(
    spacings: Sequence[Spacing], shapes: Sequence[Axes], budget: int, *, width: int = WIDTH
) -> VolumePlan:
    """A plan whose step fits into a budget of memory.

    A patch begins with the median size of the volumes in the planned spacing. While two of them do
    not fit, the axis that is longest in comparison with that median is made shorter, and the
    network is planned anew. What is left of the budget goes into the batch.

    Args:
        spacings: Of the volumes, in mm.
        shapes: Their sizes in voxels.
        budget: Bytes.
        width: Channels of the finest stage.

    Raises:
        ConfigError: Nothing to plan for, or not even the smallest patch fits.
    """
    spacing = target_spacing(spacings, shapes)
    sizes = [size_at(shape, own, spacing) for shape, own in zip(shapes, spacings, strict=True)]
    median = [max(1, round(float(n))) for n in np.median(sizes, axis=0)]
    patch = (median[0], median[1], median[2])
    while True:
        kernels, strides = kernels_and_strides(spacing, patch)
        multiple = total_stride(strides)
        depth, height, wide = (-(-n // m) * m for n, m in zip(patch, multiple, strict=True))
        whole = (depth, height, wide)
        channels = stage_channels(len(strides), width)
        needed = activation_bytes(whole, strides, channels)
        if BATCH[0] * needed <= budget and len(strides) > 1:
            break
        longest = max(range(3), key=lambda axis: whole[axis] / median[axis])
        shorter = list(whole)
        shorter[longest] -= multiple[longest]
        if min(shorter) < 1 or len(strides) < 2:
            raise ConfigError(
                f"a memory of {shown(budget)} bytes takes no two patches of a network; give more, "
                "or a lower width"
            )
        patch = (shorter[0], shorter[1], shorter[2])
    batch = min(budget // needed, BATCH[1])
    return VolumePlan(
        spacing=spacing,
        patch=whole,
        kernels=kernels,
        strides=strides,
        channels=channels,
        depths=(1, *[2] * (len(strides) - 1)),
        batch_size=batch,
        bytes=batch * needed,
    )
