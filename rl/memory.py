"""Recurrence: one function that both acting and learning go through, so that they cannot differ.

The five LSTM details of the published list: orthogonal weights, biases of 0; a first state of
zeros; a state that begins anew with an episode; sequences kept whole, environment by environment;
and a first state of each rollout that is kept, from which the others are worked out again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def unroll(
    cell: Callable[[Tensor, Tensor], Tensor], x: Tensor, state: Tensor, start: Tensor
) -> Tensor:
    """States after each step.

    Args:
        cell: (input (n, features), state (n, size)) -> state (n, size).
        x: Inputs: (steps, n, features).
        state: Before the first step: (n, size).
        start: True where an episode starts; its state is cleared *before* that step: (steps, n).

    Returns:
        (steps, n, size).
    """
    found = []
    for row, begins in zip(x, start, strict=True):
        state = cell(row, torch.where(begins[:, None], 0.0, state))  # LSTM details 2 and 3
        found.append(state)
    return torch.stack(found)


class Memory(nn.Module):
    """An LSTM whose state is one row: the output, then the cell.

    Args:
        features: Of an input.
        size: Of the output; the state has twice as many.
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.cell = nn.LSTMCell(features, size)
        self.init_weights()

    def init_weights(self) -> None:
        """Orthogonal weights with gain 1, biases of 0 (LSTM detail 1)."""
        for name, parameter in self.cell.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter)

    def first(self, n: int) -> Tensor:
        """The state before anything was seen: (n, 2 size) zeros."""
        return torch.zeros(n, 2 * self.size)

    def forward(self, x: Tensor, state: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (steps, n, size), and the state after the last step (n, 2 size).

        Args:
            x: Inputs: (steps, n, features).
            state: Before the first step: (n, 2 size).
            start: True where an episode starts: (steps, n).
        """
        states = unroll(self._step, x, state, start)
        return states[..., : self.size], states[-1]

    def _step(self, x: Tensor, state: Tensor) -> Tensor:
        output, cell = state.split(self.size, -1)
        return torch.cat(self.cell(x, (output.contiguous(), cell.contiguous())), -1)
