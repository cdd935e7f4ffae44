"""The two wheels, installed without the checkout, list, load, predict, fine-tune and save."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

import zoo

ROOT = Path(__file__).resolve().parent.parent
LARGE = 10_000_000  # bytes
TOPS = {"zoo", "vision", "nlp", "rl", "audio", "weights"}
PROBE = "probe.trained.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which one more card, probe, has weights of more than 10 MB."""
    copy = tmp_path_factory.mktemp("source") / "refzoo"
    unwanted = (".git", ".venv", "shared", "out", "runs", "dist", "build", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*unwanted))
    for cache in ("zoo/__pycache__", "weights/__pycache__", "weights/labels/.pytest_cache"):
        (copy / cache).mkdir(exist_ok=True)
        (copy / cache / "left.cpython-311.pyc").write_bytes(b"left over")
    torch.manual_seed(0)
    saved = zoo.save(zoo.load("resnet18", width=32), tmp_path_factory.mktemp("saved"))
    card = (saved / "resnet18.toml").read_text("utf-8")
    weights = next(saved.glob("*.safetensors"))
    (copy / "weights" / "probe.toml").write_text(card.replace(weights.name, PROBE), "utf-8")
    shutil.move(weights, copy / "weights" / PROBE)
    assert (copy / "weights" / PROBE).stat().st_size > LARGE
    return copy


@pytest.fixture(scope="module")
def wheels(source: Path) -> tuple[Path, Path]:
    """refzoo and refzoo-weights."""
    for project in (source, source / "packaging" / "weights"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", source / "dist"],
            cwd=project, check=True, capture_output=True,
        )  # fmt: skip
    code, weights = sorted((source / "dist").iterdir())
    assert code.name.startswith("refzoo-")
    assert weights.name.startswith("refzoo_weights-")
    return code, weights


def sizes(wheel: Path) -> dict[str, int]:
    with ZipFile(wheel) as archive:
        return {
            entry.filename: entry.file_size
            for entry in archive.infolist()
            if ".dist-info/" not in entry.filename
        }


def test_the_wheels_hold_the_zoo_and_nothing_else(source: Path, wheels: tuple[Path, Path]) -> None:
    code, weights = map(sizes, wheels)
    committed = {
        str(path.relative_to(source)): path.stat().st_size
        for top in TOPS
        for path in (source / top).rglob("*")
        if path.is_file() and not any("cache" in part for part in path.parent.parts)
    }
    assert code | weights == committed
    assert not code.keys() & weights.keys()
    assert {name.partition("/")[0] for name in code} == TOPS
    assert all(size <= LARGE for size in code.values())
    assert all(size > LARGE for size in weights.values())
    assert {str(Path(name).parent) for name in weights} == {"weights"}
    assert f"weights/{PROBE}" in weights
    for name in ("weights/resnet50.toml", "weights/labels/imagenet1k.txt"):
        assert name in code
    goldens = {f"weights/{path.name}" for path in ROOT.glob("weights/*.golden.safetensors")}
    assert goldens
    assert goldens <= code.keys()


def test_the_wheels_are_of_one_version() -> None:
    versions = {
        tomllib.loads((ROOT / path).read_text("utf-8"))["project"]["version"]
        for path in ("pyproject.toml", "packaging/weights/pyproject.toml")
    }
    assert versions == {zoo.__version__}


@pytest.fixture(scope="module")
def installed(
    wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Runs a command of an environment that has the wheels and the outer packages.

    It stands in a folder of its own, and nothing leads it to the checkout: a path in a ``.pth``
    file is searched, but the ``.pth`` files there, such as an editable install's, are not.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith("-packages")]
    (site / "outer.pth").write_text("\n".join(outer))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ZOO_WEIGHTS")}
    env |= {"ZOO_HOME": str(folder / "home"), "ZOO_OFFLINE": "1"}

    def run(program: str, *arguments: object) -> str:
        done = subprocess.run(
            [folder / "venv" / "bin" / program, *map(str, arguments)],
            cwd=folder, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(wheel: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        options = ["install", "--quiet", "--no-deps", "--no-index", wheel]
        subprocess.run([*pip, *options], check=True, env=env)

    there = "import zoo.weights; print(zoo.weights.installed(zoo.card('probe.saved')))"
    install(wheels[0])
    assert run("python", "-c", there).strip() == "False"
    install(wheels[1])
    assert run("python", "-c", there).strip() == "True"
    return run


def test_nothing_leads_to_the_checkout(installed: Callable[..., str]) -> None:
    code = (
        "import json, sys, zoo; from importlib.util import find_spec\n"
        "absent = [name for name in sys.argv[1:] if find_spec(name) is None]\n"
        "print(json.dumps([zoo.__file__, sys.path, absent]))"
    )
    names = sorted(TOPS | {"scripts", "tests"})
    file, paths, absent = json.loads(installed("python", "-c", code, *names))
    assert "elsewhere" in file
    assert str(ROOT) not in paths
    assert absent == ["scripts", "tests"]


def test_the_command_lists_shows_and_predicts(installed: Callable[..., str]) -> None:
    names = [line.split()[0] for line in installed("zoo", "list").splitlines()]
    assert set(names) == {*zoo.list_models(), "probe"}
    assert "stsb/test/spearman" in installed("zoo", "show", "all-minilm-l6-v2")
    texts = ("A plane landed.", "An aircraft touched down.", "She planted tulips.")
    out = installed("zoo", "predict", "all-minilm-l6-v2", *texts)
    assert out.index("aircraft") < out.index("tulips")


TUNE = """
import sys
from pathlib import Path
import torch
import zoo

assert zoo.load("efficientnet_lite0", pretrained=True).load_report.sha256

model = zoo.load("all-minilm-l6-v2", pretrained=True, task="text-classification", num_classes=2)
batch = zoo.preprocess(model)(["dreadful, a waste of time", "a delight from start to end"])
target = torch.tensor([0, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(4):
    loss = torch.nn.functional.cross_entropy(model(**batch), target)
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert losses[-1] < losses[0], losses
zoo.save(model, "mine", labels=["bad", "good"])
print(model(**batch).argmax(1).tolist())
"""


def test_weights_of_both_wheels_load_and_a_model_is_tuned_saved_and_used(
    installed: Callable[..., str],
) -> None:
    assert installed("python", "-c", TUNE).strip() == "[0, 1]"
    texts = ("dreadful, a waste of time", "a delight from start to end")
    lines = installed("zoo", "predict", "mine", *texts, "--top-k", "1").splitlines()
    assert [line.split("\t")[1].split()[0] for line in lines] == ["bad", "good"]


def test_large_weights_load_by_name(installed: Callable[..., str]) -> None:
    """Those of the probe, and of every card whose default weights lie in ``weights/``."""
    names = ["probe"]
    for card in map(zoo.card, zoo.list_models()):
        weights = card.weights.get(card.default_tag or "")
        if weights and all((ROOT / "weights" / file.name).is_file() for file in weights.files):
            names.append(card.name)
    code = (
        "import sys, zoo\n"
        "for name in sys.argv[1:]:\n"
        "    report = zoo.load(name, pretrained=True).load_report\n"
        "    print(report.verified, report.source)"
    )
    lines = installed("python", "-c", code, *names).splitlines()
    assert len(lines) == len(names)
    assert all("site-packages/weights" in line and line.startswith("hashed") for line in lines)
