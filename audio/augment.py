"""Augmentation of sound in training; each clip draws its changes from a generator of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional as F

from audio.features import resampled
from zoo.errors import ConfigError, shown
from zoo.training.recipe import Recipe

STEPS = 100  # of a change of speed: kernels of so many rates are kept


@dataclass(frozen=True, kw_only=True)
class SoundRecipe(Recipe):
    """How a model of sound is trained.

    Attributes:
        speed: Largest relative change of speed, and pitch with it, in [0, 0.5].
        shift: Seconds of silence that are put before a clip, or cut off it, at most.
        gain_db: Largest change of loudness, up or down.
        noise_db: Lowest and highest ratio of the clip's power to that of added noise, the spectrum
            of which falls with the frequency by a power of 0 to 2.
        noise_share: Share of the clips that get some, in [0, 1].
    """

    speed: float = 0.0
    shift: float = 0.0
    gain_db: float = 0.0
    noise_db: tuple[float, float] = (5.0, 40.0)
    noise_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, right, takes in (
            ("speed", 0 <= self.speed <= 0.5, "0 to 0.5"),
            ("shift", 0 <= self.shift < math.inf, "0 or more seconds"),
            ("gain_db", 0 <= self.gain_db < math.inf, "0 or more decibel"),
            ("noise_db", self.noise_db[0] <= self.noise_db[1], "a lower and a higher ratio"),
            ("noise_share", 0 <= self.noise_share <= 1, "0 to 1"),
        ):
            if not right:
                given = shown(getattr(self, name))
                raise ConfigError(f"{type(self).__name__}: {name} is {given}; it takes {takes}")


def augmented(
    samples: Float32[Tensor, " n"],
    sample_rate: int,
    recipe: Recipe | None,
    generator: torch.Generator | None,
) -> Float32[Tensor, " m"]:
    """A clip as it might have sounded too.

    Args:
        samples: In [-1, 1].
        sample_rate: Samples a second.
        recipe: A `SoundRecipe`; any other changes nothing.
        generator: From which the changes are drawn; torch's global one if None.
    """
    if not isinstance(recipe, SoundRecipe):
        return samples
    uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
    speed, shift, gain, noisy, ratio, colour = uniform(6).tolist()
    if recipe.speed:
        percent = round(STEPS * (1 + recipe.speed * (2 * speed - 1)))
        samples = resampled(samples, percent, STEPS)
    if recipe.shift:
        offset = round(recipe.shift * sample_rate * (2 * shift - 1))
        least = -(len(samples) // 2)  # something of the clip always stays
        samples = F.pad(samples, (max(offset, least), 0))
    if noisy < recipe.noise_share:
        low, high = recipe.noise_db
        noise = coloured_noise(len(samples), 2 * colour, generator)
        power = samples.square().mean() * 10 ** (-(low + (high - low) * ratio) / 10)
        samples = samples + power.sqrt() * noise
    if recipe.gain_db:
        samples = samples * 10 ** (recipe.gain_db * (2 * gain - 1) / 20)
    return samples.clamp(-1, 1)


def coloured_noise(n: int, power: float, generator: torch.Generator | None) -> Tensor:
    """Gaussian noise of variance 1 whose spectrum falls with the frequency to that power."""
    spectrum = torch.fft.rfft(torch.randn(n, generator=generator))
    spectrum *= torch.arange(len(spectrum)).clamp(min=1) ** (-power / 2)
    noise = torch.fft.irfft(spectrum, n=n)
    return noise / noise.square().mean().sqrt().clamp(min=1e-12)
