"""Augmentation of images in training: cheap, on 8-bit pixels, before the usual preparation.

Each image draws its changes from a generator of its own, so they do not depend on workers, ranks or
the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor, nn

from vision.images import ImagePreprocessing, Pixels, prepare
from vision.products import as_products
from zoo.errors import ConfigError, shown
from zoo.training.recipe import Recipe

LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue, ITU-R BT.601
RATIOS = (3 / 4, 4 / 3)  # of the sides of a random crop
TRIES = 10  # to fit one into the image, before the whole image is taken


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """How a model of images is trained.

    Pixels count in the image as it is read, before it is resized for the network.

    Attributes:
        crop_padding: Pixels by which an image is shifted at most, down or up and left or right;
            its mirror image fills the border.
        flip: Mirror half of the images, left to right.
        cutout: Side in pixels of a square of mean colour, anywhere in the image.
        random_resized_crop: Smallest and largest share of the area of a crop that fills the whole
            input, with sides of 3:4 to 4:3; none keeps the preparation of the card.
        color_jitter: Largest relative change of brightness, contrast and saturation, in [0, 1].
        products: Compute convolutions as products of matrices: in bfloat16 on a CPU several times
            faster.
        sizes: Image sizes during training, ``((0.1, 40), (1.0, 64))``: 40 pixels up to a tenth of
            the steps, then 64; empty keeps the card's.
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    random_resized_crop: tuple[float, float] | None = None
    color_jitter: float = 0.0
    products: bool = False
    sizes: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        crop, rising = self.random_resized_crop, [0.0, *(share for share, _ in self.sizes)]
        for name, right, takes in (
            ("crop_padding", self.crop_padding >= 0, "0 or more pixels"),
            ("cutout", self.cutout >= 0, "0 or more pixels"),
            ("color_jitter", 0 <= self.color_jitter <= 1, "0 to 1"),
            ("random_resized_crop", not crop or 0 < crop[0] <= crop[1] <= 1, "two shares, (0, 1]"),
            (
                "sizes",
                rising == sorted(set(rising)) and all(size >= 1 for _, size in self.sizes),
                "pairs of a rising share of the training and pixels",
            ),
        ):
            if not right:
                given = shown(getattr(self, name))
                raise ConfigError(f"{type(self).__name__}: {name} is {given}; it takes {takes}")

    def adapt(self, model: nn.Module) -> None:
        """Make the model ready to be trained by this recipe."""
        if self.products:
            as_products(model)


def augmented(
    image: Pixels,
    spec: ImagePreprocessing,
    in_channels: int,
    recipe: Recipe | None = None,
    generator: torch.Generator | None = None,
    size: int | None = None,
) -> Float32[Tensor, "in_channels side side"]:
    """The input of a network: what `recipe` changes at random, then the usual preparation.

    Args:
        image: What `vision.images.decode` returned.
        spec: Of the network's card.
        in_channels: Of the network.
        recipe: An `ImageRecipe`; any other changes nothing.
        generator: From which the changes are drawn; torch's global one if None.
        size: Pixels of both sides, in place of the card's crop.
    """
    if size is not None and size != spec.crop:
        spec = replace(spec, size=max(1, round(spec.size * size / spec.crop)), crop=size)
    if not isinstance(recipe, ImageRecipe):
        return prepare(image, spec, in_channels)
    # One call for everything: each costs as much as the change itself.
    draws = iter(torch.rand(10 + 2 * TRIES, generator=generator, dtype=torch.float64).tolist())
    pixels = image.numpy()
    mirror = next(draws) < 0.5 and recipe.flip
    place = next(draws), next(draws)
    if recipe.crop_padding or mirror:
        pixels = _shifted(pixels, recipe.crop_padding, place, mirror)
    colours = [next(draws) for _ in range(3)]
    place = next(draws), next(draws)
    if recipe.random_resized_crop:
        pixels = _cropped(pixels, recipe.random_resized_crop, list(draws))
        spec = replace(spec, size=spec.crop, resize="squash")
    if recipe.color_jitter:
        factors = [1 + recipe.color_jitter * (2 * draw - 1) for draw in colours]
        pixels = _coloured(pixels, *factors)
    if recipe.cutout:
        pixels = _cut_out(pixels, recipe.cutout, place, spec)
    return prepare(torch.from_numpy(np.ascontiguousarray(pixels)), spec, in_channels)


def _shifted(pixels: NDArray, padding: int, place: tuple[float, float], mirror: bool) -> NDArray:
    """Moved by up to `padding` pixels on both axes, reflected at the border; mirrored if asked."""
    rows, columns = (
        _reflected(side, padding)[(start := int(draw * (2 * padding + 1))) : start + side]
        for side, draw in zip(pixels.shape[1:], place, strict=True)
    )
    if mirror:
        columns = columns[::-1]
    return pixels.take(rows, axis=1).take(columns, axis=2)


@lru_cache(maxsize=64)
def _reflected(side: int, padding: int) -> NDArray[np.intp]:
    """Index of every pixel of a padded axis; the border pixel itself is not repeated."""
    period = max(2 * (side - 1), 1)
    place = np.abs(np.arange(-padding, side + padding)) % period
    return np.minimum(place, period - place) if side > 1 else np.zeros_like(place)


def _cropped(pixels: NDArray, scale: tuple[float, float], draws: Sequence[float]) -> NDArray:
    """A box of random area and aspect ratio.

    Source: Szegedy et al. 2014, section 6; the tries of torchvision's RandomResizedCrop.
    """
    height, width = pixels.shape[1:]
    low, high = (math.log(ratio) for ratio in RATIOS)
    down, across, *rest = draws
    for area, aspect in zip(rest[::2], rest[1::2], strict=True):
        area = (scale[0] + (scale[1] - scale[0]) * area) * height * width
        ratio = math.exp(low + (high - low) * aspect)
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            top, left = int(down * (height - h + 1)), int(across * (width - w + 1))
            return pixels[:, top : top + h, left : left + w]
    return pixels


def _coloured(pixels: NDArray, brightness: float, contrast: float, saturation: float) -> NDArray:
    """Brightness, contrast around the mean grey, saturation: together one map of the colours.

    Differs from torchvision's ColorJitter: this order always, and values are cut off once, at the
    end. Images that are not of three channels have no saturation.
    """
    channels = len(pixels)
    luma = LUMA if channels == 3 else np.full(channels, 1 / channels, np.float32)
    colour = saturation if channels == 3 else 1.0
    flat = pixels.reshape(channels, -1)
    grey = brightness * float(luma @ flat.mean(axis=1, dtype=np.float32))
    matrix = colour * np.eye(channels, dtype=np.float32) + (1 - colour) * luma
    values = np.float32(contrast * brightness) * (matrix @ flat.astype(np.float32, copy=False))
    values += np.float32((1 - contrast) * grey)
    if pixels.dtype == np.uint8:
        values = np.rint(values).clip(0, 255).astype(np.uint8)
    else:
        values = values.clip(0, 1)
    return values.reshape(pixels.shape)


def _cut_out(
    pixels: NDArray, side: int, place: tuple[float, float], spec: ImagePreprocessing
) -> NDArray:
    """A square of mean colour, whose centre is anywhere in the image.

    Source: DeVries and Taylor 2017, section 3.
    """
    mean, _ = spec.statistics(len(pixels))
    fill = np.array(mean, np.float32)
    fill = np.rint(255 * fill) if pixels.dtype == np.uint8 else fill
    box = []
    for length, draw in zip(pixels.shape[1:], place, strict=True):
        start = int(draw * length) - side // 2
        box.append(slice(max(0, start), max(0, start + side)))
    pixels = pixels.copy()
    pixels[:, box[0], box[1]] = fill[:, None, None]
    return pixels
