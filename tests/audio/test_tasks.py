"""From a file of sound to a word, and from recordings to a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import zoo
from audio.augment import SoundRecipe, augmented, coloured_noise
from audio.fsdd import FSDD
from zoo import registry
from zoo.errors import CardError, ConfigError, DataError


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recordings 4 and 5 of two digits by one speaker, tones in place of words."""
    place = tmp_path / "fsdd" / "recordings"
    place.mkdir(parents=True)
    for digit in (0, 7):
        for number in (4, 5):
            tone = 0.3 * np.sin(np.arange(1500 + 100 * number) * (0.2 + 0.1 * digit))
            soundfile.write(place / f"{digit}_ann_{number}.wav", tone, 8000)
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    return place


def test_the_first_five_recordings_are_the_test(digits: Path) -> None:
    for split, number in (("test", 4), ("train", 5)):
        found = [(Path(path).name, digit) for path, digit in FSDD.examples(split)]
        assert found == [(f"{digit}_ann_{number}.wav", digit) for digit in (0, 7)]
    before = FSDD.sha256("test")
    (digits / "0_ann_5.wav").unlink()
    assert FSDD.sha256("test") == before
    (digits / "0_ann_4.wav").unlink()
    assert FSDD.sha256("test") != before
    (digits / "readme.wav").touch()
    with pytest.raises(DataError, match=r"readme\.wav' is not called DIGIT_SPEAKER_NUMBER"):
        list(FSDD.examples("test"))
    with pytest.raises(DataError, match="no split 'tset'"):
        list(FSDD.examples("tset"))


def test_a_pipeline_takes_files_and_arrays_of_any_rate(digits: Path, tmp_path: Path) -> None:
    model = zoo.load("bcresnet1.digits", pretrained=False)
    zoo.save(model, tmp_path / "w", labels=zoo.card("bcresnet1").to_train("digits").labels)
    pipe = zoo.pipeline(tmp_path / "w")
    path = digits / "7_ann_5.wav"
    (answer,) = pipe([path], top_k=10)
    assert {a["label"] for a in answer} == {
        *("zero", "one", "two", "three", "four"),
        *("five", "six", "seven", "eight", "nine"),
    }
    values, rate = soundfile.read(path, dtype="float32")
    assert pipe(values, sample_rate=rate, top_k=10) == answer
    assert pipe(path.read_bytes(), top_k=10) == answer
    double = torch.nn.functional.interpolate(torch.from_numpy(values)[None, None], scale_factor=2)
    assert len(pipe(double[0, 0], sample_rate=2 * rate)) == 5
    with pytest.raises(ConfigError, match="sample_rate of an array is missing"):
        pipe(values)
    with pytest.raises(DataError, match="there is no file"):
        pipe("no/such.wav")


def test_features_of_another_rate_than_the_preparation_are_refused() -> None:
    model = zoo.load("bcresnet1.digits", features={"sample_rate": 16_000})
    with pytest.raises(CardError, match="sample_rate is 8000, and the network"):
        registry.make_task(model)


def test_augmentation_is_one_of_its_generator_alone() -> None:
    clip = torch.randn(4000, generator=torch.Generator().manual_seed(0)) / 8
    recipe = SoundRecipe(speed=0.2, shift=0.1, gain_db=6.0, noise_share=0.5)

    def made(seed: int) -> torch.Tensor:
        return augmented(clip, 8000, recipe, torch.Generator().manual_seed(seed))

    assert torch.equal(made(3), made(3))
    lengths = {len(made(seed)) for seed in range(50)}
    assert len(lengths) > 20
    assert min(lengths) >= 4000 / 1.2 - 800
    assert max(lengths) <= 4000 / 0.8 + 800
    assert augmented(clip, 8000, None, None) is clip
    short = augmented(clip[:100], 8000, SoundRecipe(shift=1.0), torch.Generator().manual_seed(1))
    assert len(short) >= 50


@pytest.mark.parametrize("ratio", [0.0, 20.0])
def test_noise_is_added_at_its_ratio(ratio: float) -> None:
    clip = torch.randn(8000, generator=torch.Generator().manual_seed(0)) / 16
    recipe = SoundRecipe(noise_share=1.0, noise_db=(ratio, ratio))
    for seed in range(5):
        found = augmented(clip, 8000, recipe, torch.Generator().manual_seed(seed)) - clip
        measured = 10 * torch.log10(clip.square().mean() / found.square().mean())
        assert float(measured) == pytest.approx(ratio, abs=0.1)


def test_noise_has_its_colour() -> None:
    noise = coloured_noise(2**15, 2.0, torch.Generator().manual_seed(0))
    power = torch.fft.rfft(noise).abs().square()
    low, high = power[100:200].mean(), power[1000:2000].mean()
    assert float(torch.log10(low / high)) == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speed", 0.6),
        ("shift", -0.1),
        ("gain_db", -1.0),
        ("noise_db", (40.0, 5.0)),
        ("noise_share", 1.1),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"SoundRecipe: {field} is"):
        SoundRecipe(**{field: value})


def test_a_folder_of_words_fine_tunes(tmp_path: Path) -> None:
    for word, pitch in (("high", 0.9), ("low", 0.1)):
        (tmp_path / "data" / word).mkdir(parents=True)
        for number in range(12):
            tone = 0.3 * np.sin(np.arange(2000 + 50 * number) * (pitch + number / 200))
            soundfile.write(tmp_path / "data" / word / f"{number}.wav", tone, 16_000)
    start = zoo.save(zoo.load("bcresnet1.digits"), tmp_path / "start")
    done = zoo.finetune(
        str(start), tmp_path / "data", out=tmp_path / "run", epochs=20, batch_size=6, quiet=True
    )
    pipe = zoo.pipeline(done.folder / "weights")
    assert pipe.task.labels == ("high", "low")
    tone = np.sin(np.arange(2300) * 0.1).astype(np.float32) / 3
    assert pipe(tone, sample_rate=16_000)[0]["label"] == "low"
    task = registry.make_task(pipe.model)
    assert task.sample_rate == 8000
