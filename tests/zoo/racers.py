"""Many processes that load one model at the same moment; prints what each of them got, as JSON.

Run as ``python racers.py CARDS NAME COUNT [noop|enosys|ranks|nodes]``: torch is imported once, then
the processes are forked and wait for one another. ``noop`` makes locks do nothing, ``enosys`` makes
them fail; with ``ranks`` the processes are those of one gloo group, with ``nodes`` too, and each
has a cache of its own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed

import zoo
from zoo import cache, cards


def digest(model: torch.nn.Module) -> str:
    """One hash of all tensors of a model."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(name.encode() + tensor.numpy().tobytes())
    return state.hexdigest()


def break_locks(how: str) -> None:
    """Make flock do nothing, as on some network file systems, or fail, as on others."""

    def flock(*_: object) -> None:
        if how == "enosys":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    cache.fcntl.flock = flock


def load(name: str, rank: int, count: int, how: str) -> str:
    """What one process makes of it."""
    if how in ("ranks", "nodes"):
        if how == "nodes":
            os.environ["ZOO_HOME"] += f"-{rank}"
        meeting = f"file://{cards.CARDS}/../meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    model = zoo.load(name)
    if distributed.is_initialized():
        total = sum(tensor.double().sum() for tensor in model.state_dict().values())
        least, most = total.clone(), total.clone()
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        assert least == most
    return digest(model)


def race(name: str, count: int, how: str) -> list[str]:
    """What each process made of it."""
    start_read, start_write = os.pipe()
    results = []
    for rank in range(count):
        read, write = os.pipe()
        if os.fork() == 0:
            signal.alarm(60)
            os.close(start_write)
            os.read(start_read, 1)  # ends for all of them when the parent closes its end
            try:
                answer = load(name, rank, count, how)
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(write, answer.encode()[:60_000])
            os._exit(0)
        os.close(write)
        results.append(read)
    os.close(start_write)
    answers = []
    for read in results:
        with os.fdopen(read, "rb") as pipe:
            answers.append(pipe.read().decode())
    for _ in range(count):
        os.wait()
    return answers


if __name__ == "__main__":
    cards.CARDS = Path(sys.argv[1])
    way = sys.argv[4] if len(sys.argv) > 4 else ""
    if way in ("noop", "enosys"):
        break_locks(way)
    print(json.dumps(race(sys.argv[2], int(sys.argv[3]), way)))
