"""Fine-tuning on the user's own files: look, plan, train, show what came of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from zoo.errors import ConfigError, shown
from zoo.reporting import (
    Confusion,
    draw_confusion,
    draw_curves,
    read_records,
    write_worst,
)

if TYPE_CHECKING:
    import torch

    from zoo.data.rows import Rows
    from zoo.inspection import Request
    from zoo.planning import Plan
    from zoo.training.folder import Resume

CHUNK = 256  # items answered at a time
PAIRS = 3  # confused classes that the last lines name


@dataclass(frozen=True)
class Finetuned:
    """What fine-tuning has come to.

    Attributes:
        folder: Of the run: ``plan.json``, ``recipe.json``, ``metrics.jsonl``, ``checkpoints/``,
            ``weights/``, ``curves.png``; of a classifier also ``confusion.png``, ``worst.csv``.
        plan: What was done.
        metrics: Of the written weights, by part of the data, as ``validation/top1``. Under
            ``torchrun`` the main rank alone has those of a test part.
        confusion: Of the test part, else of the validation part; None where nothing is classified,
            and on other ranks than the main one.
    """

    folder: Path
    plan: Plan
    metrics: dict[str, float]
    confusion: Confusion | None

    @property
    def weights(self) -> Path:
        """Folder for `zoo.load` and `zoo.pipeline`."""
        return self.folder / "weights"

    def lines(self) -> list[str]:
        """For people."""
        rows = self.plan.rows
        lines = [
            f"measured  {name} {value:.4f} on {len(rows[name.partition('/')[0]]):,}"
            for name, value in self.metrics.items()
        ]
        pairs = self.confusion.pairs(PAIRS) if self.confusion else []
        lines += [f"confused  {true} taken for {other}: {n}" for true, other, n in pairs]
        pictures = ", ".join(
            name
            for name in ("curves.png", "confusion.png", "worst.csv")
            if (self.folder / name).exists()
        )
        lines.append(f"written   {self.folder}: {pictures}")
        return [*lines, f"weights   {self.weights}; try: zoo predict {self.weights} INPUT"]


def finetune(
    name: str | Path,
    data: str | Path,
    *,
    out: str | Path | None = None,
    validation: str | Path | None = None,
    task: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    pretrained: bool = True,
    lr: float | None = None,
    resume: Resume = "auto",
    device: str | torch.device | None = None,
    quiet: bool = False,
    **fields: Any,
) -> Finetuned:
    """Fine-tune a model on a folder of classes, a table, or a published set.

    A plan is printed before anything is trained. The same call goes on with a run that was killed,
    if its plan is the same. Runs on one process or, under ``torchrun``, on many.

    Args:
        name: A model, with or without a tag, or the folder of a saved one. Its trained weights are
            the start.
        data: A folder with one folder a class, a CSV, TSV, parquet or JSON-lines file, a folder
            with ``train`` and ``validation`` parts of these, or a set such as ``sst2/train``.
        out: Folder of the run; ``runs/NAME-DATA`` by default.
        validation: Where the items to measure on are; by default that part of `data`, or a fifth
            of every class, held out.
        task: Where a family has several; by default the model's own, or classification.
        text_column: Of a table, where it is not clear; ``"a,b"`` for pairs.
        label_column: The same.
        pretrained: False starts with random weights.
        lr: Highest learning rate; by default one that fits the model and what is trained of it.
        resume: See `zoo.training.run.train`; "never" also gives up an old plan.
        device: By default a GPU where there is one.
        quiet: Print neither plan nor progress.
        **fields: Of the task's recipe, as ``epochs=5``, ``freeze=-1``, ``freeze_epochs=1``.

    Raises:
        DataError: The data cannot be used; the message says why.
        ConfigError: A value does not fit, or `out` holds a run with another plan.
        UnknownModelError, WeightsError, CheckpointError, NonFiniteError: As elsewhere.
        SystemExit, KeyboardInterrupt: As in `zoo.training.run.train`.
    """
    import torch

    from zoo.inspection import Request
    from zoo.planning import load_model
    from zoo.training import distributed
    from zoo.training.run import train

    if "init" in fields:
        raise ConfigError(
            f"init is {shown(fields['init'])}; name the weights to begin with by the model: "
            "resnet50.TAG"
        )
    request = Request(
        # A path stays one, also where a model is called so.
        model=name if isinstance(name, str) else str(name.absolute()),
        data=str(data),
        validation=str(validation or ""),
        task=task or "",
        text_column=text_column or "",
        label_column=label_column or "",
        pretrained=pretrained,
        lr=lr,
        fields=fields,
    )
    folder = Path(out) if out else default_folder(request)
    wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with distributed.start(wanted) as place:
        plan = agreed_plan(request, folder, resume, place)
        if distributed.is_main() and not quiet:
            print(*plan.lines(), f"writes    {folder}", sep="\n", flush=True)
        recipe = plan.recipe
        task = recipe.task or ""
        model = load_model(
            request, task, recipe.config, plan.preprocessing, plan.labels, plan.classes is None
        )
        result = train(
            model,
            plan.recipe,
            folder,
            resume=resume,
            rows=plan.rows["train"],
            validation_rows=plan.rows["validation"],
            labels=plan.labels,
            device=place,
            quiet=quiet,
        )
        metrics = {f"validation/{key}": value for key, value in result.metrics.items()}
        confusion = report(plan, folder, metrics) if distributed.is_main() else None
        done = Finetuned(folder, plan, metrics, confusion)
        if distributed.is_main() and not quiet:
            print(*done.lines(), sep="\n", flush=True)
    return done


def default_folder(request: Request) -> Path:
    """``runs/NAME-DATA``."""
    stems = [re.sub(r"[^\w.-]+", "-", Path(p).stem) for p in (request.model, request.data)]
    return Path("runs", "-".join(stem for stem in stems if stem) or "finetuned")


def agreed_plan(request: Request, folder: Path, resume: Resume, device: torch.device) -> Plan:
    """The plan of the run in the folder, or a new one; the same on all ranks.

    Raises:
        ConfigError: The folder holds another run.
    """
    from zoo.planning import make_plan, read_plan, restored, write_plan
    from zoo.training import distributed

    held: dict[str, Any] = {}
    plan: Plan | None = None
    try:
        if distributed.is_main():
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{shown(str(folder))} is a file; give another --out")
            held = {} if resume == "never" else read_plan(request, folder)
            if not held:
                plan = make_plan(request, device=device)
                write_plan(plan, folder)
                held = plan.plain()
    finally:  # the other ranks are waiting, also where there is no plan
        held = distributed.broadcast_json(held)
    if not held:  # the main rank says why
        raise SystemExit(2)
    return plan or restored(held, request)


def report(plan: Plan, folder: Path, metrics: dict[str, float]) -> Confusion | None:
    """Draw and list what the written weights do; `metrics` gets those of the test part, if any.

    The card gets them too.
    """
    from zoo.inspection import places_of
    from zoo.pipeline import pipeline
    from zoo.training.folder import measured, state_metrics

    rows = plan.rows.get("test", plan.rows["validation"])
    part = "test" if "test" in plan.rows else "validation"
    pipe = pipeline(folder / "weights")
    if part == "test":
        examples = (rows[index] for index in range(len(rows)))
        found = pipe.task.measure(pipe, examples)
        metrics.update({f"test/{key}": value for key, value in found.items()})
        place = places_of(plan.request, pipe.task)["test"]
        own = f"{plan.rows['train'].name}/test"
        state_metrics(
            folder / "weights",
            measured(pipe.task, folder / "weights", place, own, found, len(rows)),
        )
    names = list(dict.fromkeys(key for r in read_records(folder / "metrics.jsonl") for key in r))
    scores = [n for n in names if n.startswith("validation/") and n != "validation/loss"]
    panels = [["loss", "validation/loss"], scores]
    draw_curves(folder / "curves.png", read_records(folder / "metrics.jsonl"), panels)
    if plan.classes is None or not rows.classified:
        return None
    confusion = Confusion(plan.classes)
    for first in range(0, len(rows), CHUNK):
        indices = range(first, min(first + CHUNK, len(rows)))
        raws = [rows.raw(index) for index in indices]
        answers = pipe(raws, top_k=len(plan.classes))
        for index, raw, answer in zip(indices, raws, answers, strict=True):
            confusion.add(called(rows, index, raw), int(rows.targets[index]), answer)
    draw_confusion(folder / "confusion.png", confusion, f"{plan.request.model}, {part}")
    write_worst(folder / "worst.csv", confusion.mistakes)
    return confusion


def called(rows: Rows, index: int, raw: object) -> str:
    """How the list of errors calls an item: its path, its text, else where it is."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, tuple) and all(isinstance(text, str) for text in raw):
        return " | ".join(raw)
    return rows.where(index)


@dataclass(kw_only=True)
class Flags:
    """Fine-tune a model on your own files: zoo finetune MODEL --data PATH.

    What is not given is chosen by the data and the model, whatever default is shown here; the plan,
    which is printed first, says what. The same command goes on with a run that was killed.

    Attributes:
        model: A model, with or without a tag, or the folder of a saved one.
        out: Folder of the run; runs/MODEL-DATA by default.
        text_column: Of a table, where it is not clear; a,b for pairs.
        label_column: The same.
        pretrained: Begin with the trained weights.
        lr: Highest learning rate.
        resume: auto goes on with the run in the folder, never begins again, a path is a checkpoint.
        device: By default a GPU where there is one.
    """

    model: Positional[str] = ""
    out: Path | None = None
    text_column: str | None = None
    label_column: str | None = None
    pretrained: bool = True
    lr: float | None = None
    resume: str = "auto"
    device: str | None = None


def command(arguments: Sequence[str]) -> Callable[[], int]:
    """What ``zoo finetune`` does with its arguments; its flags are those of the task's recipe too.

    Raises:
        ConfigError, UnknownModelError: The arguments make no sense.
        SystemExit: As in `zoo.training.options.parsed`.
    """
    from zoo import registry
    from zoo.training.options import parsed
    from zoo.training.recipe import Recipe

    kind: type[Recipe] = Recipe
    if arguments and not arguments[0].startswith("-"):
        card, _ = registry.resolve(registry.located(arguments[0]), None)
        kind = getattr(registry.task_class(card), "recipe", Recipe)
    recipe, flags = parsed(arguments, kind(), Flags, prog="zoo finetune")
    if not flags.model or not recipe.data:
        missing = "a model" if not flags.model else "--data"
        raise ConfigError(f"{missing} is missing; the form is: zoo finetune MODEL --data PATH")
    named = {a.partition("=")[0].partition(".")[0].removeprefix("--") for a in arguments}
    given = {name.removeprefix("no-").replace("-", "_") for name in named}
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(kind) if f.name in given}
    if "optimizer" in fields and "--optimizer.lr" not in {a.partition("=")[0] for a in arguments}:
        raise ConfigError(
            "an optimizer is given without its learning rate; add --optimizer.lr, for example 1e-3"
        )
    fields |= {f.name: getattr(flags, f.name) for f in dataclasses.fields(Flags)}
    for apart in ("model", "data"):
        fields.pop(apart, None)
    if fields["resume"] not in ("auto", "never"):
        fields["resume"] = Path(fields["resume"])

    def run() -> int:
        finetune(flags.model, recipe.data, **fields)
        return 0

    return run
