"""The cache: blobs appear whole, downloads are nobody else's, leftovers go, living work stays."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from zoo import cache, cards, files
from zoo.cards import File
from zoo.errors import CacheError, WeightsError

DATA = b"weights" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()
TAG = '"an-etag"'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def everything(home: Path) -> list[str]:
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file())


def ended_process() -> int:
    """Number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    return child.pid


def as_another(path: Path, process: int | None = None, host: str | None = None) -> Path:
    """Rename a temporary file as if another process had made it."""
    own_host, own_process, rest = files.temporary_name().split("-")[1:]
    name = path.name.replace(f"-{own_process}-", f"-{process or own_process}-")
    name = name.replace(f"tmp-{own_host}-", f"tmp-{host or own_host}-")
    assert rest
    return path.rename(path.with_name(name))


def part(key: str, data: bytes, etag: str | None = TAG) -> Path:
    """A download under way, by this process."""
    partial = cache.Partial(key)
    partial.begin(etag)
    partial.write(data)
    return partial.close()


def age(path: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


def test_a_download_becomes_a_blob_that_is_read_only(home: Path) -> None:
    with cache.Partial(SHA256) as partial:
        partial.begin(TAG)
        partial.write(DATA[:100])
        assert not cache.blob(SHA256).exists()
        partial.write(DATA[100:])
        assert partial.digest() == SHA256
        path = partial.publish(SHA256)
    assert path == cache.blob(SHA256) == home / "blobs" / SHA256[:2] / SHA256
    assert path.read_bytes() == DATA
    assert path.stat().st_mode & 0o777 == 0o444
    assert everything(home) == [f"blobs/{SHA256[:2]}/{SHA256}"]
    assert cache.blobs() == [path]


def test_a_blob_that_is_published_again_is_replaced_and_never_written(home: Path) -> None:
    (home.parent / "source").write_bytes(DATA)
    with cache.copy(home.parent / "source", SHA256).open("rb") as reader:
        inode = os.fstat(reader.fileno()).st_ino
        cache.copy(home.parent / "source", SHA256)
        assert cache.blob(SHA256).stat().st_ino != inode
        assert reader.read() == DATA


def test_a_copy_of_other_bytes_is_refused(home: Path) -> None:
    (home.parent / "source").write_bytes(DATA[1:])
    with pytest.raises(WeightsError, match="source changed while it was copied"):
        cache.copy(home.parent / "source", SHA256)
    assert everything(home) == []


@pytest.mark.parametrize("end", [ValueError, CacheError, KeyboardInterrupt])
@pytest.mark.parametrize("etag", [TAG, None, 'W/"weak"', '"' + "x" * 200 + '"'])
def test_only_what_can_be_resumed_is_kept_when_the_user_interrupts(
    home: Path, end: type[BaseException], etag: str | None
) -> None:
    def download() -> None:
        with cache.Partial(SHA256) as partial:
            partial.begin(etag)
            partial.write(DATA[:100])
            raise end("end")

    with pytest.raises(end):
        download()
    kept = end is KeyboardInterrupt and etag == TAG
    assert len(everything(home)) == kept


def test_what_was_broken_off_goes_on_with_its_bytes_and_its_etag(home: Path) -> None:
    with cache.Partial(SHA256) as partial:
        partial.begin(TAG)
        partial.write(DATA[:3000])
        partial.keep()
    assert len(everything(home)) == 1
    with cache.Partial(SHA256) as partial:
        partial.resume()
        assert (partial.size, partial.etag) == (3000, TAG)
        partial.write(DATA[3000:])
        assert partial.digest() == SHA256
        partial.publish(SHA256)
    assert everything(home) == [f"blobs/{SHA256[:2]}/{SHA256}"]


def test_the_longest_of_the_dead_is_taken_and_the_living_are_left_alone(home: Path) -> None:
    dead = ended_process()
    for length in (10, 3000, 20):
        as_another(part(SHA256, DATA[:length]), dead)
    as_another(part(SHA256, DATA[:5000], etag=None), dead)  # of which nobody knows the version
    living = part(SHA256, DATA[:4000])
    elsewhere = as_another(part(SHA256, DATA[:4500]), host="01234567")
    other = as_another(part("f" * 64, DATA[:9]), dead)
    with cache.Partial(SHA256) as partial:
        partial.resume()
        assert (partial.size, partial.etag) == (3000, TAG)
        assert partial.path is not None
        expected = {partial.path, living, elsewhere, other}
        assert {home / name for name in everything(home)} == expected
        assert living.read_bytes() == DATA[:4000]
    with cache.Partial("0" * 64) as partial:
        partial.resume()
        assert partial.size == 0


def test_a_download_whose_file_vanishes_is_an_error_and_no_blob(home: Path) -> None:
    with cache.Partial(SHA256) as partial:
        partial.begin(TAG)
        partial.write(DATA)
        [name] = everything(home)
        (home / name).unlink()
        with pytest.raises(CacheError, match="No such file"):
            partial.publish(SHA256)
    assert everything(home) == []


def test_the_sweep_takes_what_the_dead_left_and_nothing_of_the_living(home: Path) -> None:
    dead = ended_process()
    stays = [part("a" * 64, DATA), as_another(part("b" * 64, DATA), host="01234567")]
    resumable = as_another(part("c" * 64, DATA), dead)
    as_another(part("d" * 64, b""), dead)
    as_another(part("e" * 64, DATA, etag=None), dead)
    as_another(part(SHA256, DATA), dead)
    age(stays[1], 23)
    (home.parent / "source").write_bytes(DATA)
    stays.append(cache.copy(home.parent / "source", SHA256))  # newer than its broken-off download
    age(as_another(part("1" * 64, DATA), dead), 25)
    age(as_another(part("2" * 64, DATA), host="01234567"), 25)
    with cache.folder() as folder:
        (folder / "x").write_bytes(b"")
        as_another(folder, dead)
    (home / "records").mkdir()
    for name in (files.temporary_name(), "record.json"):
        (home / "records" / name).write_bytes(b"")
    stays += list((home / "records").iterdir())
    (home / "records" / files.temporary_name()).write_bytes(b"")
    as_another(next(p for p in (home / "records").iterdir() if p not in stays), dead)
    (home / "locks").mkdir()
    (home / "locks" / "left").write_bytes(b"")
    with cache.locked("held", until=lambda: False, say=print):
        cache.sweep()
        expected = {*stays, resumable, home / "locks" / "held"}
        assert {home / name for name in everything(home)} == expected


def test_the_sweep_of_a_cache_that_is_not_there_makes_none(home: Path) -> None:
    cache.sweep()
    assert not home.exists()


def test_one_at_a_time_holds_a_lock_and_none_is_left(home: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most
        with cache.locked("key", until=lambda: False, say=print):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.002)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))
    assert most == 1
    assert everything(home) == []


def test_whoever_waits_is_let_in_once_the_work_is_done(home: Path) -> None:
    with (
        cache.locked("key", until=lambda: False, say=print),
        cache.locked("key", until=lambda: True, say=print),
    ):
        assert everything(home) == ["locks/key"]
    assert everything(home) == []


def test_whoever_waits_for_one_that_stands_still_gives_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "PATIENCE_S", 0.2)
    monkeypatch.setattr(cache, "NOTICE_S", 0.1)
    said: list[str] = []
    growing = part("key", b"")
    stops = time.monotonic() + 0.5

    def grow() -> bool:
        if time.monotonic() < stops:
            growing.write_bytes(growing.read_bytes() + b"x")
        return False

    with (
        cache.locked("key", until=lambda: False, say=print),
        cache.locked("key", until=grow, say=said.append),
    ):
        assert time.monotonic() > stops + 0.1  # as long as the download grew, it waited
    assert said[0].startswith("waiting for another process")
    assert said[-1].startswith("the process that fetches it has stopped")
    assert everything(home) == [str(growing.relative_to(home))]


def test_an_error_inside_frees_the_lock(home: Path) -> None:
    with pytest.raises(KeyError), cache.locked("key", until=lambda: False, say=print):
        raise KeyError
    assert everything(home) == []


def test_two_cards_share_a_download_only_where_the_whole_hash_is_known() -> None:
    card = replace(cards.card("resnet50.imagenet1k_v2"), name="resnet50")
    other = replace(card, name="theirs/resnet50")
    short = File(name="a.safetensors", upstream="a.pth", upstream_sha256=SHA256[:8])
    assert cache.key(card, short) != cache.key(other, short)
    assert cache.key(card, short) == cache.key(card, short)
    for whole in (
        File(name="a.safetensors", sha256=SHA256),
        File(name="a.safetensors", sha256="0" * 64, upstream="a.pth", upstream_sha256=SHA256),
    ):
        assert cache.key(card, whole) == cache.key(other, whole) == SHA256


def test_a_converted_file_of_another_hash_than_the_card_says_is_refused(home: Path) -> None:
    card = cards.card("resnet50.imagenet1k_v2")
    file = File(name="a.safetensors", sha256="0" * 64, upstream="a.pth", upstream_sha256="1" * 64)
    with cache.folder() as folder, pytest.raises(WeightsError, match=r"a\.pth was converted to"):
        cache.publish_converted(card, file, folder / "x", cache.Kept(sha256=SHA256, size=9))
    assert everything(home) == []


def test_the_room_on_the_disk_is_asked_for(home: Path) -> None:
    cache.make_room(1 << 60)  # there is no cache yet: unknown
    home.joinpath("tmp").mkdir(parents=True)
    cache.make_room(1)
    with pytest.raises(CacheError, match=r"bytes free, and 1,152,921.* more are"):
        cache.make_room(1 << 60)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(files, "home", nobody)
    for call in (cache.sweep, cache.blobs, lambda: cache.blob(SHA256)):
        with pytest.raises(CacheError, match="ZOO_HOME"):
            call()
