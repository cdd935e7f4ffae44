"""What is chosen for a fine-tuning run where the caller leaves it open, by rules to be read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.data.loader import start_method

STEPS = 400  # that a run aims at: enough for a head, and for a small data set
EPOCHS = (3, 30)  # fewer or more are never chosen
STEPS_PER_EPOCH = 25  # at least, if the data set is large enough for `BATCH`
BATCH = (8, 64)
EVALUATED = 10  # evaluations of a run with more epochs than that
READ_SHARE = 0.1  # of a step; below that no process is started to read ahead
WORKERS = 8
MEMORY_SHARE = 0.5  # of the free memory: buffers of kernels are not counted
OPTIMIZER_COPIES = 4  # weights, gradients, and AdamW's two averages

# Learning rates of AdamW. Source of those of Transformers: Devlin et al. 2018, appendix A.3 (5e-5
# and less for 110 M parameters; smaller models take more).
LR_HEAD = 3e-3
LR_TRANSFORMER = 1e-4
LR_LARGE_TRANSFORMER = 3e-5
LR_CONVNET = 1e-3
LARGE = 50_000_000  # parameters


def batch_size_for(items: int) -> int:
    """Items of a step: a power of two that leaves `STEPS_PER_EPOCH` steps, within `BATCH`.

    It is lowered where a single item would be left for the last step of an epoch, from which no
    batch norm can learn.
    """
    wanted: int = 2 ** int(math.log2(max(items / STEPS_PER_EPOCH, 1)))
    size = min(max(wanted, BATCH[0]), BATCH[1], items)
    while size > 2 and items % size == 1:
        size -= 1
    return size


def epochs_for(items: int, batch_size: int) -> float:
    """Whole epochs that come nearest to `STEPS` steps, within `EPOCHS`."""
    return float(min(max(round(STEPS * batch_size / items), EPOCHS[0]), EPOCHS[1]))


def evaluate_every_for(items: int, batch_size: int, epochs: float) -> int | None:
    """Steps between evaluations: an epoch (None), or more where `EVALUATED` are made anyway."""
    if epochs <= EVALUATED:
        return None
    return math.ceil(epochs * math.ceil(items / batch_size) / EVALUATED)


def workers_for(read_s: float, step_s: float) -> int:
    """Processes that read: none where that is a small part of the work, or where they cost more.

    Args:
        read_s: Seconds in which one process reads what a step needs.
        step_s: Seconds of computing it.
    """
    able = getattr(os, "sched_getaffinity", None)
    cores = len(able(0)) if able else os.cpu_count() or 1
    if cores < 2 or start_method() != "fork" or read_s < READ_SHARE * step_s:
        return 0
    return min(math.ceil(read_s / step_s), cores, WORKERS)


def precision_for(device: torch.device) -> str:
    """bfloat16 on GPUs that have it; not every CPU is faster with it."""
    able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if able else "float32"


def lr_for(model: nn.Module, *, trained: bool, head_only: bool) -> float:
    """Learning rate of AdamW for a head, a trained body with its head, or a random network."""
    if head_only:
        return LR_HEAD
    if not any(isinstance(module, nn.LayerNorm) for module in model.modules()):
        return LR_CONVNET
    large = sum(p.numel() for p in model.parameters()) > LARGE
    lr = LR_LARGE_TRANSFORMER if large else LR_TRANSFORMER
    return lr if trained else 3 * lr


def saved_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Bytes that the forward pass `run` keeps for the backward one, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def microbatches_for(batch_size: int, item_bytes: int, parameters: int, free: int) -> int:
    """Parts of a batch so that one fits into memory.

    Args:
        batch_size: Items of a step.
        item_bytes: What `saved_bytes` says of one item. The backward pass needs as much again.
        parameters: Of the model.
        free: Bytes, from `free_bytes`.
    """
    room = MEMORY_SHARE * free - 4 * OPTIMIZER_COPIES * parameters
    fit = int(max(room, 0) // max(2 * item_bytes, 1))
    return math.ceil(batch_size / min(max(fit, 1), batch_size))


def free_bytes(device: torch.device) -> int:
    """Memory that a run may take on a device; of a container, what its limit leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        found.append(1024 * int(line.split()[1]))
    with suppress(OSError, ValueError, StopIteration):  # "max" is no number: no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{k}").read_text()) for k in ("max", "current"))
        lines = (group / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file"))
        found.append(max(limit - used + cached, 0))
    with suppress(OSError, ValueError, AttributeError):
        if not found:  # neither Linux nor a container
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return min(found, default=4 * 2**30)
