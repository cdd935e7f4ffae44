"""What a run consists of, what of it changes, and how that is saved and restored."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.config import build
from zoo.data.order import seed_of
from zoo.errors import ConfigError
from zoo.groups import freeze
from zoo.training import checkpoint, distributed
from zoo.training.ema import EMA
from zoo.training.optimizers import make_optimizer
from zoo.training.precision import Precision
from zoo.training.recipe import Plateau, Recipe
from zoo.training.schedules import Lowering
from zoo.training.stages import Pipelined, joined
from zoo.training.teaching import Teacher

if TYPE_CHECKING:
    from zoo.data.loader import Batches

Batch = Mapping[str, Tensor]


class Interrupted(Exception):  # noqa: N818
    """The process was asked to end."""


@dataclass
class Position:
    """Where a run stands; the same on every rank."""

    step: int = 0  # batches taken
    updates: int = 0  # steps of the optimiser, which the schedule counts
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluated: int = 0  # step of the last evaluation
    best: float | None = None  # value of the metric that decides
    best_step: int | None = None
    stale: int = 0  # evaluations since then
    lines: int = 0  # of metrics.jsonl
    loss_sum: float = 0.0  # since the last line
    loss_count: int = 0
    measured: dict[str, float] = field(default_factory=dict)  # by the last evaluation


class Run:
    """One training: the model, its data, and all that changes on the way.

    Args:
        model: Bare, on its device.
        task: Of the model: `loss(model, batch) -> (sum, count)`, perhaps `count(batch)`.
        recipe: How to train.
        batches: Of training items.
        folder: Of the run; checkpoints go to a folder in it.
        device: Of the model.
        evaluate: Metrics of the bare model on the validation items; None evaluates never.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Any,
        recipe: Recipe,
        batches: Batches,
        folder: Path,
        *,
        device: torch.device,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    ) -> None:
        self.model, self.task, self.recipe, self.batches = model, task, recipe, batches
        self.folder, self.device, self.evaluate = folder, device, evaluate
        self.position = Position()
        self.saved: int | None = None  # step of the last checkpoint
        self.total = max(1, round(recipe.epochs * batches.steps_per_epoch))
        self.wrapped = model
        self.stages: Pipelined | None = None  # where layers are spread over the ranks
        self.frozen: int | None = None  # groups; None before the first phase
        # How many ranks have items of their own, and which of them this one is.
        self.shares, self.share = replicas(recipe)
        if recipe.strategy != "ddp":  # shards or stages take the place of the parameters
            self._wrap()
        self.optimizer = make_optimizer(model, recipe)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.precision = Precision(recipe.precision, device)
        self.ema = EMA(model, recipe.ema) if recipe.ema is not None else None
        self.teacher: Teacher | None = None
        if recipe.teacher is not None:
            self.teacher = Teacher(
                recipe.teacher,
                recipe.teacher_share,
                task,
                task.labels or batches.rows.labels,
                device,
                self.precision,
            )
        self.loss_sum, self.loss_count = 0.0, 0  # since the last line; the sum is this rank's
        self.items, self.began, self.waited = 0, time.monotonic(), batches.wait
        self.norm = 0.0  # of the last gradient
        self.has_norms = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
        )
        plateau = recipe.schedule if isinstance(recipe.schedule, Plateau) else None
        self.lowering = Lowering(plateau) if plateau else None

    @property
    def answering(self) -> nn.Module:
        """The model to evaluate: the bare one, unless no rank has the whole of it."""
        return self.stages or self.model

    @property
    def epoch(self) -> float:
        """Epochs done."""
        return self.position.step / self.batches.steps_per_epoch

    def due(self, every: int | None) -> bool:
        """True after every so many steps (None: every epoch) and at the end."""
        step = self.position.step
        every = every or self.batches.steps_per_epoch
        return step > 0 and (step % every == 0 or self.finished)

    @property
    def finished(self) -> bool:
        """True after the last step, or when nothing has improved for too long."""
        patience = self.recipe.patience
        return self.position.step >= self.total or (
            patience is not None and self.position.stale > patience
        )

    def settle(self) -> None:
        """Freeze or thaw what this epoch wants, and wrap the model for its gradients' reduction.

        The optimiser knows all parameters from the beginning; frozen ones have no gradient.
        """
        recipe = self.recipe
        held = recipe.freeze_epochs is None or self.epoch < recipe.freeze_epochs
        frozen = recipe.freeze if held else 0
        if frozen == self.frozen:
            return
        if frozen or self.frozen:
            freeze(self.model, frozen)
        if recipe.strategy == "ddp":
            self._wrap()
        self.frozen = frozen

    def _wrap(self) -> None:
        self.wrapped = self.model  # an old wrapper lets go of the parameters first
        strategy = self.recipe.strategy
        if strategy != "pipeline":
            self.wrapped = distributed.wrap(
                self.model, strategy, self.recipe.sync_batchnorm, self.device
            )
        elif distributed.world_size() > 1:
            if self.recipe.compile:
                raise ConfigError("compile is on and the strategy pipeline; take ddp or fsdp")
            self.wrapped = self.stages = Pipelined(self.model, self.device)
        if self.recipe.compile:
            self.wrapped.compile()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sum of the losses of a microbatch, under autocast."""
        smoothing = self.recipe.label_smoothing
        options: dict[str, Any] = {"label_smoothing": smoothing} if smoothing else {}
        if hasattr(self.recipe, "loss"):  # of a domain whose tasks have several
            options["loss"] = self.recipe.loss
        with self.precision.autocast():
            loss: Tensor = self.task.loss(model, batch, **options)[0]
        return loss

    def share_statistics(self) -> None:
        """Give every rank the buffers of the main one, as each step does before it begins."""
        if distributed.world_size() == 1:
            return
        own = dict(self.model.named_buffers())
        for tensors in (own, {n: self.ema.tensors[n] for n in own} if self.ema else {}):
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor, 0)

    def averaged(self) -> AbstractContextManager[object]:
        """The model with the average of its weights, if the recipe wants one."""
        return self.ema.averaged(self.model) if self.ema else nullcontext()

    @property
    def must_stop(self) -> bool:
        """True if no step may be skipped; float16 skips some while its scaler finds its scale."""
        return self.recipe.nonfinite == "stop" and self.recipe.precision != "float16"

    def state(self) -> dict[str, Any]:
        """Everything that changes and is the same on every rank."""
        optimizer = self.optimizer.state_dict()
        return {
            "position": asdict(self.position),
            "model": self.model.state_dict(),
            "optimizer": joined(optimizer) if self.stages else optimizer,
            "precision": self.precision.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "lowering": self.lowering.state_dict() if self.lowering else None,
        }

    def restore(self, found: checkpoint.Found) -> None:
        """Become the run that the checkpoint was taken of."""
        state = checkpoint.load(found)
        self.position = build(Position, state["position"], where="the checkpoint's position")
        distributed.load_state(self.model, state["model"])
        distributed.load_state(self.optimizer, state["optimizer"])
        self.precision.load_state_dict(state["precision"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])
        if self.lowering:
            self.lowering.load_state_dict(state["lowering"])
        if noise := checkpoint.load_part(found, distributed.rank()):
            restore_noise(noise)
        self.saved = self.position.step

    def restore_weights(self, found: checkpoint.Found) -> None:
        """Take the weights of a checkpoint, and their average, and nothing else."""
        state = checkpoint.load(found)
        distributed.load_state(self.model, state["model"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])


def replicas(recipe: Recipe) -> tuple[int, int]:
    """How many ranks have items of their own, and which of them this one is.

    The stages of a pipeline all see all items.
    """
    if recipe.strategy == "pipeline":
        return 1, 0
    return distributed.world_size(), distributed.rank()


def seed_noise(seed: int, step: int) -> None:
    """Seed dropout and the like: other noise in every step and on every rank."""
    torch.manual_seed(seed_of(seed, step, distributed.rank()))


def seed_everything(seed: int) -> None:
    """Seed all global generators, so that code of users that draws from them can be repeated."""
    whole = seed_of(seed, distributed.rank())
    random.seed(whole)
    np.random.seed([whole & 0xFFFFFFFF, whole >> 32])
    torch.manual_seed(whole)


def noise_state(device: torch.device) -> dict[str, Any]:
    """States of all global generators of this rank, which code of users may draw from."""
    kind, keys, *rest = np.random.get_state()
    return {
        "random": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_noise(state: Mapping[str, Any]) -> None:
    """Go on drawing from where `noise_state` was taken."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Statistics:
    """Buffers as they were before a step that may turn out to be non-finite."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._kept = [buffer.clone() for buffer in self._buffers]

    def restore(self) -> None:
        """Put the old values back."""
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(kept)


def finite(tensor: Tensor) -> bool:
    """True if no element is infinite or not a number."""
    return bool(torch.isfinite(tensor).all())
