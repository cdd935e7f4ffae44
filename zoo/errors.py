"""Every exception that is raised on purpose.

A message says what was given, what is true and what to do. Its first line is complete and at most
200 characters long; details (places looked at, keys) follow, one a line. The command line prints
the first line, or all of it with ``-v``, and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

LINE = 200


class ZooError(Exception):
    """Root of the errors of this project.

    Args:
        line: The whole message in one line. Line breaks become spaces; what passes 200 characters
            is cut here and printed in full as the first detail.
        details: Further lines, for those who ask (``str(error)`` holds all of them).
    """

    def __init__(self, line: str, *details: str) -> None:
        flat = " ".join(line.split())
        if len(flat) > LINE:
            details = (flat, *details)
            flat = flat[: LINE - 1] + "…"
        self.line = flat
        self.details = details
        super().__init__("\n".join((flat, *details)))

    def __reduce__(self) -> tuple[type[ZooError], tuple[str, ...]]:
        return type(self), (self.line, *self.details)


class UnknownModelError(ZooError, LookupError):
    """A name or a tag that no card has."""


class WeightsError(ZooError, RuntimeError):
    """A weights file that is damaged, foreign, or does not fit the model."""


class WeightsUnavailableError(WeightsError):
    """Weights that a card names and that are not installed."""


class CacheError(WeightsError):
    """A cache (``ZOO_HOME``) that cannot be written."""


class CardError(ZooError, ValueError):
    """A card that breaks the format of ``weights/README.md``."""


class NonFiniteError(ZooError, ArithmeticError):
    """A loss, a gradient or a parameter that is infinite or not a number."""


class CheckpointError(ZooError, RuntimeError):
    """A checkpoint that is damaged, incomplete or not there, or that cannot be written."""


class ConfigError(ZooError, ValueError):
    """An argument or a configuration value that the model or the task does not take."""


class DataError(ZooError, ValueError):
    """Raw input or a data set that cannot be read as what it was given for."""


class ExportError(ZooError, RuntimeError):
    """A model and a format that do not go together, or a file that does not equal its model."""


class MissingPackageError(ZooError, ImportError):
    """An optional package that is not installed."""


def shown(value: object, limit: int = 60) -> str:
    """The value as it is written in a message: its ``repr``, shortened in the middle."""
    text = repr(value)
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return text[:half] + "…" + text[-half:]


def nearest(given: str, names: Iterable[str]) -> str:
    """`` did you mean 'a' or 'b'?`` with a leading space, or nothing when no name is close."""
    close = difflib.get_close_matches(given, list(names), n=3, cutoff=0.6)
    return f" did you mean {' or '.join(map(repr, close))}?" if close else ""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Args:
        module: Dotted name of the module.
        extra: The extra of this distribution that installs it.

    Raises:
        MissingPackageError: The package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # it is there, and broken inside
            raise
        raise MissingPackageError(
            f"the package {package!r} is not installed; pip install 'refzoo[{extra}]' brings it"
        ) from error
