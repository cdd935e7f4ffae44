"""Log-mel and cepstral features as part of the network: from samples, by convolution, causally.

A frame ends where its hop ends: frame t sees no sample after (t + 1) * hop. So features of a stream
are those of the whole clip, padding at the end of a batch changes nothing, and an exported network
takes samples. All statistics are constants of the `FeatureSpec`; none is taken over a batch.

Source: Davis, Mermelstein 1980 (mel cepstrum); the two mel scales are those of HTK (O'Shaughnessy
1987) and of Slaney's Auditory Toolbox (1998), of which a spec names one.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.errors import ConfigError, DataError, shown

MelScale = Literal["htk", "slaney"]
WIDTH, ROLLOFF, BETA = 64, 0.9476, 14.77  # zero crossings, share of Nyquist and Kaiser's beta


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """How samples become features.

    Attributes:
        sample_rate: Samples a second.
        n_fft: Samples of a frame, and points of its Fourier transform.
        hop_length: Samples from one frame to the next.
        n_mels: Triangles on the mel scale.
        f_min: Hz where the first triangle begins.
        f_max: Hz where the last one ends; none is half the sample rate.
        mel_scale: 2595 log10(1 + f / 700) ("htk"), or linear to 1 kHz and then logarithmic.
        norm: Triangles of height 1 (none) or of area 1 in Hz ("slaney").
        log: Natural logarithm, or decibel: ten times that to base 10.
        floor: Smallest power that is told from silence.
        mean: Subtracted from the logarithm.
        std: What the difference is divided by.
        n_mfcc: Coefficients of a cosine transform of the mel bands; none keeps the bands.
    """

    sample_rate: int = 16_000
    n_fft: int = 512
    hop_length: int = 160
    n_mels: int = 40
    f_min: float = 20.0
    f_max: float | None = None
    mel_scale: MelScale = "htk"
    norm: Literal["none", "slaney"] = "none"
    log: Literal["natural", "decibel"] = "natural"
    floor: float = 1e-6
    mean: float = 0.0
    std: float = 1.0
    n_mfcc: int | None = None

    def __post_init__(self) -> None:
        highest = self.f_max if self.f_max is not None else self.sample_rate / 2
        for name, right, takes in (
            ("sample_rate", self.sample_rate >= 1, "1 or more samples a second"),
            ("n_fft", self.n_fft >= 2, "2 or more samples"),
            ("hop_length", 1 <= self.hop_length <= self.n_fft, "1 to n_fft samples"),
            ("n_mels", self.n_mels >= 1, "1 or more"),
            ("f_min", 0 <= self.f_min < highest, "0 or more, less than f_max"),
            ("f_max", 0 < highest <= self.sample_rate / 2, "more than 0, half the rate at most"),
            ("floor", 0 < self.floor < math.inf, "more than 0"),
            ("mean", math.isfinite(self.mean), "a finite number"),
            ("std", 0 < self.std < math.inf, "more than 0"),
            ("n_mfcc", self.n_mfcc is None or 1 <= self.n_mfcc <= self.n_mels, "1 to n_mels"),
        ):
            if not right:
                given = shown(getattr(self, name))
                raise ConfigError(f"features: {name} is {given}; it takes {takes}")

    @property
    def channels(self) -> int:
        """Numbers of a frame."""
        return self.n_mels if self.n_mfcc is None else self.n_mfcc

    @property
    def signature(self) -> str:
        """SHA-256 of all values: features of equal signature are the same numbers."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def to_mel(hertz: float | NDArray[np.float64], scale: MelScale) -> NDArray[np.float64]:
    """Hz on a mel scale."""
    f = np.asarray(hertz, np.float64)
    if scale == "htk":
        return np.asarray(2595.0 * np.log10(1.0 + f / 700.0))
    linear = 3.0 * f / 200.0
    with np.errstate(divide="ignore"):
        curved = 15.0 + 27.0 * np.log(f / 1000.0) / math.log(6.4)
    return np.where(f < 1000.0, linear, curved)


def to_hertz(mel: float | NDArray[np.float64], scale: MelScale) -> NDArray[np.float64]:
    """Mel in Hz."""
    m = np.asarray(mel, np.float64)
    if scale == "htk":
        return np.asarray(700.0 * (10.0 ** (m / 2595.0) - 1.0))
    return np.where(m < 15.0, 200.0 * m / 3.0, 1000.0 * 6.4 ** ((m - 15.0) / 27.0))


def mel_filters(spec: FeatureSpec) -> NDArray[np.float64]:
    """Weights (n_mels, n_fft // 2 + 1) of the powers of each band, triangular.

    Raises:
        ConfigError: Some band is so narrow that no frequency of the transform lies in it.
    """
    highest = spec.f_max if spec.f_max is not None else spec.sample_rate / 2
    low, high = to_mel(spec.f_min, spec.mel_scale), to_mel(highest, spec.mel_scale)
    corners = to_hertz(np.linspace(low, high, spec.n_mels + 2), spec.mel_scale)[:, None]
    bins = np.arange(spec.n_fft // 2 + 1) * (spec.sample_rate / spec.n_fft)
    rising = (bins - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - bins) / (corners[2:] - corners[1:-1])
    filters: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    if spec.norm == "slaney":
        filters *= 2.0 / (corners[2:] - corners[:-2])
    empty = np.flatnonzero(filters.max(axis=1) == 0)
    if len(empty):
        raise ConfigError(
            f"features: {len(empty)} of {spec.n_mels} mel bands hold no frequency of n_fft = "
            f"{spec.n_fft}; give a larger n_fft or fewer n_mels"
        )
    return filters


def fourier(spec: FeatureSpec) -> NDArray[np.float64]:
    """Kernels (2 (n_fft // 2 + 1), n_fft), real, then imaginary, under a periodic Hann window."""
    n = np.arange(spec.n_fft)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * n / spec.n_fft)
    angle = 2 * np.pi * np.outer(np.arange(spec.n_fft // 2 + 1), n) / spec.n_fft
    return window * np.concatenate([np.cos(angle), -np.sin(angle)])


def cosine_transform(spec: FeatureSpec) -> NDArray[np.float64]:
    """The orthonormal DCT-II of the mel bands, (n_mfcc, n_mels)."""
    n = spec.n_mels
    k = np.arange(spec.n_mfcc or n)[:, None]
    matrix = np.sqrt(2.0 / n) * np.cos(np.pi / n * (np.arange(n) + 0.5) * k)
    matrix[0] /= np.sqrt(2.0)
    return matrix


class Features(nn.Module):
    """Samples to features, frame by frame."""

    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__()
        self.spec = spec
        matrices = {"kernels": fourier(spec)[:, None], "filters": mel_filters(spec)}
        if spec.n_mfcc is not None:
            matrices["cosines"] = cosine_transform(spec)
        for name, matrix in matrices.items():
            tensor = torch.from_numpy(matrix).float()
            self.register_buffer(name, tensor, persistent=False)  # the spec says it all

    def forward(self, samples: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch channels t"]:
        """Features of the frames that `count` counts and of one more; around the clip is silence.

        The one more is for exported graphs: an axis that may be 1 is fixed by tracing.
        """
        spec = self.spec
        padded = F.pad(samples, (spec.n_fft - spec.hop_length, 2 * spec.hop_length - 1))
        return self.frames(padded)

    def step(
        self,
        chunk: Float[Tensor, "batch samples"],
        tail: Float[Tensor, "batch tail"],
        *,
        end: bool = False,
    ) -> tuple[Float[Tensor, "batch channels t"], Float[Tensor, "batch rest"]]:
        """Features of the frames that the chunk completes, and the samples that later ones see.

        Args:
            chunk: The next samples, any number of them.
            tail: What the step before gave; at the beginning ``n_fft - hop_length`` zeros.
            end: Complete the last frame with silence.
        """
        spec = self.spec
        known = torch.cat([tail, chunk], dim=1)
        rest = known.shape[1] - (spec.n_fft - spec.hop_length)
        if end:
            known = F.pad(known, (0, -rest % spec.hop_length))
            rest += -rest % spec.hop_length
        whole = rest // spec.hop_length
        if not whole:
            return known.new_zeros(len(known), spec.channels, 0), known
        return self.frames(known), known[:, whole * spec.hop_length :]

    def frames(self, padded: Float[Tensor, "batch samples"]) -> Float[Tensor, "batch channels t"]:
        """Features of the frames that lie in the samples, at every hop from the first one."""
        spec = self.spec
        kernels: Tensor = self.kernels  # type: ignore[assignment]
        filters: Tensor = self.filters  # type: ignore[assignment]
        wave = F.conv1d(padded[:, None], kernels, stride=spec.hop_length)
        real, imaginary = wave.chunk(2, dim=1)
        power = filters @ (real.square() + imaginary.square())
        values = power.clamp(min=spec.floor).log()
        if spec.log == "decibel":
            values = values * (10 / math.log(10))
        values = (values - spec.mean) / spec.std
        return values if spec.n_mfcc is None else self.cosines @ values  # type: ignore[operator, no-any-return]

    def count(self, samples: Tensor) -> Tensor:
        """Frames of so many samples: the last one may end in silence."""
        hop = self.spec.hop_length
        return torch.div(samples + hop - 1, hop, rounding_mode="floor")


class SpecAugment(nn.Module):
    """In training, one block of bands and one of frames of every item are set to 0, the mean.

    Args:
        bands: Largest width of the one; 0 masks none.
        frames: The same of the other.

    Source: Park et al. 2019, https://arxiv.org/abs/1904.08779, section 2, without time warping.
    """

    def __init__(self, bands: int, frames: int) -> None:
        super().__init__()
        self.widths = bands, frames

    def forward(self, x: Float[Tensor, "batch channels t"]) -> Float[Tensor, "batch channels t"]:
        """The features, in eval mode as they are."""
        if not self.training:
            return x
        for axis, most in zip((1, 2), self.widths, strict=True):
            if not most:
                continue
            size = x.shape[axis]
            width, place = torch.rand(2, len(x), 1, device=x.device)
            width = (width * (min(most, size) + 1)).floor()
            start = place * (size - width)
            index = torch.arange(size, device=x.device)
            hidden = (index >= start) & (index < start + width)
            x = x.masked_fill(hidden[:, :, None] if axis == 1 else hidden[:, None], 0)
        return x


def decibels(power: Tensor, *, floor: float = 1e-10, top_db: float | None = None) -> Tensor:
    """Powers (..., bands, t) in dB; at most `top_db` below the peak of each item."""
    values = 10 * power.clamp(min=floor).log10()
    if top_db is None:
        return values
    return values.maximum(values.amax(dim=(-2, -1), keepdim=True) - top_db)


def resampled(samples: Float[Tensor, "*batch samples"], old: int, new: int) -> Tensor:
    """The same sound at another rate, ceil(samples * new / old) long.

    Interpolation by a sinc under a Kaiser window: up to 0.9 of the lower Nyquist frequency within
    0.1 dB, images and aliases below -60 dB.

    Args:
        samples: Real numbers.
        old: Samples a second that they have.
        new: Samples a second of the result.

    Raises:
        ConfigError: A rate is no whole number above 0.

    Source: Smith, "Digital audio resampling", https://ccrma.stanford.edu/~jos/resample/.
    """
    for rate in (old, new):
        if type(rate) is not int or rate < 1:
            raise ConfigError(f"a sample rate is {shown(rate)}; it takes a whole number above 0")
    if old == new:
        return samples
    common = math.gcd(old, new)
    up, down = new // common, old // common
    kernels, width = _sinc(up, down)
    length = samples.shape[-1]
    padded = F.pad(samples.reshape(-1, 1, length), (width, width + down))
    phases = F.conv1d(padded, kernels.to(samples), stride=down)  # each kernel gives one phase
    whole = phases.transpose(1, 2).reshape(*samples.shape[:-1], -1)
    return whole[..., : -(-length * up // down)]


@lru_cache(maxsize=128)
def _sinc(up: int, down: int) -> tuple[Tensor, int]:
    """Kernels (up, 1, taps) of the output's phases and how far they reach back."""
    cutoff = ROLLOFF * min(1.0, up / down)  # in units of the old Nyquist frequency
    width = math.ceil(WIDTH / cutoff)
    place = np.arange(-width, width + down)[None] - (np.arange(up) * down / up)[:, None]
    inside = np.clip(place * cutoff / WIDTH, -1, 1)
    window = np.i0(BETA * np.sqrt(1 - inside**2)) / np.i0(BETA)
    window[np.abs(inside) >= 1] = 0
    kernels = cutoff * np.sinc(place * cutoff) * window
    return torch.from_numpy(kernels)[:, None], width


def check_samples(samples: Tensor) -> None:
    """Refuse what is no batch of samples.

    Raises:
        DataError: It has not two axes or no sample.
    """
    if samples.ndim != 2 or not samples.shape[1]:
        raise DataError(
            f"samples have the shape {tuple(samples.shape)}; give (batch, samples), one or more"
        )
