"""A model whose layers are spread over two processes is the model of one process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.prove.resumes import TIMES
from tests.zoo.training import stage_ranks
from zoo import cards
from zoo.training import checkpoint

RANKS = Path(stage_ranks.__file__)


def torchrun(folder: Path, processes: int, *jobs: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(RANKS), str(folder), *jobs]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANKS.parents[3])}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def make_cards(folder: Path) -> None:
    """A card, its tokenizer, fourteen texts."""
    (folder / "cards").mkdir()
    words = "\n".join(stage_ranks.WORDS).encode()
    (folder / "cards" / "words.txt").write_bytes(words)
    card = stage_ranks.CARD.replace("WORDS", hashlib.sha256(words).hexdigest())
    (folder / "cards" / "tiny.toml").write_text(card.replace("SHA", "0" * 64))
    texts = [f"{'a ' * (i % 5)}very {('good', 'bad')[i % 2]} film,{i % 2}" for i in range(14)]
    (folder / "texts.csv").write_text("\n".join(["text,label", *texts]) + "\n")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    make_cards(folder)
    return folder


@pytest.fixture(autouse=True)
def _cards(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "CARDS", world / "cards")


def begun(run: Path, name: str) -> Path:
    """A copy of a run as it stood after two steps."""
    out = run.with_name(name)
    shutil.copytree(run, out)
    shutil.rmtree(out / "weights")
    for path in (out / "checkpoints").iterdir():
        if path.name > "step-000002":
            shutil.rmtree(path)
    return out


@pytest.fixture(scope="module")
def runs(world: Path) -> dict[str, Path]:
    """A run of one process and one of two, and runs that change from one to the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "CARDS", world / "cards")
        stage_ranks.main(world, "alone", "gradients")
        begun(world / "alone", "1-to-2")
        torchrun(world, 2, "gradients", "together", "1-to-2")
        stage_ranks.main(world, begun(world / "together", "2-to-1").name)
    return {name: world / name for name in ("alone", "together", "1-to-2", "2-to-1")}


@pytest.fixture(scope="module")
def three(runs: dict[str, Path], world: Path) -> Path:
    """A run that goes on on three processes."""
    torchrun(world, 3, "gradients", begun(runs["together"], "2-to-3").name)
    return world / "2-to-3"


def log(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def assert_like(one: Path, other: Path) -> None:
    """The two runs came to the same: weights, metrics, every number of the log."""
    for mine, theirs in zip(log(one), log(other), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    state = zoo.load(other / "weights").state_dict()
    for name, tensor in zoo.load(one / "weights").state_dict().items():
        assert torch.allclose(tensor, state[name], atol=1e-6), name


def assert_gradients(world: Path, processes: int) -> list[str]:
    """Gradients, losses and answers are those of one process; gives what was refused."""
    (alone,) = json.loads((world / "gradients-1.json").read_text())["steps"]
    found = json.loads((world / f"gradients-{processes}.json").read_text())
    assert len(alone) == 5
    assert len(found["steps"]) == processes
    for kind, one in alone.items():
        for rank in found["steps"]:
            step = rank[kind]
            assert step["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert step["norm"] == pytest.approx(one["norm"], rel=1e-6)
            assert step["held"] < one["held"]
            assert torch.allclose(*(torch.tensor(s["answer"]) for s in (step, one)), atol=1e-6)
            for name, gradient in one["gradient"].items():
                pair = torch.tensor(step["gradient"][name]), torch.tensor(gradient)
                assert torch.allclose(*pair, rtol=0, atol=1e-6), (kind, name)
    return list(found["refused"])


def test_gradients_are_those_of_one_process(runs: dict[str, Path], world: Path) -> None:
    linear, shallow = assert_gradients(world, 2)
    assert "Linear cannot be cut into stages" in linear
    assert "Bert has layers for 1 ranks, and there are 2" in shallow


@pytest.mark.parametrize("name", ["together", "1-to-2", "2-to-1"])
def test_a_run_on_any_number_of_ranks_is_that_of_one_process(
    runs: dict[str, Path], name: str
) -> None:
    assert_like(runs[name], runs["alone"])


@pytest.mark.prove
def test_three_ranks_too(three: Path, runs: dict[str, Path], world: Path) -> None:
    assert_gradients(world, 3)
    assert_like(three, runs["alone"])


def test_each_rank_writes_its_own_layers(runs: dict[str, Path]) -> None:
    found = checkpoint.newest(runs["together"] / "checkpoints")
    assert found is not None
    assert found.world_size == 2
    alone = checkpoint.newest(runs["alone"] / "checkpoints")
    assert alone is not None
    states = [checkpoint.load(place) for place in (found, alone)]
    for kind in ("model", "ema"):
        named = [s[kind]["tensors"] if kind == "ema" else s[kind] for s in states]
        assert list(named[0]) == list(named[1])
        for name, tensor in named[0].items():
            assert torch.allclose(tensor, named[1][name], atol=1e-6), name
    one, other = (state["optimizer"]["state"] for state in states)
    assert list(one) == list(other)
    sizes = [(found.path / f"rank-000{rank}.safetensors").stat().st_size for rank in (0, 1)]
    whole = (alone.path / "state.safetensors").stat().st_size
    assert (found.path / "state.safetensors").stat().st_size < whole
    assert max(sizes) < whole
