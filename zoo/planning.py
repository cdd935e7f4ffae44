"""What a fine-tuning run will do: its data, its recipe, its cost, known before it begins."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import choices, registry
from zoo.cards import Card, Weights
from zoo.config import build, field_types, plain
from zoo.data.order import seed_of
from zoo.data.rows import Rows
from zoo.errors import ConfigError, shown
from zoo.files import write_atomically
from zoo.groups import freeze
from zoo.inspection import Request, look, places_of, reader_of, starting_point
from zoo.progress import shown_bytes
from zoo.training.optimizers import make_optimizer
from zoo.training.precision import Precision
from zoo.training.recipe import AdamW, Cosine, Recipe, from_plain, to_plain
from zoo.training.run import make_batches, prepare_model
from zoo.training.tracking import shown_time

PLAN = "plan.json"
PLANNED = "trained"  # tag of weights that begin here
COSTS = ("parameters", "trained", "steps_per_epoch", "bytes", "free", "step_s", "read_s", "device")
EVALUATIONS = 2  # of the written weights: their metrics, and every answer for the report
SHOWN = 12  # classes, or findings, that a plan lists
TIMED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done, and what it will cost.

    Attributes:
        request: What was asked for.
        rows: ``train``, ``validation`` and perhaps ``test``.
        left_out: Items of each part of the data that cannot be read.
        findings: What is noteworthy about the data, one a line.
        recipe: How to train; of the task's own type.
        parameters: Of the model.
        trained: Those of them that are trained in the end.
        steps_per_epoch: Of the optimiser.
        bytes: Estimate of the memory that a step takes.
        free: Memory when it was made.
        step_s: Measured seconds of computing one step.
        read_s: Measured seconds in which one process reads its data.
        device: Where it was measured.
        preprocessing: Planned for the data; empty where weights bring their own.
    """

    request: Request
    rows: dict[str, Rows]
    left_out: dict[str, list[int]]
    findings: tuple[str, ...]
    recipe: Recipe
    parameters: int
    trained: int
    steps_per_epoch: int
    bytes: int
    free: int
    step_s: float
    read_s: float
    device: str
    preprocessing: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it; `restored` gives it back."""
        return {
            "request": self.request.plain(),
            "left_out": self.left_out,
            "findings": list(self.findings),
            "recipe": to_plain(self.recipe),
            "preprocessing": plain(self.preprocessing),
            **{name: getattr(self, name) for name in COSTS},
        }

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names in the order of their ids; None where the targets are numbers."""
        return self.rows["train"].classes

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Names that answers take; of data without classes, those of its parts."""
        return self.rows["train"].labels

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return max(1, round(self.recipe.epochs * self.steps_per_epoch))

    @property
    def seconds(self) -> float:
        """Estimate for the whole run: the steps, and evaluations at a third of a step's cost."""
        workers = self.recipe.workers
        step = max(self.step_s, self.read_s / workers) if workers else self.step_s + self.read_s
        every = self.recipe.evaluate_every or self.steps_per_epoch
        measured = self.steps // every + EVALUATIONS
        one = (
            (self.step_s / 3 + self.read_s) * len(self.rows["validation"]) / self.recipe.batch_size
        )
        return self.steps * step + measured * one

    def lines(self) -> list[str]:
        """For people."""
        recipe, request = self.recipe, self.request
        start = "trained weights" if request.pretrained else "random weights"
        learned = "all trained" if self.trained == self.parameters else f"{self.trained:,} trained"
        if recipe.freeze and recipe.freeze_epochs is not None:
            learned += f" after {recipe.freeze_epochs:g} epochs"
        parts = ", ".join(f"{len(rows):,} {part}" for part, rows in self.rows.items())
        lines = [
            f"model     {request.model}, {start}, {self.parameters:,} parameters, {learned}",
            f"data      {request.data}: {parts}",
        ]
        if self.classes:
            lines.append(f"classes   {len(self.classes)}: {self._shown_classes()}")
        more = len(self.findings) - SHOWN
        lines += [f"found     {finding}" for finding in self.findings[:SHOWN]]
        lines += [f"          and {more} more"] if more > 0 else []
        size, parts_of = recipe.batch_size, recipe.microbatches
        batch = f"{size}" if parts_of == 1 else f"{size} in {parts_of} parts"
        optimizer = f"{type(recipe.optimizer).__name__} {recipe.optimizer.lr:g}"
        lines += [
            f"training  {recipe.epochs:g} epochs = {self.steps:,} steps, batch {batch}, "
            f"{optimizer}, {type(recipe.schedule).__name__}, {recipe.precision} on {self.device}",
            f"memory    about {shown_bytes(self.bytes)} of {shown_bytes(self.free)} free",
            f"time      about {shown_time(self.seconds)}: {self.step_s:.2g} s a step and "
            f"{self.read_s:.2g} s to read for it",
        ]
        return lines

    def _shown_classes(self) -> str:
        classes, rows = self.classes or (), self.rows["train"]
        names = [_short(name) for name in classes]
        if rows.classified:
            names = [f"{n} ({c})" for n, c in zip(names, rows.counts(), strict=True)]
        names = names[:SHOWN]
        return ", ".join(names) + (", …" if len(classes) > SHOWN else "")


def make_plan(request: Request, *, device: torch.device) -> Plan:
    """Look at the data and the model, choose what is left open, and time a few real steps.

    Args:
        request: What the caller wants.
        device: Where the run will be.

    Raises:
        DataError: The data cannot be used; the message says why.
        ConfigError: A field of the recipe is unknown or out of range, or the task does not fit.
        UnknownModelError, WeightsError: As `zoo.load`.
    """
    card, _ = registry.resolve(request.model, starting_point(request))
    task_name, reader = reader_of(card, request)
    rows, findings, left_out = look(request, reader, card.labels)
    planned = planned_for(request, card, reader, rows["train"], device)
    config = model_config(request, rows["train"].labels, planned["config"])
    labels, parts = rows["train"].labels, rows["train"].classes is None
    model = load_model(request, task_name, config, planned["preprocessing"], labels, parts)
    task = registry.make_task(model)
    kind: type[Recipe] = getattr(task, "recipe", Recipe)
    given = checked(kind, request.fields)
    own = {**getattr(task, "finetuning", {}), **planned["recipe"]}
    items = len(rows["train"])
    head_only = given.get("freeze") == -1 and given.get("freeze_epochs") is None
    batch_size = {"batch_size": choices.batch_size_for(items), **own, **given}["batch_size"]
    epochs = given.get("epochs", choices.epochs_for(items, batch_size))
    places = places_of(request, task)
    chosen: dict[str, Any] = {
        "data": places["train"],
        "validation": places["validation"],
        "init": card.full_name if starting_point(request) else None,
        "task": task_name or None,
        "epochs": epochs,
        "batch_size": batch_size,
        "evaluate_every": choices.evaluate_every_for(items, batch_size, epochs),
        "clip_norm": 1.0,
        "schedule": Cosine(warmup=0.1),
        "buckets": hasattr(task, "length"),
        "precision": choices.precision_for(device),
        **own,
        **given,
        "config": config,
    }
    if "optimizer" not in given:
        lr = request.lr or choices.lr_for(model, trained=request.pretrained, head_only=head_only)
        chosen["optimizer"] = AdamW(lr=lr)
    elif request.lr is not None:
        chosen["optimizer"] = replace(given["optimizer"], lr=request.lr)
    recipe = build(kind, chosen, where="the recipe")
    costs = cost(recipe, model, task, rows["train"], device, split="microbatches" not in given)
    recipe = replace(recipe, microbatches=costs.pop("microbatches"))
    if "workers" not in given:
        recipe = replace(recipe, workers=choices.workers_for(costs["read_s"], costs["step_s"]))
    return Plan(
        request=request,
        rows=rows,
        left_out=left_out,
        findings=(*findings, *planned["lines"]),
        recipe=recipe,
        preprocessing=planned["preprocessing"],
        **costs,
    )


def planned_for(
    request: Request, card: Card, reader: Any, rows: Rows, device: torch.device
) -> dict[str, Any]:
    """What a task plans for a network that begins at random; nothing where it plans nothing.

    Returns:
        ``config`` of the model, its ``preprocessing``, fields of the ``recipe``, and ``lines``.
    """
    if request.pretrained or not hasattr(reader, "plan"):
        return {"config": {}, "preprocessing": {}, "recipe": {}, "lines": ()}
    known = field_types(registry.config_class(registry.symbol(card.model, card), card))
    budget = int(choices.MEMORY_SHARE * choices.free_bytes(device))
    made: dict[str, Any] = reader.plan(rows, budget, set(known))
    return made


def cost(
    recipe: Recipe, model: nn.Module, task: Any, rows: Rows, device: torch.device, *, split: bool
) -> dict[str, Any]:
    """What a step takes: a small one tells how much is kept, some real ones how long it is.

    Args:
        recipe: How the steps are made.
        model: It is trained a little, and of no use afterwards.
        task: Its task.
        rows: To train on.
        device: Where.
        split: Compute a batch in as many parts as memory wants.

    Returns:
        The fields `COSTS` of a plan, and ``microbatches``.
    """
    parameters, free = sum(p.numel() for p in model.parameters()), choices.free_bytes(device)
    if recipe.freeze and recipe.freeze_epochs is None:
        freeze(model, recipe.freeze)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    prepare_model(model, recipe, device)
    model.train()
    precision = Precision(recipe.precision, device)
    optimizer = make_optimizer(model, recipe)

    def forward(batch: Mapping[str, Tensor]) -> Tensor:
        with precision.autocast():
            total, count = task.loss(model, {n: t.to(device) for n, t in batch.items()})
        mean: Tensor = total / max(int(count), 1)
        return mean

    small = replace(recipe, workers=0, batch_size=min(4, len(rows)), microbatches=1)
    batch = next(make_batches(rows, task, small, device).steps()).batches[0]
    item_bytes = choices.saved_bytes(model, lambda: forward(batch)) // small.batch_size
    count = recipe.microbatches
    if split:
        count = choices.microbatches_for(recipe.batch_size, item_bytes, parameters, free)
    batches = make_batches(rows, task, replace(recipe, workers=0, microbatches=count), device)
    batch = next(batches.steps()).batches[0]
    seconds = []
    for _ in range(TIMED_STEPS):  # the first one is slower: memory is found, kernels are chosen
        began = time.perf_counter()
        precision.backward(forward(batch))
        computed = time.perf_counter() - began
        precision.step(optimizer, list(model.parameters()), recipe.clip_norm)
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began + (count - 1) * computed)
    read_s = batches.wait * count
    return {
        "parameters": parameters,
        "trained": trained,
        "steps_per_epoch": batches.steps_per_epoch,
        "bytes": 4 * choices.OPTIMIZER_COPIES * parameters
        + 2 * item_bytes * -(-recipe.batch_size // count),
        "free": free,
        "step_s": min(seconds),
        "read_s": read_s,
        "device": device.type,
        "microbatches": count,
    }


def model_config(
    request: Request,
    labels: tuple[str, ...] | None,
    planned: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fields of the model's configuration: planned, asked for, and the number of classes."""
    config: dict[str, Any] = {**(planned or {}), **request.fields.get("config", {})}
    return config if labels is None else {**config, "num_classes": len(labels)}


def load_model(
    request: Request,
    task: str,
    config: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    labels: tuple[str, ...] | None,
    parts: bool,
) -> nn.Module:
    """The model to be trained; what is fresh in it is a function of the recipe's seed.

    Args:
        request: Names it.
        task: Name of its task; empty is its own.
        config: Fields of its configuration.
        preprocessing: That was planned, which its card then has; empty keeps the card's.
        labels: Names of the classes, or of the parts of an item, by which they are measured.
        parts: They are of parts; a card without weights is then told them too.
    """
    torch.manual_seed(seed_of(int(request.fields.get("seed", 0))))
    place = registry.located(request.model)
    model = registry.load(place, pretrained=starting_point(request), task=task or None, **config)
    card = registry.card_of(model)
    if not parts and not card.tag:
        labels = None
    tag = card.tag or PLANNED
    weights = card.weights[tag] if card.tag else Weights(licence="not stated")
    if preprocessing:
        weights = replace(weights, preprocessing=dict(preprocessing))
    if labels:
        weights = replace(weights, labels=tag)
    if preprocessing or labels:
        held = {**card.held, tag: labels} if labels else card.held
        card = replace(card, tag=tag, weights={tag: weights}, held=held)
        setattr(model, "card", card)  # noqa: B010 (a Module takes only tensors)
    return model


def write_plan(plan: Plan, folder: Path) -> None:
    """Write ``plan.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PLAN, (json.dumps(plan.plain(), indent=1) + "\n").encode())


def read_plan(request: Request, folder: Path) -> dict[str, Any]:
    """What ``plan.json`` holds; nothing where there is none.

    Raises:
        ConfigError: It is of another request, or damaged.
    """
    path = folder / PLAN
    if not path.exists():
        return {}
    try:
        held: dict[str, Any] = json.loads(path.read_text("utf-8"))
        before = _flat(held["request"])
        if missing := {"left_out", "findings", "recipe", "preprocessing", *COSTS} - held.keys():
            raise KeyError(*missing)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{shown(str(path))} is damaged; give another --out, or --resume never to begin again"
        ) from error
    now = _flat(request.plain())
    for key in {**before, **now}:
        was, wanted = before.get(key), now.get(key)
        if was != wanted:
            what = f"{key} {shown(was, 40)} where it is {shown(wanted, 40)} now"
            if key == "files":
                what = "other files under the same name"
            raise ConfigError(
                f"{shown(str(folder))} holds a run with {what}; give another --out, or "
                "--resume never to begin again"
            )
    return held


def _flat(request: Mapping[str, Any]) -> dict[str, Any]:
    """A plain request with the fields of the recipe among its own."""
    return {**{k: v for k, v in request.items() if k != "fields"}, **request["fields"]}


def restored(held: dict[str, Any], request: Request) -> Plan:
    """The plan that was written, without looking and measuring once more."""
    card, _ = registry.resolve(request.model, starting_point(request))
    _, reader = reader_of(card, request)
    rows, _, left_out = look(request, reader, card.labels, held["left_out"])
    kind: type[Recipe] = getattr(reader, "recipe", Recipe)
    return Plan(
        request=request,
        rows=rows,
        left_out=left_out,
        findings=tuple(held["findings"]),
        recipe=from_plain(kind, held["recipe"], where=PLAN),
        preprocessing=held["preprocessing"],
        **{name: held[name] for name in COSTS},
    )


def checked(kind: type[Recipe], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe, of the right types.

    Raises:
        ConfigError: One is unknown, with the nearest names, or takes another value.
    """
    recipe = build(kind, fields, where="the recipe")
    return {name: getattr(recipe, name) for name in fields}


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19]}…"
