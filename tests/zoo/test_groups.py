"""Depth order, and the two things derived from it, on every family and on one made by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo import registry
from zoo.config import build
from zoo.errors import ConfigError
from zoo.examples import example_inputs
from zoo.groups import freeze, layer_groups, parameter_groups

MODELS = {
    "resnet18": {},
    "resnet50": {"se_reduction": 4, "drop_path_rate": 0.2, "output_stride": 16},
    "efficientnet_lite0": {},
    "bert-base-uncased": {},
    "all-minilm-l6-v2": {"dropout": 0.1},
}
each_model = pytest.mark.parametrize("name", MODELS)


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = {**zoo.card(name).check.config, **MODELS[name]}
    return zoo.load(name, pretrained=False, **config)


def kept(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train(model: nn.Module, steps: int) -> None:
    """Some steps, as a loop makes them, with an evaluation before each."""
    optimizer = torch.optim.SGD(parameter_groups(model, lr=0.1, weight_decay=0.1))
    for step in range(steps):
        model.eval()
        model.train()
        torch.manual_seed(step)
        optimizer.zero_grad()
        output = model(**example_inputs(zoo.card(model.card.name).inputs))
        (output * torch.randn_like(output)).sum().backward()
        optimizer.step()


class Stack(nn.Module):
    """Three linear layers, the middle one with a norm; layer1 and layer10 share letters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(2, 2)
        self.layer10 = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2))
        self.head = nn.Linear(2, 1)
        self.order = [["layer1"], ["layer10"], ["head", "another_head"]]

    def depth_order(self) -> list[list[str]]:
        return self.order


@pytest.mark.parametrize("name", zoo.list_models())
def test_every_parameter_of_every_card_is_in_one_group_and_the_head_is_the_last(name: str) -> None:
    card = zoo.card(name)
    cls = registry.symbol(card.model, card)
    with torch.device("meta"):
        model = cls(build(registry.config_class(cls, card), card.config, where=name))
    names = [name for name, _ in model.named_parameters()]
    groups = layer_groups(model)
    assert sorted(name for group in groups for name in group) == sorted(names)
    head = [n for n in names if any(f"{n}.".startswith(f"{prefix}.") for prefix in card.head)]
    assert groups[-1] == head
    assert all(groups[:-1])


def test_groups_are_blocks() -> None:
    groups = layer_groups(small("resnet18"))
    assert groups[0] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert groups[-1] == ["fc.weight", "fc.bias"]
    assert len(groups[1]) == 6


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([["layer1"], ["head"]], "has 0 prefixes of the parameter 'layer10.0.weight'"),
        ([["layer1", "layer10"], ["layer10.1", "head"]], "has 2 prefixes of the parameter"),
    ],
)
def test_an_order_that_a_parameter_does_not_fit_is_refused(
    order: list[list[str]], words: str
) -> None:
    model = Stack()
    model.order = order
    with pytest.raises(ConfigError, match=words):
        layer_groups(model)


def test_a_model_without_an_order_is_refused_where_one_is_needed() -> None:
    model = nn.Linear(2, 1)
    for needs in (
        layer_groups,
        lambda model: freeze(model, 1),
        lambda model: parameter_groups(model, lr=0.1, layer_decay=0.9),
    ):
        with pytest.raises(ConfigError, match=r"Linear has no depth_order\(\)"):
            needs(model)
    assert len(parameter_groups(model, lr=0.1, weight_decay=0.1)) == 2


@each_model
def test_what_is_frozen_keeps_every_bit_through_training_and_the_rest_moves(name: str) -> None:
    model = small(name)
    train(model, 1)  # statistics that are not the initial ones
    groups = layer_groups(model)
    freeze(model, 2)
    before = kept(model)
    train(model, 10)
    frozen = tuple(name.rpartition(".")[0] for group in groups[:2] for name in group)
    assert model.training
    for key, tensor in model.state_dict().items():
        inside = key.rpartition(".")[0] in frozen
        assert inside == torch.equal(tensor, before[key]), key
    assert len(frozen) > 3


@each_model
def test_a_frozen_body_leaves_the_head_alone(name: str) -> None:
    model = small(name)
    freeze(model.train(), -1)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == layer_groups(model)[-1]
    norms = [m for m in model.modules() if hasattr(m, "running_mean")]
    assert not any(norm.training for norm in norms)
    assert all(m.training for m in model.modules() if isinstance(m, nn.Dropout))


@each_model
def test_freezing_nothing_thaws(name: str) -> None:
    model, plain = small(name), small(name)
    freeze(model, -1)
    freeze(model, 2)
    freeze(model, 0)
    assert not model.training
    train(model, 2)
    train(plain, 2)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_norms_that_are_frozen_for_good_stay_so() -> None:
    model = small("resnet18").train()
    model.freeze_norms()
    freeze(model, 0)
    assert not model.bn1.weight.requires_grad
    assert not model.bn1.training
    assert model.conv1.weight.requires_grad


def test_a_copy_of_a_frozen_model_is_frozen() -> None:
    model = small("resnet18")
    freeze(model, 2)
    twin = copy.deepcopy(model).train()
    assert not twin.layer1[0].bn1.training
    assert twin.layer2[0].bn1.training
    assert not twin.layer1[0].conv1.weight.requires_grad


@pytest.mark.parametrize("up_to", [11, -11])
def test_more_groups_than_there_are_cannot_be_frozen(up_to: int) -> None:
    model = zoo.load("resnet18", pretrained=False, width=8)
    with pytest.raises(ConfigError, match=f"up_to is {up_to}; ResNet has 10 groups"):
        freeze(model, up_to)
    freeze(model, 10)
    assert not any(p.requires_grad for p in model.parameters())


def test_learning_rates_decay_towards_the_input() -> None:
    model = Stack()
    groups = parameter_groups(model, lr=0.8, layer_decay=0.5, weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    found = [
        ([names[id(p)] for p in g["params"]], round(g["lr"], 12), g["weight_decay"]) for g in groups
    ]
    assert found == [
        (["head.weight"], 0.8, 0.1),
        (["head.bias"], 0.8, 0.0),
        (["layer10.0.weight"], 0.4, 0.1),
        (["layer10.1.weight", "layer10.1.bias"], 0.4, 0.0),
        (["layer1.weight"], 0.2, 0.1),
        (["layer1.bias"], 0.2, 0.0),
    ]


def test_the_stem_of_resnet18_learns_nine_layers_below_its_head() -> None:
    model = zoo.load("resnet18", pretrained=False, width=8)
    groups = parameter_groups(model, lr=1.0, layer_decay=0.7)
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert rate[id(model.fc.weight)] == 1.0
    assert rate[id(model.layer4[1].conv1.weight)] == pytest.approx(0.7)
    assert rate[id(model.conv1.weight)] == pytest.approx(0.7**9)
    assert len(set(rate.values())) == 10


def test_a_body_without_a_head_learns_at_the_whole_rate_in_its_last_layer() -> None:
    model = small("all-minilm-l6-v2")
    rates = {g["lr"] for g in parameter_groups(model, lr=1.0, layer_decay=0.5)}
    assert rates == {1.0, 0.5, 0.25}  # two layers, then the embeddings


def test_an_optimiser_takes_the_groups_as_they_are() -> None:
    model = Stack()
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(
        parameter_groups(model, lr=0.1, layer_decay=0.5, weight_decay=2.0), lr=99.0
    )
    optimizer.step()
    # 1 - rate · (1 + decay · 1)
    assert model.head.weight[0, 0].item() == pytest.approx(1 - 0.1 * 3)
    assert model.head.bias[0].item() == pytest.approx(1 - 0.1 * 1)
    assert model.layer1.weight[0, 0].item() == pytest.approx(1 - 0.025 * 3)
    assert model.layer10[1].weight[0].item() == pytest.approx(1 - 0.05 * 1)


@each_model
def test_without_layer_decay_there_are_two_groups_and_none_of_them_is_frozen(name: str) -> None:
    model = small(name)
    decayed, plain = sorted(
        parameter_groups(model, lr=0.1, weight_decay=0.05), key=lambda g: -g["weight_decay"]
    )
    assert {p.ndim for p in decayed["params"]} <= {2, 4}
    assert {p.ndim for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len([*model.parameters()])
    freeze(model, 1)
    left = [p for g in parameter_groups(model, lr=0.1) for p in g["params"]]
    assert len(left) == len([*model.parameters()]) - len(layer_groups(model)[0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": 0.0}, "lr is 0.0; it takes more than 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": 0.1, "layer_decay": 0.0}, "layer_decay is 0.0; it takes more than 0, at most 1"),
        ({"lr": 0.1, "layer_decay": 1.5}, "layer_decay is 1.5"),
        ({"lr": 0.1, "weight_decay": -1.0}, "weight_decay is -1.0; it takes 0 or more"),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(values: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parameter_groups(Stack(), **values)
    assert words in caught.value.line
