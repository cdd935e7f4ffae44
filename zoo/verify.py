"""Prove what is installed: hash every file again, and repair what the cache has of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zoo import cache, cards
from zoo.cards import Card, File
from zoo.errors import CardError, WeightsError
from zoo.progress import Meter, shown_bytes
from zoo.pull import fetch
from zoo.weights import Place, check, convert_into_cache, places

State = Literal["ok", "repaired", "damaged"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verified:
    """What `verify` found out about one file."""

    path: Path
    owner: str  # the weights that it belongs to, or "no card"
    size: int
    state: State
    note: str = ""  # what was wrong, what was done, what is to be done

    def __str__(self) -> str:
        note = f"  {self.note}" if self.note else ""
        return f"{self.state:8} {self.owner:32} {shown_bytes(self.size):>9}  {self.path}{note}"


@dataclass(frozen=True)
class Report:
    """What `verify` found out."""

    files: tuple[Verified, ...]
    seconds: float  # of hashing

    @property
    def damaged(self) -> tuple[Verified, ...]:
        """Files that are not what their card says, and stayed so."""
        return tuple(file for file in self.files if file.state == "damaged")

    def __str__(self) -> str:
        size = sum(file.size for file in self.files)
        repaired = sum(file.state == "repaired" for file in self.files)
        return "\n".join(
            (
                *map(str, self.files),
                f"{len(self.files)} files, {shown_bytes(size)} hashed in {self.seconds:.1f} s "
                f"({shown_bytes(size / max(self.seconds, 1e-9))}/s): {repaired} repaired, "
                f"{len(self.damaged)} damaged",
            )
        )


def verify(name: str | None = None, *, progress: bool = True) -> Report:
    """Hash every installed and cached file again, and repair what the cache has of it.

    A damaged file of the cache is replaced by the bytes that another place or source has; one that
    lies elsewhere is only named.

    Args:
        name: A model, with or without a tag; by default all, and what no card names any more.
        progress: Show what is done, on stderr.

    Raises:
        UnknownModelError: No such name or tag.
    """
    cache.sweep()
    chosen = [cards.card(name)] if name else list(_sound_cards())
    found: dict[Path, tuple[Card, File, Place]] = {}
    for card in chosen:
        for tag in card.weights:
            narrow = card.with_tag(tag)
            for file in narrow.weights[tag].files:
                for place in places(narrow, file):
                    if place.sha256 and place.path.is_file():
                        found.setdefault(place.path, (narrow, file, place))
    began = time.monotonic()
    strays = [] if name else [path for path in cache.blobs() if path not in found]
    todo = [place for _, _, place in found.values()]
    todo += [Place(path, "cache", path.name, None) for path in strays]
    faults = _hash_all(todo, progress)
    seconds = time.monotonic() - began
    results = []
    for place in todo:
        owner = found.get(place.path)
        results.append(_result(place, owner and owner[:2], faults[place.path], progress))
    return Report(tuple(results), seconds)


def _result(place: Place, owner: tuple[Card, File] | None, fault: str, progress: bool) -> Verified:
    """What is said of one file, after its repair if that is possible."""
    name, size = owner[0].full_name if owner else "no card", _size(place.path)
    if not fault:
        return Verified(place.path, name, size, "ok")
    if not owner:
        return Verified(place.path, name, size, "damaged", f"{fault}; delete it")
    kept = cache.kept(*owner)
    if not kept or place.path != cache.blob(kept.sha256):
        return Verified(place.path, name, size, "damaged", f"{fault}; replace it")
    state, done = _repair(*owner, place, progress)
    return Verified(place.path, name, size, state, f"{fault}; {done}")


def _hash_all(todo: list[Place], progress: bool) -> dict[Path, str]:
    """What is wrong with each file; nothing where it is right."""

    def fault(place: Place) -> str:
        try:
            check(place, "always")
        except (WeightsError, OSError) as error:
            return error.line if isinstance(error, WeightsError) else str(error.strerror)
        return ""

    sizes = {place.path: _size(place.path) for place in todo}
    faults: dict[Path, str] = {}
    with Meter("hashing", wanted=progress) as meter, ThreadPoolExecutor(_workers()) as pool:
        meter.start(sum(sizes.values()))
        for place, text in zip(todo, pool.map(fault, todo), strict=True):
            faults[place.path] = text
            meter.advance(sizes[place.path])
    return faults


def _repair(card: Card, file: File, damaged: Place, progress: bool) -> tuple[State, str]:
    """Put the right bytes in the place of a damaged blob; says where they came from."""
    try:
        for place in places(card, file):
            if place.sha256 and place.path != damaged.path and place.path.exists():
                with suppress(WeightsError, OSError):
                    check(place, "always")
                    if place.pickled:
                        convert_into_cache(card, file, place.path)
                    else:
                        cache.copy(place.path, damaged.sha256 or "")
                    return "repaired", f"made again from {place.text}"
        fetch(card, file, verify="always", progress=progress)
    except WeightsError as error:
        return "damaged", error.line
    return "repaired", "fetched again"


def _sound_cards() -> Iterator[Card]:
    """All cards; one that cannot be read, as a plug-in's may be, is one warning."""
    for name in cards.list_models():
        try:
            yield cards.card(name)
        except CardError as error:
            log.warning("%s", error.line)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _workers() -> int:
    """Threads that hash: beyond a few, the disk is what is waited for."""
    return min(4, os.cpu_count() or 1)
