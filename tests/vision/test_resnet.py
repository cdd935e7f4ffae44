from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights

from vision.convnet import DropPath, SqueezeExcitation
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


def twins(
    name: str, changes: dict[str, object] | None = None, dilate: list[bool] | None = None
) -> tuple[ResNet, nn.Module]:
    """Ours and torchvision's, with equal tensors that they do not share."""
    with torch.device("meta"):
        ours = ResNet(config_of(name, **(changes or {})))
        theirs = get_model(name, weights=None, replace_stride_with_dilation=dilate)
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


@pytest.mark.parametrize("output_stride", [8, 16])
@pytest.mark.parametrize(
    "name",
    ["resnet50", "resnext50_32x4d", pytest.param("resnet101", marks=pytest.mark.prove)],
)
def test_a_dilated_network_equals_torchvision_bit_for_bit(name: str, output_stride: int) -> None:
    dilate = [False, output_stride == 8, True]
    ours, theirs = twins(name, {"output_stride": output_stride}, dilate)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    for shape in ((2, 3, 65, 47), (1, 3, 64, 96)):
        image = uniform(*shape)
        x = theirs.eval().relu(theirs.bn1(theirs.conv1(image)))
        expected = [x]
        for layer in (nn.Sequential(theirs.maxpool, theirs.layer1), theirs.layer2):
            expected.append(layer(expected[-1]))
        for layer in (theirs.layer3, theirs.layer4):
            expected.append(layer(expected[-1]))
        maps = ours.eval().features(image)
        assert all(map(torch.equal, maps, expected))
        sizes = [math.ceil(shape[2] / n) for n in (2, 4, 8, min(16, output_stride), output_stride)]
        assert [x.shape[2] for x in maps] == sizes
    for model in (ours, theirs):
        model.train()(image.expand(2, -1, -1, -1)).square().sum().backward()
    assert torch.equal(ours.eval()(image), theirs.eval()(image))
    assert same(gradients(ours), gradients(theirs))
    assert same(ours.named_buffers(), theirs.named_buffers())


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
def test_a_dilated_map_holds_the_strided_one(name: str) -> None:
    strided = small(name, depths=[1, 1, 2, 3]).eval()
    image = uniform(1, 3, 131, 96)
    expected = strided.features(image)
    for output_stride, factor in ((16, (1, 1, 1, 1, 2)), (8, (1, 1, 1, 2, 4))):
        dilated = small(name, depths=[1, 1, 2, 3], output_stride=output_stride).eval()
        dilated.load_state_dict(strided.state_dict())
        assert dilated.feature_reductions == tuple(
            coarse // n for coarse, n in zip((2, 4, 8, 16, 32), factor, strict=True)
        )
        for x, y, n in zip(dilated.features(image), expected, factor, strict=True):
            torch.testing.assert_close(x[:, :, ::n, ::n], y)


def test_dilation_begins_where_the_stride_would_have_been() -> None:
    model = small("resnet50", depths=[1, 2, 3, 3], output_stride=8)
    kernels = [[block.conv2 for block in model.get_submodule(f"layer{i}")] for i in (1, 2, 3, 4)]
    assert [[k.dilation[0] for k in stage] for stage in kernels] == [
        [1], [1, 1], [1, 2, 2], [2, 4, 4]
    ]  # fmt: skip
    assert [[k.stride[0] for k in stage] for stage in kernels] == [
        [1], [2, 1], [1, 1, 1], [1, 1, 1]
    ]  # fmt: skip
    basic = small("resnet18", depths=[1, 1, 1, 2], output_stride=16).layer4
    assert [(b.conv1.dilation[0], b.conv2.dilation[0]) for b in basic] == [(1, 2), (2, 2)]


def test_the_chance_of_dropping_a_branch_grows_linearly_to_the_given_rate() -> None:
    model = small("resnet50", depths=[1, 2, 3, 2], drop_path_rate=0.4)
    rates = [m.rate for m in model.modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4])
    assert {m.rate for m in small().modules() if isinstance(m, DropPath)} == {0.0}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_dropped_branch_leaves_the_shortcut_and_a_kept_one_grows(name: str) -> None:
    block = small(name, depths=[1, 1, 1, 3], drop_path_rate=0.6).layer4[2].eval()
    x = uniform(1, block.conv1.in_channels, 3, 3)
    branch = block.bn1(block.conv1(x)).relu()
    if name == "resnet50":
        branch = block.bn3(block.conv3(block.bn2(block.conv2(branch)).relu()))
    else:
        branch = block.bn2(block.conv2(branch))
    torch.testing.assert_close(block(x), (x + branch).relu())
    block.drop_path.train()  # the norms stay in eval mode
    torch.manual_seed(0)
    rows = block(x.expand(400, -1, -1, -1))
    dropped = (rows == x).flatten(1).all(1)
    assert dropped.float().mean().item() == pytest.approx(0.6, abs=0.05)
    torch.testing.assert_close(rows[~dropped], (x + branch / 0.4).relu().expand_as(rows[~dropped]))


def test_drop_path_changes_no_answer_in_eval_mode_and_no_key() -> None:
    plain, dropping, image = small(), small(drop_path_rate=0.5), uniform(4, 3, 64, 64)
    assert same(iter(plain.state_dict().items()), iter(dropping.state_dict().items()))
    assert torch.equal(plain.eval()(image), dropping.eval()(image))
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(dropping.train()(image))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


def test_squeeze_and_excitation_has_the_published_size_and_adds_only_its_own_keys() -> None:
    with torch.device("meta"):
        model = ResNet(config_of("resnet50", se_reduction=16))
    plain = on_meta("resnet50").state_dict()
    added = {key: tensor for key, tensor in model.state_dict().items() if key not in plain}
    assert plain.keys() <= model.state_dict().keys()
    assert added["layer4.2.se.fc1.weight"].shape == (128, 2048, 1, 1)
    assert added["layer4.2.se.fc2.bias"].shape == (2048,)
    # Hu et al., equation 5: 2/r · Σ N·C², here without biases.
    weights = sum(t.numel() for key, t in added.items() if key.endswith("weight"))
    assert weights == 2 * (3 * 256**2 + 4 * 512**2 + 6 * 1024**2 + 3 * 2048**2) // 16
    assert sum(parameter.numel() for parameter in model.parameters()) == 28_088_024


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_squeeze_and_excitation_is_the_last_step_of_the_branch(name: str) -> None:
    model = small(name, depths=[1, 2, 1, 1], se_reduction=4).eval()
    block = model.layer2[1]
    assert isinstance(block.se, SqueezeExcitation)
    assert not any(b.bias.any() for b in (block.se.fc1, block.se.fc2))
    x = uniform(2, block.conv1.in_channels, 4, 5)
    y = block.bn1(block.conv1(x)).relu()
    if name == "resnet50":
        y = block.bn3(block.conv3(block.bn2(block.conv2(y)).relu()))
    else:
        y = block.bn2(block.conv2(y))
    assert torch.equal(block(x), (block.se(y) + x).relu())
    block.se.fc2.weight.data.zero_()
    torch.testing.assert_close(block(x), (y / 2 + x).relu())


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
def test_a_card_has_the_weights_of_torchvision_and_none_of_them_is_the_default(name: str) -> None:
    theirs = [tag for tag in card(name).weights if tag.startswith("imagenet1k")]
    assert theirs == [w.name.lower() for w in get_model_weights(name)]
    assert card(name).default_tag not in theirs
    assert card(name).head == ("fc",)


def test_the_cards_have_seventeen_sets_of_weights() -> None:
    assert sum(len(get_model_weights(name)) for name in NAMES) == 17


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
        ({"output_stride": 4}, "output_stride is 4; it takes 8 or 16 or 32"),
        ({"drop_path_rate": 1.0}, "drop_path_rate is 1.0"),
        ({"drop_path_rate": -0.1}, "drop_path_rate is -0.1"),
        ({"se_reduction": -1}, "se_reduction is -1; it takes at least 0"),
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
