"""Weights that PyTorch pickled (``.pth``, ``.pt``, ``.bin``) become safetensors; no code runs.

``torch.load(weights_only=True)`` builds tensors and plain containers only. It still parses what a
stranger wrote, so it runs in a child process that is short of time, memory and files and that hands
over a safetensors file; here only that is read, strictly.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import files, tensorfile
from zoo.errors import WeightsError, shown

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("state_dict", "model")  # entries of a training checkpoint that hold the weights
PYTORCH = (b"PK\x03\x04", b"\x80")  # zip since 1.6, bare pickle before
TIME_LIMIT = 600  # seconds until the child is given up, waiting for a disk included
CPU_LIMIT = 120  # seconds

log = logging.getLogger(__name__)


def convert_file(source: Path, target: Path) -> tuple[int, str]:
    """Write pickled weights as a safetensors file: the same tensors, names, dtypes and values.

    Args:
        source: What `torch.save` wrote.
        target: The safetensors file; its folder exists.

    Returns:
        Size in bytes and SHA-256 of the target.

    Raises:
        WeightsError: See `pickled_to_tensors`.
        OSError: The target cannot be written; what was there before is untouched.
    """
    tensorfile.write(target, pickled_to_tensors(source))
    return target.stat().st_size, files.sha256_of(target)


def pickled_to_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict in a pickled file, also of one inside a training checkpoint.

    A checkpoint's other entries are left out with a warning. Names of one tensor get a copy each.

    Raises:
        WeightsError: The file is not PyTorch's, names code (which never runs), holds anything but
            dense tensors in its state dict, or takes more time or memory than it may.
    """
    with files.open_file(path) as file:
        head = file.read(512)
    is_safetensors = head[8:9] == b"{" and not any(head[4:8])
    if is_safetensors or not head.startswith(PYTORCH):
        kind = "a safetensors file already" if is_safetensors else files.kind_of(head)
        raise WeightsError(f"{path.name} is no PyTorch file; it is {kind}", str(path))
    with tempfile.TemporaryDirectory(prefix="zoo-", ignore_cleanup_errors=True) as folder:
        report_path, tensors_path = Path(folder, "report"), Path(folder, path.name)
        ended = _run_child(path.absolute(), tensors_path, report_path)
        try:
            report = json.loads(report_path.read_bytes())
        except (OSError, ValueError):
            raise WeightsError(f"{path.name} was not converted: {ended}", str(path)) from None
        if report["error"]:
            raise WeightsError(*report["error"])
        if report["left_out"]:
            left_out = ", ".join(map(shown, report["left_out"]))
            log.warning("%s: took %s, left out %s", path.name, report["taken"], left_out)
        with tensors_path.open("rb") as file:
            return tensorfile.read_tensors(file, tensorfile.read_header(file, path.name))


def state_dict_in(loaded: object, name: str) -> tuple[dict[str, Tensor], str, list[str]]:
    """The state dict in what was unpickled, the keys that lead to it, and what lies beside it.

    Raises:
        WeightsError: There is none, or more than one; the line names the entry that is in the way.
    """
    import torch

    taken = ""
    left_out: list[str] = []
    while isinstance(loaded, dict):
        others = [key for key, value in loaded.items() if not isinstance(value, torch.Tensor)]
        if loaded and not others:
            if odd := [key for key in loaded if not isinstance(key, str)]:
                raise WeightsError(f"{name} names a tensor {shown(odd[0])}, not by a string")
            return loaded, taken, left_out
        inner = [key for key in WRAPPERS if isinstance(loaded.get(key), dict)]
        if len(inner) > 1:
            raise WeightsError(f"{name} holds weights under {' and '.join(inner)}; save only one")
        if not inner:
            what = f"{type(loaded[others[0]]).__name__} {shown(others[0])}" if others else "nothing"
            raise WeightsError(f"{name} is no table of tensors: it holds {what}")
        left_out += [f"{taken}{key}" for key in loaded if key != inner[0]]
        taken += f"{inner[0]}/"
        loaded = loaded[inner[0]]
    raise WeightsError(f"{name} holds a {type(loaded).__name__}, not a table of tensors")


def _run_child(source: Path, tensors: Path, report: Path) -> str:
    """Convert in a process of its own; says how that ended."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # -P: a folder of that name where the user stands is not this package.
    command = [sys.executable, "-P", "-W", "ignore", "-m", "zoo.convert"]
    try:
        done = subprocess.run(
            [*command, source, tensors, report],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {TIME_LIMIT} s"
    if done.returncode < 0:
        return f"the reading process was ended by {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
    return f"the reading process ended with status {done.returncode} and said {said[-1]}"


def _child(source: Path, tensors: Path, report: Path) -> None:
    """Read the pickled file, write the tensors, and report."""
    import torch

    told: dict[str, Any] = {"error": None, "taken": "", "left_out": []}
    try:
        torch.set_num_threads(1)
        _limit_resources(source.stat().st_size)
        loaded = torch.load(source, map_location="cpu", weights_only=True)
        found, told["taken"], told["left_out"] = state_dict_in(loaded, source.name)
        tensorfile.write(tensors, _each_its_own(found))
    except WeightsError as error:
        told["error"] = (error.line, *error.details)
    except Exception as error:  # whatever a damaged file makes of the reader
        told["error"] = (f"{source.name} {_reason(error)}",)
    report.write_text(json.dumps(told))


def _reason(error: Exception) -> str:
    """Why `torch.load` failed; its own advice, to allow code, is not passed on."""
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return (
            f"names code, {found[1]}, which was not run; only a state dict of tensors is converted"
        )
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "takes far more memory than its size explains"
    if isinstance(error, pickle.UnpicklingError):
        return "is damaged, or a pickle of something else than tensors"
    sentence = re.split(r"(?<=\.)\s", str(error).strip())[0]
    return f"cannot be read as PyTorch weights: {type(error).__name__}: {sentence}"


def _each_its_own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where two share memory."""
    import torch

    seen: set[int] = set()
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided:
            place = tensor.untyped_storage().data_ptr()
            result[name] = tensor.clone() if place in seen else tensor
            seen.add(place)
    return result


def _limit_resources(size: int) -> None:
    """Limit this process to what reading a file of this many bytes takes."""
    if sys.platform == "win32":
        return
    import resource

    for limited, limit in (
        (resource.RLIMIT_CPU, CPU_LIMIT),
        (resource.RLIMIT_DATA, (4 << 30) + 4 * size),  # torch itself takes 1 GiB
        (resource.RLIMIT_FSIZE, (64 << 20) + 4 * size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),  # no further process or thread
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # a stricter one is in force, or the system has none
            resource.setrlimit(limited, (limit, limit))


if __name__ == "__main__":
    _child(*map(Path, sys.argv[1:]))
