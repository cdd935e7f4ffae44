"""BC-ResNet: the sizes of the paper, and clips that never see their batch."""

from __future__ import annotations

import random

import pytest
import torch

import zoo
from audio.bcresnet import BCResNet, BCResNetConfig, Listening
from zoo.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("width", "parameters"),
    [(1, 9232), (1.5, 17_154), (2, 27_284), (3, 54_168), (6, 187_812), (8, 321_068)],
)
def test_the_family_has_the_parameters_of_the_paper(width: float, parameters: int) -> None:
    model = BCResNet(BCResNetConfig(width=float(width)))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_a_clip_alone_is_the_clip_in_any_batch_whatever_pads_it() -> None:
    model = zoo.load("bcresnet1.digits", pretrained=False)
    generator = torch.Generator().manual_seed(0)
    for lengths in ([1, 4000, 81], [160, 161, 7000], [80, 79, 2]):
        samples = torch.full((3, max(lengths)), torch.nan)
        mask = torch.zeros(3, max(lengths), dtype=torch.int64)
        clips = [torch.randn(n, generator=generator) / 4 for n in lengths]
        for row, clip in enumerate(clips):
            samples[row, : len(clip)], mask[row, : len(clip)] = clip, 1
        with torch.no_grad():
            together = model(samples, mask)
            alone = torch.cat([model(clip[None]) for clip in clips])
        assert (together - alone).abs().max() <= 2e-5 * alone.abs().max()


def test_what_it_does_not_take_is_named() -> None:
    model = zoo.load("bcresnet1", pretrained=False)
    with pytest.raises(DataError, match=r"the shape \(1, 0\); give \(batch, samples\)"):
        model(torch.zeros(1, 0))
    for field, value in (
        ("width", 0.0),
        ("dropout", 1.0),
        ("num_classes", 0),
        ("masked_bands", -1),
    ):
        with pytest.raises(ConfigError, match=field):
            BCResNetConfig(**{field: value})
    with pytest.raises(ConfigError, match=r"features have 48 bands; .* a multiple of 40"):
        zoo.load("bcresnet1", pretrained=False, features={"n_mels": 48})
    with pytest.raises(ConfigError, match="hop_lenght"):
        zoo.load("bcresnet1", pretrained=False, features={"hop_lenght": 80})


@pytest.fixture(scope="module")
def listener() -> BCResNet:
    torch.manual_seed(0)
    model: BCResNet = zoo.load("bcresnet1.digits", pretrained=False)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model


@torch.no_grad()
def heard(model: BCResNet, clip: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The last answer for a clip that comes in chunks."""
    state = None
    for chunk in clip.split(sizes, dim=1):
        logits, state = model.step(chunk, state)
    logits, _ = model.step(clip[:, :0], state, end=True)
    return logits


def test_a_stream_in_any_chunks_is_the_clip(listener: BCResNet) -> None:
    chance = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for trial in range(100):
        length = chance.choice([1, 79, 80, 81, 400, 3000, chance.randrange(1, 5000)])
        clip = torch.randn(2, length, generator=generator) / 4
        sizes: list[int] = []
        while (left := length - sum(sizes)) > 0:
            most = 1 if length < 500 and trial % 2 else chance.choice([3, 100, 1000, 5000])
            sizes.append(min(left, chance.randrange(most + 1) or 1))
        with torch.no_grad():
            whole = listener(clip)
        assert (heard(listener, clip, sizes) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_streams_in_turn_are_streams_apart(listener: BCResNet) -> None:
    clips = torch.randn(32, 1, 2000, generator=torch.Generator().manual_seed(1)) / 4
    states: list[Listening | None] = [None] * 32
    answers: list[torch.Tensor] = [torch.zeros(0)] * 32
    for chunk in range(0, 2000, 250):
        for number, clip in enumerate(clips):
            with torch.no_grad():
                answers[number], states[number] = listener.step(
                    clip[:, chunk : chunk + 250], states[number]
                )
    for clip, answer in zip(clips, answers, strict=True):
        with torch.no_grad():
            assert (listener(clip) - answer).abs().max() <= 1e-5 * answer.abs().max()


def test_an_answer_is_late_by_less_than_a_hop(listener: BCResNet) -> None:
    """What comes within a hop changes nothing before its end, and something after it."""
    clip = torch.randn(1, 800, generator=torch.Generator().manual_seed(2)) / 4
    with torch.no_grad():
        before, state = listener.step(clip)
        within, later = listener.step(torch.ones(1, 79), state)
        after, _ = listener.step(torch.ones(1, 1), later)
    assert torch.equal(before, within)
    assert not torch.equal(before, after)
