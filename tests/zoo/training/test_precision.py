from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.errors import ConfigError
from zoo.training.precision import GROW_AFTER, Precision, first_bad_layer


def one_weight(value: float = 1.0) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.tensor([value], dtype=torch.float64))
    return weight, torch.optim.SGD([weight], lr=1.0, momentum=0.9)


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    """Case AMP-01."""
    weight, optimizer = one_weight()
    precision = Precision("float16", "cpu", slow=True)
    assert precision.scale == 65536
    precision.backward((0.5 * weight).sum())
    assert weight.grad is not None
    assert weight.grad.item() == 0.5 * 65536
    stepped = precision.step(optimizer, [weight], 1.0)
    assert weight.item() == 0.5
    assert stepped == (0.5, False)


def test_a_long_gradient_is_clipped() -> None:
    weight, optimizer = one_weight()
    precision = Precision("float32", "cpu")
    precision.backward((4.0 * weight).sum())
    assert precision.step(optimizer, [weight], 1.0) == (4.0, False)
    assert weight.item() == pytest.approx(0.0, abs=1e-6)


def test_an_overflow_leaves_everything_and_halves_the_scale() -> None:
    """Case AMP-04."""
    weight, optimizer = one_weight()
    precision = Precision("float16", "cpu", slow=True)
    skipped = []
    for number in range(1, 6):
        optimizer.zero_grad()
        before = weight.item()
        momentum = optimizer.state[weight].get("momentum_buffer", torch.zeros(1)).clone()
        precision.backward((weight * (float("inf") if number == 3 else 0.25)).sum())
        skipped.append(precision.step(optimizer, [weight]).skipped)
        if number == 3:
            assert weight.item() == before
            assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)
            assert precision.scale == 32768
        else:
            assert weight.item() != before
    assert skipped == [False, False, True, False, False]
    again = Precision("float16", "cpu", slow=True)
    again.load_state_dict(precision.state_dict())
    assert again.state_dict() == precision.state_dict() == {"scale": 32768.0, "good_steps": 2}


def test_the_scale_grows_back() -> None:
    weight, optimizer = one_weight()
    precision = Precision("float16", "cpu", slow=True)
    precision.load_state_dict({"scale": 1024.0, "good_steps": GROW_AFTER - 2})
    scales = []
    for _ in range(3):
        optimizer.zero_grad()
        precision.backward((weight * 0.1).sum())
        precision.step(optimizer, [weight])
        scales.append(precision.scale)
    assert scales == [1024, 2048, 2048]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_no_precision_steps_on_a_gradient_that_is_not_finite(name: str) -> None:
    weight, optimizer = one_weight()
    precision = Precision(name, "cpu")
    precision.backward((weight * float("nan")).sum())
    assert precision.step(optimizer, [weight], 1.0).skipped
    assert weight.item() == 1.0
    assert not optimizer.state
    assert precision.scale == 1


def test_a_state_of_another_precision_leaves_the_scale() -> None:
    half = Precision("float16", "cpu", slow=True)
    half.load_state_dict(Precision("bfloat16", "cpu").state_dict())
    assert half.scale == 65536
    wide = Precision("float32", "cpu")
    wide.load_state_dict(half.state_dict())
    assert wide.scale == 1


def test_a_pass_without_gradients_does_not_spoil_the_next() -> None:
    """Case AMP-02: within one block, where a cache of casted weights could."""
    torch.manual_seed(0)
    layer, batch = nn.Linear(4, 4), torch.randn(8, 4)
    with Precision("bfloat16", "cpu").autocast():
        with torch.no_grad():
            layer(batch)
        output = layer(batch)
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
    assert layer.weight.grad is not None
    columns = batch.bfloat16().double().sum(0)
    assert torch.allclose(layer.weight.grad.double(), columns.expand(4, 4), rtol=2**-7, atol=2**-7)
    assert layer.weight.grad.dtype == torch.float32


def test_float32_is_computed_as_it_is_outside() -> None:
    layer, batch = nn.Linear(4, 4), torch.randn(8, 4)
    with Precision("float32", "cpu").autocast():
        assert torch.equal(layer(batch), layer(batch.clone()))
        assert layer(batch).dtype == torch.float32


def test_what_a_cpu_is_too_slow_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="take 'bfloat16'"):
        Precision("float16", "cpu")
    with pytest.raises(ConfigError, match="is 'bfloat'; did you mean 'bfloat16'"):
        Precision("bfloat", torch.device("cpu"))


def test_nothing_to_step_is_no_fault() -> None:
    weight, optimizer = one_weight()
    assert Precision("float32", "cpu").step(optimizer, [weight]) == (0.0, False)


class Overflow(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"values": (x.argmax(-1), x / 0)}


def test_the_first_bad_layer_is_named() -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        body[2].weight[1, 2] = float("inf")
        body[3].weight.fill_(float("nan"))
    batch = torch.rand(2, 4) + 1
    assert first_bad_layer(body, lambda: body(batch)) == "2"
    assert not body[2]._forward_hooks
    whole = Overflow()
    assert first_bad_layer(whole, lambda: whole(batch)) == "Overflow"
    good = nn.Linear(4, 4)
    assert first_bad_layer(good, lambda: good(batch)) is None


def test_an_error_after_the_bad_layer_is_swallowed_and_one_before_is_not() -> None:
    bad = nn.Linear(1, 1)
    nn.init.constant_(bad.weight, float("nan"))

    def run() -> None:
        bad(torch.ones(1, 1))
        raise ZeroDivisionError

    assert first_bad_layer(bad, run) == "Linear"
    nn.init.ones_(bad.weight)
    with pytest.raises(ZeroDivisionError):
        first_bad_layer(bad, run)
