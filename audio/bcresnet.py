"""BC-ResNet for keyword spotting: 2D convolutions over frequency, broadcast 1D ones over time.

Papers:
    Kim, Chang, Lee, Sung 2021, "Broadcasted residual learning for efficient keyword spotting",
    https://arxiv.org/abs/2106.04140 (equation numbers below are its own).
    Chang et al. 2021, "SubSpectral Normalization for neural audio data processing",
    https://arxiv.org/abs/2103.13620.

Differs from the paper:
    * Features are part of the network, so that it takes samples.
    * Convolutions over time are causal, and the mean over time is one over the frames of each clip
      alone: what follows a clip in its batch never changes its answer.

The family (width; parameters with twelve classes):
    BC-ResNet-1 1.0; 9,232      BC-ResNet-2 2.0; 27,284     BC-ResNet-3 3.0; 54,168
    BC-ResNet-6 6.0; 187,812    BC-ResNet-8 8.0; 321,068

Cards: bcresnet1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from audio.augment import SoundRecipe
from audio.features import Features, FeatureSpec, SpecAugment, check_samples
from zoo.errors import ConfigError, shown
from zoo.training.recipe import AdamW, Cosine

SUB_BANDS = 5
STAGES = (  # table 1: channels in units of 8 x width, blocks, stride over frequency
    (8, 2, 1),
    (12, 2, 2),
    (16, 4, 2),
    (20, 4, 1),
)
STEM, HEAD = 16, 32


@dataclass(frozen=True, kw_only=True)
class BCResNetConfig:
    """What distinguishes one BC-ResNet from another; the defaults are BC-ResNet-1."""

    width: float = 1.0  # of all channels
    num_classes: int = 12
    dropout: float = 0.1  # of whole channels, in each block
    masked_bands: int = 0  # in training, at most, in one block
    masked_frames: int = 0  # the same
    features: FeatureSpec = field(default_factory=FeatureSpec)

    def __post_init__(self) -> None:
        if not 0 < self.width < math.inf:
            raise ConfigError(f"width is {shown(self.width)}; it takes more than 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {shown(self.dropout)}; it takes a rate from 0, below 1")
        for name in ("masked_bands", "masked_frames"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it takes 0 or more")
        if self.num_classes < 1:
            raise ConfigError(f"num_classes is {shown(self.num_classes)}; it takes at least 1")
        if self.features.channels % (8 * SUB_BANDS):
            raise ConfigError(
                f"features have {self.features.channels} bands; the network halves them three "
                f"times and norms {SUB_BANDS} parts, so it takes a multiple of {8 * SUB_BANDS}"
            )


class SubSpectralNorm(nn.Module):
    """Batch norm of each of five parts of the frequency axis by itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels * SUB_BANDS)

    def forward(self, x: Float[Tensor, "batch c f t"]) -> Float[Tensor, "batch c f t"]:
        """The same shape, normed."""
        batch, channels, bands, frames = x.shape
        parts = x.reshape(batch, channels * SUB_BANDS, bands // SUB_BANDS, frames)
        return self.norm(parts).reshape(batch, channels, bands, frames)


class CausalConv(nn.Conv2d):
    """A convolution that pads frequency by half of its kernel and time on the left alone."""

    @property
    def reach(self) -> int:
        """Frames before the present one that an output depends on."""
        return (self.kernel_size[1] - 1) * self.dilation[1]

    def forward(
        self, x: Float[Tensor, "batch _ f t"], past: Float[Tensor, "batch _ f reach"] | None = None
    ) -> tuple[Float[Tensor, "batch c g t"], Float[Tensor, "batch _ f reach"]]:
        """As many frames as came in, and the past of those that come next.

        Args:
            x: Frames.
            past: The `reach` frames before them; none at the beginning, where they are 0.
        """
        past = x.new_zeros(*x.shape[:3], self.reach) if past is None else past
        x = torch.cat([past, x], dim=3)
        return super().forward(x), x[..., x.shape[3] - self.reach :]


class BCBlock(nn.Module):
    """f2 over frequency, f1 over time on its mean, whose result is broadcast (equation 3)."""

    def __init__(
        self, in_channels: int, channels: int, *, stride: int, dilation: int, dropout: float
    ) -> None:
        super().__init__()
        self.transition = in_channels != channels  # equation 4: no identity then
        f2: list[nn.Module] = []
        if self.transition:
            f2 += [
                nn.Conv2d(in_channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        f2 += [
            nn.Conv2d(
                channels,
                channels,
                (3, 1),
                (stride, 1),
                padding=(1, 0),
                groups=channels,
                bias=False,
            ),
            SubSpectralNorm(channels),
        ]
        self.f2 = nn.Sequential(*f2)
        self.past = CausalConv(
            channels, channels, (1, 3), dilation=(1, dilation), groups=channels, bias=False
        )
        self.f1 = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.Dropout2d(dropout),
        )

    def forward(
        self, x: Float[Tensor, "batch _ f t"], past: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch c g t"], Tensor]:
        """The sum of the input, f2, and f1 of the mean over frequency, rectified; and the past."""
        y = self.f2(x)
        mean, past = self.past(y.mean(dim=2, keepdim=True), past)
        y = y + self.f1(mean)
        return F.relu(y if self.transition else y + x), past


class Listening(NamedTuple):
    """What a stream has to remember; the network itself keeps nothing."""

    tail: Tensor  # samples that later frames see too
    pasts: tuple[Tensor, ...] | None  # frames before the next one, of each convolution over time
    total: Tensor  # (batch, head): what the classifier saw, summed over the frames
    frames: int  # how many


class BCResNet(nn.Module):
    """Samples of clips to the logits of keywords."""

    def __init__(self, config: BCResNetConfig) -> None:
        super().__init__()
        self.config = config
        stem, head = round(STEM * config.width), round(HEAD * config.width)
        self.features = Features(config.features)
        self.augment = SpecAugment(config.masked_bands, config.masked_frames)
        self.stem = CausalConv(1, stem, 5, (2, 1), padding=(2, 0), bias=False)
        self.stem_norm = nn.Sequential(nn.BatchNorm2d(stem), nn.ReLU())
        blocks: list[BCBlock] = []
        channels = stem
        for number, (units, repeats, stride) in enumerate(STAGES):
            for i in range(repeats):
                wide = round(units * config.width)
                blocks.append(
                    BCBlock(
                        channels,
                        wide,
                        stride=stride if i == 0 else 1,
                        dilation=2**number,
                        dropout=config.dropout,
                    )
                )
                channels = wide
        self.blocks = nn.ModuleList(blocks)
        self.last = CausalConv(channels, channels, 5, groups=channels, bias=False)
        self.head = nn.Sequential(
            nn.Conv2d(channels, head, 1, bias=False),
            nn.BatchNorm2d(head),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(head, config.num_classes)
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initial values of one module, those of `torch.nn`: uniform, by the fan of its input."""
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan = module.weight[0].numel()
            nn.init.uniform_(module.weight, -(fan**-0.5), fan**-0.5)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -(fan**-0.5), fan**-0.5)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(
        self,
        samples: Float[Tensor, "batch samples"],
        mask: Int[Tensor, "batch samples"] | Bool[Tensor, "batch samples"] | None = None,
    ) -> Float[Tensor, "batch classes"]:
        """Logits.

        Args:
            samples: In [-1, 1] at the spec's rate; clips of a batch padded at their end.
            mask: 1 for samples, 0 for padding, which is never looked at; none means all samples.

        Raises:
            DataError: There are no samples.
        """
        check_samples(samples)
        length = torch.full_like(samples[:, 0], samples.shape[1], dtype=torch.int64)
        if mask is not None:
            samples = samples.where(mask != 0, 0)  # NaN too
            length = (mask != 0).sum(dim=1)
        hidden, _ = self.hidden(self.augment(self.features(samples)))
        frames = torch.arange(hidden.shape[2], device=hidden.device)
        valid = (frames < self.features.count(length)[:, None])[:, None]
        mean = hidden.where(valid, 0).sum(dim=2) / valid.sum(dim=2).clamp(min=1)
        logits: Tensor = self.classifier(mean)
        return logits

    def hidden(
        self, features: Float[Tensor, "batch bands t"], pasts: Sequence[Tensor] | None = None
    ) -> tuple[Float[Tensor, "batch head t"], tuple[Tensor, ...]]:
        """What the classifier sees of each frame, and the past of every convolution over time."""
        given = iter(pasts) if pasts is not None else repeat(None)
        x, past = self.stem(features[:, None], next(given))
        x, kept = self.stem_norm(x), [past]
        for block in self.blocks:
            x, past = block(x, next(given))
            kept.append(past)
        x, past = self.last(x, next(given))
        return self.head(x).mean(dim=2), (*kept, past)

    def step(
        self,
        chunk: Float[Tensor, "batch samples"],
        state: Listening | None = None,
        *,
        end: bool = False,
    ) -> tuple[Float[Tensor, "batch classes"], Listening]:
        """Logits of all that was heard so far; a whole clip in any chunks gives those of `forward`.

        The answer is that of the last whole hop: it is late by less than ``hop_length`` samples.

        Args:
            chunk: The next samples, of every stream as many; none at all is allowed.
            state: What the step before gave; None begins. It is not changed.
            end: Nothing follows: hear silence up to the end of the hop.
        """
        if state is None:
            tail = chunk.new_zeros(
                len(chunk), self.features.spec.n_fft - self.features.spec.hop_length
            )
            state = Listening(
                tail, None, chunk.new_zeros(len(chunk), self.classifier.in_features), 0
            )
        features, tail = self.features.step(chunk, state.tail, end=end)
        pasts, total, frames = state.pasts, state.total, state.frames + features.shape[2]
        if features.shape[2]:
            hidden, pasts = self.hidden(features, pasts)
            total = total + hidden.sum(dim=2)
        return self.classifier(total / max(frames, 1)), Listening(tail, pasts, total, frames)

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the sound to the answer: stem, each block, head, classifier."""
        blocks = [[f"blocks.{i}"] for i in range(len(self.blocks))]
        return [["stem", "stem_norm"], *blocks, ["last", "head"], ["classifier"]]


DIGITS = {"sample_rate": 8000, "n_fft": 256, "hop_length": 80, "mean": -5.0, "std": 4.0}

RECIPES = {
    "digits": SoundRecipe(
        data="fsdd/train",
        validation="fsdd/test",
        config={"num_classes": 10, "masked_bands": 8, "masked_frames": 10, "features": DIGITS},
        epochs=25,
        batch_size=64,
        optimizer=AdamW(lr=4e-3, weight_decay=0.05),
        schedule=Cosine(warmup=0.05),
        clip_norm=5.0,
        ema=0.995,
        label_smoothing=0.05,
        speed=0.15,
        shift=0.1,
        gain_db=10.0,
        noise_db=(5.0, 40.0),
        noise_share=0.5,
    )
}
