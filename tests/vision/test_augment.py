from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from vision.augment import ImageRecipe, _coloured, augmented
from vision.images import ImagePreprocessing, decode, prepare
from zoo.errors import ConfigError
from zoo.training.recipe import Recipe, from_plain, to_plain

# Values of the input are the pixels themselves.
SPEC = ImagePreprocessing(
    size=8,
    resize="shorter",
    crop=8,
    interpolation="bilinear",
    antialias=True,
    mean=(0.0, 0.0, 0.0),
    std=(1 / 255, 1 / 255, 1 / 255),
)


def picture(height: int = 8, width: int = 8, channels: int = 3) -> torch.Tensor:
    numbers = np.random.default_rng(0).permutation(channels * height * width) % 256
    return torch.from_numpy(numbers.astype(np.uint8).reshape(channels, height, width))


def seen(image: torch.Tensor, seed: int, spec: ImagePreprocessing = SPEC, **fields) -> torch.Tensor:
    size = fields.pop("size", None)
    generator = torch.Generator().manual_seed(seed)
    recipe = ImageRecipe(**fields)
    result = augmented(image, spec, len(image), recipe, generator, size)
    return result.round().to(torch.uint8)


EVERYTHING = {
    "crop_padding": 2,
    "flip": True,
    "cutout": 3,
    "random_resized_crop": (0.3, 1.0),
    "color_jitter": 0.4,
}


@pytest.mark.parametrize("recipe", [None, Recipe(), ImageRecipe()])
def test_without_augmentation_an_image_is_prepared_as_for_an_answer(recipe) -> None:
    image = picture(20, 13)
    spec = replace(SPEC, size=12, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    found = augmented(image, spec, 3, recipe, torch.Generator())
    assert torch.equal(found, prepare(image, spec, 3))


@pytest.mark.parametrize("fields", [{name: EVERYTHING[name]} for name in EVERYTHING] + [EVERYTHING])
def test_an_augmentation_is_a_function_of_the_generator(fields) -> None:
    image = picture()
    before, state = image.clone(), torch.get_rng_state()
    found = [seen(image, seed, **fields) for seed in range(20)]
    assert all(torch.equal(a, seen(image, seed, **fields)) for seed, a in enumerate(found))
    assert len({tuple(a.flatten().tolist()) for a in found}) > (
        1 if fields == {"flip": True} else 10
    )
    assert torch.equal(image, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_half_of_the_images_are_mirrored() -> None:
    image = picture()
    found = [seen(image, seed, flip=True) for seed in range(200)]
    mirrored = sum(torch.equal(a, image.flip(-1)) for a in found)
    assert 75 < mirrored < 125
    assert mirrored + sum(torch.equal(a, image) for a in found) == 200


def test_a_shift_reflects_the_border_and_all_shifts_occur() -> None:
    image = picture()
    padded = torch.from_numpy(np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)), mode="reflect"))
    crops = {
        tuple(padded[:, y : y + 8, x : x + 8].flatten().tolist()): (y, x)
        for y in range(5)
        for x in range(5)
    }
    found = {crops[tuple(seen(image, s, crop_padding=2).flatten().tolist())] for s in range(300)}
    assert len(found) == 25


@pytest.mark.parametrize("side", [1, 2, 3])
def test_a_shift_by_more_than_the_image_reflects_again(side: int) -> None:
    image = picture(side, side)
    spec = replace(SPEC, size=side, crop=side)
    values = set(image.flatten().tolist())
    for seed in range(20):
        assert set(seen(image, seed, spec, crop_padding=7).flatten().tolist()) <= values


def test_a_cut_out_is_a_square_of_mean_colour_that_the_border_may_cut() -> None:
    image = torch.full((3, 16, 16), 200, dtype=torch.uint8)
    spec = replace(SPEC, size=16, crop=16, mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    areas = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        found = augmented(image, spec, 3, ImageRecipe(cutout=6), generator)
        outside = torch.isclose(found[0], torch.tensor(200 / 255 - 0.1))
        assert (found[:, ~outside].abs() < 0.5 / 255).all()
        rows, columns = (~outside).any(1).sum(), (~outside).any(0).sum()
        assert (~outside).sum() == rows * columns
        areas.append(int(rows * columns))
    assert max(areas) == 36
    assert 9 <= min(areas) < 36


def test_a_random_crop_has_its_area_and_fills_the_input() -> None:
    # The value of a pixel is its place, so that a crop shows which part it is.
    place = torch.arange(200, dtype=torch.float32)[:, None].expand(200, 100) / 255
    image = torch.stack([place, torch.arange(100).expand(200, 100) / 255, place])
    spec = replace(SPEC, size=9, crop=8, interpolation="nearest")
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        recipe = ImageRecipe(random_resized_crop=(0.1, 0.3))
        found = augmented(image, spec, 3, recipe, generator)
        assert found.shape == (3, 8, 8)
        height, width = (8 / 7 * (found[c].max() - found[c].min()).item() for c in (0, 1))
        assert 0.1 - 0.02 < height * width / 20_000 < 0.3 + 0.02
        assert 3 / 4 - 0.1 < width / height < 4 / 3 + 0.1


def test_a_crop_that_cannot_be_is_the_whole_image() -> None:
    image = picture(2, 60)
    spec = replace(SPEC, size=8, resize="squash")
    found = seen(image, 0, spec, random_resized_crop=(1.0, 1.0))
    assert torch.equal(found, prepare(image, spec, 3).round().to(torch.uint8))


@pytest.mark.parametrize(
    ("factors", "enhance"),
    [
        ((1.3, 1.0, 1.0), ImageEnhance.Brightness),
        ((1.0, 0.6, 1.0), ImageEnhance.Contrast),
        ((1.0, 1.0, 0.4), ImageEnhance.Color),
        ((1.0, 1.0, 1.5), ImageEnhance.Color),
    ],
)
def test_colours_change_as_in_pillow(factors, enhance) -> None:
    pixels = picture(16, 16)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    (factor,) = [f for f in factors if f != 1] or [1.0]
    expected = np.array(enhance(image).enhance(factor)).transpose(2, 0, 1).astype(int)
    assert np.abs(_coloured(pixels.numpy(), *factors).astype(int) - expected).max() <= 2


def test_grey_and_deep_images_are_augmented_too() -> None:
    for image in (picture(9, 9, 1), picture(9, 9, 5), picture(9, 9).float() / 255):
        channels = len(image)
        mean = (0.5,) * channels
        spec = replace(SPEC, mean=mean, std=mean)
        recipe = ImageRecipe(**EVERYTHING)
        found = augmented(image, spec, channels, recipe, torch.Generator().manual_seed(1))
        assert found.shape == (channels, 8, 8)
        assert found.abs().max() <= 1 + 1e-6


def test_a_size_takes_the_place_of_the_cards_and_keeps_its_margin() -> None:
    image = picture(40, 40)
    spec = replace(SPEC, size=20, crop=16)
    found = augmented(image, spec, 3, size=8)
    assert torch.equal(found, prepare(image, replace(spec, size=10, crop=8), 3))
    assert seen(image, 0, spec, size=24, **EVERYTHING).shape == (3, 24, 24)
    assert torch.equal(augmented(image, spec, 3, size=16), prepare(image, spec, 3))


@pytest.mark.prove
def test_a_file_is_augmented_in_well_under_a_millisecond(tmp_path) -> None:
    import time

    Image.fromarray(picture(32, 32).permute(1, 2, 0).numpy()).save(tmp_path / "x.jpg")
    recipe = ImageRecipe(crop_padding=4, flip=True, cutout=8)
    spec, generator = replace(SPEC, size=64, crop=64), torch.Generator()
    best = math.inf
    for _ in range(10):
        began = time.process_time()
        for _ in range(50):
            augmented(decode(tmp_path / "x.jpg"), spec, 3, recipe, generator)
        best = min(best, (time.process_time() - began) / 50)
    assert best < 1e-3


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop_padding": -1},
        {"cutout": -1},
        {"color_jitter": 1.1},
        {"random_resized_crop": (0.0, 1.0)},
        {"random_resized_crop": (0.8, 0.3)},
        {"sizes": ((0.5, 32), (0.4, 64))},
        {"sizes": ((1.0, 0),)},
    ],
)
def test_fields_out_of_range_are_refused(wrong) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"ImageRecipe: {name} is"):
        ImageRecipe(**wrong)


def test_a_recipe_of_images_goes_through_json() -> None:
    recipe = ImageRecipe(sizes=((0.1, 40), (1.0, 64)), **EVERYTHING)
    assert from_plain(ImageRecipe, to_plain(recipe)) == recipe
    with pytest.raises(ConfigError, match="'cutoff'"):
        from_plain(ImageRecipe, {"cutoff": 3})
