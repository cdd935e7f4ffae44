from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vision.losses import (
    cross_entropy,
    deeply_supervised,
    dice_cross_entropy,
    dice_loss,
    focal_loss,
    generalised_dice_loss,
    tversky_loss,
)
from zoo.errors import ConfigError, DataError

# Probabilities of class 1 are 1/2 and 3/4; the first voxel is of class 1, the second is not.
LOGITS = torch.tensor([0.0, 0.0, 0.0, math.log(3)]).reshape(1, 2, 1, 1, 2)
TARGET = torch.tensor([1, 0]).reshape(1, 1, 1, 2)
REGIONS = [dice_loss, tversky_loss, generalised_dice_loss]
LOSSES = [*REGIONS, cross_entropy, focal_loss, dice_cross_entropy]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        (cross_entropy, {}, (math.log(2) + math.log(4)) / 2),
        (cross_entropy, {"weight": [1.0, 3.0]}, (3 * math.log(2) + math.log(4)) / 4),
        (focal_loss, {}, (math.log(2) / 4 + 9 / 16 * math.log(4)) / 2),
        (focal_loss, {"gamma": 0.0}, (math.log(2) + math.log(4)) / 2),
        # overlap 1/2, probability 5/4, true 1
        (dice_loss, {}, 1 - (1 + 1) / (5 / 4 + 1 + 1)),
        (dice_loss, {"smooth": 0.5}, 1 - 1.5 / 2.75),
        # background: overlap 1/4, probability 3/4, true 1
        (dice_loss, {"foreground": False}, 1 - (2 / 3.25 + 1.5 / 2.75) / 2),
        (tversky_loss, {"alpha": 0.3}, 1 - 1.5 / (0.5 + 0.3 * 0.75 + 0.7 * 0.5 + 1)),
        (tversky_loss, {"alpha": 1.0}, 1 - 1.5 / (0.5 + 0.75 + 1)),
        (generalised_dice_loss, {}, 1 - 2 / 3.25),
        (generalised_dice_loss, {"foreground": False}, 1 - (2 * 0.75 + 1) / (2 + 2 + 1)),
        (dice_cross_entropy, {}, 1 - 2 / 3.25 + (math.log(2) + math.log(4)) / 2),
    ],
)
def test_values_by_hand(loss, options: dict, expected: float) -> None:
    assert loss(LOGITS, TARGET, **options).item() == pytest.approx(expected, rel=1e-6)


def test_generalised_dice_weighs_the_rare_class() -> None:
    target = torch.tensor([1, 0, 0, 0]).reshape(1, 1, 1, 4)
    logits = torch.zeros(1, 2, 1, 1, 4)
    # background: overlap 3/2, p 2, t 3, weight 1/9; the rare class: overlap 1/2, p 2, t 1, weight 1
    expected = 1 - (2 * (1.5 / 9 + 0.5) + 1) / (5 / 9 + 3 + 1)
    found = generalised_dice_loss(logits, target, foreground=False).item()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", REGIONS)
def test_a_class_neither_there_nor_predicted_costs_nothing(loss) -> None:
    logits = torch.stack((torch.full((1, 4, 4, 4), 50.0), torch.zeros(1, 4, 4, 4)), 1)
    assert loss(logits, torch.zeros(1, 4, 4, 4, dtype=torch.long)).item() == 0


def test_a_false_alarm_on_an_empty_class_costs_and_teaches() -> None:
    logits = torch.zeros(1, 2, 2, 2, 2, requires_grad=True)  # 4 voxels of probability
    loss = dice_loss(logits, torch.zeros(1, 2, 2, 2, dtype=torch.long))
    assert loss.item() == pytest.approx(1 - 1 / (4 + 1))
    loss.sum().backward()
    # d(1 - 1/(p + 1)) = 1/25 a unit of probability, of which a logit moves 1/4
    assert logits.grad[0, 1].flatten().tolist() == pytest.approx([0.01] * 8)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("voxels", [0, 1, "all"])
def test_half_precision_agrees_with_float64(loss, dtype: torch.dtype, voxels: object) -> None:
    size = (48, 48, 48)  # 110,592 voxels overflow float16
    target = torch.zeros(1, *size, dtype=torch.long)
    if voxels == "all":
        target += 1
    elif voxels:
        target[0, 7, 8, 9] = 1
    logits = torch.zeros(1, 2, *size, dtype=dtype)
    logits[:, 1] = 2  # probability 0.880797 of class 1 everywhere
    logits.requires_grad_()
    found = loss(logits, target)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact(loss, float(target.sum())), abs=1e-3)
    found.sum().backward()
    assert logits.grad.isfinite().all()


def exact(loss, true: float) -> float:
    """The value in Python's floats, of which every voxel has p = sigmoid(2)."""
    p, n, count = 1 / (1 + math.exp(-2)), 48**3, true
    entropy = -(count * math.log(p) + (n - count) * math.log(1 - p)) / n
    focal = -(count * (1 - p) ** 2 * math.log(p) + (n - count) * p**2 * math.log(1 - p)) / n
    dice = 1 - (2 * count * p + 1) / (n * p + count + 1)
    missed, false = count * (1 - p), (n - count) * p
    return {
        "cross_entropy": entropy,
        "focal_loss": focal,
        "dice_loss": dice,
        "generalised_dice_loss": dice,  # of one class
        "dice_cross_entropy": dice + entropy,
        "tversky_loss": 1 - (count * p + 1) / (count * p + 0.3 * false + 0.7 * missed + 1),
    }[loss.__name__]


def test_the_full_label_that_monai_gives_nan_for() -> None:
    logits = torch.zeros(1, 2, 48, 48, 48, dtype=torch.float16)
    logits[:, 1] = 2
    target = torch.ones(1, 48, 48, 48, dtype=torch.long)
    assert dice_loss(logits, target).item() == pytest.approx(0.063379, abs=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_agrees_at_128(loss, dtype: torch.dtype) -> None:
    logits = normal(1, 3, 128, 128, 128).to(dtype)
    target = torch.randint(0, 3, (1, 128, 128, 128), generator=torch.Generator().manual_seed(1))
    found = loss(logits, target).item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        reference = loss(logits, target).item()
    assert found == pytest.approx(reference, abs=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_item_costs_the_same_in_any_batch(loss) -> None:
    logits = normal(3, 4, 3, 4, 5)
    target = torch.randint(0, 4, (3, 3, 4, 5), generator=torch.Generator().manual_seed(1))
    together = loss(logits, target)
    alone = torch.cat([loss(logits[i : i + 1], target[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_labels_of_any_integer_type_and_perfect_ones(loss) -> None:
    target = torch.randint(0, 3, (2, 3, 4, 5), generator=torch.Generator().manual_seed(1))
    logits = torch.nn.functional.one_hot(target, 3).movedim(-1, 1) * 100.0
    assert torch.equal(loss(logits, target), loss(logits, target.to(torch.uint8)))
    assert loss(logits, target).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_coarse_maps_count_half_and_see_every_second_voxel() -> None:
    target = torch.tensor([0, 9, 1, 9, 2]).reshape(1, 1, 1, 5)
    seen = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels.flatten().tolist())
        return logits.flatten()[:1]

    sizes = {5: 3.0, 3: 6.0, 2: 9.0}
    outputs = [torch.full((1, 1, 1, 1, size), value) for size, value in sizes.items()]
    found = deeply_supervised(loss, outputs, target)
    assert seen == [[0, 9, 1, 9, 2], [0, 1, 2], [0, 2]]
    assert found.item() == pytest.approx((3 + 6 / 2 + 9 / 4) / 1.75)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("target", "text"),
    [
        (torch.zeros(1, 1, 1, 2), "labels are float32; they take the whole number"),
        (torch.tensor([[[[0, 2]]]]), "a voxel has the label 2; the model has the classes 0 to 1"),
        (torch.tensor([[[[-1, 0]]]]), "a voxel has the label -1"),
        (torch.zeros(1, 1, 1, 3, dtype=torch.long), "labels (1, 1, 1, 3)"),
    ],
)
@pytest.mark.untyped
def test_labels_that_do_not_fit_are_refused(loss, target: Tensor, text: str) -> None:
    with pytest.raises(DataError) as caught:
        loss(LOGITS, target)
    assert text in caught.value.line


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dice_loss(LOGITS, TARGET, smooth=0.0), "smooth is 0.0"),
        (lambda: tversky_loss(LOGITS, TARGET, alpha=1.5), "alpha is 1.5"),
        (lambda: focal_loss(LOGITS, TARGET, gamma=0.5), "gamma is 0.5"),
        (lambda: cross_entropy(LOGITS, TARGET, weight=[1.0]), "each of the 2 classes"),
        (lambda: dice_loss(LOGITS[:, :1], TARGET * 0), "foreground=False is needed"),
    ],
)
def test_options_out_of_range_are_refused(call, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert text in caught.value.line


def test_a_map_that_is_no_thinned_target_is_refused() -> None:
    outputs = [torch.zeros(1, 2, 1, 1, 4)]
    with pytest.raises(DataError, match="4 voxels along an axis with 5 labels"):
        deeply_supervised(dice_loss, outputs, torch.zeros(1, 1, 1, 5, dtype=torch.long))
