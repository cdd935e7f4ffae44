"""The folder of a run: the recipe that it follows, its numbers, its weights with their card."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from zoo import __version__, cards, files, registry
from zoo.cards import Metric
from zoo.errors import ConfigError, shown
from zoo.evaluation import TOLERANCE
from zoo.saving import card_text, write_folder
from zoo.training import checkpoint, distributed
from zoo.training.recipe import from_plain, to_plain
from zoo.training.tracking import Silent, Tracker, open_trackers
from zoo.weights import find_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import nn

    from zoo.data.rows import Rows
    from zoo.training.state import Position, Run

Resume = Literal["auto", "never"] | Path
FREE = (
    "workers",
    "cache",
    "keep",
    "checkpoint_every",
)  # of a recipe, what may differ in a resumed run


def read_recipe(path: Path) -> tuple[str, Any]:
    """Model and recipe of a ``recipe.json``.

    Raises:
        ConfigError: The file is none; the message names it, the key and the value.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        model, kind, values = (content[key] for key in ("model", "type", "recipe"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{shown(str(path))} is no recipe ({type(error).__name__}: {error}); a run writes one "
            "as recipe.json"
        ) from error
    task = registry.task_class(cards.card(str(model).partition(".")[0]))
    kinds: tuple[type, ...] = task.recipe.__mro__
    able = {_name(cls): cls for cls in kinds if is_dataclass(cls)}
    if kind not in able or not isinstance(values, dict):
        raise ConfigError(f"{path.name}: type is {shown(kind)}; {model} takes {', '.join(able)}")
    return str(model), from_plain(able[kind], values, where=path.name)


def described(model: str, recipe: DataclassInstance) -> dict[str, Any]:
    """What ``recipe.json`` holds; `read_recipe` gives it back."""
    return {"model": model, "type": _name(type(recipe)), "recipe": to_plain(recipe)}


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


class Resumable(Protocol):
    """What a run is to its folder: it has a position, and becomes what a checkpoint holds."""

    position: Position

    def restore(self, found: checkpoint.Found) -> None:
        """Go on from a checkpoint."""


def begin(
    run: Resumable, folder: Path, description: Mapping[str, Any], resume: Resume, *, quiet: bool
) -> None:
    """Make the folder a run of this recipe, and put the run where its checkpoint says.

    Raises:
        ConfigError: The folder holds a run by another recipe.
        CheckpointError: The checkpoint is not there, or none is complete.
    """
    saved, path = folder / "checkpoints", folder / "recipe.json"
    refusal: list[str] | None = None
    if distributed.is_main():
        try:
            if resume == "never":
                shutil.rmtree(saved, ignore_errors=True)
                (folder / "metrics.jsonl").unlink(missing_ok=True)
            elif path.exists():
                _same_run(path, description)
            folder.mkdir(parents=True, exist_ok=True)
            files.write_atomically(path, (json.dumps(description, indent=1) + "\n").encode())
        except ConfigError as error:
            refusal = [error.line, *error.details]
    if refusal := distributed.broadcast_json(refusal):
        raise ConfigError(*refusal)
    given = isinstance(resume, Path)
    found = checkpoint.check(Path(resume)) if given else checkpoint.agree(saved)
    if found:
        run.restore(found)
    if distributed.is_main() and not quiet:
        start = f"goes on from {found.path.name}" if found else "no checkpoint; starts at step 0"
        print(f"{folder.name}: {start}", file=sys.stderr, flush=True)


def _same_run(path: Path, description: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of another recipe."""
    try:
        old = json.loads(path.read_text("utf-8"))
        before = {"model": old["model"], **old["recipe"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{shown(str(path))} is damaged; give another folder, or --resume never to begin again"
        ) from error
    now = {"model": description["model"], **json.loads(json.dumps(description["recipe"]))}
    other = [k for k in {**before, **now} if before.get(k) != now.get(k) and k not in FREE]
    if other:
        key = other[0]
        raise ConfigError(
            f"{shown(path.parent.name)} holds a run with {key} {shown(before.get(key))}, now "
            f"{shown(now.get(key))}; give another folder, or --resume never to begin again",
            *(f"{key}: {shown(before.get(key))}, now {shown(now.get(key))}" for key in other),
        )


def follow(
    run: Resumable, folder: Path, names: Sequence[str], description: Mapping[str, Any]
) -> Tracker:
    """The trackers of the main process; the others have none."""
    if not distributed.is_main():
        return Silent()
    return open_trackers(
        folder, names, description, step=run.position.step, keep=run.position.lines
    )


def write_weights(
    run: Run,
    model: nn.Module,
    name: str,
    metrics: Mapping[str, float],
    rows: Rows | None,
    labels: Sequence[str] | None,
    licence: str | None,
) -> Path:
    """The model as a folder, whose card says how it was made and what was measured."""
    recipe = run.recipe
    card = registry.card_of(run.model)
    old = card.weights[card.tag] if card.tag else None
    base, _, tag = name.partition(".")
    origin = {
        "trained_by": "refzoo",
        "zoo_version": __version__,
        "data": recipe.data or run.batches.rows.name,
        "seed": str(recipe.seed),
        "recipe": json.dumps(described(name, recipe)),
    }
    if recipe.init:
        origin["derived_from"] = recipe.init
    elif old and (source := old.origin.get("derived_from")):
        origin["derived_from"] = source
    names = labels or card.labels
    known = run.batches.rows.labels
    if names is None and known and len(known) == getattr(model.config, "num_classes", None):
        names = known
    auxiliary = {f.name: find_file(card, f.name) for f in old.auxiliary} if old else {}
    setattr(model, "card", replace(card, name=base))  # noqa: B010 (a Module takes only tensors)
    folder = write_folder(
        model,
        run.folder / "weights",
        tag=tag or "trained",
        labels=names,
        licence=licence or (old.licence if old else "not stated"),
        origin=origin,
        auxiliary=auxiliary,
    )
    if metrics and rows is not None:
        own = f"{Path(run.batches.rows.name).name}/validation"
        found = measured(run.task, folder, recipe.validation, own, metrics, len(rows))
        state_metrics(folder, found)
    return folder


def state_metrics(folder: Path, metrics: Iterable[Metric]) -> None:
    """Add numbers to the card of a written model."""
    path = registry.card_file(folder)
    written = cards.read_card(path)
    (key, weights), *_ = written.weights.items()
    weights = replace(weights, metrics=(*weights.metrics, *metrics))
    text = card_text(replace(written, weights={key: weights}))
    files.write_atomically(path, text.encode())


def measured(
    task: Any, weights: Path, place: str, own: str, metrics: Mapping[str, float], n: int
) -> Iterator[Metric]:
    """What a card says of each number.

    Args:
        task: Knows the published sets.
        weights: The folder that was measured.
        place: Where the items are: a part of such a set, or any other place.
        own: What their set and part are called, where they are no published ones.
        metrics: Values by name.
        n: How many items there are.
    """
    name, _, split = place.partition("/")
    dataset: Any = getattr(task, "datasets", {}).get(name)
    known = dataset is not None and split in dataset.files
    if not known:
        place = own
    tolerances: Mapping[str, float] = getattr(task, "tolerances", {})
    for key, value in metrics.items():
        yield Metric(
            name=f"{place}/{key}",
            value=round(value, 6),
            n=n,
            tolerance=tolerances.get(key, TOLERANCE) if known else 0.0,
            data_sha256=dataset.sha256(split) if known else None,
            command=f"python scripts/evaluate.py {weights}" if known else None,
            source=None if known else "measured by the run that made these weights",
        )
