"""Examples by their number: published sets, folders of classes, and tables of the user's own."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.data.labels import answers, class_ids, hub_names, numbers
from zoo.data.tables import SUFFIXES, choose_columns, read_parquet, read_table
from zoo.errors import ConfigError, DataError, nearest, shown

# Folder or file of a part -> the part.
PARTS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
}


class Rows(ABC):
    """Raw inputs with their targets, each by its number.

    Attributes:
        name: Where they come from, for people.
        classes: Name of every class in the order of the ids; None where targets are no classes.
        targets: Of every item: class ids (int64), numbers (float64), or objects: texts, or parts of
            the input with a class each.
    """

    name: str
    classes: tuple[str, ...] | None
    targets: NDArray[Any]

    @property
    def classified(self) -> bool:
        """True where each item is of one class."""
        return self.classes is not None and self.targets.dtype != object

    @abstractmethod
    def raw(self, index: int) -> Any:
        """The raw input of an item, as its task reads it."""

    def where(self, index: int) -> str:
        """What an error calls an item: its path, or its row."""
        return f"{self.name}, row {index}"

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Names that answers take: the classes of the items, or of what an item consists of."""
        return self.classes

    def describe(self, index: int) -> str:
        """An item for people: a text itself, two with a bar between them; else where it is."""
        raw = self.raw(index)
        texts = raw if isinstance(raw, tuple) else (raw,)
        is_text = all(isinstance(text, str) for text in texts)
        return " | ".join(texts) if is_text else self.where(index)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        index = range(len(self))[index]
        target = self.targets[index]
        return self.raw(index), target.item() if isinstance(target, np.generic) else target

    def counts(self) -> NDArray[np.int64]:
        """Number of items of every class, where they are `classified`."""
        return np.bincount(self.targets, minlength=len(self.classes or ()))


class ListRows(Rows):
    """Rows that lie in memory as Python objects, in the order of the examples."""

    def __init__(
        self,
        name: str,
        examples: Iterable[tuple[Any, Any]],
        classes: tuple[str, ...] | None = None,
    ) -> None:
        self.name, self.classes = name, classes
        pairs = list(examples)
        self._raws = [raw for raw, _ in pairs]
        self.targets = _array([target for _, target in pairs])

    def raw(self, index: int) -> Any:
        """The object itself."""
        return self._raws[index]


class TableRows(Rows):
    """Rows of an arrow table: the bytes stay where arrow put them, and forks share them."""

    def __init__(
        self,
        name: str,
        table: Any,
        columns: Sequence[str],
        targets: NDArray[Any],
        classes: tuple[str, ...] | None,
    ) -> None:
        import pyarrow
        from pyarrow import compute

        self.name, self.classes, self.targets = name, classes, targets
        found = [table.column(column) for column in columns]
        self._columns = [
            compute.struct_field(column, "bytes")
            if pyarrow.types.is_struct(column.type)
            else column
            for column in found
        ]
        for column, title in zip(self._columns, columns, strict=True):
            if column.null_count:
                first = compute.index(column.is_null(), True).as_py()
                raise DataError(
                    f"{name}: {column.null_count} rows have nothing in the column {shown(title)}, "
                    f"the first is row {first}; fill or remove them"
                )

    def raw(self, index: int) -> Any:
        """Text or bytes; of two columns, a tuple."""
        values = tuple(column[index].as_py() for column in self._columns)
        return values if len(values) > 1 else values[0]


class FileRows(Rows):
    """One file an item."""

    def __init__(
        self, name: str, paths: list[str], targets: NDArray[Any], classes: tuple[str, ...]
    ) -> None:
        self.name, self.classes, self.targets = name, classes, targets
        self.paths = paths

    def raw(self, index: int) -> str:
        """The path."""
        return self.paths[index]

    def where(self, index: int) -> str:
        """The path."""
        return shown(self.paths[index], 120)


class Subset(Rows):
    """Some rows of others."""

    def __init__(self, rows: Rows, indices: NDArray[np.int64], name: str | None = None) -> None:
        self.rows, self.indices = rows, indices
        self.name, self.classes = name or rows.name, rows.classes
        self.targets = rows.targets[indices]

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Those of the whole set, without classes that are left out here."""
        return self.rows.labels if self.classes is None else self.classes

    def raw(self, index: int) -> Any:
        """As the whole set gives it."""
        return self.rows.raw(int(self.indices[index]))

    def where(self, index: int) -> str:
        """Where it is in the whole set."""
        return self.rows.where(int(self.indices[index]))


def open_rows(
    place: str | os.PathLike[str],
    task: Any,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
) -> Rows:
    """The rows of a published set, a folder or a table.

    Args:
        place: ``"cifar10/train"``: a set of ``task.datasets``, whatever the working directory
            holds (write ``./cifar10/train`` for a folder). A folder with one folder a class. A
            CSV, TSV, parquet or JSON-lines file, or a folder with ``train.csv``. Of a place with
            several parts, see `parts`, the one for training.
        task: Says by ``suffixes`` which files it reads, and by ``target`` what it learns.
        text_column: Column of the input in a table; ``"a,b"`` for pairs. Found if it is clear.
        label_column: Column of the target; the same.
        classes: Names in the order of their ids, for example of the model to be continued. By
            default the names that occur, sorted; whole numbers are sorted as numbers.

    Raises:
        DataError: There is no such place, or it is not clear what it holds.
    """
    name, _, part = str(place).partition("/")
    dataset = getattr(task, "datasets", {}).get(name)
    if dataset is not None and part:
        return _published(dataset, part, classes)
    path = Path(place)
    if not path.exists():
        sets = [f"{d.name}/{part}" for d in task.datasets.values() for part in d.files]
        raise DataError(
            f"there is no {shown(str(place))};{nearest(str(place), sets)} give a folder, a file, "
            f"or a set: {shown(', '.join(sets), 80)}"
        )
    tables = tables_of(task)
    path = Path(parts(path, tables)["train"])
    if path.is_dir():
        return _folder(path, task, classes)
    if path.suffix.lower() not in tables:
        raise DataError(
            f"{shown(str(path))} is no table; give a folder, or a file ending in "
            f"{', '.join(tables)}"
        )
    if hasattr(task, "open_file"):
        opened: Rows = task.open_file(path, classes)
        return opened
    return _from_table(path, task, text_column, label_column, classes)


def tables_of(task: Any) -> tuple[str, ...]:
    """Suffixes of files with many items: those that a task's own `open_file` reads, else tables."""
    found: tuple[str, ...] = getattr(task, "tables", SUFFIXES)
    return found


def parts(place: str | os.PathLike[str], tables: tuple[str, ...] = SUFFIXES) -> dict[str, str]:
    """Where the parts ``train``, ``validation`` and ``test`` of a place lie.

    A folder has parts if it holds nothing but folders of such names (``val``, ``valid`` and ``dev``
    mean validation) that hold folders themselves, or tables of such names, ``train.csv`` first.
    Everything else is one part, ``train``.

    Raises:
        DataError: Two folders or files claim the same part.
    """
    path = Path(place)
    entries = _entries(path) if path.is_dir() else []
    folders = [entry for entry in entries if entry.is_dir()]
    files = [e for e in entries if e.is_file() and e.suffix.lower() in tables]
    named = [e for e in folders if e.name.lower() in PARTS]
    if len(named) == len(folders) and all(any(s.is_dir() for s in _entries(e)) for e in named):
        found = named
    else:
        found = []
    found = found or [e for e in files if e.stem.lower() in PARTS]
    result: dict[str, str] = {}
    for entry in found:
        part = PARTS[entry.stem.lower()]
        if part in result:
            raise DataError(
                f"{shown(str(path))} holds {shown(Path(result[part]).name)} and "
                f"{shown(entry.name)}, which both mean {part}; leave one there"
            )
        result[part] = str(entry)
    if "train" in result:
        return result
    if not folders and len(files) == 1:
        return {"train": str(files[0])}
    return {"train": str(path)}


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


def split(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Rows for training, and a held-out share of every class.

    The held-out part has ``round(share * n)`` items, shared out by the largest remainders; every
    class keeps at least one item for training. Targets that are no classes are one class.

    Args:
        rows: Of one part.
        share: In (0, 1).
        seed: Any int.

    Raises:
        DataError: The share is no share, or leaves one part empty.
    """
    from zoo.data.order import permutation

    if not 0 < share < 1:
        raise DataError(f"the share to hold out is {share}; it lies between 0 and 1")
    counts = rows.counts() if rows.classified else np.array([len(rows)])
    ids = rows.targets if rows.classified else np.zeros(len(rows), np.int64)
    names = (rows.classes or ()) if rows.classified else ()
    if lonely := [name for name, n in zip(names, counts, strict=False) if n == 1]:
        warnings.warn(
            f"{len(lonely)} classes have one item, which goes to training and is never measured: "
            f"{shown(', '.join(lonely), 80)}",
            stacklevel=2,
        )
    quota = _quotas(counts, share)
    order = permutation(seed, 0, len(rows))
    held = np.concatenate([order[ids[order] == label][:n] for label, n in enumerate(quota)])
    kept = np.setdiff1d(np.arange(len(rows)), held)
    if not len(held) or not len(kept):
        raise DataError(
            f"{rows.name} has {len(rows)} items, too few to hold out {share:.0%}; give more, or "
            "a set of its own with --validation"
        )
    return Subset(rows, kept), Subset(rows, np.sort(held), f"{rows.name}, held out")


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        items: Number of items looked at.
        unreadable: Number, place and reason of every item that cannot be read.
        empty: Classes without a readable item.
        single: Classes with one.
        formats: Number of files of each suffix; empty where items are no files.
    """

    items: int
    unreadable: list[tuple[int, str, str]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    single: list[str] = field(default_factory=list)
    formats: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people, one a finding; none where everything is in order."""
        found = [f"unreadable, left out: {where}: {reason}" for _, where, reason in self.unreadable]
        found += [f"the class {shown(name)} has no readable item" for name in self.empty]
        found += [f"the class {shown(name)} has one item" for name in self.single]
        if len(self.formats) > 1:
            counts = ", ".join(f"{n} {suffix}" for suffix, n in self.formats.items())
            found.append(f"mixed formats, all read alike: {counts}")
        return found


def check(rows: Rows, task: Any) -> tuple[Report, Rows]:
    """Read every item once; gives what was found, and the rows without the unreadable ones.

    A task whose targets can be unreadable too looks at both in `check`.

    Raises:
        DataError: No item is readable.
    """
    unreadable = []
    examine = getattr(task, "examine", lambda raw, _: task.read(raw))
    for index in range(len(rows)):
        try:
            examine(*rows[index])
        except DataError as error:
            unreadable.append((index, rows.where(index), error.line))
    kept = np.setdiff1d(np.arange(len(rows)), [index for index, _, _ in unreadable])
    if not len(kept):
        reasons = [f"{where}: {reason}" for _, where, reason in unreadable]
        raise DataError(f"none of the {len(rows)} items of {rows.name} can be read", *reasons)
    left = Subset(rows, kept) if unreadable else rows
    known = left.classified
    pairs = list(zip(left.classes or (), left.counts(), strict=True)) if known else []
    suffixes = Counter(Path(path).suffix.lower() for path in getattr(rows, "paths", ()))
    report = Report(
        items=len(rows),
        unreadable=unreadable,
        empty=[name for name, n in pairs if n == 0],
        single=[name for name, n in pairs if n == 1],
        formats=dict(suffixes.most_common()),
    )
    return report, left


def _published(dataset: Any, part: str, classes: Sequence[str] | None) -> Rows:
    """A split of a published set, by its own class names unless others are given."""
    name = f"{dataset.name}/{part}"
    if hasattr(dataset, "rows"):  # a set whose splits are not files
        opened: Rows = dataset.rows(part)
        return opened
    if not dataset.columns or (path := dataset.path(part)).suffix != ".parquet":
        return ListRows(name, dataset.examples(part), tuple(classes) if classes else None)
    from pyarrow import ArrowInvalid

    *inputs, label = dataset.columns
    try:
        table = read_parquet(path, dataset.columns)
    except ArrowInvalid as error:
        raise DataError(f"{shown(str(path))} is damaged; get the published file") from error
    if lacking := [c for c in dataset.columns if c not in table.column_names]:
        raise DataError(f"{shown(str(path))} lacks the column {lacking[0]}; get the published file")
    targets = table.column(label).to_numpy()
    if targets.dtype.kind in "iu":
        names = classes or hub_names(table, label) or map(str, range(targets.max(initial=-1) + 1))
        return TableRows(name, table, inputs, targets.astype(np.int64), tuple(names))
    return TableRows(name, table, inputs, targets.astype(np.float64), None)


def _folder(root: Path, task: Any, classes: Sequence[str] | None) -> Rows:
    """One folder a class; within it, files of the task's suffixes at any depth.

    A task whose items lie in folders of another layout opens them itself, in `open_folder`.
    """
    if hasattr(task, "open_folder"):
        opened: Rows = task.open_folder(root)
        return opened
    suffixes: tuple[str, ...] = getattr(task, "suffixes", ())
    if not suffixes:
        raise DataError(
            f"{shown(str(root))} is a folder; {task.name} takes a table: a file ending in "
            f"{', '.join(tables_of(task))}"
        )
    folders = sorted((e for e in _entries(root) if e.is_dir()), key=lambda e: e.name)
    if not folders:
        raise DataError(
            f"{shown(str(root))} holds no folders; make one for each class, with its name, and put "
            "the files of the class into it"
        )
    names = tuple(classes) if classes is not None else tuple(e.name for e in folders)
    ids = {name: index for index, name in enumerate(names)}
    paths: list[str] = []
    targets: list[int] = []
    for folder in folders:
        if folder.name not in ids:
            raise DataError(
                f"{shown(folder.name)} in {shown(root.name)} is no class of the model;"
                f"{nearest(folder.name, names)} it has {shown(', '.join(names), 60)}"
            )
        found = _files(folder, suffixes)
        paths += found
        targets += [ids[folder.name]] * len(found)
    if not paths:
        raise DataError(
            f"no file in the folders of {shown(str(root))} ends in {', '.join(suffixes)}; "
            "check the path"
        )
    return FileRows(str(root), paths, np.array(targets, np.int64), names)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    return sorted(
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(suffixes) and not name.startswith(".")
    )


def _from_table(
    path: Path, task: Any, text_column: str | None, label_column: str | None, classes: Any
) -> Rows:
    """Rows of a user's table, its labels turned into ids or numbers, or left as texts."""
    table, kind = read_table(path), getattr(task, "target", "class")
    inputs, label = choose_columns(
        table,
        path.name,
        text_column=text_column,
        label_column=label_column,
        pair=kind == "number",
        answer=kind == "text",
    )
    where = f"{path.name}, column {shown(label, 30)}"
    values = table.column(label).to_pylist()
    if kind == "number":
        return TableRows(path.name, table, inputs, numbers(values, where), None)
    if kind == "text":
        return TableRows(path.name, table, inputs, answers(values, where), None)
    names, targets = class_ids(values, where, hub=hub_names(table, label), classes=classes)
    return TableRows(path.name, table, inputs, targets, names)


def _quotas(counts: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """How many items of each class to hold out: `share` of all, by the largest remainders."""
    room, exact = np.maximum(counts - 1, 0), counts * share
    quota: NDArray[np.int64] = np.minimum(np.floor(exact), room).astype(np.int64)
    while quota.sum() < min(round(float(exact.sum())), room.sum()):
        quota[np.argmax(np.where(quota < room, exact - quota, -np.inf))] += 1
    return quota


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, without what hides or was left by a system."""
    return sorted(e for e in folder.iterdir() if not e.name.startswith((".", "__MACOSX")))


def _array(targets: Sequence[Any]) -> NDArray[Any]:
    kinds = {type(target) for target in targets}
    if kinds <= {int}:
        return np.array(targets, np.int64)
    if kinds <= {int, float}:
        return np.array(targets, np.float64)
    array = np.empty(len(targets), dtype=object)
    array[:] = targets
    return array
