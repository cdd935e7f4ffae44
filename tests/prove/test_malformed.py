"""Hundreds of malformed weights files and 10,000 mutations of a good one: read right, or refused.

Each takes under a second and 64 MiB, and a refusal is one line that names the file.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as oracle
from torch import Tensor

import zoo
from zoo import convert, registry, weights
from zoo.errors import WeightsError

pytestmark = pytest.mark.prove

SECONDS, MEBIBYTES = 1, 64
MUTATIONS = 10_000
KINDS = ("flip", "flip", "other", "json", "insert", "delete", "cut", "copy", "swap", "zero")


def module_of(name: str) -> Any:
    """The module of the ordinary tests, which has the malformed files."""
    path = Path(__file__).parents[1] / "zoo" / f"{name}.py"
    spec = spec_from_file_location(f"ordinary_{name}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ordinary = module_of("test_tensorfile")
INDEXES = module_of("test_convert")


def status(field: str) -> float:
    """MiB of this process, now or at the most since `within_limits` began."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", text)[1]) / 1024


@contextmanager
def within_limits(what: object) -> Iterator[None]:
    """The block ends, and takes no more time and memory than promised."""

    def hangs(*_: object) -> None:
        raise TimeoutError(f"{what} hangs")

    signal.signal(signal.SIGALRM, hangs)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = status("VmRSS"), time.process_time()
    signal.alarm(60)  # others may use the machine; the limit counts our own time
    try:
        yield
    finally:
        signal.alarm(0)
    assert time.process_time() - start < SECONDS, what
    assert status("VmHWM") - before < MEBIBYTES, what


def opened(path: Path) -> dict[str, Tensor]:
    return weights.open_path(path).tensors()


def refused(path: Path, read: Callable[[Path], object]) -> str:
    with pytest.raises(WeightsError) as raised:
        read(path)
    line = raised.value.line
    assert path.name in line
    assert len(line) <= 200
    assert line.isprintable()
    return line


def test_the_limits_are_measured() -> None:
    with pytest.raises(AssertionError, match="memory"), within_limits("memory"):
        assert len(bytearray(b"x" * (80 << 20)))
    with pytest.raises(AssertionError, match="time"), within_limits("time"):
        assert sum(number for _ in range(10) for number in range(10_000_000)) > 0


def test_every_malformed_file_is_refused_within_the_limits(tmp_path: Path) -> None:
    opened_once = tmp_path / "model.safetensors"
    opened_once.write_bytes(ordinary.GOOD)
    opened(opened_once)
    count: Counter[str] = Counter()
    for family, files in ordinary.FAMILIES.items():
        for number, (data, words) in enumerate(files):
            path = tmp_path / "model.safetensors"
            path.write_bytes(data)
            with within_limits(f"{family}, file {number}"):
                line = refused(path, opened)
            assert words in line
            count[family] += 1
            path.unlink()
    for kind, (value, words) in INDEXES.WRONG_INDEXES.items():
        index = INDEXES.shards(tmp_path)
        index.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        with within_limits(f"index, {kind}"):
            line = refused(index, convert.read_foreign)
        assert words in line
        count["index of shards"] += 1
    assert len(count) >= 12
    assert count.total() >= 200
    print(dict(count), count.total())


def mutated(original: bytes, header_end: int, chance: random.Random) -> bytes:
    """The file with one to eight small changes, in its header mostly."""
    data = bytearray(original)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        at = chance.randrange(min(header_end, len(data)) if chance.random() < 0.6 else len(data))
        kind = chance.choice(KINDS)
        if kind == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif kind == "other":
            data[at] = chance.randrange(256)
        elif kind == "json":
            data[at] = chance.choice(b'{}[]",:\\ 0123456789aFe-.')
        elif kind == "insert":
            data[at:at] = chance.randbytes(chance.choice((1, 1, 8)))
        elif kind == "delete":
            del data[at : at + chance.choice((1, 1, 8))]
        elif kind == "cut" and chance.random() < 0.2:
            del data[at:]
        elif kind == "copy":
            data[at:at] = data[at : at + chance.choice((1, 8, 64))]
        elif kind == "swap":
            other = chance.randrange(len(data))
            data[at], data[other] = data[other], data[at]
        elif kind == "zero":
            data[at : at + 4] = bytes(len(data[at : at + 4]))
        if not data:
            break
    return bytes(data)


def test_ten_thousand_mutations_are_refused_or_read_to_the_bit(tmp_path: Path) -> None:
    """Without a card, what loads is what the bytes say; with one, only the original loads."""
    config = {"num_layers": 1, "embed_dim": 4, "num_heads": 1, "mlp_dim": 4, "vocab_size": 6}
    folder = zoo.save(zoo.load("bert-base-uncased", max_length=4, **config), tmp_path / "saved")
    card = registry.saved_card(folder)
    path = folder / card.weights[card.tag].files[0].name
    original = path.read_bytes()
    header_end = 8 + int.from_bytes(original[:8], "little")
    chance = random.Random(20)
    outcomes: Counter[str] = Counter()
    for number in range(MUTATIONS):
        while (data := mutated(original, header_end, chance)) == original:
            pass
        path.write_bytes(data)
        with within_limits(f"mutation {number}"):
            found, line = ordinary.read_or_reason(path)
        if line:
            assert line.startswith(f"{path.name} ")
            assert len(line) <= 200
            outcomes["refused without a card"] += 1
        else:
            ordinary.assert_same(found, oracle.load(data))
            outcomes["read as the bytes say"] += 1
        with within_limits(f"mutation {number} on a card"):
            refused(path, lambda _: weights.open_weights(card, verify="always"))
        path.unlink()
    path.write_bytes(original)
    found = weights.open_weights(card, verify="always").tensors()
    ordinary.assert_same(found, oracle.load(original))
    assert outcomes["refused without a card"] > MUTATIONS / 4
    assert outcomes["read as the bytes say"] > MUTATIONS / 20
    print(dict(outcomes))
