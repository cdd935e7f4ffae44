"""The loop does what it says: what a step is, what a run survives, what it refuses."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.prove.resumes import make_world, recipe_for
from tests.zoo.training.loop_ranks import assert_equal
from zoo import cards
from zoo.data.loader import Step
from zoo.data.rows import ListRows
from zoo.errors import ConfigError, NonFiniteError
from zoo.training import checkpoint
from zoo.training.loop import SKIPS_IN_A_ROW, train_step
from zoo.training.recipe import SGD, AdamW, Linear, Plateau, Recipe
from zoo.training.run import make_batches, train
from zoo.training.state import Run

RANKS = Path(__file__).with_name("loop_ranks.py")
CPU = torch.device("cpu")
PLAIN = SGD(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop") / "world"
    make_world(folder)
    return folder


@pytest.fixture
def tiny(world, monkeypatch):
    """Train the small model of the small world."""
    monkeypatch.setattr(cards, "CARDS", world / "cards")

    def run(out, kind="plain", **changes):
        recipe = recipe_for(kind, world, **changes)
        return train("tiny.small", recipe, out, trackers=(), quiet=True)

    return run


class Toy:
    """Logits of a linear model; the raw input is a vector."""

    name = "toy"

    def example(self, raw, target, recipe=None, generator=None, size=None):
        return {"x": torch.tensor(raw), "target": torch.tensor(target)}

    def collate(self, samples):
        return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}

    def loss(self, model, batch):
        loss = nn.functional.cross_entropy(
            model(batch["x"]), batch["target"], reduction="sum", ignore_index=-100
        )
        return loss, len(batch["target"])


class Counting(Toy):
    def count(self, batch):
        return int((batch["target"] != -100).sum())


def toy(recipe, task=None, n=8, model=None, evaluate=None):
    torch.manual_seed(0)
    model = model or nn.Linear(4, 3)
    vectors = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)
    rows = ListRows("toy", [(vector, i % 3) for i, vector in enumerate(vectors)], tuple("abc"))
    task = task or Toy()
    batches = make_batches(rows, task, recipe, CPU)
    run = Run(model, task, recipe, batches, Path(), device=CPU, evaluate=evaluate)
    run.settle()
    return run


def steps(run, count):
    found = []
    for step in run.batches.steps(run.position.step):
        train_step(run, step)
        found.append(run)
        if len(found) == count:
            return run
    return run


def pair(out, sizes):
    """Run loop_ranks.py in two processes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    processes = []
    for rank in "01":
        env = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = str(RANKS.parents[3])
        command = [sys.executable, RANKS, out, json.dumps(sizes)]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for process in processes:
        error = process.communicate(timeout=550)[1]
        assert process.returncode == 0, error[-2000:]


@pytest.mark.parametrize(
    "sizes", [[1, 2, 3, 7, 17], pytest.param([*range(1, 18)], marks=pytest.mark.prove)]
)
def test_two_ranks_equal_one_process(tmp_path, sizes):
    make_world(tmp_path / "world")
    out = tmp_path / "world"
    pair(out, sizes)
    env = {**os.environ, "PYTHONPATH": str(RANKS.parents[3]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, RANKS, out, json.dumps(sizes)], env=env, check=True)
    assert_equal(out, sizes)


def test_a_step_is_the_gradient_of_the_mean_over_all_microbatches():
    whole, parts = (
        steps(toy(Recipe(optimizer=PLAIN, batch_size=8, microbatches=m)), 1) for m in (1, 3)
    )
    by_hand = toy(Recipe(optimizer=PLAIN, batch_size=8)).model
    batch = next(iter(whole.batches.steps(0))).batches[0]
    loss = nn.functional.cross_entropy(by_hand(batch["x"]), batch["target"])
    (gradient,) = torch.autograd.grad(loss, [by_hand.weight])
    expected = by_hand.weight - gradient
    assert torch.allclose(whole.model.weight, expected, atol=1e-6)
    assert torch.allclose(parts.model.weight, expected, atol=1e-6)
    assert whole.position.loss_sum / 8 == pytest.approx(loss.item(), abs=1e-6)


def test_tokens_without_a_target_count_nothing():  # TRN-06
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    run = toy(Recipe(optimizer=PLAIN, batch_size=4, microbatches=2), Counting(), model=model)
    ignored, valid = torch.tensor([-100, -100]), torch.tensor([0, 1])
    batches = [{"x": torch.ones(2, 4), "target": target} for target in (ignored, valid)]
    train_step(run, Step(0, 0, batches, 4, [[0, 1], [2, 3]]))
    assert run.position.loss_count == 2
    assert run.position.loss_sum / 2 == pytest.approx(math.log(2), abs=1e-7)
    assert torch.isfinite(model.weight).all()


def test_a_single_item_trains_a_batch_norm():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.norm(x))

    run = steps(toy(Recipe(batch_size=4, microbatches=4), n=5, model=Normed()), 2)
    assert run.position.step == 2
    assert torch.isfinite(run.model.norm.running_var).all()


def test_the_rate_follows_the_schedule_of_updates():
    recipe = Recipe(
        epochs=4, batch_size=8, optimizer=AdamW(lr=0.1), schedule=Linear(warmup=0.5), layer_decay=1
    )
    run, rates = toy(recipe), []
    for step in run.batches.steps(0):
        train_step(run, step)
        rates.append(run.optimizer.param_groups[0]["lr"])
        if len(rates) == 4:
            break
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])


class Poisoned(Toy):
    """A task that is not finite in some steps."""

    def __init__(self, bad):
        self.bad, self.calls = bad, 0

    def loss(self, model, batch):
        loss, count = super().loss(model, batch)
        self.calls += 1
        return (loss * math.nan if self.calls in self.bad else loss), count


def test_a_non_finite_loss_ends_the_run_and_says_where():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    run = toy(Recipe(batch_size=4), model=model)
    with torch.no_grad():
        model[2].weight.fill_(math.inf)
    with pytest.raises(NonFiniteError) as caught:
        steps(run, 1)
    assert "step 0" in caught.value.line
    assert "first bad layer 2" in caught.value.line
    assert "toy, row" in caught.value.details[0]
    assert len(caught.value.line) <= 200


def test_a_non_finite_step_is_skipped_where_the_recipe_says_so():
    calm, poisoned = (
        toy(Recipe(batch_size=8, nonfinite="skip", ema=0.9), Poisoned(bad)) for bad in ((), (2,))
    )
    steps(poisoned, 2)
    steps(calm, 1)
    assert poisoned.position.skipped == 1
    assert poisoned.position.updates == 1
    assert poisoned.ema.updates == 1
    assert torch.equal(poisoned.model.weight, calm.model.weight)
    steps(poisoned, 1)
    assert poisoned.position.updates == 2
    assert poisoned.position.skipped_in_a_row == 0


def test_statistics_of_a_skipped_step_are_forgotten():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.norm(x))

    run = toy(Recipe(batch_size=8, nonfinite="skip"), model=Normed())
    batch = {"x": torch.full((8, 4), math.inf), "target": torch.zeros(8, dtype=torch.int64)}
    train_step(run, Step(0, 0, [batch], 8, [[*range(8)]]))
    assert run.position.skipped == 1
    assert torch.equal(run.model.norm.running_mean, torch.zeros(4))


def test_too_many_skips_in_a_row_end_the_run():
    run = toy(Recipe(batch_size=8, nonfinite="skip"), Poisoned(range(1000)))
    with pytest.raises(NonFiniteError, match=f"{SKIPS_IN_A_ROW}th time in a row"):
        steps(run, 100)
    assert run.position.skipped == SKIPS_IN_A_ROW


def test_a_poisoned_state_is_never_saved(tiny, tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        tiny(tmp_path / "run", optimizer=SGD(lr=1e30), checkpoint_every=1)
    assert len(caught.value.line) <= 200
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    if found:
        state = checkpoint.load(found)["model"]
        assert all(torch.isfinite(t).all() for t in state.values() if t.is_floating_point())


def test_a_run_ends_early_and_keeps_its_best_weights(tiny, tmp_path):
    result = tiny(tmp_path / "run", epochs=40, patience=1, evaluate_every=2, metric="top1", keep=1)
    assert result.steps < 200
    state = checkpoint.load(checkpoint.at(tmp_path / "run" / "checkpoints", result.best[0]))
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {x["step"]: x["validation/top1"] for x in lines if "validation/top1" in x}
    assert max(measured.values()) == result.best[1] == result.metrics["top1"]
    assert result.steps == max(measured)
    (file,) = (tmp_path / "run" / "weights").glob("*.safetensors")
    from zoo import tensorfile

    with file.open("rb") as opened:
        stored = tensorfile.read_tensors(opened, tensorfile.read_header(opened, file.name))
    assert all(torch.equal(stored[name], tensor) for name, tensor in state["model"].items())


def test_a_plateau_lowers_the_rate(tiny, tmp_path):
    tiny(
        tmp_path / "run",
        evaluate_every=1,
        schedule=Plateau(patience=0, factor=0.5),
        epochs=2,
        optimizer=AdamW(lr=1e-9),
    )
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    factor, best = 1.0, -1.0
    for value in [x["validation/top1"] for x in lines if "validation/top1" in x][:9]:
        factor, best = factor if value > best else factor / 2, max(value, best)
    assert factor < 1
    # The tenth step has the rate of the ninth evaluation.
    assert next(x["lr"] for x in lines if "lr" in x) == pytest.approx(1e-9 * factor, rel=1e-12)


def test_frozen_groups_stay_until_they_are_thawed(tiny, tmp_path):
    tiny(tmp_path / "run", freeze=-1, freeze_epochs=1.0, epochs=2, checkpoint_every=1, keep=20)
    first, thawing, last = (
        checkpoint.load(checkpoint.at(tmp_path / "run" / "checkpoints", step))["model"]
        for step in (1, 5, 10)
    )
    body = [name for name in first if not name.startswith("fc")]
    assert all(torch.equal(first[name], thawing[name]) for name in body)
    assert not torch.equal(first["fc.weight"], thawing["fc.weight"])
    assert not torch.equal(thawing["layer1.0.conv1.weight"], last["layer1.0.conv1.weight"])


def test_an_unknown_metric_is_named(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"metric is 'top'; did you mean .*'top1'"):
        tiny(tmp_path / "run", metric="top", epochs=1)


def test_half_precision_on_a_cpu_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="bfloat16"):
        tiny(tmp_path / "run", precision="float16")
