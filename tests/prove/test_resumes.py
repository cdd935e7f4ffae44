"""A run that is ended at any instant and started again equals one that nobody ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prove.resumes import DAMAGES, KINDS, SPREAD

RESUMES = Path(__file__).with_name("resumes.py")
ROOT = RESUMES.parents[2]
# Over a hundred kills with workers and without, and 60 signals; of either at least a third meet a
# validation and a third a checkpoint half written.
MANY = [pytest.param(kind, "KILL", 9, marks=pytest.mark.prove) for kind in KINDS]
TERMS = ("clip", "bf16", "ranks", "sharded", "workers", "ranks+workers")
MANY += [pytest.param(kind, "TERM", 10, marks=pytest.mark.prove) for kind in TERMS]


def test_the_kills_are_spread_over_all_that_is_to_be_resumed():
    assert {*SPREAD, *(f"{kind}+workers" for kind in SPREAD)} <= set(KINDS)
    assert 9 * 2 * len(SPREAD) >= 100


@pytest.mark.parametrize(
    ("kind", "signal", "count"), [("workers", "KILL", 3), ("ranks", "TERM", 2), *MANY]
)
def test_a_run_ended_at_random_instants_equals_the_unbroken_one(tmp_path, kind, signal, count):
    done = subprocess.run(
        [sys.executable, RESUMES, kind, str(count), "7", signal, tmp_path / "world"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(kind, signal, seen)
    assert seen["ended at work"] >= count
    assert seen.get("ended in validation", 0) >= count // 3
    assert seen.get("ended in saving", 0) >= count // 3
    assert seen["runs compared"] >= 1


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["ranks", "sharded", "workers"])
def test_every_damage_to_every_file_of_a_checkpoint_is_survived(tmp_path, kind):
    done = subprocess.run(
        [sys.executable, RESUMES, kind, "0", "7", "DAMAGE", tmp_path / "world"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(kind, seen)
    assert list(seen) == list(DAMAGES)
    assert min(seen.values()) >= 5
