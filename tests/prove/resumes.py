"""End a run at random instants, go on, and compare what it comes to with a run that nobody ended.

Run as ``python resumes.py KIND COUNT SEED SIGNAL FOLDER``; prints the counts as JSON. Everything is
imported once and the runs are forked, so that a hundred ends take some minutes. KIND is a key of
`KINDS`. A run is ended by SIGNAL (KILL or TERM) again and again until COUNT ends have met it at
work, at least a third of them in a validation and a third while a checkpoint is written. Whenever
it comes to its end, all that is in its last checkpoint, its log and its weights are compared with
the unbroken run's.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import shutil
import signal
import socket
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import tomlkit  # noqa: F401 (imported here, and not in every fork)
import torch
import torch._dynamo  # torch.optim imports it when the first optimiser is made
from PIL import Image

import vision.resnet  # noqa: F401
import zoo.loading  # noqa: F401
from vision.augment import ImageRecipe
from zoo import cards
from zoo.training import checkpoint, loop
from zoo.training.recipe import SGD, AdamW, Cosine
from zoo.training.run import train

CARD = """
model = "vision.resnet:ResNet"
task = "vision.tasks:ImageClassification"
summary = "A small network for tests."
paper = "https://arxiv.org/abs/1512.03385"
parameters = 20_000
head = ["fc"]
[config]
block = "basic"
depths = [1, 1, 1, 1]
[inputs.image]
dtype = "float32"
shape = ["batch", 3, "height", "width"]
[outputs.logits]
dtype = "float32"
shape = ["batch", "num_classes"]
[weights.small]
config = { width = 4, num_classes = 3 }
licence = "MIT"
files = [{ name = "tiny.small.safetensors", size = 1, sha256 = "SHA" }]
preprocessing = { size = 32, resize = "shorter", crop = 32, interpolation = "bilinear", \
antialias = true, mean = [0.5, 0.5, 0.5], std = [0.25, 0.25, 0.25] }
"""
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "ema": {"ema": 0.9},
    "cosine": {"schedule": Cosine(warmup=0.3), "optimizer": SGD(lr=0.05)},
    "accumulation": {"microbatches": 3, "mixup": 0.2, "cutmix": 1.0},
    "clip": {"clip_norm": 0.5, "label_smoothing": 0.1, "balanced": True},
    "bf16": {"precision": "bfloat16", "freeze": 2, "freeze_epochs": 1.0},
    "ranks": {"ema": 0.9},
    "sharded": {"ema": 0.9, "strategy": "fsdp", "microbatches": 2},
    "workers": {"workers": 2, "cache": 0.01, "ema": 0.9, "microbatches": 3, "clip_norm": 0.5},
}
SPREAD = ("ema", "cosine", "accumulation", "clip", "bf16", "ranks")  # each also with two workers
KINDS |= {f"{kind}+workers": {**KINDS[kind], "workers": 2} for kind in SPREAD}
DAMAGES = ("missing", "empty", "a byte short", "a bit flipped")
PHASES = ("training", "validation", "saving")
HUNG_S = 180.0  # far more than any run here takes
TIMES = ("items_per_s", "wait")  # of a line of metrics.jsonl, which no two runs share


def make_world(folder: Path) -> None:
    """A model's card, three classes of ten noisy images to train on and of four to measure on."""
    (folder / "cards").mkdir(parents=True)
    (folder / "cards" / "tiny.toml").write_text(CARD.replace("SHA", "0" * 64))
    chance = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 4)):
        for label in range(3):
            place = folder / part / "rgb"[label]
            place.mkdir(parents=True)
            for number in range(count):
                pixels = chance.integers(0, 256, (20, 20, 3))
                pixels[..., label] //= 2
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")


def recipe_for(kind: str, folder: Path, **changes: object) -> ImageRecipe:
    """Four epochs of five steps; saves, measures and logs at different ones."""
    return ImageRecipe(
        **{
            "data": str(folder / "train"),
            "validation": str(folder / "val"),
            "epochs": 4.0,
            "batch_size": 7,
            "optimizer": AdamW(lr=3e-3),
            "flip": True,
            "crop_padding": 2,
            "evaluate_every": 6,
            "checkpoint_every": 2,
            **KINDS[kind],
            **changes,
        }
    )


def ranks_of(kind: str) -> int:
    """Processes of a run."""
    return 2 if kind.partition("+")[0] in ("ranks", "sharded") else 1


def start(kind: str, folder: Path, out: Path, phase: mmap.mmap) -> list[int]:
    """Fork the processes of a run; gives their numbers. `phase` tells what the main one does."""
    phase[0] = 0
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = ranks_of(kind)
    processes = []
    for rank in range(world):
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            status = 1
            try:
                torch.set_num_threads(1)
                warnings.simplefilter("ignore")
                if world > 1:
                    os.environ |= {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    }
                cards.CARDS = folder / "cards"
                if rank == 0:
                    watch(loop, "evaluate", phase, 1)
                    watch(checkpoint, "save", phase, 2)
                train("tiny.small", recipe_for(kind, folder), out, trackers=(), quiet=True)
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        processes.append(process)
    return processes


def watch(module: ModuleType, name: str, phase: mmap.mmap, number: int) -> None:
    """Let `phase` hold the number while a function runs."""
    function = getattr(module, name)

    def watched(*arguments: object, **named: object) -> object:
        before, phase[0] = phase[0], number
        try:
            return function(*arguments, **named)
        finally:
            phase[0] = before

    setattr(module, name, watched)


def until(phase: mmap.mmap, wanted: int, process: int) -> None:
    """Wait until the process does what is wanted, or has ended."""
    limit = time.monotonic() + HUNG_S
    while phase[0] != wanted and time.monotonic() < limit:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.0002)  # far less than either takes


def wait(processes: list[int]) -> list[int]:
    """What each process ended with, as a shell says it; one that hangs shows where, and fails."""
    ends = []
    for process in processes:
        limit = time.monotonic() + HUNG_S
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            if time.monotonic() > limit:
                os.kill(process, signal.SIGABRT)  # faulthandler prints the stacks
                ended = os.waitpid(process, 0)
                break
            time.sleep(0.005)
        ends.append(os.waitstatus_to_exitcode(ended[1]))
    return ends


def outcome(out: Path) -> dict[str, object]:
    """All that has to be equal: the last checkpoint, the log without times, the weights."""
    found = checkpoint.newest(out / "checkpoints")
    assert found is not None
    parts = [checkpoint.load_part(found, rank) for rank in range(found.world_size)]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": found.step,
        "state": checkpoint.load(found),
        "noise": parts,
        "log": [{k: v for k, v in line.items() if k not in TIMES} for line in lines],
        "weights": sorted(path.name for path in (out / "weights").iterdir()),
        "card": (out / "weights" / "tiny.toml").read_text(),
    }


def difference(one: object, other: object, where: str = "") -> str | None:
    """Where two nested values are not equal, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return None if same else f"{where}: other numbers"
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return f"{where}: {list(one)} and {list(other)}"
        found = (difference(one[key], other[key], f"{where}/{key}") for key in one)
        return next(filter(None, found), None)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} items"
        pairs = enumerate(zip(one, other, strict=True))
        found = (difference(a, b, f"{where}/{i}") for i, (a, b) in pairs)
        return next(filter(None, found), None)
    return None if one == other else f"{where}: {one!r} and {other!r}"


def damaged(path: Path, damage: str) -> None:
    """Damage a file in one of the ways of `DAMAGES`."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "missing":
        path.unlink()
    else:
        changed = {"empty": b"", "a byte short": content[:-1], "a bit flipped": content}
        path.write_bytes(changed[damage])


def damages(kind: str, folder: Path, phase: mmap.mmap) -> Counter[str]:
    """Damage each file of the last checkpoint in each way; a resumed run has to end the same."""
    whole = folder / f"{kind}-unbroken"
    wanted, seen = outcome(whole), Counter[str]()
    last = checkpoint.newest(whole / "checkpoints")
    assert last is not None
    for file in sorted(path.name for path in last.path.iterdir()):
        for damage in DAMAGES:
            out = folder / f"{kind}-{file}-{damage}"
            shutil.copytree(whole, out)
            shutil.rmtree(out / "weights")
            damaged(out / "checkpoints" / last.path.name / file, damage)
            assert wait(start(kind, folder, out, phase)) == [0] * ranks_of(kind), (file, damage)
            found = difference(wanted, outcome(out))
            assert found is None, f"{kind}, {file} {damage}: {found}"
            seen[damage] += 1
            shutil.rmtree(out)
    return seen


def main() -> None:
    """Print the counts."""
    faulthandler.enable()
    kind, count, way = sys.argv[1], int(sys.argv[2]), sys.argv[4]
    chance, folder = random.Random(int(sys.argv[3])), Path(sys.argv[5])
    if not (folder / "cards").exists():
        make_world(folder)
    phase = mmap.mmap(-1, 1)
    began = time.monotonic()
    assert wait(start(kind, folder, folder / f"{kind}-unbroken", phase)) == [0] * ranks_of(kind)
    length = time.monotonic() - began
    if way == "DAMAGE":
        print(json.dumps(damages(kind, folder, phase)))
        return
    number = getattr(signal, f"SIG{way}")
    wanted = outcome(folder / f"{kind}-unbroken")
    seen: Counter[str] = Counter(length_ms=int(1000 * length))
    run = 0

    def lacking() -> list[int]:
        return [i for i in (1, 2) if seen[f"ended in {PHASES[i]}"] < count // 3]

    while seen["ended at work"] < count or lacking():
        out, patience = folder / f"{kind}-{run}", 0.7 * length
        while True:
            processes = start(kind, folder, out, phase)
            time.sleep(chance.uniform(0, patience))
            patience *= 1.2  # where starting takes most of the time, a run still comes to its end
            if lacking() and seen["ended at work"] % 3:
                until(phase, lacking()[0], processes[0])
            met = PHASES[phase[0]]
            for process in processes:
                os.kill(process, number)
            began = time.monotonic()
            ends = wait(processes)
            seen["slowest end_ms"] = max(
                seen["slowest end_ms"], int(1000 * (time.monotonic() - began))
            )
            if ends == [0] * len(processes):
                break
            expected = (-signal.SIGKILL,) if number == signal.SIGKILL else (143, -signal.SIGTERM)
            assert all(end in (0, *expected) for end in ends), f"a run failed by itself: {ends}"
            seen["ended at work"] += 1
            seen[f"ended in {met}"] += 1
        assert (found := difference(wanted, outcome(out))) is None, f"{kind}: {found}"
        seen["runs compared"] += 1
        run += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
