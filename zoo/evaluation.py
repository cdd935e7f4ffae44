"""Measure again what a card says, on the data set that the metric names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo import registry, tensorfile
from zoo.cards import Card, Metric
from zoo.data import Dataset, Made
from zoo.errors import CardError, ConfigError, UnknownModelError, nearest, shown
from zoo.pipeline import Pipeline, pipeline

TOLERANCE = 0.002  # of a number that the card does not state yet


@dataclass(frozen=True)
class Measured:
    """A metric measured now beside what the card says."""

    model: str
    metric: str
    value: float
    n: int
    data_sha256: str | None  # none where the numbers come from no file
    stated: Metric | None
    tolerance: float = TOLERANCE  # if nothing is stated yet

    @property
    def same_data(self) -> bool:
        """True unless the card's number was measured on other bytes of the set."""
        return self.stated is None or self.stated.data_sha256 in (None, self.data_sha256)

    @property
    def passed(self) -> bool:
        """True if the value is within the card's tolerance, or nothing is stated."""
        return self.stated is None or abs(self.value - self.stated.value) <= self.stated.tolerance

    def __str__(self) -> str:
        """One line."""
        line = f"{self.model} {self.metric} {self.value:.4f} on {self.n:,}"
        if self.stated is None:
            return line + " (not on the card)"
        note = "" if self.same_data else ", measured on other bytes of this set"
        verdict = "as stated" if self.passed else "NOT AS STATED"
        return f"{line}, card {self.stated.value:.4f} ± {self.stated.tolerance:g}{note}: {verdict}"


def evaluate(name: str, *, data: str | None = None) -> Iterator[Measured]:
    """Measure the numbers on a card, or those of one data set.

    Args:
        name: A model, without a tag its default weights; or a folder that `zoo.save` wrote.
        data: ``"imagenet-sample/validation"``: every metric of the task on this set and split. By
            default each set that the card names with a command.

    Raises:
        UnknownModelError, ConfigError, DataError, WeightsError: As elsewhere.
    """
    card, _ = registry.resolve(name, True)
    stated = {m.name: m for m in card.weights[card.tag or ""].metrics if m.command}
    wanted = [data] if data else list(dict.fromkeys(n.rpartition("/")[0] for n in stated))
    if not wanted:
        raise ConfigError(
            f"{card.full_name} states no number that is measured here; name a set with --data"
        )
    pipe = pipeline(name)
    for place in wanted:
        values, n, digest, tolerance = _measure(pipe, place)
        for metric, value in values.items():
            full = f"{place}/{metric}"
            if data or full in stated:
                old = stated.get(full)
                yield Measured(card.full_name, full, value, n, digest, old, tolerance)


def write_metrics(measured: list[Measured]) -> Path:
    """Write measured values into their card, leaving every other line as it is.

    A metric that the card does not state yet gets a table of its own.
    """
    import tomlkit

    from zoo.cards import CARDS
    from zoo.saving import write_document

    stem, _, tag = measured[0].model.partition(".")
    path = CARDS / f"{stem}.toml"
    document: Any = tomlkit.parse(path.read_text("utf-8"))
    entries = document["weights"][tag].setdefault("metrics", tomlkit.aot())
    for result in measured:
        entry = next((e for e in entries if e["name"] == result.metric), None)
        if entry is None:
            entry = tomlkit.table()
            entry["name"] = result.metric
            entries.append(entry)
        entry["value"], entry["n"] = round(result.value, 4), result.n
        entry.setdefault("tolerance", round(result.tolerance, 4))
        if result.data_sha256:
            entry["data_sha256"] = result.data_sha256
        entry.setdefault("command", f"python scripts/evaluate.py {result.model}")
    write_document(path, document)
    return path


def write_golden(name: str) -> Path:
    """Store an input and this model's outputs beside the card, for `check_golden`."""
    import torch

    from zoo.examples import example_inputs

    model = registry.load(name, pretrained=True)
    card = registry.card_of(model)
    golden = card.weights[card.tag or ""].golden
    if golden is None:
        raise CardError(f"card {card.name} names no golden file under weights.{card.tag}")
    inputs = example_inputs(card.inputs)
    with torch.no_grad():
        outputs = model(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors = {f"input.{n}": t for n, t in inputs.items()}
    tensors |= {f"output.{n}": t for n, t in zip(card.outputs, outputs, strict=True)}
    path = card.folder / golden
    tensorfile.write(path, tensors, {"model": card.full_name})
    return path


def evaluated_cards() -> list[Card]:
    """Every set of installed weights, narrowed to it."""
    from zoo.cards import card, list_models

    return [
        found.with_tag(tag)
        for found in map(card, list_models())
        for tag in registry.installed_tags(found)
    ]


def _measure(pipe: Pipeline, place: str) -> tuple[dict[str, float], int, str | None, float]:
    """Values on a set and split, items, hash of the set, tolerance of a number not stated yet.

    A task without data sets, as one of environments, measures itself by its ``trial``.
    """
    if hasattr(pipe.task, "trial"):
        values, n, tolerance = pipe.task.trial(pipe.model, place)
        return values, n, None, tolerance
    dataset, split = _dataset(pipe, place)
    counted = _Counted(dataset.examples(split))
    values = pipe.task.measure(pipe, counted)
    return values, counted.n, dataset.sha256(split), TOLERANCE


def _dataset(pipe: Pipeline, place: str) -> tuple[Dataset | Made, str]:
    name, _, split = place.partition("/")
    sets: dict[str, Dataset | Made] = pipe.task.datasets
    if name not in sets:
        raise UnknownModelError(
            f"{pipe.task.name} knows no data set {shown(name)};{nearest(name, sets)} it knows "
            f"{', '.join(sets)}"
        )
    return sets[name], split


class _Counted:
    """Passes examples through and counts them."""

    def __init__(self, examples: Iterator[Any]) -> None:
        self.examples = examples
        self.n = 0

    def __iter__(self) -> Iterator[Any]:
        for example in self.examples:
            self.n += 1
            yield example
