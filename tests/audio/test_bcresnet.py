"""BC-ResNet: the sizes of the paper, and clips that never see their batch."""

from __future__ import annotations

import pytest
import torch

import zoo
from audio.bcresnet import BCResNet, BCResNetConfig
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
