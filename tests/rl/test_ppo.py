"""PPO: the numbers by hand, resuming, and environments whose best return is known."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl import probes
from rl.envs import make
from rl.evaluation import evaluate
from rl.policy import load_policy
from rl.ppo import Learner, Minibatch, gae, normalized, ppo_loss, train
from rl.recipe import PPORecipe
from rl.rollout import rollout
from rl.state import Training, make_policy
from zoo.errors import ConfigError
from zoo.training.recipe import AdamW


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def column(*values: float) -> torch.Tensor:
    return doubles(*values)[:, None]


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)[:, None]


def test_advantages_by_hand() -> None:
    # gamma .99, lambda .95; the second step is cut short where the value is 10.
    # deltas 1.49, 10.9, 3.48, 4.475; from the end: 4.475, 3.48 + .9405 * 4.475, 10.9, ...
    reward, value = column(1, 2, 3, 4), column(0.5, 1, 1.5, 2)
    following = column(1, 10, 2, 2.5)
    none, cut = flags(0, 0, 0, 0), flags(0, 1, 0, 0)
    advantage, returns = gae(reward, value, following, none, cut, 0.99, 0.95)
    assert advantage[:, 0].tolist() == pytest.approx([11.74145, 10.9, 7.6887375, 4.475], abs=1e-9)
    assert returns[:, 0].tolist() == pytest.approx([12.24145, 11.9, 9.1887375, 6.475], abs=1e-9)
    advantage, _ = gae(reward, value, following, cut, none, 0.99, 0.95)
    assert advantage[:2, 0].tolist() == pytest.approx([2.4305, 1.0], abs=1e-9)


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [(True, [11.11575515, 10.8663, 10.6]), (False, [2.358806675, 1.55535, 0.7])],
)
def test_a_limit_of_time_is_no_end(truncated: bool, expected: list[float]) -> None:
    ended, none = flags(0, 0, 1), flags(0, 0, 0)
    which = (none, ended) if truncated else (ended, none)
    values = column(0.5, 0.4, 0.3), column(0.4, 0.3, 10)
    advantage, _ = gae(column(1, 1, 1), *values, *which, 0.99, 0.95)
    assert advantage[:, 0].tolist() == pytest.approx(expected, abs=1e-9)


def test_a_value_behind_the_end_is_never_read() -> None:
    nothing = torch.full((1, 1), math.nan)
    advantage, _ = gae(column(1), column(0.5), nothing, flags(1), flags(0), 0.99, 0.95)
    assert advantage.item() == 0.5


def loss_of(ratio: torch.Tensor, advantage: torch.Tensor, **others: Any) -> Any:
    n = torch.zeros(len(ratio), dtype=torch.float64)
    given = {"value": n, "old_value": n, "returns": n, "entropy": n, "clip": 0.2, **others}
    return ppo_loss(
        ratio.log(),
        given.pop("entropy"),
        given.pop("value"),
        old_log_prob=n,
        advantage=advantage,
        **given,
    )


def test_the_clipped_surrogate_by_hand() -> None:
    # Ratios 1.5, .5, 1.1 with advantages 1, -1, 2: terms 1.2, -.8, 2.2.
    ratio = doubles(1.5, 0.5, 1.1).requires_grad_()
    loss = loss_of(ratio, doubles(1, -1, 2))
    assert loss.policy.item() == pytest.approx(-0.8666666667, abs=1e-9)
    assert loss.clipped.item() == pytest.approx(2 / 3)
    assert loss.kl_plain.item() == pytest.approx(0.0641239642, abs=1e-9)
    assert loss.kl.item() == pytest.approx(0.0974572975, abs=1e-9)
    loss.total.backward()
    assert ratio.grad is not None
    slopes = ratio.grad * ratio.detach()  # by the logarithm of the ratio
    assert slopes.tolist() == pytest.approx([0, 0, -0.7333333333], abs=1e-9)


@pytest.mark.parametrize(("ratio", "advantage", "term"), [(0.5, 1.0, 0.5), (1.5, -1.0, -1.5)])
def test_what_went_wrong_is_never_clipped(ratio: float, advantage: float, term: float) -> None:
    assert loss_of(doubles(ratio), doubles(advantage)).policy.item() == pytest.approx(-term)


@pytest.mark.parametrize(("target", "expected"), [(3.0, 1.62), (1.1, 0.405)])
def test_the_clipped_value_by_hand(target: float, expected: float) -> None:
    # From 1 to 2, clipped at 1.2: half the larger of the two squared errors.
    given = {"value": doubles(2), "old_value": doubles(1), "returns": doubles(target)}
    loss = loss_of(doubles(1), doubles(0), value_clip=0.2, **given)
    assert loss.value.item() == pytest.approx(expected)
    assert loss.total.item() == pytest.approx(0.5 * expected)


def test_entropy_is_a_bonus() -> None:
    loss = loss_of(doubles(1, 1), doubles(0, 0), entropy=doubles(1, 3), entropy_coef=0.1)
    assert loss.total.item() == pytest.approx(-0.2)


def test_advantages_are_normalized() -> None:
    expected = [-0.8728715553, -0.2182178888, 1.0910894410]
    assert normalized(doubles(1, 2, 4)).tolist() == pytest.approx(expected, abs=1e-7)
    assert normalized(doubles(5)).tolist() == [5]
    assert normalized(doubles(5, 5)).tolist() == [0, 0]


TINY = PPORecipe(num_envs=4, steps=16, total_steps=256, minibatches=2, epochs=2, hidden=(8,))


def cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", max_episode_steps=11, disable_env_checker=True)


KINDS: dict[str, tuple[Any, PPORecipe]] = {
    "plain": (cartpole, TINY),
    "normalized": (
        cartpole,
        replace(TINY, normalize_observations=True, normalize_rewards=True, kl_stop=0.05),
    ),
    "memory": (cartpole, replace(TINY, memory=6)),
    "squashed": (probes.Aim, replace(TINY, bound="tanh", value_clip=0.2)),
    "tree": (probes.Arms, replace(TINY, entropy_coef=0.01)),
    "tree, masks, memory": (probes.Arms, replace(TINY, memory=6, bound="tanh")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratio_is_one(kind: str) -> None:
    env, recipe = KINDS[kind]
    vector = make(env, 4, 0, bound=recipe.bound)
    policy = make_policy(vector, recipe)
    learner = Learner(policy, recipe)
    state = policy.first(4)
    for _ in range(2):  # the second begins within episodes
        before = state
        seen, state = rollout(policy, vector, state, 16, learner.generator)
        zeros = torch.zeros(16, 4)
        whole = Minibatch(seen, before, zeros, zeros)
        for batch in learner._batches(whole):
            loss = learner.loss(batch)
            assert loss.kl.item() == pytest.approx(0, abs=1e-6)
            assert loss.clipped.item() == 0


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_values_of_a_rollout_are_those_of_the_true_next_states(mode: AutoresetMode) -> None:
    vector = make(SyncVectorEnv([cartpole] * 3, autoreset_mode=mode), 3, 0)
    policy = make_policy(vector, TINY)
    generator = torch.Generator().manual_seed(0)
    seen, _ = rollout(policy, vector, policy.first(3), 30, generator)
    cut = seen.truncated & seen.valid
    assert cut.any()
    assert seen.valid.all() == (mode is not AutoresetMode.NEXT_STEP)
    # A pole's next state, worked out from the one before: its value is the one that was noted.
    going = seen.valid & ~seen.terminated & ~seen.truncated
    going[-1] = False
    assert torch.equal(seen.next_value[going], seen.value[1:][going[:-1]])
    env = cartpole().unwrapped
    for t, n in cut.nonzero().tolist():
        env.reset()
        env.state = seen.obs[t, n].double().numpy()  # type: ignore[attr-defined]
        obs = torch.from_numpy(env.step(int(seen.action[t, n, 0]))[0])
        expected = policy.value(obs[None], policy.first(1))
        assert seen.next_value[t, n].item() == pytest.approx(expected.item(), abs=1e-5)


def test_one_sample_alone_leaves_everything_finite() -> None:
    recipe = replace(TINY, num_envs=1, steps=5, total_steps=5, minibatches=3)  # 2, 2 and 1
    result = train(cartpole, recipe)
    assert all(p.isfinite().all() for p in result.policy.parameters())
    assert result.steps == 5


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_ended_anywhere_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    env, recipe = KINDS[kind]
    whole = train(env, recipe, tmp_path / "whole")
    assert whole.iterations == 4
    for ended in range(1, 4):
        folder = tmp_path / str(ended)
        killed = replace(recipe, checkpoint_every=1)
        _end_after(env, killed, folder, ended)
        result = train(env, killed, folder)
        assert same(whole.policy, result.policy)
        lines = [
            (tmp_path / "whole" / "metrics.jsonl").read_text(),
            (folder / "metrics.jsonl").read_text(),
        ]
        assert lines[0] == lines[1]
        assert same(load_policy(folder / "weights"), whole.policy)


def _end_after(env: Any, recipe: PPORecipe, folder: Path, iterations: int) -> None:
    """Run so many iterations and die."""

    class DiedError(Exception):
        pass

    real = Training.iterate

    def iterate(run: Training) -> dict[str, float]:
        if run.position.step == iterations:
            raise DiedError
        return real(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "iterate", iterate)
        with pytest.raises(DiedError):
            train(env, recipe, folder)


def test_the_same_seed_gives_the_same_policy_and_another_seed_another() -> None:
    one, two = train(cartpole, TINY), train(cartpole, TINY)
    other = train(cartpole, replace(TINY, seed=1))
    assert same(one.policy, two.policy)
    assert not same(one.policy, other.policy)


def test_kl_stops_an_update() -> None:
    recipe = replace(TINY, epochs=50, kl_stop=0.01, optimizer=AdamW(lr=0.05, weight_decay=0.0))
    vector = make(cartpole, 4, 0)
    run = Training(vector, Learner(make_policy(vector, recipe), recipe), None)
    assert run.iterate()["updates"] < 20


def value_of(env: Any, gamma: float, **changes: Any) -> float:
    """What a policy learns of the value of the first state."""
    recipe = PPORecipe(
        num_envs=8,
        steps=12,
        total_steps=8 * 12 * 16,
        gamma=gamma,
        hidden=(16,),
        minibatches=1,
        epochs=12,
        optimizer=AdamW(lr=1e-2, eps=1e-5, weight_decay=0.0),
        clip_norm=None,
    )
    policy = train(env, replace(recipe, **changes)).policy
    obs = torch.zeros(1, policy.config.observation)
    return float(policy.value(obs, policy.first(1)).detach())


def test_values_come_to_what_they_are() -> None:
    assert value_of(probes.Constant, 0.5) == pytest.approx(1, abs=0.02)
    assert value_of(probes.Delayed, 0.7) == pytest.approx(0.7, abs=0.03)


def test_behind_a_limit_of_time_the_value_goes_on() -> None:
    # Reward 1 for ever, gamma .9: 10. As an end, 3 steps would be worth 2 to 2.7.
    got = value_of(lambda: probes.Constant(3, truncated=True), 0.9, gae_lambda=1.0, epochs=24)
    assert got == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_row_of_a_reset_is_no_sample(mode: AutoresetMode) -> None:
    # One step, reward 1, gamma .5: V = 1; with the reset rows learned from it would be 2/3.
    env = SyncVectorEnv([probes.Constant] * 8, autoreset_mode=mode)
    assert value_of(env, 0.5, gae_lambda=0.0) == pytest.approx(1, abs=0.02)


FAST = PPORecipe(
    num_envs=32,
    steps=8,
    epochs=4,
    minibatches=2,
    hidden=(32,),
    gamma=0.9,
    entropy_coef=0.01,
    optimizer=AdamW(lr=1e-2, eps=1e-5, weight_decay=0.0),
)
REAL = replace(FAST, entropy_coef=0.0, log_std=-0.5)
SOLVED: dict[str, tuple[Any, PPORecipe, int, float]] = {
    "identity": (lambda: probes.Identity(start=2), FAST, 25, 0.99),
    "masked": (lambda: probes.Identity(masked=True), FAST, 25, 0.99),
    "aim": (probes.Aim, REAL, 25, 0.97),
    "aim, squashed": (probes.Aim, replace(REAL, bound="tanh"), 40, 0.97),
    "remember, masked": (lambda: probes.Remember(masked=True), replace(FAST, memory=16), 25, 0.99),
    "normalized": (
        probes.Identity,
        replace(FAST, normalize_observations=True, normalize_rewards=True),
        25,
        0.99,
    ),
}


@pytest.mark.parametrize("name", SOLVED)
def test_probes_are_solved(name: str) -> None:
    env, recipe, iterations, share = SOLVED[name]
    policy = train(env, replace(recipe, total_steps=256 * iterations)).policy
    returns = evaluate(policy, env, episodes=50)
    assert sum(returns) / 50 >= share * env().best


def test_without_memory_nothing_is_remembered() -> None:
    returns = evaluate(
        train(probes.Remember, replace(FAST, total_steps=1280)).policy, probes.Remember
    )
    assert 0.3 < sum(returns) / 100 < 0.7


def test_evaluation_takes_each_episode_once_and_repeats() -> None:
    policy = train(cartpole, TINY).policy
    first, again = (evaluate(policy, cartpole, 7, seed=3) for _ in range(2))
    assert first == again
    assert evaluate(policy, cartpole, 3, seed=3) == first[:3]
    drawn = evaluate(policy, cartpole, 20, greedy=False)
    assert len(drawn) == 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gamma": 1.5}, "gamma is 1.5; it takes 0 to 1"),
        ({"num_envs": 0}, "num_envs is 0; it takes 1 or more"),
        ({"minibatches": 100}, "minibatches is 100; it takes 1 to 64"),
        ({"memory": 4, "minibatches": 5}, "minibatches is 5; it takes 1 to 4"),
        ({"kl_stop": 0.0}, "kl_stop is 0.0; it takes more than 0"),
        ({"entropy_coef": -1.0}, "entropy_coef is -1.0; it takes 0 or more"),
    ],
)
def test_a_recipe_out_of_range_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(TINY, **change)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set the recipe's env"):
        train(recipe=TINY)
    policy = train(cartpole, TINY, tmp_path).policy
    with pytest.raises(ConfigError, match="Acrobot-v1 has 6 numbers"):
        evaluate(policy, "Acrobot-v1", 2)
    with pytest.raises(ConfigError, match=r"holds a run with gamma 0\.99, now 0\.9"):
        train(cartpole, replace(TINY, gamma=0.9), tmp_path)
    with pytest.raises(ConfigError, match="holds no policy"):
        load_policy(tmp_path)


CARTPOLE = PPORecipe(
    env="CartPole-v1",
    total_steps=120_000,
    num_envs=32,
    steps=32,
    epochs=8,
    minibatches=4,
    gamma=0.98,
    gae_lambda=0.8,
    optimizer=AdamW(lr=2e-3, eps=1e-5, weight_decay=0.0),
    target=475.0,
)


@pytest.mark.prove
def test_cartpole_is_learned_from_nothing() -> None:
    for seed in range(3):
        policy = train(recipe=replace(CARTPOLE, seed=seed)).policy
        returns = evaluate(policy, "CartPole-v1", episodes=100)
        assert sum(returns) / 100 >= 475
