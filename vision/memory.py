"""How much memory a forward pass takes, counted without computing it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counting(TorchDispatchMode):
    """Bytes of the tensors that live, and the most that ever did."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is(t)}
        for tensor in filter(_is, tree_leaves(result)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in given | self._seen:  # a view, or what was changed in place
                continue
            self._seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key: int, count: int) -> None:
        self._seen.discard(key)
        self.now -= count


def _is(value: object) -> bool:
    return isinstance(value, Tensor)


def forward_bytes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Most bytes that the maps of one forward pass take at any moment, in the model's dtype.

    The pass runs on the meta device. What kernels take for themselves is not counted, nor are
    parameters and the input.

    Args:
        model: In eval mode, of one input.
        shape: Of the input.
    """
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    dtype = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
    with torch.no_grad(), _Counting() as counting:
        volume = torch.empty(shape, dtype=dtype, device="meta")
        before = counting.now
        counting.peak = before
        functional_call(model, state, (volume,))
    return counting.peak - before
