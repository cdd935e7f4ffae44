"""A run that is ended at any instant and started again equals one that nobody ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prove.resumes import KINDS

RESUMES = Path(__file__).with_name("resumes.py")
ROOT = RESUMES.parents[2]
MANY = [pytest.param(kind, "KILL", 13, marks=pytest.mark.prove) for kind in KINDS]
MANY += [pytest.param(kind, "TERM", 10, marks=pytest.mark.prove) for kind in list(KINDS)[-5:]]


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
    assert seen["runs compared"] >= 1
