"""Mixup and cutmix: every image is mixed with another of its batch, and so are the targets."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.errors import ConfigError, shown


def mix(
    images: Tensor,
    target: Tensor,
    classes: int,
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Images mixed with each other in an order that is drawn; any number of them, also one.

    Where both parameters are set, one of the two is drawn for the batch, evenly.

    Args:
        images: Shape (batch, channels, height, width).
        target: Class ids (batch,), or shares that sum to 1 (batch, classes).
        classes: Their number.
        mixup: Parameter alpha of the Beta distribution of the share; 0 is off.
        cutmix: The same.
        generator: On the CPU. All that is random comes from it.

    Returns:
        New images, and the targets' shares as float32 (batch, classes); with both off, the images
        and targets that were given.

    Raises:
        ConfigError: A parameter is negative or not finite.

    Source: Zhang et al. 2017 (mixup), section 2; Yun et al. 2019 (cutmix), algorithm A1.
    """
    for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
        if not 0 <= alpha < math.inf:
            raise ConfigError(f"{name} is {shown(alpha)}; it takes 0 (off) or a number above it")
    if not (mixup or cutmix):
        return images, target
    seed = int(torch.randint(2**62, (), generator=generator))
    random = np.random.default_rng(seed)
    partner = torch.from_numpy(random.permutation(len(images))).to(images.device)
    cuts = not mixup or (cutmix > 0 and random.random() < 0.5)
    kept = float(random.beta(*(cutmix if cuts else mixup,) * 2))
    if cuts:
        images, kept = _pasted(images, images[partner], kept, random)
    else:
        images = images.lerp(images[partner], 1 - kept)
    shares = target.float() if target.ndim > 1 else F.one_hot(target, classes).float()
    return images, kept * shares + (1 - kept) * shares[partner]


def _pasted(
    images: Tensor, others: Tensor, kept: float, random: np.random.Generator
) -> tuple[Tensor, float]:
    """A rectangle of the others pasted into the images, and the share that is left of these.

    It has the images' aspect ratio and any centre; where it leaves the image less is pasted.
    """
    area = 1.0
    box = []
    for side in images.shape[-2:]:
        half, centre = side * math.sqrt(1 - kept) / 2, random.uniform(0, side)
        start, stop = max(0, round(centre - half)), min(side, round(centre + half))
        box.append(slice(start, stop))
        area *= (stop - start) / side
    images = images.clone()
    images[..., box[0], box[1]] = others[..., box[0], box[1]]
    return images, 1 - area
