from __future__ import annotations

import math
import random
import sys

import pytest
import torch
from torch import Tensor

from vision.sliding import (
    axis_windows,
    gaussian,
    most_probable,
    peak_bytes,
    sliding_window,
    sliding_window_mask,
    starts,
)
from zoo.errors import ConfigError, DataError


def same(window: Tensor) -> Tensor:
    return window


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("size", "window", "overlap", "expected"),
    [
        (110, 64, 0.5, (0, 23, 46)),
        (64, 64, 0.5, (0,)),
        (10, 64, 0.5, (0,)),
        (5, 1, 0.25, (0, 1, 2, 3, 4)),  # a step of 3/4 is a step of 1
        (8, 4, 0.25, (0, 2, 4)),
        (9, 4, 0.5, (0, 2, 3, 5)),  # 5/3 and 10/3 rounded
        (6, 3, 0.0, (0, 3)),
    ],
)
def test_starts(size: int, window: int, overlap: float, expected: tuple[int, ...]) -> None:
    assert starts(size, window, overlap) == expected


def test_a_tenth_of_a_hundred_is_ten() -> None:
    found = starts(1000, 100, 0.9)
    assert found == tuple(range(0, 901, 10))
    assert len(found) == 91


def test_a_window_of_four_by_hand() -> None:
    # exp(-(1.5 / 0.5)² / 2) and exp(-(0.5 / 0.5)² / 2)
    expected = [0.011108996538242306, 0.6065306597126334]
    assert gaussian(4).tolist() == pytest.approx(expected + expected[::-1], rel=1e-6)


@pytest.mark.parametrize("window", [1, 2, 5, 32, 128])
def test_a_window_weighs_symmetrically_and_nothing_weighs_nothing(window: int) -> None:
    bell = gaussian(window)
    assert torch.equal(bell, bell.flip(0))
    assert bell.min() >= math.exp(-8)
    assert bell.min() ** 3 > 0


def test_weights_along_an_axis_add_up_to_one() -> None:
    draw = random.Random(0)
    for _ in range(200):
        size, window = draw.randint(1, 90), draw.randint(1, 60)
        axis = axis_windows(size, window, draw.choice([0.0, 0.25, 0.5, 0.75, 0.9]))
        total = torch.zeros(size)
        for start, weights in zip(axis.starts, axis.weights, strict=True):
            total[start : start + axis.window] += weights
        assert (total - 1).abs().max() <= 1e-6, (size, window)


@pytest.mark.parametrize("size", [(8, 8, 5), (3, 9, 17), (20, 4, 4), (1, 1, 1)])
@pytest.mark.parametrize("window", [(4, 4, 1), (8, 8, 8), (32, 2, 5)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
def test_the_identity_gives_the_volume(
    size: tuple[int, int, int], window: tuple[int, int, int], overlap: float
) -> None:
    volume = normal(2, 3, *size)
    found = sliding_window(same, volume, window, overlap=overlap, batch_size=3)
    assert (found - volume).abs().max() <= 1e-6 * volume.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_the_identity_gives_the_volume_in_any_dtype(dtype: torch.dtype) -> None:
    volume = (normal(1, 2, 20, 18, 23) * 10 + 100).to(dtype)
    found = sliding_window(same, volume, (8, 8, 8))
    assert found.dtype == torch.float32
    assert (found - volume.float()).abs().max() <= 1e-6 * volume.float().abs().max()


def test_a_window_of_one_voxel_visits_all_45_places() -> None:
    seen = []

    def predict(window: Tensor) -> Tensor:
        seen.append(tuple(window.shape))
        return window

    volume = torch.arange(320.0).reshape(1, 1, 8, 8, 5)
    found = sliding_window(predict, volume, (4, 4, 1), overlap=0.25)
    assert seen == [(1, 1, 4, 4, 1)] * 45
    assert (found - volume).abs().max() <= 1e-6 * 319


def test_windows_weigh_by_hand() -> None:
    # Windows of 4 at 0 and 2, which say 0 and 1; voxels 2 and 3 are seen by both.
    said = iter([0.0, 1.0])
    found = sliding_window(
        lambda window: torch.full_like(window, next(said)), torch.zeros(1, 1, 1, 1, 6), (1, 1, 4)
    )
    middle, end = math.exp(-0.5), math.exp(-4.5)
    share = end / (end + middle)
    assert found.flatten().tolist() == pytest.approx([0, 0, share, 1 - share, 1, 1])


def test_an_axis_shorter_than_its_window_is_filled_by_its_last_voxel() -> None:
    seen = []

    def predict(window: Tensor) -> Tensor:
        seen.append(window.clone())
        return window * 2

    volume = torch.arange(6.0).reshape(1, 1, 1, 2, 3)
    found = sliding_window(predict, volume, (2, 2, 4))
    assert torch.equal(found, volume * 2)
    (window,) = seen
    assert window.flatten().tolist() == [0, 1, 2, 2, 3, 4, 5, 5] * 2


def classes_of(window: Tensor) -> Tensor:
    """Five answers a voxel that depend on its window."""
    mean = window.mean((2, 3, 4), keepdim=True)
    return torch.cat([torch.sin((k + 1) * (window + mean)) for k in range(5)], 1)


@pytest.mark.parametrize("size", [(31, 12, 9), (7, 20, 20), (16, 5, 30)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.7])
def test_streaming_is_the_full_answer_bit_for_bit(
    size: tuple[int, int, int], overlap: float
) -> None:
    volume = normal(2, 1, *size)
    full = sliding_window(classes_of, volume, (8, 8, 8), overlap=overlap)
    mask = sliding_window_mask(classes_of, volume, (8, 8, 8), overlap=overlap, batch_size=4)
    assert mask.dtype == torch.uint8
    assert torch.equal(mask, full.argmax(1).to(torch.uint8))
    assert len(mask.unique()) == 5


def test_a_volume_alone_has_the_answer_it_has_in_a_batch() -> None:
    volume = normal(3, 1, 11, 12, 13)
    together = sliding_window(classes_of, volume, (8, 8, 8))
    for row in range(3):
        alone = sliding_window(classes_of, volume[row : row + 1], (8, 8, 8))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)


def test_bytes_by_hand() -> None:
    # 64 classes, slab 48 * 128 * 128, one window of 48³ with its input, one byte a voxel
    expected = 4 * (64 * 48 * 128**2 + 65 * 48**3) + 128**3
    assert peak_bytes((1, 1, 128, 128, 128), 64, (48, 48, 48)) == expected
    assert expected < 400e6 - 2**21


@pytest.mark.prove
def test_64_classes_of_128_stay_under_400_megabytes(fresh_python) -> None:
    code = (
        "import resource, torch\n"
        "from vision.sliding import sliding_window_mask\n"
        "torch.set_num_threads(1)\n"
        "volume = torch.rand(1, 1, 128, 128, 128)\n"
        "predict = lambda w: w.expand(-1, 64, -1, -1, -1)\n"
        "sliding_window_mask(predict, volume[..., :8, :8, :8], (8, 8, 8))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "sliding_window_mask(predict, volume, (48, 48, 48))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(fresh_python(code)) * unit < 400e6


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"volume": torch.zeros(8, 8, 8)}, DataError, "shape (8, 8, 8)"),
        ({"volume": torch.zeros(1, 1, 0, 8, 8)}, DataError, "at least one voxel"),
        ({"window": (8, 8)}, ConfigError, "window is (8, 8)"),
        ({"window": (8, 0, 8)}, ConfigError, "window is (8, 0, 8)"),
        ({"overlap": 1.0}, ConfigError, "overlap is 1.0"),
        ({"batch_size": 0}, ConfigError, "batch_size is 0"),
        ({"predict": lambda w: w[..., 1:]}, DataError, "answers of (1, 1, 8, 8, 7)"),
    ],
)
@pytest.mark.untyped
def test_what_cannot_be_is_refused(change: dict, error: type[Exception], text: str) -> None:
    values = {"predict": same, "volume": torch.zeros(1, 1, 8, 8, 8), "window": (8, 8, 8), **change}
    with pytest.raises(error) as caught:
        sliding_window(**values)
    assert text in caught.value.line


def test_a_mask_of_bytes_holds_256_classes() -> None:
    with pytest.raises(DataError, match="a mask of bytes holds 256"):
        sliding_window_mask(
            lambda w: w.expand(-1, 257, -1, -1, -1), torch.zeros(1, 1, 2, 2, 2), (2, 2, 2)
        )


@pytest.mark.parametrize("classes", [1, 2, 7, 300])
def test_the_most_probable_class_is_argmax(classes: int) -> None:
    # Few values, so that many are equal: the first class wins, as in argmax.
    answers = torch.randint(
        0, 4, (2, classes, 3, 4, 5), generator=torch.Generator().manual_seed(0)
    ).float()
    assert torch.equal(most_probable(answers).long(), answers.argmax(1))
    assert not most_probable(answers[:, :1]).any()
