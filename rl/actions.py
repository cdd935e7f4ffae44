"""Densities over action spaces: discrete, continuous, products and choices of them, with masks.

An action space is a tree of the nodes below. A policy gives each state one flat row of parameters
(logits, means, logarithms of deviations); an action is stored as one flat row too, *latent*: the
index before `start` is added, the real number before it is clipped or squashed. A latent row is
what log-probabilities are of; `decode` turns it into what the environment takes. A mask is a flat
row of bools, one for each logit, true where an option is allowed.

Rows are on the last axis; all others are batch axes.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.errors import ConfigError, nearest, shown

LOG_2PI = math.log(2 * math.pi)
QUADRATURE = 32  # points of the entropy of a squashed normal


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Log-probabilities of the options; minus infinity, with a gradient of 0, where not allowed.

    Args:
        logits: (..., n).
        mask: (..., n), true where allowed; every row allows something.

    Source: Huang, Ontañón 2020, https://arxiv.org/abs/2006.14171, section 3; the mask enters as
        minus infinity rather than as a large number, which large logits would pass.
    """
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return F.log_softmax(logits, -1)


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy (nats) of rows of log-probabilities; options of probability 0 add nothing."""
    finite = log_probs.masked_fill(log_probs == -math.inf, 0.0)  # 0 * -inf is not a number
    return -(log_probs.exp() * finite).sum(-1)


def log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), exact for any u.

    Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, appendix C, rewritten as in
        TensorFlow Probability: 2 (log 2 - u - softplus(-2u)).
    """
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


@dataclass(frozen=True)
class Discrete:
    """One of `n` options.

    Attributes:
        n: Number of options, 1 or more.
        start: What the environment calls the first one.
    """

    n: int
    start: int = 0

    @property
    def params(self) -> int:
        """Parameters of a state: a logit each."""
        return self.n

    @property
    def latent(self) -> int:
        """Numbers of a latent action."""
        return 1

    @property
    def masks(self) -> int:
        """Bools of a mask."""
        return self.n

    @property
    def learned(self) -> tuple[bool, ...]:
        """For each parameter, whether it is the same in every state."""
        return (False,) * self.n

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probability of latent actions: (..., params), (..., latent) -> (...)."""
        return masked_log_softmax(params, mask).gather(-1, action.long()).squeeze(-1)

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy in nats: (..., params) -> (...)."""
        return categorical_entropy(masked_log_softmax(params, mask))

    def sample(
        self,
        params: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw latent actions: (..., params) -> (..., latent)."""
        # The largest of log p + Gumbel noise; what is masked stays at minus infinity.
        noise = torch.empty_like(params).exponential_(generator=generator).log_()
        best = (masked_log_softmax(params, mask) - noise).argmax(-1, keepdim=True)
        return best.to(params.dtype)

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """The likeliest latent actions: (..., params) -> (..., latent)."""
        return masked_log_softmax(params, mask).argmax(-1, keepdim=True).to(params.dtype)

    def allowed(self, mask: np.ndarray) -> np.ndarray:
        """Whether masks (n, masks) leave something to choose: (n,)."""
        return np.asarray(mask.any(-1))

    def decode(self, action: np.ndarray) -> np.ndarray:
        """What the environment takes: (n, latent) -> (n,) of int64."""
        return action[:, 0].astype(np.int64) + self.start


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers, clipped to their bounds or squashed between them.

    Clipped, the density is that of the number before clipping. Squashed, it is that of
    middle + half width * tanh(number).

    Attributes:
        low: Lower bound of each number; may be infinite where they are clipped.
        high: Upper bounds.
        shape: Of the environment's array; None is one axis.
        bound: "clip" or "tanh".
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...] | None = None
    bound: Literal["clip", "tanh"] = "clip"

    def __post_init__(self) -> None:
        if self.bound not in ("clip", "tanh"):
            raise ConfigError(f"bound is {shown(self.bound)}; it is 'clip' or 'tanh'")
        if len(self.low) != len(self.high) or any(
            not a < b for a, b in zip(self.low, self.high, strict=True)
        ):
            raise ConfigError(
                f"bounds are {shown(self.low)} and {shown(self.high)}; each low is below its high"
            )
        if self.bound == "tanh" and not all(map(math.isfinite, (*self.low, *self.high))):
            raise ConfigError("a squashed action has an infinite bound; take bound='clip'")

    @property
    def params(self) -> int:
        """Parameters of a state: the means, then the logarithms of the standard deviations."""
        return 2 * len(self.low)

    @property
    def latent(self) -> int:
        """Numbers of a latent action."""
        return len(self.low)

    @property
    def masks(self) -> int:
        """Bools of a mask: none."""
        return 0

    @property
    def learned(self) -> tuple[bool, ...]:
        """Deviations are the same in every state (detail 2 of continuous actions)."""
        return (False,) * self.latent + (True,) * self.latent

    @cached_property
    def half_width(self) -> tuple[float, ...]:
        """Half the distance of the bounds."""
        return tuple((b - a) / 2 for a, b in zip(self.low, self.high, strict=True))

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-density of latent actions: (..., params), (..., latent) -> (...)."""
        mean, log_std = params.chunk(2, -1)
        each = -0.5 * ((action - mean) * (-log_std).exp()) ** 2 - log_std - 0.5 * LOG_2PI
        if self.bound == "tanh":
            each = each - log_tanh_slope(action) - self._log_half(params)
        return each.sum(-1)  # independent components

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy in nats: (..., params) -> (...); of a squashed normal by quadrature."""
        mean, log_std = params.chunk(2, -1)
        each = log_std + 0.5 * (1 + LOG_2PI)
        if self.bound == "tanh":
            points, weights = _hermite(params)
            u = mean[..., None] + log_std.exp()[..., None] * points
            each = each + (log_tanh_slope(u) * weights).sum(-1) + self._log_half(params)
        return each.sum(-1)

    def _log_half(self, like: Tensor) -> Tensor:
        return like.new_tensor(self.half_width).log()

    def sample(
        self,
        params: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw latent actions: (..., params) -> (..., latent)."""
        mean, log_std = params.chunk(2, -1)
        return mean + log_std.exp() * torch.empty_like(mean).normal_(generator=generator)

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean: (..., params) -> (..., latent)."""
        return params.chunk(2, -1)[0]

    def allowed(self, mask: np.ndarray) -> np.ndarray:
        """All true: there is nothing to mask."""
        return np.ones(len(mask), bool)

    def decode(self, action: np.ndarray) -> np.ndarray:
        """What the environment takes, within its bounds: (n, latent) -> (n, *shape) of float32."""
        low, high = (np.array(side, np.float32) for side in (self.low, self.high))
        if self.bound == "tanh":
            half = np.asarray(self.half_width)
            action = np.asarray(self.low) + half * (1 + np.tanh(action.astype(np.float64)))
        shape = (self.latent,) if self.shape is None else self.shape
        return np.clip(action.astype(np.float32), low, high).reshape(len(action), *shape)


class _Compound(ABC):
    """What nodes made of others share: their widths are the sums of the others'."""

    @property
    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """The nodes it is made of, in the order of their columns."""

    @cached_property
    def params(self) -> int:
        """Parameters of a state."""
        return sum(node.params for node in self.nodes)

    @cached_property
    def latent(self) -> int:
        """Numbers of a latent action."""
        return sum(node.latent for node in self.nodes)

    @cached_property
    def masks(self) -> int:
        """Bools of a mask."""
        return sum(node.masks for node in self.nodes)

    @property
    def learned(self) -> tuple[bool, ...]:
        """For each parameter, whether it is the same in every state."""
        return tuple(flag for node in self.nodes for flag in node.learned)


@dataclass(frozen=True)
class Joint(_Compound):
    """Several actions at once, independent given the state.

    Attributes:
        parts: The nodes.
        form: What the environment takes: an "array" of integers, a "tuple", or a "dict".
        names: Keys of the dict.
        dtype: Of the array.
    """

    parts: tuple[Node, ...]
    form: Literal["array", "tuple", "dict"] = "tuple"
    names: tuple[str, ...] = ()
    dtype: str = "int64"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The parts."""
        return self.parts

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-density of latent actions: the sum of the parts'."""
        each = zip(
            self.parts,
            _split(params, self.parts, "params"),
            _split(action, self.parts, "latent"),
            _split(mask, self.parts, "masks"),
            strict=True,
        )
        return _sum(part.log_prob(p, a, m) for part, p, a, m in each)

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy in nats: the sum of the parts'."""
        return _sum(part.entropy(p, m) for part, p, m in self._rows(params, mask))

    def sample(
        self,
        params: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw latent actions."""
        drawn = [part.sample(p, m, generator) for part, p, m in self._rows(params, mask)]
        return torch.cat(drawn, -1)

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """The likeliest latent actions."""
        return torch.cat([part.mode(p, m) for part, p, m in self._rows(params, mask)], -1)

    def _rows(self, params: Tensor, mask: Tensor | None) -> Any:
        own = _split(params, self.parts, "params"), _split(mask, self.parts, "masks")
        return zip(self.parts, *own, strict=True)

    def allowed(self, mask: np.ndarray) -> np.ndarray:
        """Whether masks leave something to choose in every part."""
        cut = np.split(mask, np.cumsum([part.masks for part in self.parts])[:-1], -1)
        each = [part.allowed(own) for part, own in zip(self.parts, cut, strict=True)]
        return np.asarray(np.stack(each).all(0))

    def decode(self, action: np.ndarray) -> Any:
        """What the environments take, as Gymnasium batches it."""
        cut = np.split(action, np.cumsum([part.latent for part in self.parts])[:-1], -1)
        each = [part.decode(own) for part, own in zip(self.parts, cut, strict=True)]
        if self.form == "array":
            return np.stack(each, -1).astype(self.dtype)
        return dict(zip(self.names, each, strict=True)) if self.form == "dict" else tuple(each)


@dataclass(frozen=True)
class Choice(_Compound):
    """One of several actions of different kinds: a choice, then the parameters of what is chosen.

    What is not chosen adds neither log-probability nor entropy:
    p(z, a) = p(z) p(a | z) and H = H(z) + sum over z of p(z) H(a | z).

    Attributes:
        options: The nodes; their masks follow that of the choice. An option whose own mask allows
            nothing must not be allowed by the choice's.
    """

    options: tuple[Node, ...]

    @cached_property
    def gate(self) -> Discrete:
        """The choice itself."""
        return Discrete(len(self.options))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The choice, then the options; the latent numbers of those not chosen mean nothing."""
        return (self.gate, *self.options)

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-density of the choice and of what was chosen."""
        (own, *rest), (chosen, *parts), (may, *masks) = self._rows(params, action, mask)
        total = self.gate.log_prob(own, chosen, may)
        for index, (node, p, a, m) in enumerate(zip(self.options, rest, parts, masks, strict=True)):
            taken = chosen[..., 0] == index
            total = total + torch.where(taken, node.log_prob(p, a, m), 0.0)
        return total

    def entropy(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy in nats of the choice and of what is chosen."""
        (own, *rest), _, (may, *masks) = self._rows(params, None, mask)
        log_probs = masked_log_softmax(own, may)
        inner = [n.entropy(p, m) for n, p, m in zip(self.options, rest, masks, strict=True)]
        return categorical_entropy(log_probs) + (log_probs.exp() * torch.stack(inner, -1)).sum(-1)

    def sample(
        self,
        params: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw latent actions, one for every option."""
        rows, _, masks = self._rows(params, None, mask)
        each = zip(self.nodes, rows, masks, strict=True)
        return torch.cat([node.sample(p, m, generator) for node, p, m in each], -1)

    def mode(self, params: Tensor, mask: Tensor | None = None) -> Tensor:
        """The likeliest choice, and the likeliest of what is chosen."""
        rows, _, masks = self._rows(params, None, mask)
        each = zip(self.nodes, rows, masks, strict=True)
        return torch.cat([node.mode(p, m) for node, p, m in each], -1)

    def _rows(self, params: Tensor, action: Tensor | None, mask: Tensor | None) -> Any:
        masks = list(_split(mask, self.nodes, "masks"))
        for place, own in enumerate(masks[1:], 1):
            if own is not None:  # a row of nothing is not chosen; let it be finite all the same
                masks[place] = own | ~own.any(-1, keepdim=True)
        return (
            _split(params, self.nodes, "params"),
            _split(action, self.nodes, "latent"),
            masks,
        )

    def allowed(self, mask: np.ndarray) -> np.ndarray:
        """Whether masks allow an option, and something within each option that they allow."""
        gate, *cut = np.split(mask, np.cumsum([node.masks for node in self.nodes])[:-1], -1)
        fine = self.gate.allowed(gate)
        for index, (node, own) in enumerate(zip(self.options, cut, strict=True)):
            fine = fine & (~gate[:, index] | node.allowed(own))
        return fine

    def decode(self, action: np.ndarray) -> tuple[tuple[np.int64, Any], ...]:
        """What the environments take, as Gymnasium's `OneOf`: (index, action) for each."""
        gate, *cut = np.split(action, np.cumsum([node.latent for node in self.nodes])[:-1], -1)
        chosen = gate[:, 0].astype(np.int64)
        return tuple(
            (z, only(self.options[z].decode(cut[z][row : row + 1]))) for row, z in enumerate(chosen)
        )


Node = Discrete | Normal | Joint | Choice
KINDS: dict[str, type] = {kind.__name__: kind for kind in (Discrete, Normal, Joint, Choice)}


def only(batch: Any) -> Any:
    """The one action of a batch of one."""
    if isinstance(batch, Mapping):
        return {key: only(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and not (batch and isinstance(batch[0], tuple)):
        return tuple(map(only, batch))
    return batch[0]


def _sum(terms: Any) -> Tensor:
    total: Tensor = sum(terms)
    return total


def _split(rows: Tensor | None, nodes: Sequence[Node], width: str) -> Sequence[Any]:
    """The columns of each node."""
    if rows is None:
        return [None] * len(nodes)
    parts = rows.split([getattr(node, width) for node in nodes], -1)
    return [None if width == "masks" and not part.shape[-1] else part for part in parts]


def _hermite(like: Tensor) -> tuple[Tensor, Tensor]:
    """Points and weights of a mean over a standard normal."""
    points, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE)
    return like.new_tensor(points), like.new_tensor(weights / math.sqrt(2 * math.pi))


def tree_of(space: Any, bound: Literal["clip", "tanh"] = "clip") -> Node:
    """The tree of an action space of Gymnasium.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box of numbers, Tuple, Dict or OneOf.
        bound: What keeps numbers within the bounds of a Box.

    Raises:
        ConfigError: A space of another kind, or a Box of integers.
    """
    inner = partial(tree_of, bound=bound)
    match type(space).__name__:
        case "Discrete":
            return Discrete(int(space.n), int(space.start))
        case "MultiDiscrete" if space.nvec.ndim == 1:
            each = zip(space.nvec.tolist(), space.start.tolist(), strict=True)
            parts = tuple(Discrete(n, start) for n, start in each)
            return Joint(parts, "array", dtype=str(space.dtype))
        case "MultiBinary" if len(space.shape) == 1:
            return Joint((Discrete(2),) * space.shape[0], "array", dtype=str(space.dtype))
        case "Box" if np.issubdtype(space.dtype, np.floating):
            low, high = (tuple(map(float, side.ravel())) for side in (space.low, space.high))
            return Normal(low, high, space.shape, bound)
        case "Tuple":
            return Joint(tuple(map(inner, space.spaces)), "tuple")
        case "Dict":
            return Joint(tuple(map(inner, space.values())), "dict", tuple(space.keys()))
        case "OneOf":
            return Choice(tuple(map(inner, space.spaces)))
    raise ConfigError(
        f"the action space is {shown(space)}; it takes Discrete, MultiDiscrete, MultiBinary, a Box "
        "of floats, and Tuple, Dict and OneOf of them"
    )


def bound_of(node: Node) -> Literal["clip", "tanh"]:
    """What keeps the real numbers of a tree within their bounds; "clip" where it has none."""
    if isinstance(node, Normal):
        return node.bound
    inner = node.parts if isinstance(node, Joint) else ()
    inner = node.options if isinstance(node, Choice) else inner
    return "tanh" if "tanh" in map(bound_of, inner) else "clip"


def to_plain(node: Node) -> dict[str, Any]:
    """The tree as JSON and TOML hold it; `from_plain` gives an equal one."""
    found: dict[str, Any] = {"kind": type(node).__name__}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.name in ("parts", "options"):
            found[field.name] = [to_plain(part) for part in value]
        elif value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def from_plain(values: Mapping[str, Any]) -> Node:
    """The tree of plain values.

    Raises:
        ConfigError: An unknown kind or field.
    """
    fields = dict(values)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        close = nearest(kind, KINDS) if isinstance(kind, str) else ""
        raise ConfigError(f"kind is {shown(kind)};{close} it is one of {', '.join(KINDS)}")
    known = [field.name for field in dataclasses.fields(KINDS[kind])]
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(
                f"{kind}: there is no field {shown(name)};{nearest(name, known)} it takes "
                f"{', '.join(known)}"
            )
        if name in ("parts", "options"):
            fields[name] = tuple(map(from_plain, value))
        elif isinstance(value, list):
            fields[name] = tuple(value)
    made: Node = KINDS[kind](**fields)
    return made
