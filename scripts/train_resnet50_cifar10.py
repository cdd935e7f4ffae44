"""Make `resnet50.cifar10` in four hours on one core: the plain script behind these weights.

    ZOO_DATA=... OMP_NUM_THREADS=1 python scripts/train_resnet50_cifar10.py OUT
    zoo publish OUT resnet50.cifar10

The images are enlarged to 40, 48, then 64 pixels, so that the ImageNet stem and all keys stay as
they are. In bfloat16 on a CPU the products of matrices are several times faster than convolutions
of few pixels, above all than their weight gradients; `as_products` puts the former in place of the
latter. The packaged file was made with shares of the time where this script has shares of the
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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import zoo
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


class Pointwise(torch.autograd.Function):
    """A 1x1 convolution of pixels (M, C) by weights (O, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Pixels (M, O)."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the pixels and of the weights."""
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Unfolded(torch.autograd.Function):
    """A 3x3 convolution, padded by one, of images (N, H, W, C) by weights (O, C, 3, 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        """Images (N, H', W', O)."""
        n, height, width, c = x.shape
        padded = F.pad(x, (0, 0, 1, 1, 1, 1))
        h, w = (height - 1) // stride + 1, (width - 1) // stride + 1
        views = [_view(padded, k, h, w, stride) for k in range(9)]
        columns = torch.cat(views, dim=-1).view(n * h * w, 9 * c)
        flat = weight.permute(0, 2, 3, 1).reshape(-1, 9 * c)
        ctx.save_for_backward(columns, flat)
        ctx.shape, ctx.out, ctx.stride = x.shape, (h, w), stride
        return (columns @ flat.t()).view(n, h, w, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of the images and of the weights; the stride has none."""
        columns, flat = ctx.saved_tensors
        (n, height, width, c), (h, w) = ctx.shape, ctx.out
        grad = grad.reshape(n * h * w, -1)
        weight = (grad.t() @ columns).view(-1, 3, 3, c).permute(0, 3, 1, 2)
        parts = (grad @ flat).view(n, h, w, 9, c)
        padded = grad.new_zeros(n, height + 2, width + 2, c)
        for k in range(9):
            _view(padded, k, h, w, ctx.stride).add_(parts[:, :, :, k])
        return padded[:, 1:-1, 1:-1].contiguous(), weight, None


def _view(padded: Tensor, k: int, h: int, w: int, stride: int) -> Tensor:
    """The pixels that weight `k` of a 3x3 kernel meets."""
    i, j = divmod(k, 3)
    return padded[:, i : i + stride * (h - 1) + 1 : stride, j : j + stride * (w - 1) + 1 : stride]


def _as_product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    if x.dtype != torch.bfloat16 or (kernel == 3 and x.shape[1] < 256):
        return nn.Conv2d.forward(conv, x)
    weight, pixels = conv.weight.to(x.dtype), x.permute(0, 2, 3, 1)
    with torch.autocast("cpu", enabled=False):
        if kernel == 3:
            out = Unfolded.apply(pixels, weight, stride)
        else:
            pixels = pixels[:, ::stride, ::stride]
            n, h, w, c = pixels.shape
            out = Pointwise.apply(pixels.reshape(-1, c), weight.flatten(1)).view(n, h, w, -1)
    return out.permute(0, 3, 1, 2)


def as_products(model: nn.Module) -> nn.Module:
    """Compute plain 1x1 and 3x3 convolutions as products of matrices; the function is the same."""
    for module in model.modules():
        plain = type(module) is nn.Conv2d and module.groups == 1
        if plain and module.kernel_size in ((1, 1), (3, 3)):
            module.forward = _as_product.__get__(module)
    return model.to(memory_format=torch.channels_last)


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
