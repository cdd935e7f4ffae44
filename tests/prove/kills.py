"""Kill a process at random instants while it downloads, repairs or saves; count what comes of it.

Run as ``python kills.py KIND COUNT SEED``; prints the counts as JSON. Everything is imported once
and the workers are forked, so that a thousand kills take a minute. KIND is ``download`` or
``repair`` (``ZOO_HOME``, ``HF_ENDPOINT`` and the folder ``CARDS`` are set, the model is body.v1),
or ``save`` (writes in the current folder). At least COUNT processes are killed, and more, up to
twenty times as many, until a tenth of COUNT was hit at work, before the new state stood, and after
it: how long a write takes is the machine's affair.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from zoo import cache, cards, files, tensorfile
from zoo.errors import WeightsError
from zoo.pull import pull
from zoo.weights import locate, weights_of


def kill_at_random(work: Callable[[], object], most: float, chance: random.Random) -> bool:
    """Run the work in a process and kill it after at most so many seconds; True if it was done."""
    worker = os.fork()
    if worker == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    time.sleep(chance.uniform(0, most))
    os.kill(worker, signal.SIGKILL)
    _, ended = os.waitpid(worker, 0)
    assert ended in (0, signal.SIGKILL), f"the worker failed by itself: {ended}"
    return ended == 0


def duration(work: Callable[[], object], reset: Callable[[], object]) -> float:
    """Seconds that the work usually takes in a process of its own."""
    times = []
    for _ in range(7):
        reset()
        began = time.monotonic()
        worker = os.fork()
        if worker == 0:
            work()
            os._exit(0)
        os.waitpid(worker, 0)
        times.append(time.monotonic() - began)
    reset()
    return statistics.median(times)


def enough(count: int, seen: Counter[str], at_work: str) -> Iterator[int]:
    """Numbers of the kills to come."""
    for kill in range(20 * count):
        hits = min(seen[at_work], seen["old state"], seen["new state"])
        if kill >= count and hits >= count // 10:
            return
        seen["kills"] = kill + 1
        yield kill


def fetch(count: int, chance: random.Random, *, repair: bool) -> Counter[str]:
    """Kills during downloads into an empty cache, or over a damaged file of it."""
    card = cards.card("body.v1")
    file = weights_of(card).files[0]
    blob, other = cache.blob(str(file.sha256)), cache.blob("0" * 64)
    other.parent.mkdir(parents=True)
    other.write_bytes(b"another file of the cache")

    def work() -> None:
        pull("body.v1", verify="always", progress=False)

    def reset() -> None:
        if not repair:
            blob.unlink(missing_ok=True)
            return
        data = bytearray(blob.read_bytes())
        place = chance.randrange(len(data))
        data[place] ^= 1 << chance.randrange(8)
        blob.chmod(0o644)
        blob.write_bytes(data)

    work()
    most = 1.3 * duration(work, reset)
    seen: Counter[str] = Counter(most_ms=int(1000 * most))
    broken = blob.read_bytes() if repair else None
    for _ in enough(count, seen, "killed while it downloaded"):
        seen["done before the kill"] += kill_at_random(work, most, chance)
        left = [path for name in ("tmp", "locks") for path in (files.home() / name).iterdir()]
        parts = [path for path in left if path.suffix == ".part"]
        seen["killed while it downloaded"] += bool(parts)
        seen["most leftovers"] = max(seen["most leftovers"], len(parts))
        assert other.read_bytes() == b"another file of the cache"
        try:
            locate(card, file, verify="always")
        except WeightsError:
            seen["old state"] += 1
            assert (blob.read_bytes() if blob.exists() else None) == broken, "a third state"
        else:
            seen["new state"] += 1
            reset()
            broken = blob.read_bytes() if repair else None
    work()
    locate(card, file, verify="always")
    left = [path for name in ("tmp", "locks") for path in (files.home() / name).iterdir()]
    seen["left after the next start"] = len(left)
    return seen


def save(count: int, chance: random.Random) -> Counter[str]:
    """Kills while a file of tensors is replaced by the next one."""
    import torch

    path = Path("weights.safetensors")

    def work() -> None:
        write(current + 1)

    def write(version: int) -> None:
        tensors = {f"layer{i}.weight": torch.full((256, 256), float(version)) for i in range(16)}
        tensorfile.write(path, tensors, {"version": str(version)})

    def read() -> int:
        with path.open("rb") as file:
            header = tensorfile.read_header(file, path.name)
            tensors = tensorfile.read_tensors(file, header)
        version = int(header.metadata["version"])
        assert len(tensors) == 16
        assert all(bool((tensor == version).all()) for tensor in tensors.values())
        return version

    torch.set_num_threads(1)
    current = 0
    write(0)
    most = 1.3 * duration(work, lambda: write(0))
    seen: Counter[str] = Counter(most_ms=int(1000 * most))
    for _ in enough(count, seen, "killed while it wrote"):
        done = kill_at_random(work, most, chance)
        seen["done before the kill"] += done
        left = len(os.listdir()) - 1
        seen["killed while it wrote"] += left > 0
        seen["most leftovers"] = max(seen["most leftovers"], left)
        found = read()
        assert found == current + 1 or (found == current and not done), "an older or another state"
        seen["new state" if found > current else "old state"] += 1
        current = found
    work()
    seen["left after the next start"] = len(os.listdir()) - 1
    return seen


def main() -> None:
    """Print the counts."""
    kind, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "save":
        print(json.dumps(save(count, random.Random(seed))))
        return
    cards.CARDS = Path(os.environ["CARDS"])
    print(json.dumps(fetch(count, random.Random(seed), repair=kind == "repair")))


main()
