"""Make `resnet50.cifar10` in four hours on one core: the plain script behind these weights.

    ZOO_DATA=... OMP_NUM_THREADS=1 python scripts/train_resnet50_cifar10.py OUT
    zoo publish OUT resnet50.cifar10

The images are enlarged to 40, 48, then 64 pixels, so that the ImageNet stem and all keys stay as
they are. In bfloat16 on a CPU the products of matrices are several times faster than convolutions
of few pixels, above all than their weight gradients; `vision.products` puts the former in place of
the latter. The packaged file was made with shares of the time where this script has shares of the
steps, and with two interruptions.

The second phase begins with the average of the first: what that had learned by heart without
cutout, cutmix made it generalise.

Source: He et al. 2015 (network), DeVries and Taylor 2017 (cutout), Yun et al. 2019 (cutmix), Goyal
et al. 2017 (identity at first), Touvron et al. 2019 (small images first).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import zoo
from vision.products import as_products
from vision.tasks import ImageClassification
from zoo import registry
from zoo.saving import write_folder

SEED = 0
CIFAR = ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
BATCH, DECAY, CUTOUT = 128, 0.05, 8  # images, weight decay, pixels
AVERAGE = 0.998  # of the weights, per step


class Phase(NamedTuple):
    """Steps from one start of the optimiser to its end."""

    epochs: int
    rate: float
    warmup: int  # steps
    sizes: tuple[tuple[float, int], ...]  # up to this share of the steps, this many pixels
    cutout: float  # share of the steps that has it
    cutmix: float  # share of the steps of which half have it


PHASES = (
    Phase(18, 2e-3, 300, ((0.10, 40), (0.25, 48), (1.0, 64)), 0.4, 0.0),
    Phase(22, 1.5e-3, 200, ((0.15, 40), (0.5, 48), (1.0, 64)), 1.0, 0.8),
)


def read(split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and classes (n,)."""
    examples = list(ImageClassification.datasets["cifar10"].examples(split))
    pixels = [np.asarray(Image.open(BytesIO(raw)).convert("RGB")) for raw, _ in examples]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([target for _, target in examples])


def resized(images: Tensor, size: int) -> Tensor:
    """Enlarged and normalised, channels last."""
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in CIFAR)
    large = F.interpolate(images.float(), size=(size, size), mode="bilinear", antialias=True)
    return ((large - mean) / std).contiguous(memory_format=torch.channels_last)


def augmented(images: Tensor, generator: torch.Generator, cutout: int) -> Tensor:
    """Shifted by up to 4 pixels, half of them mirrored, a square of each the mean colour."""
    n, pixels = len(images), torch.arange(32)
    dy, dx = torch.randint(9, (2, n, 1), generator=generator)
    mirrored = torch.rand(n, generator=generator) < 0.5
    columns = dx + pixels
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = F.pad(images.float(), (4, 4, 4, 4), mode="reflect")
    rows = torch.arange(n)[:, None, None]
    images = padded[rows, :, (dy + pixels)[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if cutout:
        y, x = torch.randint(32, (2, n, 1), generator=generator)
        inside = ((pixels - y).abs() < cutout / 2)[:, None, :, None] & (
            (pixels - x).abs() < cutout / 2
        )[:, None, None, :]
        images = torch.where(inside, 255 * torch.tensor(CIFAR[0])[:, None, None], images)
    return images


def mixed(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """A box of each image is another's: images, who the others are, and the share that stays.

    Source: Yun et al. 2019, with one box for the whole batch.
    """
    others = torch.randperm(len(images), generator=generator)
    side = int(32 * math.sqrt(1 - float(torch.rand((), generator=generator))))
    y, x = torch.randint(32 - side + 1, (2,), generator=generator).tolist()
    images = images.clone()
    images[:, :, y : y + side, x : x + side] = images[others, :, y : y + side, x : x + side]
    return images, others, 1 - side**2 / 32**2


def batches(n: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Indices of each step; every epoch in an order of its own, its incomplete batch left out."""
    for step in range(steps):
        epoch, place = divmod(step, n // size)
        if place == 0:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        yield order[place * size : (place + 1) * size]


def cosine(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate."""
    return min(1, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(images: Tensor, target: Tensor) -> nn.Module:
    """ResNet-50 from scratch; the running average of its weights, in eval mode."""
    torch.manual_seed(SEED)
    average = zoo.load("resnet50.cifar10", pretrained=False)
    for number, phase in enumerate(PHASES):
        generator = torch.Generator().manual_seed(SEED + 1 + number)
        average = train_phase(average, phase, images, target, generator)
    return average


def train_phase(
    start: nn.Module, phase: Phase, images: Tensor, target: Tensor, generator: torch.Generator
) -> nn.Module:
    """One phase from given weights; the running average of those that it goes through."""
    model = zoo.load("resnet50.cifar10", pretrained=False).train()
    average = zoo.load("resnet50.cifar10", pretrained=False)
    model.load_state_dict(start.state_dict())
    average.load_state_dict(as_products(model).state_dict())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=phase.rate, fused=True)
    steps = phase.epochs * (len(images) // BATCH)
    seed = 100 * generator.initial_seed()
    for step, chosen in enumerate(batches(len(images), BATCH, steps, seed)):
        size = next(size for share, size in phase.sizes if step < share * steps)
        for group in optimizer.param_groups:
            group["lr"] = phase.rate * cosine(step, steps, phase.warmup)
        cutout = CUTOUT if step < phase.cutout * steps else 0
        batch, truth = augmented(images[chosen], generator, cutout), target[chosen]
        others, kept = torch.arange(BATCH), 1.0
        if step < phase.cutmix * steps and torch.rand((), generator=generator) < 0.5:
            batch, others, kept = mixed(batch, generator)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(resized(batch, size)).float()
        loss = kept * F.cross_entropy(logits, truth, label_smoothing=0.1)
        loss += (1 - kept) * F.cross_entropy(logits, truth[others], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        keep = min(AVERAGE, (step + 2) / (step + 11))
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(now.data, 1 - keep)
        for mean, now in zip(average.buffers(), model.buffers(), strict=True):
            mean.lerp_(now, 1 - keep) if mean.is_floating_point() else mean.copy_(now)
        if step % 50 == 0:
            print(f"step {step}/{steps} size {size} loss {loss.item():.4f}", flush=True)
    return average


def main(out: Path) -> None:
    """Train and save."""
    model = train(*read("train"))
    origin = {"trained_by": "refzoo", "command": "python scripts/train_resnet50_cifar10.py OUT"}
    origin |= {"seed": str(SEED), "data": "CIFAR-10 train"}
    card = registry.card_of(model)
    write_folder(
        model, out, tag="cifar10", labels=card.labels, licence="MIT", origin=origin, auxiliary={}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
