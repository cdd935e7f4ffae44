from __future__ import annotations

import math

import pytest

from zoo.training.recipe import (
    Constant,
    Cosine,
    InverseRoot,
    Linear,
    OneCycle,
    Plateau,
    Poly,
    Schedule,
)
from zoo.training.schedules import Lowering, factor


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Constant(), [1, 1, 1, 1, 1]),
        (Constant(warmup=0.5), [0.5, 1, 1, 1, 1]),
        (Linear(), [1, 0.75, 0.5, 0.25, 0]),
        (Linear(final=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (Linear(warmup=0.5), [0.5, 1, 1, 0.5, 0]),
        (Cosine(), [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0]),
        (Cosine(warmup=0.5, final=0.5), [0.5, 1, 1, 0.75, 0.5]),
        (Cosine(warmup=1.0), [0.25, 0.5, 0.75, 1, 1]),
        (Poly(power=2.0), [1, 0.5625, 0.25, 0.0625, 0]),
        (Poly(power=0.9), [1, 0.75**0.9, 0.5**0.9, 0.25**0.9, 0]),
        (OneCycle(peak=0.5, start=0.0, final=0.0), [0, 0.5, 1, 0.5, 0]),
        (OneCycle(peak=0.25, start=0.04, final=0.1), [0.04, 1, 0.775, 0.325, 0.1]),
        (OneCycle(peak=0.0), [1, None, None, None, 1e-4]),
        (OneCycle(peak=1.0, start=0.0), [0, None, 0.5, None, 1]),
        (Plateau(), [1, 1, 1, 1, 1]),
        (InverseRoot(), [1, 2**-0.5, 3**-0.5, 0.5, 5**-0.5]),
        (InverseRoot(warmup=0.5), [0.5, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5]),
    ],
)
def test_four_steps_and_the_end(schedule: Schedule, values: list[float | None]) -> None:
    for step, value in enumerate(values):
        if value is not None:
            assert factor(schedule, step, 4) == pytest.approx(value, abs=1e-12)
    assert factor(schedule, 7, 4) == factor(schedule, 4, 4)


def test_one_step_has_the_whole_rate() -> None:
    for schedule in (Cosine(), Linear(), Poly(), Constant(), InverseRoot(), Cosine(warmup=1.0)):
        assert factor(schedule, 0, 1) == 1


def test_a_plateau_lowers_the_rate_again_and_again() -> None:
    lowering = Lowering(Plateau(patience=1, factor=0.5))
    seen = []
    for value in (0.1, 0.2, 0.2, 0.1, 0.3, math.nan, 0.3, 0.3, 0.3):
        lowering.measured(value)
        seen.append(lowering.factor)
    assert seen == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_plateau_goes_on_from_its_state() -> None:
    one, other = (Lowering(Plateau(patience=1, factor=0.5)) for _ in range(2))
    one.measured(0.9)
    one.measured(0.8)
    other.load_state_dict(one.state_dict())
    other.measured(0.85)
    assert other.factor == 0.5


def test_a_first_value_that_is_no_number_sets_no_best() -> None:
    lowering = Lowering(Plateau(patience=5))
    lowering.measured(math.nan)
    lowering.measured(-3.0)
    assert lowering.state_dict() == {"factor": 1.0, "best": -3.0, "stale": 0}


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 1.7469e-7), (4000, 6.9877e-4), (100_000, 1.3975e-4)]
)
def test_the_transformers_rate_is_that_of_its_equation(step: int, rate: float) -> None:
    highest = (512 * 4000) ** -0.5
    found = highest * factor(InverseRoot(warmup=0.04), step - 1, 100_000)
    assert found == pytest.approx(rate, rel=1e-4)
    assert found == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=1e-12)
