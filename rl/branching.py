"""Dynamic branching: the path through the network is part of the action.

A gate decides row by row which of several modules goes on from here, and the others are not run.
The path z is drawn like an action, and learned like one: pi(z, a | s) = pi(z | s) pi(a | s, z),
so that PPO on the joint is an exact policy gradient and the density that is trained is the program
that is deployed. Compute is priced: a step costs what its path costs.

`Branch` is one gate with its branches, which may be branches again; `exits` nests them so that a
network ends early. `Branched` is the density over path and action, a `rl.actions.Choice` whose
options are all the same action: choices within actions are that class itself.

Source: Fan et al. 2019, https://arxiv.org/abs/1903.01344, for PPO on a choice and what follows it;
    Bengio et al. 2015, https://arxiv.org/abs/1511.06297, for gates learned by policy gradient.

Differs from these: no straight-through estimate and no loss that balances the branches; while it
learns, a small policy computes all branches, which costs less than sorting the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl.actions import Choice, Discrete, Node, categorical_entropy, masked_log_softmax
from zoo.errors import ConfigError, ExportError, shown

Execution = Literal["auto", "if", "group", "dense", "cond"]
EXECUTIONS = ("auto", "if", "group", "dense", "cond")
DENSE_BELOW = 40_000  # multiply-adds of all branches; above, sorting the rows costs less


class Out(NamedTuple):
    """Of rows that went through a branch.

    Attributes:
        path: Choices of all gates in order: (n, paths); of gates not reached they mean nothing.
        value: What the path computed: (n, features).
        log_prob: Of the path: (n,).
        entropy: Of the gates on the path, in nats: (n,).
        cost: Multiply-adds of the path: (n,).
    """

    path: Tensor
    value: Tensor
    log_prob: Tensor
    entropy: Tensor
    cost: Tensor


class Explanation(NamedTuple):
    """Which way a row went, and by how much.

    Attributes:
        path: The branch taken at each gate that was reached.
        margins: By how much the best logit exceeded the next, at each of them.
        cost: Multiply-adds of the path.
    """

    path: tuple[int, ...]
    margins: tuple[float, ...]
    cost: float

    @property
    def margin(self) -> float:
        """The least: a change of any logit by less than half of it changes nothing."""
        return min(self.margins)


def macs(module: nn.Module) -> float:
    """Multiply-adds of one row through all linear layers of a module."""
    return float(sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)))


class Branch(nn.Module):
    """A gate and its branches; every row runs through one of them.

    Args:
        gate: (n, features) to a logit for each branch, (n, branches).
        branches: At least two; each takes what the gate takes, and all give equally many features.
        stem: Runs before both; None is nothing.
        cost: Multiply-adds of each branch; None counts those of linear layers.
        temperature: Divides the logits when a path is drawn; 0 is approached as learning ends.

    Attributes:
        paths: Columns of a path.

    Raises:
        ConfigError: Fewer than two branches, or another number of costs.
    """

    temperature: Tensor

    def __init__(
        self,
        gate: nn.Module,
        branches: Sequence[nn.Module],
        *,
        stem: nn.Module | None = None,
        cost: Sequence[float] | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if len(branches) < 2:
            raise ConfigError(f"a Branch has {len(branches)} branches; give 2 or more")
        if cost is not None and len(cost) != len(branches):
            raise ConfigError(
                f"a Branch of {len(branches)} branches has {len(cost)} costs; give one for each"
            )
        self.stem, self.gate, self.branches = stem, gate, nn.ModuleList(branches)
        self._cost = cost
        self.register_buffer("temperature", torch.tensor(temperature))

    @property
    def nested(self) -> tuple[Branch | None, ...]:
        """Of each branch, itself if it is a gate again."""
        return tuple(b if isinstance(b, Branch) else None for b in self.branches)

    @property
    def paths(self) -> int:
        """Columns of a path: one of this gate, then those of the gates behind it."""
        return 1 + sum(inner.paths for inner in self.nested if inner is not None)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Multiply-adds of a row that takes each branch, up to the next gate."""
        own = macs(self.gate) + (macs(self.stem) if self.stem is not None else 0.0)
        given = self._cost
        if given is None:
            given = [0.0 if isinstance(b, Branch) else macs(b) for b in self.branches]
        return tuple(own + each for each in given)

    def tree(self, action: Node) -> Branched:
        """The density over path and action, whose parameters `dense` gives."""
        options = [action if inner is None else inner.tree(action) for inner in self.nested]
        return Branched(tuple(options), self.costs)

    def ends(self) -> list[nn.Linear]:
        """The last linear layers: of every gate, and of every branch that is none."""
        found = [_last(self.gate)]
        for branch in self.branches:
            found += branch.ends() if isinstance(branch, Branch) else [_last(branch)]
        return [layer for layer in found if layer is not None]

    def set_temperature(self, temperature: float) -> None:
        """Of this gate and all behind it."""
        for module in self.modules():
            if isinstance(module, Branch):
                module.temperature.fill_(temperature)

    def dense(self, x: Tensor) -> Tensor:
        """The logits of all gates and what all branches give, in the order of `tree`.

        Args:
            x: (..., features).
        """
        h = self._stem(x)
        each = [b.dense(h) if isinstance(b, Branch) else b(h) for b in self.branches]
        return torch.cat((self.gate(h) / self.temperature, *each), -1)

    def forward(self, x: Tensor, execution: Execution = "auto") -> Tensor:
        """The program: every row takes its likeliest branch.

        Args:
            x: (..., features).
            execution: "if": row by row, a Python ``if``. "group": rows of a branch together.
                "dense": all branches on all rows. "cond": row by row, `torch.cond`. They differ in
                cost, not in decisions. "auto": "if" for one row, "dense" for small networks, else
                "group"; while exporting "cond" for one row, "group" for an open number.

        Raises:
            ConfigError: No such execution.
            ExportError: A Python ``if`` is traced, which would keep the example's branch only.
        """
        if execution not in EXECUTIONS:
            raise ConfigError(
                f"execution is {shown(execution)}; it is one of {', '.join(EXECUTIONS)}"
            )
        flat = x.reshape(-1, x.shape[-1])
        run = {
            "if": self._if,
            "group": self._group,
            "dense": self._dense,
            "cond": self._cond,
        }[self._chosen(flat) if execution == "auto" else execution]
        return run(flat).reshape(*x.shape[:-1], -1)

    def _chosen(self, x: Tensor) -> str:
        """What "auto" is for these rows."""
        if torch.compiler.is_exporting():
            return "cond" if x.shape[0] == 1 else "group"
        if torch._C._get_tracing_state() is not None:
            return "group"
        if len(x) == 1:
            return "if"
        return "dense" if macs(self) < DENSE_BELOW else "group"

    def _stem(self, x: Tensor) -> Tensor:
        found: Tensor = x if self.stem is None else self.stem(x)
        return found

    def _if(self, x: Tensor) -> Tensor:
        if torch._C._get_tracing_state() is not None:
            raise ExportError(
                "tracing keeps only the branch that the example takes; use torch.export, or "
                "torch.jit.script(Scripted(branch))"
            )
        rows = []
        for row in x.split(1):
            h = self._stem(row)
            rows.append(_run(self.branches[int(self.gate(h).argmax(-1))], h, "if"))
        return torch.cat(rows)

    def _group(self, x: Tensor) -> Tensor:
        h = self._stem(x)
        return self._grouped(h, self.gate(h).argmax(-1))

    def _grouped(self, h: Tensor, z: Tensor) -> Tensor:
        """Each row by its branch z, rows of one branch together."""
        index, values = [], []
        for number, branch in enumerate(self.branches):
            rows = (z == number).nonzero()[:, 0]
            index.append(rows)
            values.append(_run(branch, h[rows], "group"))
        found = torch.cat(values)
        return torch.empty_like(found).index_put((torch.cat(index),), found)

    def _dense(self, x: Tensor) -> Tensor:
        h = self._stem(x)
        each = torch.stack([_run(branch, h, "dense") for branch in self.branches], 1)
        z = self.gate(h).argmax(-1)
        return each.gather(1, z[:, None, None].expand(-1, 1, each.shape[-1]))[:, 0]

    def _cond(self, x: Tensor) -> Tensor:
        rows = [x] if x.shape[0] == 1 else list(x.split(1))
        found = []
        for row in rows:
            h = self._stem(row)
            found.append(self._one_of(0, self.gate(h).argmax(-1)[0], h))
        return torch.cat(found)

    def _one_of(self, first: int, z: Tensor, h: Tensor) -> Tensor:
        """Branch z, which is `first` or a later one."""
        if first == len(self.branches) - 1:
            return _run(self.branches[first], h, "cond")

        def this(h: Tensor, z: Tensor) -> Tensor:
            return _run(self.branches[first], h, "cond")

        def later(h: Tensor, z: Tensor) -> Tensor:
            return self._one_of(first + 1, z, h)

        found: Tensor = torch.cond(z == first, this, later, (h, z))
        return found

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Out:
        """Draw a path for each row (n, features), and run it alone."""
        return self._follow(x, None, generator)

    def evaluate(self, x: Tensor, path: Tensor) -> Out:
        """Run each row (n, features) along a path (n, paths) that was drawn before."""
        return self._follow(x, path, None)

    def _follow(self, x: Tensor, path: Tensor | None, generator: torch.Generator | None) -> Out:
        h = self._stem(x)
        logits = self.gate(h) / self.temperature
        gate = Discrete(len(self.branches))
        chosen = gate.sample(logits, None, generator) if path is None else path[:, :1]
        log_prob, entropy = gate.log_prob(logits, chosen), gate.entropy(logits)
        z, at = chosen[:, 0].long(), 1
        columns = [chosen]
        index, values, cost = [], [], x.new_tensor(self.costs)[z]
        for number, branch in enumerate(self.branches):
            rows = (z == number).nonzero()[:, 0]
            index.append(rows)
            if not isinstance(branch, Branch):
                values.append(branch(h[rows]))
                continue
            own = None if path is None else path[rows, at : at + branch.paths]
            inner = branch._follow(h[rows], own, generator)
            values.append(inner.value)
            columns.append(x.new_zeros(len(x), branch.paths).index_put((rows,), inner.path))
            log_prob = log_prob.index_add(0, rows, inner.log_prob)
            entropy = entropy.index_add(0, rows, inner.entropy)
            cost = cost.index_add(0, rows, inner.cost)
            at += branch.paths
        found = torch.cat(values)
        value = torch.empty_like(found).index_put((torch.cat(index),), found)
        return Out(torch.cat(columns, -1), value, log_prob, entropy, cost)

    @torch.no_grad()
    def explain(self, x: Tensor) -> list[Explanation]:
        """Which way each row (n, features) goes and how surely."""
        return [self._explained(row) for row in x.split(1)]

    def _explained(self, row: Tensor) -> Explanation:
        h = self._stem(row)
        logits = self.gate(h)[0]
        best, second = logits.topk(2).values.tolist()
        z = int(logits.argmax())
        here = Explanation((z,), (best - second,), self.costs[z])
        branch = self.branches[z]
        if not isinstance(branch, Branch):
            return here
        there = branch._explained(h)
        margins, cost = here.margins + there.margins, here.cost + there.cost
        return Explanation(here.path + there.path, margins, cost)


def _run(branch: nn.Module, x: Tensor, execution: Execution) -> Tensor:
    found: Tensor = branch(x, execution) if isinstance(branch, Branch) else branch(x)
    return found


def _last(module: nn.Module) -> nn.Linear | None:
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return layers[-1] if layers else None


def exits(
    stages: Sequence[nn.Module], heads: Sequence[nn.Module], gates: Sequence[nn.Module]
) -> Branch:
    """A network that may end after every stage: branch 0 of each gate ends it there.

    Args:
        stages: One after the other; two or more.
        heads: Of each stage: its features to the output.
        gates: Of each stage but the last: its features to two logits.

    Raises:
        ConfigError: The numbers do not fit.
    """
    if len(stages) < 2 or len(heads) != len(stages) or len(gates) != len(stages) - 1:
        raise ConfigError(
            f"exits take n stages, n heads and n - 1 gates, n from 2; there are {len(stages)}, "
            f"{len(heads)} and {len(gates)}"
        )
    rest: nn.Module = nn.Sequential(stages[-1], heads[-1])
    for stage, head, gate in reversed(list(zip(stages, heads, gates, strict=False))):
        rest = Branch(gate, [head, rest], stem=stage)
    assert isinstance(rest, Branch)
    return rest


class Scripted(nn.Module):
    """A branch for `torch.jit.script`, with the same submodules: one row, a real ``if``.

    Args:
        branch: Is shared, not copied.
    """

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.stem = branch.stem if branch.stem is not None else nn.Identity()
        self.gate = branch.gate
        self.branches = nn.ModuleList(
            Scripted(b) if isinstance(b, Branch) else b for b in branch.branches
        )

    def forward(self, x: Tensor) -> Tensor:
        """One row (1, features) by its likeliest branch."""
        h = self.stem(x)
        z = int(self.gate(h).argmax(-1)[0])
        found: Tensor = h
        for number, branch in enumerate(self.branches):
            if number == z:
                found = branch(h)
        return found


@dataclass(frozen=True)
class Branched(Choice):
    """Path and action: the options are one action, or a `Branched` of it; one mask is for all.

    p(z, a) = p(z) p(a | z) and H = H(z) + sum over z of p(z) H(a | z), as of any choice.

    Attributes:
        costs: Multiply-adds of each option, up to the next gate.
    """

    costs: tuple[float, ...] = ()

    @property
    def action(self) -> Node:
        """What the environment takes."""
        first = self.options[0]
        while isinstance(first, Branched):
            first = first.options[0]
        return first

    @property
    def masks(self) -> int:
        """Bools of a mask: those of the action."""
        return self.action.masks

    @property
    def largest(self) -> float:
        """Multiply-adds of the most expensive path."""
        each = zip(self.options, self.costs, strict=True)
        return max(c + (o.largest if isinstance(o, Branched) else 0.0) for o, c in each)

    def _rows(self, params: Tensor, action: Tensor | None, mask: Tensor | None) -> Any:
        rows, latent, _ = super()._rows(params, action, None)
        return rows, latent, [None, *[mask] * len(self.options)]

    def allowed(self, mask: np.ndarray) -> np.ndarray:
        """Whether masks (n, masks) leave an action."""
        return self.action.allowed(mask)

    def cost(self, latent: Tensor) -> Tensor:
        """Multiply-adds of the paths in latent rows: (..., latent) -> (...)."""
        chosen, *parts = latent.split([node.latent for node in self.nodes], -1)
        total = latent.new_tensor(self.costs)[chosen[..., 0].long()]
        for number, (option, own) in enumerate(zip(self.options, parts, strict=True)):
            if isinstance(option, Branched):
                total = total + torch.where(chosen[..., 0] == number, option.cost(own), 0.0)
        found: Tensor = total
        return found

    def taken(self, latent: Tensor) -> Tensor:
        """The latent action of the branch that was taken: (..., latent) -> (..., its latent)."""
        chosen, *parts = latent.split([node.latent for node in self.nodes], -1)
        each = [
            option.taken(own) if isinstance(option, Branched) else own
            for option, own in zip(self.options, parts, strict=True)
        ]
        z = chosen.long()[..., None].expand(*chosen.shape[:-1], 1, each[0].shape[-1])
        return torch.stack(each, -2).gather(-2, z).squeeze(-2)

    def path_entropy(self, params: Tensor) -> Tensor:
        """Entropy of the path alone, in nats: (..., params) -> (...)."""
        (own, *rest), *_ = self._rows(params, None, None)
        log_probs = masked_log_softmax(own, None)
        total = categorical_entropy(log_probs)
        for number, (option, p) in enumerate(zip(self.options, rest, strict=True)):
            if isinstance(option, Branched):
                total = total + log_probs[..., number].exp() * option.path_entropy(p)
        return total

    def decode(self, action: np.ndarray) -> Any:
        """What the environments take."""
        return self.action.decode(self.taken(torch.from_numpy(action)).numpy())
