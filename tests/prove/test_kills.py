"""Whenever a process is killed, what lies there is the last complete state, and nothing stays."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.zoo.conftest import CARD
from tests.zoo.server import REVISION, Server

KILLS = Path(__file__).with_name("kills.py")
ROOT = KILLS.parents[2]
SIZE = 4 << 20
COUNTS = [30, pytest.param(1000, marks=pytest.mark.prove)]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.files["body.bin.safetensors"] = np.random.default_rng(0).bytes(SIZE)
    server.faults["body.bin.safetensors"].append("*steady")
    yield server
    server.close()


def run(kind: str, count: int, folder: Path, **environment: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, KILLS, kind, str(count), "7"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts: dict[str, int] = json.loads(done.stdout)
    print(f"{kind}: {counts}")
    assert counts["old state"] + counts["new state"] == counts["kills"] >= count
    assert counts["old state"] >= count // 10, "the workers were killed too late"
    assert counts["new state"] >= count // 10, "the workers were killed too early"
    assert counts["left after the next start"] == 0
    return counts


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["download", "repair"])
def test_a_killed_download_or_repair_leaves_the_old_state_or_the_new_one(
    kind: str, count: int, server: Server, tmp_path: Path
) -> None:
    digest = hashlib.sha256(server.files["body.bin.safetensors"]).hexdigest()
    file = f'{{ name = "body.bin.safetensors", size = {SIZE}, sha256 = "{digest}" }}'
    source = f'{{ kind = "hub", repo = "org/repo", revision = "{REVISION}" }}'
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/body.toml").write_text(
        f"{CARD}[weights.v1]\nlicence = 'MIT'\nfiles = [{file}]\nsources = [{source}]\n"
    )
    environment = {"CARDS": str(tmp_path / "cards"), "ZOO_HOME": str(tmp_path / "home")}
    environment |= {"HF_ENDPOINT": server.http, "ZOO_OFFLINE": "", "HF_HUB_OFFLINE": ""}
    counts = run(kind, count, tmp_path, **environment)
    assert counts["killed while it downloaded"] >= count // 10
    resumed = sum(seen.status == 206 for seen in server.seen)
    assert resumed > 0
    print(f"{resumed} downloads went on where a killed one had ended")


@pytest.mark.parametrize("count", COUNTS)
def test_a_killed_save_leaves_the_old_state_or_the_new_one(count: int, tmp_path: Path) -> None:
    counts = run("save", count, tmp_path)
    assert counts["killed while it wrote"] >= count // 10
