"""Every promise of `zoo.check`, for every card; completeness is structural."""

import pytest

import zoo
from zoo.check import CHECKS, run_check

UNTYPED = {"check_export"}


@pytest.mark.parametrize("check", [c for c in CHECKS if c not in UNTYPED])
@pytest.mark.parametrize("name", zoo.list_models())
def test_the_promise_is_kept(name, check):
    result = run_check(name, check)
    assert result.passed, result.message


@pytest.mark.untyped
@pytest.mark.parametrize("check", sorted(UNTYPED))
@pytest.mark.parametrize("name", zoo.list_models())
def test_the_promise_is_kept_without_shape_checks(name, check):
    result = run_check(name, check)
    assert result.passed, result.message
