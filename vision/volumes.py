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
from numpy.typing import NDArray

from zoo.errors import DataError, require, shown

Affine = NDArray[np.float64]
TOLERANCE = 1e-3  # mm, by which corners of an image and of its labels may differ


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
    try:
        volume = Volume(data.reshape(shape), affine, image.header)
    except DataError as error:
        raise DataError(f"{where}: {error.line}", *error.details) from error
    if not np.isfinite(volume.data).all():
        count = int((~np.isfinite(volume.data)).sum())
        raise DataError(f"{where}: {count:,} voxels are not finite; replace them by what air has")
    return volume


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
