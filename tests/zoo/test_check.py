"""The judgements of the contract suite that no model of the zoo puts to the test."""

import pytest
import torch

from zoo.check import CHECKS, _same_gradients, run_check

SLOW = {"check_export", "check_two_processes", "check_isolation", "check_learns"}
WHOLE = {"weight": torch.tensor([300.0, -40.0]), "scale": torch.tensor([1e-3])}
MAGNITUDES = {
    "weight|magnitude": torch.tensor([310.0, 50.0]),
    "scale|magnitude": torch.tensor([8.0]),
}


def shared(**changes):
    return {
        **{name: tensor + changes.get(name, 0.0) for name, tensor in WHOLE.items()},
        **MAGNITUDES,
    }


@pytest.mark.parametrize("changes", [{}, {"scale": 6e-5}, {"weight": 1e-3}])
def test_gradients_may_differ_by_the_rounding_of_what_was_added(changes):
    _same_gradients(WHOLE, shared(**changes))  # the scale is what 4 and -3.999 leave


@pytest.mark.parametrize("changes", [{"scale": 4.0}, {"scale": 1e-3}, {"weight": 0.01}])
def test_a_share_that_is_missed_or_counted_twice_is_found(changes):
    name = next(iter(changes))
    with pytest.raises(AssertionError, match=f"gradient of {name} differs"):
        _same_gradients(WHOLE, shared(**changes))


def test_a_gradient_that_should_be_zero_may_be_rounding():
    zero = {"weight": torch.tensor([300.0]), "bias": torch.tensor([0.0])}
    noise = {"weight": zero["weight"], "bias": torch.tensor([5e-5])}
    magnitudes = {"weight|magnitude": torch.tensor([300.0]), "bias|magnitude": torch.tensor([5e-5])}
    _same_gradients(zero, noise | magnitudes)
    with pytest.raises(AssertionError, match="bias"):
        _same_gradients(zero, noise | magnitudes | {"bias": torch.tensor([1e-3])})


def test_a_saved_folder_keeps_every_promise(tmp_path):
    import zoo

    zoo.save(zoo.load("resnet18", width=8, num_classes=3), tmp_path, labels=["a", "b", "c"])
    for check in CHECKS.keys() - SLOW:
        result = run_check(str(tmp_path), check)
        assert result.passed, f"{check}: {result.message}"
