"""Checkpoints: folders that are there whole or not at all, and that prove it.

``step-000120/`` holds ``state.json`` (numbers, texts, and where each tensor is),
``state.safetensors``, for each rank with a part of its own ``rank-0000.json`` and
``rank-0000.safetensors``, and ``manifest.json``: size and sha256 of all those, written last. It is
made under a hidden name, flushed to the disk and renamed. Every rank sees the same folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from zoo import tensorfile
from zoo.errors import CheckpointError, WeightsError, ZooError, shown
from zoo.files import is_leftover, rename, sha256_of, temporary_name, write_atomically
from zoo.training import distributed

VERSION = 1
# One that is being replaced by another of the same step stays readable under the second name.
_NAME = re.compile(r"step-([0-9]{6,})(\.replaced)?")


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files all are what its manifest says.

    Attributes:
        path: Its folder.
        step: Steps of the run it was taken after.
        world_size: Ranks that wrote it.
        files: Their names.
    """

    path: Path
    step: int
    world_size: int
    files: frozenset[str]


def save(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    best: int | None = None,
    part: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint, then remove those that are no longer wanted; all ranks call it together.

    Whatever ends a process meanwhile, the folder holds the earlier checkpoints or this one besides.

    Args:
        folder: Of the checkpoints; made if need be.
        step: Steps done, 0 or more.
        state: Nested dicts (keys: str or int), lists and tuples of tensors, numbers, texts, bools
            and None, the same on every rank. Tensors that share memory still do so afterwards;
            each rank writes its own shares of sharded ones, and those that other ranks have
            without their data, on the device "meta".
        keep: Checkpoints up to this step that stay: this one, the best, and the newest others.
        best: Step of the best one.
        part: What this rank alone knows, in the same form.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: On every rank, if any one cannot write its files.
    """
    path = folder / f"step-{step:06d}"
    temporary = folder / str(distributed.broadcast_json(temporary_name()))
    try:
        _agreed(lambda: _prepare(folder, temporary), main_only=True)
        sums = _agreed(lambda: _write_part(temporary, state, part))
        _agreed(
            lambda: _complete(path, temporary, step, {k: v for s in sums for k, v in s.items()}),
            main_only=True,
        )
        if distributed.is_main():
            _rotate(folder, step, keep, best)
    except BaseException:
        if distributed.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def load(place: Path | Found) -> dict[str, Any]:
    """The state that was saved, its tensors whole and on the CPU.

    Args:
        place: A checkpoint; a path is checked first.

    Raises:
        CheckpointError: It is damaged or not there.
    """
    found = place if isinstance(place, Found) else check(place)
    state: dict[str, Any] = _read(found, "state")
    return state


def load_part(place: Path | Found, rank: int) -> dict[str, Any] | None:
    """What one rank alone knew; None if that rank wrote nothing, or was not there.

    Raises:
        CheckpointError: The checkpoint is damaged or not there.
    """
    found = place if isinstance(place, Found) else check(place)
    name = f"rank-{rank:04d}"
    return _read(found, name)["part"] if f"{name}.json" in found.files else None


def check(path: Path) -> Found:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: Naming the folder, the file and what is wrong with it.
    """
    if not path.is_dir():
        what = "a file" if path.exists() else "not there"
        raise CheckpointError(f"the checkpoint {shown(str(path), 100)} is {what}; give a folder")

    def refuse(name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{path.name}: {name} {reason}", str(path))

    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        version, step, ranks = manifest["version"], manifest["step"], manifest["world_size"]
        sums = {
            str(name): (int(s["size"]), str(s["sha256"])) for name, s in manifest["files"].items()
        }
        if type(step) is not int or type(ranks) is not int or "state.json" not in sums:
            raise ValueError
    except FileNotFoundError:
        raise refuse("manifest.json", "is missing: it was not written to the end") from None
    except OSError as error:
        raise refuse("manifest.json", f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise refuse("manifest.json", "is damaged") from None
    if manifest.get("sha256") != _digest(manifest):
        raise refuse("manifest.json", "is damaged: it is not as it was written")
    if version != VERSION:
        raise refuse("manifest.json", f"has version {shown(version)}; this zoo reads {VERSION}")
    for name, (size, sha256) in sums.items():
        try:
            there = (path / name).stat().st_size
            if there != size:
                raise refuse(name, f"has {there:,} bytes, not {size:,}")
            if sha256_of(path / name) != sha256:
                raise refuse(name, "is damaged: its bytes are not those that were written")
        except FileNotFoundError:
            raise refuse(name, "is missing") from None
        except OSError as error:
            raise refuse(name, f"cannot be read: {error.strerror}") from error
    return Found(path, step, ranks, frozenset(sums))


def newest(folder: Path) -> Found | None:
    """The newest checkpoint that is complete; None if there is none of any kind.

    Damaged ones are passed over with a warning each, and stay.

    Raises:
        CheckpointError: There are checkpoints, all of them damaged; each with its reason.
    """
    reasons = []
    for path in _listed(folder):
        try:
            return check(path)
        except CheckpointError as error:
            reasons.append(error.line)
            warnings.warn(f"passed over a damaged checkpoint: {error.line}", stacklevel=2)
    if reasons:
        raise _all_damaged(folder, reasons)
    return None


def agree(folder: Path) -> Found | None:
    """The newest checkpoint that is complete as every rank sees it; all ranks call it together.

    Raises:
        CheckpointError: As `newest`, on every rank.
    """
    reasons: list[str] = []
    for name in distributed.broadcast_json([path.name for path in _listed(folder)]):
        found, reason = None, None
        try:
            found = check(folder / name)
        except CheckpointError as error:
            reason = error.line
        bad = [text for text in distributed.gather(reason) if text is not None]
        if not bad:
            return found
        reasons.append(bad[0])
        if distributed.is_main():
            warnings.warn(f"passed over a damaged checkpoint: {bad[0]}", stacklevel=2)
    if reasons:
        raise _all_damaged(folder, reasons)
    return None


def at(folder: Path, step: int) -> Found:
    """The checkpoint of one step.

    Raises:
        CheckpointError: It is damaged or not there.
    """
    names = [path for path in _listed(folder) if _step(path) == step]
    for path in names[:-1]:
        with suppress(CheckpointError):
            return check(path)
    return check(names[-1] if names else folder / f"step-{step:06d}")


def _all_damaged(folder: Path, reasons: list[str]) -> CheckpointError:
    what = f"all {len(reasons)} checkpoints are damaged" if reasons[1:] else "is damaged"
    where = f"{shown(str(folder), 70)}: " if reasons[1:] else "the only checkpoint "
    line = f"{where}{what}; remove them or begin again with --resume never"
    return CheckpointError(line, *reasons)


def _listed(folder: Path) -> list[Path]:
    """Folders named like checkpoints, the newest first."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    names.sort(key=lambda name: (_step(Path(name)), not name.endswith(".replaced")), reverse=True)
    return [folder / name for name in names]


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _agreed(work: Callable[[], Any], *, main_only: bool = False) -> list[Any]:
    """Do something on every rank; if it fails on one, fail on all, so that none is left waiting."""
    result, failure = None, None
    try:
        if distributed.is_main() or not main_only:
            result = work()
    except (OSError, ZooError) as error:
        failure = (
            error.line if isinstance(error, ZooError) else f"{error.strerror} ({error.filename})"
        )
    outcomes = distributed.gather((result, failure))
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise CheckpointError(f"no checkpoint was written: rank {rank}: {reason}")
    return [result for result, _ in outcomes]


def _prepare(folder: Path, temporary: Path) -> None:
    """Make the hidden folder, and remove those of killed processes, if only of this number."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        ours = f"-{os.getpid()}-" in name  # of a process before this one: a container began again
        if name.startswith(".tmp-") and (ours or is_leftover(folder / name)):
            shutil.rmtree(folder / name, ignore_errors=True)
    temporary.mkdir()


def _write_part(
    temporary: Path, state: Mapping[str, Any], part: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Write the files of this rank; size and sha256 of each."""
    packed, own = _Packed(), _Packed()
    document = packed.pack(state, "state")
    if packed.absent and not distributed.is_main():
        packed.give_all()
    content = {"part": own.pack(part, "part"), "shares": {**packed.offsets, **own.offsets}}
    sums: dict[str, dict[str, Any]] = {}
    if distributed.is_main():
        sums |= _write_files(temporary, "state", document, packed.tensors)
    if part is not None or content["shares"]:
        name = f"rank-{distributed.rank():04d}"
        tensors = {**own.tensors, **packed.shares, **own.shares}
        sums |= _write_files(temporary, name, content, tensors)
    return sums


def _write_files(
    folder: Path, name: str, document: Any, tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    text = json.dumps(document, allow_nan=False).encode()
    write_atomically(folder / f"{name}.json", text)
    tensorfile.write(folder / f"{name}.safetensors", tensors)
    paths = [folder / f"{name}.json", folder / f"{name}.safetensors"]
    return {p.name: {"size": p.stat().st_size, "sha256": sha256_of(p)} for p in paths}


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _complete(path: Path, temporary: Path, step: int, sums: Mapping[str, Any]) -> None:
    """Write the manifest and let the folder appear under its name."""
    ranks = distributed.world_size()
    manifest = {"version": VERSION, "step": step, "world_size": ranks, "files": sums}
    manifest["sha256"] = _digest(manifest)
    write_atomically(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
    replaced = path.with_name(f"{path.name}.replaced")
    if path.exists():
        with suppress(CheckpointError):
            check(path)
            _remove(replaced)
        if not replaced.exists():  # else the one at `path` is damaged, and that one is not
            rename(path, replaced)
        else:
            _remove(path)
    rename(temporary, path)
    _remove(replaced)


def _rotate(folder: Path, step: int, keep: int, best: int | None) -> None:
    """Remove what is neither this one, nor the best, nor among the newest up to this step."""
    paths = [path for path in _listed(folder) if _step(path) < step and _step(path) != best]
    spared = max(0, keep - 1 - (best is not None and best != step))
    for path in paths[spared:]:
        _remove(path)


def _remove(path: Path) -> None:
    """Let a checkpoint vanish at once, then delete it; what a kill leaves has a hidden name."""
    hidden = path.with_name(temporary_name())
    with suppress(FileNotFoundError):
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@dataclass
class _Packed:
    """Tensors taken out of a nested state, which becomes JSON."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    shares: dict[str, Tensor] = field(default_factory=dict)  # this rank's, of sharded tensors
    offsets: dict[str, list[int]] = field(default_factory=dict)  # where they begin in the whole
    absent: bool = False  # other ranks have the data of some tensors
    _names: set[str] = field(default_factory=set)
    _at: dict[Any, str] = field(default_factory=dict)  # names by place in memory

    def pack(self, value: Any, where: str) -> Any:
        """The value as JSON holds it."""
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, Mapping):
            if any(type(key) not in (str, int) for key in value):
                raise CheckpointError(f"{where} has a key that is neither a str nor an int")
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.pack(item, f"{where}/{key}") for key, item in value.items()}
            return {"$items": [[k, self.pack(v, f"{where}/{k}")] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{where}/{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise CheckpointError(f"{where} is {type(value).__name__}, which a checkpoint cannot hold")

    def _tensor(self, value: Tensor, where: str) -> Any:
        """Where a tensor is; one that has several names in the state is kept once."""
        if value.layout is not torch.strided:
            raise CheckpointError(f"{where} is sparse, which a checkpoint cannot hold")
        local = value.to_local() if isinstance(value, DTensor) else value
        memory = local.device, local.data_ptr(), value.dtype, value.shape, value.stride()
        name = self._at.get(memory) if local.numel() and not local.is_meta else None
        new = name is None
        if name is None:
            name = self._at[memory] = self._named(where)
        if value.is_meta:
            self.absent = True
        elif not isinstance(value, DTensor):
            if new:
                self.tensors[name] = value.detach()
            return {"$tensor": name}
        elif new:
            self._cut(value, name)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$shares": name, "shape": list(value.shape), "dtype": dtype}

    def _named(self, where: str) -> str:
        """A name that no other tensor has: the keys 1 and "1" are two."""
        while where in self._names:
            where += "'"
        self._names.add(where)
        return where

    def give_all(self) -> None:
        """Let every tensor be a share, which is the whole of it: the main rank may lack it."""
        self.shares |= self.tensors
        self.offsets |= {name: [0] * tensor.ndim for name, tensor in self.tensors.items()}

    def _cut(self, value: DTensor, where: str) -> None:
        """Keep this rank's share, unless another rank has the same."""
        local = value.to_local()
        sizes, starts, first = list(value.shape), [0] * value.ndim, True
        mesh = value.device_mesh
        coordinates = mesh.get_coordinate()
        assert coordinates is not None
        for axis, placement in enumerate(value.placements):
            number, count = coordinates[axis], mesh.size(axis)
            if isinstance(placement, Shard):  # cut as torch.chunk does
                chunk = -(-sizes[placement.dim] // count)
                begin = min(chunk * number, sizes[placement.dim])
                starts[placement.dim] += begin
                sizes[placement.dim] = min(chunk, sizes[placement.dim] - begin)
            elif isinstance(placement, Replicate):
                first = first and number == 0
            else:
                raise CheckpointError(f"{where} is sharded as {placement}; reduce it first")
        if list(local.shape) != sizes:
            raise CheckpointError(f"{where} has a share {list(local.shape)} and not {sizes}")
        if first and local.numel():
            self.shares[where], self.offsets[where] = local.detach(), starts


class _Shares:
    """Sharded tensors of a checkpoint, put together again."""

    def __init__(self, found: Found) -> None:
        self._of: dict[str, list[tuple[list[int], Tensor]]] = {}
        for rank in range(found.world_size):
            name = f"rank-{rank:04d}"
            if f"{name}.json" in found.files:
                document = json.loads((found.path / f"{name}.json").read_bytes())
                if document["shares"]:
                    tensors = _tensors(found.path / f"{name}.safetensors")
                    for key, starts in document["shares"].items():
                        self._of.setdefault(key, []).append((starts, tensors[key]))

    def whole(self, name: str, shape: list[int], dtype: str) -> Tensor:
        """The tensor of a name."""
        whole = torch.empty(shape, dtype=getattr(torch, dtype))
        missing = whole.numel()
        for starts, share in self._of.get(name, []):
            ends = [start + size for start, size in zip(starts, share.shape, strict=True)]
            whole[tuple(map(slice, starts, ends))] = share
            missing -= share.numel()
        if missing:
            raise CheckpointError(f"{shown(name)} lacks {missing:,} of {whole.numel():,} elements")
        return whole


def _read(found: Found, name: str) -> Any:
    """A document of a checkpoint with its tensors."""
    document = json.loads((found.path / f"{name}.json").read_bytes())
    tensors = _tensors(found.path / f"{name}.safetensors")
    shares = _Shares(found)
    copies: dict[str, Tensor] = {}

    def unpack(value: Any) -> Any:
        if isinstance(value, list):
            return [unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        match next(iter(value), ""):
            case "$tensor":
                key = value["$tensor"]
                if key not in copies:  # the mapped file is let go
                    copies[key] = tensors[key].clone()
                return copies[key]
            case "$shares":
                key = value["$shares"]
                if key not in copies:
                    copies[key] = shares.whole(key, value["shape"], value["dtype"])
                return copies[key]
            case "$items":
                return {key: unpack(item) for key, item in value["$items"]}
            case "$tuple":
                return tuple(map(unpack, value["$tuple"]))
            case "$float":
                return float(value["$float"])
        return {key: unpack(item) for key, item in value.items()}

    return unpack(document)


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            return tensorfile.read_tensors(file, tensorfile.read_header(file, path.name))
    except (OSError, WeightsError) as error:
        raise CheckpointError(f"{path.parent.name}: {error}") from error
