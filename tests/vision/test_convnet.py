from __future__ import annotations

import copy
import math
from importlib import import_module
from itertools import starmap

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation as Reference

from vision.convnet import DropPath, SqueezeExcitation
from zoo.cards import Card, card
from zoo.config import build
from zoo.errors import DataError

OPTIONS = {  # variants that no card has
    "resnet18, dilated": {"output_stride": 16},
    "resnet50, every option": {"output_stride": 8, "drop_path_rate": 0.4, "se_reduction": 4},
}
FAMILIES = ["resnet18", "resnext50_32x4d", "efficientnet_lite0", *OPTIONS]
each_family = pytest.mark.parametrize("name", FAMILIES)


def card_of(name: str) -> Card:
    return card(name.partition(",")[0])


def small(name: str, **changes: object) -> nn.Module:
    """The check variant of a card, with the same initial tensors each time."""
    found = card_of(name)
    module, _, cls = found.model.partition(":")
    module = import_module(module)
    values = {**found.config, **found.check.config, **OPTIONS.get(name, {}), **changes}
    torch.manual_seed(0)
    return getattr(module, cls)(build(getattr(module, f"{cls}Config"), values, where=name))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


@each_family
@pytest.mark.parametrize("size", [(64, 64), (33, 65), (1, 97), (50, 31)])
def test_features_are_five_maps_from_fine_to_coarse(name: str, size: tuple[int, int]) -> None:
    model = small(name).eval()
    maps = model.features(uniform(2, 3, *size))
    coarsest = OPTIONS.get(name, {}).get("output_stride", 32)
    assert model.feature_reductions == tuple(min(n, coarsest) for n in (2, 4, 8, 16, 32))
    assert tuple(x.shape[1] for x in maps) == model.feature_channels
    for x, reduction in zip(maps, model.feature_reductions, strict=True):
        assert x.shape[2:] == tuple(math.ceil(n / reduction) for n in size)


def test_drop_path_drops_whole_rows_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer, x = DropPath(0.25), torch.ones(4000, 2, 3, 3)
    dropped = layer.train()(x)
    rows = dropped.flatten(1)
    assert (rows == rows[:, :1]).all()
    assert rows[:, 0].unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert rows[:, 0].mean().item() == pytest.approx(1, abs=0.05)
    assert layer.eval()(x) is x
    assert DropPath(0.0).train()(x) is x


def test_drop_path_drops_the_same_rows_under_the_same_seed() -> None:
    layer, x = DropPath(0.5).train(), uniform(64, 1, 2, 2)
    runs = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        runs.append(layer(x))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_squeeze_and_excitation_by_hand() -> None:
    layer = SqueezeExcitation(2, reduction=2)  # one channel in the middle
    layer.fc1.weight.data = torch.tensor([2.0, -1.0]).reshape(1, 2, 1, 1)
    layer.fc1.bias.data = torch.tensor([1.0])
    layer.fc2.weight.data = torch.tensor([math.log(3), -math.log(3)]).reshape(2, 1, 1, 1)
    layer.fc2.bias.data = torch.tensor([0.0, math.log(9)])
    # Means 2 and 4: relu(2 · 2 - 4 + 1) = 1, sigmoid(log 3) = 3/4 twice. Means 1 and 8: relu = 0,
    # sigmoid(0) = 1/2, sigmoid(log 9) = 9/10.
    x = torch.tensor([[[1.0, 3.0], [4.0, 4.0]], [[1.0, 1.0], [6.0, 10.0]]])[:, :, None]
    expected = [[[0.75, 2.25], [3.0, 3.0]], [[0.5, 0.5], [5.4, 9.0]]]
    torch.testing.assert_close(layer(x), torch.tensor(expected)[:, :, None])


def test_squeeze_and_excitation_equals_torchvision_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours, theirs = SqueezeExcitation(48, reduction=16), Reference(48, 3)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 48, 7, 5)
    assert torch.equal(ours(x), theirs(x))
    assert SqueezeExcitation(8, reduction=16).fc1.out_channels == 1


@each_family
@pytest.mark.parametrize("channels", [1, 2, 4, 5, 6])
def test_a_grey_image_means_the_same_on_any_number_of_channels(name: str, channels: int) -> None:
    colour, adapted = small(name).eval(), small(name, in_channels=channels).eval()
    stored = colour.state_dict()
    changed = adapted.adapt_input(stored, 3)
    adapted.load_state_dict(stored | changed)
    grey = uniform(2, 1, 49, 64)
    expected = colour(grey.expand(-1, 3, -1, -1))
    result = adapted(grey.expand(-1, channels, -1, -1))
    assert (result - expected).abs().max() <= 1e-5
    (stem,) = changed
    kernels = changed[stem]
    torch.testing.assert_close(kernels.sum(1), stored[stem].sum(1))
    assert torch.equal(kernels, kernels[:, :1].expand_as(kernels))


@each_family
def test_stored_channels_stay_when_their_number_does(name: str) -> None:
    model = small(name)
    assert model.adapt_input(model.state_dict(), 3) == {}


def test_half_precision_weights_are_summed_in_single_precision() -> None:
    stored = {"conv1.weight": torch.tensor([2048.0, 1.0, 2.0]).half().reshape(1, 3, 1, 1)}
    changed = small("resnet18", in_channels=1).adapt_input(stored, 3)
    assert changed["conv1.weight"].item() == 2051  # float16 has 2050 and 2052


@each_family
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_changes_no_bit(name: str, frozen: bool) -> None:
    plain, saving = small(name), small(name, gradient_checkpointing=True)
    image = uniform(3, 3, 65, 47)
    losses = []
    for model in (plain, saving):
        if frozen:
            model.freeze_norms()
        torch.manual_seed(1)  # for drop-connect and dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model.train()(image).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3
    for key, value in plain.state_dict().items():
        assert torch.equal(value, saving.state_dict()[key]), key
    assert batch_norms(saving)[-1].num_batches_tracked == (0 if frozen else 3)


@each_family
def test_checkpointing_keeps_less_for_the_backward_pass(name: str) -> None:
    def kept(model: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.train()(uniform(4, 3, 128, 128))
        return sum(sizes.values())

    assert kept(small(name, gradient_checkpointing=True)) < 0.7 * kept(small(name))


@each_family
def test_a_checkpointed_graph_can_be_walked_twice(name: str) -> None:
    model = small(name, gradient_checkpointing=True)
    loss = model(uniform(2, 3, 64, 64)).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    for once, parameter in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * once)
    assert {norm.num_batches_tracked.item() for norm in batch_norms(model)} == {1}


@each_family
def test_frozen_norms_keep_their_buffers_and_parameters_through_training(name: str) -> None:
    model = small(name)
    model.train()(uniform(4, 3, 64, 64, seed=99))  # statistics that are not the initial ones
    model.freeze_norms()
    before = [{k: v.clone() for k, v in norm.state_dict().items()} for norm in batch_norms(model)]
    moving = {k: v.detach().clone() for k, v in model.named_parameters() if v.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(10):
        model.eval()
        model.train()
        optimizer.zero_grad()
        model(uniform(2, 3, 64, 64, seed=step)).square().mean().backward()
        optimizer.step()
    assert model.training
    for norm, kept in zip(batch_norms(model), before, strict=True):
        assert not norm.training
        assert norm.weight.grad is None
        assert norm.bias.grad is None
        assert all(torch.equal(value, kept[key]) for key, value in norm.state_dict().items())
    parameters = dict(model.named_parameters())
    assert not any(torch.equal(value, parameters[key]) for key, value in moving.items())


@each_family
def test_norms_without_gradients_keep_their_statistics_too(name: str) -> None:
    model = small(name)
    held, free = batch_norms(model)[0], batch_norms(model)[1]
    held.requires_grad_(False)
    before = [norm.running_mean.clone() for norm in (held, free)]
    for trained in (copy.deepcopy(model), model):
        trained.train()(uniform(2, 3, 64, 64)).sum().backward()
    assert torch.equal(held.running_mean, before[0])
    assert not torch.equal(free.running_mean, before[1])
    assert batch_norms(trained)[0].num_batches_tracked == 0
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(model).train()
    norms = [m for m in synchronised.modules() if isinstance(m, nn.SyncBatchNorm)]
    assert [norm.training for norm in norms[:3]] == [False, True, True]


@each_family
def test_norms_that_are_not_frozen_follow_the_batches(name: str) -> None:
    model = small(name).train()
    before = [norm.running_mean.clone() for norm in batch_norms(model)]
    model(uniform(2, 3, 64, 64))
    assert not any(
        starmap(torch.equal, zip([n.running_mean for n in batch_norms(model)], before, strict=True))
    )


@each_family
def test_a_head_can_be_initialised_alone(name: str) -> None:
    model = small(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (head,) = card_of(name).head
    model.get_submodule(head).apply(model.init_weights)
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    assert f"{head}.weight" in changed
    assert {key.partition(".")[0] for key in changed} == {head}


@each_family
@pytest.mark.parametrize("channels", [1, 4])
def test_an_image_with_other_channels_is_refused(name: str, channels: int) -> None:
    with pytest.raises(DataError, match=f"{channels} channels and the model takes 3"):
        small(name)(uniform(2, channels, 64, 64))


@pytest.mark.untyped
@each_family
def test_what_is_no_batch_of_floats_is_refused(name: str) -> None:
    model = small(name).eval()
    with pytest.raises(DataError, match=r"image\[None\]"):
        model(uniform(3, 64, 64))
    with pytest.raises(DataError, match="uint8"):
        model.features(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))


@pytest.mark.untyped
@each_family
def test_an_exported_program_takes_other_batches_and_sizes(name: str) -> None:
    model = small(name).eval()
    limits = {"batch": 1, "height": 33, "width": 33}  # up to 32 the last map has one pixel
    batch, height, width = (torch.export.Dim(axis, min=least) for axis, least in limits.items())
    program = torch.export.export(
        model, (uniform(2, 3, 64, 64),), dynamic_shapes={"image": {0: batch, 2: height, 3: width}}
    ).module()
    for shape in ((1, 3, 33, 47), (5, 3, 66, 35), (2, 3, 64, 129)):
        image = uniform(*shape)
        torch.testing.assert_close(program(image), model(image), rtol=0, atol=1e-6)


@pytest.mark.untyped
@pytest.mark.parametrize("checkpointing", [False, True])
@each_family
def test_a_training_step_compiles_whole(name: str, checkpointing: bool) -> None:
    plain, model = small(name), small(name, gradient_checkpointing=checkpointing)
    image = uniform(2, 3, 64, 64)
    for module in (plain, torch.compile(model, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        module(image).square().sum().backward()
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=key)
    torch.testing.assert_close([*model.buffers()], [*plain.buffers()])
