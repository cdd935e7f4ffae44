"""Statistics of the page on policies, and that the sides of its comparison do the same."""

import pytest
import torch

from rl import bench, report


def test_the_middle_half_by_hand() -> None:
    # Of eight, two are left out on either side: (20 + 30 + 40 + 50) / 4.
    assert report.interquartile_mean([1000, 0, 10, 60, 20, 30, 50, 40]) == 35
    assert report.interquartile_mean([1, 2, 6]) == 3


def test_an_interval_holds_the_mean_and_narrows() -> None:
    few, many = [0.0, 1, 2, 3], [0.0, 1, 2, 3] * 20
    low, high = report.interval(few)
    narrow_low, narrow_high = report.interval(many)
    assert low < narrow_low < 1.5 < narrow_high < high
    assert report.interval([5.0] * 6) == (5, 5)


def test_a_plain_loop_learns_what_ours_does() -> None:
    torch.manual_seed(0)
    assert set(bench.SIDES) == {"refzoo", "plain loop", "Stable-Baselines3"}
    iterate = bench.plain(4)
    iterate()
    assert bench.recipe_of(64).minibatches == 4
    assert bench.ours(4)()["samples"] > 0


def test_a_page_has_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "speeds", lambda num_envs, sides: dict.fromkeys(sides, 1234.0))
    text = "\n".join(report.page(1, [], ["refzoo"]))
    assert "| `ppo-cartpole.v1` | 500.00 ± 0.00 | 100 |" in text
    assert "| 1024 | 16 x 2 | 1,234 |" in text
