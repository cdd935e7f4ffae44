"""Densities against numbers worked out by hand, and against their own sums and integrals."""

import math
from itertools import product

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl.actions import (
    Choice,
    Discrete,
    Joint,
    Normal,
    from_plain,
    log_tanh_slope,
    to_plain,
    tree_of,
)
from zoo.errors import ConfigError


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGITS, MASK = doubles(1, 2, 3, 4), torch.tensor([True, False, True, False])


def test_a_mask_renormalises() -> None:
    # Logits 1 and 3 are left: p = 1/(1+e^2) and its complement.
    node = Discrete(4)
    assert node.log_prob(LOGITS, doubles(0), MASK).item() == pytest.approx(-2.1269280110, abs=1e-9)
    assert node.log_prob(LOGITS, doubles(2), MASK).item() == pytest.approx(-0.1269280110, abs=1e-9)
    assert node.entropy(LOGITS, MASK).item() == pytest.approx(0.3653338551, abs=1e-9)
    assert node.entropy(LOGITS).item() == pytest.approx(0.9475369640, abs=1e-9)


def test_what_is_masked_has_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    node = Discrete(4)
    (node.log_prob(logits, doubles(2), MASK) + node.entropy(logits, MASK)).backward()
    assert logits.grad is not None
    assert logits.grad[~MASK].tolist() == [0.0, 0.0]
    assert logits.grad[MASK].abs().min() > 0


def test_large_logits_do_not_pass_a_mask() -> None:
    logits = torch.tensor([-2e8, 5.0, -2e8, 5.0]).expand(500, 4)
    mask = MASK.expand(500, 4)
    node, generator = Discrete(4), torch.Generator().manual_seed(0)
    assert set(node.sample(logits, mask, generator)[:, 0].tolist()) == {0.0, 2.0}
    assert node.mode(logits, mask)[0, 0] == 0
    assert node.entropy(logits, mask)[0].item() == pytest.approx(math.log(2))


def test_discrete_samples_are_as_frequent_as_likely() -> None:
    node, generator = Discrete(4), torch.Generator().manual_seed(1)
    drawn = node.sample(LOGITS.expand(20_000, 4), None, generator)[:, 0].long()
    share = drawn.bincount(minlength=4) / 20_000
    expected = LOGITS.softmax(-1)
    chi_square = (20_000 * (share - expected) ** 2 / expected).sum()
    assert chi_square < 16.27  # of 3 degrees of freedom: one run in a thousand


def test_normal_is_that_of_the_number_before_clipping() -> None:
    node = Normal((-1.0,), (1.0,))
    params, action = doubles(0, 0), doubles(1.7)
    assert node.log_prob(params, action).item() == pytest.approx(-2.3639385332, abs=1e-9)
    assert node.decode(action[None].numpy()).tolist() == [[1.0]]
    half = doubles(0, math.log(0.5))
    assert node.entropy(half).item() == pytest.approx(0.7257913526, abs=1e-9)


@pytest.mark.parametrize(
    ("mean", "std", "u", "half", "expected"),
    [
        (0.3, 0.5, 1.2, 1.0, -0.6584134095),
        (0.3, 0.5, 1.2, 2.0, -1.3515605900),
        (0.0, 1.0, 1.0, 2.0, -1.2445240527985637),
    ],
)
def test_squashed_log_prob(mean: float, std: float, u: float, half: float, expected: float) -> None:
    node = Normal((-half,), (half,), bound="tanh")
    got = node.log_prob(doubles(mean, math.log(std)), doubles(u))
    assert got.item() == pytest.approx(expected, abs=1e-9)
    assert node.decode(np.array([[u]]))[0, 0] == pytest.approx(half * math.tanh(u), abs=1e-6)


def test_squashing_never_overflows() -> None:
    assert log_tanh_slope(doubles(20)).item() == pytest.approx(-38.6137056389, abs=1e-9)
    params = torch.zeros(2, requires_grad=True)
    # Worked out: -u^2/2 - log(2 pi)/2 - 2 (log 2 - u - log1p(e^-2u)) at u = 10.
    got = Normal((-1.0,), (1.0,), bound="tanh").log_prob(params, torch.tensor([10.0]))
    assert got.item() == pytest.approx(-32.30523289020226, abs=1e-3)
    got.backward()
    assert params.grad is not None
    assert params.grad.isfinite().all()


@pytest.mark.parametrize("std", [0.1, 0.5, 1.0])
def test_squashed_density_integrates_to_one_and_has_its_entropy(std: float) -> None:
    node = Normal((-2.0,), (4.0,), bound="tanh")
    u = torch.linspace(-12, 12, 200_001, dtype=torch.float64)[:, None]
    params = doubles(0.4, math.log(std)).expand(len(u), 2)
    log_prob = node.log_prob(params, u)
    action = 1 + 3 * torch.tanh(u[:, 0])
    mass = torch.trapezoid(log_prob.exp(), action)
    entropy = torch.trapezoid(-log_prob * log_prob.exp(), action)
    assert mass.item() == pytest.approx(1, abs=1e-6)
    assert node.entropy(params[:1]).item() == pytest.approx(entropy.item(), abs=1e-4)


def test_only_what_is_chosen_counts() -> None:
    # Choice (.7, .3) between nothing to decide and N(., .5): H = .6108643 + .3 * .7257914.
    node = Choice((Discrete(1), Normal((-1.0,), (1.0,))))
    params = doubles(math.log(0.7), math.log(0.3), 0, 0.25, math.log(0.5))
    assert node.entropy(params).item() == pytest.approx(0.8286017078, abs=1e-9)
    nothing = node.log_prob(params, doubles(0, 0, 5.0))
    assert nothing.item() == pytest.approx(math.log(0.7), abs=1e-12)
    number = node.log_prob(params, doubles(1, 0, 0.25))
    assert number.item() == pytest.approx(math.log(0.3) - math.log(0.5 * math.sqrt(2 * math.pi)))


def test_two_branches_by_hand() -> None:
    # Gate (.7, .3), heads (.6, .4) and (.1, .9); z = 1, a = 1: log(.3 * .9).
    node = Choice((Discrete(2), Discrete(2)))
    params = doubles(0.7, 0.3, 0.6, 0.4, 0.1, 0.9).log()
    got = node.log_prob(params, doubles(1, 0, 1))
    assert got.item() == pytest.approx(-1.3093333200, abs=1e-9)
    assert node.entropy(params).item() == pytest.approx(1.1794973610, abs=1e-9)


TREE = Joint(
    (
        Choice((Discrete(2), Joint((Discrete(3), Discrete(2)), "array"))),
        Discrete(3, start=-1),
    ),
    "dict",
    ("kind", "where"),
)
TREE_MASK = torch.tensor(
    [True, True, False, True, True, False, True, True, True, True, True, False]
)


@pytest.mark.parametrize("mask", [None, TREE_MASK])
def test_probabilities_of_a_tree_sum_to_one(mask: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(2)
    params = torch.randn(TREE.params, dtype=torch.float64, generator=generator)
    total, entropy = 0.0, 0.0
    for z, w in product(range(2), range(3)):
        inner = product(range(2)) if z == 0 else product(range(3), range(2))
        for parts in inner:
            row = (z, *parts, 0, 0, w) if z == 0 else (z, 0, *parts, w)
            log_prob = TREE.log_prob(params, doubles(*row), mask).item()
            total += math.exp(log_prob)
            entropy -= math.exp(log_prob) * log_prob if log_prob > -math.inf else 0.0
    assert total == pytest.approx(1, abs=1e-12)
    assert TREE.entropy(params, mask).item() == pytest.approx(entropy, abs=1e-12)


def test_samples_of_a_tree_keep_to_its_mask() -> None:
    generator = torch.Generator().manual_seed(3)
    params = torch.randn(400, TREE.params, generator=generator)
    drawn = TREE.sample(params, TREE_MASK.expand(400, -1), generator)
    assert drawn.shape == (400, TREE.latent)
    assert TREE.log_prob(params, drawn, TREE_MASK.expand(400, -1)).isfinite().all()
    assert TREE.log_prob(params, TREE.mode(params, TREE_MASK), TREE_MASK).isfinite().all()


def test_an_option_that_is_masked_whole_is_finite() -> None:
    node = Choice((Discrete(2), Discrete(2)))
    params = torch.zeros(6, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False, False])
    (node.log_prob(params, torch.tensor([0.0, 1, 0]), mask) + node.entropy(params, mask)).backward()
    assert params.grad is not None
    assert params.grad.isfinite().all()
    assert node.allowed(mask[None].numpy()).tolist() == [True]


@pytest.mark.parametrize(
    "mask",
    [[False, False, True, True, True, True], [True, True, True, True, False, False]],
)
def test_a_mask_that_allows_nothing_is_seen(mask: list[bool]) -> None:
    node = Choice((Discrete(2), Discrete(2)))
    assert node.allowed(np.array([mask])).tolist() == [False]


SPACES = [
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3], start=[5, -1]),
    spaces.MultiBinary(3),
    spaces.Box(np.array([[-1, 0], [0, 2]], np.float32), np.array([[1, 3], [4, 5]], np.float32)),
    spaces.Dict(
        {"b": spaces.Discrete(2), "a": spaces.Tuple((spaces.Box(-2, 2), spaces.Discrete(2)))}
    ),
    spaces.OneOf((spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.Dict(x=spaces.Discrete(2)))),
]


@pytest.mark.parametrize("bound", ["clip", "tanh"])
@pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__)
def test_environments_take_what_is_decoded(space: gymnasium.Space, bound: str) -> None:  # type: ignore[type-arg]
    from gymnasium.vector.utils import batch_space, iterate

    tree = tree_of(space, bound)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    params = torch.randn(300, tree.params, generator=generator)
    drawn = tree.sample(params, None, generator)
    assert drawn.shape == (300, tree.latent)
    actions = list(iterate(batch_space(space, 300), tree.decode(drawn.numpy())))
    assert len(actions) == 300
    assert all(space.contains(action) for action in actions)
    assert from_plain(to_plain(tree)) == tree


def test_entropy_is_the_mean_of_minus_log_prob() -> None:
    tree = tree_of(SPACES[5], "tanh")
    generator = torch.Generator().manual_seed(5)
    params = torch.randn(tree.params, generator=generator) * 0.5
    rows = params.expand(100_000, -1)
    mean = -tree.log_prob(rows, tree.sample(rows, None, generator)).mean()
    assert mean.item() == pytest.approx(tree.entropy(params).item(), abs=0.02)


@pytest.mark.untyped  # what the annotations rule out is refused without them too
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tree_of(spaces.Text(3)), "action space"),
        (lambda: tree_of(spaces.Box(0, 3, (2,), np.int64)), "action space"),
        (lambda: tree_of(spaces.Box(-np.inf, 1), "tanh"), "infinite bound"),
        (lambda: from_plain({"kind": "Discret", "n": 2}), "'Discrete'"),
        (lambda: from_plain({"kind": "Discrete", "m": 2}), "it takes n, start"),
        (lambda: Normal((1.0,), (0.0,)), "below its high"),
        (lambda: Normal((0.0,), (1.0,), bound="clamp"), "'clip' or 'tanh'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_action_space_is_refused(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=words):
        make()
