"""The fields of a recipe as flags: a flag exists if and only if the recipe has the field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar, get_args

import tyro

from zoo.errors import ConfigError, nearest, shown
from zoo.training.recipe import Optimizer, Recipe, Schedule

R = TypeVar("R", bound=Recipe)
KINDS: dict[str, tuple[type, ...]] = {
    "optimizer": get_args(Optimizer),
    "schedule": get_args(Schedule),
}

SHARED = {"lr", "warmup"}  # fields that mean the same in every kind


def parsed(arguments: Sequence[str], recipe: R, own: type, *, prog: str) -> tuple[R, Any]:
    """A recipe changed by flags, and what the flags of the command itself say.

    ``--optimizer.lr 0.1`` changes a field; ``--optimizer SGD`` and ``--schedule Linear`` choose
    another kind, which keeps the learning rate or the warm-up of the one before.

    Args:
        arguments: Of the command line.
        recipe: The defaults.
        own: Dataclass of the command's own flags and positional arguments, all with defaults; its
            docstring is the description.
        prog: Name of the command.

    Raises:
        ConfigError: There is no such kind, or a value is out of range.
        SystemExit: With 0 after ``--help``, with 2 where the arguments make no sense.
    """
    rest, recipe = _read_by_hand(list(arguments), recipe)
    kind: Any = type(recipe)
    flags = Annotated[kind, tyro.conf.arg(name="")]
    command: Any = dataclasses.make_dataclass(
        own.__name__,
        [("made", flags, dataclasses.field(default=recipe))],
        bases=(own,),
        namespace={"__doc__": own.__doc__},
        kw_only=True,
    )
    given = tyro.cli(command, args=rest, prog=prog, config=(tyro.conf.AvoidSubcommands,))
    made: R = given.made
    return made, given


def _read_by_hand(arguments: list[str], recipe: R) -> tuple[list[str], R]:
    """The arguments that tyro reads, and the recipe changed by the others.

    Those choose a kind, or set a field of the model's configuration, of which the recipe knows
    nothing: ``--config.num-classes 7``.
    """
    rest: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        flag, equals, value = argument.partition("=")
        field, _, key = flag.removeprefix("--").partition(".")
        kind, setting = field in KINDS and not key, field == "config" and key
        if not flag.startswith("--") or not (kind or setting):
            rest.append(argument)
            continue
        if not equals:
            value = arguments.pop(0) if arguments else ""
        if setting:
            change: Any = {"config": {**recipe.config, key.replace("-", "_"): _value(value)}}
        else:
            change = {field: _of_kind(getattr(recipe, field), field, value)}
        recipe = replace(recipe, **change)
    return rest, recipe


def _of_kind(old: object, field: str, name: str) -> object:
    """An optimiser or schedule of the kind of this name."""
    kinds = {kind.__name__: kind for kind in KINDS[field]}
    if name not in kinds:
        raise ConfigError(
            f"--{field} is {shown(name)};{nearest(name, kinds)} it takes {', '.join(kinds)}"
        )
    if isinstance(old, kinds[name]):
        return old
    names = {f.name for f in dataclasses.fields(kinds[name])} & SHARED & vars(old).keys()
    return kinds[name](**{key: vars(old)[key] for key in names})


def _value(text: str) -> Any:
    """A value of the model's configuration, as JSON where it is that: ``7``, ``[1, 1]``."""
    try:
        return json.loads(text)
    except ValueError:
        return text
