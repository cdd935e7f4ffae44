"""A recipe carried out: model, data, loop, weights with their card, all in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import cards, registry
from zoo.cards import Card
from zoo.data.caching import cached
from zoo.data.loader import Batches
from zoo.data.order import Order, balanced, bucketed, progressive, seed_of
from zoo.data.rows import Rows, open_rows, share_of, split
from zoo.errors import ConfigError, UnknownModelError, nearest, shown
from zoo.training import checkpoint, distributed
from zoo.training.evaluation import Evaluation
from zoo.training.folder import Resume, begin, described, follow, write_weights
from zoo.training.loop import fit
from zoo.training.recipe import Recipe
from zoo.training.state import Interrupted, Run, replicas, seed_everything
from zoo.training.tracking import Progress


@dataclass(frozen=True)
class Result:
    """What a run has come to.

    Attributes:
        folder: Of the run: ``recipe.json``, ``metrics.jsonl``, ``checkpoints/``, ``weights/``.
        metrics: Of the written weights on the validation items; empty without any.
        best: Step and value of the best evaluation, by the metric that decides; None without any.
        steps: Taken in all.
    """

    folder: Path
    metrics: dict[str, float]
    best: tuple[int, float] | None
    steps: int

    @property
    def weights(self) -> Path:
        """Folder for `zoo.load` and `zoo.pipeline`."""
        return self.folder / "weights"


def train(
    model: str | nn.Module,
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: Resume = "auto",
    rows: Rows | None = None,
    validation_rows: Rows | None = None,
    labels: Sequence[str] | None = None,
    licence: str | None = None,
    device: str | torch.device | None = None,
    trackers: Sequence[str] = ("tensorboard",),
    quiet: bool = False,
) -> Result:
    """Train a model by a recipe, on one process or, under ``torchrun``, on many.

    The written weights are those of the last step, or of the best evaluation where the recipe has
    `patience`; their average where it has `ema`. What their card says was measured on them.

    Args:
        model: A name, built as the recipe says; with a tag, as the card says of it. Or a model that
            `zoo.load` gave, trained as it is.
        recipe: How.
        folder: Of the run; made if it is not there.
        resume: "auto" goes on from the newest complete checkpoint, if there is any; "never" begins
            again and removes what an earlier run has left; a path is a checkpoint.
        rows: Training items, in place of those that ``recipe.data`` names.
        validation_rows: Items to measure on, in place of those that ``recipe.validation`` names.
        labels: Names of the classes; by default those of the rows.
        licence: Of the new weights; by default that of the weights they come from.
        device: By default a GPU where there is one.
        trackers: Views of ``metrics.jsonl``, keys of `zoo.training.tracking.BACKENDS`.
        quiet: Show no progress.

    Raises:
        ConfigError: A value does not fit, or the folder holds a run by another recipe.
        CheckpointError: No checkpoint there is complete.
        DataError: Data are not there or cannot be read.
        NonFiniteError: See `zoo.training.loop.fit`.
        SystemExit: With code 143 after SIGTERM, 130 after Ctrl-C; there is a checkpoint of the last
            whole step.
    """
    folder = Path(folder).absolute()
    wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with distributed.start(wanted) as place, distributed.Stop() as stop:
        name = model if isinstance(model, str) else registry.card_of(model).full_name
        bare = make_model(name, recipe) if isinstance(model, str) else model
        prepare_model(bare, recipe, place)
        seed_everything(recipe.seed)
        task = registry.make_task(bare)
        named = stated(model).labels if isinstance(model, str) else None
        rows, held_out = open_data(recipe, bare, rows, validation_rows, named)
        evaluation = Evaluation(bare, held_out, recipe, stop) if held_out is not None else None
        batches = make_batches(rows, task, recipe, place)
        run = Run(bare, task, recipe, batches, folder, device=place, evaluate=evaluation)
        begin(run, folder, described(name, recipe), resume, quiet=quiet)
        tracker = follow(run, folder, trackers, described(name, recipe))
        progress = Progress(
            run.total,
            done=run.position.step,
            items=recipe.batch_size,
            wanted=distributed.is_main() and not quiet,
        )
        try:
            fit(run, stop, tracker, progress)
            return finish(run, name, evaluation, labels, licence)
        except Interrupted:
            progress.say(f"stopped after step {run.position.step}; the same command goes on")
            stop.leave()
            raise
        finally:
            progress.close()
            tracker.close()


def recipe_of(name: str) -> Recipe:
    """The recipe by which the weights `name` are made: `RECIPES` of the model's file, by tag.

    A recipe that belongs to one model of a family stands there under its full name.

    Raises:
        UnknownModelError: No such model, or no such recipe.
    """
    base, _, tag = name.partition(".")
    module = import_module(stated(name).model.partition(":")[0])
    recipes: dict[str, Recipe] = getattr(module, "RECIPES", {})
    if not tag and len(recipes) == 1:
        return next(iter(recipes.values()))
    found = recipes.get(name, recipes.get(tag))
    if found is None:
        able = ", ".join(f"{base}.{key}" for key in recipes if "." not in key) or "none"
        raise UnknownModelError(
            f"{module.__name__} has no recipe for {shown(name)};{nearest(tag, recipes)} "
            f"it has {able}"
        )
    return found


def stated(name: str) -> Card:
    """The card of the weights that are to be made, as far as it is there: else of the model alone.

    Raises:
        UnknownModelError: No such model.
    """
    base, _, tag = name.partition(".")
    card = cards.card(base)
    return card.to_train(tag) if tag in {**card.weights, **card.planned} else card


def make_model(name: str, recipe: Recipe) -> nn.Module:
    """The model that a recipe begins with, with the card of the weights it will have.

    Fresh weights are a function of ``recipe.seed``.
    """
    card = stated(name)
    torch.manual_seed(seed_of(recipe.seed))
    config, task = recipe.config, recipe.task
    if recipe.init is None:
        return registry.load(card.full_name, pretrained=False, task=task, **config)
    init = recipe.init if "." in recipe.init else f"{card.name}.{recipe.init}"
    model = registry.load(init, task=task, **config)
    if card.preprocessing:  # of the weights to be made; files, as a tokenizer, are the old ones
        old = registry.card_of(model)
        weights = old.weights[old.tag or ""]
        own = [file.name for file in weights.auxiliary]
        kept = {key: value for key, value in old.preprocessing.items() if value in own}
        weights = replace(weights, preprocessing={**card.preprocessing, **kept})
        setattr(model, "card", replace(old, weights={old.tag or "": weights}))  # noqa: B010
    return model


def prepare_model(model: nn.Module, recipe: Recipe, device: torch.device) -> None:
    """Put the model where it is trained, in the way it is trained.

    Raises:
        ConfigError: The family has no gradient checkpointing.
    """
    if recipe.gradient_checkpointing:
        able = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        for module in able:
            setattr(module, "gradient_checkpointing", True)  # noqa: B010 (a Module takes only tensors)
        config: Any = getattr(model, "config", None)
        known = is_dataclass(config) and {f.name for f in fields(config)}
        if known and "gradient_checkpointing" in known:
            model.config = replace(config, gradient_checkpointing=True)
        elif not able:
            raise ConfigError(f"{type(model).__name__} has no gradient checkpointing; leave it out")
    model.to(device)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    if adapt := getattr(recipe, "adapt", None):  # of a domain
        adapt(model)


def open_data(
    recipe: Recipe,
    model: nn.Module,
    rows: Rows | None,
    held_out: Rows | None,
    named: Sequence[str] | None = None,
) -> tuple[Rows, Rows | None]:
    """Rows to train on and rows to measure on, where the caller has not given them.

    Args:
        recipe: Names the data.
        model: To be trained.
        rows: To train on; None opens them.
        held_out: To measure on; None opens them, if the recipe names any.
        named: Classes of the weights that are to be made; not used for another number of classes.

    Raises:
        ConfigError: The recipe names no data, or the model has another number of classes.
        DataError: The data cannot be read, or are too few to hold a share out.
    """
    task, card = registry.make_task(model), registry.card_of(model)
    classes = getattr(getattr(model, "config", None), "num_classes", None)
    if named is not None and len(named) != classes:
        named = None
    if rows is None:
        if not recipe.data:
            raise ConfigError("the recipe names no data; give a set (cifar10/train) or a path")
        rows = open_rows(recipe.data, task, classes=card.labels or named)
    if held_out is None and (share := share_of(recipe.validation)):
        rows, held_out = split(rows, share, recipe.seed)
    elif held_out is None and recipe.validation:
        held_out = open_rows(recipe.validation, task, classes=rows.classes)
    if rows.labels and classes is not None and len(rows.labels) > classes:
        raise ConfigError(
            f"{rows.name} has {len(rows.labels)} classes and {card.name} {classes}; "
            f"set config num_classes to {len(rows.labels)}"
        )
    return rows, held_out


class Example:
    """``task.example`` under a recipe, as the workers call it."""

    def __init__(self, task: Any, recipe: Recipe) -> None:
        self.task, self.recipe = task, recipe

    def __call__(
        self, raw: Any, target: Any, generator: torch.Generator, size: int | None = None
    ) -> dict[str, Tensor]:
        """One augmented sample."""
        sample: dict[str, Tensor] = self.task.example(
            raw, target, recipe=self.recipe, generator=generator, size=size
        )
        return sample


def make_batches(rows: Rows, task: Any, recipe: Recipe, device: torch.device) -> Batches:
    """The steps of the recipe."""
    order: Order | None = None
    if recipe.balanced:
        order = partial(balanced, targets=rows.targets)
    if recipe.buckets:
        lengths = [task.length(rows.raw(index)) for index in range(len(rows))]
        order = partial(bucketed, lengths=lengths, batch_size=recipe.batch_size)
    if recipe.cache:
        if not hasattr(task, "decoded"):
            raise ConfigError(f"cache is {recipe.cache}; {task.name} decodes nothing, leave it out")
        rows = cached(rows, task.decoded, int(recipe.cache * 2**30))
    sizes = getattr(recipe, "sizes", ())
    total = recipe.epochs * -(-len(rows) // recipe.batch_size)
    shares, share = replicas(recipe)
    return Batches(
        rows,
        Example(task, recipe),
        task.collate,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        rank=share,
        world_size=shares,
        microbatches=recipe.microbatches,
        workers=recipe.workers,
        order=order,
        size=progressive(sizes, max(1, round(total))) if sizes else None,
        pin_memory=device.type == "cuda",
    )


def finish(
    run: Run,
    name: str,
    evaluation: Evaluation | None,
    labels: Sequence[str] | None,
    licence: str | None,
) -> Result:
    """Write the weights with their card, and what they measure in float32."""
    position, recipe = run.position, run.recipe
    best = None
    if position.best is not None and position.best_step is not None:
        best = position.best_step, position.best
    earlier = recipe.patience is not None and best is not None and best[0] != position.step
    if best and earlier:
        run.restore_weights(checkpoint.at(run.folder / "checkpoints", best[0]))
    run.share_statistics()
    known = recipe.precision == "float32" and not earlier
    with run.averaged():
        metrics = position.measured
        if evaluation and not known:
            metrics = evaluation(run.answering, exact=True)
        model = whole(run.model)
    if distributed.is_main():
        held_out = evaluation.rows if evaluation else None
        write_weights(run, model, name, metrics, held_out, labels, licence)
    return Result(run.folder, dict(metrics), best, position.step)


def whole(model: nn.Module) -> nn.Module:
    """A copy of the model with whole parameters, on the CPU; all ranks call it."""
    state = {n: t.detach().cpu().clone() for n, t in distributed.full_state(model).items()}
    card = registry.card_of(model)
    copy: nn.Module = registry.symbol(card.model, card)(model.config)
    copy.load_state_dict(state)
    return copy
