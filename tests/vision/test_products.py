"""Convolutions as products of matrices are convolutions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import zoo
from vision.augment import ImageRecipe
from vision.products import Unfolded, as_products
from zoo.training.run import prepare_model


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_unfolded_convolution_is_a_convolution(size: int, stride: int) -> None:
    x = torch.randn(2, size, size + 1, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    ours = Unfolded.apply(x, weight, stride)
    right = F.conv2d(x.permute(0, 3, 1, 2), weight, stride=stride, padding=1).permute(0, 2, 3, 1)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    noise = torch.randn_like(right)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (x, weight), noise),
        torch.autograd.grad(right, (x, weight), noise),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_network_of_products_is_the_network() -> None:
    torch.manual_seed(0)
    model = zoo.load("resnet50", num_classes=10, depths=(1, 1, 1, 1))
    image = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(image)
        after = as_products(model)(image)
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(replaced) == 3 * 4 + 4  # all convolutions of the blocks, none but the stem left
    assert (after - before).abs().max() < 0.02 * before.abs().max()  # bfloat16 rounds otherwise


def test_what_is_no_plain_convolution_stays_as_it_is() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(256, 8, 3, padding=1),
        torch.nn.Conv2d(256, 8, 3, bias=False),
        torch.nn.Conv2d(256, 8, 3, padding=2, dilation=2, bias=False),
        torch.nn.Conv2d(256, 8, 3, padding=1, groups=2, bias=False),
        torch.nn.Conv2d(256, 8, 3, padding=1, stride=(1, 2), bias=False),
        torch.nn.Conv2d(256, 8, 3, padding=1, padding_mode="reflect", bias=False),
    )
    as_products(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_recipe_trains_by_them_and_a_copy_has_its_own_weights() -> None:
    torch.manual_seed(0)
    model = zoo.load("resnet50", num_classes=10, depths=(1, 1, 1, 1))
    prepare_model(model, ImageRecipe(products=True), torch.device("cpu"))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    image = torch.randn(2, 3, 32, 32)
    for precision in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            assert model(image).abs().max() > 0
            assert other(image).abs().max() == 0
