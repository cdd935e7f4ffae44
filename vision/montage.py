"""Pictures of masks on volumes, for a person to look at."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vision.metrics import surface
from vision.volumes import Spacing
from zoo.errors import DataError
from zoo.files import write_atomically

SLICES = 12  # that are shown
SIDE = 192  # pixels of the longer side of each
PERCENTILES = (1, 99)  # of the intensities: black and white
# Distinguishable also without red or green. Source: Okabe, Ito 2008, https://jfly.uni-koeln.de/color/
COLOURS = np.array(
    [(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (213, 94, 0), (204, 121, 167)],
    np.uint8,
)
LEGEND = 16  # pixels of its height


def montage(
    volume: np.ndarray,
    mask: np.ndarray,
    spacing: Spacing,
    labels: Sequence[str],
    *,
    slices: int = SLICES,
) -> Image.Image:
    """Axial slices in which the mask's outlines are drawn, from inferior to superior.

    Slices are spread over those that have a label; anterior is up, and the patient's right is
    right.

    Args:
        volume: Intensities, axes superior, anterior and right.
        mask: Whole numbers of the same shape.
        spacing: Of the voxels in mm.
        labels: Names by number, for the legend.
        slices: Shown at most.

    Raises:
        DataError: Shapes differ.
    """
    if volume.shape != mask.shape or volume.ndim != 3:
        raise DataError(f"the volume is {volume.shape} and the mask {mask.shape}; both need one")
    (found,) = np.nonzero(mask.any((1, 2)))
    first, last = (found[0], found[-1]) if len(found) else (0, len(volume) - 1)
    shown = np.unique(np.linspace(first, last, slices).round().astype(int))
    black, white = np.percentile(volume, PERCENTILES)
    grey = (volume[shown] - black) / max(white - black, 1e-12)
    grey = (255 * grey.clip(0, 1)).astype(np.uint8)
    height, width = (n * mm for n, mm in zip(volume.shape[1:], spacing[1:], strict=True))
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    picture = Image.new("RGB", (columns * size[0], rows * size[1] + LEGEND))
    for place, (slice_, index) in enumerate(zip(grey, shown, strict=True)):
        tile = Image.fromarray(slice_[::-1]).resize(size, Image.Resampling.BILINEAR)
        kinds = Image.fromarray(mask[index, ::-1].astype(np.int32)).resize(
            size, Image.Resampling.NEAREST
        )
        pixels = _outlined(np.asarray(tile), np.asarray(kinds))
        at = place % columns * size[0], place // columns * size[1]
        picture.paste(Image.fromarray(pixels), at)
    _legend(ImageDraw.Draw(picture), labels, rows * size[1])
    return picture


def _outlined(grey: NDArray[np.uint8], mask: NDArray[np.int32]) -> NDArray[np.uint8]:
    """A slice in colours: the outline of every label in the label's own."""
    pixels = np.repeat(grey[..., None], 3, axis=2)
    for label in np.unique(mask[mask > 0]):
        pixels[surface(mask == label)] = COLOURS[(label - 1) % len(COLOURS)]
    return pixels


def _legend(draw: ImageDraw.ImageDraw, labels: Sequence[str], top: int) -> None:
    left = 4
    for index, name in enumerate(labels[1:]):
        text = name.encode("latin-1", "replace").decode("latin-1")  # what the font holds
        draw.text((left, top + 2), text, fill=tuple(COLOURS[index % len(COLOURS)].tolist()))
        left += int(draw.textlength(text)) + 12


def write_montage(
    path: Path, volume: np.ndarray, mask: np.ndarray, spacing: Spacing, labels: Sequence[str]
) -> None:
    """Write a `montage` as PNG, whole or not at all."""
    content = io.BytesIO()
    montage(volume, mask, spacing, labels).save(content, "PNG")
    write_atomically(path, content.getvalue())
