from __future__ import annotations

import gc
import io
import os
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps
from torchvision.transforms._presets import ImageClassification as Preset
from torchvision.transforms.functional import InterpolationMode

from vision.images import MODES, ImagePreprocessing, decode, prepare
from zoo.config import build
from zoo.errors import CardError, ConfigError, DataError, ZooError

IMAGENET = ImagePreprocessing(
    size=256,
    resize="shorter",
    crop=224,
    interpolation="bilinear",
    antialias=True,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
# Leaves levels as they are, so that results read as pixels.
PLAIN = replace(IMAGENET, mean=(0.0,), std=(1 / 255,))
QUARTERS = (
    np.array([[(200, 60, 40), (70, 160, 80)], [(40, 40, 200), (128, 128, 128)]], np.uint8)
    .repeat(4, 0)
    .repeat(6, 1)
)
DEEP = {"I;16", "I;16L", "I;16B", "I;16N", "I", "F"}


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def levels(
    image: np.ndarray | torch.Tensor, spec: ImagePreprocessing, **options: object
) -> np.ndarray:
    """What `prepare` makes of an image, as levels 0..255."""
    return prepare(decode(image, **options), spec, 3).numpy()


def check_line(error: ZooError, *words: str) -> None:
    assert len(error.line) <= 200
    assert not error.line.endswith("…")
    for word in words:
        assert word in error.line


# --- what a file or a Pillow image decodes to


def in_mode(mode: str) -> Image.Image:
    """The four quarters as an image of a colour mode of Pillow."""
    rgb = Image.fromarray(QUARTERS)
    if mode == "LAB":
        srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        return ImageCms.applyTransform(rgb, ImageCms.buildTransform(srgb, lab, "RGB", "LAB"))
    if mode == "P":
        return rgb.quantize(8)
    if mode == "PA":
        return rgb.quantize(8).convert("PA")
    if mode == "RGBa":
        return rgb.convert("RGBA").convert("RGBa")
    return rgb.convert(mode)


def test_every_mode_of_pillow_has_a_row_in_the_table() -> None:
    assert set(Image.MODES) == MODES.keys() | DEEP


@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [
        *((mode, 0) for mode in ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK")),
        *((mode, 3) for mode in ("HSV", "YCbCr", "LAB")),  # they round
    ],
)
def test_colours_survive_in_every_colour_mode(mode: str, tolerance: int) -> None:
    image = in_mode(mode)
    assert image.mode == mode
    pixels = decode(image)
    assert pixels.shape == (3, 8, 12)
    assert pixels.dtype == torch.uint8
    difference = pixels.permute(1, 2, 0).numpy().astype(int) - QUARTERS
    assert abs(difference).max() <= tolerance


@pytest.mark.parametrize("mode", ["1", "L", "LA", "La"])
def test_grey_modes_give_one_channel(mode: str) -> None:
    grey = Image.fromarray(np.array([[0, 255, 0]], np.uint8))
    image = grey.convert("LA").convert("La") if mode == "La" else grey.convert(mode)
    assert image.mode == mode
    assert decode(image).tolist() == [[[0, 255, 0]]]


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N", "I", "F", "uint16"])
def test_a_deep_image_equals_its_8_bit_version_within_one_level(mode: str) -> None:
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    raw: object
    if mode == "F":
        raw = Image.fromarray((deep / 65535).astype(np.float32))
    elif mode == "I":
        raw = Image.fromarray(deep.astype(np.int32))
    elif mode == "uint16":
        raw = deep.astype(">u2")
    else:
        order = ">u2" if mode == "I;16B" else "<u2"
        raw = Image.frombytes(mode, (256, 256), deep.astype(order).tobytes())
    pixels = decode(raw)
    assert pixels.dtype == torch.float32
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert (pixels[0] * 255 - torch.from_numpy((deep >> 8).astype(np.float32))).abs().max() <= 1


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_a_16_bit_file_is_scaled_by_16_bits_however_dark_it_is(format: str) -> None:
    dark = np.array([[0, 100, 200]], np.uint16)
    if format == "PPM":
        content = b"P5 3 1 65535\n" + dark.astype(">u2").tobytes()
    else:
        content = encoded(Image.fromarray(dark), format)
    torch.testing.assert_close(decode(content), torch.tensor([[[0, 100, 200]]]) / 65535)


def test_a_12_bit_tiff_is_scaled_by_12_bits() -> None:
    tags = [
        (256, 2),
        (257, 1),
        (258, 12),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, 1),
        (278, 1),
        (279, 3),
    ]
    pixels = bytes([0xFF, 0xF8, 0x00])  # 4095 and 2048
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    content = b"II*\0" + struct.pack("<I", 12) + pixels + b"\0" + directory
    torch.testing.assert_close(decode(content), torch.tensor([[[1.0, 2048 / 4095]]]))


def test_a_32_bit_integer_image_is_read_as_8_bit_if_nothing_exceeds_255() -> None:
    byte = Image.fromarray(np.array([[0, 128, 255]], np.uint8))
    torch.testing.assert_close(decode(byte.convert("I")), decode(byte) / 255)
    torch.testing.assert_close(
        decode(Image.fromarray(np.array([[256, 65535]], np.int32))),
        torch.tensor([[[256 / 65535, 1.0]]]),
    )


# --- transparency


@pytest.mark.parametrize("mode", ["RGBA", "RGBa"])
def test_half_transparent_colours_are_composited_over_white(mode: str) -> None:
    image = Image.new("RGBA", (1, 1), (200, 100, 50, 100)).convert(mode)
    expected = [255 - (255 - value) * 100 / 255 for value in (200, 100, 50)]
    assert decode(image).flatten().tolist() == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("mode", ["LA", "La"])
def test_half_transparent_grey_is_composited_over_white(mode: str) -> None:
    image = Image.new("LA", (1, 1), (200, 100)).convert(mode)
    assert decode(image).flatten().tolist() == pytest.approx([255 - 55 * 100 / 255], abs=1)


def test_transparent_palette_entries_show_white() -> None:
    image = in_mode("P")
    red = image.getpixel((0, 0))
    for transparency in (red, bytes(0 if index == red else 255 for index in range(8))):
        pixels = decode(encoded(image, transparency=transparency))
        assert pixels[:, 0, 0].tolist() == [255, 255, 255]
        assert pixels[:, 7, 0].tolist() == [40, 40, 200]
    pa = image.convert("PA")
    pa.putalpha(0)
    assert (decode(pa) == 255).all()


@pytest.mark.parametrize(
    ("image", "key", "shown"),
    [
        (Image.fromarray(np.array([[0, 9]], np.uint8)), 0, [1, 9 / 255]),
        (Image.fromarray(np.array([[0, 9]], np.uint16)), 0, [1, 9 / 65535]),
        (Image.fromarray(np.array([[[7, 7, 7], [9, 9, 9]]], np.uint8)), (7, 7, 7), [1, 9 / 255]),
        (Image.fromarray(np.array([[False, True]])), 0, [1, 1]),
    ],
    ids=["L", "I;16", "RGB", "1"],
)
def test_the_transparent_colour_of_a_png_shows_white(
    image: Image.Image, key: object, shown: list[float]
) -> None:
    content = encoded(image.resize((2, 2), Image.Resampling.NEAREST), transparency=key)
    sample = prepare(decode(content), replace(PLAIN, size=2, crop=2, std=(1.0,)), 1)
    assert sample[0, 0].tolist() == pytest.approx(shown, abs=1e-6)


# --- orientation, animation


def test_the_orientation_of_exif_is_applied() -> None:  # DAT-05
    stored = np.zeros((32, 64, 3), np.uint8)
    stored[:, :32, 0] = 255
    stored[:, 32:, 2] = 255
    exif = Image.Exif()
    exif[274] = 6
    pixels = decode(encoded(Image.fromarray(stored), exif=exif))
    assert pixels.shape == (3, 64, 32)
    assert (pixels[:, :32] == torch.tensor([255, 0, 0])[:, None, None]).all()
    assert (pixels[:, 32:] == torch.tensor([0, 0, 255])[:, None, None]).all()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_turns_as_pillow_turns_it(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    content = encoded(Image.fromarray(noise(5, 8)), format, exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        expected = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), expected)
    with Image.open(io.BytesIO(content)) as image:
        assert np.array_equal(decode(image).permute(1, 2, 0).numpy(), expected)


def test_a_deep_image_is_turned_too() -> None:
    exif = Image.Exif()
    exif[274] = 6
    content = encoded(Image.fromarray(np.array([[0, 65535]], np.uint16)), exif=exif)
    assert decode(content).tolist() == [[[0], [1]]]


def test_broken_exif_leaves_the_picture_as_it_is_stored() -> None:
    whole = encoded(Image.fromarray(QUARTERS))
    broken = encoded(Image.fromarray(QUARTERS), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(decode(broken), decode(whole))


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_is_read(format: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("white", "black")]
    content = encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
    assert (decode(content) == 255).all()


# --- ways to give an image


def test_every_way_to_give_an_image_gives_the_same_pixels(tmp_path: Path) -> None:
    array = noise(6, 9)
    path = tmp_path / "picture.png"
    Image.fromarray(array).save(path)
    content = path.read_bytes()
    expected = torch.from_numpy(array).permute(2, 0, 1)
    ways = [str(path), path, content, bytearray(content), memoryview(content), io.BytesIO(content)]
    ways += [Image.open(path), Image.fromarray(array), array, expected, array[:, ::-1][:, ::-1]]
    for raw in ways:
        pixels = decode(raw)
        assert torch.equal(pixels, expected)
        assert pixels.is_contiguous()
    with path.open("rb") as file:
        assert torch.equal(decode(file), expected)
        assert not file.closed


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists open files by /proc")
def test_files_that_were_opened_are_closed(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.fromarray(noise(6, 9)).save(good)
    bad.write_bytes(good.read_bytes()[:60])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        decode(good)
        with pytest.raises(DataError):
            decode(bad)
        gc.collect()
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    opened = {os.readlink(link) for link in links if os.path.islink(link)}
    assert not opened & {str(good.resolve()), str(bad.resolve())}


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_the_callers_image_is_never_changed_nor_shared(mode: str) -> None:
    exif = Image.Exif()
    exif[274] = 6
    with Image.open(
        io.BytesIO(encoded(Image.fromarray(QUARTERS).convert(mode), exif=exif))
    ) as image:
        before = image.tobytes(), image.mode, image.info.copy()
        decode(image).zero_()
        assert (image.tobytes(), image.mode, image.info) == before
        assert image.size == (12, 8)
        assert image.getexif()[274] == 6


def test_the_callers_array_is_never_changed_nor_shared() -> None:
    array = np.random.default_rng(0).random((8, 8, 3), np.float32)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    in_bytes = torch.from_numpy(noise(8, 8)).permute(2, 0, 1).contiguous()
    frozen = noise(8, 8)
    frozen.flags.writeable = False
    kept = array.copy(), tensor.clone(), frozen.copy(), in_bytes.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for raw in (array, tensor, frozen, in_bytes):
            image = decode(raw)
            kept_image = image.clone()
            prepare(image, replace(IMAGENET, size=8, crop=8), 3).zero_()
            assert torch.equal(image, kept_image)
            image.zero_()
    assert np.array_equal(array, kept[0])
    assert torch.equal(tensor, kept[1])
    assert np.array_equal(frozen, kept[2])
    assert torch.equal(in_bytes, kept[3])


# --- arrays: types and layouts


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
def test_the_same_picture_in_every_type_gives_the_same_sample(dtype: str) -> None:
    byte = noise(40, 50)
    white = {"uint8": 255, "uint16": 65535}.get(dtype, 1)
    array = (byte.astype(np.float64) / 255 * white).round(12).astype(dtype)
    expected = prepare(decode(byte), replace(PLAIN, size=32, crop=32), 3)
    for raw in (array, torch.from_numpy(array).permute(2, 0, 1)):
        sample = prepare(decode(raw), replace(PLAIN, size=32, crop=32), 3)
        assert (sample - expected).abs().max() <= 1
    assert decode(array).dtype == (torch.uint8 if dtype == "uint8" else torch.float32)


def test_false_is_black_and_true_is_white() -> None:
    mask = np.array([[False, True]])
    assert decode(mask).tolist() == decode(torch.from_numpy(mask)).tolist() == [[[0, 255]]]


def test_bfloat16_tensors_that_need_gradients_are_read() -> None:
    tensor = torch.full((3, 2, 2), 0.5, dtype=torch.bfloat16, requires_grad=True)
    pixels = decode(tensor)
    assert pixels.dtype == torch.float32
    assert not pixels.requires_grad


def test_rounding_beyond_zero_and_one_is_clamped() -> None:
    pixels = decode(np.array([[-0.0005, 1.0005]], np.float32))
    assert pixels.tolist() == [[[0, 1]]]


def test_a_stated_layout_is_followed() -> None:
    chw = noise(8, 9).transpose(2, 0, 1)
    hwc = chw.transpose(1, 2, 0)
    expected = torch.from_numpy(chw.copy())
    assert torch.equal(decode(chw, layout="CHW"), expected)
    assert torch.equal(decode(hwc, layout="HWC"), expected)
    assert torch.equal(decode(torch.from_numpy(hwc), layout="HWC"), expected)
    assert torch.equal(decode(chw[0], layout="HW"), expected[:1])
    assert torch.equal(decode(expected[0].T), expected[:1].mT)
    assert decode(expected[0].T).is_contiguous()
    assert decode(np.zeros((3, 7, 5), np.uint8), layout="HWC").shape == (5, 3, 7)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (np.zeros((3, 20, 30), np.uint8), ("20, 30", "as HWC", "layout='CHW'")),
        (np.zeros((1, 28, 28), np.uint8), ("layout='CHW'",)),
        (torch.zeros(20, 30, 3, dtype=torch.uint8), ("as CHW", "layout='HWC'")),
        (np.zeros((2, 20, 30, 3), np.uint8), ("batch", "list")),
        (torch.zeros(2, 3, 20, 30), ("batch", "list")),
        (np.zeros(30, np.uint8), ("(30,)", "HWC")),
        (np.zeros((), np.uint8), ("()",)),
        (np.zeros((0, 20, 3), np.uint8), ("empty",)),
        (torch.zeros(3, 20, 0), ("empty",)),
        (np.zeros((20, 30, 3), np.int64), ("int64", ".astype('uint8')")),
        (np.zeros((20, 30, 3), np.uint32), ("uint32", ".astype('uint8')")),
        (np.zeros((20, 30, 3), np.complex64), ("complex64",)),
        (np.full((20, 30), None), ("object",)),
        (torch.zeros(3, 20, 30, dtype=torch.int64), ("int64", ".to(torch.uint8)")),
        (np.full((20, 30, 3), 255.0), ("255", "divide", "uint8")),
        (torch.full((3, 20, 30), 1.5), ("1.5", "divide")),
        (np.full((20, 30, 3), -2.1), ("-2.1", "normalised")),
        (np.full((20, 30, 3), np.nan), ("NaN",)),
        (torch.full((3, 20, 30), torch.inf), ("infinite",)),
        (Image.fromarray(np.full((2, 2), 255, np.float32)), ("255", "divide")),
        (Image.fromarray(np.full((2, 2), 70000, np.int32)), ("70000", "65535")),
        (Image.fromarray(np.full((2, 2), -1, np.int32)), ("-1", "65535")),
        (Image.new("RGB", (0, 4)), ("0x4",)),
        (None, ("NoneType", "path")),
        (3, ("int", "path")),
        ([[1, 2]], ("list", "path")),
        ({"image": 1}, ("dict",)),
    ],
)
def test_an_unclear_input_is_refused_with_the_remedy(raw: object, words: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        decode(raw)
    check_line(caught.value, *words)


@pytest.mark.parametrize(
    ("raw", "layout", "words"),
    [
        (np.zeros((4, 4), np.uint8), "WHC", ("'WHC'", "'HWC'")),
        (np.zeros((4, 4), np.uint8), "chw", ("'chw'", "'CHW'")),
        ("cat.jpg", "CHW", ("layout='CHW'", "arrays", "str")),
        (Image.new("L", (2, 2)), "HW", ("arrays",)),
    ],
)
def test_a_layout_that_cannot_hold_is_refused(
    raw: object, layout: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(raw, layout=layout)
    check_line(caught.value, *words)


def test_a_stated_layout_with_other_axes_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        decode(np.zeros((4, 4), np.uint8), layout="CHW")
    check_line(caught.value, "(4, 4)", "not CHW")


# --- files that are not whole


def test_each_fault_of_a_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    whole = encoded(Image.fromarray(noise(64, 64)), "JPEG")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "notes.jpg").write_text("these are not pixels")
    (tmp_path / "drawing.eps").write_bytes(encoded(Image.new("L", (2, 2)), "EPS"))
    cases = {
        "empty.jpg": "empty",
        "cut.jpg": "truncated",
        "notes.jpg": "these are not",
        "drawing.eps": "PNG",
        "missing.jpg": "no such file",
        "": "folder",
        "nul\0.jpg": "check the path",
        "x" * 400: "check the path",
    }
    for name, word in cases.items():
        with pytest.raises(DataError) as caught:
            decode(tmp_path / name if name else tmp_path)
        check_line(caught.value, word)
        if 0 < len(name) < 20:
            assert name.partition("\0")[0] in caught.value.line


def test_files_opened_in_text_mode_or_closed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    Image.fromarray(noise(4, 4)).save(path)
    with path.open("rb") as closed:
        pass
    with path.open(encoding="utf-8") as text:
        for raw in (text, closed, io.StringIO("text")):
            with pytest.raises(DataError) as caught:
                decode(raw)
            check_line(caught.value, "'rb'")


def test_a_lazily_opened_image_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes(encoded(Image.fromarray(noise(64, 64)))[:500])
    with Image.open(path) as image, pytest.raises(DataError) as caught:
        decode(image)
    check_line(caught.value, "cut.png", "damaged")


@pytest.mark.parametrize("filter", ["error", "ignore"])
def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch, filter: str) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 if filter == "error" else 20)
    with warnings.catch_warnings():
        warnings.simplefilter(filter)
        with pytest.raises(DataError) as caught:
            decode(encoded(Image.new("RGB", (8, 8))))
    check_line(caught.value, "MAX_IMAGE_PIXELS")


@pytest.mark.parametrize(
    "format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO"]
)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(format: str) -> None:
    whole = encoded(Image.fromarray(noise(16, 16)), format)
    generator = np.random.default_rng(0)
    refused = 0
    for trial in range(60):
        damaged = bytearray(whole)
        for place in generator.integers(0, min(len(whole), 200), 3):
            damaged[place] = generator.integers(256)
        content = bytes(damaged[: generator.integers(len(whole))]) if trial % 2 else bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                assert decode(content).numel() > 0
            except DataError:
                refused += 1
    assert refused > 10


# --- what prepare makes of it


def test_grey_128_has_the_known_values() -> None:
    expected = torch.tensor([0.0741, 0.2052, 0.4265])[:, None, None].expand(3, 224, 224)
    for raw in (
        np.full((300, 400, 3), 128, np.uint8),
        np.full((300, 400), 128, np.uint8),
        torch.full((1, 300, 400), 128, dtype=torch.uint8),
        np.full((300, 400, 3), 128 / 255, np.float32),
        Image.new("L", (400, 300), 128),
    ):
        sample = prepare(decode(raw), IMAGENET, 3)
        torch.testing.assert_close(sample, expected, atol=1e-4, rtol=0)
        assert sample.is_contiguous()


def test_300x400_becomes_232x309_and_is_cut_at_4_and_42() -> None:
    spec = replace(PLAIN, size=232)
    resized = np.zeros(
        (232, 309, 3), np.uint8
    )  # of the final size already, so only the cut is seen
    resized[..., 0] = np.arange(232)[:, None]
    resized[..., 1] = np.arange(309) % 256
    sample = levels(resized, spec).round()
    assert sample.shape == (3, 224, 224)
    assert sample[0, :, 0].tolist() == list(range(4, 228))
    assert sample[1, 0].tolist() == [column % 256 for column in range(42, 266)]
    image = Image.fromarray(noise(300, 400))
    by_hand = np.array(image.resize((309, 232), Image.Resampling.BILINEAR))[4:228, 42:266]
    assert abs(levels(image, spec).transpose(1, 2, 0) - by_hand).max() <= 1e-3


def test_reduction_is_antialiased_for_pillow_images_and_tensors_alike() -> None:  # DAT-06
    row = np.zeros((16, 16), np.uint8)
    row[:, ::4] = 255
    spec = replace(PLAIN, size=4, crop=4, resize="squash")
    for raw in (row, torch.from_numpy(row), Image.fromarray(row), encoded(Image.fromarray(row))):
        assert levels(raw, spec)[0].round().tolist() == [[73, 64, 64, 46]] * 4
    exact = [72.857142857, 63.75, 63.75, 45.535714286]
    assert levels(row.astype(np.float32) / 255, spec)[0, 0].tolist() == pytest.approx(
        exact, abs=1e-4
    )
    assert levels(row, replace(spec, antialias=False)).max() == 0


RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    size=st.integers(1, 70),
    channels=st.sampled_from([1, 3]),
)
def test_any_image_is_resized_as_pillow_does(
    interpolation: str, height: int, width: int, size: int, channels: int
) -> None:
    array = noise(height, width, channels)
    spec = replace(PLAIN, size=size, crop=size, resize="squash", interpolation=interpolation)
    expected = np.array(Image.fromarray(array).resize((size, size), RESAMPLING[interpolation]))
    sample = prepare(decode(array), spec, channels).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(sample, expected.reshape(size, size, channels), atol=1e-4)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(300, 400), (500, 333), (32, 32)])
def test_floats_are_resized_within_one_level_of_8_bits(
    shape: tuple[int, int], interpolation: str
) -> None:
    array = np.array(Image.fromarray(noise(9, 12)).resize(shape[::-1], RESAMPLING["bilinear"]))
    spec = replace(PLAIN, size=232, interpolation=interpolation)
    in_floats = levels(array.astype(np.float32) / 255, spec)
    # Pillow rounds after either axis, and the weights of bicubic add up to more than 1 in magnitude
    assert abs(in_floats - levels(array, spec)).max() <= 1.2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_without_antialiasing_takes_the_neighbours_only(interpolation: str) -> None:
    array = noise(60, 60)
    spec = replace(PLAIN, size=20, crop=20, antialias=False, interpolation=interpolation)
    centres = array[1::3, 1::3].transpose(2, 0, 1)  # 3 to 1: each sample lies on a pixel
    np.testing.assert_allclose(levels(array, spec), centres, atol=1e-4)
    spec = replace(spec, size=25, crop=25)
    in_bytes, in_floats = levels(array, spec), levels(array.astype(np.float32) / 255, spec)
    np.testing.assert_allclose(in_bytes, in_bytes.round(), atol=1e-4)
    assert abs(in_bytes - in_floats).max() <= 0.501


@given(length=st.integers(1, 300), size=st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_nearest_takes_the_pixel_under_each_centre(length: int, size: int) -> None:
    spec = replace(PLAIN, size=size, crop=size, resize="squash", interpolation="nearest")
    row = np.arange(length, dtype=np.uint16)[None]
    found = (prepare(decode(row), spec, 1)[0, 0] / 255 * 65535).round().numpy()
    centre = (np.arange(size) + 0.5) * length / size  # in pixels of the image
    assert (found <= centre + 1e-9).all()
    assert (found + 1 >= centre - 1e-9).all()
    by_pillow = np.array(
        Image.fromarray(row.astype(np.int32)).resize((size, 1), RESAMPLING["nearest"])
    )
    on_border = abs(centre - centre.round()) < 1e-6  # Pillow's rounding decides there
    assert (found == by_pillow[0])[~on_border].all()


def test_the_overshoot_of_bicubic_is_clamped() -> None:
    step = np.zeros((32, 32), np.uint8)
    step[:, 16:] = 255
    spec = replace(PLAIN, size=64, crop=64, interpolation="bicubic")
    for raw in (step, step.astype(np.float32) / 255, step.astype(np.uint16) * 257):
        sample = levels(raw, spec)
        assert sample.min() == 0
        assert sample.max() == pytest.approx(255)
        assert (np.diff(sample[0].astype(int), axis=1) >= -8).all()  # no level wrapped around


PRESETS = [
    ("bilinear", InterpolationMode.BILINEAR, 232, 224),
    ("bilinear", InterpolationMode.BILINEAR, 64, 64),
    ("bicubic", InterpolationMode.BICUBIC, 256, 224),
    ("bilinear", InterpolationMode.BILINEAR, 40, 64),  # the crop exceeds the image
]


@pytest.mark.parametrize(("interpolation", "mode", "size", "crop"), PRESETS)
@pytest.mark.parametrize(
    "shape", [(300, 400), (375, 500), (500, 333), (64, 64), (31, 57), (333, 9)]
)
def test_samples_equal_those_of_torchvision_bit_for_bit(
    shape: tuple[int, int], interpolation: str, mode: InterpolationMode, size: int, crop: int
) -> None:
    image = Image.fromarray(noise(*shape))
    spec = replace(IMAGENET, size=size, crop=crop, interpolation=interpolation)
    preset = Preset(crop_size=crop, resize_size=size, interpolation=mode, antialias=True)
    expected = preset(image)
    for raw in (image, np.array(image), torch.from_numpy(np.array(image)).permute(2, 0, 1)):
        assert torch.equal(prepare(decode(raw), spec, 3), expected)


@given(height=st.integers(1, 50), width=st.integers(1, 50), size=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_size_and_cut_are_those_of_torchvision(height: int, width: int, size: int) -> None:
    image = Image.fromarray(noise(height, width))
    crop = max(1, size - 5)
    preset = Preset(crop_size=crop, resize_size=size, mean=(0.0,), std=(1 / 255,), antialias=True)
    sample = prepare(decode(image), replace(PLAIN, size=size, crop=crop), 3)
    assert torch.equal(sample, preset(image))


def test_a_crop_beyond_the_image_is_filled_with_black() -> None:
    sample = levels(np.full((4, 4), 255, np.uint8), replace(PLAIN, size=4, crop=7))
    expected = np.zeros((7, 7))
    expected[1:5, 1:5] = 255
    np.testing.assert_allclose(sample[0], expected, atol=1e-4)


def test_squash_gives_up_the_aspect_ratio() -> None:
    image = noise(20, 60)
    sample = levels(image, replace(PLAIN, size=16, crop=16, resize="squash"))
    expected = np.array(Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(sample.transpose(1, 2, 0), expected, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2000), (2000, 1), (2, 3), (3000, 2000)])
def test_images_of_any_size_give_a_sample_of_the_one_size(shape: tuple[int, int]) -> None:
    sample = levels(np.full(shape, 77, np.uint8), replace(PLAIN, size=64, crop=56))
    assert sample.shape == (3, 56, 56)
    np.testing.assert_allclose(sample, 77, atol=1e-4)


def test_an_image_that_would_be_huge_resized_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        prepare(decode(np.zeros((1, 65000), np.uint8)), IMAGENET, 3)
    check_line(caught.value, "65000x1", "16640000x256", "cut")


# --- channels


def test_colour_becomes_the_luma_of_pillow() -> None:
    image = noise(64, 64)
    spec = replace(PLAIN, size=64, crop=64)
    expected = np.array(Image.fromarray(image).convert("L"))
    grey = prepare(decode(image), spec, 1)[0].numpy()
    np.testing.assert_allclose(grey, expected, atol=1e-4)
    as_float = prepare(decode(image.astype(np.float32) / 255), spec, 1)[0].numpy()
    assert abs(as_float - expected).max() <= 0.501


@pytest.mark.parametrize("in_channels", [1, 3])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_the_fourth_channel_of_an_array_is_alpha(in_channels: int, dtype: str) -> None:
    image = noise(8, 8, 4)
    array = image if dtype == "uint8" else image.astype(np.float32) / 255
    spec = replace(PLAIN, size=8, crop=8)
    from_array = prepare(decode(array), spec, in_channels)
    from_pillow = prepare(decode(Image.fromarray(image)), spec, in_channels)
    assert (from_array - from_pillow).abs().max() <= 1.001


@pytest.mark.parametrize("in_channels", [2, 4, 5])
def test_other_numbers_of_channels_are_taken_as_they_are(in_channels: int) -> None:
    image = noise(8, 9, in_channels)
    sample = prepare(decode(image), replace(PLAIN, size=8, crop=8), in_channels)
    assert sample.shape == (in_channels, 8, 8)
    np.testing.assert_allclose(sample.permute(1, 2, 0), image[:, :8], atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "in_channels"), [(2, 3), (5, 3), (2, 1), (3, 4), (1, 5), (4, 2)]
)
def test_channels_that_do_not_fit_are_refused(channels: int, in_channels: int) -> None:
    with pytest.raises(DataError) as caught:
        prepare(decode(np.zeros((9, 9, channels), np.uint8)), IMAGENET, in_channels)
    check_line(caught.value, f"{channels} channels", f"takes {in_channels}", "layout")


@pytest.mark.parametrize("in_channels", [1, 2, 4, 5])
def test_an_adapted_network_gets_the_average_of_the_statistics(in_channels: int) -> None:
    mean, std = IMAGENET.statistics(in_channels)
    assert mean == pytest.approx([0.449] * in_channels)
    assert std == pytest.approx([0.226] * in_channels)
    sample = prepare(decode(np.full((9, 9, in_channels), 128, np.uint8)), IMAGENET, in_channels)
    torch.testing.assert_close(sample, torch.full_like(sample, (128 / 255 - 0.449) / 0.226))


# --- the card's table


def table(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "size": 256,
        "resize": "shorter",
        "crop": 224,
        "interpolation": "bilinear",
        "antialias": True,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }
    return {key: value for key, value in (plain | changes).items() if value is not None}


def test_the_table_of_a_card_is_read() -> None:
    found = build(ImagePreprocessing, table(), where="card", error=CardError)
    assert found == IMAGENET


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size": 0}, "size is 0"),
        ({"crop": -1}, "crop is -1"),
        ({"size": None}, "size"),
        ({"size": 1.5}, "size"),
        ({"interpolation": "bilnear"}, "'bilinear'"),
        ({"resize": "longer"}, "'squash'"),
        ({"std": [0.2, 0.2]}, "3 means and 2"),
        ({"mean": [], "std": []}, "0 means"),
        ({"std": [0.2, 0.0, 0.2]}, "above 0"),
        ({"std": [0.2, float("nan"), 0.2]}, "above 0"),
        ({"mean": [0.5, float("inf"), 0.5]}, "finite"),
        ({"antialiased": True}, "'antialias'"),
    ],
)
def test_a_wrong_table_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(CardError) as caught:
        build(ImagePreprocessing, table(**changes), where="card", error=CardError)
    check_line(caught.value, word)
