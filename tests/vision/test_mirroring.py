from __future__ import annotations

import math

import pytest
import torch

from vision.mirroring import mirror_averaged, swapped_classes, with_uncertainty
from vision.volumes import VolumePreprocessing

BOTH = VolumePreprocessing(mirror=(0, 1, 2), pairs=((1, 2),))


def sided(volume: torch.Tensor) -> torch.Tensor:
    """Foreground is called 1 in the left half of the third axis and 2 in the right one."""
    width = volume.shape[-1]
    right = (torch.arange(width) >= width / 2).expand(volume.shape[2:])
    there = volume[:, 0]
    return 20 * torch.stack((1 - there, there * ~right, there * right), 1)


def test_a_network_that_knows_the_sides_is_not_confused_by_mirrors() -> None:
    volume = (torch.rand(2, 1, 4, 5, 6, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    found = mirror_averaged(sided, BOTH)(volume)
    torch.testing.assert_close(found, sided(volume).softmax(1))
    blind = VolumePreprocessing(mirror=(0, 1, 2), pairs=())
    assert not torch.equal(mirror_averaged(sided, blind)(volume).argmax(1), found.argmax(1))


@pytest.mark.parametrize(
    ("spec", "calls"),
    [
        (VolumePreprocessing(mirror=(0, 1, 2), pairs=()), 8),
        (VolumePreprocessing(mirror=(0, 1, 2)), 4),  # nobody has said what left and right are
        (VolumePreprocessing(mirror=(2,), pairs=()), 2),
        (VolumePreprocessing(), 1),
    ],
)
def test_how_often_a_volume_is_seen(spec: VolumePreprocessing, calls: int) -> None:
    seen = []

    def predict(volume: torch.Tensor) -> torch.Tensor:
        seen.append(volume)
        return torch.cat((volume, -volume), 1)

    volume = torch.rand(1, 1, 2, 3, 4)
    found = mirror_averaged(predict, spec)(volume)
    assert len({bytes(v.numpy().tobytes()) for v in seen}) == len(seen) == calls
    torch.testing.assert_close(found, torch.cat((volume, -volume), 1).softmax(1))


def test_an_average_is_a_mean_of_probabilities_by_hand() -> None:
    def predict(volume: torch.Tensor) -> torch.Tensor:  # log odds 0, then log 3, along the axis
        odds = torch.tensor([0.0, math.log(3)]).expand(volume.shape[0], 2, 1, 1, 2)
        return odds * torch.tensor([0.0, 1.0])[:, None, None, None]

    spec = VolumePreprocessing(mirror=(2,), pairs=())
    found = mirror_averaged(predict, spec)(torch.zeros(1, 1, 1, 1, 2))
    assert found[0, 1].flatten().tolist() == pytest.approx([(0.5 + 0.75) / 2] * 2)


def test_classes_swap_in_pairs() -> None:
    assert swapped_classes(6, ((1, 4), (2, 3))) == [0, 4, 3, 2, 1, 5]


def test_a_guess_is_unsure_and_certainty_is_not() -> None:
    sure, guess = torch.tensor([1.0, 0.0, 0.0]), torch.full((3,), 1 / 3)
    shape = (1, 3, 1, 1, 2)
    predict = with_uncertainty(lambda _: torch.stack((sure, guess), 1).reshape(shape))
    found = predict(torch.zeros(1, 1, 1, 1, 2))
    assert found.shape == (1, 4, 1, 1, 2)
    assert found[0, 3].flatten().tolist() == pytest.approx([0.0, 1.0])
