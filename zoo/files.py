"""Files: written whole or not at all, hashed, remembered once hashed, named for what they are."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from zoo.errors import WeightsError, shown

# Two changes within one tick of a file system's clock look alike. FAT has the coarsest clock: 2 s.
TICK_NS = 2_000_000_000

ABANDONED_S = 24 * 3600  # a temporary file that nobody wrote to for so long has no writer any more
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{16}")

# What lies where weights were expected: the first bytes, what they are, and what to do.
_KINDS = [
    (re.compile(magic, re.DOTALL), kind)
    for magic, kind in (
        (rb"\Z", "empty; download it again"),
        (rb"version https://git-lfs", "a git-lfs pointer, not the file itself; run git lfs pull"),
        (rb"\s*<(?i:!doctype|\?xml|html)", "an HTML page, not weights; download it again"),
        (rb"PK\x03\x04.{0,400}data\.pkl", "a PyTorch zip file; use zoo convert FILE NAME"),
        (rb"PK[\x03\x05]", "a zip archive; unpack it and give the safetensors file in it"),
        (rb"\x80[\x02-\x05][^\0]", "a pickle, which may run code; use zoo convert FILE NAME"),
        (rb"\x1f\x8b\x08", "compressed by gzip; gunzip it"),
        (rb"BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf", "a compressed archive; unpack it"),
        (rb".{257}ustar", "a tar archive; unpack it and give the safetensors file in it"),
        (rb"GGUF", "a GGUF file, as llama.cpp reads; the zoo reads safetensors"),
        (rb"\x89HDF", "an HDF5 file, as Keras writes; the zoo reads safetensors"),
        (rb"\x93NUMPY", "a NumPy array; the zoo reads safetensors"),
        (rb"\x08[\x01-\x20][\x12\x1a\x22\x3a\x42]", "an ONNX model; the zoo reads safetensors"),
        (rb"\0+\Z", "filled with zeros, as after an interrupted copy; download it again"),
        (rb"\s*[{\[][^\0]", "JSON, perhaps a config or an index of shards; give the weights file"),
        (rb"[\t\r\n -~]+\Z", "a text file, not weights"),
    )
]


def write_atomically(path: Path, chunks: bytes | Iterable[bytes | memoryview]) -> None:
    """Put a file in place so that its path holds the old bytes or the new ones, whatever happens.

    The bytes go to a temporary file of the same folder, which is flushed to the disk, renamed over
    the path and made durable by a flush of the folder. Memory mapped from the old file stays valid,
    and a symbolic link is replaced, not followed. What killed writers left beside it is removed.

    Args:
        path: The file; its folder exists.
        chunks: The bytes, whole or piece by piece. What their iterator raises is passed on.

    Raises:
        OSError: What failed, with the path. The old file is untouched or, where the very last flush
            failed, the new one is complete. No temporary file stays.
    """
    remove_leftovers(path.parent)
    temporary = path.with_name(temporary_name())
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with _naming(path):
        descriptor = os.open(temporary, exclusive, 0o666)
    try:
        try:
            for chunk in [chunks] if isinstance(chunks, bytes) else chunks:
                with _naming(path):
                    _write(descriptor, chunk)
            with _naming(path):
                os.fsync(descriptor)
        finally:
            with _naming(path):
                os.close(descriptor)
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):  # renamed already, or the error on its way says more
            os.unlink(temporary)
        raise


def rename(temporary: Path, path: Path) -> None:
    """Give a complete and flushed file its place, durably; the error names the place."""
    with _naming(path), _flushed(path.parent):
        os.replace(temporary, path)


def temporary_name() -> str:
    """``.tmp-HOST-PID-RANDOM``: a name that nobody else uses and that tells who writes there."""
    return f".tmp-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def is_leftover(path: Path) -> bool:
    """True if the name is a temporary one whose writer has ended, as far as can be known here.

    Of writers on other machines, and of a process number that was given again, only the age tells.
    """
    named = _TEMPORARY.search(path.name)
    if not named:
        return False
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > ABANDONED_S:
            return True
    return named[1] == _host() and not _is_alive(int(named[2]))


def remove_leftovers(folder: Path) -> None:
    """Unlink the temporary files of killed writers in a folder; those being written stay."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name) and is_leftover(folder / name):
                with suppress(OSError):  # another process was quicker
                    os.unlink(folder / name)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, without waiting for the other end of a pipe.

    Raises:
        WeightsError: There is none, it may not be read, or it is a folder.
    """
    without_wait = getattr(os, "O_NONBLOCK", 0)
    try:
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | without_wait))
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be opened: {error.strerror}", str(path)) from error


def kind_of(head: bytes) -> str:
    """What a file that should be weights is instead, and what to do, from its first 512 bytes."""
    for magic, kind in _KINDS:
        if magic.match(head):
            return kind
    return f"not a safetensors file; it begins with {shown(head[:12])}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time, where the file system can lock; nothing relies on it to be right."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sha256_of(file: Path | BinaryIO) -> str:
    """SHA-256 of a whole file in 64 hex digits; an open file is read from its beginning."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return sha256_of(opened)
    file.seek(0)
    return hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()


def home() -> Path:
    """Folder of what the zoo keeps: ``ZOO_HOME``, else ``zoo`` in the user's cache folder."""
    if given := os.environ.get("ZOO_HOME"):
        return Path(given).expanduser().absolute()
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        cache = "~/Library/Caches"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "zoo"


def verified(path: Path, stat: os.stat_result, sha256: str) -> bool:
    """True if this very file was seen to have this hash and was not touched since.

    Args:
        path: Where the file lies.
        stat: Of the open file (`os.fstat`), so that what is checked is what is read.
        sha256: The hash in question.
    """
    try:
        record = json.loads(_record(path).read_bytes())
    except (OSError, ValueError, RuntimeError):  # none, damaged, or a user without a home
        return False
    return isinstance(record, dict) and _identity(stat, sha256).items() <= record.items()


def remember(path: Path, stat: os.stat_result, sha256: str, *, began_ns: int) -> None:
    """Record that a file has this hash. Where nothing can be written, it is hashed again next time.

    A later change shows in the file's time stamps, unless it falls into the same tick of the clock
    as the one before. So a file that was younger than `TICK_NS` when hashing began gets no record.

    Args:
        path: Where the file lies.
        stat: Of the open file, taken before it was hashed: a change meanwhile contradicts it.
        sha256: The hash that was found.
        began_ns: `time.time_ns()` before the first byte was hashed.
    """
    if began_ns - stat.st_mtime_ns < TICK_NS:
        return
    with suppress(OSError, RuntimeError):  # read-only, full, or a user without a home
        identity = _identity(stat, sha256)
        record = {"path": os.path.abspath(path), **identity, "verified_ns": time.time_ns()}
        target = _record(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, json.dumps(record).encode())


def _identity(stat: os.stat_result, sha256: str) -> dict[str, int | str]:
    """What must not have changed. The ctime betrays a change whose mtime was set back."""
    return {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
        "sha256": sha256,
    }


@cache
def _host() -> str:
    """Eight digits for this machine and, in containers that share a name, this set of processes."""
    import socket

    name = socket.gethostname()
    with suppress(OSError):
        name += os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(name.encode()):08x}"


def _is_alive(process: int) -> bool:
    if sys.platform == "win32":  # asking would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user
        return True
    return True


def _record(path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()
    return home() / "records" / f"{key}.json"


def _write(descriptor: int, chunk: bytes | memoryview) -> None:
    rest = memoryview(chunk)
    if rest.nbytes:
        rest = rest.cast("B")
    while rest:  # one call takes 2 GiB at most
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of the operating system name the file that was wanted, not the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while writing", str(path)) from error


@contextmanager
def _flushed(folder: Path) -> Iterator[None]:
    """Open a folder, let the block change its entries, and flush it to the disk."""
    if sys.platform == "win32":  # folders cannot be opened there
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
                raise
    finally:
        os.close(descriptor)
