from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from zoo.data.loader import Batches, start_method
from zoo.data.order import balanced, progressive
from zoo.data.rows import ListRows
from zoo.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
ROWS = ListRows("numbers", [(i, i % 3) for i in range(16)])


def draws(raw, target, generator, size=None):
    """An item with one draw from every source of randomness."""
    row = [
        raw,
        target,
        int(np.random.randint(2**31)),
        random.randrange(2**31),
        int(torch.randint(2**31, ())),
        int(torch.randint(2**31, (), generator=generator)),
        size or 0,
    ]
    return {"row": torch.tensor(row)}


def stack(samples):
    return {"row": torch.stack([sample["row"] for sample in samples])}


def make(rows=ROWS, how=draws, **options):
    return Batches(rows, how, stack, **{"batch_size": 5, "seed": 0, **options})


def taken(batches, count, first=0):
    steps = batches.steps(first)
    found = [next(steps) for _ in range(count)]
    steps.close()
    return found


def rows_of(steps):
    return torch.cat([batch["row"] for step in steps for batch in step.batches])


def test_an_epoch_holds_every_item_once_and_steps_are_numbered_throughout():
    batches = make()
    assert batches.steps_per_epoch == 4
    steps = taken(batches, 9)
    assert [(s.number, s.epoch, s.items) for s in steps[:5]] == [
        (0, 0, 5), (1, 0, 5), (2, 0, 5), (3, 0, 1), (4, 1, 5),
    ]  # fmt: skip
    for epoch in (steps[:4], steps[4:8]):
        assert sorted(rows_of(epoch)[:, 0].tolist()) == list(range(16))
    assert [s.indices[0] for s in steps] == [s.batches[0]["row"][:, 0].tolist() for s in steps]


def test_randomness_is_that_of_the_item_in_its_epoch_whatever_the_workers():
    """Case DAT-01."""
    alone = taken(make(), 8)
    ahead = taken(make(workers=4), 8)
    assert torch.equal(rows_of(alone), rows_of(ahead))
    assert torch.equal(rows_of(alone), rows_of(taken(make(), 8)))
    by_item = [
        {row[0]: row[2:6] for row in rows_of(part).tolist()} for part in (alone[:4], alone[4:])
    ]
    for source in range(4):
        first, second = ([found[item][source] for item in range(16)] for found in by_item)
        assert len(set(first)) == len(set(second)) == 16
        assert all(a != b for a, b in zip(first, second, strict=True))
    other = rows_of(taken(make(seed=1), 8))
    assert not torch.equal(rows_of(alone), other)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_states_of_the_main_process_are_left_alone(workers):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    taken(make(workers=workers), 5)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [3, 4, 11])
def test_a_run_continues_from_the_number_of_its_step(workers, first):
    whole, rest = taken(make(), 14), taken(make(workers=workers), 14 - first, first)
    assert [(s.number, s.epoch) for s in rest] == [(s.number, s.epoch) for s in whole[first:]]
    assert torch.equal(rows_of(rest), rows_of(whole[first:]))


@pytest.mark.parametrize("n", [1, 2, 5, 17])
@pytest.mark.parametrize(("world_size", "microbatches"), [(2, 1), (2, 3), (4, 2)])
def test_ranks_and_microbatches_see_together_what_one_process_sees(n, world_size, microbatches):
    rows = ListRows("few", [(i, 0) for i in range(n)])
    alone = make(rows)
    ranks = [
        make(rows, rank=rank, world_size=world_size, microbatches=microbatches)
        for rank in range(world_size)
    ]
    count = 2 * alone.steps_per_epoch
    parts = [taken(rank, count) for rank in ranks]
    for number, step in enumerate(taken(alone, count)):
        same = [part[number] for part in parts]
        found = sorted(row for s in same for b in s.batches for row in b["row"].tolist())
        assert found == sorted(step.batches[0]["row"].tolist())
        assert {s.items for s in same} == {step.items}
        assert all(len(s.batches) <= microbatches for s in same)


def test_workers_of_a_rank_without_a_share_in_some_steps_run_ahead_over_them():
    rows = ListRows("few", [(i, 0) for i in range(3)])
    options = {"rows": rows, "batch_size": 2, "world_size": 2, "rank": 1}
    alone, ahead = taken(make(**options), 8), taken(make(workers=2, **options), 8)
    assert [len(step.batches) for step in ahead] == [1, 0] * 4
    assert torch.equal(rows_of(alone), rows_of(ahead))
    none = taken(make(ListRows("one", [(0, 0)]), world_size=2, rank=1, workers=1), 3)
    assert [(step.batches, step.items) for step in none] == [([], 1)] * 3


def test_ranks_draw_different_augmentations_and_the_same_again():
    """Case DDP-03, without processes: augmentation is a function of the item."""
    options = {"batch_size": 16, "world_size": 2}
    first, second = (rows_of(taken(make(rank=r, **options), 1))[:, 2:] for r in (0, 1))
    assert len(first) == len(second) == 8
    assert not set(first.flatten().tolist()) & set(second.flatten().tolist()) - {0}
    assert torch.equal(first, rows_of(taken(make(rank=0, **options), 1))[:, 2:])


def test_a_rank_without_a_share_has_an_item_to_take_part_with():
    one = ListRows("one", [(7, 1)])
    batches = make(one, rank=1, world_size=2)
    assert taken(batches, 1)[0].batches == []
    filler = batches.filler()["row"]
    assert filler[:, :2].tolist() == [[7, 1]]


def test_an_item_that_is_drawn_twice_is_augmented_twice():
    order = partial(balanced, targets=[0] + [1] * 15)
    rows = rows_of(taken(make(order=order), 4)).tolist()
    lone = [tuple(row[2:6]) for row in rows if row[0] == 0]
    assert len(lone) == len(set(lone)) == 8


def test_sizes_are_those_of_the_step():
    steps = taken(make(size=progressive(((0.5, 4), (1.0, 8)), 8), workers=1), 8)
    assert [set(s.batches[0]["row"][:, 6].tolist()) for s in steps] == [{4}] * 4 + [{8}] * 4


def test_time_spent_waiting_is_counted():
    def slow(raw, target, generator):
        time.sleep(0.01)
        return {"row": torch.tensor(raw)}

    batches = make(how=slow)
    began = time.perf_counter()
    taken(batches, 4)
    assert 0.16 <= batches.wait <= time.perf_counter() - began


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("the image is damaged; get a copy", "more"), "the image is damaged; get a copy"),
        (KeyError("x"), "cannot be made into a sample: KeyError: 'x'"),
    ],
)
def test_an_item_that_cannot_be_made_is_named(workers, error, said):
    def fail(raw, target, generator):
        if raw == 11:
            raise error
        return {"row": torch.tensor(raw)}

    with pytest.raises(DataError) as caught:
        taken(make(how=fail, workers=workers), 4)
    assert caught.value.line == f"numbers, row 11: {said}" or (
        caught.value.line == f"numbers, row 11 {said}"
    )


def test_samples_that_make_no_batch_are_named():
    def ragged(raw, target, generator):
        return {"row": torch.zeros(raw)}

    with pytest.raises(DataError, match=r"the batch of numbers, row \d+, numbers, row"):
        taken(make(how=ragged), 1)


def test_a_killed_worker_ends_the_run_with_a_clear_error():
    steps = make(workers=2).steps()
    next(steps)
    workers = [p for p in multiprocessing.active_children() if p.daemon]
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"a data worker has died .* fewer workers than 2"):
        list(islice(steps, 10_000))


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_workers_survive_the_signals_that_the_main_process_answers():
    """Ctrl-C goes to the whole group; a run ends at the boundary of a step, not of a batch."""
    steps = make(workers=1).steps()
    next(steps)
    (worker,) = (p for p in multiprocessing.active_children() if p.daemon)
    assert os.getpgid(worker.pid) != os.getpgid(0)
    os.kill(worker.pid, signal.SIGINT)
    assert [next(steps).number for _ in range(20)] == list(range(1, 21))
    steps.close()
    worker.join(5)
    assert not worker.is_alive()


def test_a_program_that_ends_in_the_middle_leaves_no_worker(fresh_python):
    printed = fresh_python(
        """
        import multiprocessing, time, torch
        from zoo.data.loader import Batches
        from zoo.data.rows import ListRows
        def make(raw, target, generator):
            return {"x": torch.zeros(100_000)}
        rows = ListRows("n", [(i, 0) for i in range(99)])
        steps = Batches(rows, make, lambda s: s[0], batch_size=3, seed=0, workers=2).steps()
        next(steps)
        print(*(p.pid for p in multiprocessing.active_children()))
    """.replace("\n        ", "\n")
    )
    pids = [int(pid) for pid in printed.split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_handler_for_dead_children_is_the_callers():
    before = signal.getsignal(signal.SIGCHLD)
    taken(make(workers=1), 1)
    assert signal.getsignal(signal.SIGCHLD) == before


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"workers": -1}, {"microbatches": 1.5}, {"world_size": True}]
)
def test_other_numbers_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} is"):
        make(**wrong)


def test_nothing_cannot_be_trained_on():
    with pytest.raises(DataError, match="none has no items"):
        make(ListRows("none", []))


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_workers_may_be_started_afresh(monkeypatch):
    """As on macOS and Windows; there, what they are given has to be picklable."""
    monkeypatch.setattr("zoo.data.loader.start_method", lambda: "spawn")
    assert torch.equal(rows_of(taken(make(workers=1), 3)), rows_of(taken(make(), 3)))
    with pytest.raises(ConfigError, match=r"workers cannot be given this task .* set workers to 0"):
        taken(make(how=lambda raw, target, generator: {}, workers=1), 1)


def test_workers_are_forks_where_that_is_safe():
    assert start_method() == ("fork" if sys.platform == "linux" else "spawn")
