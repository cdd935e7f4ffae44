from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zoo.errors import ConfigError
from zoo.training import checkpoint, distributed

RANKS = Path(__file__).with_name("ranks.py")
_spec = importlib.util.spec_from_file_location("ranks", RANKS)
assert _spec is not None
assert _spec.loader is not None
ranks: ModuleType = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)


def torchrun(what: str, folder: Path, processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(RANKS), what, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANKS.parents[3])}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    output = torchrun("play", folder).communicate(timeout=300)[0]
    assert (folder / "rank-0.json").exists(), output
    return folder


def outcome(folder: Path, scene: str) -> str:
    """What either rank found wrong."""
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    return "".join(outcomes.get(scene, "not reached\n") for outcomes in told)


@pytest.mark.parametrize("scene", ranks.SCENES)
def test_two_ranks(played: Path, scene: str) -> None:
    assert outcome(played, scene) == ""


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_ranks_step_as_one_process_does(played: Path, kind: str) -> None:
    net = ranks.seeded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    norms = [ranks.step(net, net, optimizer, number) for number in range(5)]
    # One process and two ranks load the same: here, without any rank, what the shares hold.
    state = checkpoint.load(checkpoint.at(played / kind, 5))
    assert state["norms"] == pytest.approx(norms, rel=1e-5)
    for name, tensor in net.state_dict().items():
        assert torch.allclose(state["model"][name], tensor, atol=1e-6), name


def test_shares_are_the_whole(played: Path) -> None:
    shares = checkpoint.load(checkpoint.at(played / "sharded", 5))["model"]
    whole = checkpoint.load(checkpoint.at(played / "whole", 5))["model"]
    assert shares.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(shares[name], tensor)
    files = checkpoint.at(played / "sharded", 5).files
    assert {"rank-0000.safetensors", "rank-0001.safetensors"} <= files


def test_a_sharded_run_goes_on_in_one_process(played: Path) -> None:
    state = checkpoint.load(checkpoint.at(played / "sharded", 3))
    net = ranks.seeded(9)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    distributed.load_state(net, state["model"])
    distributed.load_state(optimizer, state["optimizer"])
    for number in (3, 4):
        ranks.step(net, net, optimizer, number)
    end = checkpoint.load(checkpoint.at(played / "sharded", 5))
    for name, tensor in end["model"].items():
        assert torch.allclose(net.state_dict()[name], tensor, atol=1e-6), name


def test_a_rank_that_dies_ends_all_within_ten_seconds(tmp_path: Path) -> None:
    """Case DDP-05: killed within a save; the checkpoint before is complete."""
    run = torchrun("die", tmp_path)
    output = run.communicate(timeout=300)[0]
    assert run.returncode != 0
    assert (tmp_path / "died").exists(), output
    assert time.time() - float((tmp_path / "died").read_text()) < 10
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 1


def test_a_signal_ends_all_with_one_checkpoint(tmp_path: Path) -> None:
    run = torchrun("train", tmp_path)
    until = time.monotonic() + 200
    while not ((tmp_path / "at-0").exists() and (tmp_path / "at-1").exists()):
        assert run.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output = run.communicate(timeout=60)[0]
    assert time.monotonic() - began < 10, output
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None, output
    assert checkpoint.load(found) == {"step": found.step}
    reached = [(tmp_path / f"at-{rank}").read_text() for rank in (0, 1)]
    assert reached == [str(found.step)] * 2


def test_groups_follow_each_other_in_the_same_processes(tmp_path: Path) -> None:
    output = torchrun("restart", tmp_path).communicate(timeout=120)[0]
    assert all((tmp_path / f"restarted-{rank}").exists() for rank in (0, 1)), output


def test_one_process_needs_no_group() -> None:
    with distributed.start("cpu") as device:
        assert device == torch.device("cpu")
        assert distributed.world_size() == 1
        assert (distributed.rank(), distributed.local_rank()) == (0, 0)
        assert distributed.is_main()
        assert distributed.all_sum([1, 0.5]) == [1, 0.5]
        assert distributed.gather("x") == ["x"]
        assert distributed.broadcast_json((1, 2)) == (1, 2)
        model = torch.nn.Linear(1, 1)
        assert distributed.wrap(model, "fsdp", True, device) is model
        assert distributed.unwrap(torch.compile(model)) is model
        with distributed.sync_gradients(model, last=False):
            pass


def test_torchrun_variables_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"), distributed.start("cpu"):
        pass


def test_a_stop_is_a_flag_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with distributed.Stop() as stop:
        assert not stop.wanted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.wanted()
        with pytest.raises(SystemExit) as left:
            stop.leave()
        assert left.value.code == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def interrupt_twice() -> None:
    with distributed.Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wanted()
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interrupt_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_other_threads_install_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def enter() -> None:
        with distributed.Stop() as stop:
            seen.append((stop.wanted(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
