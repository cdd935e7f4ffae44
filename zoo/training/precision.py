"""Mixed precision: autocast for each forward pass, a loss scale, one order of what follows.

Source: Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740, section 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zoo.errors import ConfigError, nearest, shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCALE = 65536.0  # of the loss at first; that of torch.amp.GradScaler, as are the next two
GROW_AFTER = 2000  # steps without overflow after which it is doubled
LARGEST_SCALE = 2.0**24


class Stepped(NamedTuple):
    """What became of a step: the gradient's norm before clipping, and whether it was skipped."""

    norm: float
    skipped: bool


class Precision:
    """How a model computes, and how its gradient becomes a step.

    Weights, their gradients and the optimiser's state stay float32. The scale of a float16 loss is
    kept here rather than by `torch.amp.GradScaler`: one number, the norm of the whole gradient,
    decides over a step on all ranks alike, of sharded gradients too.

    Args:
        name: "float32", "bfloat16" or "float16".
        device: Of the model.
        slow: Allow float16 on a CPU all the same.

    Attributes:
        scale: Of the loss; 1 unless the precision is float16.

    Raises:
        ConfigError: Another name, or float16 on a CPU, which is some 20 times slower than float32.
    """

    def __init__(self, name: str, device: torch.device | str, *, slow: bool = False) -> None:
        self.device = torch.device(device)
        if name not in DTYPES:
            known = nearest(name, DTYPES)
            raise ConfigError(
                f"precision is {shown(name)};{known} it is one of {', '.join(DTYPES)}"
            )
        if name == "float16" and self.device.type == "cpu" and not slow:
            raise ConfigError(
                "precision is 'float16', which a CPU computes some 20 times slower than float32; "
                "take 'bfloat16'"
            )
        self.dtype = DTYPES[name]
        self.scaled = name == "float16"
        self.scale = SCALE if self.scaled else 1.0
        self._good_steps = 0  # since the scale changed

    def autocast(self) -> torch.autocast:
        """Context of one forward pass with its loss; the backward pass runs outside."""
        enabled = self.dtype != torch.float32
        return torch.autocast(
            self.device.type, self.dtype if enabled else torch.bfloat16, enabled=enabled
        )

    def scale_up(self, loss: Tensor) -> Tensor:
        """The loss as its gradient is taken, which `step` scales down again."""
        return loss * self.scale if self.scaled else loss

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient, scaled, to the parameters'."""
        self.scale_up(loss).backward()

    @torch.no_grad()
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        clip_norm: float | None = None,
        norm_of: Callable[[Sequence[Tensor]], Tensor] = nn.utils.get_total_norm,
    ) -> Stepped:
        """Unscale the gradient, clip it, step, adapt the scale.

        A step whose gradient is not finite leaves weights and optimiser as they are, in any
        precision; a float16 one also halves the scale.

        Args:
            optimizer: Its gradients have been reduced over the ranks.
            parameters: All those the norm is taken of.
            clip_norm: Highest norm; None clips nothing.
            norm_of: Norm of the whole gradient, where this rank has a part of it.
        """
        graded = [p for p in parameters if p.grad is not None]
        grads = [p.grad for p in graded if p.grad is not None]
        if self.scaled and grads:
            torch._foreach_mul_(grads, 1 / self.scale)  # a power of two: exact
        total = norm_of(grads)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if finite := math.isfinite(norm):
            if clip_norm is not None and grads:
                nn.utils.clip_grads_with_norm_(graded, clip_norm, total)
            optimizer.step()
        self._adapt(finite)
        return Stepped(norm, not finite)

    def _adapt(self, finite: bool) -> None:
        if not self.scaled:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self._good_steps == GROW_AFTER:
            self.scale, self._good_steps = min(self.scale * 2, LARGEST_SCALE), 0

    def state_dict(self) -> dict[str, float | int]:
        """The scale and how long it has held."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another's state; one of another precision has no say over the scale."""
        if self.scaled and state["scale"] != 1:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])


@torch.no_grad()
def first_bad_layer(model: nn.Module, run: Callable[[], object]) -> str | None:
    """Name of the first module with an output that is infinite or not a number.

    Args:
        model: Whose modules are watched.
        run: Calls the model. What it raises once a bad output was seen is swallowed.

    Returns:
        The module's name, that of its class for the whole model, None if every output is finite.
    """
    bad: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not bad and not all(bool(torch.isfinite(t).all()) for t in _floats(output)):
                bad.append(name or type(module).__name__)

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(watch(name)))
        try:
            run()
        except Exception:
            if not bad:
                raise
    return bad[0] if bad else None


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floats(item)
    elif dataclasses.is_dataclass(value):
        yield from _floats(list(vars(value).values()))
