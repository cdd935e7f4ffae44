from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from vision.vnet import Down, Residual, VNet, VNetConfig
from zoo.errors import ConfigError, DataError
from zoo.groups import layer_groups

SMALL = {"width": 2, "depths": (1, 1, 2), "decoder_depths": (2, 1)}


def small(**changes: object) -> VNet:
    torch.manual_seed(0)
    return VNet(VNetConfig(**{**SMALL, **changes})).eval()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def own_size_or_the_one_error(sizes: list[tuple[int, ...]]) -> int:
    model, refused = small(), 0
    for size in sizes:
        if max(size) <= 4:
            with pytest.raises(DataError, match="one voxel at the coarsest map"):
                model(normal(1, 1, *size))
            refused += 1
            continue
        with torch.no_grad():
            logits = model(normal(1, 1, *size))
        assert logits.shape == (1, 2, *size)
        assert logits.isfinite().all()
    return refused


def drawn(count: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randint(1, 40) for _ in range(3)) for _ in range(count)]


def test_any_size_comes_back_and_one_voxel_at_the_bottom_is_refused() -> None:
    assert own_size_or_the_one_error([*drawn(6), (4, 4, 4), (1, 2, 3), (1, 1, 5)]) == 2


@pytest.mark.prove
def test_five_hundred_sizes() -> None:
    own_size_or_the_one_error(drawn(500))


def test_without_norm_one_voxel_is_enough() -> None:
    assert small(norm=False)(normal(1, 1, 1, 1, 1)).shape == (1, 2, 1, 1, 1)


@pytest.mark.parametrize(("size", "expected"), [(4, [3, 7]), (5, [3, 7, 5]), (1, [1])])
def test_an_odd_size_is_halved_upwards(size: int, expected: list[int]) -> None:
    down = Down(1, 1)
    nn.init.ones_(down.conv.weight)
    nn.init.zeros_(down.conv.bias)
    volume = torch.arange(1.0, size + 1).reshape(1, 1, 1, 1, size)
    assert down(volume).flatten().tolist() == expected


def test_the_input_is_added_before_the_rectifier() -> None:
    stage = Residual(1, 2, 1, norm=False)
    nn.init.zeros_(stage.convs[0].weight)
    nn.init.zeros_(stage.convs[0].bias)
    volume = torch.tensor([-4.0, 2.0]).reshape(1, 1, 1, 1, 2)
    # PReLU begins with a slope of 1/4, and one channel is repeated for both.
    assert stage(volume).flatten().tolist() == [-1.0, 2.0, -1.0, 2.0]


def test_the_paper_s_widths() -> None:
    with torch.device("meta"):
        model = VNet(VNetConfig(norm=False))
    assert [stage.convs[-1].out_channels for stage in model.encoder] == [32, 64, 128, 256]
    assert [stage.convs[-1].out_channels for stage in model.decoder] == [256, 128, 64, 32]
    assert [len(stage.convs) for stage in (model.stem, *model.encoder)] == [1, 2, 3, 3, 3]
    assert [len(stage.convs) for stage in model.decoder] == [3, 3, 2, 1]
    assert all(c.kernel_size == (5, 5, 5) for stage in model.decoder for c in stage.convs)


def test_groups_hold_every_parameter_and_checkpointing_changes_no_bit() -> None:
    gradients = []
    for recompute in (False, True):
        model = small(gradient_checkpointing=recompute).train()
        assert sum(map(len, layer_groups(model))) == len(list(model.parameters()))
        model(normal(2, 1, 8, 8, 8)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_other_input_channels_answer_a_grey_volume_alike() -> None:
    one, two = small(), small(in_channels=2)
    state = one.state_dict()
    two.load_state_dict(state | two.adapt_input(state, 1))
    volume = normal(1, 1, 8, 8, 8)
    torch.testing.assert_close(two(volume.expand(-1, 2, -1, -1, -1)), one(volume))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"depths": (1,), "decoder_depths": ()}, "at least two stages"),
        ({"decoder_depths": (1, 1, 1)}, "one entry for each of the 2 stages"),
        ({"in_channels": 3}, "a multiple of the 3 input channels"),
        ({"width": 0}, "width is 0"),
    ],
)
def test_a_wrong_architecture_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert text in caught.value.line
