"""Losses of segmentation, from logits and integer labels, one number for each item of the batch.

Sums run in float32 whatever the dtype of the logits: half precision overflows at 65,504 voxels, and
bfloat16 stops counting at 256. One flag, `foreground`, says what happens to class 0: True leaves it
out of every term that compares regions, False treats it as any class. Cross-entropy always has it.

Regions are compared per item, so that an item's loss does not depend on its batch, and `smooth`
voxels are added on both sides of each ratio: a class that is neither there nor predicted costs 0,
and one that is predicted without being there costs more, the more voxels it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Integer
from torch import Tensor

from zoo.errors import ConfigError, DataError, shown

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    logits: Float[Tensor, "batch classes ..."],
    target: Integer[Tensor, "batch ..."],
    *,
    weight: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
) -> Float32[Tensor, " batch"]:
    """Mean over an item's voxels of the cross-entropy in nats.

    Args:
        logits: Of any floating dtype.
        target: Class of every voxel.
        weight: Of every class, background included; the mean is then a weighted one.
        label_smoothing: Share of the target that all classes have alike, in [0, 1).

    Raises:
        DataError: Shapes do not fit, labels are floats or name no class.
        ConfigError: `weight` has another length.
    """
    check_target(logits, target)
    weights = None if weight is None else _weights(weight, logits)
    each = F.cross_entropy(
        logits.float(),
        target.long(),
        weight=weights,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if weights is None:
        return each.flatten(1).mean(1)
    return each.flatten(1).sum(1) / weights[target.long()].flatten(1).sum(1)


def focal_loss(
    logits: Float[Tensor, "batch classes ..."],
    target: Integer[Tensor, "batch ..."],
    *,
    gamma: float = 2.0,
) -> Float32[Tensor, " batch"]:
    """Mean over an item's voxels of the cross-entropy times (1 - p)^gamma.

    Args:
        logits: Of any floating dtype.
        target: Class of every voxel.
        gamma: 0, which is the cross-entropy, or at least 1: the gradient is infinite between.

    Raises:
        DataError: As `cross_entropy`.
        ConfigError: `gamma` is out of range.

    Source: Lin et al. 2017, https://arxiv.org/abs/1708.02002, equation 4.
    """
    if gamma != 0 and not 1 <= gamma < math.inf:
        raise ConfigError(f"gamma is {shown(gamma)}; it takes 0 or at least 1")
    check_target(logits, target)
    log_p = -F.cross_entropy(logits.float(), target.long(), reduction="none")
    return -((-torch.expm1(log_p)) ** gamma * log_p).flatten(1).mean(1)


def dice_loss(
    logits: Float[Tensor, "batch classes ..."],
    target: Integer[Tensor, "batch ..."],
    *,
    foreground: bool = True,
    smooth: float = 1.0,
) -> Float32[Tensor, " batch"]:
    """One minus the soft Dice coefficient, averaged over the classes.

    For a class with p of probability, t true voxels and an overlap of i, the coefficient is
    (2i + smooth) / (p + t + smooth).

    Args:
        logits: Of any floating dtype; softmax makes probabilities of them.
        target: Class of every voxel.
        foreground: Leave class 0 out.
        smooth: Voxels added above and below, more than 0.

    Raises:
        DataError: As `cross_entropy`.
        ConfigError: `smooth` is out of range, or there is no class beside the background.

    Source: Milletari et al. 2016, https://arxiv.org/abs/1606.04797, section 3, with sums instead
        of sums of squares.
    """
    return tversky_loss(logits, target, alpha=0.5, foreground=foreground, smooth=smooth / 2)


def tversky_loss(
    logits: Float[Tensor, "batch classes ..."],
    target: Integer[Tensor, "batch ..."],
    *,
    alpha: float = 0.3,
    foreground: bool = True,
    smooth: float = 1.0,
) -> Float32[Tensor, " batch"]:
    """One minus the Tversky index (i + s) / (i + alpha fp + (1 - alpha) fn + s), class by class.

    Args:
        logits: Of any floating dtype; softmax makes probabilities of them.
        target: Class of every voxel.
        alpha: Weight of false alarms in [0, 1]; misses have the rest. Below a half, misses count
            more; a half is Dice.
        foreground: Leave class 0 out.
        smooth: Voxels added above and below, more than 0.

    Raises:
        DataError: As `cross_entropy`.
        ConfigError: As `dice_loss`, or `alpha` is out of range.

    Source: Salehi et al. 2017, https://arxiv.org/abs/1706.05721, equation 4.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha is {shown(alpha)}; it takes a weight in [0, 1]")
    overlap, predicted, true = _regions(logits, target, foreground, smooth)
    false_alarms, misses = predicted - overlap, true - overlap
    index = (overlap + smooth) / (overlap + alpha * false_alarms + (1 - alpha) * misses + smooth)
    return 1 - index.mean(1)


def generalised_dice_loss(
    logits: Float[Tensor, "batch classes ..."],
    target: Integer[Tensor, "batch ..."],
    *,
    foreground: bool = True,
    smooth: float = 1.0,
) -> Float32[Tensor, " batch"]:
    """One minus the Dice coefficient of all classes together, each weighted by 1 / t².

    Weights are relative to that of the rarest class of the item, which has 1; a class that is
    absent has the same weight as the rarest one.

    Args:
        logits: Of any floating dtype; softmax makes probabilities of them.
        target: Class of every voxel.
        foreground: Leave class 0 out.
        smooth: Voxels added above and below, more than 0.

    Raises:
        DataError: As `cross_entropy`.
        ConfigError: As `dice_loss`.

    Source: Sudre et al. 2017, https://arxiv.org/abs/1707.03237, section 2.1.
    """
    overlap, predicted, true = _regions(logits, target, foreground, smooth)
    rarest = true.masked_fill(true == 0, math.inf).amin(1, keepdim=True)
    # Relative, since 1 / t² of a large organ lies near the smallest numbers of float32.
    weight = torch.where(true == 0, 1.0, (rarest / true) ** 2)
    joint = (weight * overlap).sum(1)
    return 1 - (2 * joint + smooth) / ((weight * (predicted + true)).sum(1) + smooth)


def dice_cross_entropy(
    logits: Float[Tensor, "batch classes ..."],
    target: Integer[Tensor, "batch ..."],
    *,
    foreground: bool = True,
    smooth: float = 1.0,
    label_smoothing: float = 0.0,
) -> Float32[Tensor, " batch"]:
    """`dice_loss` plus `cross_entropy`, which teaches also where no class is.

    Source: Isensee et al. 2018, https://arxiv.org/abs/1809.10486, section 2.2.
    """
    dice = dice_loss(logits, target, foreground=foreground, smooth=smooth)
    return dice + cross_entropy(logits, target, label_smoothing=label_smoothing)


def deeply_supervised(
    loss: Loss,
    outputs: Sequence[Float[Tensor, "batch classes _ _ _"]],
    target: Integer[Tensor, "batch depth height width"],
) -> Float32[Tensor, " batch"]:
    """Mean of the losses at every resolution, each with half of the weight of the finer one.

    Args:
        loss: One of this file, of one resolution.
        outputs: Logits, finest first, each of the target's size over a stride, rounded up.
        target: Class of every voxel; a coarse map is compared with every second voxel, every
            fourth and so on, which are those that strided convolutions are centred at.

    Source: Isensee et al. 2018, https://arxiv.org/abs/1809.10486; nnU-Net v2.
    """
    shares = [0.5**i for i in range(len(outputs))]
    total = torch.stack(
        [s * loss(x, _thinned(target, x)) for s, x in zip(shares, outputs, strict=True)]
    )
    return total.sum(0) / sum(shares)


def check_target(logits: Tensor, target: Tensor) -> None:
    """Refuse labels that do not belong to the logits.

    Raises:
        DataError: Shapes do not fit, labels are floats or, seen on the CPU only, name no class.
    """
    if logits.shape[:1] + logits.shape[2:] != target.shape:
        raise DataError(
            f"logits are {tuple(logits.shape)} and labels {tuple(target.shape)}; labels have the "
            "same shape without the axis of the classes"
        )
    if target.is_floating_point() or target.is_complex():
        raise DataError(
            f"labels are {str(target.dtype).removeprefix('torch.')}; they take the whole number of "
            "each voxel's class: probabilities.argmax(1)"
        )
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and target.numel():
        low, high = (int(bound) for bound in target.aminmax())
        if low < 0 or high >= logits.shape[1]:
            wrong = low if low < 0 else high
            raise DataError(
                f"a voxel has the label {wrong}; the model has the classes 0 to "
                f"{logits.shape[1] - 1}: renumber the labels"
            )


def _regions(
    logits: Tensor, target: Tensor, foreground: bool, smooth: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Overlap, probability and true voxels of every class, each of shape (batch, classes)."""
    if not 0 < smooth < math.inf:
        raise ConfigError(f"smooth is {shown(smooth)}; it takes voxels, more than 0")
    first = int(foreground)
    if logits.shape[1] <= first:
        raise ConfigError(
            f"there are {logits.shape[1]} classes; without the background none is left, "
            "so foreground=False is needed"
        )
    check_target(logits, target)
    probabilities = logits.float().softmax(1).flatten(2)
    labels = target.flatten(1)
    overlap, true = [], []
    # Class by class: a one-hot target would take as much memory as the logits. Not scatter_add,
    # which adds voxels one after the other and so stops counting at 2^24.
    for index in range(first, logits.shape[1]):
        mask = labels == index
        overlap.append((probabilities[:, index] * mask).sum(1))
        true.append(mask.sum(1).float())
    predicted = probabilities[:, first:].sum(2)
    return torch.stack(overlap, 1), predicted, torch.stack(true, 1)


def _thinned(target: Tensor, like: Tensor) -> Tensor:
    """Every n-th voxel of each axis, such that as many are left as `like` has."""
    for axis, size in enumerate(like.shape[2:], 1):
        whole, step = target.shape[axis], 1
        while -(-whole // step) > size:
            step *= 2
        if -(-whole // step) != size:
            raise DataError(
                f"a map has {size} voxels along an axis with {whole} labels; it takes {whole} "
                "over a power of two, rounded up"
            )
        target = target.index_select(axis, torch.arange(0, whole, step, device=target.device))
    return target


def _weights(weight: Sequence[float], logits: Tensor) -> Tensor:
    if len(weight) != logits.shape[1] or min(weight) <= 0:
        raise ConfigError(
            f"weight is {shown(list(weight))}; it takes a number above 0 for each of the "
            f"{logits.shape[1]} classes, background included"
        )
    return torch.tensor(weight, dtype=torch.float32, device=logits.device)
