"""What a caller wants to fine-tune on what: the request, the task, and the data, looked through."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from zoo import registry
from zoo.cards import Card
from zoo.config import plain
from zoo.data.rows import Rows, Subset, check, open_rows, parts, split
from zoo.errors import ConfigError, DataError, nearest, shown
from zoo.files import sha256_of
from zoo.saving import is_label

PARTS = ("train", "validation", "test")
SHARE = 0.2  # held out where the data has no validation part


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the caller asked for; two equal ones over the same files are one run.

    Attributes:
        model: Name of a card, with or without a tag, or path of a saved model.
        data: What `zoo.data.rows.open_rows` takes.
        validation: The same, or a share of `data` to hold out, ``20%``; empty means the part of
            `data` that is called so, else `SHARE`.
        task: Name of a task; empty means the model's own, or classification.
        text_column: Of a table; empty means to find it.
        label_column: The same.
        pretrained: Begin with trained weights.
        lr: Learning rate; None means to choose it.
        fields: Of the recipe, as given.
    """

    model: str
    data: str
    validation: str = ""
    task: str = ""
    text_column: str = ""
    label_column: str = ""
    pretrained: bool = True
    lr: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it, with the state of the files."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["fields"] = {name: plain(value) for name, value in self.fields.items()}
        values["files"] = fingerprint(self.data, self.validation)
        made: dict[str, Any] = json.loads(json.dumps(values))
        return made


def starting_point(request: Request) -> bool | None:
    """What `zoo.load` calls ``pretrained``."""
    if not request.pretrained:
        return False
    return True if isinstance(registry.located(request.model), str) else None


def reader_of(card: Card, request: Request) -> tuple[str, Any]:
    """Name of the task that is learnt, empty if it is the model's own, and an instance that reads.

    A model that gives vectors or words learns to classify, unless another task is asked for.
    """
    own = registry.symbol(card.task, card).name
    beside = registry.tasks_beside(card)
    wanted = request.task
    if not wanted:
        classifies = [name for name in beside if name.endswith("-classification")]
        wanted = own if own in classifies or len(classifies) != 1 else classifies[0]
    if wanted not in beside:
        raise ConfigError(
            f"{card.full_name} does not do {shown(wanted)};{nearest(wanted, beside)} it does "
            f"{', '.join(sorted(beside))}"
        )
    task = registry.task_of(replace(card, task=beside[wanted]))
    return ("" if wanted == own else wanted), task


def look(
    request: Request,
    task: Any,
    labels: tuple[str, ...] | None = None,
    unreadable: dict[str, list[int]] | None = None,
) -> tuple[dict[str, Rows], tuple[str, ...], dict[str, list[int]]]:
    """The rows of every part, what was found about them, and the items that are left out.

    Args:
        request: Names the data.
        task: Reads them.
        labels: Classes of the model. Data of the same classes keep their order, and so the trained
            head keeps its meaning.
        unreadable: Items of each part that are known to be; None reads all of them to find out.

    Raises:
        DataError: There is nothing to learn: no data, or one class.
    """
    found = places_of(request, task)
    share = share_of(found["validation"])
    open_part = partial(
        open_rows,
        task=task,
        text_column=request.text_column or None,
        label_column=request.label_column or None,
    )
    rows: dict[str, Rows] = {}
    findings: list[str] = []
    left_out: dict[str, list[int]] = {}
    for part in (p for p in PARTS if p in found and not (p == "validation" and share)):
        opened = open_part(found[part], classes=rows["train"].classes if rows else None)
        if not rows and opened.classes and sorted(opened.classes) == sorted(labels or ()):
            opened = open_part(found[part], classes=labels)
        if unreadable is None:
            # As it is learnt: what embeds single texts learns from pairs of them.
            whole = SimpleNamespace(read=lambda raw: task.example(raw, 0), example=task.example)
            if hasattr(task, "check"):
                whole = task
            report, rows[part] = check(opened, whole)
            left_out[part] = [index for index, _, _ in report.unreadable]
            findings += report.lines()
        else:
            left_out = unreadable
            kept = np.setdiff1d(np.arange(len(opened)), unreadable[part])
            rows[part] = Subset(opened, kept)
        if part == "train":
            rows[part] = with_classes(rows[part])
    if share:
        seed = int(request.fields.get("seed", 0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows["train"], rows["validation"] = split(rows["train"], share, seed)
        findings += [str(warning.message) for warning in caught]
        of = "of each class " if rows["train"].classes else ""
        findings.append(f"{share:.0%} {of}are held out for validation")
    if Path(request.data).exists():
        rows["train"].name = Path(request.data).resolve().name  # the card's numbers are called so
    return rows, tuple(findings), left_out


def places_of(request: Request, task: Any) -> dict[str, str]:
    """Where every part lies; of the validation part it may be the share to hold out, ``20%``."""
    found = {"train": request.data}
    name, _, part = request.data.partition("/")
    dataset = getattr(task, "datasets", {}).get(name) if part else None
    if dataset:
        found |= {p: f"{name}/{p}" for p in dataset.files if part == "train" and p in PARTS}
    elif Path(request.data).exists():
        found = parts(request.data)
    return found | {"validation": request.validation or found.get("validation", f"{SHARE:.0%}")}


def share_of(text: str) -> float | None:
    """0.2 of ``20%``; None of a place.

    Raises:
        ConfigError: It is no share between 0 and 1.
    """
    if not text.endswith("%") or Path(text).exists():
        return None
    with suppress(ValueError):
        if 0 < (share := float(text[:-1]) / 100) < 1:
            return share
    raise ConfigError(f"validation is {shown(text)}; it takes a place, or a share such as '20%'")


def with_classes(rows: Rows) -> Rows:
    """Rows whose classes all have items.

    Raises:
        DataError: Only one class has, or a name cannot be written as a label.
    """
    if rows.classes is None:
        return rows
    for name in rows.classes:
        if not is_label(name):
            raise DataError(
                f"the class {shown(name)} of {shown(rows.name)} is empty or unprintable; give it a "
                "name of one line"
            )
    used = np.flatnonzero(rows.counts())
    if len(used) < 2:
        raise DataError(
            f"{shown(rows.name)} has one class with items, {shown(rows.classes[used[0]])}; "
            "give at least two"
        )
    left = Subset(rows, np.arange(len(rows)))
    left.classes = tuple(rows.classes[index] for index in used)
    left.targets = np.searchsorted(used, rows.targets)
    return left


def fingerprint(*places: str) -> str:
    """SHA-256 of the files of some places: of a table its bytes, of a folder names and sizes."""
    digest = hashlib.sha256()
    for place in map(Path, filter(None, places)):
        if place.is_file():
            digest.update(sha256_of(place).encode())
        for folder, folders, names in os.walk(place):
            folders.sort()
            for path in (Path(folder, name) for name in sorted(names)):
                with suppress(OSError):  # gone meanwhile, or a dangling link
                    entry = f"{path.relative_to(place)}\0{path.stat().st_size}\0"
                    digest.update(os.fsencode(entry))
    return digest.hexdigest()
