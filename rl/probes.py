"""Small environments whose best return and values are known: what a trainer is proved on."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Answer = tuple[Any, float, bool, bool, dict[str, Any]]
Begun = tuple[Any, dict[str, Any]]


class _Probe(gymnasium.Env[Any, Any]):
    """What the probes share.

    Attributes:
        best: The highest mean return of an episode.
    """

    best: float
    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (1,))
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def _observe(self) -> Any:
        return np.zeros(1, np.float32)

    def _info(self) -> dict[str, Any]:
        return {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Begin an episode."""
        super().reset(seed=seed)
        self.t = 0
        self._draw()
        return self._observe(), self._info()

    def _draw(self) -> None:
        """Draw what is random."""


class Constant(_Probe):
    """Reward 1 in every step; the episode ends after `length`.

    The value of the one state: of `length` 1 and terminated, 1; truncated, 1 / (1 - gamma),
    because time goes on behind the limit.
    """

    def __init__(self, length: int = 1, truncated: bool = False) -> None:
        self.length, self.cut, self.best = length, truncated, float(length)

    def step(self, action: Any) -> Answer:
        """Whatever is done, it is right."""
        self.t += 1
        over = self.t == self.length
        return self._observe(), 1.0, over and not self.cut, over and self.cut, {}


class Delayed(_Probe):
    """Two steps, reward 1 at the end: values gamma and 1."""

    best = 1.0

    def _observe(self) -> Any:
        return np.array([self.t], np.float32)

    def step(self, action: Any) -> Answer:
        """Go on."""
        self.t += 1
        return self._observe(), float(self.t == 2), self.t == 2, False, {}


class Identity(_Probe):
    """Name what is seen: reward 1 for each of `length` right answers.

    With `masked`, the answers that are not allowed end the episode with -1; the right one always
    is allowed.
    """

    def __init__(self, n: int = 4, length: int = 8, masked: bool = False, start: int = 0) -> None:
        self.n, self.length, self.masked, self.best = n, length, masked, float(length)
        self.observation_space = spaces.Discrete(n, start=start)
        self.action_space = spaces.Discrete(n, start=-start)

    def _draw(self) -> None:
        self.target = int(self.np_random.integers(self.n))
        self.allowed = self.np_random.random(self.n) < 0.5
        self.allowed[self.target] = True

    def _observe(self) -> Any:
        return self.observation_space.start + self.target  # type: ignore[attr-defined]

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.allowed.copy()} if self.masked else {}

    def step(self, action: Any) -> Answer:
        """Answer."""
        given = int(action) - int(self.action_space.start)  # type: ignore[attr-defined]
        if self.masked and not self.allowed[given]:
            return self._observe(), -1.0, True, False, self._info()
        reward = float(given == self.target)
        self.t += 1
        self._draw()
        return self._observe(), reward, self.t == self.length, False, self._info()


class Aim(_Probe):
    """Hit a number in [-1, 1]: reward 1 - (action - target)^2, `length` times."""

    def __init__(self, length: int = 8) -> None:
        self.length, self.best = length, float(length)
        self.action_space = spaces.Box(-2.0, 2.0, (1,))

    def _draw(self) -> None:
        self.target = float(self.np_random.uniform(-1, 1))

    def _observe(self) -> Any:
        return np.array([self.target], np.float32)

    def step(self, action: Any) -> Answer:
        """Shoot."""
        reward = 1 - (float(action[0]) - self.target) ** 2
        self.t += 1
        self._draw()
        return self._observe(), reward, self.t == self.length, False, {}


class Remember(_Probe):
    """A sign is shown first and must be named last, after `gap` blanks: 1 if right, else 0.

    Without memory the best is 1/2. With `masked`, a third answer is there that is never allowed.
    """

    best = 1.0

    def __init__(self, gap: int = 2, masked: bool = False) -> None:
        self.gap, self.masked = gap, masked
        self.observation_space = spaces.Box(-1.0, 1.0, (2,))
        self.action_space = spaces.Discrete(3 if masked else 2)

    def _draw(self) -> None:
        self.sign = int(self.np_random.integers(2))

    def _observe(self) -> Any:
        sign = 2 * self.sign - 1 if self.t == 0 else 0
        return np.array([sign, self.t > self.gap], np.float32)

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array([True, True, False])} if self.masked else {}

    def step(self, action: Any) -> Answer:
        """Answer; only the last answer counts."""
        over = self.t > self.gap
        reward = float(over and int(action) == self.sign)
        self.t += 1
        return self._observe(), reward, over, False, self._info()


class Arms(_Probe):
    """Choose an arm, and set what it takes: the best is worked out by hand.

    Arm 0 pays 0.5. Arm 1 pays 1 - (x - c)^2 for its number x, c being seen. Arm 2 pays 0.8 if both
    of its switches are as is seen, else 0; it is masked out half of the time. The best is arm 1:
    1 a step; where c is hidden (every step with the flag), arm 2 where allowed, else 0.75 at x = 0,
    for c is then 1/2 or -1/2.
    """

    def __init__(self, length: int = 8) -> None:
        self.length = length
        # Half of the steps are hidden; of these half have arm 2: (1 + (0.8 + 0.75) / 2) / 2.
        self.best = length * (1 + (0.8 + 0.75) / 2) / 2
        self.observation_space = spaces.Dict(
            {
                "c": spaces.Box(-1.0, 1.0, (1,)),
                "hidden": spaces.Discrete(2),
                "switches": spaces.MultiBinary(2),
            }
        )
        self.action_space = spaces.OneOf(
            (spaces.Discrete(1), spaces.Box(-1.0, 1.0, (1,)), spaces.MultiBinary(2))
        )

    def _draw(self) -> None:
        self.hidden = int(self.np_random.integers(2))
        self.c = float(self.np_random.choice([-0.5, 0.5]))
        self.switches = self.np_random.integers(0, 2, 2).astype(np.int8)
        self.open = bool(self.np_random.integers(2))

    def _observe(self) -> Any:
        c = np.array([0.0 if self.hidden else self.c], np.float32)
        return {"c": c, "hidden": self.hidden, "switches": self.switches}

    def _info(self) -> dict[str, Any]:
        # The three arms, then the one option of arm 0, then two options of each switch.
        return {"action_mask": np.array([True, True, self.open, True, True, True, True, True])}

    def step(self, action: Any) -> Answer:
        """Pull."""
        arm, how = action
        if arm == 0:
            reward = 0.5
        elif arm == 1:
            reward = 1 - (float(how[0]) - self.c) ** 2
        else:
            reward = 0.8 * float((how == self.switches).all()) if self.open else -1.0
        self.t += 1
        self._draw()
        return self._observe(), reward, self.t == self.length, False, self._info()


class SwitchPole(gymnasium.Env[Any, Any]):
    """CartPole whose actions are switched in hard blocks: it is known where depth is needed.

    Time goes in blocks of `block` steps, each hard with probability `hard`, as a flag says. Four
    random bits are seen as -1 and 1; in a hard step the action is switched if their product is
    positive. Without the bits a linear policy does; the product takes a deeper one.

    Args:
        hard: Share of hard blocks, in [0, 1].
        block: Steps of a block.
        limit: Steps of an episode.

    Source: as CartPole-v1 of Gymnasium; the best return is `limit`.
    """

    def __init__(self, hard: float = 0.3, block: int = 25, limit: int = 500) -> None:
        self.hard, self.block, self.limit = hard, block, limit
        self.best = float(limit)
        self.pole = gymnasium.make("CartPole-v1", disable_env_checker=True).unwrapped
        self.observation_space = spaces.Box(-np.inf, np.inf, (9,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Begun:
        """Begin an episode."""
        super().reset(seed=seed)
        self.t = 0
        self.state, _ = self.pole.reset(seed=None if seed is None else seed % 2**31)
        self._draw()
        return self._observe(), {}

    def _draw(self) -> None:
        if self.t % self.block == 0:
            self.is_hard = bool(self.np_random.random() < self.hard)
        self.bits = 2.0 * self.np_random.integers(0, 2, 4) - 1

    def _observe(self) -> np.ndarray:
        return np.array([*self.state, float(self.is_hard), *self.bits], np.float32)

    def step(self, action: Any) -> Answer:
        """Push, or the other way."""
        switched = self.is_hard and np.prod(self.bits) > 0
        self.state, reward, fallen, _, _ = self.pole.step(1 - int(action) if switched else action)
        self.t += 1
        self._draw()
        return self._observe(), float(reward), bool(fallen), self.t >= self.limit, {}


class BitDepth(_Probe):
    """Say the parity of the first k of `bits` bits, k being seen: how deep one must look is known.

    The observation is k, one-hot, and the bits as -1 and 1, those after the first k as 0. The
    reward is 1 for a right answer, `length` times.
    """

    def __init__(self, bits: int = 3, length: int = 8) -> None:
        self.bits, self.length, self.best = bits, length, float(length)
        self.observation_space = spaces.Box(-1.0, 1.0, (2 * bits,))

    def _draw(self) -> None:
        self.k = int(self.np_random.integers(1, self.bits + 1))
        self.shown = 2 * self.np_random.integers(0, 2, self.bits) - 1
        self.shown[self.k :] = 0

    def _observe(self) -> Any:
        depth = np.arange(1, self.bits + 1) == self.k
        return np.concatenate((depth, self.shown)).astype(np.float32)

    def step(self, action: Any) -> Answer:
        """Answer: 1 if the product of the bits is positive."""
        right = bool(np.prod(self.shown[: self.k]) > 0)
        reward = float(bool(action) == right)
        self.t += 1
        self._draw()
        return self._observe(), reward, self.t == self.length, False, {}
