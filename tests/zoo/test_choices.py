"""What is chosen for the caller."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo import choices
from zoo.choices import batch_size_for, epochs_for, lr_for, microbatches_for, saved_bytes


@pytest.mark.parametrize(
    ("items", "size"),
    [(1, 1), (5, 5), (100, 8), (800, 32), (801, 31), (57, 6), (1600, 64), (67_349, 64)],
)
def test_batches_leave_enough_steps_and_no_single_item(items, size):
    assert batch_size_for(items) == size
    assert items % size != 1 or items <= 2


@pytest.mark.parametrize(
    ("items", "size", "epochs"),
    [(800, 32, 16.0), (100, 8, 30.0), (3000, 64, 9.0), (67_349, 64, 3.0)],
)
def test_epochs_come_near_to_the_steps_that_are_wanted(items, size, epochs):
    assert epochs_for(items, size) == epochs


def test_long_runs_are_measured_ten_times():
    assert choices.evaluate_every_for(800, 32, 10.0) is None
    assert choices.evaluate_every_for(800, 32, 24.0) == 60
    assert choices.evaluate_every_for(801, 32, 24.0) == 63


def test_as_many_processes_read_as_keep_up(monkeypatch):
    monkeypatch.setattr(choices.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(choices, "start_method", lambda: "fork")
    workers = [choices.workers_for(read, 1.0) for read in (0.05, 0.1, 1.0, 1.1, 3.5, 9.0)]
    assert workers == [0, 1, 1, 2, 4, 4]
    monkeypatch.setattr(choices, "start_method", lambda: "spawn")
    assert choices.workers_for(1.0, 1.0) == 0
    monkeypatch.setattr(choices, "start_method", lambda: "fork")
    monkeypatch.setattr(choices.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert choices.workers_for(1.0, 1.0) == 0


def test_the_rate_fits_what_is_trained():
    convnet = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    encoder = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    head, body = {"head_only": True}, {"head_only": False}
    assert lr_for(convnet, trained=True, **body) == 1e-3
    assert lr_for(encoder, trained=True, **body) == 1e-4
    assert lr_for(encoder, trained=False, **body) == pytest.approx(3e-4)
    assert lr_for(convnet, trained=True, **head) == lr_for(encoder, trained=True, **head) == 3e-3
    with torch.device("meta"):
        large = nn.Sequential(nn.Linear(8000, 8000), nn.LayerNorm(8000))
    assert lr_for(large, trained=True, **body) == 3e-5


def test_what_a_forward_pass_keeps_is_counted_once_and_without_parameters():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    x = torch.randn(4, 10)
    # The first layer keeps its input; the rectified values are kept twice, in one storage.
    assert saved_bytes(model, lambda: model(x)) == 4 * 4 * (10 + 20)


def test_a_batch_is_computed_in_as_many_parts_as_memory_wants():
    # Half of 1000 bytes is free: 3 items at 2 * 80, 2 if 10 parameters take 160.
    assert microbatches_for(32, 80, 0, 1000) == 11
    assert microbatches_for(32, 80, 10, 1000) == 16
    assert microbatches_for(32, 80, 0, 10**9) == 1
    assert microbatches_for(32, 80, 10**6, 1000) == 32  # it may fail; nothing smaller is there


def test_free_memory_is_a_sane_number():
    assert 10**7 < choices.free_bytes(torch.device("cpu")) < 10**14
