"""Frozen dataclasses from plain values, strictly: no unknown field, no wrong type, nothing pruned.

Cards and model configurations are both read through `build`, so that a typo in either is answered
with the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from zoo.errors import ConfigError, ZooError, nearest, shown

T = TypeVar("T")


def build(
    cls: type[T],
    values: Mapping[str, Any],
    *,
    where: str,
    error: type[ZooError] = ConfigError,
) -> T:
    """An instance of a dataclass made from plain values, as TOML or a caller gives them.

    Args:
        cls: Dataclass whose fields are bool, int, float, str, `Literal`, tuples, dicts, optional
            ones of these, or further dataclasses.
        values: Field values; lists become tuples.
        where: What the values belong to; opens every message.
        error: Class of the error raised.

    Raises:
        ZooError: Of class `error`, for an unknown field (with the nearest names), a missing one or
            a value of the wrong type.
    """
    hints = field_types(cls)  # type: ignore[arg-type]
    for name in values:
        if name not in hints:
            known = nearest(str(name), hints) or f" it has {', '.join(sorted(hints))}"
            raise error(f"{where} has no field {shown(name)};{known}")
    kwargs = {name: _value(values[name], hints[name], f"{where}: {name}", error) for name in values}
    missing = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name in hints
        and field.name not in kwargs
        and default_of(field) is dataclasses.MISSING
    ]
    if missing:
        raise error(f"{where} lacks {', '.join(missing)}")
    return cls(**kwargs)


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Type of every field that a caller may set, by name."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {f.name: hints[f.name] for f in fields if not f.metadata.get("internal")}


def plain(value: Any) -> Any:
    """The value as TOML and JSON hold it; dataclasses become tables without defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if not f.metadata.get("internal")]
        values = {f.name: getattr(value, f.name) for f in fields}
        return {f.name: plain(values[f.name]) for f in fields if values[f.name] != default_of(f)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Default of a field; `dataclasses.MISSING` where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _value(value: Any, hint: Any, where: str, error: type[ZooError]) -> Any:
    """The value converted to the type of its field, or the error that says what the field takes."""
    origin, args = get_origin(hint), get_args(hint)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of classes is often labels.max() + 1
    wrong = error(f"{where} is {shown(value)}; it takes {_spelled(hint)}")
    if hint is Any:
        return value
    if origin is Literal:
        if value not in args or type(value) not in {type(a) for a in args}:
            hint_text = nearest(value, map(str, args)) if isinstance(value, str) else ""
            raise error(f"{where} is {shown(value)};{hint_text} it takes {_spelled(hint)}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        for option in inner[:-1]:
            try:
                return _value(value, option, where, error)
            except ZooError:
                continue
        return _value(value, inner[-1], where, error)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise wrong
        if args[-1] is Ellipsis:
            items = [args[0]] * len(value)
        elif len(args) == len(value):
            items = list(args)
        else:
            raise wrong
        return tuple(
            _value(v, h, f"{where}[{i}]", error)
            for i, (v, h) in enumerate(zip(value, items, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise wrong
        return {k: _value(v, args[1], f"{where}.{k}", error) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if not isinstance(value, Mapping):
            raise wrong
        return build(hint, value, where=where, error=error)  # type: ignore[arg-type]
    if hint is float and type(value) in (int, float):
        return float(value)
    if type(value) is not hint:
        raise wrong
    return value


def _spelled(hint: Any) -> str:
    """The type in words that fit a message."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join("nothing" if a is type(None) else _spelled(a) for a in args)
    if origin is tuple:
        return "a list of " + _spelled(args[0])
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a table"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}.get(
        hint, str(hint)
    )
