"""Two hosts, which are two network namespaces with a cable between them, train as one process does.

Takes root and iproute2 (``apt-get install iproute2``). Both hosts see the same folders, as the
hosts of a run have to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.prove.resumes import make_world
from tests.zoo.training import loop_ranks, stage_ranks
from tests.zoo.training.test_stages import assert_gradients, assert_like, make_cards
from zoo import cards

ROOT = Path(__file__).parents[2]
HUNG_S = 600  # the processes end by themselves before, and show where they hang
pytestmark = pytest.mark.prove


class Host(NamedTuple):
    """A network namespace, the end of the cable in it, and its address."""

    space: str
    cable: str
    address: str


def ip(*arguments: str) -> None:
    """Run ``ip``; what it cannot do fails the test in one line."""
    command = ["ip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        line = f"two hosts take root and iproute2; {' '.join(command)}: {reason}"
        pytest.fail(line, pytrace=False)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made = [
        Host(f"zoo-{os.getpid()}-{number}", f"zoo{os.getpid()}.{number}", f"10.231.7.{number}")
        for number in (1, 2)
    ]
    one, other = made
    try:
        for host in made:
            ip("netns", "add", host.space)
        peer = ("peer", "name", other.cable, "netns", other.space)
        ip("link", "add", one.cable, "netns", one.space, "type", "veth", *peer)
        for host in made:
            ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", host.space, "link", "set", host.cable, "up")
            ip("-n", host.space, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.space], capture_output=True, check=False)


def torchrun(hosts: list[Host], processes: int, *arguments: object) -> None:
    """Run a script on both hosts, with so many processes on each."""
    started = []
    for number, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host.space, sys.executable]
        command += ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
        command += [f"--nproc-per-node={processes}", "--master-port=29400"]
        command += [f"--master-addr={hosts[0].address}", *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env["GLOO_SOCKET_IFNAME"] = host.cable
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=HUNG_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    ends = [process.returncode for process in started]
    assert ends == [0, 0], "\n".join(error[-3000:] for error in errors)


def test_a_step_over_two_hosts_is_that_of_one_process(hosts: list[Host], tmp_path: Path) -> None:
    out, sizes = tmp_path / "world", [1, 2, 3, 7, 17]
    make_world(out)
    torchrun(hosts, 1, loop_ranks.__file__, out, sizes)
    command = [sys.executable, loop_ranks.__file__, str(out), str(sizes)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    loop_ranks.assert_equal(out, sizes)


def test_a_pipeline_over_two_hosts_is_one_process(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cards(tmp_path)
    monkeypatch.setattr(cards, "CARDS", tmp_path / "cards")
    torchrun(hosts, 2, stage_ranks.__file__, tmp_path, "gradients", "together")
    stage_ranks.main(tmp_path, "gradients", "alone")
    assert_gradients(tmp_path, 4)
    assert_like(tmp_path / "together", tmp_path / "alone")
