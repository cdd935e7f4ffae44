"""Published data sets under one root: the folder that ``ZOO_DATA`` names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.errors import DataError, nearest, shown


@dataclass(frozen=True)
class Dataset:
    """A published data set in the layout of its publisher."""

    name: str
    files: dict[str, str]  # split -> path below ZOO_DATA
    read: Callable[
        [Path], Iterator[tuple[Any, Any]]
    ]  # file or folder -> (raw input, target), in order
    home: str  # where it is published
    columns: tuple[str, ...] = ()  # of a parquet file: those of the input, then the target

    def path(self, split: str) -> Path:
        """Where a split lies.

        Raises:
            DataError: There is no such split, or the file is not there; the message names the
            folder to
                fill.
        """
        if split not in self.files:
            raise DataError(
                f"{self.name} has no split {shown(split)};{nearest(split, self.files)} "
                f"it has {', '.join(self.files)}"
            )
        root = os.environ.get("ZOO_DATA")
        relative = self.files[split]
        if not root:
            raise DataError(
                f"{self.name}/{split} needs data: set ZOO_DATA to a folder that holds {relative} "
                f"(published at {self.home})"
            )
        path = Path(root) / relative
        if not path.exists():
            raise DataError(
                f"{self.name}/{split}: no {relative} in ZOO_DATA={shown(root)}; put it there "
                f"(published at {self.home})"
            )
        return path

    def examples(self, split: str) -> Iterator[tuple[Any, Any]]:
        """Every (raw input, target) of a split, each once, in the published order."""
        return self.read(self.path(split))

    def sha256(self, split: str) -> str:
        """Of the bytes of a split, by which another version of the set is told apart."""
        with self.path(split).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
