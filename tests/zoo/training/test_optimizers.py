from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.training import recipe as recipes
from zoo.training.optimizers import LAMB, Lion, Muon, make_optimizer, orthogonal
from zoo.training.recipe import Recipe

ALL: list[recipes.Optimizer] = [
    recipes.SGD(lr=0.05),
    recipes.SGD(lr=0.2, momentum=0.0, nesterov=False),
    recipes.AdamW(lr=0.01),
    recipes.Lion(lr=0.005),
    recipes.LAMB(lr=0.01),
    recipes.Muon(lr=0.01),
]


class Net(nn.Module):
    """An embedding, a convolution, a norm, a layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def depth_order(self) -> list[list[str]]:
        return [["words"], ["conv"], ["norm", "layer"], ["head"]]

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.conv(self.words(ids).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(self.layer(self.norm(hidden)).relu().mean(1))
        return logits


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    loss = torch.zeros(())
    for number in steps:
        generator = torch.Generator().manual_seed(number % 4)
        ids = torch.randint(0, 11, (8, 5), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(ids), ids[:, 0] % 3)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("optimizer", ALL, ids=lambda o: type(o).__name__)
def test_each_learns_and_goes_on_bit_for_bit(optimizer: recipes.Optimizer) -> None:
    recipe = Recipe(optimizer=optimizer)
    net = seeded()
    made = make_optimizer(net, recipe)
    first = train(net, made, range(1))
    train(net, made, range(1, 7))
    again = seeded()
    again.load_state_dict(copy.deepcopy(net.state_dict()))
    other = make_optimizer(again, recipe)
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    last = train(net, made, range(7, 61))
    train(again, other, range(7, 61))
    assert last < first
    for one, two in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(_tensors(made.state_dict()), _tensors(other.state_dict()), strict=True):
        assert torch.equal(one, two)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.mark.parametrize("optimizer", ALL, ids=lambda o: type(o).__name__)
def test_norms_and_biases_have_no_decay_and_the_frozen_stay(optimizer: recipes.Optimizer) -> None:
    net = seeded()
    net.conv.requires_grad_(False)
    made = make_optimizer(net, Recipe(optimizer=optimizer, layer_decay=0.5))
    names = {id(p): name for name, p in net.named_parameters()}
    rates: dict[str, tuple[float, float]] = {}
    for group in made.param_groups:
        for p in group["params"]:
            rates[names.pop(id(p))] = group["lr"] / optimizer.lr, group["weight_decay"]
    assert sorted(names.values()) == ["conv.bias", "conv.weight"]
    muon = optimizer.adam_lr / optimizer.lr if isinstance(optimizer, recipes.Muon) else 1.0
    assert rates["words.weight"] == pytest.approx((0.125 * muon, optimizer.weight_decay))
    assert rates["norm.weight"] == rates["layer.bias"] == pytest.approx((0.5 * muon, 0))
    assert rates["layer.weight"] == pytest.approx((0.5, optimizer.weight_decay))
    assert rates["head.weight"] == pytest.approx((muon, optimizer.weight_decay))


def stepped(kind: type[torch.optim.Optimizer], grads: list[list[float]], **options: Any) -> Tensor:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    optimizer = kind([{"params": [weight], **options}])  # type: ignore[call-arg]
    for grad in grads:
        weight.grad = torch.tensor([grad], dtype=torch.float64)
        optimizer.step()
    return weight.detach()[0]


def test_lion_by_hand() -> None:
    """Program 1 of the paper.

    Step 1: momentum 0, directions sign(0.1 g) = (1, -1); momentum (0.02, -0.04).
    Step 2: 0.9 (0.02, -0.04) + 0.1 (-0.1, 0.3) = (0.008, -0.006): directions (1, -1) again.
    """
    weight = stepped(Lion, [[2.0, -4.0], [-0.1, 0.3]], lr=0.1, weight_decay=0.5)
    first = 3 * 0.95 - 0.1, 4 * 0.95 + 0.1
    assert weight.tolist() == pytest.approx([first[0] * 0.95 - 0.1, first[1] * 0.95 + 0.1])


def test_lamb_by_hand() -> None:
    """Algorithm 2: the first step of Adam is the sign; its length is that of the weight.

    r = (1, -1) + 0.5 (3, 4) = (2.5, 1), |x| = 5, so x = (3, 4) - 0.1 * 5 / sqrt(7.25) * (2.5, 1).
    """
    weight = stepped(LAMB, [[2.0, -4.0]], lr=0.1, weight_decay=0.5, eps=1e-12)
    rate = 0.1 * 5 / 7.25**0.5
    assert weight.tolist() == pytest.approx([3 - rate * 2.5, 4 - rate])


def test_lamb_steps_what_does_not_decay_as_adam_does() -> None:
    grads = [[2.0, -4.0], [0.5, 1.0], [-3.0, 0.25]]
    adam = stepped(torch.optim.Adam, grads, lr=0.1, betas=(0.9, 0.999), eps=1e-6)
    lamb = stepped(LAMB, grads, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
    assert lamb.tolist() == pytest.approx(adam.tolist(), rel=1e-12)


def test_muon_leaves_the_rest_to_adamw() -> None:
    grads = [[2.0, -4.0], [0.5, 1.0], [-3.0, 0.25]]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}
    adam = stepped(torch.optim.AdamW, grads, betas=(0.9, 0.95), eps=1e-8, **options)
    muon = stepped(Muon, grads, orthogonal=False, **options)
    assert muon.tolist() == pytest.approx(adam.tolist(), rel=1e-12)


def test_muon_is_that_of_torch_on_matrices() -> None:
    torch.manual_seed(1)
    start, grads = torch.randn(6, 4), [torch.randn(6, 4) for _ in range(3)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    one = Muon([{"params": [ours], "orthogonal": True, "lr": 0.02, "weight_decay": 0.1}])
    two = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        one.step()
        two.step()
    # torch iterates in bfloat16, which moves a singular value by some percent.
    assert (ours - theirs).norm() < 0.1 * (ours - start).norm()


def test_muon_takes_a_kernel_as_a_matrix() -> None:
    torch.manual_seed(1)
    start, grad = torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3)
    kernel, matrix = nn.Parameter(start.clone()), nn.Parameter(start.flatten(1).clone())
    kernel.grad, matrix.grad = grad, grad.flatten(1)
    for weight in (kernel, matrix):
        Muon([{"params": [weight], "orthogonal": True}]).step()
    assert torch.equal(kernel.flatten(1), matrix)
    assert not torch.equal(kernel, start)


def test_a_kernel_with_its_channels_last_is_stepped_alike() -> None:
    torch.manual_seed(1)
    start, grad = torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3)
    plain = nn.Parameter(start.clone())
    last = nn.Parameter(start.to(memory_format=torch.channels_last))
    plain.grad, last.grad = grad.clone(), grad.to(memory_format=torch.channels_last)
    for weight in (plain, last):
        Muon([{"params": [weight], "orthogonal": True}]).step()
    assert torch.allclose(plain, last, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 5), (9, 4), (4, 9), (1, 7)])
def test_a_matrix_becomes_nearly_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape) + torch.eye(*shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_closure_is_called_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))

    def loss() -> float:
        weight.grad = None
        value = (weight**2).sum()
        value.backward()
        return value.item()

    assert Lion([weight], lr=0.5).step(loss) == 2.0
    assert weight.tolist() == [0.5, 0.5]


def test_a_parameter_without_a_gradient_stays() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for kind in (Lion, LAMB, Muon):
        optimizer = kind([weight])
        optimizer.step()
        assert not optimizer.state
    assert torch.equal(weight, torch.ones(2, 2))
