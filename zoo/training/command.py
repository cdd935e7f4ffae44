"""``zoo train``: the recipe of a set of weights, with flags for every field of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from zoo import cards, registry
from zoo.errors import ConfigError
from zoo.training.folder import Resume, read_recipe
from zoo.training.options import parsed
from zoo.training.recipe import Recipe
from zoo.training.run import recipe_of, train


@dataclass(kw_only=True)
class Train:
    """Train a model by the recipe that made its weights.

    `zoo train NAME.TAG --help` shows the values of that recipe. Under torchrun it trains on several
    processes. --optimizer and --schedule choose another kind (SGD, AdamW, Lion, LAMB, Muon; Cosine,
    Linear, Poly, OneCycle, Plateau, Constant, InverseRoot); its fields are then flags.

    Attributes:
        name: Weights to make, for example resnet18.cifar10; a model alone takes the default recipe.
        recipe: File of a recipe, recipe.json of a run, in place of the model's own.
        out: Folder of the run; by default runs/NAME.
        resume: auto goes on from the newest complete checkpoint there, never begins again, a path
            is the checkpoint to go on from.
        device: cpu, cuda or cuda:1; by default a GPU where there is one.
        trackers: Views of metrics.jsonl: tensorboard, wandb, mlflow, visdom.
        quiet: Show no progress.
    """

    name: tyro.conf.Positional[str] = ""
    recipe: Path | None = None
    out: Path | None = None
    resume: str = "auto"
    device: str | None = None
    trackers: tuple[str, ...] = ("tensorboard",)
    quiet: bool = False


def command(arguments: Sequence[str]) -> Callable[[], int]:
    """The call that the arguments of ``zoo train`` mean.

    Raises:
        ConfigError, UnknownModelError: They name no model, or a recipe that is none.
        SystemExit: See `zoo.training.options.parsed`.
    """
    name, recipe = _defaults(list(arguments))
    made, given = parsed(arguments, recipe, Train, prog="zoo train")
    name = given.name or name
    if not name:
        raise ConfigError("zoo train takes the name of weights, for example resnet18.cifar10")
    resume: Resume = Path(given.resume)
    if given.resume in ("auto", "never"):
        resume = given.resume

    def run() -> int:
        own = getattr(registry.task_class(cards.card(name.partition(".")[0])), "train", train)
        result = own(
            name,
            made,
            given.out or Path("runs", name),
            resume=resume,
            device=given.device,
            trackers=given.trackers,
            quiet=given.quiet,
        )
        numbers = "  ".join(f"{key} {value:.4f}" for key, value in result.metrics.items())
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes one speaks
            print(f"{result.weights}  {numbers}".rstrip())
        return 0

    return run


def _defaults(arguments: list[str]) -> tuple[str, Recipe]:
    """Model and recipe that the flags then change."""
    for place, flag in enumerate(arguments):
        if flag == "--recipe" and place + 1 < len(arguments):
            return read_recipe(Path(arguments[place + 1]))
        if flag.startswith("--recipe="):
            return read_recipe(Path(flag.partition("=")[2]))
    if not arguments or arguments[0].startswith("-"):
        return "", Recipe()
    name = arguments[0]
    if "." in name:
        return name, recipe_of(name)
    task = registry.task_class(cards.card(name))
    kind: type[Recipe] = getattr(task, "recipe", Recipe)
    return name, kind()
