"""Statistics worked out by hand; frozen and saved with what holds them."""

import pytest
import torch

from rl.normalize import Moments, Normalizer, RewardScaler


def test_batches_merge_into_the_statistics_of_all_rows() -> None:
    moments = Moments(1)
    moments.update(torch.tensor([[1.0], [2.0], [3.0]]))
    moments.update(torch.tensor([[10.0]]))
    moments.update(torch.zeros(0, 1))
    # Of 1, 2, 3, 10: mean 4, variance (9 + 4 + 1 + 36) / 4.
    assert (moments.mean.item(), moments.variance.item()) == (4.0, 12.5)


def test_far_from_zero_nothing_is_lost() -> None:
    rows = 1e6 + torch.randn(
        3000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    moments = Moments(1)
    for part in rows.split(7):
        moments.update(part)
    assert moments.variance.item() == pytest.approx(rows.var(correction=0).item(), rel=1e-9)
    normal = Normalizer(1)
    normal.load_state_dict(moments.state_dict())
    assert normal(rows).std().item() == pytest.approx(1, abs=0.02)


def test_observations_are_clipped_and_nothing_is_learned_by_reading() -> None:
    normalizer = Normalizer(2)
    assert normalizer(torch.tensor([[0.5, 200.0]])).tolist() == [[0.5, 10.0]]
    normalizer.update(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    out = normalizer(torch.tensor([2.0, 4.0]))
    assert out.tolist() == pytest.approx([1.0, 1.0])
    assert out.dtype == torch.float32
    assert all(value.equal(before[name]) for name, value in normalizer.state_dict().items())


@pytest.mark.parametrize("skipped", [False, True])
def test_discounted_sums_begin_anew_with_every_episode(skipped: bool) -> None:
    # gamma .5, reward 1, episodes of 3 steps: 1, 1.5, 1.75 and again, however they end.
    scaler, seen = RewardScaler(), []
    for step in range(6):
        ended = torch.tensor([step % 3 == 2])
        sums = scaler.update_sums(torch.ones(1), ended, torch.tensor([True]), 0.5)
        seen.append(sums.item())
        if skipped and ended:  # the row of a reset, as NEXT_STEP gives it
            none = torch.tensor([False])
            scaler.update_sums(torch.zeros(1), none, none, 0.5)
    assert seen == [1, 1.5, 1.75, 1, 1.5, 1.75]
    variance = torch.tensor(seen, dtype=torch.float64).var(correction=0).item()
    assert scaler.variance.item() == pytest.approx(variance, rel=1e-12)
    assert scaler(torch.tensor(1.0)).item() == pytest.approx(variance**-0.5, rel=1e-6)
