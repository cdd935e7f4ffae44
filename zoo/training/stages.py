"""Pipeline parallelism: each rank holds some consecutive layers, and hidden states travel.

For families that say how to be cut: `depth_order()`, ``stage(x, layers, **inputs)``, whose hidden
states are (rows, tokens, ``config.embed_dim``), ``config.num_layers``, and `tied_names()` where the
head reads parameters of the embeddings. All ranks see the same batches. A rank keeps the shapes of
what the others hold, as tensors on the device "meta", so that names, optimiser and checkpoint are
those of the whole model.

Source: Huang et al. 2018, https://arxiv.org/abs/1811.06965 (GPipe).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from zoo.errors import ConfigError
from zoo.groups import layer_groups
from zoo.training import distributed

Inputs = Mapping[str, Tensor]
LossOf = Callable[[Tensor, int], Tensor]  # of what the model gave for a microbatch, by number


class Stage(nn.Module):
    """This rank's layers, for hidden states of one size whatever the size of a microbatch.

    Args:
        model: Whose layers they are.
        layers: Their numbers.
        rows: Of the largest microbatch.
        tokens: Of the longest one.
    """

    def __init__(self, model: Any, layers: range, rows: int, tokens: int) -> None:
        super().__init__()
        self.model, self.layers, self.size = model, layers, (rows, tokens)

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        """Hidden states for the next rank, padded; or, on the last one, what the model gives."""
        rows, tokens = inputs["input_ids"].shape
        hidden = x[:rows, :tokens] if self.layers.start else None
        y: Tensor = self.model.stage(hidden, self.layers, **inputs)
        if self.layers.stop == self.model.config.num_layers:
            return y
        return F.pad(y.float(), (0, 0, 0, self.size[1] - tokens, 0, self.size[0] - rows))


class Pipelined(nn.Module):
    """A model whose layers are spread over the ranks; all ranks call it together.

    Args:
        model: The same on every rank. What this rank does not hold is given up, in place.
        device: Of this rank.

    Raises:
        ConfigError: The family cannot be cut, or has fewer layers than there are ranks.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__()
        rank, world = distributed.rank(), distributed.world_size()
        kind = type(model).__name__
        if not hasattr(model, "stage"):
            raise ConfigError(f"{kind} cannot be cut into stages; take the strategy ddp or fsdp")
        count = model.config.num_layers
        if count < world:
            raise ConfigError(f"{kind} has layers for {count} ranks, and there are {world}")
        self.layers = range(count * rank // world, count * (rank + 1) // world)
        self.first, self.last = rank == 0, rank == world - 1
        self.device = device
        groups = layer_groups(model)
        held = {name for number in self.layers for name in groups[1 + number]}
        held |= {*groups[0]} if self.first else set()
        tied: list[str] = model.tied_names() if hasattr(model, "tied_names") else []
        held |= {*groups[-1], *tied} if self.last else set()
        for name, parameter in list(model.named_parameters()):
            if name not in held:
                owner, _, leaf = name.rpartition(".")
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                setattr(model.get_submodule(owner), leaf, empty)
        own = {name: p for name, p in model.named_parameters() if name in held}
        # First, because whoever asks where a model is looks at its first parameter.
        self.own = nn.ParameterList(own.values())
        self.model = model
        self._tied = [own[name] for name in tied if name in own]
        # Those that two ranks hold count once, in the norm of the gradient.
        self._counted = [p for n, p in own.items() if self.first or n not in tied]
        self._ends: Any = dist.new_group([0, world - 1]) if tied else None

    def forward(self, **inputs: Tensor) -> Tensor:
        """The answers of the whole model, on every rank."""
        schedule = self._schedule([inputs], None)
        output = schedule.eval(arg_mbs=[(inputs["input_ids"],)], kwarg_mbs=[inputs])
        answers: list[Any] = distributed.gather(output.float() if self.last else None)
        answer: Tensor = answers[-1].to(self.device)
        return answer

    def backward(self, microbatches: Sequence[Inputs], loss: LossOf) -> None:
        """Add the gradients of this rank's parameters, of the sum of the microbatches' losses.

        Args:
            microbatches: Of one step, with their targets.
            loss: Called on the last rank.
        """
        inputs = [{k: t for k, t in batch.items() if k != "target"} for batch in microbatches]
        numbers = list(range(len(inputs)))
        self._schedule(inputs, loss).step(
            arg_mbs=[(part["input_ids"],) for part in inputs],
            kwarg_mbs=inputs,
            target_mbs=numbers if self.last else None,
            return_outputs=False,
        )
        for parameter in self._tied:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._ends)

    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Norm of the gradient of the whole model; `grads` are those of this rank."""
        own = [p.grad for p in self._counted if p.grad is not None]
        square = float(nn.utils.get_total_norm(own)) ** 2
        (total,) = distributed.all_sum([square])
        return torch.tensor(math.sqrt(total), device=self.device)

    def _schedule(self, inputs: Sequence[Inputs], loss: LossOf | None) -> ScheduleGPipe:
        """All microbatches forward, then all backward; made anew since sizes differ by step."""
        ids = [part["input_ids"] for part in inputs]
        rows, tokens = (max(part.shape[axis] for part in ids) for axis in (0, 1))
        place = PipelineStage(
            Stage(self.model, self.layers, rows, tokens),
            distributed.rank(),
            distributed.world_size(),
            self.device,
            # Told here, or the ranks would tell each other in pickles.
            input_args=ids[0] if self.first else self._hidden(rows, tokens, self.layers.start),
            output_args=self._hidden(rows, tokens, self.layers.stop),
        )
        return ScheduleGPipe(place, len(inputs), loss, scale_grads=False)

    def _hidden(self, rows: int, tokens: int, layer: int) -> Tensor:
        """Shape of the hidden states before a layer, and whether they have a gradient."""
        groups = layer_groups(self.model)[: 1 + layer]
        learns = {name for name, p in self.model.named_parameters() if p.requires_grad}
        return torch.empty(
            rows,
            tokens,
            self.model.config.embed_dim,
            device="meta",
            requires_grad=any(name in learns for group in groups for name in group),
        )


def joined(state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with the entries of all ranks, those of the others without their data.

    All ranks call it together.
    """
    own = [[number, list(_described(values))] for number, values in state["state"].items()]
    entries: dict[int, dict[str, Any]] = dict(state["state"])
    for part in distributed.gather(own):
        for number, values in part:
            if number not in entries:
                entries[number] = {name: _placeholder(value) for name, value in values}
    return {**state, "state": dict(sorted(entries.items()))}


def _described(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            yield name, {"shape": list(value.shape), "dtype": dtype}
        else:
            yield name, value


def _placeholder(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device="meta")
