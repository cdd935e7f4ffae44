"""Environments in step with one another, as a policy wants them: rows of numbers and flags.

Whatever an environment does after the end of an episode, a `Step` holds the *true* next
observation, keeps `terminated` and `truncated` apart, and says which rows are samples at all: under
Gymnasium's NEXT_STEP the step after an end ignores its action and is none. Valid rows are the same,
bit for bit, under all three autoreset modes.

Episode statistics and normalisation are ours; Gymnasium's wrappers for both have had defects in
each mode, and still have some in 1.4.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from rl.actions import Node, tree_of
from zoo.data.order import seed_of
from zoo.errors import ConfigError, DataError, NonFiniteError, nearest, shown

EVALUATION = 1  # stream of seeds that training never draws from; that one is 0


class Step(NamedTuple):
    """What n environments answered; every array has n rows.

    Attributes:
        obs: True next observations, those that ended the episode where it ended: (n, width).
        reward: In float64.
        terminated: The state is final: its value is 0.
        truncated: The episode was cut short: the value of `obs` counts on.
        valid: False where the row is a reset, not a sample; what else it holds means nothing.
    """

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray


class Episode(NamedTuple):
    """A whole episode: the environment it ran in, the sum of its rewards, its valid steps."""

    env: int
    reward: float
    length: int


class Features:
    """Batched observations as rows of float32; categories are one-hot.

    Args:
        space: Of one observation: Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple.

    Attributes:
        width: Numbers of a row.

    Raises:
        ConfigError: A space of another kind.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self.parts: list[Features] = []
        match space:
            case spaces.Box() | spaces.MultiBinary():
                self.width = int(np.prod(space.shape))
            case spaces.Discrete():
                self.width = int(space.n)
            case spaces.MultiDiscrete():
                self.width = int(space.nvec.sum())
            case spaces.Dict() | spaces.Tuple():
                inner = space.values() if isinstance(space, spaces.Dict) else space.spaces
                self.parts = [Features(part) for part in inner]
                self.width = sum(part.width for part in self.parts)
            case _:
                raise ConfigError(
                    f"the observation space is {shown(space)}; it takes Box, Discrete, "
                    "MultiDiscrete, MultiBinary, and Dict and Tuple of them"
                )

    def __call__(self, batch: Any) -> np.ndarray:
        """Rows (n, width) of a batch as Gymnasium lays it out; always a copy."""
        space: Any = self.space
        match space:
            case spaces.Discrete():
                return _one_hot(batch - space.start, int(space.n))
            case spaces.MultiDiscrete():
                flat = (batch - space.start).reshape(len(batch), -1)
                each = zip(flat.T, space.nvec.ravel().tolist(), strict=True)
                return np.concatenate([_one_hot(column, n) for column, n in each], -1)
            case spaces.Dict() | spaces.Tuple():
                inner = [batch[key] for key in space] if isinstance(space, spaces.Dict) else batch
                rows = [part(own) for part, own in zip(self.parts, inner, strict=True)]
                return np.concatenate(rows, -1)
        return np.array(batch, np.float32).reshape(len(batch), -1)


def _one_hot(index: np.ndarray, n: int) -> np.ndarray:
    return np.asarray(np.asarray(index)[:, None] == np.arange(n), np.float32)


def _step(env: gymnasium.Env[Any, Any], action: Any) -> Any:
    return env.step(action)


class Vector(ABC):
    """n environments. `Serial` and `Adapted` are the two kinds.

    Args:
        name: Of the environment, for messages.
        num_envs: Number of environments, n.
        observation_space: Of one environment.
        action_space: Of one environment.
        bound: What keeps real actions within their bounds, "clip" or "tanh".

    Attributes:
        obs: Observations to act on now: (n, width).
        start: True where `obs` is the first of an episode.
        mask: What is allowed now, (n, masks), from ``info["action_mask"]``; None without.
        episodes: Finished since somebody last emptied the list.
    """

    obs: np.ndarray
    mask: np.ndarray | None = None

    def __init__(
        self,
        name: str,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        bound: Literal["clip", "tanh"] = "clip",
    ) -> None:
        self.name, self.num_envs = name, num_envs
        self.features = Features(observation_space)
        self.actions: Node = tree_of(action_space, bound)
        self.start = np.ones(num_envs, bool)
        self.episodes: list[Episode] = []
        self.steps = 0  # taken of every environment
        self._reward, self._length = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    @abstractmethod
    def step(self, latent: np.ndarray) -> Step:
        """Act on `obs`.

        Args:
            latent: Rows of `actions`: (n, latent).

        Raises:
            DataError: An environment raised an error, or its mask allows nothing.
            NonFiniteError: An observation or a reward is not finite.
        """

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """All that changes, or None if that cannot be known."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what `state` gave."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""

    def _count(self, step: Step) -> Step:
        """Check a step and add it to the statistics."""
        self.steps += 1
        for what, values in (("observation", step.obs), ("reward", step.reward[:, None])):
            if not np.isfinite(values).all():
                env = int(np.flatnonzero(~np.isfinite(values).all(-1))[0])
                raise NonFiniteError(
                    f"{self.name}: the {what} of environment {env} at step {self.steps} is "
                    f"{shown(values[env].tolist())}; it must be finite: mend the environment"
                )
        self._reward += np.where(step.valid, step.reward, 0.0)
        self._length += step.valid
        for env in np.flatnonzero(step.valid & (step.terminated | step.truncated)).tolist():
            episode = Episode(env, float(self._reward[env]), int(self._length[env]))
            self.episodes.append(episode)
            self._reward[env], self._length[env] = 0.0, 0
        return step

    def _take_mask(self, env: int | slice, mask: Any) -> None:
        """Note what is allowed next."""
        if self.mask is None:
            self.mask = np.ones((self.num_envs, self.actions.masks), bool)
        rows = np.asarray(mask, bool)
        if rows.shape[-1:] != self.mask.shape[-1:]:
            raise DataError(
                f"{self.name}: action_mask has shape {rows.shape}; its actions have "
                f"{self.actions.masks} options: give one bool for each"
            )
        self.mask[env] = rows

    def _check_mask(self) -> None:
        if self.mask is not None and not (fine := self.actions.allowed(self.mask)).all():
            raise DataError(
                f"{self.name}: action_mask of environment {int(np.argmin(fine))} at step "
                f"{self.steps} allows no action; an environment must end before that"
            )


class Serial(Vector):
    """Environments one after the other in this process; begun anew by us, each with its own seeds.

    An episode's seed is a function of (seed, environment, episode) alone: other numbers of
    environments leave those of one as they are. A state is the actions since the episode began,
    which are done again to restore it: exact for every environment that its seed determines.

    Args:
        makers: Each makes one environment.
        seed: Of all episodes.
        first: Number of the first environment, on another rank.
        stream: 0 to train, `EVALUATION` to measure: no episode is in both.
        bound: What keeps real actions within their bounds, "clip" or "tanh".
        name: For messages.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        seed: int,
        *,
        first: int = 0,
        stream: int = 0,
        bound: Literal["clip", "tanh"] = "clip",
        name: str = "",
    ) -> None:
        self.envs = [make() for make in makers]
        one = self.envs[0]
        name = name or (one.spec.id if one.spec else type(one.unwrapped).__name__)
        super().__init__(name, len(self.envs), one.observation_space, one.action_space, bound)
        self._seeds = (seed, stream, first)
        self._episode = [-1] * self.num_envs
        self._done: list[list[np.ndarray]] = [[] for _ in self.envs]
        self._raw: list[Any] = [None] * self.num_envs
        self._batch = create_empty_array(one.observation_space, self.num_envs)
        self._action_space = batch_space(one.action_space, self.num_envs)
        for env in range(self.num_envs):
            self._begin(env)
        self.obs = self._rows()
        self._check_mask()

    def _begin(self, env: int, episode: int | None = None) -> None:
        """Begin the next episode of an environment, or that one."""
        self._episode[env] = self._episode[env] + 1 if episode is None else episode
        seed, stream, first = self._seeds
        whole = seed_of(seed, stream, first + env, self._episode[env])
        self._raw[env], info = self._call(env, lambda one: one.reset(seed=whole % 2**31))
        self._done[env] = []
        self._note(env, info)

    def _call(self, env: int, what: Callable[[Any], Any], action: Any = None) -> Any:
        try:
            return what(self.envs[env])
        except Exception as error:
            done = (
                "reset"
                if action is None
                else f"action {shown(getattr(action, 'tolist', lambda: action)(), 30)}"
            )
            raise DataError(
                f"{self.name}: environment {env} raised {type(error).__name__} at step "
                f"{self.steps + 1} on {done}: {shown(str(error), 70)}; mend the environment"
            ) from error

    def _note(self, env: int, info: Mapping[str, Any]) -> None:
        if "action_mask" in info:
            self._take_mask(env, info["action_mask"])

    def _rows(self) -> np.ndarray:
        space = self.features.space
        return self.features(concatenate(space, self._raw, self._batch))  # type: ignore[arg-type]

    def step(self, latent: np.ndarray) -> Step:
        """Act on `obs`; see `Vector.step`."""
        n = self.num_envs
        reward, terminated, truncated = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)
        actions: Any = iterate(self._action_space, self.actions.decode(latent))
        for env, action in enumerate(actions):
            answer = self._call(env, partial(_step, action=action), action)
            self._raw[env], reward[env], terminated[env], truncated[env], info = answer
            self._done[env].append(latent[env].copy())
            self._note(env, info)
        obs = self._rows()
        step = self._count(Step(obs, reward, terminated, truncated, np.ones(n, bool)))
        self.start = terminated | truncated
        if self.start.any():
            for env in np.flatnonzero(self.start).tolist():
                self._begin(env)
            obs = self._rows()
        self.obs = obs
        self._check_mask()
        return step

    def state(self) -> dict[str, Any]:
        """Episodes, and the actions taken in those that have not ended."""
        width = self.actions.latent
        done = [np.asarray(rows, np.float32).reshape(-1, width) for rows in self._done]
        return {
            "episode": list(self._episode),
            "actions": torch.from_numpy(np.concatenate(done)),
            "steps": self.steps,
            "start": self.start.tolist(),
            "reward": self._reward.tolist(),
            "length": self._length.tolist(),
            "counts": [len(rows) for rows in done],
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Begin each episode again and do its actions again."""
        assert state is not None
        parts = np.split(state["actions"].numpy(), np.cumsum(state["counts"])[:-1])
        for env, rows in enumerate(parts):
            self._begin(env, state["episode"][env])
            for row in rows:
                action = next(iter(iterate(self._action_space, self._decoded(row))))
                answer = self._call(env, partial(_step, action=action), action)
                self._raw[env] = answer[0]
                self._note(env, answer[-1])
            self._done[env] = list(rows)
        self.obs = self._rows()
        self.steps, self.start = state["steps"], np.array(state["start"])
        self._reward = np.array(state["reward"], np.float64)
        self._length = np.array(state["length"], np.int64)
        self.episodes = []

    def _decoded(self, row: np.ndarray) -> Any:
        """One row for as many environments as the space of all wants."""
        return self.actions.decode(np.repeat(row[None], self.num_envs, 0))

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()


class Adapted(Vector):
    """A vector environment of Gymnasium, in whichever autoreset mode it is.

    Args:
        env: Not begun yet; its metadata tells the mode.
        seed: Of its first episodes.
        first: Number of the first environment, on another rank.
        bound: What keeps real actions within their bounds, "clip" or "tanh".

    Raises:
        ConfigError: The metadata names no mode.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        seed: int,
        *,
        first: int = 0,
        bound: Literal["clip", "tanh"] = "clip",
    ) -> None:
        mode = env.metadata.get("autoreset_mode")
        name = env.spec.id if env.spec else type(env.unwrapped).__name__
        if not isinstance(mode, AutoresetMode):
            raise ConfigError(
                f"{name}: metadata['autoreset_mode'] is {shown(mode)}; set an AutoresetMode there"
            )
        spaces_ = env.single_observation_space, env.single_action_space
        super().__init__(name, env.num_envs, *spaces_, bound)
        self.env, self.mode = env, mode
        self._ended = np.zeros(env.num_envs, bool)
        seeds = [seed_of(seed, 0, first + i, 0) % 2**31 for i in range(env.num_envs)]
        split = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)  # others have one source
        raw, info = env.reset(seed=seeds if split else seeds[0])  # type: ignore[arg-type]
        self.obs = self.features(raw)
        self._note(info)
        self._check_mask()

    def _note(self, info: Mapping[str, Any], only: np.ndarray | None = None) -> None:
        """Take the masks of an info: of the environments that gave one, and of `only` these."""
        if "action_mask" not in info:
            return
        fresh = info.get("_action_mask", np.ones(self.num_envs, bool))
        for env in np.flatnonzero(fresh if only is None else fresh & only).tolist():
            self._take_mask(env, info["action_mask"][env])

    def step(self, latent: np.ndarray) -> Step:
        """Act on `obs`; see `Vector.step`."""
        action = self.actions.decode(latent)
        try:
            raw, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise DataError(
                f"{self.name} raised {type(error).__name__} at step {self.steps + 1}: "
                f"{shown(str(error), 90)}; mend the environment"
            ) from error
        n = self.num_envs
        valid = ~self._ended if self.mode is AutoresetMode.NEXT_STEP else np.ones(n, bool)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        self._ended = ended = terminated | truncated
        self.obs = final = self.features(raw)
        if self.mode is AutoresetMode.SAME_STEP and ended.any():
            final = self.obs.copy()
            for env in np.flatnonzero(ended).tolist():
                final[env] = self._single(_row(info["final_obs"], env))
        reward = np.array(reward, np.float64)
        step = self._count(Step(final, reward, terminated, truncated, valid))
        # Under NEXT_STEP it is the row after an end that is the reset.
        self.start = ~valid if self.mode is AutoresetMode.NEXT_STEP else ended
        self._note(info)
        if self.mode is AutoresetMode.DISABLED and ended.any():
            # Wrappers of Gymnasium empty the options they are given.
            raw, begun = self.env.reset(options={"reset_mask": ended.copy()})
            rows = self.features(raw)
            self.obs = np.where(ended[:, None], rows, self.obs)
            self._note(begun, ended)
        self._check_mask()
        return step

    def _single(self, raw: Any) -> np.ndarray:
        space = self.features.space
        batch = concatenate(space, [raw], create_empty_array(space, 1))  # type: ignore[arg-type]
        return np.asarray(self.features(batch)[0])

    def state(self) -> None:
        """None: what is in these environments cannot be read."""
        return

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Leave the environments at the beginning of new episodes, and say so."""
        warnings.warn(
            f"{self.name}: a vector environment of Gymnasium cannot be put back where it was; new "
            "episodes begin, and the run is not the unbroken one. Give its name for one that is",
            stacklevel=2,
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _row(batch: Any, env: int) -> Any:
    """What one environment gave, of what an info holds of all."""
    if isinstance(batch, Mapping):
        return {key: _row(value, env) for key, value in batch.items() if key[:1] != "_"}
    return batch[env]


def make(
    env: str | Callable[[], gymnasium.Env[Any, Any]] | VectorEnv[Any, Any, Any],
    num_envs: int,
    seed: int,
    *,
    first: int = 0,
    stream: int = 0,
    bound: Literal["clip", "tanh"] = "clip",
) -> Vector:
    """Environments of a name, of what makes one, or a vector environment that is there.

    Args:
        env: An id of Gymnasium, a class or function that makes one, or a `VectorEnv`.
        num_envs: Number of environments; a `VectorEnv` has its own.
        seed: Of all episodes.
        first: Number of the first environment, on another rank.
        stream: 0 to train, `EVALUATION` to measure.
        bound: What keeps real actions within their bounds, "clip" or "tanh".

    Raises:
        ConfigError: There is no environment of that name, or its spaces do not fit.
        DataError: It raises an error as it begins.
    """
    if isinstance(env, VectorEnv):
        if env.num_envs != num_envs:
            raise ConfigError(
                f"the vector environment has {env.num_envs} environments, the recipe {num_envs}; "
                "give the same number"
            )
        return Adapted(env, seed, first=first, bound=bound)
    name, maker = (env, named(env)) if isinstance(env, str) else ("", env)
    return Serial([maker] * num_envs, seed, first=first, stream=stream, bound=bound, name=name)


def named(name: str, **options: Any) -> Callable[[], gymnasium.Env[Any, Any]]:
    """What makes an environment of this id.

    Args:
        name: Id of Gymnasium.
        **options: As its `make` takes them, for example ``render_mode="rgb_array"``.

    Raises:
        ConfigError: There is none of that name, or it needs a package.
    """
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ConfigError(
            f"there is no environment {shown(name)};{nearest(name, gymnasium.registry)} "
            f"({shown(str(error), 60)})"
        ) from error
    maker = partial(gymnasium.make, name, disable_env_checker=True, **options)
    try:
        maker().close()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"{name} needs a package: {shown(str(error), 120)}") from error
    return maker
