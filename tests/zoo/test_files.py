"""Files are written whole or not at all, and a record vouches only for the file that was hashed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from zoo import files
from zoo.errors import WeightsError

ROOT = Path(__file__).resolve().parents[2]
FAULTS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EINVAL]
OLD, NEW = b"old" * 1000, b"new" * 2000


class FaultyOS:
    """The module `os`, whose n-th call of those that touch a disk fails, or that writes in bits."""

    DISK = ("open", "write", "fsync", "close", "replace", "unlink")

    def __init__(self, fails_at: int = -1, error: int = 0, bit: int | None = None) -> None:
        self.fails_at, self.error, self.bit = fails_at, error, bit
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.DISK:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            fails = len(self.calls) - 1 == self.fails_at
            if fails and name != "close":  # a failed close has closed all the same
                raise OSError(self.error, os.strerror(self.error))
            if name == "write" and self.bit:
                arguments = (arguments[0], arguments[1][: self.bit])
            result = real(*arguments, **options)
            if fails:
                raise OSError(self.error, os.strerror(self.error))
            return result

        return call


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, OLD)
    assert path.read_bytes() == OLD
    files.write_atomically(path, (bytes([i]) * i for i in range(200)))
    assert path.read_bytes() == b"".join(bytes([i]) * i for i in range(200))
    files.write_atomically(path, [memoryview(NEW), b"", memoryview(b"")])
    assert path.read_bytes() == NEW
    assert os.listdir(tmp_path) == ["file"]


def test_writes_that_take_a_part_only_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "os", FaultyOS(bit=7))
    files.write_atomically(tmp_path / "file", [OLD, NEW])
    assert (tmp_path / "file").read_bytes() == OLD + NEW


def disk_calls(path: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", spy := FaultyOS())
        files.write_atomically(path, [NEW[:999], NEW[999:]])
    return spy.calls


@pytest.mark.parametrize("error", FAULTS, ids=errno.errorcode.get)
def test_whichever_call_fails_the_file_is_the_old_or_the_new_one_and_nothing_else_stays(
    tmp_path: Path, error: int
) -> None:
    path = tmp_path / "file"
    calls = disk_calls(path)
    assert calls.count("fsync") == 2
    assert {"open", "write", "replace", "close"} < set(calls)
    renamed = calls.index("replace")
    for place, call in enumerate(calls):
        path.write_bytes(OLD)
        tolerated = error == errno.EINVAL and call == "fsync" and place > renamed
        told = pytest.raises(OSError, match=f"{os.strerror(error)} while writing: '{path}'")
        with pytest.MonkeyPatch.context() as patch, nullcontext() if tolerated else told:
            patch.setattr(files, "os", FaultyOS(place, error))
            files.write_atomically(path, [NEW[:999], NEW[999:]])
        assert path.read_bytes() == (NEW if place > renamed else OLD), f"{call}, call {place}"
        assert os.listdir(tmp_path) == ["file"], f"{call}, call {place}"


def test_the_error_that_is_shown_is_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoUnlink(FaultyOS):
        def unlink(self, path: Path) -> None:
            raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(files, "os", NoUnlink(1, errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device while writing"):
        files.write_atomically(tmp_path / "file", NEW)


def test_an_error_of_the_source_of_the_bytes_is_passed_on(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield NEW
        raise ConnectionResetError("the other side went away")

    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(ConnectionResetError, match=r"^the other side went away$"):
        files.write_atomically(path, chunks())
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_missing_or_in_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        files.write_atomically(tmp_path / "nowhere" / "file", NEW)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        files.write_atomically(tmp_path / "folder", NEW)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(OLD)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    files.write_atomically(tmp_path / "link", NEW)
    assert (tmp_path / "target").read_bytes() == OLD
    assert (tmp_path / "link").read_bytes() == NEW
    assert not (tmp_path / "link").is_symlink()


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    size = 1 << 20
    path.write_bytes(b"\0" * size)
    code = """
import itertools, sys
from pathlib import Path
from zoo.files import write_atomically
for i in itertools.count(int(sys.argv[2])):
    write_atomically(Path(sys.argv[1]), (bytes([i % 256]) * 65536 for _ in range(16)))
    print("one is written", flush=True)
"""
    chance = random.Random(0)
    seen, cut = set(), 0
    for start in range(1, 37):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(start)], cwd=ROOT, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(chance.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
        data = path.read_bytes()
        assert data == data[:1] * size
        seen.add(data[0])
        left = len(os.listdir(tmp_path)) - 1
        cut += left
        assert left <= 1, "the next writer removes what the killed one left"
    assert len(seen) > 12, "the writers never got to write"
    assert cut > 0, "no writer was killed while it wrote"
    files.write_atomically(path, NEW)
    assert os.listdir(tmp_path) == ["file"]


def test_a_hash_is_that_of_the_whole_file_wherever_it_was_read_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(NEW * 100)
    expected = hashlib.sha256(NEW * 100).hexdigest()
    assert files.sha256_of(path) == expected
    with path.open("rb") as file:
        file.read(77)
        assert files.sha256_of(file) == expected


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"ZOO_HOME": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ("linux", {"ZOO_HOME": "~/b"}, "/user/b"),
        ("linux", {"ZOO_HOME": "", "XDG_CACHE_HOME": "/c"}, "/c/zoo"),
        ("linux", {}, "/user/.cache/zoo"),
        ("darwin", {"XDG_CACHE_HOME": "/c"}, "/user/Library/Caches/zoo"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/zoo"),
    ],
)
def test_home_is_where_the_user_or_the_system_says(
    platform: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ZOO_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/user", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert files.home() == Path(expected)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file last changed an hour ago, and a home of its own."""
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    path = tmp_path / "weights"
    path.write_bytes(OLD)
    age(path)
    return path


def age(path: Path, seconds: float = 3600) -> None:
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def remember(path: Path) -> str:
    stat, began_ns = path.stat(), time.time_ns()
    sha256 = files.sha256_of(path)
    files.remember(path, stat, sha256, began_ns=began_ns)
    return sha256


def test_a_file_that_was_hashed_is_remembered_under_any_spelling_of_its_path(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = files.sha256_of(weights)
    assert not files.verified(weights, weights.stat(), sha256)
    remember(weights)
    assert files.verified(weights, weights.stat(), sha256)
    monkeypatch.chdir(weights.parent)
    assert files.verified(Path(weights.name), weights.stat(), sha256)
    assert not files.verified(weights, weights.stat(), sha256[::-1])
    assert not files.verified(weights.with_name("other"), weights.stat(), sha256)


def grown(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(OLD + b"!")
    os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))


def later(path: Path) -> None:
    os.utime(path, ns=(path.stat().st_mtime_ns + 1,) * 2)


def another_file(path: Path) -> None:
    stat = path.stat()
    path.rename(path.with_name("moved"))
    path.write_bytes(OLD)
    os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))


def time_set_back(path: Path) -> None:
    stat = path.stat()
    path.write_bytes(OLD[::-1])
    os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns


@pytest.mark.parametrize("change", [grown, later, another_file, time_set_back])
def test_any_change_voids_the_record(change: Any, weights: Path) -> None:
    sha256 = remember(weights)
    assert files.verified(weights, weights.stat(), sha256)
    change(weights)
    assert not files.verified(weights, weights.stat(), sha256)


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode", "sha256"])
def test_every_field_of_a_record_counts(field: str, weights: Path) -> None:
    sha256 = remember(weights)
    [path] = (files.home() / "records").iterdir()
    record = json.loads(path.read_bytes())
    record[field] = "0" * 64 if field == "sha256" else record[field] + 1
    path.write_text(json.dumps(record))
    assert not files.verified(weights, weights.stat(), sha256)
    del record[field]
    path.write_text(json.dumps(record))
    assert not files.verified(weights, weights.stat(), sha256)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", "[" * 100_000, "\xff", '{"size": []}']
)
def test_a_record_that_is_no_record_vouches_for_nothing(text: str, weights: Path) -> None:
    sha256 = remember(weights)
    [path] = (files.home() / "records").iterdir()
    path.write_bytes(text.encode("latin-1"))
    assert not files.verified(weights, weights.stat(), sha256)


def test_a_file_changed_a_moment_ago_is_not_remembered(weights: Path) -> None:
    """Its next change may fall into the same tick of the clock and leave the same time stamp."""
    age(weights, seconds=1)
    assert not files.verified(weights, weights.stat(), remember(weights))
    age(weights, seconds=-60)  # a clock that is ahead
    assert not files.verified(weights, weights.stat(), remember(weights))
    age(weights, seconds=3)
    assert files.verified(weights, weights.stat(), remember(weights))


def test_a_file_changed_while_it_was_hashed_is_not_remembered(weights: Path) -> None:
    stat, began_ns = weights.stat(), time.time_ns()
    sha256 = files.sha256_of(weights)
    weights.write_bytes(OLD[::-1])
    files.remember(weights, stat, sha256, began_ns=began_ns)
    assert not files.verified(weights, weights.stat(), sha256)


def test_a_home_that_cannot_be_written_is_no_error(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_HOME", str(weights / "inside-a-file"))
    assert not files.verified(weights, weights.stat(), remember(weights))

    def nobody(path: Path) -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert not files.verified(weights, weights.stat(), remember(weights))


@pytest.mark.parametrize("error", FAULTS, ids=errno.errorcode.get)
def test_a_record_that_cannot_be_written_is_no_error(
    error: int, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", FaultyOS(place, error))
            remember(weights)
        left = list((files.home() / "records").iterdir())
        assert not [path for path in left if path.name.startswith(".tmp")]


@pytest.mark.prove
def test_a_record_is_checked_in_under_a_millisecond(weights: Path) -> None:
    sha256, stat = remember(weights), weights.stat()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        assert files.verified(weights, stat, sha256)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


def test_what_cannot_be_opened_is_an_error_with_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with files.open_file(tmp_path / "pipe") as pipe:  # does not wait for a writer
        assert not pipe.read()
    with pytest.raises(WeightsError, match=r"none\.safetensors cannot be opened: No such file"):
        files.open_file(tmp_path / "none.safetensors")
    with pytest.raises(WeightsError, match="cannot be opened: Is a directory"):
        files.open_file(tmp_path)
