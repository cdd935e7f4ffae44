"""What the processes of test_distributed.py run: ``torchrun ranks.py WHAT FOLDER``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zoo.errors import CheckpointError, ConfigError
from zoo.training import checkpoint, distributed
from zoo.training.ema import EMA
from zoo.training.precision import Precision

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x)).tanh()


class Net(nn.Module):
    """Sizes that two ranks share unevenly, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def seeded(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def step(model: nn.Module, bare: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step on 7 items, shared evenly as far as that goes, in two microbatches a rank."""
    ids = torch.randint(0, 7, (7,), generator=torch.Generator().manual_seed(number))
    mine = ids[distributed.rank() :: distributed.world_size()]
    precision = Precision("float32", CPU)
    for part, last in ((mine[:2], False), (mine[2:], True)):
        with distributed.sync_gradients(model, last):
            loss = nn.functional.cross_entropy(model(part), part, reduction="sum")
            precision.backward(loss * distributed.world_size() / len(ids))
    stepped = precision.step(optimizer, list(bare.parameters()), 0.5)
    optimizer.zero_grad()
    return stepped.norm


def numbers(folder: Path) -> None:
    me = distributed.rank()
    assert distributed.world_size() == 2
    assert distributed.local_rank() == me
    assert distributed.is_main() == (me == 0)
    assert distributed.all_sum([2**53 + 1, 0.1, me, True]) == [2**54 + 2, 0.2, 1, 2]
    assert distributed.all_sum([]) == []
    assert distributed.gather({"rank": me}) == [{"rank": 0}, {"rank": 1}]
    row, empty = torch.full((2, 1), 1 / (3 + me), dtype=torch.float64), np.zeros((0, 3), np.int32)
    for other, (found, array) in enumerate(distributed.gather((row, empty))):
        assert torch.equal(found, torch.full((2, 1), 1 / (3 + other), dtype=torch.float64))
        assert array.shape == (0, 3)
        assert array.dtype == np.int32
    assert distributed.broadcast_json({"a": [me, None, "é"]}) == {"a": [0, None, "é"]}
    assert distributed.broadcast_json(None if me == 0 else 3) is None


def unequal(folder: Path) -> None:
    """Case DDP-01: 7 items of loss 1, 6 of loss 2."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.constant_(weight.weight, 3.0 + distributed.rank())  # made equal by wrapping
    wrapped = distributed.wrap(weight, "ddp", False, CPU)
    assert weight.weight.item() == 3.0
    items = torch.full((7, 1), 1.0) if distributed.is_main() else torch.full((6, 1), 2.0)
    (count,) = distributed.all_sum([len(items)])
    (wrapped(items).sum() * distributed.world_size() / count).backward()
    assert weight.weight.grad is not None
    assert abs(weight.weight.grad.item() - 19 / 13) < 1e-6
    assert distributed.unwrap(wrapped) is weight


def replicated(folder: Path) -> None:
    """Two ranks step as one process does, which the test computes."""
    bare = seeded(distributed.rank())
    model = distributed.wrap(bare, "ddp", False, CPU)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
    norms = [step(model, bare, optimizer, number) for number in range(5)]
    state = {"model": bare.state_dict(), "norms": norms}
    part = {"rank": distributed.rank(), "noise": torch.get_rng_state()}
    path = checkpoint.save(folder / "replicated", 5, state, keep=1, part=part)
    found = checkpoint.agree(path.parent)
    assert found is not None
    assert found.path == path
    own = checkpoint.load_part(found, distributed.rank())
    assert own is not None
    assert own["rank"] == distributed.rank()


def sharded(folder: Path) -> None:
    """Sharded training steps likewise, and goes on from what it saved, bit for bit."""

    def made(seed: int) -> tuple[Net, torch.optim.Optimizer, EMA]:
        net = seeded(seed)
        assert distributed.wrap(net, "fsdp", False, CPU) is net
        return net, torch.optim.AdamW(net.parameters(), lr=0.01), EMA(net, 0.9)

    net, optimizer, ema = made(distributed.rank())
    assert sum(p.to_local().numel() for p in net.parameters() if isinstance(p, DTensor)) < 95
    norms = []
    for number in range(5):
        norms.append(step(net, net, optimizer, number))
        ema.update(net)
        if number == 2:
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ema": ema.state_dict(),
            }
            checkpoint.save(folder / "sharded", 3, state, keep=2)
    whole = distributed.full_state(net)
    checkpoint.save(folder / "sharded", 5, {"model": net.state_dict(), "norms": norms}, keep=2)
    checkpoint.save(folder / "whole", 5, {"model": whole}, keep=1)

    again, other, average = made(7)
    state = checkpoint.load(checkpoint.at(folder / "sharded", 3))
    distributed.load_state(again, state["model"])
    distributed.load_state(other, state["optimizer"])
    average.load_state_dict(state["ema"])
    for number in (3, 4):
        assert step(again, again, other, number) == norms[number]
        average.update(again)
    for name, tensor in distributed.full_state(again).items():
        assert torch.equal(tensor, whole[name]), name
    with ema.averaged(net), average.averaged(again):
        one, two = distributed.full_state(net), distributed.full_state(again)
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert not torch.equal(one["words.weight"], whole["words.weight"])


def damaged(folder: Path) -> None:
    """Case DDP-05: what is damaged in the eyes of one rank is passed over by all."""
    place = folder / "damaged"
    for number in (1, 2):
        checkpoint.save(place, number, {"step": number}, keep=2)
    check = checkpoint.check

    def doubtful(path: Path) -> checkpoint.Found:
        if distributed.rank() == 1 and path.name == "step-000002":
            raise CheckpointError("step-000002: state.json is missing")
        return check(path)

    checkpoint.check = doubtful
    try:
        found = checkpoint.agree(place)
    finally:
        checkpoint.check = check
    assert found is not None
    assert found.step == 1


def unwritable(folder: Path) -> None:
    """What one rank cannot write is an error of all, and leaves nothing."""
    place = folder / "unwritable"
    part = {"x": object()} if distributed.rank() == 1 else {"x": 1}
    for _ in range(2):
        try:
            checkpoint.save(place, 1, {}, keep=1, part=part)
        except CheckpointError as error:
            assert "rank 1: part/x is object" in error.line  # noqa: PT017
        else:
            raise AssertionError("saved")
    distributed.gather(None)
    assert os.listdir(place) == []


def signalled(folder: Path) -> None:
    with distributed.Stop() as stop:
        assert not stop.wanted()
        if distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == (distributed.rank() == 1)
        assert stop.wanted()


def refused(folder: Path) -> None:
    for norm, frozen in ((True, False), (False, True)):
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        net.requires_grad_(not frozen)
        try:
            distributed.wrap(net, "ddp", norm, CPU)
        except ConfigError:
            continue
        raise AssertionError("wrapped")


SCENES: dict[str, Callable[[Path], None]] = {
    scene.__name__: scene
    for scene in (
        numbers,
        unequal,
        replicated,
        sharded,
        damaged,
        unwritable,
        signalled,
        refused,
    )
}


def play(folder: Path) -> None:
    """Every scene; what went wrong in it goes to a file of this rank."""
    outcomes = {}
    for name, scene in SCENES.items():
        try:
            scene(folder)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
            break  # the other rank waits elsewhere
    (folder / f"rank-{distributed.rank()}.json").write_text(json.dumps(outcomes))


def die(folder: Path) -> None:
    """Rank 0 is killed within its second save, with the other waiting for it."""
    with distributed.Stop():
        checkpoint.save(folder / "checkpoints", 1, {"x": torch.ones(3)}, keep=2)

        def killed(*_: object) -> None:
            (folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint._complete = killed
        checkpoint.save(folder / "checkpoints", 2, {"x": torch.ones(3)}, keep=2)


def train(folder: Path) -> None:
    """Steps until told to stop; then a checkpoint, and the end."""
    number = 0
    with distributed.Stop() as stop:
        while not stop.wanted():
            number += 1
            (folder / f"at-{distributed.rank()}").write_text(str(number))
            time.sleep(0.02)
        checkpoint.save(folder / "checkpoints", number, {"step": number}, keep=1)
        stop.leave()


def restart(folder: Path) -> None:
    """Groups one after another, now this rank first and now the other."""
    for number in range(10):
        with distributed.start("cpu", timeout_s=60):
            rank = distributed.rank()
            assert distributed.all_sum([number]) == [2 * number]
        if rank == number % 2:
            time.sleep(0.1)
    (folder / f"restarted-{rank}").touch()


if __name__ == "__main__":
    if sys.argv[1] == "restart":
        restart(Path(sys.argv[2]))
        sys.exit()
    with distributed.start("cpu", timeout_s=120):
        {"play": play, "die": die, "train": train}[sys.argv[1]](Path(sys.argv[2]))
