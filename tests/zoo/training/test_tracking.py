"""metrics.jsonl is the truth; views of it are optional and cannot end a run."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from zoo.errors import ConfigError, MissingPackageError
from zoo.training import tracking
from zoo.training.tracking import Lines, Progress, open_trackers, shown_time


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_json_objects_that_begin_with_the_step(tmp_path):
    lines = Lines(tmp_path / "metrics.jsonl")
    lines.log(10, {"loss": 0.1 + 0.2, "lr": 1e-3})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 0.1 + 0.2, "lr": 1e-3}]
    assert lines.count == 1


def test_a_resumed_run_drops_what_was_written_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    for step in (10, 20, 30):
        lines.log(step, {"loss": step})
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # killed meanwhile
    lines = Lines(path, keep=2)
    lines.log(25, {"loss": 5})
    lines.close()
    assert [line["step"] for line in read(path)] == [10, 20, 25]


def test_tensorboard_gets_every_number_and_picture(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.fromarray(np.full((4, 6, 3), 200, np.uint8)).save(tmp_path / "curve.png")
    trackers = open_trackers(tmp_path, ["tensorboard"], {})
    trackers.log(10, {"loss": 0.5})
    trackers.log(20, {"loss": 0.25, "validation/top1": 0.75})
    trackers.image("curve", tmp_path / "curve.png")
    trackers.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 0.5), (20, 0.25)]
    assert [e.value for e in events.Scalars("validation/top1")] == [0.75]
    (picture,) = events.Images("curve")
    assert (picture.width, picture.height, picture.step) == (6, 4, 20)


class Recorder(ModuleType):
    """Stands for an optional package; notes every call."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize(
    ("name", "logged", "closed"),
    [
        ("wandb", ("log", ({"loss": 0.5},), {"step": 10}), "finish"),
        ("mlflow", ("log_metrics", ({"loss": 0.5},), {"step": 10}), "end_run"),
    ],
)
def test_a_backend_is_called_as_its_package_wants(tmp_path, monkeypatch, name, logged, closed):
    package = Recorder(name)
    monkeypatch.setitem(sys.modules, name, package)
    trackers = open_trackers(tmp_path, [name], {"model": "resnet18"})
    trackers.log(10, {"loss": 0.5})
    trackers.close()
    assert logged in package.calls
    assert package.calls[-1][0] == closed
    assert any(
        {"model": "resnet18"} in (*args, *kwargs.values()) for _, args, kwargs in package.calls
    )


def test_visdom_draws_one_curve_a_value(tmp_path, monkeypatch):
    drawn = []
    server = SimpleNamespace(
        line=lambda **options: drawn.append(options), save=drawn.append, env="e"
    )
    package = SimpleNamespace(Visdom=lambda **options: server)
    monkeypatch.setitem(sys.modules, "visdom", package)
    trackers = open_trackers(tmp_path, ["visdom"], {})
    trackers.log(10, {"loss": 0.5, "lr": 0.1})
    trackers.close()
    assert [(d["win"], d["X"], d["Y"], d["update"]) for d in drawn[:2]] == [
        ("loss", [10], [0.5], "append"),
        ("lr", [10], [0.1], "append"),
    ]
    assert drawn[-1] == ["e"]


def test_a_backend_that_fails_is_left_out_and_the_truth_goes_on(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, *_):
            pass

        def log(self, step, values):
            raise ConnectionError("no such server")

        def close(self):
            raise AssertionError("it is left out")

    monkeypatch.setitem(tracking.BACKENDS, "wandb", Broken)
    trackers = open_trackers(tmp_path, ["wandb"], {})
    with pytest.warns(UserWarning, match="wandb failed .* no such server"):
        trackers.log(10, {"loss": 1.0})
    trackers.log(20, {"loss": 2.0})
    trackers.close()
    assert len(read(tmp_path / "metrics.jsonl")) == 2


def test_unknown_and_missing_backends_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        open_trackers(tmp_path, ["tensorbord"], {})
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingPackageError, match=r"mlflow.*refzoo\[tracking\]"):
        open_trackers(tmp_path, ["mlflow"], {})


def test_progress_is_plain_lines_at_most_every_ten_seconds(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: clock[0])
    progress = Progress(1000, done=100, items=8)
    for step in range(101, 311):
        clock[0] += 0.1
        progress.show(step, {"loss": 1 / step})
    progress.show(311, {"validation/top1": 0.5})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 101/1000  80 items/s  90 s left  loss 0.009")
    assert "\x1b" not in "".join(lines)
    assert str(progress).endswith("top1 0.5")


def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress(10, items=4)
    progress.show(5, {"loss": 0.25})
    progress.say("a line")
    progress.close()
    out, err = capsys.readouterr()
    assert "5/10" in err
    assert "loss 0.25" in err
    assert "a line" in err
    assert not out


def test_progress_can_be_silent(capsys):
    progress = Progress(10, wanted=False)
    progress.show(5, {"loss": 0.25})
    progress.say("a line")
    progress.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(45.2, "45 s"), (720, "12 min"), (12000, "3 h 20 min"), (89.4, "89 s")]
)
def test_times_are_short(seconds, text):
    assert shown_time(seconds) == text
