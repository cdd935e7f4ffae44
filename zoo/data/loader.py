"""Batches for training: everything random in them is a pure function of seed, epoch and index.

So neither workers nor ranks have a state to be saved: a run resumes from the number of its step,
with any number of workers, and gets the batches it would have got.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from zoo.data.order import Order, occurrences, permutation, seed_of, share
from zoo.data.rows import Rows
from zoo.errors import ConfigError, DataError, ZooError, shown

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """What one step of the optimiser sees on this rank.

    Attributes:
        number: From 0, over the whole run.
        epoch: From 0.
        batches: The microbatches of this rank, none of them empty; no batch at all where the step
            has fewer items than there are ranks.
        items: Number of items on all ranks together.
        indices: Of the items in `batches`, batch by batch, as `Rows` counts them.
    """

    number: int
    epoch: int
    batches: list[Sample]
    items: int
    indices: list[list[int]] = field(default_factory=list)


class Batches:
    """The steps of a training run over some rows.

    Every item is made under seeds of its own: those of `random`, ``numpy.random`` and torch's
    global generator, and the generator that `make` is given. The main process keeps its random
    states, also with ``workers=0``.

    Attributes:
        steps_per_epoch: Steps in which every item is seen once; the last one may be smaller.
        wait: Seconds that `steps` has spent waiting for data so far.
    """

    def __init__(
        self,
        rows: Rows,
        make: Callable[..., Sample],
        collate: Callable[[list[Sample]], Sample],
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        microbatches: int = 1,
        workers: int = 0,
        order: Order | None = None,
        size: Callable[[int], int | None] | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Describe the run; nothing is read yet.

        Args:
            rows: The items.
            make: ``make(raw, target, generator) -> sample``, where the item is prepared and
                augmented, in a worker if there are any. With `size`, ``size=`` is passed too.
            collate: Samples -> batch.
            batch_size: Items of a step, on all ranks and in all microbatches together.
            seed: Of all randomness, any int.
            rank: Of this process.
            world_size: Number of ranks.
            microbatches: Parts of each rank's share of a step.
            workers: Processes that make batches ahead; 0 makes them here, when they are asked for.
            order: ``(seed, epoch) -> indices``; a permutation by default.
            size: Step -> pixels of its images, as `zoo.data.order.progressive` gives it.
            pin_memory: Copy batches to memory from which a GPU reads asynchronously.

        Raises:
            ConfigError: A number is out of range.
            DataError: There are no items.
        """
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("world_size", world_size, 1),
            ("microbatches", microbatches, 1),
            ("workers", workers, 0),
        ):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {shown(value)}; it takes a whole number from {least}")
        if not len(rows):
            raise DataError(f"{rows.name} has no items to train on; check the path and the split")
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.world_size, self.microbatches = rank, world_size, microbatches
        self.workers, self.pin_memory = workers, pin_memory
        self.order: Order = order or partial(permutation, n=len(rows))
        self.size = size
        self.steps_per_epoch = -(-len(self.order(seed, 0)) // batch_size)
        self.wait = 0.0
        self._maker = _Maker(rows, make, collate, seed, sized=size is not None)

    def steps(self, first: int = 0) -> Iterator[Step]:
        """Steps from the global number `first` on, for ever.

        Raises:
            DataError: An item cannot be made; the message names it. Or a worker has died.
        """
        made = self._made(first)
        try:
            for plan in self._plans(first):
                batches = []
                for _ in plan.jobs:
                    began = time.perf_counter()
                    batches.append(_checked(next(made)))
                    self.wait += time.perf_counter() - began
                indices = [[index for index, _ in job.items] for job in plan.jobs]
                yield Step(plan.number, plan.epoch, batches, plan.items, indices)
        finally:
            made.close()

    def filler(self) -> Sample:
        """A batch of one item, for a rank whose share of a step is empty.

        It takes part in the forward and backward of the others with a loss times 0.
        """
        size = self.size(0) if self.size else None
        return _checked(self._maker[_Job(0, [(0, 0)], size)])

    def _plans(self, first: int) -> Iterator[_Plan]:
        """What to make for each step: cheap, and the same in every call."""
        epoch, place = divmod(first, self.steps_per_epoch)
        while True:
            indices = self.order(self.seed, epoch)
            pairs = np.stack([indices, occurrences(indices)], axis=1)
            for step in range(place, self.steps_per_epoch):
                number = epoch * self.steps_per_epoch + step
                whole = pairs[step * self.batch_size : (step + 1) * self.batch_size]
                parts = share(whole, self.rank, self.world_size, self.microbatches)
                size = self.size(number) if self.size else None
                jobs = [_Job(epoch, [(i, k) for i, k in part.tolist()], size) for part in parts]
                yield _Plan(number, epoch, jobs, len(whole))
            epoch, place = epoch + 1, 0

    def _made(self, first: int) -> Generator[Any]:
        """The batch of every job in turn; workers run ahead over steps and epochs alike."""
        loader: DataLoader[Any] = DataLoader(
            self._maker,  # type: ignore[arg-type]  # any object with __getitem__ serves
            sampler=_Jobs(partial(self._plans, first)),
            batch_size=None,
            collate_fn=_same,
            num_workers=self.workers,
            worker_init_fn=_alone,
            multiprocessing_context=start_method() if self.workers else None,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # or the base seed is drawn from the global one
        )
        with _quiet_children():
            try:
                batches = iter(loader)
            except Exception as error:  # what cannot be pickled says so in many ways
                if start_method() == "fork":
                    raise
                raise ConfigError(
                    f"workers cannot be given this task on {sys.platform}, where they are no forks "
                    f"({shown(str(error), 60)}); set workers to 0"
                ) from error
        while True:
            try:
                batch = next(batches)
            except (RuntimeError, OSError, EOFError) as error:  # OSError: its socket is gone
                raise DataError(
                    f"a data worker has died ({shown(str(error), 80)}); most often memory ran out: "
                    f"set fewer workers than {self.workers}, or a smaller batch",
                    str(error),
                ) from error
            yield batch


def start_method() -> str:
    """How workers are started: ``fork`` where it is safe, so that they share the rows' memory."""
    able = multiprocessing.get_all_start_methods()
    return "fork" if sys.platform == "linux" and "fork" in able else "spawn"


@dataclass(frozen=True)
class _Job:
    """One batch to be made."""

    epoch: int
    items: list[tuple[int, int]]  # index, and how often it came before in this epoch
    size: int | None


@dataclass(frozen=True)
class _Plan:
    """One step: the jobs of this rank, and the items of all."""

    number: int
    epoch: int
    jobs: list[_Job]
    items: int


@dataclass(frozen=True)
class _Failure:
    """An error that travels as a value: torch would rebuild it with a traceback as its message."""

    error: ZooError


@dataclass(frozen=True)
class _Jobs:
    """All jobs, as the sampler of a `DataLoader`."""

    plans: Callable[[], Iterator[_Plan]]

    def __iter__(self) -> Iterator[_Job]:
        return (job for plan in self.plans() for job in plan.jobs)

    def __len__(self) -> int:
        return sys.maxsize


class _Maker:
    """Job -> batch, in a worker or here."""

    def __init__(
        self,
        rows: Rows,
        make: Callable[..., Sample],
        collate: Callable[[list[Sample]], Sample],
        seed: int,
        *,
        sized: bool,
    ) -> None:
        self.rows, self.make, self.collate, self.seed = rows, make, collate, seed
        self.sized = sized

    def __getitem__(self, job: _Job) -> Sample | _Failure:
        try:
            if get_worker_info() is not None:
                return self._batch(job)
            with _own_randomness():
                return self._batch(job)
        except ZooError as error:
            return _Failure(error)

    def _batch(self, job: _Job) -> Sample:
        options = {"size": job.size} if self.sized else {}
        generator = torch.Generator()
        samples = [self._sample(job.epoch, *item, generator, options) for item in job.items]
        try:
            return self.collate(samples)
        except Exception as error:
            names = ", ".join(self.rows.where(index) for index, _ in job.items[:3])
            raise _unmade(f"the batch of {names}, …", error) from error

    def _sample(
        self,
        epoch: int,
        index: int,
        turn: int,
        generator: torch.Generator,
        options: dict[str, Any],
    ) -> Sample:
        _seed_all(seed_of(self.seed, epoch, index, turn), generator)
        try:
            raw, target = self.rows[index]
            return self.make(raw, target, generator, **options)
        except Exception as error:
            raise _unmade(self.rows.where(index), error) from error


def _unmade(where: str, error: Exception) -> DataError:
    if isinstance(error, ZooError):
        if where in error.line:
            return DataError(error.line, *error.details)
        return DataError(f"{where}: {error.line}", *error.details)
    return DataError(
        f"{where} cannot be made into a sample: {type(error).__name__}: {error}",
        *traceback.format_exc().splitlines(),
    )


def _checked(batch: Sample | _Failure) -> Sample:
    if isinstance(batch, _Failure):
        raise batch.error
    return batch


def _seed_all(seed: int, generator: torch.Generator) -> None:
    """Seed every source of randomness that a `make` may use."""
    generator.manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Give back the states of all global generators afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def _quiet_children() -> Iterator[None]:
    """Keep the handler of SIGCHLD.

    Torch's raises wherever the program is when a worker dies, in the middle of a backward pass;
    without it the death is noticed where the next batch is asked for, within five seconds.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


def _alone(worker: int) -> None:
    """Leave signals to the main process, which ends its workers itself.

    Ctrl-C and a scheduler's SIGTERM go to the whole process group; workers that died of them would
    keep the run from ending at the boundary of a step.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the handler of the main process


def _same(batch: Any) -> Any:
    return batch
