from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from vision.unet3d import AttentionGate, UNet3D, UNet3DConfig, kernels_and_strides
from zoo.cards import card
from zoo.errors import ConfigError, DataError
from zoo.groups import layer_groups
from zoo.registry import load

SMALL = {"channels": (2, 3, 4), "depths": (1, 1, 1)}


def small(**changes: object) -> UNet3D:
    torch.manual_seed(0)
    return UNet3D(UNet3DConfig(**{**SMALL, **changes})).eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sizes_drawn(count: int) -> list[tuple[int, int, int]]:
    draw = random.Random(0)
    return [(draw.randint(1, 40), draw.randint(1, 40), draw.randint(1, 40)) for _ in range(count)]


def own_size_or_the_one_error(model: UNet3D, sizes: list[tuple[int, int, int]]) -> int:
    """Number of refusals; every other size comes out as it goes in."""
    refused = 0
    for size in sizes:
        volume = normal(1, 1, *size)
        if all(s <= m for s, m in zip(size, model.size_multiple, strict=True)):
            with pytest.raises(DataError, match="one voxel at the coarsest map"):
                model(volume)
            refused += 1
            continue
        with torch.no_grad():
            logits = model(volume)
        assert logits.shape == (1, 2, *size)
        assert logits.isfinite().all()
    return refused


@pytest.mark.parametrize("attention", [False, True])
def test_any_size_comes_back_and_one_voxel_at_the_bottom_is_refused(attention: bool) -> None:
    model = small(attention=attention)
    drawn = [*sizes_drawn(12), (1, 1, 5), (4, 4, 4), (1, 1, 1), (5, 1, 1), (17, 17, 17)]
    assert own_size_or_the_one_error(model, drawn) == 2


@pytest.mark.prove
@pytest.mark.parametrize("attention", [False, True])
def test_five_hundred_sizes(attention: bool) -> None:
    model = small(attention=attention, channels=(2, 2, 2, 2), depths=(1, 1, 1, 1))
    assert own_size_or_the_one_error(model, sizes_drawn(500)) >= 1


def test_the_error_says_what_is_too_small() -> None:
    with pytest.raises(DataError) as caught:
        small()(normal(1, 1, 4, 3, 2))
    assert caught.value.line == (
        "a volume of (4, 3, 2) voxels is one voxel at the coarsest map; it takes more than "
        "(4, 4, 4) along at least one axis: pad it, or take fewer stages"
    )


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("volume", "text"),
    [
        (torch.zeros(8, 8, 8), r"shape \(8, 8, 8\); the model takes \(batch, channels, depth"),
        (torch.zeros(1, 2, 8, 8, 8), r"2 channels and the model takes 1"),
        (torch.zeros(1, 1, 8, 8, 8, dtype=torch.int16), "is int16; the model takes normalised"),
    ],
)
def test_what_is_no_batch_of_volumes_is_refused(volume: Tensor, text: str) -> None:
    model = small()
    with pytest.raises(DataError, match=text):
        model(volume)


def test_anisotropic_strides_keep_the_thick_axis() -> None:
    model = small(
        kernels=((1, 3, 3), (3, 3, 3), (3, 3, 3)), strides=((1,) * 3, (1, 2, 2), (2,) * 3)
    )
    assert model.size_multiple == (2, 4, 4)
    maps = model.features(normal(1, 1, 5, 9, 10))
    assert [tuple(m.shape[2:]) for m in maps] == [(5, 9, 10), (5, 5, 5), (3, 3, 3)]
    assert model.stem[0].weight.shape[2:] == (1, 3, 3)
    assert model(normal(1, 1, 5, 9, 10)).shape == (1, 2, 5, 9, 10)


def test_a_kernel_of_one_slice_does_not_mix_slices() -> None:
    stem = small(kernels=((1, 3, 3), (3, 3, 3), (3, 3, 3))).stem[0]
    volume = normal(1, 1, 4, 6, 6)
    changed = volume.clone()
    changed[:, :, 2] += 1
    same = (stem(volume) == stem(changed)).flatten(3).all(3)[0, 0]
    assert same.tolist() == [True, True, False, True]


def test_coarser_logits_come_in_training_only() -> None:
    model = small(channels=(2, 3, 4, 5), depths=(1,) * 4, deep_supervision=True)
    volume = normal(2, 1, 9, 10, 17)
    assert isinstance(model(volume), Tensor)
    shapes = [tuple(logits.shape) for logits in model.train()(volume)]
    assert shapes == [(2, 2, 9, 10, 17), (2, 2, 5, 5, 9), (2, 2, 3, 3, 5)]
    for logits in model(volume):
        logits.sum().backward(retain_graph=True)
    assert all(p.grad is not None for p in model.deep_heads.parameters())


def test_gate_maps_have_the_volume_s_size_and_are_weights() -> None:
    model = small(attention=True)
    gates = model.gate_maps(normal(2, 1, 9, 8, 7))
    assert [tuple(g.shape) for g in gates] == [(2, 1, 9, 8, 7)] * 2
    assert all(bool(((g > 0) & (g < 1)).all()) for g in gates)
    with pytest.raises(ConfigError, match="no attention gates"):
        small().gate_maps(normal(1, 1, 9, 8, 7))


def test_a_gate_weighs_by_hand() -> None:
    gate = AttentionGate(2)  # one inner channel
    nn.init.constant_(gate.encoder.weight, 1.0)
    nn.init.constant_(gate.decoder.weight, 0.5)
    nn.init.constant_(gate.decoder.bias, -1.0)
    nn.init.constant_(gate.psi.weight, 2.0)
    nn.init.constant_(gate.psi.bias, -3.0)
    skip = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1, 1)
    gating = torch.tensor([3.0, -1.0]).reshape(1, 2, 1, 1, 1)
    # relu(1 + 2 + (3 - 1) / 2 - 1) = 3; sigmoid(2 * 3 - 3) = sigmoid(3)
    assert gate(skip, gating).item() == pytest.approx(0.9525741268)


def test_a_closed_gate_lets_nothing_of_the_encoder_through() -> None:
    model = small(attention=True)
    for stage in model.decoder:
        nn.init.zeros_(stage.gate.psi.weight)
        nn.init.constant_(stage.gate.psi.bias, -200.0)
    stage = model.decoder[-1]
    coarse = normal(1, 3, 4, 4, 4)
    one, weights = stage(coarse, normal(1, 2, 8, 7, 8, seed=1))
    other, _ = stage(coarse, normal(1, 2, 8, 7, 8, seed=2))
    assert weights.max() == 0
    assert torch.equal(one, other)


def test_fresh_gates_pass_what_they_see() -> None:
    gates = small(attention=True).gate_maps(normal(1, 1, 12, 12, 12))
    assert min(g.mean().item() for g in gates) > 0.75


@pytest.mark.parametrize(
    ("spacing", "size", "kernels", "strides"),
    [
        # Voxels are (5, 1, 1), (5, 2, 2), (5, 4, 4), (10, 8, 8), (20, 16, 16) mm; the last halving
        # leaves out the axis that has 5 voxels.
        (
            (5.0, 1.0, 1.0),
            (20, 160, 160),
            ((1, 3, 3), (1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)),
            ((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2)),
        ),
        ((1.0, 1.0, 1.0), (40, 56, 40), ((3, 3, 3),) * 4, ((1, 1, 1), *((2, 2, 2),) * 3)),
        # One axis alone is halved from three times the least size on.
        ((1.0, 1.0, 1.0), (4, 4, 12), ((3, 3, 3),) * 2, ((1, 1, 1), (1, 1, 2))),
        ((1.0, 1.0, 1.0), (4, 4, 11), ((3, 3, 3),), ((1, 1, 1),)),
    ],
)
def test_kernels_and_strides_follow_the_spacing(
    spacing: tuple[float, float, float],
    size: tuple[int, int, int],
    kernels: object,
    strides: object,
) -> None:
    assert kernels_and_strides(spacing, size) == (kernels, strides)


def test_kernels_and_strides_of_a_turned_volume_are_turned() -> None:
    kernels, strides = kernels_and_strides((1.0, 1.0, 5.0), (160, 160, 20))
    turned = kernels_and_strides((5.0, 1.0, 1.0), (20, 160, 160))
    assert (tuple(k[::-1] for k in kernels), tuple(s[::-1] for s in strides)) == turned


def test_kernels_and_strides_refuse_no_length() -> None:
    with pytest.raises(ConfigError, match="three numbers above 0"):
        kernels_and_strides((0.0, 1.0, 1.0), (20, 160, 160))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"channels": (8,), "depths": (1,)}, "at least two stages"),
        ({"depths": (1, 1)}, "depths is (1, 1); it takes one entry for each of the 3 stages"),
        ({"depths": (1, 0, 1)}, "depths is (1, 0, 1)"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"kernels": ((3, 3, 3), (3, 2, 3), (3, 3, 3))}, "it takes odd numbers"),
        ({"strides": ((1, 1, 1), (2, 2, 2))}, "one entry for each of the 3 stages"),
        ({"strides": ((2, 2, 2),) * 3}, "the first stride is (2, 2, 2); it is (1, 1, 1)"),
    ],
)
def test_a_wrong_architecture_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert text in caught.value.line


def test_gradient_checkpointing_changes_no_bit() -> None:
    volume = normal(2, 1, 8, 8, 8)
    gradients = []
    for recompute in (False, True):
        model = small(gradient_checkpointing=recompute).train()
        model(volume).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_other_input_channels_answer_a_grey_volume_alike() -> None:
    one = small()
    three = small(in_channels=3)
    state = one.state_dict()
    three.load_state_dict(state | three.adapt_input(state, 1))
    volume = normal(1, 1, 8, 8, 8)
    torch.testing.assert_close(three(volume.expand(-1, 3, -1, -1, -1)), one(volume))
    assert one.adapt_input(state, 1) == {}


@pytest.mark.parametrize("name", ["unet3d", "attention_unet3d"])
def test_a_card_has_its_architecture_and_an_order(name: str) -> None:
    model = load(name, **card(name).check.config)
    assert model.config.attention == (name == "attention_unet3d")
    groups = layer_groups(model)
    assert groups[0] == ["stem.0.weight", "stem.1.weight", "stem.1.bias"]
    assert groups[-1] == ["head.weight", "head.bias"]
    assert all(groups)
