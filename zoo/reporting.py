"""What a fine-tuning run shows at its end: confusion matrix, learning curves, the worst errors."""

from __future__ import annotations

import csv
import heapq
import io
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.errors import ConfigError, DataError, shown
from zoo.files import write_atomically

WORST = 100  # errors that are kept
NAMED = 40  # classes whose names fit on the axes of a picture
COUNTED = 20  # classes whose counts fit into its cells
DPI = 120


@dataclass(frozen=True)
class Mistake:
    """An item whose most probable class is not its own."""

    item: str  # path, or text
    true: str
    predicted: str
    probability: float  # of the predicted class
    true_probability: float  # of the true class; the smaller, the worse


@dataclass
class Confusion:
    """Counts of true against predicted classes, and the worst errors among them.

    Attributes:
        labels: Names of the classes in the order of their indices.
        counts: int64, shape (classes, classes): rows are the true class, columns the predicted one.
    """

    labels: Sequence[str]
    worst: int = WORST
    counts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.labels) < 2:
            raise ConfigError(f"{len(self.labels)} classes cannot be confused; give two or more")
        self.counts = np.zeros((len(self.labels), len(self.labels)), np.int64)
        self._mistakes: list[tuple[float, int, Mistake]] = []
        self._order = count()

    def add(self, item: str, target: int, answer: Sequence[Mapping[str, Any]]) -> None:
        """Count one item.

        Args:
            item: How the list of errors calls it.
            target: Index of its class.
            answer: Every class as `zoo.ranking.ranked` gives it, best first.

        Raises:
            DataError: There is no class of this index.
        """
        if not 0 <= target < len(self.labels):
            raise DataError(
                f"{shown(item)} has the class {target}; the model has 0 to {len(self.labels) - 1}"
            )
        best = answer[0]
        self.counts[target, best["index"]] += 1
        if best["index"] == target:
            return
        own = next((r["score"] for r in answer if r["index"] == target), 0.0)
        names = self.labels[target], self.labels[best["index"]]
        mistake = Mistake(item, *names, float(best["score"]), float(own))
        # A heap whose first entry is the least bad one; of equals, the one that came last.
        entry = (-own, -next(self._order), mistake)
        keep = heapq.heappush if len(self._mistakes) < self.worst else heapq.heappushpop
        keep(self._mistakes, entry)

    @property
    def total(self) -> int:
        """Items counted."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """Share of items on the diagonal, in [0, 1]; NaN of none."""
        return float(np.trace(self.counts) / self.total) if self.total else float("nan")

    @property
    def mistakes(self) -> list[Mistake]:
        """The worst errors, those with the least probable true class first."""
        return [mistake for *_, mistake in sorted(self._mistakes, reverse=True)]

    def of_classes(self) -> list[tuple[str, int, float, float]]:
        """For each class its name, items, precision and recall; NaN where nothing was counted."""
        right = np.diagonal(self.counts)
        with np.errstate(invalid="ignore"):
            precision, recall = right / self.counts.sum(0), right / self.counts.sum(1)
        rows = zip(self.labels, self.counts.sum(1), precision, recall, strict=True)
        return [(name, int(n), float(p), float(r)) for name, n, p, r in rows]

    def pairs(self, most: int = 5) -> list[tuple[str, str, int]]:
        """The classes confused most often: the true one, the predicted one, how often."""
        off = self.counts - np.diag(np.diagonal(self.counts))
        order = np.argsort(-off, axis=None, kind="stable")[:most]
        found = [divmod(int(i), len(self.labels)) for i in order]
        return [(self.labels[t], self.labels[p], int(off[t, p])) for t, p in found if off[t, p]]


def write_worst(path: Path, mistakes: Iterable[Mistake]) -> None:
    """The worst errors as CSV, the worst first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["item", "true", "predicted", "probability", "true_probability"])
    for m in mistakes:
        row = [m.item, m.true, m.predicted, f"{m.probability:.4f}", f"{m.true_probability:.2e}"]
        writer.writerow(row)
    write_atomically(path, text.getvalue().encode("utf-8", "backslashreplace"))


def draw_confusion(path: Path, confusion: Confusion, title: str) -> None:
    """The matrix as a PNG, coloured by the share of each row, with counts in its cells.

    Names are left out beyond `NAMED` classes, counts beyond `COUNTED`.
    """
    from matplotlib.figure import Figure

    size = len(confusion.labels)
    side = min(4 + 0.35 * size, 16)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    rows = confusion.counts.sum(1, keepdims=True)
    shares = np.divide(confusion.counts, rows, out=np.zeros((size, size)), where=rows > 0)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    _label(axes.set_title, f"{title}: {confusion.accuracy:.4f} of {confusion.total:,} right")
    axes.set(xlabel="predicted", ylabel="true")
    if size <= NAMED:
        names = [_short(name) for name in confusion.labels]
        axes.set_xticks(range(size), names, rotation=90, parse_math=False)
        axes.set_yticks(range(size), names, parse_math=False)
    else:
        axes.set(xticks=[], yticks=[])
    if size <= COUNTED:
        for (row, column), number in np.ndenumerate(confusion.counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            if number:
                axes.text(column, row, str(number), ha="center", va="center", color=colour)
    _save(figure, path)


def draw_curves(
    path: Path, records: Sequence[Mapping[str, Any]], panels: Sequence[Sequence[str]]
) -> None:
    """Learning curves as a PNG: one panel a group of names, over the steps.

    Args:
        path: The file.
        records: Lines of ``metrics.jsonl``: each with ``step`` and some of the names.
        panels: Names that share a panel; one that no record has is left out.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    found = [[name for name in names if any(name in r for r in records)] for names in panels]
    found = [names for names in found if names]
    if not found:
        raise DataError("the run logged nothing that could be drawn; train at least one step")
    figure = Figure(figsize=(8, 3 * len(found) + 0.5), layout="constrained")
    for axes, names in zip(
        figure.subplots(len(found), sharex=True, squeeze=False).flat, found, strict=True
    ):
        for name in names:
            points = [(r["step"], r[name]) for r in records if name in r]
            # a value that is written seldom is seen as points; one of every step is a line
            marker = "o" if len(points) < 50 else None
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, marker=marker, markersize=3, linewidth=1, label=name)
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    _save(figure, path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl``; a last line that a killed run left unfinished is passed over.

    Raises:
        DataError: The file is not there, or another line of it is no JSON object.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {shown(str(path))}: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"line {number} of {shown(str(path))} is no record: {error}") from error
        records.append(record)
    return records


def _short(name: str, limit: int = 24) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _label(setter: Any, text: str) -> None:
    setter(_short(text, 90), parse_math=False)


def _save(figure: Any, path: Path) -> None:
    """The picture as PNG, whole or not at all."""
    content = io.BytesIO()
    with warnings.catch_warnings():  # letters that the font lacks show as boxes
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(content, format="png", dpi=DPI)
    write_atomically(path, content.getvalue())
