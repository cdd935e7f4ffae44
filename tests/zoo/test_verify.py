"""`zoo verify` reads everything, names what is damaged, and repairs what the cache has of it."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

import zoo
from zoo import cache, cards
from zoo import verify as module
from zoo.errors import UnknownModelError
from zoo.pull import pull
from zoo.verify import verify

from .conftest import House

MAIN = "model.safetensors"


def flip(path: Path) -> None:
    stat = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def states(report: module.Report) -> list[str]:
    return [file.state for file in report.files]


def test_sound_files_are_said_to_be_so(house: House) -> None:
    assert verify().files == ()
    paths = pull("tiny.v1")
    report = verify()
    assert states(report) == ["ok", "ok"]
    assert [file.path for file in report.files] == paths
    assert {file.owner for file in report.files} == {"tiny.v1"}
    assert "2 files, 89.4 kB hashed" in str(report)
    assert "0 repaired, 0 damaged" in str(report)
    assert states(verify("tiny")) == states(verify("tiny.v1")) == ["ok", "ok"]
    with pytest.raises(UnknownModelError):
        verify("tiny.v2")


def test_a_damaged_file_of_the_cache_is_fetched_again(house: House) -> None:
    path, _ = pull("tiny.v1")
    flip(path)
    house.server.seen.clear()
    report = verify("tiny")
    assert states(report) == ["repaired", "ok"]
    assert "has sha256" in report.files[0].note
    assert report.files[0].note.endswith("; fetched again")
    assert path.read_bytes() == house.server.files[MAIN]
    assert len(house.server.bodies()) == 1
    assert states(verify("tiny")) == ["ok", "ok"]


def test_a_damaged_file_is_copied_from_where_it_lies_too(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = pull("tiny.v1")
    flip(path)
    (tmp_path / "mine").mkdir()
    own = tmp_path / "mine" / "tiny.v1.safetensors"
    own.write_bytes(house.server.files[MAIN])
    monkeypatch.setenv("ZOO_WEIGHTS", str(own.parent))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    report = verify("tiny")
    assert sorted(states(report)) == ["ok", "ok", "repaired"]
    assert path.read_bytes() == house.server.files[MAIN]
    flip(own)
    report = verify("tiny")
    assert [file.path for file in report.damaged] == [own]
    assert report.damaged[0].note.endswith("replace it")


def test_without_a_source_the_damage_stays_and_is_named(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = pull("tiny.v1")
    flip(path)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    report = verify()
    assert [file.path for file in report.damaged] == [path]
    assert "1 damaged" in str(report)
    monkeypatch.delenv("ZOO_OFFLINE")
    house.server.faults[MAIN].append("*404")
    house.server.faults[f"web/{MAIN}"].append("*404")
    assert "HTTP 404" in verify().damaged[0].note


def test_a_converted_package_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    zoo.load("efficientnet_lite0", pretrained=True)
    card = cards.card("efficientnet_lite0.imagenet1k")
    path = cache.blob(str(card.weights["imagenet1k"].files[0].sha256))
    flip(path)
    report = verify("efficientnet_lite0")
    assert sorted(states(report)) == ["ok", "repaired"]
    assert "made again from package" in report.files[-1].note
    assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    flip(path)
    loaded = zoo.load("efficientnet_lite0", pretrained=True, verify="always")
    assert "made again from package" in loaded.load_report.notes[0]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def test_files_that_no_card_names_are_read_too(house: House, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"of an older card")
    path = cache.copy(tmp_path / "old", hashlib.sha256(b"of an older card").hexdigest())
    assert [(file.owner, file.state) for file in verify().files] == [("no card", "ok")]
    flip(path)
    [file] = verify().damaged
    assert file.note.endswith("delete it")
    assert verify("tiny").files == ()


def test_a_card_that_cannot_be_read_hides_no_other(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    pull("tiny.v1")
    (house.cards / "broken.toml").write_text("[")
    assert states(verify()) == ["ok", "ok"]
    assert "broken" in caplog.text


def test_leftovers_are_removed(house: House) -> None:
    pull("tiny.v1")
    (house.home / "tmp" / f"{'0' * 64}..part").write_bytes(b"")
    verify()
    assert not house.left()


@pytest.mark.prove
def test_hashing_takes_a_second_a_gigabyte_at_most(tmp_path: Path) -> None:
    """From memory, several files at a time; hashing itself is what is measured."""
    size = 64 << 20
    todo = []
    for index in range(4):
        path = tmp_path / str(index)
        data = os.urandom(1 << 20) * (size >> 20)
        path.write_bytes(data)
        todo.append(module.Place(path, "here", hashlib.sha256(data).hexdigest(), size))
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        faults = module._hash_all(todo, progress=False)
        rates.append(4 * size / (time.perf_counter() - began))
        assert set(faults.values()) == {""}
    assert max(rates) >= 1e9, f"{max(rates) / 1e9:.2f} GB/s"
