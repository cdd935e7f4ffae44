"""Branches: four ways to run them decide alike, and the path is part of the action."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl import probes
from rl.actions import Discrete, Normal, to_plain
from rl.branching import Branch, Branched, Scripted, exits, macs
from rl.distillation import distil, exit_where_alike
from rl.envs import make
from rl.evaluation import evaluate
from rl.policy import Policy, PolicyConfig, load_policy, save_policy
from rl.ppo import train
from rl.pricing import Pricing
from rl.recipe import PPORecipe
from zoo.errors import ConfigError, ExportError
from zoo.training.recipe import AdamW

SURE = 1e-4  # margin below which rounding may decide


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def two() -> Branch:
    torch.manual_seed(0)
    return Branch(nn.Linear(5, 2), [nn.Linear(5, 3), mlp(5, 16, 16, 3)])


def nested() -> Branch:
    torch.manual_seed(1)
    inner = Branch(nn.Linear(8, 3), [nn.Linear(8, 3), mlp(8, 9, 3), mlp(8, 7, 3)], stem=mlp(5, 8))
    return Branch(nn.Linear(5, 2), [nn.Linear(5, 3), inner])


def early() -> Branch:
    torch.manual_seed(2)
    stages = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in ((5, 8), (8, 8), (8, 8))]
    return exits(stages, [nn.Linear(8, 3) for _ in range(3)], [nn.Linear(8, 2) for _ in range(2)])


KINDS = {"two": two, "nested": nested, "exits": early}


def rows(n: int = 200) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(3))


def sure(branch: Branch, x: Tensor) -> Tensor:
    return torch.tensor([found.margin > SURE for found in branch.explain(x)])


@pytest.mark.parametrize("kind", KINDS)
def test_four_executions_decide_alike(kind: str) -> None:
    branch, x = KINDS[kind](), rows()
    kept = sure(branch, x)
    assert kept.sum() > 190
    with torch.no_grad():
        found = {how: branch(x, how)[kept] for how in ("if", "group", "dense", "auto")}
    assert len({e.path for e in branch.explain(x)}) > 1
    for values in found.values():
        torch.testing.assert_close(values, found["if"], atol=1e-6, rtol=0)
        assert torch.equal(values.argmax(-1), found["if"].argmax(-1))


@pytest.mark.untyped
@pytest.mark.parametrize("kind", KINDS)
def test_conditions_decide_as_a_python_if(kind: str) -> None:
    branch, x = KINDS[kind](), rows(20)
    x = x[sure(branch, x)]
    with torch.no_grad():
        torch.testing.assert_close(branch(x, "cond"), branch(x, "if"), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_decides_for_itself_whatever_the_batch(kind: str) -> None:
    branch, x = KINDS[kind](), rows(64)
    with torch.no_grad():
        alone = torch.cat([branch(row[None]) for row in x])
        assert torch.equal(branch(x, "if"), alone)
        for how in ("group", "dense"):
            together = branch(torch.cat((x, 100 * rows(500))), how)[:64]
            kept = sure(branch, x)
            torch.testing.assert_close(together[kept], alone[kept], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_path(kind: str) -> None:
    x, found = rows(30), []
    for how in ("if", "group", "dense"):
        branch = KINDS[kind]()
        branch(x, how).square().sum().backward()
        zero = [torch.zeros(()) if p.grad is None else p.grad.sum() for p in branch.parameters()]
        found.append(torch.stack(zero))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0], found[2], atol=1e-4, rtol=1e-4)


@pytest.mark.untyped
def test_conditional_gradients_are_those_of_a_python_if() -> None:
    found = []
    for how in ("if", "cond"):
        branch = two()
        for row in rows(6):
            branch(row[None], how).square().sum().backward()
        grads = [p.grad for p in branch.branches.parameters() if p.grad is not None]
        found.append(torch.cat([g.flatten() for g in grads]))
    torch.testing.assert_close(found[0], found[1])


def test_what_was_drawn_is_run_and_nothing_else() -> None:
    branch, x = nested(), rows(300)
    out = branch.sample(x, torch.Generator().manual_seed(4))
    again = branch.evaluate(x, out.path)
    for one, other in zip(out, again, strict=True):
        assert torch.equal(one, other)
    tree = branch.tree(Discrete(3))
    latent = torch.zeros(300, tree.latent)
    gate, inner = out.path[:, 0], out.path[:, 1]
    latent[:, 0], latent[:, 2] = gate, inner  # gate, action 0, inner gate, three actions
    assert torch.equal(tree.cost(latent), out.cost)
    # The density of the path, from the parameters of all branches at once.
    params = branch.dense(x)
    (own, _, rest), *_ = tree._rows(params, None, None)
    expected = own.log_softmax(-1).gather(-1, gate[:, None].long())[:, 0]
    behind = rest[:, :3].log_softmax(-1).gather(-1, inner[:, None].long())[:, 0]
    expected = expected + torch.where(gate == 1, behind, 0.0)
    torch.testing.assert_close(out.log_prob, expected)


def test_a_branch_not_taken_gets_no_gradient_of_the_action() -> None:
    branch, x = two(), rows(40)
    tree = branch.tree(Discrete(3))
    latent = torch.zeros(40, tree.latent)  # all took branch 0
    tree.log_prob(branch.dense(x), latent).sum().backward()
    assert all(float(p.grad.abs().max()) == 0 for p in branch.branches[1].parameters())  # type: ignore[union-attr]
    assert all(float(p.grad.abs().max()) > 0 for p in branch.branches[0].parameters())  # type: ignore[union-attr]


def test_path_and_action_by_hand() -> None:
    # Gate (.7, .3), heads (.6, .4) and (.1, .9); z = 1, a = 1: log(.3 * .9).
    tree = Branched((Discrete(2), Discrete(2)), (1.0, 4.0))
    params = torch.tensor([0.7, 0.3, 0.6, 0.4, 0.1, 0.9], dtype=torch.float64).log()
    latent = torch.tensor([1.0, 0, 1], dtype=torch.float64)
    assert tree.log_prob(params, latent).item() == pytest.approx(-1.3093333200, abs=1e-9)
    assert tree.entropy(params).item() == pytest.approx(1.1794973610, abs=1e-9)
    assert tree.path_entropy(params).item() == pytest.approx(0.6108643021, abs=1e-9)
    assert tree.cost(latent).item() == 4
    assert tree.taken(latent).tolist() == [1]
    total = sum(
        tree.log_prob(params, torch.tensor([z, *((a, 0) if z == 0 else (0, a))])).exp().item()
        for z in range(2)
        for a in range(2)
    )
    assert total == pytest.approx(1, abs=1e-12)


def test_a_mask_is_that_of_the_action_in_every_branch() -> None:
    tree = nested().tree(Discrete(3))
    mask = torch.tensor([True, False, True]).expand(500, 3)
    params = torch.randn(500, tree.params, generator=torch.Generator().manual_seed(5))
    drawn = tree.sample(params, mask, torch.Generator().manual_seed(6))
    assert set(tree.taken(drawn)[:, 0].tolist()) == {0.0, 2.0}
    assert tree.log_prob(params, drawn, mask).isfinite().all()
    assert set(tree.decode(drawn.numpy()).tolist()) == {0, 2}
    assert tree.masks == 3
    assert not tree.allowed(~(mask | ~mask).numpy()).any()


def test_branches_that_are_the_same_are_the_plain_policy() -> None:
    head = mlp(5, 8, 2)
    torch.manual_seed(0)
    branch = Branch(nn.Linear(5, 2), [head, head])
    tree, x = branch.tree(Discrete(2)), rows(50)
    params = branch.dense(x)
    for a in range(2):
        both = [
            tree.log_prob(params, torch.tensor([z, a, a]).expand(50, 3).float()) for z in range(2)
        ]
        joined = torch.logsumexp(torch.stack(both), 0)
        torch.testing.assert_close(joined, head(x).log_softmax(-1)[:, a], atol=1e-6, rtol=0)
    assert torch.equal(branch(x, "dense"), head(x))


def test_costs_are_multiply_adds_of_the_path() -> None:
    branch = two()
    assert branch.costs == (10 + 15, 10 + 5 * 16 + 16 * 16 + 16 * 3)
    assert {e.cost for e in branch.explain(rows())} == set(branch.costs)
    last = early()
    # Stage 40 or 64, gate 16, head 24; the last stage has no gate.
    assert {e.cost for e in last.explain(rows(2000))} <= {80, 160, 80 - 24 + 80 + 88}
    assert last.tree(Discrete(3)).largest == 56 + 80 + 88
    assert macs(nn.Identity()) == 0
    given = Branch(nn.Linear(5, 2), [nn.Linear(5, 3), nn.Linear(5, 3)], cost=[1, 2])
    assert given.costs == (11, 12)


def test_temperature_changes_the_draw_and_not_the_program() -> None:
    branch, x = nested(), rows()
    before = branch(x, "dense")
    branch.set_temperature(0.01)
    assert torch.equal(branch(x, "dense"), before)
    drawn = branch.sample(x, torch.Generator().manual_seed(7)).path[:, 0]
    taken = torch.tensor([float(e.path[0]) for e in branch.explain(x)])
    assert (drawn == taken).float().mean() > 0.97


def test_the_price_rises_and_the_gates_close() -> None:
    pricing = Pricing(price=0.4, begins=0.1, full=0.3, temperature=0.25, entropy_floor=0.2)
    prices = [pricing.price_at(p) for p in (0, 0.1, 0.2, 0.3, 1)]
    assert prices == pytest.approx([0, 0, 0.2, 0.4, 0.4])
    assert [pricing.temperature_at(p) for p in (0, 0.3, 0.65, 1)] == pytest.approx(
        [1, 1, 0.5, 0.25]
    )
    assert [pricing.floor_at(p) for p in (0, 0.5, 1)] == pytest.approx([0.2, 0.1, 0])
    tree = Branched((Discrete(2), Discrete(2)), (1.0, 4.0))
    latent = torch.tensor([[0.0, 0, 0], [1, 0, 0]])
    got = pricing.reward(torch.ones(2), tree, latent, 1.0)
    assert got.tolist() == pytest.approx([1 - 0.4 / 4, 1 - 0.4])


def test_below_the_floor_the_gates_are_pushed_open() -> None:
    tree = Branched((Discrete(2), Discrete(2)), (1.0, 4.0))
    shut = torch.tensor([[6.0, 0, 0, 0, 0, 0]], requires_grad=True)
    pricing = Pricing(entropy_floor=0.5, entropy_coef=0.0)
    pricing.bonus(tree, shut, 0.0).backward()
    assert shut.grad is not None
    assert shut.grad[0, 0] > 0 > shut.grad[0, 1]  # a step down opens the gate
    assert pricing.bonus(tree, torch.zeros(1, 6), 0.0).item() == 0  # ln 2 is above the floor


@pytest.mark.untyped
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_and_an_exported_program_take_the_same_path(kind: str, tmp_path: Path) -> None:
    branch = KINDS[kind]().eval()
    one = rows(1)
    with torch.no_grad(), pytest.warns(FutureWarning):
        script = torch.jit.script(Scripted(branch))
    exported = torch.export.export(branch, (one,))
    torch.export.save(exported, str(tmp_path / "one.pt2"))
    program = torch.export.load(str(tmp_path / "one.pt2")).module()
    assert "cond" in str(exported.graph)
    many = torch.export.export(branch, (rows(7),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    with torch.no_grad():
        x = rows()[sure(branch, rows())]
        assert torch.equal(torch.cat([script(row[None]) for row in x]), branch(x, "if"))
        assert torch.equal(torch.cat([program(row[None]) for row in x]), branch(x, "if"))
        torch.testing.assert_close(many.module()(x), branch(x, "if"), atol=1e-6, rtol=0)


@pytest.mark.untyped
def test_onnx_has_a_real_if(tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    branch = two().eval()
    file = tmp_path / "one.onnx"
    torch.onnx.export(branch, (rows(1),), str(file), dynamo=True, verbose=False)
    assert "If" in {node.op_type for node in onnx.load(str(file)).graph.node}
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    x = rows()[sure(branch, rows())]
    found = [torch.from_numpy(session.run(None, {name: row[None].numpy()})[0]) for row in x]
    torch.testing.assert_close(torch.cat(found), branch(x, "if"), atol=1e-5, rtol=0)


@pytest.mark.untyped
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_a_python_if_is_refused() -> None:
    branch = two()

    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = branch(x, "if")
            return out

    with pytest.raises(ExportError, match="only the branch that the example takes"):
        torch.jit.trace(Always(), (rows(1),))
    traced = torch.jit.trace(branch, (rows(1),))  # rows by rows, which a trace can hold
    x = rows()[sure(branch, rows())]
    torch.testing.assert_close(traced(x), branch(x, "if"), atol=1e-6, rtol=0)


CASES: list[tuple[Any, str]] = [
    (lambda: Branch(nn.Linear(2, 1), [nn.Linear(2, 2)]), "has 1 branches; give 2"),
    (lambda: Branch(nn.Linear(2, 2), [nn.Identity()] * 2, cost=[1.0]), "has 1 costs"),
    (lambda: two()(rows(2), "loop"), "execution is 'loop'"),
    (lambda: exits([nn.Identity()], [nn.Identity()], []), "n from 2"),
    (lambda: Pricing(temperature=0.0), "temperature is 0.0; it takes more than 0"),
    (lambda: Pricing(begins=0.5), "begins is 0.5; it takes 0 to full"),
    (lambda: PolicyConfig(observation=2, branches=((4,),)), "give none or at least two"),
    (lambda: PolicyConfig(observation=2, exits=True, hidden=(4,)), "two hidden layers"),
    (
        lambda: Policy(PolicyConfig(observation=2, actions=to_plain(Discrete(2)))).explain(
            torch.zeros(1, 2)
        ),
        "has no branches",
    ),
]


@pytest.mark.untyped
@pytest.mark.parametrize("place", range(len(CASES)))
def test_what_is_no_branch_is_refused(place: int) -> None:
    make_it, words = CASES[place]
    with pytest.raises(ConfigError, match=words):
        make_it()


SMALL = PPORecipe(
    num_envs=32,
    steps=8,
    epochs=4,
    minibatches=2,
    hidden=(32,),
    gamma=0.9,
    entropy_coef=0.01,
    optimizer=AdamW(lr=1e-2, eps=1e-5, weight_decay=0.0),
)
SOLVED: dict[str, tuple[Any, PPORecipe, int, float]] = {
    "branches": (lambda: probes.Identity(start=2), replace(SMALL, branches=((), (16,))), 25, 0.99),
    "masks": (lambda: probes.Identity(masked=True), replace(SMALL, branches=((), (8,))), 25, 0.99),
    "exits": (lambda: probes.Identity(), replace(SMALL, hidden=(16, 16), exits=True), 25, 0.99),
    "memory, masks": (
        lambda: probes.Remember(masked=True),
        replace(SMALL, memory=16, branches=((), (16,))),
        30,
        0.99,
    ),
    "real": (
        probes.Aim,
        replace(SMALL, branches=((), (16,)), log_std=-0.5, entropy_coef=0.0),
        30,
        0.97,
    ),
}


@pytest.mark.parametrize("name", SOLVED)
def test_branched_policies_solve_the_probes(name: str) -> None:
    env, recipe, iterations, share = SOLVED[name]
    policy = train(env, replace(recipe, total_steps=256 * iterations)).policy
    assert sum(evaluate(policy, env, episodes=50)) / 50 >= share * env().best


def test_choices_of_actions_branches_masks_and_memory_go_together(tmp_path: Path) -> None:
    recipe = replace(SMALL, memory=8, branches=((), (8,)), num_envs=8, total_steps=256)
    policy = train(probes.Arms, recipe).policy
    assert len(evaluate(policy, probes.Arms, episodes=4)) == 4
    save_policy(policy, tmp_path)
    obs = torch.randn(6, policy.config.observation)
    state, start = policy.first(6), torch.zeros(6, dtype=torch.bool)
    one, other = (p.act(obs, state, start)[0] for p in (policy, load_policy(tmp_path)))
    assert torch.equal(one, other)


def test_a_program_of_real_actions_is_that_of_the_tree() -> None:
    tree = to_plain(Normal((-1.0, 0.0), (1.0, 2.0)))
    config = PolicyConfig(observation=5, actions=tree, branches=((), (8,)))
    torch.manual_seed(0)
    policy, x = Policy(config), rows(40)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_()
        out = policy.unroll(x[None], policy.first(40), torch.zeros(1, 40, dtype=torch.bool))
        wanted = policy.taken(policy.tree.mode(out.params[0]))
        params, _ = policy(x)
        torch.testing.assert_close(policy.actions.mode(params), wanted, atol=1e-5, rtol=0)


def test_a_cheap_pupil_is_left_where_it_disagrees() -> None:
    teacher = train(
        lambda: probes.BitDepth(2), replace(SMALL, total_steps=256 * 50, hidden=(32, 32))
    ).policy
    assert sum(evaluate(teacher, lambda: probes.BitDepth(2), 50)) / 50 > 7.8
    vector = make(lambda: probes.BitDepth(2), 16, 1)
    pupil, states = distil(teacher, vector, (), rounds=3, steps=64, epochs=10)
    both = exit_where_alike(teacher, pupil, states, missed=0.0)
    # A line tells the sign of one bit and not that of a product of two.
    differ = teacher(states)[0].argmax(-1) != pupil(states)[0].argmax(-1)
    assert 0.05 < differ.float().mean() < 0.5
    assert torch.equal(both(states)[0].argmax(-1), teacher(states)[0].argmax(-1))
    deep = torch.tensor([e.path == (1,) for e in both.explain(states)])
    assert deep[differ].all()
    assert deep.float().mean() < 0.9
    with pytest.raises(ConfigError, match="without memory, branches"):
        distil(both, vector, ())
    with pytest.raises(ConfigError, match="missed is 1"):
        exit_where_alike(teacher, pupil, states, missed=1.0)


def test_bits_and_switched_poles_are_what_they_say() -> None:
    env = probes.BitDepth(3)
    obs, _ = env.reset(seed=0)
    for _ in range(20):
        k = int(obs[:3].argmax()) + 1
        right = math.prod(obs[3 : 3 + k].tolist()) > 0
        assert not obs[3 + k :].any()
        obs, reward, over, _, _ = env.step(int(right))
        assert reward == 1
        if over:
            obs, _ = env.reset()
    pole = probes.SwitchPole(hard=1.0)
    for seed in range(8):
        obs, _ = pole.reset(seed=seed)
        assert obs[4] == 1
        right = math.prod(obs[5:].tolist()) < 0  # then action 1 pushes to the right
        speed = obs[1]
        after = pole.step(1 if right else 0)[0][1]
        assert after > speed
    assert sum(pole.reset(seed=s)[0][4] for s in range(50)) == 50
    assert sum(probes.SwitchPole(hard=0.0).reset(seed=s)[0][4] for s in range(50)) == 0
