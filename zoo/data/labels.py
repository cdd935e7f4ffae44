"""Labels as people write them, turned into class ids or numbers; answers, which are texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.errors import DataError, nearest, shown


def class_ids(
    values: Sequence[Any],
    where: str,
    *,
    hub: tuple[str, ...] | None = None,
    classes: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Class names in the order of the ids, and the id of every value.

    Args:
        values: Strings, whole numbers or booleans.
        where: File and column, for messages.
        hub: Class names that the file itself states for ids; used if all values are such ids.
        classes: Names that are wanted; values may also be their ids. By default the names that
            occur, sorted; whole numbers are sorted as numbers.

    Raises:
        DataError: There are no values, one is missing, or one is no wanted class.
    """
    _refuse_missing(values, where)
    texts = [_as_name(value) for value in values]
    present = set(texts)
    if hub and _are_ids(present, hub):
        texts = [hub[int(text)] for text in texts]
        names: Sequence[str] = hub
    else:
        names = sorted(present, key=_by_number(present))
    if classes is not None:
        present = set(texts)
        if _are_ids(present, classes) and not present & set(classes):
            texts = [classes[int(text)] for text in texts]
        elif strangers := sorted(present - set(classes)):
            raise DataError(
                f"{where}: {shown(strangers[0], 40)} is no class of the model;"
                f"{nearest(strangers[0], classes)} it has {shown(', '.join(classes), 60)}"
            )
        names = classes
    ids = {name: index for index, name in enumerate(names)}
    return tuple(names), np.array([ids[text] for text in texts], np.int64)


def numbers(values: Sequence[Any], where: str) -> NDArray[np.float64]:
    """The values as float64.

    Raises:
        DataError: There are no values, one is missing, or one is no finite number.
    """
    _refuse_missing(values, where)
    for row, value in enumerate(values):
        try:
            finite = np.isfinite(float(value))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise DataError(
                f"{where}: row {row} has {shown(value)}; the task learns a finite number"
            )
    return np.array(values, dtype=np.float64)


def answers(values: Sequence[Any], where: str) -> NDArray[np.object_]:
    """The values as texts.

    Raises:
        DataError: There are no values, one is missing, or one is no text.
    """
    _refuse_missing(values, where)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"{where}: row {row} has {shown(value)}; the task learns a text")
    return np.array(values, dtype=object)


def hub_names(table: Any, label: str) -> tuple[str, ...] | None:
    """Class names that the Hugging Face hub writes into its files; None where there are none."""
    try:
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(features[label]["names"])
    except (KeyError, TypeError, ValueError):
        return None


def _refuse_missing(values: Sequence[Any], where: str) -> None:
    if not values:
        raise DataError(f"{where}: there are no rows; give one line for each example")
    missing = [row for row, value in enumerate(values) if value is None or value == ""]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} rows have no label, the first is row {missing[0]} (the first "
            "row is 0); fill or remove them"
        )


def _are_ids(texts: Iterable[str], names: Sequence[str]) -> bool:
    return all(text.isdecimal() and int(text) < len(names) for text in texts)


def _as_name(value: Any) -> str:
    """A label as people write it: 1 and not 1.0, true and not True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _by_number(texts: Iterable[str]) -> Callable[[str], Any]:
    """Key that sorts whole numbers as numbers, and everything else by name."""
    if all(text.removeprefix("-").isdecimal() for text in texts):
        return lambda text: (int(text), text)
    return lambda text: text
