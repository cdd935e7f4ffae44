"""A model's parameters by depth: freezing from the input on, learning rates that decay towards it.

A family states its order alone, in `depth_order()`: key prefixes from the input to the answer,
those of one depth in one list, the head last. Everything else is derived here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.errors import ConfigError, shown


def layer_groups(model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each depth: the input's first, the head's last.

    Every parameter is in exactly one group. The last group is empty in a model without a head.

    Raises:
        ConfigError: The model states no order, or one that a parameter does not fit.
    """
    kind = type(model).__name__
    depth_order: Callable[[], list[list[str]]] | None = getattr(model, "depth_order", None)
    if depth_order is None:
        raise ConfigError(f"{kind} has no depth_order(), which freezing and layer decay need")
    order = depth_order()
    depth_of = {prefix: depth for depth, group in enumerate(order) for prefix in group}
    groups: list[list[str]] = [[] for _ in order]
    for name, _ in model.named_parameters():
        found = [d for prefix, d in depth_of.items() if f"{name}.".startswith(f"{prefix}.")]
        if len(found) != 1:
            raise ConfigError(
                f"{kind}.depth_order() has {len(found)} prefixes of the parameter {shown(name)}; "
                "each parameter has exactly one depth"
            )
        groups[found[0]].append(name)
    return groups


def freeze(model: nn.Module, up_to: int) -> None:
    """Freeze the groups before `up_to`, and no other: parameters and statistics of norms.

    ``freeze(model, -1)`` leaves the head alone to be trained, ``freeze(model, 0)`` thaws all.
    Frozen norms stay in eval mode through every later ``train()``; dropout does not.

    Args:
        model: One with `depth_order()`; if it has statistics, its ``train()`` keeps those of
            norms without gradients.
        up_to: Number of groups, counted from the input; from the head if negative.

    Raises:
        ConfigError: There are fewer groups, or the model states no order.
    """
    groups = layer_groups(model)
    if not -len(groups) <= up_to <= len(groups):
        raise ConfigError(
            f"up_to is {up_to}; {type(model).__name__} has {len(groups)} groups to freeze"
        )
    frozen = {name for group in groups[:up_to] for name in group}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.train(model.training)  # here a family puts frozen norms in eval mode, thawed ones back


def parameter_groups(
    model: nn.Module, *, lr: float, layer_decay: float = 1.0, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for any optimiser of ``torch.optim``.

    The deepest parameters learn at `lr`, each group before them at `layer_decay` times the rate of
    the next. Norms and biases, which are the parameters with one axis, have no weight decay.
    Frozen parameters are left out. Parameters that share both values share a group.

    Args:
        model: One with `depth_order()`, unless `layer_decay` is 1.
        lr: Learning rate, above 0.
        layer_decay: Factor in (0, 1].
        weight_decay: From 0 on; of everything with at least two axes.

    Raises:
        ConfigError: A value is out of range, or the model states no order.

    Source: Howard, Ruder 2018, https://arxiv.org/abs/1801.06146, section 3.2.
    """
    for field, value, right, takes in (
        ("lr", lr, lr > 0, "more than 0"),
        ("layer_decay", layer_decay, 0 < layer_decay <= 1, "more than 0, at most 1"),
        ("weight_decay", weight_decay, weight_decay >= 0, "0 or more"),
    ):
        if not right:
            raise ConfigError(f"{field} is {shown(value)}; it takes {takes}")
    parameters = dict(model.named_parameters())
    groups = [list(parameters)] if layer_decay == 1 else [g for g in layer_groups(model) if g]
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for height, names in enumerate(reversed(groups)):
        for name in names:
            decay = weight_decay if parameters[name].ndim > 1 else 0.0
            if parameters[name].requires_grad:
                found.setdefault((lr * layer_decay**height, decay), []).append(parameters[name])
    return [
        {"params": params, "lr": rate, "weight_decay": decay}
        for (rate, decay), params in found.items()
    ]
