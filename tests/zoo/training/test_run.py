"""A run and its folder: what it leaves, how it goes on, what it says when it cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import zoo
from tests.prove.resumes import DAMAGES, damaged, difference, make_world, outcome, recipe_for
from zoo import cards
from zoo.cli import main
from zoo.errors import CheckpointError, ConfigError, UnknownModelError
from zoo.training.evaluation import Evaluation
from zoo.training.folder import read_recipe
from zoo.training.recipe import LAMB
from zoo.training.run import make_batches, open_data, recipe_of, train

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "world"
    make_world(folder)
    return folder


@pytest.fixture(autouse=True)
def _cards(world, monkeypatch):
    monkeypatch.setattr(cards, "CARDS", world / "cards")


@pytest.fixture(scope="module")
def done(world):
    """The folder of a finished run, and what it returned; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "CARDS", world / "cards")
        recipe = recipe_for("ema", world)
        return train("tiny.small", recipe, world / "done", trackers=("tensorboard",), quiet=True)


def test_the_folder_of_a_run_is_complete(done, world):
    names = {path.name for path in done.folder.iterdir()}
    assert {"recipe.json", "metrics.jsonl", "checkpoints", "weights"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [10, 20]
    assert {"epoch", "lr", "norm", "items_per_s", "wait"} <= steps[0].keys()
    assert [x["step"] for x in lines if "validation/top1" in x] == [6, 12, 18, 20]


def test_the_weights_are_a_model_with_a_card_that_says_what_was_measured(done, world):
    model = zoo.load(done.weights)
    assert model.card.labels == ("b", "g", "r")
    metrics = {m.name: m for m in model.card.weights["small"].metrics}
    assert metrics["train/validation/top1"].value == pytest.approx(done.metrics["top1"], abs=1e-6)
    assert metrics["train/validation/top1"].n == 12
    pipe = zoo.pipeline(done.weights)
    right = [
        pipe(str(path))[0]["label"] == path.parent.name for path in (world / "val").rglob("*.png")
    ]
    assert sum(right) / 12 == pytest.approx(done.metrics["top1"])
    origin = model.card.weights["small"].origin
    assert json.loads(origin["recipe"]) == json.loads((done.folder / "recipe.json").read_text())
    assert origin["trained_by"] == "refzoo"


def test_a_cache_of_decoded_items_changes_nothing(done, world, tmp_path):
    recipe = recipe_for("ema", world, cache=0.001)
    other = train("tiny.small", recipe, tmp_path / "cached", trackers=(), quiet=True)
    expected = zoo.load(done.weights).state_dict()
    for name, tensor in zoo.load(other.weights).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with pytest.raises(ConfigError, match=r"cache is 0\.001; words decodes nothing"):
        make_batches([], SimpleNamespace(name="words"), recipe, torch.device("cpu"))


def test_a_share_of_the_data_is_held_out_of_every_class(world, tmp_path):
    recipe = recipe_for("plain", world, validation="20%", epochs=1)
    result = train("tiny.small", recipe, tmp_path / "run", trackers=(), quiet=True)
    (weights,) = zoo.load(result.weights).card.weights.values()
    assert [(m.name, m.n) for m in weights.metrics] == [
        (f"train/validation/{name}", 6) for name in ("top1", "top5")
    ]
    model = zoo.load("tiny.small", pretrained=False)
    rows, held_out = open_data(recipe, model, None, None)
    assert held_out.counts().tolist() == [2, 2, 2]
    paths = [{part.where(i) for i in range(len(part))} for part in (rows, held_out)]
    assert len(paths[0] | paths[1]) == 30
    other, _ = open_data(replace(recipe, seed=1), model, None, None)
    assert {other.where(i) for i in range(len(other))} != paths[0]
    with pytest.raises(ConfigError, match="validation is '120%'; it takes a place, or a share"):
        open_data(replace(recipe, validation="120%"), model, None, None)


def test_a_recipe_reproduces_its_run(done, tmp_path):
    name, recipe = read_recipe(done.folder / "recipe.json")
    train(name, recipe, tmp_path / "again", trackers=(), quiet=True)
    assert difference(outcome(done.folder), outcome(tmp_path / "again")) is None


@pytest.mark.untyped  # the shape checks draw from Python's own random numbers
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(done, tmp_path, damage):
    name, recipe = read_recipe(done.folder / "recipe.json")
    files = sorted(path.name for path in (done.folder / "checkpoints" / "step-000020").iterdir())
    assert len(files) == 5
    for file in files:
        out = tmp_path / file
        shutil.copytree(done.folder, out)
        shutil.rmtree(out / "weights")
        damaged(out / "checkpoints" / "step-000020" / file, damage)
        with pytest.warns(UserWarning, match="step-000020") as warned:
            train(name, recipe, out, trackers=(), quiet=True)
        assert file in str(warned[0].message)
        assert difference(outcome(done.folder), outcome(out)) is None


def test_nothing_is_begun_again_where_all_checkpoints_are_damaged(done, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "state.json").write_bytes(b"")
    name, recipe = read_recipe(done.folder / "recipe.json")
    with pytest.warns(UserWarning, match=r"state\.json"), pytest.raises(CheckpointError) as caught:
        train(name, recipe, tmp_path / "run", trackers=(), quiet=True)
    assert "step-000020" in str(caught.value)
    assert "state.json" in str(caught.value)
    train(name, recipe, tmp_path / "run", resume="never", trackers=(), quiet=True)
    assert difference(outcome(done.folder), outcome(tmp_path / "run")) is None


def test_an_empty_folder_begins_with_a_notice_and_a_missing_checkpoint_is_named(
    world, tmp_path, capsys
):
    recipe = recipe_for("plain", world, epochs=0.2)
    train("tiny.small", recipe, tmp_path / "run", trackers=())
    assert "no checkpoint; starts at step 0" in capsys.readouterr().err
    train("tiny.small", recipe, tmp_path / "run", trackers=())
    assert "goes on from step-000001" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="missing/path"):
        train("tiny.small", recipe, tmp_path / "run", resume=Path("missing/path"), trackers=())


def test_a_folder_goes_on_with_its_own_recipe_only(done):
    name, recipe = read_recipe(done.folder / "recipe.json")
    with pytest.raises(ConfigError, match=r"holds a run with epochs 4\.0, now 9\.0"):
        train(name, replace(recipe, epochs=9.0), done.folder, quiet=True)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("epochs", "1e1", ("epochs", "'1e1'", "a number")),
        ("epoch", 3, ("epoch", "did you mean 'epochs'")),
        ("optimizer", {"kind": "AdamW", "lr": "fast"}, ("optimizer", "lr", "'fast'", "a number")),
        ("optimizer", {"kind": "Adam", "lr": 1.0}, ("optimizer.kind", "AdamW")),
        ("flip", "yes", ("flip", "true or false")),
        ("batch_size", 0, ("batch_size", "0")),
    ],
)
def test_a_recipe_file_is_read_strictly(done, tmp_path, key, value, words):
    content = json.loads((done.folder / "recipe.json").read_text())
    content["recipe"][key] = value
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    for word in ("mine.json", *words):
        assert word in caught.value.line


def test_a_file_that_is_no_recipe_is_said_to_be_none(tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is no recipe"):
        read_recipe(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_recipe(tmp_path / "missing.json")


def test_recipes_are_found_by_name(monkeypatch):
    monkeypatch.undo()
    assert recipe_of("resnet18.cifar10").data == "cifar10/train"
    assert recipe_of("all-minilm-l6-v2.sst2").init == "all-minilm-l6-v2.sbert"
    with pytest.raises(UnknownModelError, match="did you mean 'cifar10'"):
        recipe_of("resnet18.cifar100")


def test_data_of_more_classes_than_the_model_has_are_refused(world, tmp_path):
    recipe = recipe_for("plain", world, config={"num_classes": 2})
    with pytest.raises(ConfigError, match="set config num_classes to 3"):
        train("tiny.small", recipe, tmp_path, quiet=True)


@pytest.mark.untyped  # the shape checks draw from Python's own random numbers
def test_a_signal_ends_a_validation_within_a_batch(world, tmp_path, monkeypatch):  # TRN-10
    """The model takes 50 ms an item; a run of 12 items would go on for a second or more."""
    seen = []

    def slowly(*_):
        seen.append(time.monotonic())
        time.sleep(0.05)

    made = Evaluation.__init__

    def slow(self, model, *rest):
        made(self, model, *rest)
        self.pipe.batch_size = 1
        model.register_forward_pre_hook(lambda module, args: None if module.training else slowly())

    monkeypatch.setattr(Evaluation, "__init__", slow)
    timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)

    def predict(self, raws, **options):
        if not timer.is_alive() and not seen:
            timer.start()
        return asked(self, raws, **options)

    asked = Evaluation._predict
    monkeypatch.setattr(Evaluation, "_predict", predict)
    recipe = recipe_for("plain", world, evaluate_every=3, epochs=1)
    with pytest.raises(SystemExit) as end:
        train("tiny.small", recipe, tmp_path / "run", trackers=(), quiet=True)
    assert end.value.code == 143
    assert len(seen) <= 3
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    monkeypatch.setattr(cards, "CARDS", world / "cards")
    for out in (tmp_path / "run", tmp_path / "unbroken"):
        train("tiny.small", recipe, out, trackers=(), quiet=True)
    assert difference(outcome(tmp_path / "unbroken"), outcome(tmp_path / "run")) is None


def test_gradient_checkpointing_changes_nothing_but_memory(world, tmp_path):
    recipe = recipe_for("plain", world, epochs=1)
    a = train("tiny.small", recipe, tmp_path / "a", trackers=(), quiet=True)
    again = replace(recipe, gradient_checkpointing=True)
    b = train("tiny.small", again, tmp_path / "b", trackers=(), quiet=True)
    states = [zoo.load(result.weights).state_dict() for result in (a, b)]
    assert difference(*states) is None
    assert "gradient_checkpointing" not in zoo.load(b.weights).card.config


# --- the command ----------------------------------------------------------------------------


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_help_lists_every_field_of_the_recipe(capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run(capsys, "train", "resnet18.cifar10", "--help")
    assert code == 0
    for flag in ("--epochs FLOAT", "--optimizer.lr", "--schedule.warmup", "--cutout", "--recipe"):
        assert flag in out
    assert "(default: 0.998)" in out
    assert "--config.num-classes" in out


def test_a_misspelt_flag_names_the_nearest(capsys):
    code, _, err = run(capsys, "train", "tiny", "--epoch", "3")
    assert code == 2
    assert "--epochs" in err
    assert len(err.splitlines()) == 1
    code, _, err = run(capsys, "train", "tiny", "--optimizer", "AdmW")
    assert code == 2
    assert "did you mean 'AdamW'" in err


def test_the_command_trains_and_its_recipe_file_reproduces(capsys, world, tmp_path):
    flags = ["--data", str(world / "train"), "--validation", str(world / "val")]
    flags += ["--epochs", "1", "--optimizer", "LAMB", "--optimizer.lr", "0.01", "--quiet"]
    flags += ["--config.num-classes", "3", "--config.width=4", "--trackers"]
    code, out, err = run(capsys, "train", "tiny", *flags, "--out", str(tmp_path / "a"))
    assert code == 0, err
    assert "top1" in out
    _, recipe = read_recipe(tmp_path / "a" / "recipe.json")
    assert isinstance(recipe.optimizer, LAMB)
    assert recipe.optimizer.lr == 0.01
    assert recipe.config == {"num_classes": 3, "width": 4}
    again = ["--recipe", str(tmp_path / "a" / "recipe.json"), "--quiet", "--trackers"]
    assert run(capsys, "train", *again, "--out", str(tmp_path / "b"))[0] == 0
    assert difference(outcome(tmp_path / "a"), outcome(tmp_path / "b")) is None


def test_a_command_without_a_model_says_so(capsys):
    code, _, err = run(capsys, "train")
    assert code == 2
    assert "resnet18.cifar10" in err


def test_the_script_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", "resnet18.cifar100"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "cifar10" in done.stderr
    assert len(done.stderr.splitlines()) == 1
