"""Running statistics that live in the policy: saved with it, frozen unless it is trained.

Statistics are kept in float64 and are those of all rows ever given, on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.training import distributed

EPS = 1e-8  # added to a variance; that of OpenAI's baselines


class Moments(nn.Module):
    """Mean and variance of all rows so far, one of each column.

    Args:
        width: Columns.

    Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
        sample variances", equation 2.1.
    """

    mean: Tensor
    squares: Tensor  # sum of the squared distances from the mean
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        # No `init_buffers`: the loader calls that of buffers that no file holds.
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Add rows (n, width) of this rank, and those of all others; all ranks call it together."""
        rows = rows.detach().double()
        count = float(len(rows))
        mean = rows.mean(0) if count else torch.zeros_like(self.mean)
        squares = ((rows - mean) ** 2).sum(0)
        if distributed.world_size() == 1:
            return self._merge(count, mean, squares)
        for share in distributed.gather((count, mean, squares)):
            self._merge(*share)
        return None

    def _merge(self, count: float, mean: Tensor, squares: Tensor) -> None:
        if not count:
            return
        total = self.count + count
        delta = mean - self.mean
        self.squares += squares + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count.copy_(total)

    @property
    def variance(self) -> Tensor:
        """Of each column, over all rows; 1 before the first."""
        return torch.where(self.count > 0, self.squares / self.count.clamp(min=1), 1.0)


class Normalizer(Moments):
    """Observations less their mean, by their deviation, clipped (continuous details 6 and 7).

    Args:
        width: Columns.
        clip: Highest size of a result.
    """

    def __init__(self, width: int, clip: float = 10.0) -> None:
        super().__init__(width)
        self.clip = clip

    def forward(self, obs: Tensor) -> Tensor:
        """Raw observations (..., width) of any dtype to normalised ones of float32."""
        scaled = (obs.double() - self.mean) / (self.variance + EPS).sqrt()
        return scaled.clamp(-self.clip, self.clip).float()


class RewardScaler(Moments):
    """Rewards by the deviation of their discounted sum, clipped (continuous details 8 and 9).

    Attributes:
        sums: Discounted sums of the episodes that run now, one for each environment.
    """

    def __init__(self, clip: float = 10.0) -> None:
        super().__init__(1)
        self.clip = clip
        self.sums = torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def update_sums(self, reward: Tensor, ended: Tensor, valid: Tensor, gamma: float) -> Tensor:
        """Go on with the sums, and add those of valid rows to the statistics.

        A sum begins anew after an episode, however that ended.

        Args:
            reward: Of each environment: (n,).
            ended: True where this step ended the episode: (n,).
            valid: False where the row is no sample: (n,).
            gamma: Discount.

        Returns:
            The sums this step came to: (n,).
        """
        if len(self.sums) != len(reward):
            self.sums = torch.zeros(len(reward), dtype=torch.float64)
        sums = torch.where(valid, self.sums * gamma + reward.double(), self.sums)
        self.update(sums[valid, None])
        self.sums = torch.where(ended & valid, 0.0, sums)
        return sums

    def forward(self, reward: Tensor) -> Tensor:
        """Rewards of any shape to scaled ones of float32."""
        scaled = reward.double() / (self.variance[0] + EPS).sqrt()
        return scaled.clamp(-self.clip, self.clip).float()
