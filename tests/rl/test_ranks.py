"""Two processes learn as one does from all of their environments."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zoo import tensorfile

RANKS = Path(__file__).with_name("rl_ranks.py")
_spec = importlib.util.spec_from_file_location("rl_ranks", RANKS)
assert _spec is not None
assert _spec.loader is not None
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANKS.parents[2])}
    done = subprocess.run(
        [*command, str(RANKS), str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def held(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        return tensorfile.read_tensors(file, tensorfile.read_header(file, path.name))


@pytest.mark.parametrize("kind", ["plain", "branched"])
def test_gradients_statistics_and_divergence_are_those_of_one_process(
    played: Path, kind: str
) -> None:
    recipe = {"plain": ranks.RECIPE, "branched": ranks.BRANCHED}[kind]
    whole = ranks.gradients(recipe, 0, 4)
    assert any(name.startswith("gradient.actor") for name in whole)
    for rank in (0, 1):
        shared = held(played / f"{kind}-{rank}.safetensors")
        assert shared.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(shared[name], tensor, atol=1e-6, rtol=1e-5)


def test_after_training_both_ranks_have_one_policy(played: Path) -> None:
    one, other = (held(played / f"trained-{rank}.safetensors") for rank in (0, 1))
    written = held(played / "run" / "weights" / "policy.safetensors")
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])
        assert torch.equal(tensor, written[name])
