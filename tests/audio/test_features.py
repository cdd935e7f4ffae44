"""Mel bands, features as convolution, resampling: against definitions in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.fft import dct
from torchaudio import functional

from audio.features import (
    Features,
    FeatureSpec,
    SpecAugment,
    check_samples,
    decibels,
    mel_filters,
    resampled,
    to_hertz,
    to_mel,
)
from audio.sound import read_sound
from zoo.errors import ConfigError, DataError

SPECS = {
    "default": FeatureSpec(),
    "slaney": FeatureSpec(mel_scale="slaney", norm="slaney", n_fft=400, log="decibel"),
    "mfcc": FeatureSpec(sample_rate=8000, n_fft=256, hop_length=80, n_mfcc=13, mean=-5, std=4),
}


def reference(samples: np.ndarray, spec: FeatureSpec) -> np.ndarray:
    """Frame by frame, by a Fourier transform in float64."""
    count = -(-len(samples) // spec.hop_length)
    padded = np.concatenate(
        [np.zeros(spec.n_fft - spec.hop_length), samples, np.zeros(spec.hop_length)]
    )
    window = np.hanning(spec.n_fft + 1)[:-1]
    frames = [
        padded[t * spec.hop_length : t * spec.hop_length + spec.n_fft] * window
        for t in range(count)
    ]
    power = np.abs(np.fft.rfft(frames)) ** 2 @ mel_filters(spec).T
    values = np.log(np.maximum(power, spec.floor))
    if spec.log == "decibel":
        values *= 10 / math.log(10)
    values = (values - spec.mean) / spec.std
    if spec.n_mfcc is not None:
        values = dct(values, norm="ortho")[:, : spec.n_mfcc]
    return values.T


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("length", [1, 79, 160, 161, 5000])
def test_features_are_those_of_a_fourier_transform_in_float64(kind: str, length: int) -> None:
    spec = SPECS[kind]
    samples = torch.randn(2, length, generator=torch.Generator().manual_seed(length)) / 4
    features = Features(spec)
    found = features(samples)
    count = int(features.count(torch.tensor(length)))
    assert found.shape == (2, spec.channels, count + 1)
    for row, clip in zip(found, samples, strict=True):
        expected = reference(clip.double().numpy(), spec)
        assert np.abs(row[:, :count].numpy() - expected).max() < 1e-4


def test_a_frame_sees_nothing_after_its_hop() -> None:
    spec = FeatureSpec()
    samples = torch.randn(1, 1600)
    other = samples.clone()
    other[:, 800:] = 7.0
    first, second = Features(spec)(samples), Features(spec)(other)
    assert torch.equal(first[:, :, :5], second[:, :, :5])
    assert not torch.equal(first[:, :, 5], second[:, :, 5])


def test_the_two_mel_scales() -> None:
    """Case AUD-03."""
    assert float(to_mel(1000, "htk")) == 999.9855371396244
    assert float(to_mel(1000, "slaney")) == 15.0
    assert float(to_mel(6400, "slaney")) == 42.0
    hertz = np.linspace(0, 8000, 77)
    for scale in ("htk", "slaney"):
        assert np.allclose(to_hertz(to_mel(hertz, scale), scale), hertz, atol=1e-9)


def test_nothing_above_f_max_is_heard() -> None:
    """Case AUD-05."""
    filters = mel_filters(FeatureSpec(n_mels=20, f_min=0.0, f_max=4000.0))
    assert filters[:, 128:].max() == 0
    assert filters[:, :128].max() > 0


@pytest.mark.parametrize("norm", ["none", "slaney"])
@pytest.mark.parametrize("scale", ["htk", "slaney"])
def test_filters_are_torchaudios(scale: str, norm: str) -> None:
    spec = FeatureSpec(mel_scale=scale, norm=norm, n_mels=32, f_min=50.0, f_max=7000.0)
    theirs = functional.melscale_fbanks(
        257, 50.0, 7000.0, 32, 16_000, norm=None if norm == "none" else norm, mel_scale=scale
    )
    assert np.abs(mel_filters(spec) - theirs.T.double().numpy()).max() < 1e-5


def test_decibels_of_a_clip_do_not_depend_on_its_batch() -> None:
    """Case AUD-01."""
    one, other = torch.tensor([[1e6], [1.0]]), torch.tensor([[1.0], [1e-9]])
    together = decibels(torch.stack([one, other]), top_db=80)
    assert together[0].flatten().tolist() == pytest.approx([60, 0])
    assert together[1].flatten().tolist() == pytest.approx([0, -80])
    assert torch.equal(decibels(other, top_db=80), together[1])


def test_lengths_and_rates_of_resampling() -> None:
    """Case AUD-06."""
    noise = torch.randn(100_000)
    there = resampled(noise, 44_100, 48_000)
    assert len(there) == 108_844
    assert len(resampled(there, 48_000, 44_100)) == 100_001
    time = torch.arange(44_100, dtype=torch.float64) / 44_100
    sine = resampled(torch.sin(2 * math.pi * 1000 * time), 44_100, 16_000)
    expected = torch.sin(2 * math.pi * 1000 * torch.arange(16_000, dtype=torch.float64) / 16_000)
    assert len(sine) == 16_000
    assert (sine - expected)[200:-200].abs().max() < 1e-3
    with pytest.raises(ConfigError, match="a sample rate is 0; it takes a whole number above 0"):
        resampled(noise, 16_000, 0)


@pytest.mark.untyped
@pytest.mark.parametrize("rate", [22_050.5, -1, True, "16000"])
def test_a_rate_is_a_whole_number(rate: object) -> None:
    """Case AUD-06."""
    with pytest.raises(ConfigError, match="a whole number above 0"):
        resampled(torch.zeros(9), rate, 16_000)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a whole number above 0"):
        read_sound(torch.zeros(9), sample_rate=rate)  # type: ignore[arg-type]


@pytest.mark.parametrize(("old", "new"), [(44_100, 16_000), (48_000, 16_000), (22_050, 8000)])
def test_tones_pass_and_aliases_do_not(old: int, new: int) -> None:
    time = torch.arange(old, dtype=torch.float64) / old

    def level(hertz: float) -> float:
        found = resampled(torch.sin(2 * math.pi * hertz * time), old, new)[400:-400]
        return 10 * math.log10(2 * float(found.square().mean()) + 1e-20)

    for share in (0.05, 0.5, 0.9):
        assert abs(level(share * new / 2)) < 0.1, share
    for hertz in (1.03 * new / 2, 1.2 * new / 2):
        assert level(hertz) < -60, hertz


def test_resampling_takes_any_axes_and_one_rate_is_no_change() -> None:
    samples = torch.randn(2, 3, 501)
    found = resampled(samples, 8000, 16_000)
    assert found.shape == (2, 3, 1002)
    assert torch.equal(found[1, 2], resampled(samples[1, 2], 8000, 16_000))
    assert resampled(samples, 8000, 8000) is samples


def test_masked_blocks_are_there_in_training_alone() -> None:
    masking = SpecAugment(8, 10)
    features = torch.ones(200, 40, 50)
    assert masking.eval()(features) is features
    torch.manual_seed(0)
    masked = masking.train()(features) == 0
    bands, frames = masked.all(dim=2).sum(dim=1), masked.all(dim=1).sum(dim=1)
    assert (int(bands.min()), int(bands.max())) == (0, 8)
    assert (int(frames.min()), int(frames.max())) == (0, 10)
    assert len(set(bands.tolist())) == 9


def test_a_signature_is_one_of_all_values() -> None:
    spec = FeatureSpec()
    assert spec.signature == FeatureSpec().signature
    assert spec.signature != replace(spec, floor=1e-7).signature


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_rate", 0),
        ("hop_length", 513),
        ("n_mels", 0),
        ("f_min", 9000.0),
        ("f_max", 8001.0),
        ("floor", 0.0),
        ("std", 0.0),
        ("n_mfcc", 41),
    ],
)
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        FeatureSpec(**{field: value})


def test_a_band_without_frequencies_is_refused() -> None:
    with pytest.raises(ConfigError, match="of 128 mel bands hold no frequency of n_fft = 256"):
        Features(FeatureSpec(n_mels=128, n_fft=256))
    with pytest.raises(DataError, match=r"the shape \(5,\)"):
        check_samples(torch.zeros(5))
