"""The same transitions in every autoreset mode; seeds; statistics; what environments do wrong."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rl import envs, probes
from rl.envs import EVALUATION, Adapted, Features, Serial, Vector, make
from zoo.errors import ConfigError, DataError, NonFiniteError

MODES = list(AutoresetMode)


def cartpole(limit: int = 12) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", max_episode_steps=limit, disable_env_checker=True)


def pendulum() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1", max_episode_steps=7, disable_env_checker=True)


def act(vector: Vector) -> np.ndarray:
    """Some action that is a function of the observation alone."""
    number = np.sin(40 * vector.obs.sum(-1, keepdims=True))
    if vector.mask is not None:
        return np.argmax(vector.mask, -1)[:, None].astype(np.float32)
    width = vector.actions.latent
    if vector.actions.masks:
        return np.repeat(number > 0, width, -1).astype(np.float32)
    return np.repeat(number, width, -1).astype(np.float32)


def transitions(vector: Vector, count: int) -> list[list[tuple[Any, ...]]]:
    """The first valid transitions of each environment."""
    found: list[list[tuple[Any, ...]]] = [[] for _ in range(vector.num_envs)]
    while min(map(len, found)) < count:
        obs, start, action = vector.obs.copy(), vector.start.copy(), act(vector)
        mask = None if vector.mask is None else vector.mask.copy()
        step = vector.step(action)
        for env in np.flatnonzero(step.valid):
            found[env].append(
                (
                    obs[env].tobytes(),
                    start[env],
                    action[env].tobytes(),
                    None if mask is None else mask[env].tobytes(),
                    step.obs[env].tobytes(),
                    step.reward[env],
                    step.terminated[env],
                    step.truncated[env],
                )
            )
    return [rows[:count] for rows in found]


@pytest.mark.parametrize("maker", [cartpole, pendulum, lambda: probes.Identity(4, 3, masked=True)])
def test_autoreset_modes_give_the_same_transitions(maker: Any) -> None:
    seen, episodes = [], []
    for mode in MODES:
        vector = Adapted(SyncVectorEnv([maker] * 3, autoreset_mode=mode), seed=5)
        seen.append(transitions(vector, 60))
        mine = [[e for e in vector.episodes if e.env == env][:4] for env in range(3)]
        episodes.append(mine)
    assert seen[0] == seen[1] == seen[2]
    assert episodes[0] == episodes[1] == episodes[2]
    assert any(row[6] or row[7] for row in seen[0][0])
    assert len({row[1] for row in seen[0][0]}) == 2


def test_the_first_episodes_are_also_those_of_our_own() -> None:
    adapted = Adapted(SyncVectorEnv([pendulum] * 2), seed=5)
    own = Serial([pendulum] * 2, 5)
    assert transitions(adapted, 7) == transitions(own, 7)


def test_gymnasium_s_fast_cartpole_is_right_too() -> None:
    env = gymnasium.make_vec("CartPole-v1", 3, max_episode_steps=10)  # NEXT_STEP, one generator
    vector = make(env, 3, 0)
    assert isinstance(vector, Adapted)
    steps = 0
    for _ in range(44):
        before = vector.obs
        step = vector.step(act(vector))
        steps += int(step.valid.sum())
        # Within a step the position follows the velocity; a reset breaks that.
        moved = before[:, 0] + 0.02 * before[:, 1]
        assert np.allclose(step.obs[step.valid, 0], moved[step.valid], atol=1e-5)
    assert all(e.length <= 10 and e.reward == e.length for e in vector.episodes)
    running = int(vector._length.sum())
    assert sum(e.length for e in vector.episodes) + running == steps < 44 * 3


def test_dict_observations_at_the_end_of_an_episode() -> None:
    for mode in MODES:
        vector = Adapted(SyncVectorEnv([probes.Arms] * 2, autoreset_mode=mode), seed=1)
        for _ in range(20):
            latent = np.zeros((2, vector.actions.latent), np.float32)
            step = vector.step(latent)
            assert step.obs.shape == (2, 5)
            assert step.reward[step.valid].tolist() == [0.5] * int(step.valid.sum())
        assert {e.reward for e in vector.episodes} == {4.0}


def test_seeds_depend_on_the_environment_and_the_episode_alone() -> None:
    two, four = (transitions(Serial([cartpole] * n, 3), 40) for n in (2, 4))
    assert two == four[:2]
    assert transitions(Serial([cartpole] * 2, 3, first=2), 40) == four[2:]
    assert transitions(Serial([cartpole] * 2, 4), 40) != two
    firsts = {row[0] for env in four for row in env if row[1]}
    held_out = transitions(Serial([cartpole] * 4, 3, stream=EVALUATION), 40)
    assert not firsts & {row[0] for env in held_out for row in env if row[1]}
    assert len(firsts) == sum(row[1] for env in four for row in env)


def test_a_state_is_restored_exactly() -> None:
    first = Serial([cartpole] * 3, 7)
    transitions(first, 17)
    state = first.state()
    expected = transitions(first, 30), first.episodes[-1]
    second = Serial([cartpole] * 3, 7)
    second.restore(state)
    assert (transitions(second, 30), second.episodes[-1]) == expected


def test_a_vector_environment_says_that_it_cannot_be_restored() -> None:
    vector = Adapted(SyncVectorEnv([cartpole]), 0)
    with pytest.warns(UserWarning, match="new episodes begin"):
        vector.restore(vector.state())


def test_categories_begin_where_their_space_does() -> None:
    row = Features(gymnasium.spaces.Discrete(19, start=2))(np.array([20]))[0]
    assert (len(row), row.argmax(), row.sum()) == (19, 18, 1)
    row = Features(gymnasium.spaces.MultiDiscrete([2, 3], start=[0, 5]))(np.array([[1, 7]]))[0]
    assert row.tolist() == [0, 1, 0, 0, 1]
    space = gymnasium.spaces.Tuple(
        (gymnasium.spaces.Box(0, 1, (2, 2)), gymnasium.spaces.Discrete(2))
    )
    row = Features(space)((np.ones((1, 2, 2)), np.array([1])))[0]
    assert row.tolist() == [1, 1, 1, 1, 0, 1]


class Broken(probes.Constant):
    """Wrong in the way that it is told, in its second step."""

    how = ""

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array([self.how != "nothing" or self.t < 1, False])}

    def step(self, action: Any) -> probes.Answer:
        obs, reward, _, _, _ = super().step(action)
        if self.t == 2:
            if self.how == "raises":
                raise ValueError("a hole")
            if self.how == "observation":
                obs = obs * np.nan
            if self.how == "reward":
                reward = float("inf")
        return obs, reward, False, False, self._info()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("raises", DataError, "environment 0 raised ValueError at step 2 on action 0: 'a hole'"),
        ("observation", NonFiniteError, "observation of environment 0 at step 2 is .nan"),
        ("reward", NonFiniteError, "reward of environment 0 at step 2 is .inf"),
        ("nothing", DataError, "environment 0 at step 1 allows no action"),
    ],
)
def test_what_an_environment_does_wrong_is_said(how: str, error: Any, words: str) -> None:
    def maker() -> Broken:
        env = Broken(9)
        env.how = how
        return env

    vector = Serial([maker] * 2, 0)
    action = np.zeros((2, 1), np.float32)
    if how != "nothing":
        vector.step(action)
    with pytest.raises(error, match=words) as caught:
        vector.step(action)
    assert len(caught.value.line) <= 200
    assert "Broken" in caught.value.line


class Modeless(VectorEnv[Any, Any, Any]):
    metadata = {}  # noqa: RUF012
    spec = None


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: make("CartPol-v1", 1, 0), "'CartPole-v1'"),
        (lambda: make(SyncVectorEnv([cartpole]), 3, 0), "1 environments, the recipe 3"),
        (lambda: Adapted(Modeless(), 0), "autoreset_mode"),
        (lambda: Features(gymnasium.spaces.Text(3)), "observation space"),
    ],
)
def test_what_is_no_environment_is_refused(make_it: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_it()
    assert len(caught.value.line) <= 200


def test_a_mask_of_another_size_is_refused() -> None:
    class Short(probes.Identity):
        def _info(self) -> dict[str, Any]:
            return {"action_mask": np.ones(2, bool)}

    with pytest.raises(DataError, match="4 options"):
        make(Short, 2, 0)


def test_names_and_classes_make_environments() -> None:
    named = envs.make("CartPole-v1", 2, 0)
    assert (named.name, named.obs.shape, named.actions.params) == ("CartPole-v1", (2, 4), 2)
    assert envs.make(probes.Aim, 2, 0).name == "Aim"
