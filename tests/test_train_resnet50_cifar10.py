"""The plain script: its augmentation, and that it trains."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo

SCRIPT = Path(__file__).parent.parent / "scripts/train_resnet50_cifar10.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_augmented_images_are_shifted_mirrored_and_cut(script: dict[str, Any]) -> None:
    image = torch.arange(3 * 32 * 32).view(1, 3, 32, 32).expand(64, -1, -1, -1) % 251
    generator = torch.Generator().manual_seed(0)
    plain = script["augmented"](image, generator, 0)
    assert plain.shape == image.shape
    assert len({tuple(one.flatten().tolist()) for one in plain}) > 48
    cut = script["augmented"](image, generator, 8)
    grey = 255 * torch.tensor(script["CIFAR"][0])[:, None, None]
    covered = (cut == grey).all(dim=1).sum(dim=(1, 2))
    assert covered.max() <= 49
    assert covered.min() >= 9


def test_a_box_of_each_image_is_anothers(script: dict[str, Any]) -> None:
    images = torch.arange(8.0)[:, None, None, None].expand(8, 3, 32, 32)
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(50):
        batch, others, kept = script["mixed"](images, generator)
        assert sorted(others.tolist()) == list(range(8))
        for number, (image, other) in enumerate(zip(batch, others.tolist(), strict=True)):
            assert set(image.unique().tolist()) <= {number, other}
            if other != number:
                assert float((image == number).float().mean()) == pytest.approx(kept, abs=1e-6)
        shares.append(kept)
    assert min(shares) < 0.2
    assert max(shares) > 0.8


def test_a_phase_trains(script: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (256, 3, 32, 32), generator=generator).byte()
    target = torch.randint(10, (256,), generator=generator)
    phase = script["Phase"](1, 1e-3, 1, ((1.0, 32),), 1.0, 1.0)
    start = zoo.load("resnet50.cifar10", pretrained=False)
    found = script["train_phase"](start, phase, images, target, generator)
    assert not found.training
    for name, tensor in found.state_dict().items():
        assert tensor.isfinite().all(), name
        assert not torch.equal(tensor, start.state_dict()[name]), name
