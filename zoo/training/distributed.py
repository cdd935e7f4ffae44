"""Several processes as one: started by ``torchrun``, on any number of hosts, gloo or nccl.

Outside torchrun there is one rank, and every function here does what that needs, mostly nothing.
Numbers and messages go through gloo in memory of the CPU also where gradients go through nccl. The
paths for GPUs are the same code, chosen by device; on more than one GPU they have not been run.

A rank that fails ends all: its peers' next exchange fails at once, as its connections are closed,
and torchrun ends what is left.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from zoo.errors import ConfigError, shown

T = TypeVar("T")
Number = TypeVar("Number", int, float)

_starts = itertools.count()
TIMEOUT_S = 600.0  # of an exchange; the slowest validation of one rank fits into it


@contextmanager
def start(device: torch.device | str, *, timeout_s: float = TIMEOUT_S) -> Iterator[torch.device]:
    """Join the processes that torchrun started; leave them in the end, whatever happens.

    Args:
        device: Kind of device, "cpu" or "cuda"; a GPU is chosen by the rank on its host.
        timeout_s: Seconds after which an exchange that some rank does not join fails.

    Yields:
        The device of this rank.

    Raises:
        ConfigError: torchrun's variables make no sense, or the host has fewer GPUs than ranks.
    """
    place = torch.device(device)
    if dist.is_initialized() or _variable("WORLD_SIZE", 1) == 1:
        yield place
        return
    local = _variable("LOCAL_RANK", 0)
    if place.type == "cuda":
        if local >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"this host has {count} GPUs and a rank {local}; give --nproc-per-node {count}"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    # In torchrun's store are still the addresses of an earlier group of these processes, which
    # whoever comes first would try: each start has names of its own there.
    store, number, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
        store=PrefixStore(f"start-{next(_starts)}", store),
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        device_id=place if place.type == "cuda" else None,
    )
    try:
        yield place
    finally:
        dist.destroy_process_group()


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} is {shown(text)}; torchrun sets it")
    return int(text)


def rank() -> int:
    """Number of this process, 0 for the main one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """Number of this process on its host."""
    return _variable("LOCAL_RANK", 0) if dist.is_initialized() else 0


def is_main() -> bool:
    """True on one rank alone, which writes and prints."""
    return rank() == 0


def all_sum(values: Sequence[Number]) -> list[Number]:
    """Sums over the ranks of each number: exact ones of int (64 bits), float ones in 64 bits."""
    if world_size() == 1:
        return list(values)
    whole = [type(value) is not float for value in values]
    found: list[Any] = list(values)
    for kind, wanted in ((torch.int64, True), (torch.float64, False)):
        places = [i for i, is_whole in enumerate(whole) if is_whole is wanted]
        if places:
            sums = torch.tensor([values[i] for i in places], dtype=kind)
            dist.all_reduce(sums)
            for place, value in zip(places, sums.tolist(), strict=True):
                found[place] = value
    return found


def gather(value: T) -> list[T]:
    """What every rank gave, in the order of the ranks, on every rank.

    Args:
        value: What JSON holds, tensors and arrays included; tuples come back as lists.
    """
    if world_size() == 1:
        return [value]
    texts = [_broadcast(value, source) for source in range(world_size())]
    return [json.loads(text, object_hook=_array) for text in texts]


def broadcast_json(value: T) -> T:
    """The main rank's value on every rank; of what `gather` takes."""
    if world_size() == 1:
        return value
    decoded: T = json.loads(_broadcast(value, 0), object_hook=_array)
    return decoded


def _broadcast(value: object, source: int) -> bytes:
    """The value of one rank as text, on every rank."""
    own = rank() == source
    text = json.dumps(value, default=_table).encode() if own else b""
    size = torch.tensor(len(text))
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if own:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(data, source)
    return data.numpy().tobytes()


def _table(value: object) -> dict[str, Any]:
    """A tensor or an array as a table of plain values, all its bits kept."""
    if isinstance(value, Tensor):
        return {**_table(value.detach().cpu().numpy()), "__tensor__": True}
    array = np.ascontiguousarray(cast(Any, value))
    if array.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} is no value to exchange between ranks")
    return {
        "__array__": base64.b64encode(array.tobytes()).decode(),
        "dtype": array.dtype.str,
        "shape": np.shape(cast(Any, value)),
    }


def _array(table: dict[str, Any]) -> Any:
    """The reverse of `_table`; other tables stay as they are."""
    if "__array__" not in table:
        return table
    data = bytearray(base64.b64decode(table["__array__"]))
    array = np.frombuffer(data, np.dtype(table["dtype"])).reshape(table["shape"])
    return torch.from_numpy(array) if "__tensor__" in table else array


def wrap(
    model: nn.Module,
    strategy: Literal["ddp", "fsdp"],
    sync_batchnorm: bool,
    device: torch.device,
) -> nn.Module:
    """The model as all ranks train it, with the same values on all of them.

    Args:
        model: Bare, on its device. Sharding turns its parameters into shares, in place.
        strategy: "ddp" keeps the whole model on each rank, "fsdp" a share of each parameter.
        sync_batchnorm: Take batch statistics over all ranks.
        device: Of this rank.

    Returns:
        The model itself if there is one rank.

    Raises:
        ConfigError: Synchronised batch statistics on a CPU, or nothing to train.
    """
    if world_size() == 1:
        return model
    if sync_batchnorm:
        if device.type == "cpu":
            raise ConfigError("sync_batchnorm is on and the device a CPU; torch has it for GPUs")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if strategy == "fsdp":
        return _shard(model, device)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("every parameter is frozen; freeze fewer groups")
    devices = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def _shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard block by block: what a block shares with no other is gathered for it alone."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    mesh = init_device_mesh(device.type, (world_size(),))
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for block in module:
                # Those of an inner block are sharded already, and are other objects now.
                own = [owners.get(id(p)) == 1 for p in block.parameters()]
                if own and all(own) and len(list(block.children())) > 1:
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sync_gradients(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Context of a microbatch: gradients are reduced over the ranks in the last one alone."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def unwrap(model: nn.Module) -> nn.Module:
    """The bare model in what `wrap` and `torch.compile` made of it."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = cast("nn.Module", inner)
    return model


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """State of a model with its parameters whole, however they are spread; all ranks call it."""
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    absent = [name for name, tensor in state.items() if tensor.is_meta]  # another rank has it
    lacking = gather(absent)
    for name in [n for n in state if any(n in names for names in lacking)]:
        source = next(rank for rank, names in enumerate(lacking) if name not in names)
        own = state[name]
        whole = torch.empty(own.shape, dtype=own.dtype) if own.is_meta else own.detach().cpu()
        dist.broadcast(whole, source)
        state[name] = whole
    return state


def sharded_like(whole: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shares of whole tensors, wherever the tensor of that name is a share.

    Args:
        whole: The same on every rank.
        reference: By the same names; others are passed over. One on the device "meta" is held by
            another rank and stays as it is.
    """
    made = dict(whole)
    for name, like in reference.items():
        if isinstance(like, DTensor) and name in whole:
            made[name] = _share(whole[name], like)
        elif like.is_meta:
            made[name] = like
    return made


def _share(whole: Tensor, like: DTensor) -> DTensor:
    """Cut out of one's own copy; nothing is sent."""
    placed = whole.to(like.device, like.dtype)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


def load_state(target: nn.Module | torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state of whole tensors into a model or an optimiser that may be sharded.

    What is loaded is a copy: an optimiser would keep the very tensors.
    """
    if isinstance(target, nn.Module):
        target.load_state_dict(sharded_like(state, target.state_dict()))
        return
    parameters = [p for group in target.param_groups for p in group["params"]]
    kept = {
        number: {
            name: _share(value, like)
            if isinstance(value, Tensor)
            and isinstance(like := parameters[number], DTensor)
            and value.shape == like.shape
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
        if not parameters[number].is_meta
    }
    target.load_state_dict({**state, "state": kept})


class Stop:
    """Notices SIGTERM and SIGINT; whoever trains asks at the boundaries of steps.

    The handlers set a flag and nothing else, in the processes of a data loader too. A second SIGINT
    interrupts at once. In a thread other than the main one there are no handlers.

    Attributes:
        requested: True once this rank was signalled.
    """

    def __init__(self) -> None:
        self.requested = False
        self._signal = signal.SIGTERM
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested, self._signal = True, signal.Signals(number)

    def wanted(self) -> bool:
        """True on every rank as soon as one was signalled; all ranks call it together."""
        return all_sum([int(self.requested)])[0] > 0

    def leave(self) -> None:
        """End this process as the signal would have: with 143 after SIGTERM, 130 after SIGINT.

        Raises:
            SystemExit: Always.
        """
        sys.exit(128 + self._signal)
