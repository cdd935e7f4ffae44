from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from vision.segresnet import SegResNet, SegResNetConfig
from zoo.errors import ConfigError, DataError
from zoo.groups import layer_groups

SMALL = {"width": 4, "groups": 2, "blocks_down": (1, 1, 2), "blocks_up": (1, 1)}


def small(**changes: object) -> SegResNet:
    torch.manual_seed(0)
    return SegResNet(SegResNetConfig(**{**SMALL, **changes})).eval()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def keep_their_size(count: int) -> None:
    draw, model = random.Random(0), small()
    for _ in range(count):
        size = [draw.randint(1, 40) for _ in range(3)]
        with torch.no_grad():
            logits = model(normal(1, 1, *size))
        assert logits.shape == (1, 2, *size)
        assert logits.isfinite().all()


def test_sizes_down_to_one_voxel_come_back() -> None:
    keep_their_size(12)
    assert small()(normal(1, 1, 1, 1, 1)).shape == (1, 2, 1, 1, 1)


@pytest.mark.prove
def test_five_hundred_sizes() -> None:
    keep_their_size(500)


def test_the_architecture_of_the_published_brats_weights() -> None:
    # Four sequences, three regions; MONAI's model zoo states 4.7 million parameters.
    with torch.device("meta"):
        model = SegResNet(SegResNetConfig(in_channels=4, num_classes=3))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == 4_702_227
    assert shapes["convInit.conv.weight"] == (16, 4, 3, 3, 3)
    assert shapes["down_layers.1.0.conv.weight"] == (32, 16, 3, 3, 3)
    assert shapes["down_layers.3.4.conv2.conv.weight"] == (128, 128, 3, 3, 3)
    assert shapes["up_samples.0.0.conv.weight"] == (64, 128, 1, 1, 1)
    assert shapes["up_layers.2.0.norm1.bias"] == (16,)
    assert shapes["conv_final.2.conv.bias"] == (3,)


def test_maps_halve_rounded_up_and_groups_hold_every_parameter() -> None:
    model = small()
    maps = model.features(normal(1, 1, 9, 10, 1))
    assert [tuple(m.shape[1:]) for m in maps] == [(4, 9, 10, 1), (8, 5, 5, 1), (16, 3, 3, 1)]
    groups = layer_groups(model)
    assert sum(map(len, groups)) == len(list(model.parameters()))


def test_gradient_checkpointing_changes_no_bit() -> None:
    gradients = []
    for recompute in (False, True):
        model = small(gradient_checkpointing=recompute).train()
        model(normal(2, 1, 8, 8, 8)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_other_input_channels_answer_a_grey_volume_alike() -> None:
    one, three = small(), small(in_channels=3)
    state = one.state_dict()
    three.load_state_dict(state | three.adapt_input(state, 1))
    volume = normal(1, 1, 8, 8, 8)
    torch.testing.assert_close(three(volume.expand(-1, 3, -1, -1, -1)), one(volume))


@pytest.mark.untyped
def test_what_is_no_batch_of_volumes_is_refused() -> None:
    with pytest.raises(DataError, match="one scan becomes a batch"):
        small()(torch.zeros(8, 8, 8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"blocks_down": (1,), "blocks_up": ()}, "it takes two stages"),
        ({"blocks_up": (1,)}, "blocks_up is (1,); it takes one entry for each of the 2 stages"),
        ({"groups": 3}, "3 groups of 4 channels"),
        ({"groups": 4}, "4 groups of 4 channels"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"num_classes": 0}, "num_classes is 0"),
    ],
)
def test_a_wrong_architecture_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert text in caught.value.line
