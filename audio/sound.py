"""Sound from files and arrays of every kind: one channel, real numbers in [-1, 1], one rate."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from audio.features import resampled
from zoo.errors import ConfigError, DataError, require, shown

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".aiff", ".aif", ".au")  # of files in folders
MOST_CHANNELS = 32  # an axis of more is one of samples
LOUDEST = 4.0  # floats beyond are on another scale; codecs pass 1 by a little
CLIPPED_SHARE = 0.1  # of the samples at full scale, from which a warning is worth it


class Sound(NamedTuple):
    """One channel of sound."""

    samples: Float32[Tensor, " n"]  # in [-1, 1]
    sample_rate: int  # samples a second


def read_sound(raw: object, *, sample_rate: int | None = None) -> Sound:
    """Sound at its own rate; several channels become their mean.

    Args:
        raw: Path, bytes or binary file of a WAV, FLAC, OGG, MP3, AIFF or AU file, a `Sound`, or an
            array: numpy (samples,) or (samples, channels), tensor (samples,) or (channels,
            samples). Integers are of full scale, floats in [-1, 1].
        sample_rate: Of an array, samples a second; a file says it itself.

    Raises:
        DataError: It is no such file or array, is empty, holds values that are not finite or are on
            another scale.
        ConfigError: The rate is missing or makes no sense.
    """
    if isinstance(raw, Sound):
        raw, sample_rate = raw
    if isinstance(raw, str | Path | bytes | bytearray | memoryview | io.IOBase):
        if sample_rate is not None:
            raise ConfigError(
                f"sample_rate is {sample_rate}, but a file says its own; leave it out"
            )
        values, sample_rate = _from_file(raw)
    else:
        values = _from_array(raw)
        if type(sample_rate) is not int or sample_rate < 1:
            given = "missing" if sample_rate is None else shown(sample_rate)
            raise ConfigError(
                f"the sample_rate of an array is {given}; it takes a whole number above 0"
            )
    if not values.size:
        raise DataError(f"{_name(raw)} holds no samples")
    if not np.isfinite(values).all():
        count = int((~np.isfinite(values)).sum())
        raise DataError(f"{_name(raw)} holds {count} samples that are not finite")
    if (peak := float(np.abs(values).max())) > LOUDEST:
        raise DataError(
            f"{_name(raw)} reaches {peak:g}; floats take [-1, 1]: divide those that were 16-bit "
            "integers by 32768"
        )
    mono = values.mean(axis=1) if values.ndim == 2 else values
    if np.mean(np.abs(mono) >= 0.999) > CLIPPED_SHARE:
        warnings.warn(f"{_name(raw)} is clipped: record it at a lower level", stacklevel=2)
    return Sound(torch.from_numpy(np.ascontiguousarray(mono, np.float32)), sample_rate)


def at_rate(sound: Sound, sample_rate: int) -> Float32[Tensor, " n"]:
    """Its samples at another rate."""
    return resampled(sound.samples, sound.sample_rate, sample_rate)


def _from_file(raw: Any) -> tuple[np.ndarray, int]:
    soundfile = require("soundfile", "audio")
    source = io.BytesIO(raw) if isinstance(raw, bytes | bytearray | memoryview) else raw
    if isinstance(raw, str | Path):
        path = Path(raw)
        if path.is_dir():
            raise DataError(f"{shown(str(raw))} is a folder; give a file of sound")
        if not path.exists():
            raise DataError(f"there is no file {shown(str(raw))}; give the path of a file of sound")
        source = str(path)
    try:
        values, rate = soundfile.read(source, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        said = str(getattr(error, "error_string", error)).rstrip(".")
        raise DataError(
            f"{_name(raw)} cannot be read as sound ({said}); give WAV, FLAC, OGG, MP3, AIFF or AU"
        ) from error
    return values, int(rate)


def _from_array(raw: object) -> np.ndarray:
    """Floats (samples,) or (samples, channels)."""
    if isinstance(raw, Tensor):
        values = raw.detach().cpu().numpy()
        values = values.T if values.ndim == 2 else values
    elif isinstance(raw, np.ndarray):
        values = raw
    else:
        raise DataError(
            f"{shown(raw)} is no sound; give a path, bytes, or an array and its sample_rate"
        )
    if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] > MOST_CHANNELS):
        wanted = "(channels, samples)" if isinstance(raw, Tensor) else "(samples, channels)"
        raise DataError(
            f"an array of the shape {tuple(raw.shape)} is no sound; give (samples,) or {wanted}"
        )
    if values.dtype.kind in "iu" and values.dtype.itemsize <= 4:
        half = 2.0 ** (8 * values.dtype.itemsize - 1)
        offset = half if values.dtype.kind == "u" else 0.0
        return ((values.astype(np.float64) - offset) / half).astype(np.float32)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    raise DataError(f"an array of {values.dtype} is no sound; give integers or floats")


def _name(raw: object) -> str:
    if isinstance(raw, str | Path):
        return shown(str(raw))
    return "the sound"
