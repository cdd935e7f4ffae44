"""Answers averaged over mirrored volumes, and how sure they are.

What left and right are is the third axis of an upright volume; mirrored along it, a label of one
side is the label of the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from vision.volumes import RIGHT, VolumePreprocessing


def mirror_averaged(
    predict: Callable[[Tensor], Tensor], spec: VolumePreprocessing
) -> Callable[[Tensor], Tensor]:
    """A predictor of probabilities: their mean over all ways to mirror along the allowed axes.

    Args:
        predict: From (batch, channels, depth, height, width) to logits of the same size.
        spec: Says along which axes, and which labels are a left and a right one.
    """
    ways = [
        axes
        for count in range(len(spec.mirrored) + 1)
        for axes in itertools.combinations(spec.mirrored, count)
    ]

    def averaged(
        volume: Float[Tensor, "batch channels depth height width"],
    ) -> Float32[Tensor, "batch classes depth height width"]:
        total: Tensor | None = None
        for axes in ways:
            flipped = [axis + 2 for axis in axes]
            found = predict(volume.flip(flipped)).float().softmax(1).flip(flipped)
            if RIGHT in axes:
                found = found[:, swapped_classes(found.shape[1], spec.pairs or ())]
            total = found if total is None else total.add_(found)
        assert total is not None  # one way is not to mirror
        return total / len(ways)

    return averaged


def swapped_classes(classes: int, pairs: tuple[tuple[int, int], ...]) -> list[int]:
    """For every class, the one that it is in a volume mirrored from left to right."""
    order = list(range(classes))
    for one, other in pairs:
        order[one], order[other] = other, one
    return order


def with_uncertainty(
    predict: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Tensor]:
    """A predictor of probabilities that also gives, as one more channel, how unsure they are.

    That is their entropy over that of a uniform guess: 0 is sure, 1 is a guess. Of probabilities
    averaged over mirrored volumes it is also high where these disagree.

    Source: Wang et al. 2019, https://arxiv.org/abs/1807.07356, equation 6.
    """

    def extended(volume: Tensor) -> Tensor:
        found = predict(volume)
        entropy = -torch.xlogy(found, found).sum(1, keepdim=True) / math.log(found.shape[1])
        return torch.cat((found, entropy), 1)

    return extended
