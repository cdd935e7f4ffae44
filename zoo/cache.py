"""The cache in ``ZOO_HOME``: files by their hash, and downloads on their way to become such.

``blobs/ab/abcd…``                     a file by its SHA-256, read-only and never changed in place
``refs/MODEL.TAG/FILE.json``           hash of a converted file that its card cannot name
``tmp/KEY.ETAG.tmp-HOST-PID-X.part``   a download under way
``tmp/KEY.ETAG.part``                  one that was broken off, to be resumed
``locks/KEY``                          held by the process that fetches; the others wait for it

There are no symbolic links. A blob appears by one rename of a complete, verified and flushed file,
so nothing that is right depends on the locks: where those do nothing, a file is at worst fetched
several times.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from zoo import files
from zoo.cards import Card, File
from zoo.config import build
from zoo.errors import CacheError, WeightsError

try:
    import fcntl
except ImportError:  # Windows: no locks, so at worst several downloads
    fcntl = None  # type: ignore[assignment]

PICKLED = (".pth", ".pt", ".bin")
POLL_S = 0.05
NOTICE_S = 10.0  # between two lines about waiting
PATIENCE_S = 120.0  # for a process that holds a lock and has stopped to make progress


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the cache keeps of one file of a card; a file under ``refs`` holds the same."""

    sha256: str
    size: int | None
    upstream_sha256: str | None = None  # of the pickled file that it was converted from


def blob(sha256: str) -> Path:
    """Where the cache keeps the file with this hash."""
    return _home() / "blobs" / sha256[:2] / sha256


def blobs() -> list[Path]:
    """Everything that the cache keeps, named by its hash."""
    return [path for parent in _listed(_home() / "blobs") for path in _listed(parent)]


def is_converted(file: File) -> bool:
    """True where the sources have a pickle, of which the zoo keeps the tensors."""
    return (file.upstream or "").endswith(PICKLED)


def kept(card: Card, file: File) -> Kept | None:
    """Hash and size of a file, as the card or else an earlier conversion states them."""
    if file.sha256:
        return Kept(sha256=file.sha256, size=file.size, upstream_sha256=file.upstream_sha256)
    if not is_converted(file):
        return None
    try:
        table = json.loads(_ref(card, file).read_bytes())
        found = build(Kept, table, where="the reference", error=WeightsError)
    except (OSError, ValueError, TypeError, RuntimeError):  # none, or none of ours
        return None
    pinned = file.upstream_sha256 or ""
    fits = len(found.sha256) == 64 and (found.upstream_sha256 or "").startswith(pinned)
    return found if fits and pinned else None  # else it is of an older card


def publish(temporary: Path, sha256: str) -> Path:
    """Make a complete file of this hash a blob; one that is there already is replaced.

    Raises:
        CacheError: The cache cannot be written; what was there before is untouched.
    """
    path = blob(sha256)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.chmod(temporary, 0o444)
        files.rename(temporary, path)
    return path


def publish_converted(card: Card, file: File, temporary: Path, found: Kept) -> Path:
    """Make a converted file a blob and, where the card does not state its hash, note that.

    Raises:
        WeightsError: The card states another hash.
        CacheError: The cache cannot be written.
    """
    if file.sha256 and file.sha256 != found.sha256:
        raise WeightsError(
            f"{file.upstream} was converted to a file with sha256 {found.sha256[:12]}…, and the "
            f"card says {file.sha256[:12]}…"
        )
    path = publish(temporary, found.sha256)
    if not file.sha256:
        reference = _ref(card, file)
        with _writing(reference):
            reference.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomically(reference, json.dumps(asdict(found)).encode())
    return path


def copy(source: Path, sha256: str) -> Path:
    """Make a blob of a file that lies elsewhere.

    Raises:
        WeightsError: It has another hash.
        CacheError: The cache cannot be written.
    """
    with Partial(sha256) as partial, source.open("rb") as file:
        partial.begin(None)
        while chunk := file.read(1 << 20):
            partial.write(chunk)
        if partial.digest() != sha256:
            raise WeightsError(f"{source.name} changed while it was copied")
        return partial.publish(sha256)


def key(card: Card, file: File) -> str:
    """Name of a file's lock and of its broken-off downloads.

    It is the hash of what is fetched, where that is known. A hash of which only some digits are
    published is no name: whoever finds other bytes with the same digits must not share it.
    """
    digits = (file.upstream_sha256 if is_converted(file) else file.sha256) or ""
    if len(digits) == 64:
        return digits
    return hashlib.sha256(f"{card.full_name} {file.name} {digits}".encode()).hexdigest()


@contextmanager
def folder() -> Iterator[Path]:
    """A folder in the cache for work in progress.

    Raises:
        CacheError: The cache cannot be written.
    """
    path = _tmp() / files.temporary_name()
    try:
        with _writing(path):
            path.mkdir(parents=True)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_room(size: int) -> None:
    """See that the disk has room for so many bytes.

    Raises:
        CacheError: It has not.
    """
    with suppress(OSError):  # unknown: then writing says so
        free = shutil.disk_usage(_tmp()).free
        if free < size:
            raise CacheError(
                f"the disk of {_home()} has {free:,} bytes free, and {size:,} more are "
                "needed; ZOO_HOME names another place"
            )


def sweep() -> None:
    """Remove what killed processes left behind, except downloads that can be resumed."""
    home = _home()
    for path in _listed(_tmp()):
        useless = not _is_resumable(path) or _is_newer(blob(path.name.partition(".")[0]), path)
        if _is_old(path) or (useless and (files.is_leftover(path) or ".tmp-" not in path.name)):
            _remove(path)
    for path in _listed(home / "locks"):
        _remove_free(path)
    for parent in (home / "records", *_listed(home / "refs"), *_listed(home / "blobs")):
        files.remove_leftovers(parent)


class Partial:
    """The bytes of one download: hashed as they come, a blob in the end, resumed if broken off.

    What an earlier process left of the same file is copied, not continued in place: no file is ever
    written by two processes, whatever a lock or a process number says.

    As a context manager it leaves no file behind if a local fault or a refusal ends the block.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.path: Path | None = None
        self.etag: str | None = None
        self.size = 0
        self._descriptor: int | None = None
        self._hash = hashlib.sha256()

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # interrupted by the user
            self.keep()
        self.discard()

    def resume(self) -> None:
        """Take over the longest broken-off download of the same file and remove all the others."""
        left = [
            path
            for path in _listed(_tmp())
            if path.name.startswith(f"{self.key}.") and path.suffix == ".part"
            if files.is_leftover(path) or ".tmp-" not in path.name
        ]
        best = max(filter(_is_resumable, left), key=_size, default=None)
        if best is not None:
            self.begin(_etag(best))
            try:
                with best.open("rb") as file:
                    while chunk := file.read(1 << 20):
                        self.write(chunk)
            except OSError:  # another process was quicker, or it cannot be read
                self.begin(None)
        for path in left:
            _remove(path)

    def begin(self, etag: str | None) -> None:
        """Start from nothing, with what the server calls this version of the file.

        Raises:
            CacheError: The cache cannot be written.
        """
        self.discard()
        name = f"{self.key}.{_encoded(etag)}{files.temporary_name()}.part"
        path = _tmp() / name
        exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, exclusive, 0o666)
        self.path, self.etag = path, etag

    def write(self, chunk: bytes) -> None:
        """Append bytes.

        Raises:
            CacheError: The cache cannot be written.
        """
        assert self._descriptor is not None
        assert self.path is not None
        rest = memoryview(chunk)
        with _writing(self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        self._hash.update(chunk)
        self.size += len(chunk)

    def digest(self) -> str:
        """SHA-256 of all bytes so far."""
        return self._hash.hexdigest()

    def publish(self, sha256: str) -> Path:
        """Make this a blob; see `publish`."""
        path = self.close()
        published = publish(path, sha256)
        self._forget()
        return published

    def close(self) -> Path:
        """Close the file, which is complete; gives its path."""
        assert self.path is not None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with _writing(self.path):
                os.close(descriptor)
        return self.path

    def move(self, path: Path) -> None:
        """Give the complete file, which has its hash, another name in the cache.

        Raises:
            CacheError: The cache cannot be written.
        """
        with _writing(path):
            os.replace(self.close(), path)
        self._forget()

    def keep(self) -> None:
        """Leave the bytes for a later try, if the server can be asked to go on after them."""
        if self.path is None or not self.size or not _encoded(self.etag):
            return
        with suppress(OSError, CacheError):
            os.replace(self.close(), _tmp() / f"{self.key}.{_encoded(self.etag)}.part")
            self._forget()

    def discard(self) -> None:
        """Remove the file; nothing is left of it."""
        if self.path is not None:
            with suppress(CacheError):
                self.close()
            _remove(self.path)
        self._forget()

    def _forget(self) -> None:
        self.path = self.etag = self._descriptor = None
        self.size, self._hash = 0, hashlib.sha256()


@contextmanager
def locked(key: str, *, until: Callable[[], bool], say: Callable[[str], None]) -> Iterator[None]:
    """Run the block while no other process runs one under this key, as far as locks work here.

    Args:
        key: Of `key`.
        until: True once another process has done the work: the block then runs without the lock,
            and is to look first.
        say: Takes a line about the waiting.
    """
    path, descriptor = _home() / "locks" / key, None
    with suppress(OSError):  # none here, or a read-only cache: go on without
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path, key, until, say)
    try:
        yield
    finally:
        if descriptor is not None:
            _remove(path)  # while it is held; who waits for it sees that and opens a new one
            with suppress(OSError):
                os.close(descriptor)


def _lock(
    path: Path, key: str, until: Callable[[], bool], say: Callable[[str], None]
) -> int | None:
    """A descriptor that holds the lock, or None if there is no use in waiting any longer."""
    began = moved = time.monotonic()
    noticed, progress = began, -1
    while fcntl is not None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):  # held, or released this very moment
            pass
        except OSError:  # there are no locks here
            os.close(descriptor)
            _remove(path)
            raise
        os.close(descriptor)
        if until():
            return None
        now = time.monotonic()
        if (grown := sum(map(_size, _parts(key)))) != progress:
            moved, progress = now, grown
        if now - moved > PATIENCE_S:
            say("the process that fetches it has stopped; fetching it without waiting any longer")
            return None
        if now - noticed >= NOTICE_S:
            say(f"waiting for another process that fetches it ({now - began:.0f} s)")
            noticed = now
        time.sleep(POLL_S)
    return None


def _remove_free(path: Path) -> None:
    """Remove a lock that no process holds."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        finally:
            os.close(descriptor)


def _parts(key: str) -> Iterable[Path]:
    return [path for path in _listed(_tmp()) if path.name.startswith(f"{key}.")]


def _ref(card: Card, file: File) -> Path:
    return _home() / "refs" / card.full_name.replace("/", "@") / f"{file.name}.json"


def _home() -> Path:
    try:
        return files.home()
    except RuntimeError as error:
        raise CacheError(
            "this user has no home folder; ZOO_HOME names one for the cache"
        ) from error


def _tmp() -> Path:
    return _home() / "tmp"


def _listed(parent: Path) -> list[Path]:
    """Entries of a folder; none if it is not there."""
    try:
        return sorted(parent.iterdir())
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_newer(path: Path, other: Path) -> bool:
    try:
        return path.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return False


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > files.ABANDONED_S
    except OSError:
        return False


def _is_resumable(path: Path) -> bool:
    return bool(path.suffix == ".part" and _etag(path) and _size(path) and not _is_old(path))


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def _encoded(etag: str | None) -> str:
    """An ETag as part of a file's name; nothing for one that does not vouch for every byte."""
    if not etag or not etag.startswith('"') or len(etag) > 80:
        return ""
    return base64.urlsafe_b64encode(etag.encode()).decode().rstrip("=")


def _etag(path: Path) -> str | None:
    """The ETag in the name of a download."""
    text = path.name.split(".")[1]
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode() or None
    except ValueError:
        return None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that says what to do."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CacheError(
            f"the cache {_home()} cannot be written: {reason}; ZOO_HOME names another",
            str(error.filename or path),
        ) from error
