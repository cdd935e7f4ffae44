from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zoo
from vision.medicalnet import BasicBlock, MedicalNet, MedicalNetConfig, ZeroPadded
from zoo import tensorfile
from zoo.errors import ConfigError, DataError, WeightsError
from zoo.groups import layer_groups
from zoo.registry import config_class

DEPTHS = (10, 18, 34, 50, 101, 152)
# Millions, of the body with its running statistics; MedicalNet's README.
PUBLISHED = dict(zip(DEPTHS, (14.36, 32.99, 63.31, 46.21, 85.31, 117.51), strict=True))


def small(**changes: object) -> MedicalNet:
    torch.manual_seed(0)
    return MedicalNet(MedicalNetConfig(**{"width": 4, **changes})).eval()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def keep_their_size(count: int, **changes: object) -> None:
    draw, model = random.Random(0), small(**changes)
    for _ in range(count):
        size = [draw.randint(1, 40) for _ in range(3)]
        with torch.no_grad():
            logits = model(normal(1, 1, *size))
        assert logits.shape == (1, 2, *size)
        assert logits.isfinite().all()


@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_sizes_down_to_one_voxel_come_back(block: str, shortcut: str) -> None:
    keep_their_size(4, block=block, shortcut=shortcut)
    assert small(block=block)(normal(1, 1, 1, 1, 1)).shape == (1, 2, 1, 1, 1)


@pytest.mark.prove
def test_five_hundred_sizes() -> None:
    keep_their_size(500)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_card_has_the_published_architecture(depth: int) -> None:
    card = zoo.card(f"medicalnet_resnet{depth}")
    config = config_class(MedicalNet, card)(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in card.config.items()
        }
    )
    with torch.device("meta"):
        model = MedicalNet(config)
    numbers = [
        tensor.numel()
        for name, tensor in model.state_dict().items()
        if not name.startswith("conv_seg") and not name.endswith("num_batches_tracked")
    ]
    assert sum(numbers) / 1e6 == pytest.approx(PUBLISHED[depth], abs=0.005)
    assert config.shortcut == ("A" if depth in (18, 34) else "B")


def test_the_last_two_stages_are_dilated_in_place_of_strides() -> None:
    model = small()
    maps = model.features(normal(1, 1, 33, 40, 16))
    assert [tuple(m.shape[2:]) for m in maps] == [(9, 10, 4), *[(5, 5, 2)] * 3]
    for stage, dilation in ((model.layer3, 2), (model.layer4, 4)):
        for conv in (stage[0].conv1, stage[0].conv2):
            assert conv.dilation == conv.padding == (dilation,) * 3


def test_keys_are_those_of_medicalnet() -> None:
    keys = set(small(block="bottleneck").state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv3.weight",
        "layer2.0.downsample.0.weight",
        "layer4.0.bn3.bias",
        "conv_seg.0.bias",
    } <= keys
    assert not any("downsample" in key for key in small(shortcut="A").state_dict())


def test_a_shortcut_of_zeros_by_hand() -> None:
    x = torch.arange(24.0).reshape(1, 1, 2, 3, 4)
    found = ZeroPadded(1, 3, 2)(x)
    assert found.shape == (1, 3, 1, 2, 2)
    assert found[0, 0].flatten().tolist() == [0, 2, 8, 10]
    assert not found[:, 1:].any()


def test_a_block_without_a_branch_is_its_shortcut() -> None:
    block = BasicBlock(2, 2, 1, 1, None).eval()
    block.bn2.weight.data.zero_()
    x = normal(1, 2, 3, 3, 3)
    torch.testing.assert_close(block(x), x.relu())


def test_published_files_have_a_prefix_and_no_head(tmp_path: Path) -> None:
    model = zoo.load("medicalnet_resnet10", width=4)
    body = {f"module.{k}": v for k, v in model.state_dict().items() if "conv_seg" not in k}
    path = tmp_path / "resnet_10.safetensors"
    tensorfile.write(path, body, {})
    loaded = zoo.load("medicalnet_resnet10", pretrained=path, width=4, num_classes=3)
    assert all(name.startswith("conv_seg.") for name in loaded.load_report.fresh)
    for name, tensor in loaded.state_dict().items():
        if not name.startswith("conv_seg"):
            assert torch.equal(tensor, model.state_dict()[name])
    with pytest.raises(WeightsError):
        zoo.load("medicalnet_resnet10", pretrained=path, width=4)


def test_groups_hold_every_parameter() -> None:
    model = small(depths=(2, 1, 1, 1))
    assert sum(map(len, layer_groups(model))) == len(list(model.parameters()))


def test_gradient_checkpointing_changes_no_bit() -> None:
    gradients = []
    for recompute in (False, True):
        model = small(gradient_checkpointing=recompute).train()
        model(normal(2, 1, 16, 16, 16)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_other_input_channels_answer_a_grey_volume_alike() -> None:
    one, three = small(), small(in_channels=3)
    state = one.state_dict()
    three.load_state_dict(state | three.adapt_input(state, 1))
    volume = normal(1, 1, 9, 9, 9)
    torch.testing.assert_close(three(volume.expand(-1, 3, -1, -1, -1)), one(volume))


@pytest.mark.untyped
def test_what_is_no_batch_of_volumes_is_refused() -> None:
    with pytest.raises(DataError, match="one scan becomes a batch"):
        small()(torch.zeros(8, 8, 8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block": "wide"}, "block is 'wide'"),
        ({"shortcut": "C"}, "shortcut is 'C'"),
        ({"depths": (1, 0, 1, 1)}, "depths is (1, 0, 1, 1)"),
        ({"num_classes": 0}, "num_classes is 0"),
    ],
)
@pytest.mark.untyped
def test_a_wrong_architecture_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert text in caught.value.line
