"""How a policy is trained by PPO: frozen values, written whole into the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from rl.pricing import Pricing
from zoo.errors import ConfigError, shown
from zoo.training.recipe import AdamW, Constant, Linear, Optimizer, Schedule

ADAM = AdamW(lr=2.5e-4, eps=1e-5, weight_decay=0.0)  # core 3
FALLING, SAME, FREE = Linear(), Constant(), Pricing()


@dataclass(frozen=True, kw_only=True)
class PPORecipe:
    """How a policy is trained.

    Attributes:
        env: Id of the environment, where `train` is given none.
        total_steps: Steps of all environments together.
        num_envs: Environments, of all ranks together.
        steps: Of each environment in an iteration.
        epochs: Passes over the steps of an iteration.
        minibatches: Parts of a pass; whole environments if there is a memory.
        gamma: Discount, in [0, 1].
        gae_lambda: Share of what is seen rather than estimated in an advantage, in [0, 1].
        clip: Change of the ratio of probabilities that is rewarded, above 0.
        value_clip: Change of a value that is rewarded; none clips nothing.
        value_coef: Of half the squared error of the values.
        entropy_coef: Of the entropy.
        kl_stop: Divergence that ends the iteration's update; none never ends it.
        normalize_advantages: In each minibatch.
        clip_norm: Highest norm of the gradient; none clips nothing.
        optimizer: What makes a step of a gradient (core 3: eps is 1e-5).
        schedule: Of the learning rate, over the iterations (core 4).
        clip_schedule: Of `clip` and `value_clip`.
        precision: In which the policy computes.
        hidden: Widths of the hidden layers.
        activation: Behind each of them.
        branches: Hidden widths of the actor's branches; none is one actor of `hidden`.
        exits: The actor may end after each hidden layer.
        pricing: What branches cost, and how their gates stay open.
        memory: Size of the LSTM; 0 is none.
        bound: What keeps real actions within their bounds.
        log_std: First logarithm of their deviations.
        normalize_observations: By statistics that the policy keeps.
        normalize_rewards: By statistics that the policy keeps.
        seed: Of weights, environments, actions and order.
        threads: Of torch; one is several times faster for small networks.
        target: Mean return of the last 100 episodes that ends the run early; none never ends it.
        checkpoint_every: Iterations between two checkpoints; none saves at the end.
        keep: Checkpoints that are kept.
    """

    env: str = ""
    total_steps: int = 100_000
    num_envs: int = 8
    steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float | None = None
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    kl_stop: float | None = None
    normalize_advantages: bool = True
    clip_norm: float | None = 0.5
    optimizer: Optimizer = ADAM
    schedule: Schedule = FALLING
    clip_schedule: Schedule = SAME
    precision: Literal["float32", "bfloat16"] = "float32"
    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"
    branches: tuple[tuple[int, ...], ...] = ()
    exits: bool = False
    pricing: Pricing = FREE
    memory: int = 0
    bound: Literal["clip", "tanh"] = "clip"
    log_std: float = 0.0
    normalize_observations: bool = False
    normalize_rewards: bool = False
    seed: int = 0
    threads: int = 1
    target: float | None = None
    checkpoint_every: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        whole = ("total_steps", "num_envs", "steps", "epochs", "minibatches", "threads", "keep")
        checks = {name: (getattr(self, name) >= 1, "1 or more") for name in whole}
        checks |= {name: (0 <= getattr(self, name) <= 1, "0 to 1") for name in _SHARES}
        checks |= {
            name: (value is None or 0 < value < inf, "more than 0")
            for name in ("clip", "value_clip", "kl_stop", "clip_norm", "checkpoint_every")
            for value in [getattr(self, name)]
        }
        checks |= {n: (0 <= getattr(self, n) < inf, "0 or more") for n in _COEFFICIENTS}
        parts = self.num_envs if self.memory else self.num_envs * self.steps
        checks["minibatches"] = 1 <= self.minibatches <= parts, f"1 to {parts}"
        for name, (right, takes) in checks.items():
            if not right:
                given = shown(getattr(self, name))
                raise ConfigError(f"PPORecipe: {name} is {given}; it takes {takes}")

    @property
    def iterations(self) -> int:
        """Rollouts of the whole run, 1 or more."""
        return max(1, self.total_steps // (self.num_envs * self.steps))


_SHARES, _COEFFICIENTS = ("gamma", "gae_lambda"), ("value_coef", "entropy_coef", "memory", "seed")
