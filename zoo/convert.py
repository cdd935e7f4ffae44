"""What other projects store weights in becomes tensors, or a safetensors file; no code runs.

Read are a safetensors file, what PyTorch pickled (``.pth``, ``.pt``, ``.bin``), several of either
under an index, and a folder as Hugging Face lays it out, of which nothing but tensors is taken.

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
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zoo import files, tensorfile
from zoo.errors import WeightsError, shown

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("state_dict", "model")  # entries of a training checkpoint that hold the weights
PYTORCH = (b"PK\x03\x04", b"\x80")  # zip since 1.6, bare pickle before
TIME_LIMIT = 600  # seconds until the child is given up, waiting for a disk included
CPU_LIMIT = 120  # seconds
PUBLISHED = (  # what a folder of Hugging Face's holds its weights in: one of these
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MAX_JSON = 16 << 20  # bytes
SHARD = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*?)(-\d{5}-of-\d{5})?(\.safetensors|\.bin)")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Foreign:
    """Tensors that another project stored, under its own names and in its own types."""

    tensors: dict[str, Tensor]
    files: tuple[Path, ...]  # that hold them
    folder: Path | None  # that holds what belongs to them, where one was given

    @property
    def header(self) -> tensorfile.Header:
        """What the header of one file of all these tensors would say, but for their places."""
        codes = {tensorfile.torch_dtype(code): code for code in tensorfile.DTYPES}
        table = {
            name: tensorfile.TensorInfo(codes[tensor.dtype], tuple(tensor.shape), 0, 0)
            for name, tensor in self.tensors.items()
        }
        return tensorfile.Header(self.files[0].name, table, {}, 0, 0)


def read_foreign(path: Path) -> Foreign:
    """The tensors of a file, of the shards under an index, or of a folder of Hugging Face's.

    Safetensors are mapped, not copied.

    Raises:
        WeightsError: It is none of these, it is damaged or incomplete, or a folder holds more than
            one set of weights.
    """
    if path.is_dir():
        found = [path / name for name in PUBLISHED if (path / name).exists()]
        if len(found) != 1:
            what = " and ".join(f.name for f in found) or f"none of {', '.join(PUBLISHED)}"
            raise WeightsError(f"{shown(str(path))} holds {what}; give the path of one file")
        inner = read_foreign(found[0])
        return Foreign(inner.tensors, inner.files, path)
    if path.suffix == ".json":
        return _read_shards(path)
    return Foreign(_read_one(path), (path,), None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a stranger: plain values only, no name twice.

    Raises:
        WeightsError: It is something else, or too large.
    """

    def refuse(why: str) -> NoReturn:
        raise WeightsError(f"{path.name} is not used: {why}", str(path))

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            refuse(f"it names {shown(twice[0])} twice")
        return dict(pairs)

    with files.open_file(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            refuse("it is no regular file")
        raw = file.read(MAX_JSON + 1)
    if len(raw) > MAX_JSON:
        refuse(f"it has more than {MAX_JSON:,} bytes")
    try:
        found = json.loads(raw.decode(), object_pairs_hook=members)
    except (ValueError, RecursionError) as error:
        refuse(f"it is no JSON: {error}")
    if not isinstance(found, dict):
        refuse("it is no JSON object")
    return found


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
    if _is_safetensors(head) or not head.startswith(PYTORCH):
        kind = "a safetensors file already" if _is_safetensors(head) else files.kind_of(head)
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


def _is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and not any(head[4:8])


def _read_one(path: Path) -> dict[str, Tensor]:
    with files.open_file(path) as file:
        head = file.read(512)
        if head.startswith(PYTORCH) and not _is_safetensors(head):
            return pickled_to_tensors(path)
        header = tensorfile.read_header(file, path.name)
        return tensorfile.read_tensors(file, header, anywhere=header.tensors)


def _read_shards(index: Path) -> Foreign:
    """The tensors of several files; the index names each tensor and each file, and is right."""

    def refuse(why: str) -> NoReturn:
        raise WeightsError(f"{index.name} {why}", str(index))

    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        refuse("is no index of shards: it has no table 'weight_map'")
    for shard in table.values():
        if not isinstance(shard, str) or len(shard) > 255 or not SHARD.fullmatch(shard):
            refuse(f"names the shard {shown(shard)}; a shard is a plain .safetensors or .bin name")
    shards = sorted(set(table.values()))
    stem, _, suffix = SHARD.fullmatch(shards[0]).groups()  # type: ignore[union-attr]
    beside = {p.name for p in index.parent.glob(f"{stem}-?????-of-?????{suffix}")}
    if absent := [shard for shard in shards if not (index.parent / shard).exists()]:
        refuse(f"names {len(absent)} shards that are not there, first {shown(absent[0])}")
    if more := sorted(beside - set(shards)):
        refuse(f"does not name the shard {shown(more[0])}, which lies beside it")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        found = _read_one(index.parent / shard)
        listed = {name for name, where in table.items() if where == shard}
        if missing := sorted(listed - found.keys()):
            refuse(f"places {shown(missing[0])} in {shown(shard)}, which lacks it")
        if extra := sorted(found.keys() - listed):
            where = table.get(extra[0])
            place = f"places it in {shown(where)}" if where else "does not name it"
            refuse(f"does not fit {shown(shard)}: that holds {shown(extra[0])}, and this {place}")
        tensors |= found
    return Foreign(tensors, tuple(index.parent / shard for shard in shards), index.parent)


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
