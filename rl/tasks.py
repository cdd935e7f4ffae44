"""The task of a policy: observations to actions, whole episodes, training, and how good it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from torch import Tensor

from rl.actions import from_plain, only
from rl.deployment import Acting
from rl.envs import Features, named
from rl.evaluation import evaluate, record
from rl.policy import Policy
from rl.recipe import PPORecipe
from zoo import __version__, registry
from zoo.cards import Card, TensorSpec
from zoo.config import build
from zoo.data import Dataset
from zoo.errors import CardError, ConfigError, DataError, shown
from zoo.saving import write_folder
from zoo.training.folder import Resume, described
from zoo.training.run import Result

HELD_OUT = 100  # episodes that a card's number is the mean of
HELD_OUT_SEED = 1  # of them; recipes were chosen by the episodes of seed 0


@dataclass(frozen=True, kw_only=True)
class PolicyPreprocessing:
    """What a card says of a policy's observations.

    Attributes:
        env: Id of the environment that gives them.
    """

    env: str = ""


class PolicyTask:
    """From an observation of the card's environment to the action for its `step`.

    Args:
        card: Narrowed to its weights.
        file: Finds files of the weights; there are none.
    """

    name = "policy"
    recipe = PPORecipe
    offers = ("play", "explain")
    outputs: ClassVar[dict[str, TensorSpec]] = {}
    datasets: ClassVar[dict[str, Dataset]] = {}

    def __init__(self, card: Card, file: Callable[[str], Path]) -> None:
        self.card = card
        where = f"{card.full_name}: preprocessing"
        values = build(PolicyPreprocessing, card.preprocessing, where=where, error=CardError)
        self.env = values.env
        self._actions = from_plain(card.config["actions"])

    @cached_property
    def features(self) -> Features:
        """Observations of the environment to rows."""
        env = named(self._named_env())()
        found = Features(env.observation_space)
        env.close()
        return found

    def _named_env(self) -> str:
        if not self.env:
            raise ConfigError(f"{self.card.full_name} names no environment; give the model weights")
        return self.env

    def read(self, raw: object) -> dict[str, Tensor]:
        """One observation as the environment gave it, without a batch axis.

        Raises:
            DataError: It is none of the environment's, or not finite.
        """
        width = self.card.config["observation"]
        try:
            row = np.asarray(raw, np.float32).reshape(-1)
        except (TypeError, ValueError):
            row = np.empty(0, np.float32)
        if len(row) != width or (self.env and not self._is_row):
            try:
                row = self.features(_batch(self.features.space, raw))[0]
            except (TypeError, ValueError, KeyError, IndexError) as error:
                raise DataError(
                    f"the observation is {shown(raw, 60)}; {self.env} gives {self.features.space}"
                ) from error
        if len(row) != width or not np.isfinite(row).all():
            raise DataError(f"the observation is {shown(raw, 60)}; it takes {width} finite numbers")
        return {"observation": torch.from_numpy(row)}

    @cached_property
    def _is_row(self) -> bool:
        return isinstance(self.features.space, gymnasium.spaces.Box)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of what `read` gave."""
        return {"observation": torch.stack([sample["observation"] for sample in samples])}

    def decode(self, outputs: tuple[Tensor, ...]) -> list[Any]:
        """The likeliest action of each row, as `env.step` takes it."""
        latent = self._actions.mode(outputs[0].float()).numpy()
        return [only(self._actions.decode(latent[row : row + 1])) for row in range(len(latent))]

    def graph(self, model: Policy) -> Acting:
        """Raw observations to what `env.step` takes: what ``zoo.export(..., raw=True)`` writes."""
        return Acting(model, registry.card_of(model))

    def play(
        self,
        model: Policy,
        *,
        episodes: int = 20,
        seed: int = 0,
        video: str | Path | None = None,
    ) -> dict[str, Any]:
        """Whole episodes that no training has seen, by the likeliest actions.

        Args:
            model: The policy.
            episodes: How many.
            seed: Of the episodes.
            video: A .gif of the first episode.

        Returns:
            "returns", their "mean", and "std", their sample deviation (0 for one).

        Raises:
            ConfigError: The environment is unknown or needs a package, or `video` is no .gif.
        """
        if type(episodes) is not int or episodes < 1:
            raise ConfigError(f"episodes is {shown(episodes)}; it takes a whole number from 1")
        with registry.evaluating(model):
            if video is not None:
                record(model, self._named_env(), Path(video), seed)
            returns = evaluate(model, self._named_env(), episodes, seed)
        deviation = stdev(returns) if episodes > 1 else 0.0
        return {"returns": returns, "mean": fmean(returns), "std": deviation}

    def explain(self, model: Policy, observation: Any) -> Any:
        """Which branch an observation takes at each gate, and by what margin."""
        with registry.evaluating(model):
            return model.explain(self.read(observation)["observation"][None])[0]

    def trial(self, model: Policy, place: str) -> tuple[dict[str, float], int, float]:
        """What a card states of a policy: ``ENV/held-out``, mean return over 100 episodes.

        Returns:
            Mean return and its standard error; episodes; and what may differ elsewhere, where other
            rounding ends in other episodes: the standard error.

        Raises:
            ConfigError: It is another environment than the card's, or another split.
        """
        env, _, split = place.rpartition("/")
        if split != "held-out" or env != self.env:
            raise ConfigError(
                f"{self.card.full_name} is measured on {self.env}/held-out, not on {shown(place)}"
            )
        played = self.play(model, episodes=HELD_OUT, seed=HELD_OUT_SEED)
        error = played["std"] / HELD_OUT**0.5
        return {"return": played["mean"], "standard_error": error}, HELD_OUT, max(error, 0.01)

    @classmethod
    def train(
        cls,
        name: str,
        recipe: PPORecipe,
        folder: str | Path,
        *,
        resume: Resume = "auto",
        device: str | torch.device | None = None,
        trackers: Sequence[str] = ("tensorboard",),
        quiet: bool = False,
    ) -> Result:
        """Train the weights `name` by a recipe: what ``zoo train`` does for a policy.

        Args:
            name: Of the weights.
            recipe: How.
            folder: Of the run.
            resume: As `rl.ppo.train` takes it.
            device: Policies of this size learn on the CPU; another is refused.
            trackers: Views of ``metrics.jsonl``.
            quiet: Show no progress.

        Raises:
            ConfigError: The policy of the recipe is not that of the card, or as `rl.ppo.train`.
        """
        from rl.ppo import train
        from zoo.training import distributed

        if device is not None and torch.device(device).type != "cpu":
            raise ConfigError(f"device is {shown(str(device))}; policies are trained on the CPU")
        folder = Path(folder).absolute()
        done = train(None, recipe, folder, resume=resume, trackers=trackers, quiet=quiet, name=name)
        metrics = {"return": done.mean_return}
        if distributed.is_main():
            _write(name, recipe, done.policy, folder)
        return Result(folder=folder, metrics=metrics, best=None, steps=done.steps)


def _write(name: str, recipe: PPORecipe, policy: Policy, folder: Path) -> None:
    """The policy as a folder with a card."""
    base, _, tag = name.partition(".")
    model: Any = registry.load(name, pretrained=False)
    if model.config != policy.config:
        raise ConfigError(
            f"the recipe's policy is {shown(policy.config, 80)}, the card's "
            f"{shown(model.config, 80)}; change the [config] of {base}.toml or the recipe"
        )
    model.load_state_dict(policy.state_dict())
    card = registry.card_of(model)
    stated = card.weights[card.tag or tag]
    origin: Mapping[str, str] = {
        "trained_by": "refzoo",
        "zoo_version": __version__,
        "data": recipe.env,
        "seed": str(recipe.seed),
        "recipe": json.dumps(described(name, recipe)),
    }
    write_folder(
        model,
        folder / "weights",
        tag=tag or "trained",
        labels=None,
        licence=stated.licence,
        origin=origin,
        auxiliary={},
    )


def _batch(space: gymnasium.spaces.Space[Any], raw: Any) -> Any:
    from gymnasium.vector.utils import concatenate, create_empty_array

    return concatenate(space, [raw], create_empty_array(space, 1))  # type: ignore[arg-type]
