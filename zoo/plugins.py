"""Plug-ins: folders of cards that other distributions announce in the entry-point group zoo.cards.

Only their metadata is read, and nothing of them is imported.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from zoo.errors import shown


def card_folders() -> Iterator[tuple[str, Path]]:
    """Name and folder of cards of every plug-in; one that cannot be found is one warning."""
    announced = [info for info in _metadata_folders() if _announces(info)]
    if not announced:
        return  # the usual case, and importlib.metadata would cost half of the listing's time
    from importlib.metadata import PathDistribution

    seen = set()
    for info in announced:
        try:
            points = list(PathDistribution(info).entry_points.select(group="zoo.cards"))
        except Exception as error:  # a plug-in may be broken in any way; it must not break the zoo
            reason = f"{type(error).__name__}: {error}"
            _warn(f"the plug-ins of {shown(info.name)} are ignored: {reason}")
            continue
        for point in points:
            if point.name in seen:  # installed twice: the first one on the path counts
                continue
            seen.add(point.name)
            dotted = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", point.value)
            folder = package_folder(point.value.replace(".", "/")) if dotted else None
            if folder and re.fullmatch(r"[a-z0-9][a-z0-9_-]*", point.name):
                yield point.name, folder
            else:
                reason = f"{shown(point.value)} is not a package" if not folder else "its name"
                _warn(f"the zoo plug-in {shown(point.name)} is ignored: {reason}")


def package_folder(path: str) -> Path | None:
    """An installed folder, ``package/folder``, found without importing any of it, or None."""
    top, *rest = path.split("/")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # for example a module without a spec, as __main__ is
        spec = None
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (folder := Path(location, *rest)).is_dir():
            return folder
    return None


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _metadata_folders() -> Iterator[Path]:
    for folder in dict.fromkeys(sys.path):
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith((".dist-info", ".egg-info")):
                yield Path(folder or ".", entry)


def _announces(info: Path) -> bool:
    try:
        return b"[zoo.cards]" in (info / "entry_points.txt").read_bytes()
    except OSError:
        return False
