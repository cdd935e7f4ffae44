"""Volumes in space: reading NIfTI, turning to one orientation and back, writing masks.

An affine maps voxel indices to millimetres in the patient (right, anterior, superior). Networks see
depth, height and width as superior, anterior and right, whatever order the file has; a mask goes
back onto the file's own grid by the exact inverse, and into a copy of the file's own header.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Integer, Shaped
from numpy.typing import NDArray
from torch import Tensor

from vision.volumenet import Axes
from zoo.errors import ConfigError, DataError, require, shown

Affine = NDArray[np.float64]
Spacing = tuple[float, float, float]
TOLERANCE = 1e-3  # mm, by which corners of an image and of its labels may differ
RIGHT = 2  # the axis of an upright volume that runs from left to right


@dataclass(frozen=True, kw_only=True)
class VolumePreprocessing:
    """How a volume becomes the input of a network; axes are superior, anterior and right.

    Attributes:
        spacing: Size of a voxel in mm that the network sees; None keeps the file's own.
        window: Voxels that it sees at once; None is the whole volume.
        clip: Lowest and highest intensity; what is beyond becomes that. None keeps all.
        mean: Intensity that becomes 0; None takes each volume's own, channel by channel.
        std: Intensities that become 1; None takes each volume's own.
        mirror: Axes along which a mirrored volume is one that the network may meet.
        pairs: Labels of which one is left and the other right, such as ``((3, 4),)``; empty where
            no label knows a side. None means that nobody has said so: then nothing is mirrored
            from left to right.
        largest_component: Whether of each label only the largest connected part is kept.
    """

    spacing: Spacing | None = None
    window: tuple[int, int, int] | None = None
    clip: tuple[float, float] | None = None
    mean: float | None = None
    std: float | None = None
    mirror: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] | None = None
    largest_component: bool = False

    def __post_init__(self) -> None:
        for name, right, takes in (
            ("spacing", not self.spacing or min(self.spacing) > 0, "three lengths in mm above 0"),
            ("window", not self.window or min(self.window) >= 1, "three sizes in voxels above 0"),
            ("clip", not self.clip or self.clip[0] < self.clip[1], "a lower and a higher number"),
            ("std", self.std is None or self.std > 0, "a number above 0, with mean"),
            ("mean", (self.mean is None) == (self.std is None), "a number where std has one"),
            ("mirror", set(self.mirror) <= {0, 1, 2}, "axes out of 0, 1 and 2"),
            ("pairs", _disjoint(self.pairs or ()), "pairs of two labels, each label once"),
        ):
            if not right:
                given = shown(getattr(self, name))
                raise ConfigError(f"preprocessing: {name} is {given}; it takes {takes}")

    @property
    def mirrored(self) -> tuple[int, ...]:
        """Axes that may be mirrored: left and right only where `pairs` says what that does."""
        return tuple(axis for axis in self.mirror if axis != RIGHT or self.pairs is not None)


def _disjoint(pairs: tuple[tuple[int, int], ...]) -> bool:
    labels = [label for pair in pairs for label in pair]
    return len(set(labels)) == len(labels)


@dataclass(frozen=True, eq=False)
class Volume:
    """Values on a grid in space.

    Attributes:
        data: Values, three axes.
        affine: Float64 (4, 4), voxel indices to mm (right, anterior, superior).
        header: Of the file it was read from, which `write_mask` copies; nibabel's.
    """

    data: np.ndarray
    affine: Affine
    header: Any = None

    def __post_init__(self) -> None:
        if self.data.ndim != 3 or not self.data.size:
            raise DataError(
                f"a volume has the shape {self.data.shape}; it takes three axes with at least one "
                "voxel: choose one time point or channel"
            )
        matrix = np.asarray(self.affine, np.float64)
        if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or not self._volume(matrix) > 0:
            raise DataError(
                "the affine does not map voxels to millimetres; it takes a finite 4x4 matrix whose "
                "three axes span a space: check the header's sform and qform"
            )

    @staticmethod
    def _volume(affine: Affine) -> float:
        return abs(float(np.linalg.det(affine[:3, :3])))

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Size of a voxel along every axis in mm."""
        first, second, third = (
            float(length) for length in np.linalg.norm(self.affine[:3, :3], axis=0)
        )
        return first, second, third

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel in ml, sheared axes included."""
        return self._volume(self.affine) / 1000


@dataclass(frozen=True)
class Turn:
    """Axes in another order, some of them reversed; no value is changed.

    Attributes:
        order: Axis of the file that each axis comes from.
        reverse: Whether it runs the other way, for each axis of the result.
    """

    order: tuple[int, int, int]
    reverse: tuple[bool, bool, bool]

    def __call__(self, data: np.ndarray) -> np.ndarray:
        """The array turned."""
        return data.transpose(self.order)[self._slices]

    def back(self, data: np.ndarray) -> np.ndarray:
        """The exact inverse."""
        return data[self._slices].transpose([self.order.index(axis) for axis in range(3)])

    def affine(self, affine: Affine, shape: tuple[int, ...]) -> Affine:
        """Affine of the turned array: every voxel keeps its place in the patient.

        Args:
            affine: Of the array as it was.
            shape: The same.
        """
        step = np.zeros((4, 4))
        step[3, 3] = 1
        for axis, (source, reverse) in enumerate(zip(self.order, self.reverse, strict=True)):
            step[source, axis] = -1 if reverse else 1
            step[source, 3] = shape[source] - 1 if reverse else 0
        return affine @ step

    @property
    def _slices(self) -> tuple[slice, ...]:
        return tuple(slice(None, None, -1 if reverse else None) for reverse in self.reverse)


def upright(affine: Affine) -> Turn:
    """The turn after which the axes run most nearly to superior, anterior and right.

    Of all ways to give each axis a direction, the one is taken whose cosines add up to most, so
    that an oblique volume never has two axes of one direction.
    """
    cosines = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    directions = (2, 1, 0)  # rows of the affine: superior, anterior, right
    first, second, third = max(
        itertools.permutations(range(3)),
        key=lambda order: sum(
            abs(cosines[row, axis]) for row, axis in zip(directions, order, strict=True)
        ),
    )
    order = (first, second, third)
    depth, height, width = (
        bool(cosines[row, axis] < 0) for row, axis in zip(directions, order, strict=True)
    )
    return Turn(order, (depth, height, width))


def turned(volume: Volume, turn: Turn) -> Volume:
    """The volume with its axes turned and its affine with them."""
    affine = turn.affine(volume.affine, volume.data.shape)
    return replace(volume, data=turn(volume.data), affine=affine)


def check_same_grid(image: Volume, labels: Volume) -> None:
    """Refuse labels that do not lie on the image's voxels.

    Raises:
        DataError: With both shapes, or with the largest distance between corners in mm.
    """
    if image.data.shape != labels.data.shape:
        raise DataError(
            f"the image has {image.data.shape} voxels and its labels {labels.data.shape}; resample "
            "the labels onto the image"
        )
    corners = np.array([*itertools.product(*((0, n - 1) for n in image.data.shape))])
    places = np.c_[corners, np.ones(8)].T
    apart = np.linalg.norm(((image.affine - labels.affine) @ places)[:3], axis=0).max()
    if apart > TOLERANCE:
        raise DataError(
            f"image and labels lie {apart:.3g} mm apart at a corner, and {TOLERANCE} mm are "
            "borne; resample the labels onto the image"
        )


def read_volume(path: str | Path) -> Volume:
    """A volume of a NIfTI file, ``.nii`` or ``.nii.gz``, scaled as its header says.

    Returns:
        Float32 data, or the stored whole numbers where the header scales nothing.

    Raises:
        DataError: There is no such file, it is no NIfTI file or a damaged one, it has not three
            axes, its affine is singular, or values are not finite.
        MissingPackageError: nibabel is not installed.
    """
    (volume,) = read_channels(path, 1)
    return volume


def read_channels(path: str | Path, channels: int) -> list[Volume]:
    """The volumes of a NIfTI file that holds several on one grid, along a fourth axis.

    Args:
        path: ``.nii`` or ``.nii.gz``.
        channels: Number of them; 1 is a file of three axes.

    Raises:
        DataError: As `read_volume`, or the file holds another number.
        MissingPackageError: nibabel is not installed.
    """
    nibabel = require("nibabel", "volumes")
    path = Path(path)
    where = shown(str(path))
    if not path.is_file():
        raise DataError(f"there is no file {where}; give the path of a .nii or .nii.gz file")
    try:
        image = nibabel.load(path)
        if not isinstance(image, nibabel.Nifti1Image):
            raise DataError(f"{where} is a {type(image).__name__}; it takes a NIfTI file")
        shape = tuple(int(n) for n in image.shape)
        while len(shape) > 3 and shape[-1] == 1:  # trailing axes of one are no time points
            shape = shape[:-1]
        slope, intercept = image.dataobj.slope, image.dataobj.inter
        plain = slope == 1 and intercept == 0 and image.get_data_dtype().kind in "iu"
        data = np.asanyarray(image.dataobj) if plain else image.get_fdata(dtype=np.float32)
        affine = np.asarray(image.affine, np.float64)
    except DataError:
        raise
    except Exception as error:  # nibabel, gzip, zlib and numpy each have their own
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise DataError(f"{where} is no readable NIfTI file: {reason}") from error
    if channels > 1 and shape[3:] != (channels,):
        raise DataError(
            f"{where} has the shape {shape}; the model takes {channels} channels: (x, y, z, "
            f"{channels})"
        )
    parts = [data.reshape(shape)] if channels == 1 else np.moveaxis(data.reshape(shape), 3, 0)
    try:
        volumes = [Volume(part, affine, image.header) for part in parts]
    except DataError as error:
        raise DataError(f"{where}: {error.line}", *error.details) from error
    if not np.isfinite(data).all():
        count = int((~np.isfinite(data)).sum())
        raise DataError(f"{where}: {count:,} voxels are not finite; replace them by what air has")
    return volumes


def read_grid(path: str | Path) -> tuple[tuple[int, ...], Spacing]:
    """Size and spacing in mm of a NIfTI file, its axes upright; no voxel is read.

    Raises:
        DataError: As `read_volume`.
        MissingPackageError: nibabel is not installed.
    """
    nibabel = require("nibabel", "volumes")
    try:
        image = nibabel.load(Path(path))
        grid = Volume(np.broadcast_to(np.int8(0), image.shape[:3]), image.affine)
    except Exception as error:  # as in `read_channels`
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise DataError(f"{shown(str(path))} is no readable NIfTI file: {reason}") from error
    grid = turned(grid, upright(grid.affine))
    return grid.data.shape, grid.spacing


def write_mask(mask: np.ndarray, like: Volume, path: str | Path) -> None:
    """Write labels on the grid of a volume as NIfTI.

    The header is that of `like` but for data type, scaling and description.

    Args:
        mask: Whole numbers from 0, below 65,536, in the shape of ``like.data``.
        like: Volume that the mask belongs to.
        path: ``.nii`` or ``.nii.gz``.

    Raises:
        DataError: Another shape, floats, or values out of range.
        MissingPackageError: nibabel is not installed.
    """
    nibabel = require("nibabel", "volumes")
    if mask.shape != like.data.shape or mask.dtype.kind not in "bui":
        raise DataError(
            f"the mask is {mask.dtype} {mask.shape}; it takes whole numbers {like.data.shape}, as "
            "the volume has"
        )
    low, high = int(mask.min()), int(mask.max())
    if low < 0 or high > 65535:
        raise DataError(f"the mask has labels from {low} to {high}; a file takes 0 to 65,535")
    kind = np.uint8 if high < 256 else np.uint16
    header = nibabel.Nifti1Header() if like.header is None else like.header.copy()
    header.set_data_dtype(kind)
    header["descrip"] = b"refzoo mask"
    # Without an affine, nibabel leaves sform, qform and their codes as they are.
    affine = like.affine if like.header is None else None
    image = nibabel.Nifti1Image(mask.astype(kind), affine, header)
    image.header.set_slope_inter(1, 0)
    nibabel.save(image, path)


def size_at(shape: tuple[int, ...], spacing: Spacing, wanted: Spacing | None) -> Axes:
    """Voxels of a volume whose voxels get another size: the same extent, rounded, at least 1."""
    if wanted is None:
        wanted = spacing
    depth, height, width = (
        max(1, round(n * have / want)) for n, have, want in zip(shape, spacing, wanted, strict=True)
    )
    return depth, height, width


def resampled(
    volume: Float32[Tensor, "channels _ _ _"], size: Axes
) -> Float32[Tensor, "channels depth height width"]:
    """Intensities on a grid of the same extent with other voxels, interpolated linearly."""
    if volume.shape[1:] == size:
        return volume
    return F.interpolate(volume[None], size, mode="trilinear")[0]


def resampled_mask(
    mask: Integer[Tensor, "_ _ _"], size: Axes
) -> Integer[Tensor, "depth height width"]:
    """Labels on a grid of the same extent with other voxels: where each has most weight.

    Every label is interpolated by itself and the heaviest one kept, so that memory does not grow
    with their number. Of equal ones the lowest stays.
    """
    if mask.shape == size:
        return mask
    best = mask.new_zeros(size)
    weight = torch.full(size, -1.0)
    for label in mask.unique().tolist():
        here = F.interpolate((mask == label).float()[None, None], size, mode="trilinear")[0, 0]
        best[here > weight] = label
        weight = torch.maximum(weight, here)
    return best


def with_sides_swapped(
    mask: Shaped[np.ndarray, ...] | Shaped[Tensor, ...], pairs: tuple[tuple[int, int], ...]
) -> Any:
    """Labels of a mask that was mirrored from left to right: left ones become right ones."""
    swapped = mask.clone() if isinstance(mask, Tensor) else mask.copy()
    for one, other in pairs:
        swapped[mask == one], swapped[mask == other] = other, one
    return swapped


def largest_components(mask: np.ndarray) -> np.ndarray:
    """A mask without what is apart from the largest part of its label; corners connect.

    Args:
        mask: Whole numbers from 0, three axes.
    """
    from scipy.ndimage import find_objects, label

    kept = np.zeros_like(mask)
    for index, box in enumerate(find_objects(mask.astype(np.int32)), 1):
        if box is None:
            continue
        parts, _ = label(mask[box] == index, np.ones((3, 3, 3)))
        sizes = np.bincount(parts.ravel())[1:]
        kept[box][parts == sizes.argmax() + 1] = index
    return kept


def millilitres(mask: np.ndarray, volume: Volume, labels: list[str]) -> dict[str, float]:
    """Volume of every label but the first, the background, in ml.

    Args:
        mask: Whole numbers below ``len(labels)``.
        volume: Says how large a voxel is.
        labels: Names by number.
    """
    counts = np.bincount(mask.ravel(), minlength=len(labels))
    return {
        name: float(counts[index]) * volume.voxel_ml for index, name in enumerate(labels) if index
    }
