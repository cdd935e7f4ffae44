"""Validation within a run: on all ranks, each item once, and ended by a signal within a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zoo.pipeline import Pipeline
from zoo.training import distributed
from zoo.training.precision import Precision
from zoo.training.recipe import Recipe
from zoo.training.state import Interrupted

if TYPE_CHECKING:
    from zoo.data.rows import Rows
    from zoo.training.distributed import Stop


class Evaluation:
    """Metrics of a model on some rows: every rank answers its share, each item counts once.

    Where forward passes are common to all ranks, as in sharded models and in pipelines, each rank
    answers everything.

    Args:
        model: Bare; its card names the task.
        rows: To measure on.
        recipe: Says in which precision.
        stop: Ends the evaluation within one batch.
    """

    def __init__(self, model: nn.Module, rows: Rows, recipe: Recipe, stop: Stop) -> None:
        self.pipe = Pipeline(model)
        self.rows, self.recipe, self.stop = rows, recipe, stop
        self.common = recipe.strategy != "ddp" and distributed.world_size() > 1

    def __call__(self, model: nn.Module, *, exact: bool = False) -> dict[str, float]:
        """Metrics by name, equal on all ranks.

        Args:
            model: The one it was made for, or what the ranks make of it together.
            exact: In float32, whatever the recipe's precision.

        Raises:
            Interrupted: The process was asked to end.
        """

        def look(*_: object) -> None:
            # Ranks that pass forward together leave together: the others would wait.
            if self.stop.wanted() if self.common else self.stop.requested:
                raise Interrupted

        device = next(model.parameters()).device
        casting = nullcontext() if exact else Precision(self.recipe.precision, device).autocast()
        # What is compiled for training is not for other sizes and a hook that raises.
        eager = torch.compiler.set_stance("force_eager") if self.recipe.compile else nullcontext()
        self.pipe.model = model
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            # What holds gathered parameters is made at the first time and kept; were it made in
            # inference mode, in a run that goes on with an evaluation, no training could use it.
            module.unshard()
            module.reshard()
        # First of all hooks: once FSDP has gathered the parameters, it does not let go in between.
        watching = model.register_forward_pre_hook(look, prepend=True)
        try:
            with casting, eager:
                examples = (self.rows[index] for index in range(len(self.rows)))
                measured: dict[str, float] = self.pipe.task.measure(self._predict, examples)
                return measured
        finally:
            watching.remove()
            for module in sharded:  # without a backward pass the last ones stay gathered
                module.reshard()

    def _predict(self, raws: list[Any], **options: Any) -> Any:
        """The answers of all ranks, in the order of the items."""
        rank, world = distributed.rank(), distributed.world_size()
        if self.common:
            rank, world = 0, 1
        mine = raws[rank::world]
        try:
            answers: list[Any] | None = list(self.pipe(mine, **options)) if mine else []
        except Interrupted:
            answers = None
        parts = distributed.gather(answers) if world > 1 else [answers]
        whole: list[Any] = [None] * len(raws)
        for first, part in enumerate(parts):
            if part is None:
                raise Interrupted
            whole[first::world] = part
        gather: Callable[[list[Any]], Any] | None = getattr(self.pipe.task, "gather", None)
        return gather(whole) if gather else whole
