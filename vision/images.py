"""Images: from a file or an array to the tensor that a network takes.

Pipelines, evaluation and fine-tuning all prepare images here, with the constants of the card.
`decode` gives the picture as a viewer shows it, `prepare` makes the network's input of it. Colour
profiles are not applied, as in the training of every published classifier.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from zoo.errors import CardError, ConfigError, DataError, ZooError, shown

# uint8 in 0..255 or float32 in [0, 1]
Pixels = UInt8[Tensor, "channels height width"] | Float32[Tensor, "channels height width"]

LAYOUTS = ("CHW", "HWC", "HW")
COLOURS = (1, 3, 4)  # channels that are read as a picture: grey, RGB, RGB with alpha
TOLERANCE = 1e-3  # by which a float image may leave [0, 1]: rounding of float16 and of resampling
MAX_PIXELS = 178_956_970  # of a resized picture: where Pillow, too, refuses a file as a bomb

# Mode of a Pillow image -> mode whose bands are read. The deeper modes, I;16*, I and F, are read as
# numbers. A transparent colour in the file's header makes it RGBA.
MODES = {
    "1": "L",
    "L": "L",
    "LA": "LA",
    "La": "LA",  # alpha multiplied into the grey already
    "P": "RGB",
    "PA": "RGBA",
    "RGB": "RGB",
    "RGBX": "RGB",  # the fourth band is padding
    "RGBA": "RGBA",
    "RGBa": "RGBA",
    "CMYK": "RGB",
    "YCbCr": "RGB",
    "HSV": "RGB",
    "LAB": "RGB",
}
# EXIF orientation -> whether rows and columns change places, then the axes of (C, H, W) to flip.
UPRIGHT: dict[int, tuple[bool, tuple[int, ...]]] = {
    2: (False, (2,)),
    3: (False, (1, 2)),
    4: (False, (1,)),
    5: (True, ()),
    6: (True, (2,)),
    7: (True, (1, 2)),
    8: (True, (1,)),
}
ORIENTATION, BITS_PER_SAMPLE = 0x112, 0x102  # tags of EXIF and TIFF


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessing:
    """How a network's images were prepared in its training: the card's table ``preprocessing``."""

    size: int  # pixels of the shorter side, or of both sides, after resizing
    resize: Literal["shorter", "squash"]  # squash gives up the aspect ratio
    crop: int  # pixels of both sides of the square cut from the centre
    interpolation: Literal["bilinear", "bicubic", "nearest"]
    antialias: bool  # the filter grows with the reduction, as Pillow's always does
    mean: tuple[float, ...]  # of every channel, for values in [0, 1]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("size", "crop"):
            if getattr(self, name) < 1:
                raise CardError(
                    f"preprocessing: {name} is {getattr(self, name)}; it takes at least 1 pixel"
                )
        if self.crop**2 > MAX_PIXELS:
            raise CardError(
                f"preprocessing: crop is {self.crop}; it takes at most {math.isqrt(MAX_PIXELS)} "
                "pixels"
            )
        if not self.mean or len(self.mean) != len(self.std):
            raise CardError(
                f"preprocessing: {len(self.mean)} means and {len(self.std)} standard deviations; "
                "give one of each a channel"
            )
        if not all(map(math.isfinite, self.mean)):
            raise CardError(f"preprocessing: mean is {shown(self.mean)}; it takes finite numbers")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise CardError(f"preprocessing: std is {shown(self.std)}; it takes numbers above 0")

    def statistics(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each of so many channels.

        A network adapted to another number of channels sees each of them as it saw the average
        colour, so all get the average of the card's values.
        """
        if channels == len(self.mean):
            return self.mean, self.std
        count = len(self.mean)
        return (sum(self.mean) / count,) * channels, (sum(self.std) / count,) * channels


def decode(raw: object, *, layout: str | None = None) -> Pixels:
    """The pixels of one image, upright, in new memory.

    Files and Pillow images: every mode of Pillow, the first frame of an animation, turned as the
    EXIF orientation says. Transparent pixels show white, as on a page. Grey images have one
    channel, all others three. Files of more than 8 bits give float32. A 32-bit integer image is
    read as 8-bit if nothing in it exceeds 255, else as 16-bit.

    Arrays: numpy arrays are HWC or HW, as in Pillow and OpenCV, tensors CHW or HW; their channels
    stay as they are. uint8 and bool give uint8; uint16 and floats in [0, 1] give float32.

    Args:
        raw: Path, bytes, binary file, Pillow image, numpy array or tensor. Files opened here are
            closed, the caller's are left open; nothing of the caller's is changed.
        layout: Order of the axes of an array, "CHW", "HWC" or "HW", where it is another than above.

    Returns:
        uint8 in 0..255 or float32 in [0, 1].

    Raises:
        DataError: Not an image, a damaged one, or an array whose axes or values are unclear.
        ConfigError: `layout` is not a layout, or `raw` is not an array.
    """
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"layout is {shown(layout)}; it takes {', '.join(map(repr, LAYOUTS))}")
    if isinstance(raw, np.ndarray | Tensor):
        return _from_array(raw, layout)
    kind = type(raw).__name__
    if layout is not None:
        raise ConfigError(
            f"layout={layout!r} is for arrays, and this is of type {kind}; leave it out"
        )
    if isinstance(raw, Image.Image):
        file = getattr(raw, "filename", "")
        name = shown(str(file)) if file else f"the Pillow image of mode {raw.mode!r}"
        with _reading(name):
            return _pixels(raw, name)
    if isinstance(raw, str | os.PathLike):
        return _from_path(os.fsdecode(raw))
    if isinstance(raw, bytes | bytearray | memoryview):
        return _from_file(BytesIO(raw), f"the image of {len(raw)} bytes")
    if hasattr(raw, "read"):
        return _from_stream(raw)
    raise DataError(
        f"an input of type {kind} is not an image; give a path, bytes, a binary file, a Pillow "
        "image, a numpy array or a tensor"
    )


def prepare(
    image: Pixels, spec: ImagePreprocessing, in_channels: int
) -> Float32[Tensor, "in_channels crop crop"]:
    """The input of a network: channels, size and normalisation as in its training.

    Pillow resizes, as in the training and the measurements that cards name: 8-bit images in 8 bits,
    so that a picture gives the same sample as a file and as an array, deeper ones in float32.

    Args:
        image: What `decode` returned; it is not changed.
        spec: Of the network's card.
        in_channels: Of the network. 3: grey is repeated. 1: colour becomes luma. With 3 or 1, the
            fourth channel is alpha and shows white. Any other number is taken as it is.

    Returns:
        One contiguous sample without a batch axis.

    Raises:
        DataError: The channels do not fit, or the image is so narrow that it would be huge resized.
    """
    image = _resized(_in_channels(image, in_channels), spec)
    mean, std = (image.new_tensor(v, dtype=torch.float32) for v in spec.statistics(in_channels))
    values = image / 255 if image.dtype == torch.uint8 else image
    values = values.expand(in_channels, -1, -1)
    return ((values - mean[:, None, None]) / std[:, None, None]).contiguous()


def _from_path(path: str) -> Pixels:
    name = shown(path)
    try:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise OSError(None, "it is no regular file")  # a pipe would be waited for
        file = open(path, "rb")  # noqa: SIM115, closed below; only opening is guarded here
    except (OSError, ValueError) as error:
        if os.path.isdir(path):
            reason = "it is a folder; give one file, or a list of files"
        elif isinstance(error, FileNotFoundError):
            reason = f"there is no such file; a relative path starts at {shown(os.getcwd())}"
        else:  # no permission, or a name that no file can have
            reason = f"{getattr(error, 'strerror', None) or error}; check the path"
        raise DataError(f"{name} cannot be opened: {reason}") from error
    with file:
        return _from_file(file, name)


def _from_stream(stream: Any) -> Pixels:
    name = f"the open file {shown(getattr(stream, 'name', type(stream).__name__))}"
    try:
        content = stream.read()
    except (OSError, ValueError) as error:  # closed, or bytes that are not the text of a text file
        raise DataError(f"{name} cannot be read; open it in mode 'rb'", str(error)) from error
    if not isinstance(content, bytes):
        raise DataError(f"{name} gives {type(content).__name__}, not bytes; open it in mode 'rb'")
    return _from_file(BytesIO(content), f"the rest of {name}")


def _from_file(file: BufferedReader | BytesIO, name: str) -> Pixels:
    with _reading(name):
        try:
            image = Image.open(file)
        except UnidentifiedImageError as error:
            file.seek(0)
            head = file.read(16)
            what = f"not an image: it starts with {shown(head, 40)}" if head else "empty"
            raise DataError(
                f"{name} is {what}; give a PNG, JPEG or another file that Pillow reads"
            ) from error
        with image:
            if image.format == "EPS":  # a program: loading it would start an interpreter
                raise DataError(f"{name} is an EPS file, not pixels; convert it to PNG first")
            return _pixels(image, name)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Whatever a decoder of Pillow raises, as an error that names the image."""
    try:
        yield
    except ZooError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"{name} has more pixels than Pillow allows; make it smaller, or raise "
            "PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        ) from error
    except Exception as error:  # a damaged file makes a decoder fail in any way
        raise DataError(
            f"{name} is damaged: {shown(str(error))}; get a complete copy of it"
        ) from error


def _pixels(image: Image.Image, name: str) -> Pixels:
    """Pixels of an open Pillow image, upright and without transparency."""
    if 0 in image.size:
        raise DataError(f"{name} has {image.width}x{image.height} pixels; it needs at least one")
    image.load()
    if image.mode in MODES:
        mode = MODES[image.mode]
        if mode in ("L", "RGB") and image.has_transparency_data:
            mode = "RGBA"
        # np.array copies, so the caller's image is left alone even where nothing is converted
        bands = np.array(image if image.mode == mode else image.convert(mode))
        pixels = torch.from_numpy(bands.reshape(*bands.shape[:2], -1)).permute(2, 0, 1)
        pixels = _over_white(pixels) if mode in ("LA", "RGBA") else pixels
    else:
        pixels = _deep(image, name)
    swap, flipped = UPRIGHT.get(_orientation(image), (False, ()))
    return (pixels.transpose(1, 2) if swap else pixels).flip(flipped).contiguous()


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # broken EXIF: the picture itself is whole, and a viewer shows it as stored
        return 1


def _deep(image: Image.Image, name: str) -> Float32[Tensor, "1 height width"]:
    """A grey image of more than 8 bits, scaled to [0, 1] by the range of its file."""
    numbers = np.array(image)
    if image.mode == "F":
        return _unit(torch.from_numpy(numbers)[None], name)
    if image.mode == "I":
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high > 65535:
            raise DataError(
                f"{name} has 32-bit values from {low} to {high}; scale them to 0..65535, or give a "
                "float array in [0, 1]"
            )
        # Pillow stretches the values of a deep PGM file to 16 bits, whatever they reach.
        full = 255 if high <= 255 and image.format != "PPM" else 65535
    elif image.mode.startswith("I;16"):
        bits = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))[0]  # TIFF also has 12
        full = 2**bits - 1
    else:
        raise DataError(f"{name} has the mode {image.mode!r}; convert it: image.convert('RGB')")
    pixels = torch.from_numpy(numbers.astype(np.float32))[None] / full
    if isinstance(key := image.info.get("transparency"), int):
        pixels[0, torch.from_numpy(numbers == key)] = 1.0
    return pixels


def _from_array(raw: np.ndarray | Tensor, layout: str | None) -> Pixels:
    dtype = str(raw.dtype).removeprefix("torch.")
    name = f"the {'tensor' if isinstance(raw, Tensor) else 'array'} of shape {tuple(raw.shape)}"
    layout = _layout(raw, layout, name)
    if isinstance(raw, Tensor) and (raw.is_meta or raw.layout is not torch.strided):
        raise DataError(f"{name} holds no dense values; give a dense tensor in memory")
    if isinstance(raw, Tensor):
        numbers = raw.detach().to("cpu", copy=True)
    elif raw.dtype.kind in "buf" and raw.dtype.itemsize <= 8:
        numbers = torch.from_numpy(np.array(raw, raw.dtype.newbyteorder("="), order="C"))
    else:
        numbers = torch.empty(0, dtype=torch.int64)  # refused below, with all other integers
    if numbers.dtype == torch.bool:
        pixels = numbers.to(torch.uint8) * 255
    elif numbers.dtype == torch.uint8:
        pixels = numbers
    elif numbers.dtype == torch.uint16:
        pixels = numbers.to(torch.float32) / 65535
    elif numbers.is_floating_point():
        pixels = _unit(numbers.to(torch.float32), name)
    else:
        remedy = ".to(torch.uint8)" if isinstance(raw, Tensor) else ".astype('uint8')"
        raise DataError(
            f"{name} has type {dtype}, whose white is unknown; for 0..255 give {remedy}, else "
            "float32 in [0, 1]"
        )
    if layout == "HW":
        pixels = pixels[None]
    return (pixels.permute(2, 0, 1) if layout == "HWC" else pixels).contiguous()


def _layout(raw: np.ndarray | Tensor, given: str | None, name: str) -> str:
    """The layout that was stated, or else the library's own unless the shape speaks against it."""
    shape = tuple(raw.shape)
    own, other = ("CHW", "HWC") if isinstance(raw, Tensor) else ("HWC", "CHW")
    layout = given or ("HW" if len(shape) == 2 else own)
    if len(shape) == 4:
        raise DataError(f"{name} is a batch; give a list of images, for example list(batch)")
    if len(shape) != len(layout):
        raise DataError(f"{name} is not {layout}; an image has the axes HW, HWC or CHW")
    if 0 in shape:
        raise DataError(f"{name} is empty; an image needs at least one pixel")
    if given is None and len(shape) == 3:
        channels, elsewhere = shape[own.index("C")], shape[other.index("C")]
        if channels not in COLOURS and elsewhere in COLOURS:
            raise DataError(
                f"{name} would have {channels} channels as {own}; if it is {other}, pass "
                f"layout={other!r}"
            )
    return layout


def _unit(values: Tensor, name: str) -> Tensor:
    """Float values, known to lie in [0, 1]."""
    if not values.isfinite().all():
        raise DataError(f"{name} holds NaN or infinite values; give finite ones in [0, 1]")
    low, high = values.min().item(), values.max().item()
    if low < -TOLERANCE:
        raise DataError(
            f"{name} has values down to {low:.4g}; give it in [0, 1] and not normalised, which is "
            "done here"
        )
    if high > 1 + TOLERANCE:
        raise DataError(
            f"{name} has float values up to {high:.4g}; divide by the value of white, or give "
            "0..255 as uint8"
        )
    return values.clamp(0, 1)


def _over_white(image: Tensor) -> Tensor:
    """The colours without their last channel, alpha, composited over a white page."""
    colour, alpha = image[:-1], image[-1:]
    if image.dtype != torch.uint8:
        return colour * alpha + (1 - alpha)
    colour, alpha = colour.int(), alpha.int()
    return ((colour * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)


def _in_channels(image: Tensor, wanted: int) -> Tensor:
    """The image with the channels that a network takes; `prepare` repeats grey at the end."""
    channels = image.shape[0]
    if channels == wanted:
        return image
    if wanted not in (1, 3) or channels not in COLOURS:
        raise DataError(
            f"the image has {channels} channels and the network takes {wanted}; give an array with "
            f"{wanted}, or state its axes with layout='CHW' or 'HWC'"
        )
    if channels == 4:
        image = _over_white(image)
    return _luma(image) if wanted == 1 and image.shape[0] == 3 else image


def _luma(image: Tensor) -> Tensor:
    """Grey of ITU-R BT.601, in 8 bits by the same integers as Pillow's mode L."""
    if image.dtype != torch.uint8:
        return (image * image.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)
    red, green, blue = image.int()
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8)[None]


def _resized(image: Tensor, spec: ImagePreprocessing) -> Tensor:
    """The square at the centre of the resized image, black where it exceeds that, in its own dtype.

    Source: ``Resize`` and ``CenterCrop`` of torchvision, whose rounding is followed.
    """
    height, width = image.shape[-2:]
    short = min(height, width)
    full = [
        spec.size if spec.resize == "squash" else spec.size * n // short for n in (height, width)
    ]
    if math.prod(full) > MAX_PIXELS:
        raise DataError(
            f"the image is {width}x{height} pixels and would be {full[1]}x{full[0]} resized; cut a "
            "part out of it"
        )
    kept = [min(side, spec.crop) for side in full]
    first = [round((side - n) / 2) for side, n in zip(full, kept, strict=True)]
    rows, columns = (slice(a, a + n) for a, n in zip(first, kept, strict=True))
    image = _sampled(image, full, rows, columns, spec)
    down, across = (spec.crop - n for n in kept)
    return F.pad(image, (across // 2, (across + 1) // 2, down // 2, (down + 1) // 2))


def _sampled(
    image: Tensor, full: list[int], rows: slice, columns: slice, spec: ImagePreprocessing
) -> Tensor:
    """Some rows and columns of the image after resizing it to the height and width in `full`."""
    if full == list(image.shape[-2:]):
        return image[:, rows, columns]
    if spec.interpolation == "nearest":
        # In integers: in floating point a sample on the border of two pixels falls to either.
        down, across = (
            (2 * torch.arange(after) + 1) * before // (2 * after)
            for before, after in zip(image.shape[-2:], full, strict=True)
        )
        return image[:, down[rows]][:, :, across[columns]]
    if spec.antialias:
        # Not by torch: its 8-bit bicubic is up to 5 levels off (2.14), and wrong at a width of 1.
        method = Image.Resampling[spec.interpolation.upper()]
        box = (columns.start, rows.start, columns.stop, rows.stop)
        together = image.dtype == torch.uint8 and len(image) == 3  # a third of the time, no other
        parts = [image.permute(1, 2, 0).contiguous()] if together else list(image)
        sampled = [
            np.array(Image.fromarray(part.numpy()).resize((full[1], full[0]), method).crop(box))
            for part in parts
        ]
        bands = sampled[0].transpose(2, 0, 1) if together else np.stack(sampled)
        values = torch.from_numpy(np.ascontiguousarray(bands))
    else:
        values = F.interpolate(image[None].float(), full, mode=spec.interpolation)[0]
        values = values[:, rows, columns]
    if values.dtype == torch.uint8:
        return values
    if image.dtype == torch.uint8:
        return values.round().clamp(0, 255).to(torch.uint8)
    return values.clamp(0, 1)  # the lobes of the bicubic filter overshoot
