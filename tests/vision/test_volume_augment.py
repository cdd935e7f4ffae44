from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vision.volume_augment import (
    VolumeRecipe,
    augmented,
    bent,
    blurred,
    cut,
    drawn_turn,
    mirrored,
    patch_start,
    sampled,
    turned_axes,
)
from vision.volumes import VolumePreprocessing
from zoo.errors import ConfigError

EVERYTHING = VolumeRecipe(
    patch=(6, 8, 7), spatial=1.0, intensity=3.0, low_resolution=1.0, mirror=True, foreground=1.0
)
SPEC = VolumePreprocessing(mirror=(0, 1, 2), pairs=((1, 2),))
CUBE = (1.0, 1.0, 1.0)


def case(*shape: int, labelled: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Intensities that are ten times the label, on noise of none."""
    labels = torch.zeros(shape, dtype=torch.long)
    if labelled:
        labels[shape[0] // 2 :, : shape[1] // 2, : shape[2] // 2] = 1
        labels[shape[0] // 2 :, : shape[1] // 2, shape[2] // 2 :] = 2
    return 10 * labels[None].float(), labels


def drawn(recipe: VolumeRecipe, seed: int, *shape: int, spacing=CUBE, spec=SPEC, labelled=True):
    generator = torch.Generator().manual_seed(seed)
    return augmented(*case(*shape, labelled=labelled), recipe, spec, spacing, generator)


@pytest.mark.parametrize("shape", [(12, 13, 14), (1, 1, 1), (3, 20, 2), (6, 8, 7)])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_patch_comes_of_any_volume_empty_ones_too(shape, labelled) -> None:
    for seed in range(8):
        volume, labels = drawn(EVERYTHING, seed, *shape, labelled=labelled)
        assert (tuple(volume.shape), tuple(labels.shape)) == ((1, 6, 8, 7), (6, 8, 7))
        assert volume.isfinite().all()
        assert labelled or not labels.any()


def test_a_sample_is_a_function_of_its_generator() -> None:
    one, two, other = (drawn(EVERYTHING, seed, 12, 13, 14) for seed in (1, 1, 2))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    assert not torch.equal(one[0], other[0])


def test_global_randomness_is_left_alone() -> None:
    before = torch.get_rng_state()
    drawn(EVERYTHING, 3, 12, 13, 14)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_asked_for_is_the_volume_itself() -> None:
    plain = VolumeRecipe()
    volume, labels = drawn(plain, 0, 5, 6, 7, spec=VolumePreprocessing())
    assert torch.equal(volume, case(5, 6, 7)[0])
    assert torch.equal(labels, case(5, 6, 7)[1])


def test_the_window_of_the_card_is_the_patch() -> None:
    volume, _ = drawn(VolumeRecipe(), 0, 9, 9, 9, spec=VolumePreprocessing(window=(4, 5, 6)))
    assert volume.shape == (1, 4, 5, 6)


@pytest.mark.parametrize(
    ("draws", "expected"),
    [
        ([0.9, 0.0, 0.0, 0.0, 0.5, 0.99], (0, 3, 6)),  # anywhere in 0..6
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], (4, 0, 0)),  # around voxel (6, 0, 0): a third before it
        ([0.0, 0.99, 0.99, 0.0, 0.0, 0.0], (6, 1, 6)),  # around (9, 3, 9), as far as it goes
    ],
)
def test_where_a_patch_begins_by_hand(draws: list[float], expected: tuple[int, ...]) -> None:
    labels = torch.zeros(10, 10, 10, dtype=torch.long)
    labels[6, 0, 0], labels[9, 3, 9] = 1, 2
    assert patch_start(labels, (4, 4, 4), 0.5, draws) == expected


def test_a_small_volume_lies_anywhere_in_its_patch() -> None:
    labels = torch.zeros(3, 3, 3, dtype=torch.long)
    found = {patch_start(labels, (5, 3, 3), 1.0, [0, 0, 0, d, 0.5, 0.5]) for d in (0, 0.5, 0.99)}
    assert found == {(-2, 0, 0), (-1, 0, 0), (0, 0, 0)}
    line = torch.arange(3.0).reshape(1, 3, 1, 1)
    assert cut(line, (-1, 0, 0), (5, 1, 1)).flatten().tolist() == [0, 0, 1, 2, 2]


def test_foreground_is_drawn_as_often_as_asked() -> None:
    labels = torch.zeros(40, 40, 40, dtype=torch.long)
    labels[20, 20, 20] = 1
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(2000):
        draws = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
        start = patch_start(labels, (2, 2, 2), 0.33, draws)
        hits += all(s <= 20 < s + 2 for s in start)
    assert abs(hits / 2000 - 0.33) < 0.04


def test_all_labels_of_a_case_are_equally_likely() -> None:
    labels = torch.zeros(30, 4, 4, dtype=torch.long)
    labels[:10], labels[29, 0, 0] = 1, 2
    generator = torch.Generator().manual_seed(0)
    rare = 0
    for _ in range(1000):
        draws = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
        rare += patch_start(labels, (2, 2, 2), 1.0, draws)[0] > 20
    assert abs(rare / 1000 - 0.5) < 0.06


def test_sides_are_swapped_when_left_becomes_right() -> None:
    labels = torch.tensor([[[0, 1, 1, 0, 2, 2]]])
    volume, found = mirrored(labels[None].float(), labels, SPEC, [False, False, True])
    assert found.flatten().tolist() == [1, 1, 0, 2, 2, 0]
    assert volume.flatten().tolist() == [2, 2, 0, 1, 1, 0]
    _, other = mirrored(labels[None].float(), labels, SPEC, [True, True, False])
    assert torch.equal(other, labels)


def test_nobody_mirrors_left_and_right_unless_told_what_that_does() -> None:
    labels = torch.tensor([[[0, 1, 1, 0, 2, 2]]])
    unsaid = VolumePreprocessing(mirror=(0, 1, 2))
    _, found = mirrored(labels[None].float(), labels, unsaid, [True, True, True])
    assert torch.equal(found, labels)
    none = replace(unsaid, pairs=())
    _, found = mirrored(labels[None].float(), labels, none, [True, True, True])
    assert found.flatten().tolist() == [2, 2, 0, 1, 1, 0]


def test_turning_keeps_image_and_labels_together() -> None:
    recipe = VolumeRecipe(patch=(20, 20, 20), spatial=1.0, rotation=40)
    for seed in range(4):
        volume, labels = drawn(recipe, seed, 24, 24, 24)
        apart = (volume[0] - 10 * labels).abs()
        assert (apart < 1e-4).float().mean() > 0.7  # all but what lies at a border of labels


def test_a_quarter_turn_is_exact() -> None:
    # About the first axis only, by just a quarter: the slices are thick.
    recipe = VolumeRecipe(spatial=1.0, rotation=90, scaling=(1.0, 1.0))
    volume = torch.arange(27.0).reshape(1, 3, 3, 3)
    labels = volume[0].long()
    matrix = drawn_turn(recipe, (4.0, 1.0, 1.0), (3, 3, 3), iter([0.0, 0.9999, 1.0, 1.0, 1.0, 0.5]))
    found, same = sampled(volume, labels, (0, 0, 0), (3, 3, 3), matrix)
    torch.testing.assert_close(found[0], volume[0].rot90(-1, (1, 2)), atol=1e-4, rtol=0)
    assert torch.equal(same.float(), found[0].round())


@pytest.mark.parametrize(
    ("spacing", "axes"),
    [((1, 1, 1), (0, 1, 2)), ((3.1, 1, 1), (0,)), ((1, 1, 4), (2,)), ((3, 1, 2), (0, 1, 2))],
)
def test_thick_slices_are_turned_in_their_planes(spacing, axes) -> None:
    assert turned_axes(spacing) == axes


def test_thick_slices_do_not_mix() -> None:
    recipe = VolumeRecipe(spatial=1.0, rotation=180)
    volume = torch.arange(4.0).reshape(1, 4, 1, 1).expand(1, 4, 9, 9)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.zeros(4, 9, 9, dtype=torch.long)
        found, _ = augmented(
            volume, labels, recipe, VolumePreprocessing(), (5.0, 1.0, 1.0), generator
        )
        torch.testing.assert_close(found, volume, atol=1e-5, rtol=0)


def test_turning_is_rigid_in_millimetres() -> None:
    recipe = VolumeRecipe(spatial=1.0, scaling=(1.0, 1.0))
    spacing = torch.tensor((1.0, 2.0, 2.5), dtype=torch.float64)
    matrix = drawn_turn(recipe, (1.0, 2.0, 2.5), (5, 5, 5), iter([0, 0.99, 0.1, 0.7, 0.9, 0.5]))
    mm = matrix * spacing[:, None] / spacing
    torch.testing.assert_close(mm @ mm.T, torch.eye(3, dtype=torch.float64))


def test_intensities_change_and_labels_do_not() -> None:
    volume, labels = case(10, 10, 10)
    recipe = VolumeRecipe(intensity=3.0)
    changed = 0
    for seed in range(10):
        found, same = augmented(
            volume, labels, recipe, SPEC, CUBE, torch.Generator().manual_seed(seed)
        )
        assert torch.equal(same, labels)
        changed += not torch.equal(found, volume)
    assert changed == 10


def test_a_blur_keeps_a_constant_and_a_gamma_mean_and_deviation() -> None:
    constant = torch.full((2, 4, 5, 6), 3.0)
    torch.testing.assert_close(blurred(constant, 1.0), constant)
    noise = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    found = bent(noise, 1.4)
    assert not torch.allclose(found, noise, atol=0.05)
    for statistic in (torch.mean, torch.std):
        torch.testing.assert_close(
            statistic(found, (1, 2, 3)), statistic(noise, (1, 2, 3)), atol=1e-5, rtol=1e-5
        )


def test_a_blur_is_a_gaussian_by_hand() -> None:
    point = torch.zeros(1, 9, 9, 9)
    point[0, 4, 4, 4] = 1.0
    found = blurred(point, 0.5)
    weights = [math.exp(-0.5 * (k / 0.5) ** 2) for k in range(-2, 3)]
    middle = 1 / sum(weights)
    assert found[0, 4, 4, 4].item() == pytest.approx(middle**3, rel=1e-5)
    assert found[0, 5, 4, 4].item() == pytest.approx(middle**3 * math.exp(-2), rel=1e-5)


def test_lost_resolution_is_coarser() -> None:
    volume = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(16, 16, 16, dtype=torch.long)
    recipe = VolumeRecipe(low_resolution=1.0)
    found, _ = augmented(volume, labels, recipe, SPEC, CUBE, torch.Generator().manual_seed(1))
    assert found.diff(dim=3).abs().mean() < 0.9 * volume.diff(dim=3).abs().mean()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"patch": (4, 0, 4)}, "patch is (4, 0, 4)"),
        ({"foreground": 1.5}, "foreground is 1.5"),
        ({"spatial": -0.1}, "spatial is -0.1"),
        ({"rotation": 200.0}, "rotation is 200.0"),
        ({"scaling": (1.4, 0.7)}, "scaling is (1.4, 0.7)"),
        ({"intensity": 4.0}, "intensity is 4.0"),
        ({"low_resolution": 2.0}, "low_resolution is 2.0"),
    ],
)
def test_fields_out_of_range_are_refused(change: dict, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VolumeRecipe(**change)
    assert text in caught.value.line
