from __future__ import annotations

import multiprocessing
import pickle

import pytest
import torch

from zoo.data.caching import cached
from zoo.data.loader import Batches
from zoo.data.rows import ListRows

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
ROWS = ListRows("some", [(i, i % 2) for i in range(12)], ("a", "b"))


class Decoder:
    """Counts what it decodes, over processes."""

    def __init__(self):
        self.calls = multiprocessing.Value("i", 0)

    def __call__(self, raw):
        with self.calls.get_lock():
            self.calls.value += 1
        return torch.full((3, 2, raw + 1), raw, dtype=torch.uint8)


def test_an_item_is_decoded_once():
    decode = Decoder()
    rows = cached(ROWS, decode, 10_000)
    for _ in range(3):
        for i in range(12):
            raw, target = rows[i]
            assert torch.equal(raw, torch.full((3, 2, i + 1), i, dtype=torch.uint8))
            assert target == i % 2
    assert decode.calls.value == 12
    assert rows.used_bytes == sum(6 * (i + 1) for i in range(12))
    assert (rows.classes, rows.where(3)) == (("a", "b"), "some, row 3")


def test_what_a_caller_does_to_an_item_stays_with_the_caller():
    rows = cached(ROWS, Decoder(), 10_000)
    for _ in range(2):
        rows.raw(5).zero_()
    assert rows.raw(5).unique().tolist() == [5]


def test_what_does_not_fit_is_decoded_again():
    decode = Decoder()
    rows = cached(ROWS, decode, 6 * (1 + 2))
    for _ in range(2):
        assert [rows.raw(i).numel() for i in range(12)] == [6 * (i + 1) for i in range(12)]
    assert decode.calls.value == 2 + 2 * 10
    assert rows.used_bytes == 18


def test_other_types_and_no_room_are_no_error():
    rows = cached(ROWS, lambda raw: torch.tensor([raw / 2]), 100)
    assert [rows.raw(3).item(), rows.raw(3).item(), rows.used_bytes] == [1.5, 1.5, 0]
    assert cached(ROWS, Decoder(), 0) is ROWS


def test_workers_share_what_they_decode():
    decode = Decoder()
    rows = cached(ROWS, decode, 10_000)

    def make(raw, target, generator):
        return {"x": raw.sum(dtype=torch.int64)[None]}

    def stack(samples):
        return {"x": torch.cat([s["x"] for s in samples])}

    steps = Batches(rows, make, stack, batch_size=3, seed=0, workers=2).steps()
    seen = [next(steps).batches[0]["x"].sum().item() for _ in range(4 * 6)]
    steps.close()
    assert sum(seen[:4]) == sum(6 * i * (i + 1) for i in range(12))
    assert 12 <= decode.calls.value <= 24  # both may decode an item at the same time
    assert rows.used_bytes == sum(6 * (i + 1) for i in range(12))
    before = decode.calls.value
    for i in range(12):
        rows.raw(i)
    assert decode.calls.value == before  # the main process has it too


def test_a_copy_in_a_process_that_is_no_fork_has_its_own():
    rows = cached(ROWS, len, 100)
    copy = pickle.loads(pickle.dumps(rows))
    assert (copy.targets.tolist(), copy.limit_bytes) == (ROWS.targets.tolist(), 100)
