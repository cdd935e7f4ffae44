"""What a training of PPO consists of, and how it is saved and restored to the bit."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from rl.actions import to_plain
from rl.envs import Vector
from rl.policy import Policy, PolicyConfig
from rl.recipe import PPORecipe
from rl.rollout import rollout
from zoo.config import build
from zoo.data.order import seed_of
from zoo.errors import ConfigError
from zoo.training import checkpoint, distributed
from zoo.training.state import Position

if TYPE_CHECKING:
    from rl.ppo import Learner

RECENT = 100  # episodes whose mean return is reported
WEIGHTS = 1  # stream of a seed


@dataclass(frozen=True)
class Result:
    """What a training has come to.

    Attributes:
        policy: In eval mode.
        mean_return: Of the last 100 episodes of the training, actions drawn; NaN if none ended.
        steps: Samples taken, of all ranks.
        iterations: Rollouts.
        seconds: Of the training in this process.
    """

    policy: Policy
    mean_return: float
    steps: int
    iterations: int
    seconds: float


class Training:
    """A learner, its environments, and where the run stands.

    Args:
        vector: The environments of this rank.
        learner: Its policy acts.
        folder: Of the run; None keeps nothing.
    """

    def __init__(self, vector: Vector, learner: Learner, folder: Path | None) -> None:
        self.vector, self.recipe, self.folder = vector, learner.recipe, folder
        self.learner = learner
        self.state = self.learner.policy.first(vector.num_envs)
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.position = Position()
        self.samples = 0

    @property
    def finished(self) -> bool:
        """True after the last iteration, or when the returns are what was aimed at."""
        full = len(self.recent) == RECENT and self.recipe.target is not None
        return self.position.step >= self.recipe.iterations or (
            full and fmean(self.recent) >= (self.recipe.target or 0.0)
        )

    def iterate(self) -> dict[str, float]:
        """Act, learn; the numbers to watch."""
        before, recipe = self.state, self.recipe
        self.learner.prepare()
        policy, generator = self.learner.policy, self.learner.generator
        seen, self.state = rollout(policy, self.vector, before, recipe.steps, generator)
        numbers = self.learner.update(seen, before)
        self.position.step += 1
        self.samples += distributed.all_sum([int(seen.valid.sum())])[0]
        for rewards in distributed.gather([e.reward for e in self.vector.episodes]):
            self.recent.extend(rewards)
        self.vector.episodes.clear()
        numbers["samples"] = self.samples
        return numbers | ({"return": fmean(self.recent)} if self.recent else {})

    def save(self) -> None:
        """Write a checkpoint of this iteration."""
        assert self.folder is not None
        learner = self.learner
        state = {
            "position": asdict(self.position),
            "model": learner.policy.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "precision": learner.precision.state_dict(),
            "recent": list(self.recent),
            "samples": self.samples,
        }
        scaler = learner.policy.scaler
        part = {
            "generator": learner.generator.get_state(),
            "memory": self.state,
            "sums": scaler.sums if scaler else None,
            "environments": self.vector.state(),
        }
        place, step = self.folder / "checkpoints", self.position.step
        checkpoint.save(place, step, state, keep=self.recipe.keep, part=part)

    def restore(self, found: checkpoint.Found) -> None:
        """Become the run that the checkpoint was taken of."""
        learner, state = self.learner, checkpoint.load(found)
        part = checkpoint.load_part(found, distributed.rank())
        if part is None or found.world_size != distributed.world_size():
            raise ConfigError(
                f"{found.path.name} was written by {found.world_size} processes, there are "
                f"{distributed.world_size()}; start as many, or --resume never to begin again"
            )
        self.position = build(Position, state["position"], where="the checkpoint's position")
        distributed.load_state(learner.policy, state["model"])
        distributed.load_state(learner.optimizer, state["optimizer"])
        learner.precision.load_state_dict(state["precision"])
        learner.iteration = self.position.step
        self.recent.extend(state["recent"])
        self.samples = state["samples"]
        learner.generator.set_state(part["generator"])
        self.state = part["memory"]
        if learner.policy.scaler is not None:
            learner.policy.scaler.sums = part["sums"]
        self.vector.restore(part["environments"])


def make_policy(vector: Vector, recipe: PPORecipe) -> Policy:
    """A fresh policy for these environments; the same on every rank."""
    config = PolicyConfig(
        observation=vector.features.width,
        actions=to_plain(vector.actions),
        hidden=recipe.hidden,
        activation=recipe.activation,
        branches=recipe.branches,
        exits=recipe.exits,
        memory=recipe.memory,
        log_std=recipe.log_std,
        normalize_observations=recipe.normalize_observations,
        normalize_rewards=recipe.normalize_rewards,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(recipe.seed, WEIGHTS))
        return Policy(config)
