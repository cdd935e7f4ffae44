"""Exponential moving average of a model's weights, which is often better than the last ones.

Source: Polyak, Juditsky 1992, https://doi.org/10.1137/0330046; the warm-up is that of TensorFlow's
ExponentialMovingAverage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zoo.training.distributed import sharded_like


class EMA:
    """The average of parameters and floating-point buffers; integer buffers are copied.

    Args:
        model: The average begins with its values.
        decay: Share of the average that an update keeps, in (0, 1).
        warmup: Keep less of the first values: (1 + t) / (10 + t) after t updates, where that is
            lower than `decay`.

    Attributes:
        tensors: The average, by name.
        updates: How many there were.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self.tensors = {name: tensor.detach().clone() for name, tensor in _tensors(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the model's values into the average, once after each step of the optimiser."""
        started = (1 + self.updates) / (10 + self.updates)
        decay = min(self.decay, started) if self.warmup else self.decay
        averages, values = [], []
        for name, value in _tensors(model):
            average = self.tensors[name]
            if average.is_floating_point():
                averages.append(_local(average))
                values.append(_local(value.detach()))
            else:
                average.copy_(value)
        if averages:
            torch._foreach_lerp_(averages, values, 1 - decay)
        self.updates += 1

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[None]:
        """Let the model have the averaged values for a while; its own come back whatever happens.

        They change places, so neither `update` nor `state_dict` is to be called meanwhile.
        """
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for name, value in _tensors(model):
            own = value.detach().clone()
            value.copy_(self.tensors[name])
            self.tensors[name].copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """The average (not a copy) and the number of updates."""
        return {"updates": self.updates, "tensors": dict(self.tensors)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another's state."""
        tensors = sharded_like(state["tensors"], self.tensors)
        for name, average in self.tensors.items():
            average.copy_(tensors[name])
        self.updates = state["updates"]


def _local(tensor: Tensor) -> Tensor:
    """This rank's share of a sharded tensor."""
    share: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return share


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once, also where two modules share it."""
    yield from model.named_parameters()
    yield from model.named_buffers()
