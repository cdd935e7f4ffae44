"""Sound of every kind becomes one channel in [-1, 1], or one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from audio.sound import Sound, at_rate, read_sound
from zoo.errors import ConfigError, DataError

TONE = (0.5 * np.sin(np.arange(400) / 7)).astype(np.float32)


@pytest.mark.parametrize(
    ("suffix", "subtype", "error"),
    [
        ("wav", "PCM_U8", 1 / 64),
        ("wav", "PCM_16", 1e-4),
        ("wav", "PCM_24", 1e-6),
        ("wav", "PCM_32", 1e-7),
        ("wav", "FLOAT", 0),
        ("wav", "DOUBLE", 0),
        ("wav", "ULAW", 0.02),
        ("wav", "ALAW", 0.02),
        ("flac", "PCM_16", 1e-4),
        ("aiff", "PCM_16", 1e-4),
    ],
)
def test_files_of_every_kind(suffix: str, subtype: str, error: float, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    soundfile.write(path, TONE, 22_050, subtype=subtype)
    for raw in (path, str(path), path.read_bytes(), path.open("rb")):
        found = read_sound(raw)
        assert found.sample_rate == 22_050
        assert found.samples.shape == (400,)
        assert np.abs(found.samples.numpy() - TONE).max() <= error


def test_several_channels_become_their_mean(tmp_path: Path) -> None:
    stereo = np.stack([TONE, -TONE / 2], axis=1)
    soundfile.write(tmp_path / "x.wav", stereo, 8000, subtype="FLOAT")
    mean = torch.from_numpy(TONE / 4)
    for found in (
        read_sound(tmp_path / "x.wav"),
        read_sound(stereo, sample_rate=8000),
        read_sound(torch.from_numpy(stereo.T.copy()), sample_rate=8000),
    ):
        torch.testing.assert_close(found.samples, mean, atol=1e-7, rtol=0)


def test_arrays_of_integers_are_of_full_scale() -> None:
    for values, expected in (
        (np.array([-32768, *11 * [0], 16384], np.int16), [-1, *11 * [0], 0.5]),
        (np.array([2**30, -(2**29)], np.int32), [0.5, -0.25]),
        (np.array([64, 128, 192], np.uint8), [-0.5, 0, 0.5]),
        (np.array([-0.5, 0.25]), [-0.5, 0.25]),
    ):
        assert read_sound(values, sample_rate=8000).samples.tolist() == expected


def test_a_sound_is_taken_as_it_is_and_at_another_rate() -> None:
    sound = Sound(torch.from_numpy(TONE), 8000)
    assert torch.equal(read_sound(sound).samples, sound.samples)
    assert len(at_rate(sound, 16_000)) == 800


def test_a_clipped_recording_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="is clipped"):
        read_sound(np.sign(TONE), sample_rate=8000)


@pytest.mark.parametrize(
    ("raw", "rate", "kind", "words"),
    [
        (TONE, None, ConfigError, "sample_rate of an array is missing"),
        (TONE, 0, ConfigError, "sample_rate of an array is 0"),
        (np.zeros(0, np.float32), 8000, DataError, "holds no samples"),
        (np.array([0, np.nan, np.inf]), 8000, DataError, "2 samples that are not finite"),
        (32768 * TONE, 8000, DataError, "divide those that were 16-bit"),
        (np.zeros((2, 400), np.float32), 8000, DataError, r"give \(samples,\) or \(samples, ch"),
        (np.zeros((2, 2, 2)), 8000, DataError, "is no sound"),
        (np.zeros(4, bool), 8000, DataError, "an array of bool is no sound"),
        ("no/such.wav", None, DataError, "there is no file"),
        (".", None, DataError, "is a folder"),
        (b"RIFF but no more", None, DataError, "cannot be read as sound"),
        ({"array": TONE}, 8000, DataError, "is no sound; give a path"),
        (b"x", 8000, ConfigError, "a file says its own"),
    ],
)
def test_what_is_no_sound_is_one_line(raw: object, rate: int, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        read_sound(raw, sample_rate=rate)
    assert "\n" not in str(caught.value)
