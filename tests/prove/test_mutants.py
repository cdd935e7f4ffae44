"""The bug zoo: every fault that PPO is known for, put in, makes a test fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mutants.py")


@pytest.mark.prove
def test_every_mutant_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    env.pop("ZOO_SHAPES", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    total = done.stdout.splitlines()[-1].split()
    assert int(total[2]) >= 30
    assert total[0] == total[2], done.stdout
    assert "fails without" not in done.stdout
