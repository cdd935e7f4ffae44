"""Safetensors files: read strictly, mapped without a copy, written in one canonical form.

A file is the length of its header (8 bytes, little-endian), the header (a JSON object that gives
each tensor a dtype, a shape and a span of bytes, and ``__metadata__``, a table of strings), and the
bytes of the tensors without gaps. What the zoo promises of weights rests on this reader, so it
refuses what others let pass: a name given twice, odd names, a header made to fill the memory, bytes
that belong to no tensor. Headers are read without torch.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from zoo.errors import WeightsError, shown
from zoo.files import kind_of, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

T = TypeVar("T")

# Torch's name and the bytes of one element. The order is that of the safetensors library, which
# writes tensors of a later type first.
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
}
MAX_HEADER = 16 << 20  # bytes
MAX_MEMBERS = 100_000  # of the header, and of its metadata
MAX_NAME = 512  # characters
MAX_ENTRY = 1024  # characters of JSON about one tensor
MAX_DIMS = 8
ALIGNMENT = 64  # bytes: a cache line, and what torch's own allocator gives
PIECE = 32_768  # elements converted at a time: they stay in the cache, and torch starts no threads
MAX_ELEMENTS = 1 << 59  # also of an empty tensor's other sizes: its strides are counted in bytes

_SPACE = r"[ \t\r\n]*+"
_TOKEN = r'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
_OPEN = re.compile(rf"\{{{_SPACE}(\}}?)")
_KEY = re.compile(rf"{_TOKEN}{_SPACE}:{_SPACE}")
_STRING = re.compile(_TOKEN)
_NEXT = re.compile(rf"{_SPACE}(?:,{_SPACE}|(\}}))")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ENTRY = json.JSONDecoder(object_pairs_hook=tuple)  # pairs show a field that is given twice
_FIELDS = {"dtype", "shape", "data_offsets"}


class TensorInfo(NamedTuple):
    """What a header says of one tensor; `start` and `end` count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A header that was found sound and to account for every byte of its file."""

    name: str  # of the file, for messages
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    size: int  # of the file, in bytes


def read_header(file: BinaryIO, name: str) -> Header:
    """Read and check the header of a file that is open for reading.

    Raises:
        WeightsError: It is no safetensors file, or one that is damaged or says what the format does
            not allow. The line begins with `name` and says what is wrong.
    """
    try:
        size, length = sniff(file, name)
        return _parsed(file.read(length).decode(), 8 + length, size, name)
    except _RefusedError as refused:
        raise _error(name, str(refused)) from None
    except UnicodeDecodeError as error:
        raise _error(name, f"is damaged: byte {8 + error.start} is not UTF-8") from None
    except OSError as error:
        raise _error(name, f"cannot be read: {error.strerror}") from error


def sniff(file: BinaryIO, name: str) -> tuple[int, int]:
    """Size of a safetensors file and length of its header, which is read next.

    Raises:
        WeightsError: It is something else, which the message names, or too short for its header.
    """
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise _error(name, "is a folder or a device, not a file")
    file.seek(0)
    head = file.read(512)
    length, rest = int.from_bytes(head[:8], "little"), status.st_size - 8
    if length >> 32 or head[8:9] != b"{":
        raise _error(name, f"is {kind_of(head)}")
    if length > rest:
        raise _error(name, f"is cut short: its header has {length:,} bytes and {rest:,} follow")
    if length > MAX_HEADER:
        raise _error(name, f"has a header of {length:,} bytes; at most {MAX_HEADER:,} are read")
    file.seek(8)
    return status.st_size, length


def torch_dtype(code: str) -> torch.dtype:
    """Torch's name for a dtype of a header."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[code][0])
    return dtype


def read_tensors(
    file: BinaryIO,
    header: Header,
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    anywhere: Collection[str] = (),
) -> dict[str, Tensor]:
    """The tensors of an open file, in the types wanted, without a second copy of any.

    What can be used as it lies in the file is mapped: backed by the file's pages until it is
    written to. The mapping is private, so writing into a tensor never changes the file, and
    replacing the file never changes a tensor. (A mapped file that somebody cuts short in place ends
    the process; the zoo never writes in place.) The rest, what is converted or does not begin at a
    multiple of 64 bytes, is read into one block of fresh memory: products of matrices depend on
    their alignment in the last bit, and the same weights shall give the same outputs.

    Args:
        file: The open file.
        header: What `read_header` found in it.
        dtypes: The types wanted, by name; a name that is absent keeps its type.
        anywhere: Names whose alignment no result depends on.

    Raises:
        WeightsError: The file shrank since its header was read, or holds a BOOL that is not 0 or 1.
    """
    import torch

    stored = {name: torch_dtype(info.dtype) for name, info in header.tensors.items()}
    wanted = {**stored, **(dtypes or {})}
    places: dict[str, int] = {}
    size = 0
    for name, info in header.tensors.items():
        step = stored[name].itemsize if name in anywhere else ALIGNMENT
        if wanted[name] != stored[name] or info.start % step:
            places[name] = size
            length = math.prod(info.shape) * wanted[name].itemsize
            size += -(-length // ALIGNMENT) * ALIGNMENT
    block = _fresh_memory(size) if size else b""
    try:
        pages = mmap.mmap(file.fileno(), header.size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise _error(header.name, f"cannot be mapped into memory: {error}") from error
    tensors: dict[str, Tensor] = {}
    for name, info in header.tensors.items():
        count = math.prod(info.shape)
        if count == 0:
            tensors[name] = torch.empty(info.shape, dtype=wanted[name])
            continue
        source, offset = (block, places[name]) if name in places else (pages, info.start)
        flat = torch.frombuffer(source, dtype=wanted[name], count=count, offset=offset)
        if name in places:
            _fill(flat, file, header, info)
        if info.dtype == "BOOL" and flat.view(torch.uint8).max() > 1:
            raise _error(header.name, f"holds bytes other than 0 and 1 in BOOL {shown(name)}")
        tensors[name] = flat.view(info.shape)
    return tensors


def _fill(flat: Tensor, file: BinaryIO, header: Header, info: TensorInfo) -> None:
    """Read one tensor into memory that is there, piece by piece if its type changes."""
    import torch

    stored = torch_dtype(info.dtype)
    file.seek(info.start)
    if stored == flat.dtype:
        _read_into(flat.view(torch.uint8).numpy().data, file, header)
        return
    buffer = bytearray(PIECE * stored.itemsize)
    for part in flat.split(PIECE):
        _read_into(memoryview(buffer)[: part.numel() * stored.itemsize], file, header)
        part.copy_(torch.frombuffer(buffer, dtype=stored, count=part.numel()))


def _read_into(target: memoryview, file: BinaryIO, header: Header) -> None:
    while target:
        read = file.readinto(target)  # type: ignore[attr-defined]
        if not read:
            raise _error(header.name, "is cut short: it shrank while it was read")
        target = target[read:]


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file, whole or not at all (`zoo.files.write_atomically`).

    Equal tensors give equal bytes. Those whose size is a multiple of 64 bytes come first, so that
    they begin at one too and can be mapped; within that the order is that of the safetensors
    library. The tensors may be mapped from the very file that is replaced; one at a time is copied,
    and only if it is strided or on another device.

    Args:
        path: The file; its folder exists.
        tensors: Dense tensors by name; one that has several names is passed under one of them.
        metadata: Strings by name.

    Raises:
        WeightsError: A tensor is of another kind or passed twice, or `read_header` would refuse it.
        OSError: See `write_atomically`.
    """
    write_atomically(path, encoded(tensors, metadata, name=path.name))


def encoded(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, name: str
) -> Iterator[bytes | memoryview]:
    """The bytes that `write` writes, piece by piece; `name` is what errors call the file."""
    import torch

    names, header = _header(tensors, metadata, name)
    dense = (tensors[name].detach().cpu().contiguous().reshape(-1) for name in names)
    return chain([header], (t.view(torch.uint8).numpy().data for t in dense))


class _RefusedError(ValueError):
    """Why a header is refused: a sentence without its subject, the file."""


def _error(name: str, reason: str) -> WeightsError:
    short = name if len(name) <= 80 else f"…{name[-79:]}"  # the end of a path says most
    return WeightsError(f"{short} {reason}", *([] if short == name else [name]))


def _parsed(text: str, data_start: int, size: int | None, name: str) -> Header:
    """The header that this text is; a file that is yet to be written has no size."""

    def member(key: str, at: int) -> tuple[Any, int]:
        if key == "__metadata__":
            return _members(text, at, lambda _, at: _string(text, at))
        return _tensor(text, at, key, data_start)

    tensors, at = _members(text, 0, member)
    if text[at:].strip(" \t\r\n"):
        raise _RefusedError(f"is damaged: its header goes on after its end, at character {at}")
    metadata = tensors.pop("__metadata__", {})
    end = data_start
    for key in sorted(tensors, key=lambda key: tensors[key][2:]):
        start = tensors[key].start
        if start != end:
            fault = f"leaves {start - end} unused" if start > end else f"uses {end - start} twice"
            raise _RefusedError(f"{fault} of the bytes before or in tensor {shown(key)}")
        end = tensors[key].end
    if size is not None and size > end:
        raise _RefusedError(f"has {size - end:,} bytes after its last tensor, which belong to none")
    if size is not None and size < end:
        raise _RefusedError(f"is cut short: {size:,} of {end:,} bytes are there")
    return Header(name, tensors, metadata, data_start, end)


def _members(
    text: str, at: int, read: Callable[[str, int], tuple[T, int]]
) -> tuple[dict[str, T], int]:
    """The members of the JSON object at a position, and where it ends.

    `read` takes a key and the position of its value; it gives the value and where that ends. So
    nothing is built but what is accepted, and a hostile header cannot fill the memory.
    """
    members: dict[str, T] = {}
    found = _expect(_OPEN, text, at, "an object")
    while not found[1]:
        found = _expect(_KEY, text, found.end(), "a name")
        key = _unescaped(found)
        if key in members:
            raise _RefusedError(f"names {shown(key)} twice")
        if len(members) == MAX_MEMBERS:
            raise _RefusedError(f"names more than {MAX_MEMBERS:,} tensors")
        members[key], at = read(key, found.end())
        found = _expect(_NEXT, text, at, "a comma or a closing brace")
    return members, found.end()


def _string(text: str, at: int) -> tuple[str, int]:
    found = _expect(_STRING, text, at, "a string")
    return _unescaped(found), found.end()


def _expect(pattern: re.Pattern[str], text: str, at: int, what: str) -> re.Match[str]:
    if found := pattern.match(text, at):
        return found
    raise _RefusedError(f"is damaged: its header lacks {what} at character {at}")


def _unescaped(token: re.Match[str]) -> str:
    body = token[1]
    if "\\" in body or not body.isascii():
        try:
            body, _ = _ENTRY.raw_decode(token.string, token.start(1) - 1)
            body.encode()  # half a surrogate pair is no text
        except ValueError:
            raise _RefusedError(f"is damaged: {shown(token[1])} is no JSON string") from None
    return body


def _tensor(text: str, at: int, name: str, data_start: int) -> tuple[TensorInfo, int]:
    """What the entry at a position says of a tensor, and where it ends."""
    if not name or len(name) > MAX_NAME or _CONTROL.search(name):
        rule = f"1 to {MAX_NAME} characters, no control characters"
        raise _RefusedError(f"names a tensor {shown(name)}; a name has {rule}")
    try:
        pairs, length = _ENTRY.raw_decode(text[at : at + MAX_ENTRY])
    except (ValueError, RecursionError):
        raise _RefusedError(f"is damaged: the entry of {shown(name)} cannot be read") from None
    fields = dict(pairs) if text[at] == "{" else {}
    if fields.keys() != _FIELDS or len(pairs) != len(_FIELDS):
        fault = "the entry must be dtype, shape and data_offsets, once each"
        raise _RefusedError(f"describes {shown(name)} wrongly: {fault}")
    dtype, shape, span = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        fault = f"dtype {shown(dtype)} is none of {' '.join(DTYPES)}"
    elif not _are_counts(shape) or len(shape) > MAX_DIMS:
        fault = f"{shown(shape)} is no shape"
    elif math.prod(filter(None, shape)) > MAX_ELEMENTS:
        fault = f"the shape {shown(shape)} is too large"
    elif not _are_counts(span) or len(span) != 2:
        fault = f"data_offsets {shown(span)} are not [begin, end]"
    elif (need := math.prod(shape) * DTYPES[dtype][1]) != span[1] - span[0]:
        fault = f"{dtype} {shown(shape)} takes {need} bytes, data_offsets are {shown(span)}"
    else:
        info = TensorInfo(dtype, tuple(shape), data_start + span[0], data_start + span[1])
        return info, at + length
    raise _RefusedError(f"describes {shown(name)} wrongly: {fault}")


def _are_counts(values: object) -> bool:
    if type(values) is not list:
        return False
    return not [v for v in values if type(v) is not int or v < 0 or v >> 63]


def _header(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, path: str
) -> tuple[list[str], bytes]:
    """Names in the order of their bytes, and all that comes before those."""
    import torch

    codes = {torch_dtype(code): code for code in DTYPES}
    ranks = {dtype: rank for rank, dtype in enumerate(codes)}
    seen: dict[object, str] = {}
    for name, tensor in tensors.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not dense or tensor.is_meta or tensor.dtype not in codes or not isinstance(name, str):
            kind = tensor.dtype if dense else type(tensor).__name__
            raise _error(path, f"cannot hold {shown(name)}, {kind}; it takes dense real tensors")
        place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if tensor.numel() and (twin := seen.setdefault(place, name)) != name:
            raise _error(
                path, f"was to hold one tensor as {shown(twin)} and {shown(name)}; pass one"
            )
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    names = sorted(
        tensors,
        key=lambda n: (tensors[n].nbytes % ALIGNMENT != 0, -ranks[tensors[n].dtype], n),
    )
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].itemsize
        entry = codes[tensors[name].dtype], list(tensors[name].shape), [start, end]
        table[name] = dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True))
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":"))
    try:
        _parsed(text, 8, None, path)  # nothing is written that is not read again
        raw = text.encode()
        if len(raw) > MAX_HEADER - 8:
            raise _RefusedError(f"has a header of {len(raw):,} bytes")
    except _RefusedError as refused:
        raise _error(path, f"would be refused when read: it {refused}") from None
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    return names, len(raw).to_bytes(8, "little") + raw


def _fresh_memory(size: int) -> mmap.mmap:
    """Zeroed memory of this process, on huge pages where there are such."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel built without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
