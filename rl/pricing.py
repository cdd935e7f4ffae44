"""The price of compute, and what keeps gates open until they know their way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rl.branching import Branched
from zoo.errors import ConfigError, shown


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """What branching costs and how its gates stay open, over the course of a training.

    Attributes:
        price: Of the largest path, in units of reward a step; others cost their share of it.
        begins: Share of the training before which paths are free.
        full: Share at which the whole price is asked; linear in between.
        entropy_coef: Of the entropy of the path, besides that of the action.
        entropy_floor: In nats: mean entropy of the path below which the gates are pushed open. It
            falls to 0 as the training ends.
        temperature: Of the gates at the end; 1 until `full`, then geometric, so that the greedy
            program becomes the one that is drawn.
    """

    price: float = 0.0
    begins: float = 0.1
    full: float = 0.3
    entropy_coef: float = 0.003
    entropy_floor: float = 0.05
    temperature: float = 0.2

    def __post_init__(self) -> None:
        checks = {
            "price": (0 <= self.price < math.inf, "0 or more"),
            "begins": (0 <= self.begins <= self.full, "0 to full"),
            "full": (self.full < 1, "less than 1"),
            "entropy_coef": (0 <= self.entropy_coef < math.inf, "0 or more"),
            "entropy_floor": (0 <= self.entropy_floor < math.inf, "0 or more"),
            "temperature": (0 < self.temperature <= 1, "more than 0, 1 at most"),
        }
        for name, (right, takes) in checks.items():
            if not right:
                raise ConfigError(
                    f"Pricing: {name} is {shown(getattr(self, name))}; it takes {takes}"
                )

    def price_at(self, progress: float) -> float:
        """The price after this share of the training."""
        if progress >= self.full:
            return self.price
        width = self.full - self.begins
        return self.price * max(0.0, progress - self.begins) / width if width else 0.0

    def floor_at(self, progress: float) -> float:
        """The floor of the path's entropy."""
        return self.entropy_floor * (1 - progress)

    def temperature_at(self, progress: float) -> float:
        """The temperature of the gates."""
        return float(self.temperature ** (max(0.0, progress - self.full) / (1 - self.full)))

    def reward(self, reward: Tensor, tree: Branched, latent: Tensor, progress: float) -> Tensor:
        """Rewards less what the paths of latent rows cost: (...), (..., latent) -> (...)."""
        share = tree.cost(latent) / tree.largest
        return reward - self.price_at(progress) * share.to(reward.dtype)

    def bonus(self, tree: Branched, params: Tensor, progress: float) -> Tensor:
        """What keeps the gates open, a number to be added to the loss; less is opener."""
        entropy = tree.path_entropy(params).mean()
        below = (self.floor_at(progress) - entropy).clamp(min=0.0)
        return below - self.entropy_coef * entropy
