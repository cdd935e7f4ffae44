"""Fine-tuning from one call or one command, to weights that just work."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from zoo.cards import File, Weights
from zoo.cli import main
from zoo.errors import ConfigError, DataError
from zoo.finetuning import default_folder, finetune
from zoo.planning import Request

ROOT = Path(__file__).resolve().parents[2]
COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small convolutional network, saved; it takes images of 16 pixels."""
    torch.manual_seed(0)
    model = zoo.load("resnet18", width=8, depths=(1, 1, 1, 1), num_classes=2)
    preprocessing = {
        "size": 16,
        "resize": "squash",
        "crop": 16,
        "interpolation": "bilinear",
        "antialias": True,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
    }
    weights = Weights(files=(File(name="x"),), licence="MIT", preprocessing=preprocessing)
    model.card = replace(model.card, tag="x", weights={"x": weights})
    return zoo.save(model, tmp_path_factory.mktemp("start") / "tiny")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three colours, twenty pictures each."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("data") / "photos"
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.clip(np.array(colour) + rng.integers(-40, 40, (20, 20, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def done(start: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return finetune(start, photos, out=out, epochs=6, quiet=True)


def test_the_written_folder_loads_and_answers(done, photos):
    pipe = zoo.pipeline(done.weights)
    for name in COLOURS:
        assert pipe(photos / name / "0.png")[0]["label"] == name
    model = zoo.load(done.weights)
    assert model.card.labels == ("blue", "green", "red")
    assert model.card.preprocessing["crop"] == 16
    assert model.card.weights[model.card.tag].licence == "MIT"


def test_the_card_says_what_was_measured_on_the_held_out_part(done):
    (weights,) = zoo.load(done.weights).card.weights.values()
    stated = {m.name: (m.value, m.n) for m in weights.metrics}
    assert stated["photos/validation/top1"] == (pytest.approx(done.confusion.accuracy), 12)
    assert done.metrics["validation/top1"] == done.confusion.accuracy >= 0.9


def test_the_card_says_what_was_measured_on_the_test_part(start, photos, tmp_path):
    data = tmp_path / "colours"
    for part, numbers in (("train", range(12)), ("val", range(12, 16)), ("test", range(16, 20))):
        for name in COLOURS:
            (data / part / name).mkdir(parents=True)
            for number in numbers:
                shutil.copy(photos / name / f"{number}.png", data / part / name)
    for _ in range(2):  # the second call finds the run done
        run = finetune(start, data, out=tmp_path / "run", epochs=2, quiet=True)
        (weights,) = zoo.load(run.weights).card.weights.values()
        stated = {m.name: (m.value, m.n) for m in weights.metrics}
        wanted = {
            f"colours/{part}/{name}": (pytest.approx(run.metrics[f"{part}/{name}"], abs=1e-6), 12)
            for part in ("validation", "test")
            for name in ("top1", "top5")
        }
        assert stated == wanted
        assert len(weights.metrics) == 4


def test_the_report_is_all_there(done):
    held_out = done.plan.rows["validation"]
    assert done.confusion.counts.sum(1).tolist() == held_out.counts().tolist() == [4, 4, 4]
    for name in ("curves.png", "confusion.png"):
        with Image.open(done.folder / name) as image:
            image.load()
            assert min(image.size) > 300
    with open(done.folder / "worst.csv", encoding="utf-8", newline="") as file:
        wrong = list(csv.DictReader(file))
    assert len(wrong) == done.confusion.total - np.trace(done.confusion.counts)
    assert [m.item for m in done.confusion.mistakes] == [row["item"] for row in wrong]
    assert json.loads((done.folder / "recipe.json").read_text())["recipe"]["epochs"] == 6


def test_training_and_held_out_items_are_apart(done):
    rows = done.plan.rows
    seen = {part: {rows[part].raw(i) for i in range(len(rows[part]))} for part in rows}
    assert len(seen["train"]) == 48
    assert len(seen["validation"]) == 12
    assert not seen["train"] & seen["validation"]


def test_the_same_call_again_finds_the_run_done(done, start, photos, capsys):
    again = finetune(start, photos, out=done.folder, epochs=6)
    shown = capsys.readouterr()
    assert "step-000" in shown.err  # it goes on from the last checkpoint, which is the end
    assert again.metrics == done.metrics
    assert again.plan.plain() == done.plan.plain()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epochs": 5}, "epochs 6 where it is 5 now"),
        ({"epochs": 6, "flip": True}, "flip None where it is True now"),
        ({"epochs": 6, "lr": 0.5}, "lr None where it is 0.5 now"),
    ],
)
def test_another_plan_is_refused_in_the_same_folder(done, start, photos, fields, words):
    with pytest.raises(ConfigError, match=words) as caught:
        finetune(start, photos, out=done.folder, quiet=True, **fields)
    assert "--resume never" in caught.value.line


def test_a_trained_body_may_be_frozen_for_the_first_epoch(start, photos, tmp_path):
    fields = {"freeze": -1, "freeze_epochs": 1, "epochs": 1, "batch_size": 16}
    run = finetune(start, photos, out=tmp_path / "frozen", quiet=True, **fields)
    before, after = (zoo.load(place).state_dict() for place in (start, run.weights))
    assert torch.equal(before["conv1.weight"], after["conv1.weight"])
    assert torch.equal(before["bn1.running_mean"], after["bn1.running_mean"])
    assert run.plan.trained == run.plan.parameters  # in the end
    run = finetune(start, photos, out=tmp_path / "thawed", quiet=True, **{**fields, "epochs": 2})
    assert not torch.equal(
        before["conv1.weight"], zoo.load(run.weights).state_dict()["conv1.weight"]
    )


def test_only_the_head_is_trained_and_at_its_own_rate(start, photos, tmp_path):
    run = finetune(start, photos, out=tmp_path / "run", quiet=True, freeze=-1, epochs=1)
    assert run.plan.trained == sum(p.numel() for p in zoo.load(run.weights).fc.parameters())
    assert run.plan.recipe.optimizer.lr == 3e-3
    before, after = (zoo.load(place).state_dict() for place in (start, run.weights))
    changed = {
        name for name in after if name not in before or not torch.equal(before[name], after[name])
    }
    assert changed == {"fc.weight", "fc.bias"}


def test_broken_pictures_are_left_out_and_named_in_the_plan(start, photos, tmp_path, capsys):
    folder = tmp_path / "mixed"
    for name in COLOURS:
        (folder / name).mkdir(parents=True)
        for number in range(4):
            suffix = ".jpg" if number == 0 else ".png"
            with Image.open(photos / name / f"{number}.png") as image:
                image.save(folder / name / f"{number}{suffix}")
    for number in range(3):
        (folder / "red" / f"broken{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(number))
    (folder / "none").mkdir()
    run = finetune(start, folder, out=tmp_path / "run", epochs=1)
    shown = capsys.readouterr().out
    assert shown.count("unreadable, left out") == 3
    assert "the class 'none' has no readable item" in shown
    assert "mixed formats" in shown
    assert zoo.load(run.weights).card.labels == ("blue", "green", "red")


def test_nothing_is_written_where_the_data_cannot_be_used(start, photos, tmp_path):
    (tmp_path / "one" / "red").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "one" / "red" / "a.png")
    with pytest.raises(DataError, match="one class with items, 'red'; give at least two"):
        finetune(start, tmp_path / "one", out=tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match="'epoch'; did you mean 'epochs'"):
        finetune(start, photos, out=tmp_path / "run", quiet=True, epoch=3)
    assert not (tmp_path / "run").exists()


def test_a_table_of_texts_trains_an_embedding_body(tmp_path):
    """Columns and classes are found, and the tokenizer goes with the weights."""
    words = {"good": ["fine", "great", "lovely"], "bad": ["awful", "dull", "poor"]}
    lines = [
        f"{number},{word} film number {number},{label}"
        for label, several in words.items()
        for word in several
        for number in range(6)
    ]
    table = tmp_path / "reviews.csv"
    table.write_text("\n".join(["id,opinion,sentiment", *lines]))
    run = finetune("all-minilm-l6-v2", table, out=tmp_path / "run", quiet=True, epochs=1, freeze=-1)
    assert run.plan.recipe.task == "text-classification"
    assert run.plan.recipe.buckets
    assert run.plan.classes == ("bad", "good")
    answer = zoo.pipeline(run.weights)("a great film")
    assert {record["label"] for record in answer} == {"bad", "good"}
    assert len(run.plan.rows["validation"]) == 7


def test_the_folder_is_called_by_model_and_data():
    request = Request(model="resnet50.cifar10", data="../my photos/")
    assert default_folder(request) == Path("runs", "resnet50-my-photos")


def test_a_killed_command_goes_on_and_ends_as_if_it_had_not_been(start, photos, tmp_path, capsys):
    out = tmp_path / "run"
    flags = [
        "--data",
        str(photos),
        "--epochs",
        "4",
        "--batch-size",
        "16",
        "--checkpoint-every",
        "1",
    ]
    first = subprocess.Popen(
        [sys.executable, "scripts/finetune.py", str(start), *flags, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    while not list(out.glob("checkpoints/step-*")):
        time.sleep(0.02)
        assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGKILL)
    shown, _ = first.communicate()
    assert "time      about" in shown
    with pytest.raises(SystemExit) as ended:
        main(["finetune", str(start), *flags, "--out", str(out)])
    again = capsys.readouterr()
    assert ended.value.code == 0
    assert "goes on from step-" in again.err
    for word in ("model", "data", "classes", "training", "time", "measured", "weights"):
        assert any(line.startswith(f"{word} ") for line in again.out.splitlines()), again.out
    fields = {"epochs": 4, "batch_size": 16, "checkpoint_every": 1}
    unbroken = finetune(start, photos, out=tmp_path / "unbroken", quiet=True, **fields)
    killed, whole = (zoo.load(f / "weights").state_dict() for f in (out, unbroken.folder))
    assert all(torch.equal(killed[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a model is missing; the form is: zoo finetune MODEL --data PATH"),
        (["resnet18"], "--data is missing"),
        (["resnet19", "--data", "x"], "did you mean 'resnet18'"),
        (["resnet18", "--data", "x", "--epoch", "3"], "--epochs"),
        (["resnet18", "--data", "x", "--optimizer", "SDG"], "did you mean 'SGD'"),
        (["resnet18", "--data", "x", "--optimizer", "SGD"], "add --optimizer.lr"),
        (["resnet18", "--data", "gone", "--no-pretrained"], "there is no 'gone'"),
        (["resnet18", "--data", "x", "--init", "y"], "name the weights to begin with"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["finetune", *arguments])
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_help_names_every_flag_of_the_recipe(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["finetune", "resnet18", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--data", "--out", "--label-column", "--lr", "--flip", "--freeze-epochs"):
        assert flag in shown


@pytest.mark.prove
def test_handwritten_digits_are_learnt_in_five_minutes(tmp_path):
    """One command: 100 digits a class from a network of CIFAR-10, measured on all others."""
    from sklearn.datasets import load_digits  # a second to import

    digits = load_digits()
    seen: Counter[int] = Counter()
    for number, (image, target) in enumerate(zip(digits.images, digits.target, strict=True)):
        seen[target] += 1
        part = "train" if seen[target] <= 100 else "validation"
        folder = tmp_path / "digits" / part / str(target)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (image / 16 * 255).round().astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "finetune",
                "resnet18.cifar10",
                "--data",
                f"{tmp_path}/digits",
                "--out",
                f"{tmp_path}/run",
            ]
        )
    assert ended.value.code == 0
    assert time.monotonic() - began < 300
    (weights,) = zoo.load(tmp_path / "run" / "weights").card.weights.values()
    stated = {m.name: (m.value, m.n) for m in weights.metrics}
    value, count = stated["digits/validation/top1"]
    assert count == 797
    assert value >= 0.97
    for name in ("plan.json", "curves.png", "confusion.png", "worst.csv"):
        assert (tmp_path / "run" / name).stat().st_size > 0


@pytest.mark.prove
def test_two_processes_make_one_plan_and_one_report(start, photos, tmp_path):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--data", str(photos), "--epochs", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*run, "scripts/finetune.py", str(start), *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for word in ("model", "training", "measured", "written", "weights"):
        assert sum(line.startswith(f"{word} ") for line in lines) == 1 + (word == "measured")
    assert zoo.load(tmp_path / "run" / "weights").card.labels == ("blue", "green", "red")
    again = [*run, "scripts/finetune.py", str(start), "--data", str(tmp_path / "gone")]
    failed = subprocess.run(
        again, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert failed.returncode != 0
    assert failed.stderr.count("zoo: there is no") == 1
