"""Progress of long work on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_EVERY_S = 10.0


class Meter:
    """Counts the bytes of one piece of work, with their rate and the time left.

    Args:
        name: Of the work.
        wanted: False shows nothing.
    """

    def __init__(self, name: str, *, wanted: bool = True) -> None:
        self.name = name
        self._wanted = wanted
        self._bar: Any = None
        self._first = self._done = 0
        self._total: int | None = None
        self._began = self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line about the work."""
        if self._wanted:
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def start(self, total: int | None, done: int = 0) -> None:
        """Begin to count, with some bytes there already; again, if the work begins again."""
        self.stop()
        self._first, self._done, self._total = done, done, total
        self._began = self._said = time.monotonic()
        if self._wanted and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
            self._bar.add_task(self.name, total=total, completed=done)
        elif done:
            self.say(f"goes on after {shown_bytes(done)}")

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            self.say(str(self))

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __str__(self) -> str:
        """How far it is, how fast, how long still."""
        rate = (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)
        line = f"{shown_bytes(self._done)}, {shown_bytes(rate)}/s"
        if self._total:
            left = (self._total - self._done) / max(rate, 1)
            line += f", {100 * self._done // self._total} %, {left:.0f} s left"
        return line

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.stop()


def shown_bytes(count: float) -> str:
    """``"97.8 MB"``."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
