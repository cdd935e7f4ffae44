from __future__ import annotations

import math

import pytest
import torch

from zoo.errors import ConfigError
from zoo.training.mixing import mix


def mixed(n, seed=0, classes=4, target=None, **options):
    """Images whose value is their number, so that a mixture shows its parts."""
    images = torch.arange(n, dtype=torch.float32)[:, None, None, None].expand(n, 3, 12, 10)
    target = torch.arange(n) % classes if target is None else target
    generator = torch.Generator().manual_seed(seed)
    return images, *mix(images.clone(), target, classes, generator=generator, **options)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 128])
@pytest.mark.parametrize("kind", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_any_number_of_images_is_mixed_and_shares_sum_to_one(n, kind):
    for seed in range(10):
        images, found, target = mixed(n, seed, **kind)
        assert found.shape == images.shape
        assert target.shape == (n, 4)
        assert target.dtype == torch.float32
        assert target.sum(1) == pytest.approx(1, abs=1e-6)
        assert target.min() >= 0
        # The order of the partners is a permutation, so no image gains weight in the batch.
        assert found.sum() == pytest.approx(images.sum().item(), rel=1e-4)


def test_a_lone_image_is_left_as_it_is():
    for kind in ({"mixup": 1.0}, {"cutmix": 1.0}):
        images, found, target = mixed(1, **kind)
        assert torch.equal(found, images)
        assert target.tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_targets_have_the_shares_of_the_images(kind):
    shares = []
    for seed in range(200):
        _, found, target = mixed(2, seed, classes=2, **{kind: 1.0})
        part = found[0].mean().item()  # of image 1 in image 0
        assert target[0].tolist() == pytest.approx([1 - part, part], abs=1e-5)
        assert target[1].tolist() == pytest.approx([part, 1 - part], abs=1e-5)
        if kind == "cutmix":
            pasted = found[0, 0] == 1
            assert set(found.unique().tolist()) <= {0.0, 1.0}
            assert pasted.sum() == pasted.any(0).sum() * pasted.any(1).sum()
        shares.append(part)
    assert 0 < min(s for s in shares if s) < 0.1
    assert max(shares) > 0.9 if kind == "mixup" else max(shares) > 0.6


def test_both_are_drawn_evenly_and_from_the_generator():
    cut = []
    for seed in range(200):
        _, found, target = mixed(3, seed, mixup=1.0, cutmix=1.0)
        _, again, same = mixed(3, seed, mixup=1.0, cutmix=1.0)
        assert torch.equal(found, again)
        assert torch.equal(target, same)
        cut.append(all(value.is_integer() for value in found.unique().tolist()))
    assert 90 < sum(cut) < 160  # a permutation that moves nothing looks like a cut


def test_targets_may_be_shares_already():
    soft = torch.tensor([[0.5, 0.5], [0.1, 0.9], [1.0, 0.0]])
    _, _, target = mixed(3, 4, classes=2, target=soft, mixup=1.0)
    assert target.sum(1) == pytest.approx(1)
    assert target.sum(0).tolist() == pytest.approx([1.6, 1.4])


def test_off_means_untouched():
    images, found, target = mixed(3)
    assert torch.equal(found, images)
    assert target.tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrong", [{"mixup": -0.1}, {"cutmix": math.nan}, {"mixup": math.inf}])
def test_other_parameters_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} is"):
        mixed(2, **wrong)
