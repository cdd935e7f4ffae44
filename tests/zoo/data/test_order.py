from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from zoo.data.order import (
    balanced,
    bucketed,
    occurrences,
    permutation,
    progressive,
    seed_of,
    share,
    weighted,
)
from zoo.errors import ConfigError, DataError

LENGTHS = np.random.default_rng(0).integers(1, 500, 1003)
ORDERS = {
    "permutation": partial(permutation, n=1003),
    "weighted": partial(weighted, weights=LENGTHS),
    "balanced": partial(balanced, targets=LENGTHS % 7),
    "bucketed": partial(bucketed, lengths=LENGTHS, batch_size=16),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_order_is_a_function_of_seed_and_epoch(order):
    first = order(3, 5)
    assert (len(first), first.dtype) == (1003, np.int64)
    assert set(first.tolist()) <= set(range(1003))
    assert np.array_equal(first, order(3, 5))
    for other in (order(3, 6), order(4, 5), order(5, 3)):
        assert (first != other).mean() > 0.9


@pytest.mark.parametrize("name", ["permutation", "bucketed"])
def test_every_item_is_seen_once(name):
    assert sorted(ORDERS[name](0, 0)) == list(range(1003))


def test_the_order_of_a_seed_is_kept_for_good():
    """Else a run that is resumed with a newer version would see items twice."""
    assert permutation(0, 0, 8).tolist() == [1, 6, 5, 2, 7, 3, 0, 4]
    assert seed_of(0, 1, 2) == 3071860871404845570


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_items_are_ordered_too(n):
    for order in (
        partial(permutation, n=n),
        partial(bucketed, lengths=np.ones(n), batch_size=4),
    ):
        assert sorted(order(0, 0)) == list(range(n))


def test_any_whole_number_is_a_seed():
    assert len({seed_of(seed, 0) for seed in (-1, 0, 1, 2**32, 2**63, -2)}) == 6
    with pytest.raises(DataError, match="epoch is -1"):
        permutation(0, -1, 3)


def test_weights_are_the_shares_in_which_items_are_drawn():
    drawn = weighted(0, 0, np.tile([0.0, 1.0, 3.0], 20_000))
    counts = np.bincount(drawn % 3, minlength=3) / len(drawn)
    assert counts[0] == 0
    assert counts[1:] == pytest.approx([0.25, 0.75], abs=0.01)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], []])
def test_other_weights_are_refused(weights):
    with pytest.raises(ConfigError, match="weights of items"):
        weighted(0, 0, weights)


def test_balanced_classes_are_equally_often_and_their_items_take_turns():
    targets = np.array([0] * 90 + [1] * 9 + [5])
    drawn = balanced(0, 0, targets)
    counts = np.bincount(targets[drawn], minlength=6)[[0, 1, 5]]
    assert sorted(counts) == [33, 33, 34]
    items = np.bincount(drawn, minlength=100)
    assert items[:90].max() == 1
    assert set(items[90:99]) <= {3, 4}
    # The odd item falls to another class in another epoch.
    odd = {int(np.bincount(targets[balanced(0, e, targets)]).argmax()) for e in range(20)}
    assert odd == {0, 1, 5}


def test_the_items_of_a_bucket_are_of_nearly_one_length():
    order = ORDERS["bucketed"](0, 0)
    batches = [LENGTHS[order[i : i + 16]] for i in range(0, 1003, 16)]
    assert len(batches[-1]) == 1003 % 16
    spread = np.mean([batch.max() - batch.min() for batch in batches[:-1]])
    assert spread < 20 < LENGTHS.max() - LENGTHS.min()
    # Batches themselves are shuffled, so a step's length does not tell how far the epoch is.
    means = [batch.mean() for batch in batches[:-1]]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.4


def test_an_occurrence_is_how_often_an_index_came_before():
    assert occurrences(np.array([3, 1, 3, 3, 0, 1])).tolist() == [0, 0, 1, 2, 0, 1]
    assert occurrences(permutation(0, 0, 50)).max() == 0
    assert occurrences(np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_ranks_and_microbatches_share_a_step_exactly(world_size, microbatches):
    for n in range(18):
        parts = [
            share(np.arange(100, 100 + n), rank, world_size, microbatches)
            for rank in range(world_size)
        ]
        assert sorted(i for rank in parts for part in rank for i in part) == list(
            range(100, 100 + n)
        )
        sizes = [sum(map(len, rank)) for rank in parts]
        assert max(sizes) - min(sizes) <= 1
        for rank in parts:
            lengths = [len(part) for part in rank]
            assert len(lengths) <= microbatches
            assert not lengths or max(lengths) - min(lengths) <= 1 <= min(lengths)


@pytest.mark.parametrize("wrong", [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_a_rank_that_does_not_exist_has_no_share(wrong):
    with pytest.raises(ConfigError, match="ranks count from 0"):
        share(np.arange(4), *wrong)


def test_sizes_grow_with_the_share_of_the_training_done():
    size = progressive(((0.1, 40), (0.25, 48), (1.0, 64)), 100)
    assert [size(step) for step in (0, 9, 10, 24, 25, 99, 150)] == [40, 40, 48, 48, 64, 64, 64]
    assert progressive((), 100)(5) is None
    with pytest.raises(ConfigError, match="have to rise"):
        progressive(((0.5, 40), (0.5, 48)), 100)
