"""In which order the items of a data set are seen: pure functions of the seed and the epoch.

An order is ``order(seed, epoch) -> indices``, for example
``partial(balanced, targets=rows.targets)``. It has the same length in every epoch.
Nothing here has a state, so that a run resumes from the number of its step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zoo.errors import ConfigError, DataError, shown

Indices = NDArray[np.int64]
Order = Callable[[int, int], Indices]  # (seed, epoch) -> indices of the items, in their order

WINDOW = 50  # batches among which `bucketed` looks for items of one length
MASK = 2**64 - 1  # of a seed, which may be any int


def seed_of(*keys: int) -> int:
    """One 64-bit seed for some numbers: near numbers give unrelated seeds."""
    state = np.random.SeedSequence([key & MASK for key in keys]).generate_state(1, np.uint64)
    return int(state[0])


def permutation(seed: int, epoch: int, n: int) -> Indices:
    """Every index below `n` once, in an order of this epoch."""
    return _shuffled(n, _random(seed, epoch))


def weighted(seed: int, epoch: int, weights: ArrayLike) -> Indices:
    """As many indices as there are weights, drawn with replacement in proportion to them.

    Raises:
        ConfigError: A weight is negative or not finite, or none is positive.
    """
    values = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
        raise ConfigError("weights of items are finite, at least 0, and one of them is positive")
    bounds = np.cumsum(values)
    bits = _random(seed, epoch).random_raw(len(values))
    drawn = (bits >> np.uint64(11)) * 2.0**-53 * bounds[-1]
    chosen: Indices = np.searchsorted(bounds, drawn, side="right").clip(max=len(values) - 1)
    return chosen


def balanced(seed: int, epoch: int, targets: ArrayLike) -> Indices:
    """As many indices as there are items, with all classes equally often up to one.

    The items of a class take turns: none is seen a second time before all others of its class were
    seen once.

    Args:
        seed: Of the run.
        epoch: From 0.
        targets: Class of every item, int.
    """
    classes, ids = np.unique(np.asarray(targets), return_inverse=True)
    random, n = _random(seed, epoch), len(ids)
    # Which classes get the odd items is drawn, so that no class has them in every epoch.
    quotas = np.full(len(classes), n // len(classes))
    quotas[_shuffled(len(classes), random)[: n % len(classes)]] += 1
    chosen = []
    for label, quota in enumerate(quotas):
        members = np.flatnonzero(ids == label)
        turns = range(-(-int(quota) // len(members)))
        taken = [members[_shuffled(len(members), random)] for _ in turns] or [members]
        chosen.append(np.concatenate(taken)[:quota])
    return np.concatenate(chosen)[_shuffled(n, random)]


def bucketed(seed: int, epoch: int, lengths: ArrayLike, batch_size: int) -> Indices:
    """Every index once, so that the items of a batch have nearly the same length.

    A permutation is cut into windows of 50 batches, each window is sorted by length and cut into
    batches, and the batches are shuffled; the incomplete one comes last.

    Args:
        seed: Of the run.
        epoch: From 0.
        lengths: Of every item, in any unit.
        batch_size: Items of a step on all ranks together.
    """
    values, random = np.asarray(lengths), _random(seed, epoch)
    order = _shuffled(len(values), random)
    span = WINDOW * batch_size
    windows = [order[start : start + span] for start in range(0, len(order), span)]
    order = np.concatenate([w[np.argsort(values[w], kind="stable")] for w in windows] or [order])
    whole = len(order) // batch_size
    batches = order[: whole * batch_size].reshape(whole, batch_size)
    batches = batches[_shuffled(whole, random)]
    return np.concatenate([batches.reshape(-1), order[whole * batch_size :]])


def occurrences(indices: Indices) -> Indices:
    """How often the index of each place has come before it: all 0 in a permutation."""
    by_index = np.argsort(indices, kind="stable")
    ordered = indices[by_index]
    counts = np.empty_like(indices)
    counts[by_index] = np.arange(len(indices)) - np.searchsorted(ordered, ordered, side="left")
    return counts


def share(indices: Indices, rank: int, world_size: int, microbatches: int) -> list[Indices]:
    """This rank's part of one step, cut into microbatches: none empty, none padded, none dropped.

    Ranks take turns, so that lengths in sorted batches are spread evenly; their parts differ by one
    item at most, and so do the microbatches of a rank. A rank without items gets no microbatch.

    Args:
        indices: Of all items of the step.
        rank: From 0.
        world_size: Number of ranks.
        microbatches: At most so many.

    Raises:
        ConfigError: One of the numbers is out of range.
    """
    if not 0 <= rank < world_size or microbatches < 1:
        raise ConfigError(
            f"rank {shown(rank)} of {shown(world_size)} with {shown(microbatches)} microbatches; "
            "ranks count from 0, and there is at least one microbatch"
        )
    parts = np.array_split(indices[rank::world_size], microbatches)
    return [part for part in parts if len(part)]


def progressive(
    sizes: Sequence[tuple[float, int]], total_steps: int
) -> Callable[[int], int | None]:
    """The size of the images of each step, for `Batches`.

    Args:
        sizes: ``((0.1, 40), (0.25, 48), (1.0, 64))``: 40 pixels up to a tenth of the steps, and so
            on; the last one lasts to the end. Empty: always the usual size, None.
        total_steps: Of the run.

    Raises:
        ConfigError: The shares do not rise.
    """
    bounds = [bound for bound, _ in sizes]
    if any(after <= before for before, after in pairwise(bounds)):
        raise ConfigError(f"sizes is {shown(sizes)}; the shares of the training have to rise")

    def size(step: int) -> int | None:
        reached = (pixels for bound, pixels in sizes if step < bound * total_steps)
        return next(reached, sizes[-1][1] if sizes else None)

    return size


def _random(seed: int, epoch: int) -> np.random.PCG64:
    """Source of raw bits; numpy keeps these for good, and not what it makes of them."""
    if epoch < 0:
        raise DataError(f"epoch is {epoch}; epochs count from 0")
    return np.random.PCG64(seed_of(seed, epoch))


def _shuffled(n: int, random: np.random.PCG64) -> Indices:
    order: Indices = np.argsort(random.random_raw(n), kind="stable")
    return order
