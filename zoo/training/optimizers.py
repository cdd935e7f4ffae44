"""Optimisers of a recipe: those of torch.optim, and the three that it lacks or has in part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zoo.groups import layer_groups, parameter_groups
from zoo.training import recipe as recipes
from zoo.training.recipe import Recipe

ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-8  # of what Muon leaves to AdamW; those of its authors


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """The optimiser of a recipe for the parameters that are not frozen.

    Norms and biases have no weight decay; rates fall towards the input by the recipe's
    `layer_decay`.

    Args:
        model: Bare; one with `depth_order()`, unless the layer decay is 1.
        recipe: Whose `optimizer` and `layer_decay` are read.

    Raises:
        ConfigError: See `zoo.groups.parameter_groups`.
    """
    how = recipe.optimizer
    groups = parameter_groups(
        model, lr=how.lr, layer_decay=recipe.layer_decay, weight_decay=how.weight_decay
    )
    match how:
        case recipes.SGD(momentum=momentum, nesterov=nesterov):
            return torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov)
        case recipes.AdamW(betas=betas, eps=eps):
            return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
        case recipes.Lion(betas=betas):
            return Lion(groups, betas=betas)
        case recipes.LAMB(betas=betas, eps=eps):
            return LAMB(groups, betas=betas, eps=eps)
        case recipes.Muon(momentum=momentum, lr=lr, adam_lr=adam_lr):
            return Muon(_split(model, groups, adam_lr / lr), momentum=momentum)


def _split(
    model: nn.Module, groups: list[dict[str, Any]], adam_rate: float
) -> list[dict[str, Any]]:
    """The groups in two: matrices and kernels, which Muon steps, and the rest for AdamW."""
    left = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    if hasattr(model, "depth_order"):
        parameters = dict(model.named_parameters())
        left |= {id(parameters[name]) for name in layer_groups(model)[-1]}
    found = []
    for group in groups:
        hidden = [p for p in group["params"] if p.ndim > 1 and id(p) not in left]
        other = [p for p in group["params"] if p.ndim < 2 or id(p) in left]
        if hidden:
            found.append({**group, "params": hidden, "orthogonal": True})
        if other:
            found.append({**group, "params": other, "lr": group["lr"] * adam_rate})
    return found


class _Stepping(Optimizer):
    """What the optimisers below share: a pass over the parameters that have a gradient."""

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Change one parameter."""
        raise NotImplementedError

    def average(self, parameter: Tensor, name: str) -> Tensor:
        """A running average kept for a parameter, zeros at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        kept: Tensor = state[name]
        return kept

    def count(self, parameter: Tensor) -> int:
        """Number of this step for a parameter, 1 for the first."""
        state = self.state[parameter]
        state["step"] = int(state.get("step", 0)) + 1
        return int(state["step"])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Change every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
        return loss


class Lion(_Stepping):
    """The sign of an interpolation of momentum and gradient.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Of the interpolation, and of the momentum.
        weight_decay: Times the learning rate.

    Source: Chen et al. 2023, https://arxiv.org/abs/2302.06675, program 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Program 1, lines 2 to 6."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        momentum = self.average(parameter, "momentum")
        direction = torch.lerp(grad, momentum, beta1).sign_()
        parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        momentum.lerp_(grad, 1 - beta2)


class LAMB(_Stepping):
    """Adam with the step of each tensor scaled to the norm of the tensor.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Of the averages of the gradient and of its square.
        eps: Added to the root of the second.
        weight_decay: Within the scaled step.

    Source: You et al. 2019, https://arxiv.org/abs/1904.00962, algorithm 2. What has no weight decay
        (norms and biases) is not scaled either, as in the authors' code.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values)

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Algorithm 2, lines 4 to 11, phi being the identity."""
        step = _adam(self, parameter, grad, group["betas"], group["eps"])
        ratio: Tensor | float = 1.0
        if decay := group["weight_decay"]:
            step = step.add_(parameter, alpha=decay)
            norm, length = parameter.norm(), step.norm()
            ratio = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
        parameter.sub_(step.mul_(ratio), alpha=group["lr"])


class Muon(_Stepping):
    """Orthogonalised momentum for matrices and kernels, AdamW for the rest.

    A kernel is the matrix of its outputs and all that belongs to each. `torch.optim.Muon` takes
    matrices alone and would need a second optimiser beside it.

    Args:
        params: Groups; those that Muon steps have ``orthogonal=True``.
        lr: Learning rate.
        momentum: Share of the last momentum that is kept.
        weight_decay: Times the learning rate.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the factor of the
        rate is that of Liu et al. 2025, https://arxiv.org/abs/2502.16982, equation 4.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**values, "orthogonal": False})

    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Nesterov momentum, made orthogonal; or AdamW's step."""
        lr = group["lr"]
        if group["orthogonal"]:
            momentum = self.average(parameter, "momentum").mul_(group["momentum"]).add_(grad)
            ahead = grad.add(momentum, alpha=group["momentum"])
            step = orthogonal(ahead.flatten(1)).view_as(parameter)
            rows, columns = len(parameter), parameter[0].numel()
            step.mul_(0.2 * math.sqrt(max(rows, columns)))
        else:
            step = _adam(self, parameter, grad, ADAM_BETAS, ADAM_EPS)
        parameter.mul_(1 - lr * group["weight_decay"]).sub_(step, alpha=lr)


def _adam(
    optimizer: _Stepping, parameter: Tensor, grad: Tensor, betas: tuple[float, float], eps: float
) -> Tensor:
    """Adam's step before the learning rate: the mean gradient over the root of its mean square."""
    count = optimizer.count(parameter)
    mean = optimizer.average(parameter, "mean").lerp_(grad, 1 - betas[0])
    square = optimizer.average(parameter, "square")
    square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    root = (square / (1 - betas[1] ** count)).sqrt_().add_(eps)
    step: Tensor = mean.div(1 - betas[0] ** count).div_(root)
    return step


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Roughly U V^T of a matrix U S V^T: its singular values come to between 0.7 and 1.2.

    Args:
        matrix: Of shape (rows, columns).
        steps: Newton-Schulz iterations.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, `newtonschulz5`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.size(0) > matrix.size(1)
    x: Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
