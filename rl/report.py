"""The page docs/rl.md: what policies reach from nothing, over seeds, and how fast they learn.

Source: Agarwal et al. 2021, https://arxiv.org/abs/2108.13264, for means of the middle half with
    bootstrap intervals.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch

from rl.bench import recipe_of, speeds
from rl.evaluation import evaluate
from rl.policy import RECIPES
from rl.ppo import train
from zoo import cards

RESAMPLES = 10_000  # of a bootstrap


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean of the middle half; a quarter, to a whole number, is left out on either side."""
    rows = np.sort(np.asarray(values, np.float64))
    cut = len(rows) // 4
    return float(rows[cut : len(rows) - cut].mean())


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Bounds of the 95 % bootstrap interval of the interquartile mean."""
    rows = np.asarray(values, np.float64)
    drawn = np.random.default_rng(seed).choice(rows, (RESAMPLES, len(rows)))
    drawn.sort(-1)
    cut = len(rows) // 4
    low, high = np.quantile(drawn[:, cut : len(rows) - cut].mean(-1), (0.025, 0.975))
    return float(low), float(high)


def learned(name: str, seeds: int) -> str:
    """A row of the table of what a recipe reaches; trains it so many times.

    Args:
        name: Of the weights.
        seeds: 0 to one less; each is measured on 100 held-out episodes.
    """
    recipe, means, steps, seconds = RECIPES[name], [], [], []
    for seed in range(seeds):
        began = time.process_time()
        done = train(recipe=replace(recipe, seed=seed))
        seconds.append(time.process_time() - began)
        steps.append(float(done.steps))
        means.append(fmean(evaluate(done.policy, recipe.env, 100)))
    low, high = interval(means)
    return (
        f"| `{name}` | {recipe.env} | {seeds} | {interquartile_mean(means):.2f} | "
        f"{low:.2f} to {high:.2f} | {min(means):.2f} | {fmean(steps):,.0f} | "
        f"{fmean(seconds):.1f} |"
    )


def published(name: str) -> str:
    """A row of the table of the weights that are there, from their card."""
    base, _, tag = name.partition(".")
    stated = {m.name.rpartition("/")[2]: m for m in cards.card(base).weights[tag].metrics}
    mean, error = stated["return"], stated["standard_error"]
    return f"| `{name}` | {mean.value:.2f} ± {error.value:.2f} | {mean.n} | `{mean.command}` |"


def page(seeds: int, names: Sequence[str], sides: Sequence[str]) -> Iterator[str]:
    """Lines of the page, as they are known.

    Args:
        seeds: Trainings of each recipe.
        names: Recipes to train.
        sides: Keys of `rl.bench.SIDES` to be measured.
    """
    yield "# Policies\n\n`python scripts/rl_report.py` wrote this page.\n"
    yield (
        f"{time.strftime('%Y-%m-%d')}: one thread of {platform.machine()}, "
        f"torch {torch.__version__}; other programs ran beside it.\n"
    )
    yield "## Weights\n\nMean return ± standard error over held-out episodes, likeliest actions.\n"
    yield "| weights | return | episodes | measured by |\n|---|--:|--:|---|"
    for name in RECIPES:
        if name.partition(".")[2] in cards.card(name.partition(".")[0]).weights:
            yield published(name)
    yield (
        "\n## From nothing\n\nEach recipe trained with several seeds, each measured on 100 "
        "held-out episodes: interquartile mean over seeds with its 95 % bootstrap interval.\n"
    )
    yield (
        "| recipe | environment | seeds | mean | interval | worst seed | steps | CPU-seconds |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|"
    )
    for name in names:
        yield learned(name, seeds)
    yield (
        "\n## Speed\n\nSteps per CPU-second on CartPole-v1, acting and learning, equal "
        "hyperparameters, one thread each, taken in turn.\n"
    )
    yield "| environments | steps x epochs | " + " | ".join(sides) + " |"
    yield "|---|---|" + "--:|" * len(sides)
    for num_envs in (4, 64, 1024):
        found, recipe = speeds(num_envs, list(sides)), recipe_of(num_envs)
        numbers = " | ".join(f"{found[side]:,.0f}" for side in sides)
        yield f"| {num_envs} | {recipe.steps} x {recipe.epochs} | {numbers} |"
