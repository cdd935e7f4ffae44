"""The learning rate over a run, as a factor of its highest value: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zoo.training.recipe import (
    Constant,
    Cosine,
    InverseRoot,
    Linear,
    OneCycle,
    Plateau,
    Poly,
    Schedule,
)


def factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """Factor of the learning rate for one step.

    The first step of a warm-up of w steps has the factor 1/w, the w-th has 1; what follows comes to
    its end value after the last step, so that no step is lost on a rate of 0.

    Args:
        schedule: Of the recipe. A plateau's factor is that of `Lowering`; here it is 1.
        step: Steps done, 0 for the first one.
        total_steps: Of the whole run; steps past it count as its end.
    """
    step = min(step, total_steps)
    done = step / max(total_steps, 1)
    match schedule:
        case OneCycle(peak=peak, start=start, final=final):
            if done < peak:
                return _cosine(start, 1.0, done / peak)
            return _cosine(1.0, final, (done - peak) / (1 - peak) if peak < 1 else 0.0)
        case Plateau():
            return 1.0
    warm_steps = round(schedule.warmup * total_steps)
    if step < warm_steps:
        return (step + 1) / warm_steps
    gone = (step - warm_steps) / max(total_steps - warm_steps, 1)
    match schedule:
        case Cosine(final=final):
            return _cosine(1.0, final, gone)
        case Linear(final=final):
            return 1.0 + (final - 1.0) * gone
        case Poly(power=power):
            return float((1.0 - gone) ** power)
        case InverseRoot():
            return math.sqrt(max(warm_steps, 1) / (step + 1))
        case Constant():
            return 1.0


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * 0.5 * (1.0 + math.cos(math.pi * share))


class Lowering:
    """The factor of a `Plateau`, lowered by what evaluations find.

    Args:
        schedule: Patience and factor.

    Attributes:
        factor: Of the learning rate, now.
    """

    def __init__(self, schedule: Plateau) -> None:
        self.schedule = schedule
        self.factor = 1.0
        self._best: float | None = None
        self._stale = 0  # evaluations since the best one or the last lowering

    def measured(self, value: float) -> None:
        """Take the value of an evaluation, higher being better; a NaN is no improvement."""
        if not math.isnan(value) and (self._best is None or value > self._best):
            self._best, self._stale = value, 0
            return
        self._stale += 1
        if self._stale > self.schedule.patience:
            self.factor, self._stale = self.factor * self.schedule.factor, 0

    def state_dict(self) -> dict[str, float | int | None]:
        """Plain values."""
        return {"factor": self.factor, "best": self._best, "stale": self._stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another's state."""
        self.factor, self._best, self._stale = state["factor"], state["best"], state["stale"]
