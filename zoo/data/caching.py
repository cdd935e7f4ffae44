"""A cache of decoded items that all workers share."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zoo.data.loader import start_method
from zoo.data.rows import Rows

AXES = 4  # of an item at most


class Cached(Rows):
    """Rows whose raw inputs are decoded once, by whichever process comes first.

    They lie one after the other in one piece of memory. What does not fit, or is not uint8 of at
    most four axes, is decoded each time. Workers that are no forks have a cache of their own.
    """

    def __init__(self, rows: Rows, decode: Callable[[Any], Tensor], limit_bytes: int) -> None:
        self.rows, self.decode, self.limit_bytes = rows, decode, limit_bytes
        self.name, self.classes, self.targets = rows.name, rows.classes, rows.targets
        # Anonymous memory: /dev/shm is small in containers, and ends a process that fills it.
        self._memory = np.frombuffer(mmap(-1, limit_bytes), np.uint8)
        numbers = np.frombuffer(mmap(-1, 8 * (1 + len(rows) * (1 + AXES))), np.int64)
        self._used = numbers[:1]
        # Of each item: offset + 1 (0: not there), then its shape, filled up with -1.
        self._entries = numbers[1:].reshape(len(rows), 1 + AXES)
        self._lock = multiprocessing.get_context(start_method()).Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, (self.rows, self.decode, self.limit_bytes)

    def raw(self, index: int) -> Tensor:
        """The decoded item; the caller may change it."""
        offset, *shape = self._entries[index].tolist()
        if offset:
            shape = [side for side in shape if side >= 0]
            found = self._memory[offset - 1 : offset - 1 + math.prod(shape)]
            return torch.from_numpy(found.reshape(shape).copy())
        item = self.decode(self.rows.raw(index))
        if item.dtype == torch.uint8 and item.ndim <= AXES:
            self._keep(index, item.numpy())
        return item

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Those of the rows behind."""
        return self.rows.labels

    def where(self, index: int) -> str:
        """Where it is in the rows behind."""
        return self.rows.where(index)

    def describe(self, index: int) -> str:
        """As the rows behind do."""
        return self.rows.describe(index)

    @property
    def used_bytes(self) -> int:
        """Size of what is there now."""
        return int(self._used[0])

    def _keep(self, index: int, item: NDArray[np.uint8]) -> None:
        with self._lock:
            start = int(self._used[0])
            if self._entries[index, 0] or start + item.size > self.limit_bytes:
                return
            self._used[0] = start + item.size
        self._memory[start : start + item.size] = item.reshape(-1)
        self._entries[index, 1:] = [*item.shape, *[-1] * (AXES - item.ndim)]
        self._entries[index, 0] = start + 1  # last: now others may read it


def cached(rows: Rows, decode: Callable[[Any], Tensor], limit_bytes: int) -> Rows:
    """The rows with their decoded items kept in memory that workers share.

    Args:
        rows: What is read.
        decode: Raw input -> tensor that the task takes as a raw input too, before anything random;
            ``task.decoded`` of a task that has it.
        limit_bytes: Of memory; it is taken as it fills. 0 gives the rows as they are.
    """
    return Cached(rows, decode, limit_bytes) if limit_bytes > 0 else rows
