"""Safetensors files: read strictly, mapped without a copy, written in one canonical form.

A file is the length of its header (8 bytes, little-endian), the header (a JSON object that gives each
tensor a dtype, a shape and a span of bytes, and ``__metadata__``, a table of strings), and the bytes
of the tensors without gaps. The zoo's promises about weights rest on this reader, so it refuses what
other readers let pass: names given twice, odd names, headers whose size alone fills the memory, bytes
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from zoo.errors import WeightsError, shown
from zoo.files import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

# Bytes of one element and torch's name, in the order of the safetensors library, which writes
# tensors of a later type first.
DTYPES = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "I16": (2, "int16"),
    "U16": (2, "uint16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I32": (4, "int32"),
    "U32": (4, "uint32"),
    "F32": (4, "float32"),
    "F64": (8, "float64"),
    "I64": (8, "int64"),
    "U64": (8, "uint64"),
}
MAX_HEADER = 16 << 20  # bytes
MAX_TENSORS = 100_000
MAX_NAME = 512  # characters
MAX_DIMS = 8
MAX_ENTRY = 1024  # characters of JSON that describe one tensor

FOREIGN = (
    (rb"version https://git-lfs", "a git-lfs pointer, not the file itself; run git lfs pull"),
    (rb"\s*<(?i:!doctype|html|head|body|\?xml)", "an HTML page, not weights; download it again"),
    (rb"PK\x03\x04.{0,400}data\.pkl", "a PyTorch zip file; zoo convert FILE NAME converts it"),
    (rb"PK[\x03\x05]", "a zip archive; unpack it and give the safetensors file inside"),
    (rb"\x80[\x02-\x05]", "a pickle, which may run code; zoo convert FILE NAME converts it safely"),
    (rb"\x1f\x8b", "compressed by gzip; gunzip it"),
    (rb"BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf", "compressed; unpack it"),
    (rb".{257}ustar", "a tar archive; unpack it and give the safetensors file inside"),
    (rb"GGUF", "a GGUF file, of llama.cpp; the zoo reads safetensors"),
    (rb"\x89HDF", "an HDF5 file, of Keras or MATLAB; the zoo reads safetensors"),
    (rb"\x93NUMPY", "a NumPy array; the zoo reads safetensors"),
    (rb"\x08[\x01-\x20][\x12\x1a\x22\x3a\x42]", "an ONNX model; the zoo reads safetensors"),
    (rb"\0+\Z", "filled with zeros, as a download that broke off is; download it again"),
    (rb"\s*[{\[]", "JSON text, such as a config or an index of shards; give the weights themselves"),
    (rb"[\t\r\n -~]+\Z", "text, not weights"),
)
_FOREIGN = [(re.compile(magic, re.DOTALL), text) for magic, text in FOREIGN]

_SPACE = r"[ \t\r\n]*+"
_TOKEN = r'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
_OPEN = re.compile(rf"\{{{_SPACE}(\}}?)")
_KEY = re.compile(rf"{_TOKEN}{_SPACE}:{_SPACE}")
_STRING = re.compile(_TOKEN)
_NEXT = re.compile(rf"{_SPACE}(?:,{_SPACE}|(\}}))")
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, halves of pairs


class TensorInfo(NamedTuple):
    """What a header says of one tensor; `start` and `end` count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A header that was found to be sound and to account for every byte of its file."""

    name: str  # of the file, for messages
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    size: int  # of the file, in bytes


class _Refusal(ValueError):
    """Why a file is refused, as the rest of a sentence that begins with its name."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe is never waited for.

    Raises:
        WeightsError: There is none, it may not be read, or it is a folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", os.O_BINARY))
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise _error(str(path), f"cannot be opened: {error.strerror}") from error


def read_header(file: BinaryIO, name: str) -> Header:
    """Read and check the header of an open file.

    Args:
        file: A regular file, opened for reading in binary.
        name: What messages call it.

    Raises:
        WeightsError: The file is something else, damaged, or says anything that the format does not
            allow; the reason is in the message.
    """
    try:
        size, text = _header_text(file)
        tensors, metadata = _parse(text)
        data_start = 8 + len(text.encode())
        return Header(name, _laid_out(tensors, data_start, size), metadata, data_start, size)
    except _Refusal as refusal:
        raise _error(name, str(refusal)) from None
    except OSError as error:
        raise _error(name, f"cannot be read: {error.strerror}") from error
