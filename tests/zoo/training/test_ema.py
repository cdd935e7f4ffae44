from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.training.ema import EMA


def weight_and_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    nn.init.ones_(model[0].weight)
    return model


def test_weights_are_averaged_and_integers_copied() -> None:
    """Case TRN-07."""
    model = weight_and_norm()
    ema = EMA(model, 0.9, warmup=False)
    for value in (2.0, 3.0):
        with torch.no_grad():
            model[0].weight.fill_(value)
        model(torch.tensor([[1.0], [5.0]]))
        ema.update(model)
    assert ema.tensors["0.weight"].item() == pytest.approx(1.29, abs=1e-6)
    counted = ema.tensors["1.num_batches_tracked"]
    assert counted.item() == 2
    assert counted.dtype == torch.int64
    # Means of a batch are 6 and 9: the running mean is 0.6, then 1.44.
    assert ema.tensors["1.running_mean"].item() == pytest.approx(0.9 * 0.06 + 0.144, abs=1e-6)
    assert ema.tensors["1.running_var"].item() != 1


def test_warm_up_keeps_less_of_the_first_weights() -> None:
    model = weight_and_norm()
    ema = EMA(model, 0.999)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    ema.update(model)  # keeps 1/10
    assert ema.tensors["0.weight"].item() == pytest.approx(1.9)
    ema.update(model)  # keeps 2/11
    assert ema.tensors["0.weight"].item() == pytest.approx(2 - 0.1 * 2 / 11)


def test_the_model_has_the_average_for_a_while() -> None:
    model = weight_and_norm()
    ema = EMA(model, 0.5, warmup=False)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[1].num_batches_tracked.fill_(7)

    def look() -> None:
        with ema.averaged(model):
            assert model[0].weight.item() == 1.0
            assert model[1].num_batches_tracked.item() == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look()
    assert model[0].weight.item() == 3.0
    assert model[1].num_batches_tracked.item() == 7
    assert ema.tensors["0.weight"].item() == 1.0


def test_a_shared_weight_is_averaged_once() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[0].weight
    nn.init.ones_(model[0].weight)
    ema = EMA(model, 0.5, warmup=False)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    ema.update(model)
    with ema.averaged(model):
        assert model[1].weight.item() == 2.0
    assert model[0].weight.item() == 3.0


def test_a_state_goes_on_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    ema, again = EMA(model, 0.99), EMA(model, 0.99)
    for number in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ema.update(model)
        if number == 2:
            again.load_state_dict(ema.state_dict())
        if number > 2:
            again.update(model)
    assert again.updates == 5
    for name, tensor in ema.tensors.items():
        assert torch.equal(tensor, again.tensors[name])
