from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights

from vision.resnet import Bottleneck, ResNet, ResNetConfig
from zoo.cards import Card, card
from zoo.config import build
from zoo.errors import ConfigError

SMALL = ["resnet18", "resnet34", "resnet50", "resnext50_32x4d", "wide_resnet50_2"]
LARGE = ["resnet101", "resnet152", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet101_2"]
NAMES = SMALL + LARGE
ALL = [*SMALL, *(pytest.param(name, marks=pytest.mark.prove) for name in LARGE)]
TAGS = [(name, weights.name) for name in NAMES for weights in get_model_weights(name)]


def config_of(name: str, **changes: object) -> ResNetConfig:
    return build(ResNetConfig, {**card(name).config, **changes}, where=name)


def small(name: str = "resnet50", **changes: object) -> ResNet:
    torch.manual_seed(0)
    return ResNet(config_of(name, **{**card(name).check.config, **changes}))


def on_meta(name: str) -> ResNet:
    with torch.device("meta"):
        return ResNet(config_of(name))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def hashed(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that depend on their names and shapes alone, and keep activations of order one."""
    return {name: hashed_tensor(name, tensor) for name, tensor in model.state_dict().items()}


def hashed_tensor(name: str, like: Tensor) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    if like.ndim > 1:
        return noise * math.sqrt(2 / like[0].numel())
    if name.endswith("running_var"):
        return 1 + noise.abs()
    return 0.5 + 0.1 * noise if name.endswith("weight") else 0.1 * noise


def twins(name: str) -> tuple[ResNet, nn.Module]:
    """Ours and torchvision's, with equal tensors that they do not share."""
    with torch.device("meta"):
        ours, theirs = ResNet(config_of(name)), get_model(name, weights=None)
    tensors = hashed(theirs)
    ours.load_state_dict(tensors, assign=True)
    theirs.load_state_dict({key: value.clone() for key, value in tensors.items()}, assign=True)
    return ours, theirs


def gradients(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    return ((name, parameter.grad) for name, parameter in model.named_parameters())


def same(left: Iterator[tuple[str, Tensor]], right: Iterator[tuple[str, Tensor]]) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs) and len(pairs) > 0


@pytest.mark.parametrize("name", ALL)
def test_logits_equal_torchvision_bit_for_bit(name: str) -> None:
    ours, theirs = (model.eval() for model in twins(name))
    with torch.inference_mode():
        for shape in ((2, 3, 33, 47), (1, 3, 64, 64), (1, 3, 97, 75)):
            image = uniform(*shape)
            logits = ours(image)
            assert torch.equal(logits, theirs(image))
            assert (logits - ours(uniform(*shape, seed=1))).abs().max() > 1e-3  # it sees the image


@pytest.mark.parametrize("name", ALL)
def test_training_equals_torchvision_bit_for_bit(name: str) -> None:
    ours, theirs = twins(name)
    image = uniform(2, 3, 65, 71)
    for model in (ours, theirs):
        model.train()(image).square().sum().backward()
    assert ours.conv1.weight.grad.abs().max() > 0
    assert same(gradients(ours), gradients(theirs))
    assert same(ours.named_buffers(), theirs.named_buffers())
    assert torch.equal(ours(image), theirs(image))
    assert ours.bn1.num_batches_tracked == 2


@pytest.mark.parametrize("name", NAMES)
def test_keys_their_order_and_shapes_are_those_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        theirs = get_model(name, weights=None)
    ours = [(key, tensor.shape) for key, tensor in on_meta(name).state_dict().items()]
    assert ours == [(key, tensor.shape) for key, tensor in theirs.state_dict().items()]


@pytest.mark.parametrize("name", NAMES)
def test_the_card_states_the_number_of_parameters(name: str) -> None:
    counted = sum(parameter.numel() for parameter in on_meta(name).parameters())
    assert counted == card(name).parameters


@pytest.mark.parametrize("name", NAMES)
def test_a_card_has_the_weights_of_torchvision_and_no_default(name: str) -> None:
    assert [*card(name).weights] == [w.name.lower() for w in get_model_weights(name)]
    assert card(name).default_tag is None
    assert card(name).head == ("fc",)


def test_the_cards_have_seventeen_sets_of_weights() -> None:
    assert sum(len(card(name).weights) for name in NAMES) == 17


@pytest.mark.parametrize(("name", "member"), TAGS)
def test_the_facts_of_the_weights_are_those_that_torchvision_publishes(
    name: str, member: str
) -> None:
    published = get_model_weights(name)[member]
    tag = member.lower()
    weights = card(name).weights[tag]
    (file,), (source,) = weights.files, weights.sources
    assert file.name == f"{name}.{tag}.safetensors"
    assert f"{source.url}{file.upstream}" == published.url
    assert file.upstream_sha256 == re.search(r"-([0-9a-f]{8})\.pth$", published.url)[1]
    assert card(name).parameters == published.meta["num_params"]
    assert weights.origin["recipe"] == published.meta["recipe"]
    assert weights.licence == "BSD-3-Clause"

    accuracy = published.meta["_metrics"]["ImageNet-1K"]
    values = {metric.name: metric.value for metric in weights.metrics}
    assert values == {
        "imagenet1k/validation/top1": pytest.approx(accuracy["acc@1"] / 100, abs=1e-9),
        "imagenet1k/validation/top5": pytest.approx(accuracy["acc@5"] / 100, abs=1e-9),
    }
    assert {(metric.n, metric.command) for metric in weights.metrics} == {(50_000, None)}

    preset = published.transforms()
    assert weights.preprocessing == {
        "size": preset.resize_size[0],
        "resize": "shorter",
        "crop": preset.crop_size[0],
        "interpolation": preset.interpolation.value,
        "antialias": preset.antialias,
        "mean": list(preset.mean),
        "std": list(preset.std),
    }
    narrowed: Card = card(f"{name}.{tag}")
    assert narrowed.labels == tuple(published.meta["categories"])


@pytest.mark.parametrize("name", NAMES)
def test_the_check_variant_is_small_and_has_the_structure_of_the_real_one(name: str) -> None:
    model, full = small(name), on_meta(name)
    assert sum(parameter.numel() for parameter in model.parameters()) < 400_000
    assert model(uniform(2, 3, 33, 65)).shape == (2, 10)
    assert type(model.layer1[0]) is type(full.layer1[0])
    if isinstance(model.layer1[0], Bottleneck):
        assert (model.layer1[0].conv2.groups > 1) == (full.layer1[0].conv2.groups > 1)


def test_features_of_resnet50_have_the_channels_of_the_paper() -> None:
    model = on_meta("resnet50")
    assert model.feature_channels == (64, 256, 512, 1024, 2048)
    assert model.feature_reductions == (2, 4, 8, 16, 32)
    assert on_meta("resnet18").feature_channels == (64, 64, 128, 256, 512)


def test_the_classifier_on_the_last_features_gives_the_logits() -> None:
    model, image = small().eval(), uniform(2, 3, 65, 47)
    pooled = model.features(image)[-1].mean(dim=(2, 3))
    torch.testing.assert_close(model.fc(pooled), model(image))


def test_initial_values_have_the_published_distributions() -> None:
    torch.manual_seed(0)
    model = ResNet(config_of("resnet18"))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / (module.out_channels * math.prod(module.kernel_size)))
            assert module.weight.std().item() == pytest.approx(std, rel=0.05)
            assert abs(module.weight.mean().item()) < 0.05 * std
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()
    bound = 1 / math.sqrt(512)
    for tensor in (model.fc.weight, model.fc.bias):
        assert tensor.abs().max() <= bound
        assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_blocks_may_start_as_identities(name: str) -> None:
    model = small(name, depths=[1, 2, 1, 1], zero_init_residual=True).eval()
    plain = small(name, depths=[1, 2, 1, 1])
    last = "bn3" if name == "resnet50" else "bn2"
    assert getattr(model.layer1[0], last).weight.eq(0).all()
    assert getattr(plain.layer1[0], last).weight.eq(1).all()
    assert model.layer1[0].bn1.weight.eq(1).all()
    x = uniform(1, model.feature_channels[2], 4, 4)
    assert torch.equal(model.layer2[1](x), x)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"depths": (3, 4, 0, 3)}, "depths is (3, 4, 0, 3)"),
        ({"width": 0}, "width is 0"),
        ({"groups": 0}, "groups is 0"),
        ({"width_per_group": -4}, "width_per_group is -4"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"in_channels": 0}, "in_channels is 0"),
        ({"block": "basic", "groups": 32}, "a basic block has no groups"),
        ({"block": "basic", "width_per_group": 128}, "a basic block has no groups"),
        ({"width": 8, "width_per_group": 4}, "their product is at least 64"),
        ({"depths": (3, 4, 6)}, "depths"),
        ({"depth": 50}, "did you mean 'depths'"),
        ({"block": "bottelneck"}, "did you mean 'bottleneck'"),
        ({"num_classes": "7"}, "num_classes is '7'"),
    ],
)
def test_a_wrong_configuration_is_answered_in_one_line(
    values: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(ResNetConfig, values, where="resnet50")
    assert words in caught.value.line
    assert caught.value.details == ()


def test_a_group_has_whole_channels_at_any_width() -> None:
    model = small("resnext50_32x4d", width=24, groups=2, width_per_group=4)
    widths = [model.get_submodule(f"layer{i}")[0].conv2.in_channels for i in (1, 2, 3, 4)]
    assert widths == [2, 6, 12, 24]  # 24 · 4 / 64 = 1.5 channels a group, rounded down
