from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.memory import forward_bytes
from zoo.registry import load


class Chain(nn.Module):
    """Maps of 4, 8 and 2 channels; a view and a change in place take nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 4, 1), nn.Conv3d(4, 8, 1)
        self.last = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(2).unflatten(2, x.shape[2:])
        x = F.relu(self.second(x), inplace=True)
        return self.last(x)


def test_bytes_by_hand() -> None:
    # 4 and 8 channels live together, then 8 and 2.
    assert forward_bytes(Chain(), (1, 1, 5, 6, 7)) == 4 * (4 + 8) * 5 * 6 * 7
    assert forward_bytes(Chain().bfloat16(), (3, 1, 5, 6, 7)) == 3 * 2 * (4 + 8) * 5 * 6 * 7


def test_a_whole_network_is_counted_without_computing_it() -> None:
    model = load("unet3d", channels=(4, 8, 8), depths=(1, 1, 1)).eval()
    small, large = (forward_bytes(model, (1, 1, n, n, n)) for n in (16, 32))
    assert large > 7 * small
    # Far more than would fit, and yet nothing is allocated.
    assert forward_bytes(model, (1, 1, 4096, 4096, 4096)) > 2**40
    assert all(p.device == torch.device("cpu") for p in model.parameters())
