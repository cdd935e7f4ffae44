from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.errors import CheckpointError
from zoo.training import checkpoint, distributed

STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)},
    "optimizer": {
        "state": {0: {"step": torch.tensor(5.0), "mean": torch.randn(3)}, "0": torch.ones(1)},
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
    },
    "empty": [{}, [], (), torch.empty(0, 3), ""],
    "numbers": [True, 2**80, -0.0, float("inf"), float("-inf"), 1e-310],
    "$tensor": "no tensor",
    "a/b": torch.zeros(2),
    "a": {"b": torch.ones(2)},
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
}


def same(one: Any, two: Any) -> bool:
    """Equal in type, structure and bits."""
    if isinstance(one, torch.Tensor):
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*as_bytes)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return repr(one) == repr(two)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_state_comes_back_in_all_its_types(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "run" / "checkpoints", 7, STATE, keep=1)
    assert path.name == "step-000007"
    assert names(path) == ["manifest.json", "state.json", "state.safetensors"]
    found = checkpoint.newest(path.parent)
    assert found is not None
    assert (found.step, found.world_size, found.path) == (7, 1, path)
    assert same(checkpoint.load(found), STATE)
    assert same(checkpoint.load(path), STATE)
    assert checkpoint.load_part(found, 0) is None


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(4))
    state = {"one": weight, "two": weight, "view": weight[1:]}
    loaded = checkpoint.load(checkpoint.save(tmp_path, 1, state, keep=1))
    assert loaded["one"] is loaded["two"]
    assert torch.equal(loaded["view"], weight[1:])


def test_what_is_loaded_outlives_the_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"x": torch.ones(1000)}, keep=1)
    loaded = checkpoint.load(path)["x"]
    for file in path.iterdir():
        os.truncate(file, 0)
    loaded += 1
    assert loaded.sum().item() == 2000


def test_a_part_belongs_to_its_rank(tmp_path: Path) -> None:
    part = {"noise": torch.get_rng_state(), "python": random.Random(3).getstate()}
    path = checkpoint.save(tmp_path, 1, {"x": torch.ones(1)}, keep=1, part=part)
    assert same(checkpoint.load_part(path, 0), part)
    assert checkpoint.load_part(path, 1) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (nn.Linear(1, 1), "state/x is Linear, which a checkpoint cannot hold"),
        ({1.5: 2}, "state/x has a key that is neither a str nor an int"),
        (torch.ones(2).numpy(), "state/x is ndarray"),
        (torch.ones(2).to_sparse(), "state/x is sparse"),
        (torch.ones(2, dtype=torch.complex64), "cannot hold 'state/x', torch.complex64"),
    ],
)
def test_what_it_cannot_hold_is_named(tmp_path: Path, value: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(tmp_path, 1, {"x": value}, keep=1)
    assert names(tmp_path) == []


def test_optimizer_and_model_go_on_bit_for_bit(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()

    model, optimizer = made()
    train(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = checkpoint.save(tmp_path, 3, state, keep=1, part={"noise": torch.get_rng_state()})
    train(model, optimizer, 3)
    again, other = made()
    loaded, part = checkpoint.load(path), checkpoint.load_part(path, 0)
    assert part is not None
    distributed.load_state(again, loaded["model"])
    distributed.load_state(other, loaded["optimizer"])
    torch.set_rng_state(part["noise"])
    train(again, other, 3)
    assert same(again.state_dict(), model.state_dict())
    assert same(other.state_dict(), optimizer.state_dict())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << 3
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes|is damaged"),
    "short": (cut, "has .* bytes, not|is damaged"),
    "flipped": (flip, "is damaged"),
}
FILES = [
    "manifest.json",
    "state.json",
    "state.safetensors",
    "rank-0000.json",
    "rank-0000.safetensors",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over(tmp_path: Path, file: str, damage: str) -> None:
    """Case TRN-04; the order is that of the numbers, not of the names."""
    for step in (9, 10, 1_000_000):
        state = {"x": torch.full((64,), float(step))}
        checkpoint.save(tmp_path, step, state, keep=3, part={"y": torch.ones(3)})
    act, reason = DAMAGES[damage]
    act(tmp_path / "step-1000000" / file)
    before = {p.name: names(p) for p in tmp_path.iterdir()}
    with pytest.warns(UserWarning, match=f"step-1000000: {file} ({reason})") as seen:
        found = checkpoint.newest(tmp_path)
    assert len(seen) == 1
    assert found is not None
    assert found.step == 10
    assert checkpoint.load(found)["x"][0].item() == 10
    assert {p.name: names(p) for p in tmp_path.iterdir()} == before
    with pytest.warns(UserWarning, match="step-1000000"):
        assert checkpoint.agree(tmp_path) == found


def test_a_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, {"x": 1}, keep=1) / "manifest.json"
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, 13):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            checkpoint.check(path.parent)
    path.write_bytes(whole)
    assert checkpoint.check(path.parent).step == 3


def test_all_damaged_is_an_error_with_each_reason(tmp_path: Path) -> None:
    """Case CLI-03: never silently from scratch."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"x": torch.ones(3)}, keep=2)
        cut(tmp_path / f"step-{step:06d}" / "state.safetensors")
    for find in (checkpoint.newest, checkpoint.agree):
        with (
            pytest.warns(UserWarning, match="passed over"),
            pytest.raises(CheckpointError, match="all 2 checkpoints are damaged") as error,
        ):
            find(tmp_path)
        assert [reason.partition(":")[0] for reason in error.value.details] == [
            "step-000002",
            "step-000001",
        ]


def test_none_is_none_and_a_missing_one_is_named(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is checkpoint.newest(tmp_path / "none") is None
    assert checkpoint.agree(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match=r"gone/step-000009' is not there"):
        checkpoint.load(tmp_path / "gone" / "step-000009")
    with pytest.raises(CheckpointError, match="is not there"):
        checkpoint.at(tmp_path, 9)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; give a folder"):
        checkpoint.load(tmp_path / "file")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"x": 1}, keep=1)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["version"] = 2
    manifest["sha256"] = checkpoint._digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="has version 2; this zoo reads 1"):
        checkpoint.load(path)


def test_the_best_and_the_last_stay(tmp_path: Path) -> None:
    """Case TRN-05."""
    best = None
    for step, metric in enumerate((0.5, 0.9, 0.7, 0.6), 1):
        best = 2 if metric <= 0.9 and step >= 2 else step
        checkpoint.save(tmp_path, step, {"metric": metric}, keep=2, best=best)
    assert names(tmp_path) == ["step-000002", "step-000004"]
    assert checkpoint.load(checkpoint.at(tmp_path, 2)) == {"metric": 0.9}
    checkpoint.save(tmp_path, 5, {}, keep=1, best=2)
    assert names(tmp_path) == ["step-000002", "step-000005"]
    checkpoint.save(tmp_path, 6, {}, keep=3, best=6)
    assert names(tmp_path) == ["step-000002", "step-000005", "step-000006"]


def test_later_ones_are_not_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 100, {}, keep=1)
    checkpoint.save(tmp_path, 10, {}, keep=1)
    assert names(tmp_path) == ["step-000010", "step-000100"]


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    for number in range(2):
        checkpoint.save(tmp_path, 5, {"number": number}, keep=1)
        assert names(tmp_path) == ["step-000005"]
    (tmp_path / "step-000005" / "state.json").unlink()
    path = checkpoint.save(tmp_path, 5, {"number": 2}, keep=1)
    assert checkpoint.load(path) == {"number": 2}
    path.rename(tmp_path / "step-000005.replaced")  # what a kill between two renames leaves
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert checkpoint.load(found) == checkpoint.load(checkpoint.at(tmp_path, 5)) == {"number": 2}
    checkpoint.save(tmp_path, 5, {"number": 3}, keep=1)
    assert names(tmp_path) == ["step-000005"]


def test_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    from zoo.files import temporary_name

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = temporary_name()
    dead, alive = (own.replace(f"-{os.getpid()}-", f"-{n}-") for n in (ended.pid, os.getppid()))
    for name in (own, dead, alive):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    checkpoint.save(tmp_path, 1, {}, keep=1)
    assert names(tmp_path) == [alive, "step-000001"]


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, {"x": 1}, keep=1)

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint.tensorfile, "write", full)
    with pytest.raises(CheckpointError, match="rank 0: No space left on device"):
        checkpoint.save(tmp_path, 2, {"x": 1}, keep=1)
    assert names(tmp_path) == ["step-000001"]


def save_on(folder: Path, step: int, done: int) -> None:
    """Save again and again, until killed."""
    state: dict[str, Any] = {"model": {str(i): torch.zeros(2500) for i in range(20)}}
    while True:
        step += 1
        for tensor in state["model"].values():
            tensor.fill_(step)
        state["step"] = step
        # Every third time the step of the one before is saved again, which replaces it.
        checkpoint.save(folder, step - step % 3 // 2, state, keep=2, best=step // 7 * 7)
        os.write(done, f"{step} ".encode())


def killed(folder: Path, times: int) -> None:
    """Kill a process that saves again and again; what is newest is complete and no older."""
    generator = random.Random(times)
    began = time.monotonic()
    checkpoint.save(folder, 0, {"model": {}, "step": 0}, keep=2)
    span, saved, kills = 4 * (time.monotonic() - began), 0, 0
    while kills < times or saved <= times // 10:
        kills += 1
        before = saved
        reader, writer = os.pipe()
        if (saver := os.fork()) == 0:  # a new process would take seconds to import torch
            try:
                save_on(folder, saved, writer)
            finally:
                os._exit(1)
        os.close(writer)
        time.sleep(generator.uniform(0.0, span))
        os.kill(saver, signal.SIGKILL)
        assert os.waitpid(saver, 0)[1] == signal.SIGKILL
        with os.fdopen(reader) as said:
            saved = int((said.read().split() or [saved])[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # not one damaged folder is visible
            found = checkpoint.newest(folder)
        assert found is not None
        state = checkpoint.load(found)
        assert state["step"] >= saved
        assert all((tensor == state["step"]).all() for tensor in state["model"].values())
        saved = state["step"]
        if saved == before:  # where a process takes long to begin, it gets longer to live
            span *= 1.1
    # Hidden ones are of the last process alone: of its save and of what that replaced or rotated.
    assert len([name for name in names(folder) if name.startswith(".")]) <= 2


def test_a_kill_leaves_a_complete_one(tmp_path: Path) -> None:
    killed(tmp_path, 30)


@pytest.mark.prove
def test_a_thousand_kills_leave_a_complete_one(tmp_path: Path) -> None:
    killed(tmp_path, 1000)
