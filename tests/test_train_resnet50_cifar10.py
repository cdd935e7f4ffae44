"""The plain script computes what a ResNet computes, by other kernels."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo

SCRIPT = Path(__file__).parent.parent / "scripts/train_resnet50_cifar10.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_unfolded_convolution_is_a_convolution(
    script: dict[str, Any], size: int, stride: int
) -> None:
    x = torch.randn(2, size, size + 1, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    ours = script["Unfolded"].apply(x, weight, stride)
    right = F.conv2d(x.permute(0, 3, 1, 2), weight, stride=stride, padding=1).permute(0, 2, 3, 1)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    noise = torch.randn_like(right)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (x, weight), noise),
        torch.autograd.grad(right, (x, weight), noise),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_network_of_products_is_the_network(script: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = zoo.load("resnet50", num_classes=10, depths=(1, 1, 1, 1))
    image = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(image)
        after = script["as_products"](model)(image)
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(replaced) == 3 * 4 + 4  # all convolutions of the blocks, none but the stem left
    assert (after - before).abs().max() < 0.02 * before.abs().max()  # bfloat16 rounds otherwise


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
