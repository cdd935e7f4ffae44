"""Patches of volumes for training, and their augmentation, as a function of one generator.

Each sample draws everything from a generator of its own, always the same number of draws, so that
it does not depend on workers, ranks or the rest of the batch. Tensors are (channels, depth, height,
width) with labels (depth, height, width); axes are superior, anterior and right.

Source: Isensee et al. 2021, https://doi.org/10.1038/s41592-020-01008-z, supplementary note 4; the
probabilities and ranges are those of nnU-Net v2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64
from torch import Tensor

from vision.volumenet import Axes
from vision.volumes import RIGHT, Spacing, VolumePreprocessing, with_sides_swapped
from zoo.errors import ConfigError, shown
from zoo.training.recipe import Recipe

ANISOTROPIC = 3.0  # times as long as the shortest; an axis of such voxels is left out of turning
DRAWS = 40  # numbers that a sample takes at most, noise not counted

LossName = Literal[
    "dice_cross_entropy", "tversky_cross_entropy", "generalised_dice_cross_entropy", "dice_focal"
]


@dataclass(frozen=True, kw_only=True)
class VolumeRecipe(Recipe):
    """How a model of volumes is trained.

    Attributes:
        patch: Voxels along depth, height and width that a sample has; none takes the window of the
            card, and without one the whole volume.
        foreground: Share of the samples whose patch has a voxel of a label in its middle; all
            labels that a case has are equally likely.
        spatial: Probability of turning a sample, and of scaling it.
        rotation: Largest angle in degrees about each axis.
        scaling: Smallest and largest factor of the size of what is seen.
        intensity: Factor of the probabilities of noise (0.1), blur (0.2), brightness (0.15),
            contrast (0.15) and gamma (0.3); 0 changes no intensity.
        low_resolution: Probability of resolution lost, by up to a half.
        mirror: Mirror half of the samples along each axis that the card names; from left to right
            only where it says which labels change sides.
        loss: What is minimised.
    """

    patch: tuple[int, int, int] | None = None
    foreground: float = 0.33
    spatial: float = 0.0
    rotation: float = 30.0
    scaling: tuple[float, float] = (0.7, 1.4)
    intensity: float = 0.0
    low_resolution: float = 0.0
    mirror: bool = False
    loss: LossName = "dice_cross_entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, right, takes in (
            ("patch", not self.patch or min(self.patch) >= 1, "three sizes in voxels, 1 or more"),
            ("foreground", 0 <= self.foreground <= 1, "0 to 1"),
            ("spatial", 0 <= self.spatial <= 1, "0 to 1"),
            ("rotation", 0 <= self.rotation <= 180, "0 to 180 degrees"),
            ("scaling", 0 < self.scaling[0] <= self.scaling[1] < math.inf, "two rising factors"),
            ("intensity", 0 <= self.intensity <= 3, "0 to 3"),
            ("low_resolution", 0 <= self.low_resolution <= 1, "0 to 1"),
        ):
            if not right:
                given = shown(getattr(self, name))
                raise ConfigError(f"{type(self).__name__}: {name} is {given}; it takes {takes}")


def augmented(
    volume: Float32[Tensor, "channels _ _ _"],
    labels: Int64[Tensor, "_ _ _"],
    recipe: VolumeRecipe,
    spec: VolumePreprocessing,
    spacing: Spacing,
    generator: torch.Generator | None = None,
) -> tuple[Float32[Tensor, "channels depth height width"], Int64[Tensor, "depth height width"]]:
    """A patch of a case, changed at random; the same generator gives the same one.

    Args:
        volume: Normalised, of any size.
        labels: Class of every voxel.
        recipe: What is changed.
        spec: Of the card; its window is the patch unless the recipe has one.
        spacing: Of the voxels in mm, for turning.
        generator: Torch's global one if None.
    """
    draws = iter(torch.rand(DRAWS, generator=generator, dtype=torch.float64).tolist())
    size = recipe.patch or spec.window or _size(labels)
    start = patch_start(labels, size, recipe.foreground, [next(draws) for _ in range(6)])
    turn = drawn_turn(recipe, spacing, size, draws)
    if turn is None:
        volume, labels = cut(volume, start, size), cut(labels[None], start, size)[0]
    else:
        volume, labels = sampled(volume, labels, start, size, turn)
    if recipe.mirror:
        volume, labels = mirrored(volume, labels, spec, [next(draws) < 0.5 for _ in range(3)])
    if recipe.intensity:
        volume = with_intensities(volume, recipe.intensity, draws, generator)
    if recipe.low_resolution:
        volume = with_low_resolution(volume, recipe.low_resolution, draws)
    return volume.contiguous(), labels.contiguous()


def patch_start(
    labels: Int64[Tensor, "_ _ _"], size: Axes, foreground: float, draws: list[float]
) -> Axes:
    """First voxel of a patch, below 0 where the volume is the smaller one; never fails.

    Args:
        labels: Class of every voxel. Without any label the patch lies anywhere.
        size: Of the patch.
        foreground: Probability of a voxel of some label in the middle, as near as the border lets.
        draws: Six numbers in [0, 1).
    """
    room = [n - wanted for n, wanted in zip(labels.shape, size, strict=True)]
    wanted, which, where, *rest = draws
    start = [int(draw * (abs(r) + 1)) + min(r, 0) for draw, r in zip(rest, room, strict=True)]
    if wanted < foreground:
        present = labels.unique()
        present = present[present > 0]
        if len(present):
            voxels = (labels == present[int(which * len(present))]).nonzero()
            middle = voxels[int(where * len(voxels))].tolist()
            start = [
                min(max(m - s // 2, 0), r) if r >= 0 else first
                for m, s, r, first in zip(middle, size, room, start, strict=True)
            ]
    return start[0], start[1], start[2]


def cut(volume: Tensor, start: Axes, size: Axes) -> Tensor:
    """A box of a (channels, …) tensor; beyond the border its last voxel is repeated."""
    for axis, (first, length) in enumerate(zip(start, size, strict=True), 1):
        whole = volume.shape[axis]
        if first >= 0 and first + length <= whole:
            volume = volume.narrow(axis, first, length)
        else:
            index = torch.arange(first, first + length).clamp(0, whole - 1)
            volume = volume.index_select(axis, index)
    return volume


def mirrored(
    volume: Tensor, labels: Tensor, spec: VolumePreprocessing, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    """Mirrored along the axes that are wanted and allowed; labels that know a side change it."""
    axes = [axis for axis in spec.mirrored if wanted[axis]]
    volume, labels = volume.flip([axis + 1 for axis in axes]), labels.flip(axes)
    if RIGHT in axes and spec.pairs:
        labels = with_sides_swapped(labels, spec.pairs)
    return volume, labels


def turned_axes(spacing: Spacing) -> tuple[int, ...]:
    """Axes to turn about: all, or the one of thick slices, which then stay in their planes."""
    thickest = max(range(3), key=lambda axis: spacing[axis])
    return (thickest,) if spacing[thickest] > ANISOTROPIC * min(spacing) else (0, 1, 2)


def drawn_turn(
    recipe: VolumeRecipe, spacing: Spacing, size: Axes, draws: Iterator[float]
) -> Tensor | None:
    """Matrix from offsets in the patch to offsets in the volume, both in voxels; or no change."""
    turns, scales = next(draws) < recipe.spatial, next(draws) < recipe.spatial
    shares, share = [next(draws) for _ in range(3)], next(draws)
    if not turns and not scales:
        return None
    about = turned_axes(spacing)
    matrix = torch.eye(3, dtype=torch.float64)
    for axis in about if turns else ():
        angle = math.radians(recipe.rotation * (2 * shares[axis] - 1))
        i, j = (k for k in range(3) if k != axis)
        step = torch.eye(3, dtype=torch.float64)
        step[i, i] = step[j, j] = math.cos(angle)
        step[i, j], step[j, i] = -math.sin(angle), math.sin(angle)
        matrix = step @ matrix
    if scales:
        low, high = recipe.scaling
        factor = low * (high / low) ** share
        flat = about[0] if len(about) == 1 else None
        matrix *= torch.tensor([1.0 if axis == flat else factor for axis in range(3)])
    mm = torch.tensor(spacing, dtype=torch.float64)
    return matrix * mm / mm[:, None]


def sampled(
    volume: Tensor, labels: Tensor, start: Axes, size: Axes, turn: Tensor
) -> tuple[Tensor, Tensor]:
    """The patch turned about its middle: intensities interpolated linearly, labels the nearest."""
    turn = turn.float()
    axes = [torch.arange(n, dtype=torch.float32) - (n - 1) / 2 for n in size]
    # Coordinates of every voxel of the patch in the volume, and then in [-1, 1] as torch has them.
    offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1) @ turn.T
    middle = torch.tensor([s + (n - 1) / 2 for s, n in zip(start, size, strict=True)])
    shape = torch.tensor(labels.shape, dtype=torch.float32)
    grid = (2 * (offsets + middle) + 1) / shape - 1
    grid = grid.flip(-1)[None]
    options = {"padding_mode": "border", "align_corners": False}
    volume = F.grid_sample(volume[None], grid, mode="bilinear", **options)[0]
    near = F.grid_sample(labels[None, None].float(), grid, mode="nearest", **options)
    return volume, near[0, 0].long()


def with_intensities(
    volume: Tensor, factor: float, draws: Iterator[float], generator: torch.Generator | None
) -> Tensor:
    """Noise, blur, brightness, contrast and gamma, each with its own probability."""
    noisy, strength = next(draws) < 0.1 * factor, next(draws)
    soft, width = next(draws) < 0.2 * factor, 0.5 + 0.5 * next(draws)
    bright, brightness = next(draws) < 0.15 * factor, 0.75 + 0.5 * next(draws)
    steep, contrast = next(draws) < 0.15 * factor, 0.75 + 0.5 * next(draws)
    curved, power, inverse = next(draws) < 0.3 * factor, 0.7 + 0.8 * next(draws), next(draws) < 0.25
    if noisy:
        noise = torch.randn(volume.shape, generator=generator)
        volume = volume + math.sqrt(0.1 * strength) * noise
    if soft:
        volume = blurred(volume, width)
    if bright:
        volume = volume * brightness
    if steep:
        mean = volume.mean((1, 2, 3), keepdim=True)
        low, high = volume.amin((1, 2, 3), keepdim=True), volume.amax((1, 2, 3), keepdim=True)
        volume = ((volume - mean) * contrast + mean).clamp(low, high)
    if curved:
        volume = -bent(-volume, power) if inverse else bent(volume, power)
    return volume


def bent(volume: Tensor, power: float) -> Tensor:
    """Intensities to a power between their extremes; mean and deviation stay as they were."""
    dims = (1, 2, 3)
    low = volume.amin(dims, keepdim=True)
    span = (volume.amax(dims, keepdim=True) - low).clamp(min=1e-7)
    found = ((volume - low) / span) ** power
    mean, std = volume.mean(dims, keepdim=True), volume.std(dims, keepdim=True, correction=0)
    centred = found - found.mean(dims, keepdim=True)
    return centred * std / found.std(dims, keepdim=True, correction=0).clamp(min=1e-7) + mean


def blurred(volume: Tensor, sigma: float) -> Tensor:
    """Convolved with a Gaussian along each axis; `sigma` in voxels."""
    reach = math.ceil(3 * sigma)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    volume = volume[:, None]
    for axis in range(3):
        shape, pad = [1, 1, 1], [0] * 6
        shape[axis] = len(kernel)
        pad[4 - 2 * axis] = pad[5 - 2 * axis] = reach
        padded = F.pad(volume, pad, mode="replicate")
        volume = F.conv3d(padded, kernel.view(1, 1, *shape))
    return volume[:, 0]


def with_low_resolution(volume: Tensor, probability: float, draws: Iterator[float]) -> Tensor:
    """As if scanned with larger voxels: thinned to the nearest, interpolated back."""
    wanted, factor = next(draws) < probability, 0.5 + 0.5 * next(draws)
    if not wanted:
        return volume
    small = [max(1, round(n * factor)) for n in volume.shape[1:]]
    thin = F.interpolate(volume[None], small, mode="nearest-exact")
    return F.interpolate(thin, volume.shape[1:], mode="trilinear")[0]


def _size(labels: Tensor) -> Axes:
    depth, height, width = labels.shape
    return depth, height, width
