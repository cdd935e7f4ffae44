"""Where the numbers of a run go: ``metrics.jsonl`` is the truth, everything else is a view of it.

Weights & Biases, MLflow and Visdom are optional; each is imported only when a run asks for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from zoo.errors import ConfigError, nearest, require, shown

LINE_EVERY_S = 10.0  # of progress, where there is no terminal

Values = Mapping[str, float | int]


class Tracker(Protocol):
    """What takes the numbers and pictures of a run."""

    def log(self, step: int, values: Values) -> None:
        """Numbers of the run after `step` steps."""

    def image(self, name: str, path: Path) -> None:
        """A PNG file."""

    def close(self) -> None:
        """The run has ended, in whatever way."""


class Lines:
    """``metrics.jsonl``: one JSON object a line, flushed line by line.

    Args:
        path: The file; its folder exists.
        keep: Lines of it that stay. A resumed run drops those that were written after its
            checkpoint, for it writes them again.

    Attributes:
        count: Lines in the file.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        kept = path.read_bytes().splitlines(keepends=True)[:keep] if path.exists() else []
        self.count = len(kept)
        self._file: IO[bytes] = path.open("r+b" if path.exists() else "x+b")
        self._file.truncate(sum(map(len, kept)))
        self._file.seek(0, os.SEEK_END)

    def log(self, step: int, values: Values) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._file.flush()
        self.count += 1

    def image(self, name: str, path: Path) -> None:
        """Nothing; pictures are files already."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in the run's folder; ``tensorboard --logdir`` shows them.

    Args:
        folder: Of the run.
        name: Unused; TensorBoard goes by folders.
        config: Unused, `recipe.json` holds it.
        step: What earlier attempts wrote from this step on is hidden.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        require("tensorboard", "all")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step or None)
        self._step = step

    def log(self, step: int, values: Values) -> None:
        """One scalar a value."""
        self._step = step
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def image(self, name: str, path: Path) -> None:
        """The picture at the last step."""
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[..., :3], self._step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """Weights & Biases; a resumed run goes on under its id, which is the folder's name."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        self._wandb: Any = require("wandb", "tracking")
        self._run = self._wandb.init(
            project="refzoo", name=name, id=name, dir=str(folder), config=config, resume="allow"
        )

    def log(self, step: int, values: Values) -> None:
        """All values at once."""
        self._run.log(dict(values), step=step)

    def image(self, name: str, path: Path) -> None:
        """The picture."""
        self._run.log({name: self._wandb.Image(str(path))})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """MLflow, at the server or folder that ``MLFLOW_TRACKING_URI`` names."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        self._mlflow: Any = require("mlflow", "tracking")
        self._mlflow.set_experiment("refzoo")
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_dict(dict(config), "recipe.json")

    def log(self, step: int, values: Values) -> None:
        """All values at once; MLflow takes no ``@`` or the like in names, and we write none."""
        self._mlflow.log_metrics({k: float(v) for k, v in values.items()}, step=step)

    def image(self, name: str, path: Path) -> None:
        """The file as an artifact."""
        self._mlflow.log_artifact(str(path))

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class Visdom:
    """One curve a value, in an environment with the run's name, at a Visdom server on this host."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        visdom: Any = require("visdom", "tracking")
        self._visdom = visdom.Visdom(env=name, raise_exceptions=True)

    def log(self, step: int, values: Values) -> None:
        """One more point of each curve."""
        for key, value in values.items():
            self._visdom.line(
                X=[step], Y=[value], win=key, update="append", opts={"title": key, "xlabel": "step"}
            )

    def image(self, name: str, path: Path) -> None:
        """The picture in a window of its own."""
        from matplotlib.image import imread

        pixels = imread(path)[..., :3].transpose(2, 0, 1)
        self._visdom.image(pixels, win=name, opts={"title": name})

    def close(self) -> None:
        """Keep the curves on the server's disk."""
        self._visdom.save([self._visdom.env])


BACKENDS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "visdom": Visdom,
}


class Silent:
    """Takes everything and does nothing: the tracker of all processes but the main one."""

    def log(self, step: int, values: Values) -> None:
        """Nothing."""

    def image(self, name: str, path: Path) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Trackers:
    """Several trackers as one. Only the truth may end a run: a view that fails is left out.

    Args:
        truth: Takes everything first.
        views: Of the truth, by their names.
    """

    def __init__(self, truth: Lines, views: Mapping[str, Tracker]) -> None:
        self.truth, self._views = truth, dict(views)

    def log(self, step: int, values: Values) -> None:
        """Pass the values on."""
        self.truth.log(step, values)
        self._each(lambda view: view.log(step, values))

    def image(self, name: str, path: Path) -> None:
        """Pass the picture on."""
        self._each(lambda view: view.image(name, path))

    def close(self) -> None:
        """Close all."""
        self.truth.close()
        self._each(lambda view: view.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, view in list(self._views.items()):
            try:
                call(view)
            except Exception as error:  # of somebody else's server
                del self._views[name]
                warnings.warn(f"{name} failed and is left out from here on: {error}", stacklevel=2)


def open_trackers(
    folder: Path, names: Sequence[str], config: Mapping[str, Any], *, step: int = 0, keep: int = 0
) -> Trackers:
    """``metrics.jsonl`` and the named views of it.

    Args:
        folder: Of the run.
        names: Keys of `BACKENDS`.
        config: Plain values that describe the run.
        step: Steps already done.
        keep: Lines already written, see `Lines`.

    Raises:
        ConfigError: There is no such backend.
        MissingPackageError: Its package is not installed.
    """
    for name in names:
        if name not in BACKENDS:
            raise ConfigError(
                f"there is no tracker {shown(name)};{nearest(name, BACKENDS)} "
                f"it takes {', '.join(BACKENDS)}"
            )
    views = {name: BACKENDS[name](folder, folder.name, config, step) for name in names}
    return Trackers(Lines(folder / "metrics.jsonl", keep=keep), views)


class Progress:
    """How far a run is, on stderr: a bar on a terminal, else a line at most every ten seconds.

    Args:
        total: Steps of the run.
        done: Steps of it that an earlier process took.
        items: Items of a step, for the rate.
        wanted: False shows nothing.
    """

    def __init__(self, total: int, *, done: int = 0, items: int = 1, wanted: bool = True) -> None:
        self._total, self._first, self._done = total, done, done
        self._items, self._wanted = items, wanted
        self._began = time.monotonic()
        self._said = self._began - LINE_EVERY_S  # the first numbers are shown at once
        self._texts: dict[str, str] = {}
        self._bar: Any = None
        if wanted and sys.stderr.isatty():
            self._bar = _bar(total, done)
            self._bar.start()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self._wanted:
            print(text, file=sys.stderr, flush=True)

    def show(self, step: int, values: Values) -> None:
        """Move on to `step`; the values stay until others of their name come."""
        self._done = step
        self._texts |= {
            key.removeprefix("validation/"): f"{value:.4g}" for key, value in values.items()
        }
        if self._bar is not None:
            numbers = "  ".join(f"{key} {text}" for key, text in self._texts.items())
            self._bar.update(self._bar.task_ids[0], completed=step, rate=self._rate, values=numbers)
        elif self._wanted and time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            self.say(str(self))

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{(self._done - self._first) * self._items / seconds:,.0f} items/s"

    def __str__(self) -> str:
        """Step, rate, time left, the last values."""
        parts = [f"step {self._done}/{self._total}", self._rate]
        if taken := self._done - self._first:
            left = (time.monotonic() - self._began) / taken * (self._total - self._done)
            parts.append(f"{shown_time(left)} left")
        return "  ".join([*parts, *(f"{key} {text}" for key, text in self._texts.items())])


def shown_time(seconds: float) -> str:
    """``"45 s"``, ``"12 min"`` or ``"3 h 20 min"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _bar(total: int, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[values]}"),
        console=Console(stderr=True),
    )
    bar.add_task("training", total=total, completed=done, rate="", values="")
    return bar
