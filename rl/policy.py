"""A policy: raw observations to parameters of a density over actions, and to a value.

Everything that an answer depends on is inside: the statistics that normalise, the memory, the
tree of actions. What is saved is what acts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rl import actions
from rl.branching import Branch, Branched, Execution, Explanation, exits
from rl.memory import Memory
from rl.normalize import Normalizer, RewardScaler
from rl.presets import RECIPES as RECIPES
from zoo import tensorfile
from zoo.config import build, plain
from zoo.errors import ConfigError, WeightsError, shown
from zoo.files import write_atomically

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What a policy is made of.

    Attributes:
        observation: Numbers of an observation.
        actions: The tree of actions as `rl.actions.to_plain` gives it.
        hidden: Widths of the hidden layers, of the actor and of the critic alike.
        activation: Behind each of them.
        branches: Hidden widths of the actor's branches, of which each state takes one, chosen by a
            linear gate; none is one actor of `hidden`. The critic is always of `hidden`.
        exits: The actor may end after each of its hidden layers, by a linear gate there.
        memory: Size of an LSTM before both; 0 is none.
        log_std: First logarithm of the deviations of real actions.
        normalize_observations: Keep statistics of observations and normalise by them.
        normalize_rewards: Keep statistics of discounted rewards; only training reads them.
    """

    observation: int
    actions: dict[str, Any] = field(default_factory=dict)
    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"
    branches: tuple[tuple[int, ...], ...] = ()
    exits: bool = False
    memory: int = 0
    log_std: float = 0.0
    normalize_observations: bool = False
    normalize_rewards: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {shown(self.activation)}; it is 'tanh' or 'relu'")
        if self.observation < 1 or self.memory < 0 or any(width < 1 for width in self.hidden):
            raise ConfigError(
                f"observation is {self.observation}, memory {self.memory}, hidden "
                f"{shown(self.hidden)}; widths are 1 or more, memory 0 or more"
            )
        if len(self.branches) == 1 or any(width < 1 for each in self.branches for width in each):
            raise ConfigError(
                f"branches are {shown(self.branches)}; give none or at least two lists of widths"
            )
        if self.exits and (self.branches or len(self.hidden) < 2):
            raise ConfigError(
                f"exits need two hidden layers and no branches; hidden is {shown(self.hidden)}, "
                f"branches {shown(self.branches)}"
            )


class Output(NamedTuple):
    """Of a policy, for each step and environment.

    Attributes:
        params: Of the density over actions: (steps, n, params).
        value: Of the state: (steps, n).
        state: Of the memory after the last step: (n, state).
    """

    params: Tensor
    value: Tensor
    state: Tensor


class Policy(nn.Module):
    """Actor and critic, apart but for the memory (core detail 13).

    Args:
        config: What it is made of.

    Attributes:
        actions: The tree of what the environment takes.
        tree: The tree of what is drawn and learned: `actions`, or path and action of a branched
            actor.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.actions = actions.from_plain(config.actions)
        width = config.observation
        self.normalizer = Normalizer(width) if config.normalize_observations else None
        self.scaler = RewardScaler() if config.normalize_rewards else None
        self.memory = Memory(width, config.memory) if config.memory else None
        width = config.memory or width
        activation = ACTIVATIONS[config.activation]
        self.actor = _actor(config, width, self.actions.learned.count(False))
        self.critic = _mlp((width, *config.hidden, 1), activation)
        self.tree: actions.Node = self.actions
        if isinstance(self.actor, Branch):
            self.tree = self.actor.tree(self.actions)
        learned = self.tree.learned
        self._places, self._own_places = _places(learned), _places(self.actions.learned)
        self.log_std = nn.Parameter(torch.empty(learned.count(True))) if any(learned) else None
        self.init_weights()

    def init_weights(self) -> None:
        """Orthogonal weights, biases of 0 (core detail 2).

        Gains: sqrt(2) for hidden layers, 0.01 for the last of the actor and of its gates, 1 for the
        critic's.
        """
        for mlp, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            layers = [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
            ends = mlp.ends() if isinstance(mlp, Branch) else layers[-1:]
            for layer in layers:
                last = any(layer is end for end in ends)
                nn.init.orthogonal_(layer.weight, gain if last else math.sqrt(2))
                nn.init.zeros_(layer.bias)
        if self.memory is not None:
            self.memory.init_weights()
        if self.log_std is not None:
            nn.init.constant_(self.log_std, self.config.log_std)  # continuous detail 2

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the observation to the action; actor and critic share the memory only.

        The last group is empty: there is no head that is exchanged while the rest stays.
        """
        memory = [["memory"]] if self.memory is not None else []
        return [*memory, ["actor", "critic", "log_std"], []]

    def first(self, n: int) -> Tensor:
        """State of the memory before anything was seen: (n, state); without memory (n, 0)."""
        return torch.zeros(n, 0) if self.memory is None else self.memory.first(n)

    def unroll(self, obs: Tensor, state: Tensor, start: Tensor) -> Output:
        """Densities and values of whole sequences: what acting and learning go through.

        Args:
            obs: Raw observations: (steps, n, observation).
            state: Of the memory before the first step: (n, state).
            start: True where an episode starts: (steps, n).
        """
        x, state = self._seen(obs, state, start)
        params = self.actor.dense(x) if isinstance(self.actor, Branch) else self.actor(x)
        return Output(self._with_log_std(params.float()), self._valued(x), state)

    def forward(
        self, observation: Tensor, memory: Tensor | None = None, start: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The deployed program: one step, each row by its own path.

        Args:
            observation: Raw: (batch, observation).
            memory: Before this step: (batch, state); None without memory.
            start: True where an episode starts: (batch,); None where none does.

        Returns:
            Parameters of the density over what the environment takes, (batch, params), of the path
            taken; values, (batch,); with memory also its next state.
        """
        state = observation.new_zeros(observation.shape[0], 0) if memory is None else memory
        begins = torch.zeros_like(observation[:, 0], dtype=torch.bool) if start is None else start
        x, state = self._seen(observation[None], state, begins[None])
        params, value = self._act(x[0]), self._valued(x[0])
        return (params, value) if memory is None else (params, value, state)

    def act(self, obs: Tensor, state: Tensor, start: Tensor, execution: Execution = "auto") -> Any:
        """Parameters (n, params) of the program's action, and the next state of the memory.

        Args:
            obs: Raw observations: (n, observation).
            state: Of the memory: (n, state).
            start: True where an episode starts: (n,).
            execution: Of a branched actor, see `rl.branching.Branch.forward`.
        """
        x, state = self._seen(obs[None], state, start[None])
        return self._act(x[0], execution), state

    def explain(self, obs: Tensor, state: Tensor | None = None) -> list[Explanation]:
        """Which way each raw observation (n, observation) goes, and by what margin.

        Raises:
            ConfigError: The actor has no branches.
        """
        if not isinstance(self.actor, Branch):
            raise ConfigError("this policy has no branches; set branches or exits of its config")
        state = self.first(len(obs)) if state is None else state
        x, _ = self._seen(obs[None], state, torch.zeros(1, len(obs), dtype=torch.bool))
        return self.actor.explain(x[0])

    def taken(self, latent: Tensor) -> Tensor:
        """What the environment is given, of latent rows of `tree`: rows of `actions`."""
        return self.tree.taken(latent) if isinstance(self.tree, Branched) else latent

    def _seen(self, obs: Tensor, state: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        x = obs if self.normalizer is None else self.normalizer(obs)
        return (x, state) if self.memory is None else self.memory(x, state, start)

    def _valued(self, x: Tensor) -> Tensor:
        value: Tensor = self.critic(x).squeeze(-1).float()
        return value

    def _with_log_std(self, params: Tensor) -> Tensor:
        if self.log_std is None:
            return params
        same = self.log_std.expand(*params.shape[:-1], -1)
        return torch.cat((params, same), -1)[..., self._places]

    def _act(self, x: Tensor, execution: Execution = "auto") -> Tensor:
        """Parameters of `actions`; of a branched actor only the path's own are computed.

        Deviations of real actions are of no consequence to the program; branches share the first.
        """
        if not isinstance(self.actor, Branch):
            return self._with_log_std(self.actor(x).float())
        params: Tensor = self.actor(x, execution).float()
        if self.log_std is None:
            return params
        own = self.log_std[: self.actions.learned.count(True)].expand(x.shape[0], -1)
        found: Tensor = torch.cat((params, own), -1)[:, self._own_places]
        return found

    def value(self, obs: Tensor, state: Tensor) -> Tensor:
        """Values of observations (n, observation) that go on from `state`: (n,)."""
        x, _ = self._seen(obs[None], state, torch.zeros(1, len(obs), dtype=torch.bool))
        return self._valued(x[0])


def _places(learned: tuple[bool, ...]) -> list[int]:
    """Of each parameter, where it is once those that are alike in every state stand last."""
    order = sorted(range(len(learned)), key=lambda place: learned[place])
    return sorted(range(len(order)), key=order.__getitem__)


def _actor(config: PolicyConfig, width: int, out: int) -> nn.Module:
    activation, hidden = ACTIVATIONS[config.activation], config.hidden
    if config.branches:
        branches = [_mlp((width, *each, out), activation) for each in config.branches]
        return Branch(nn.Linear(width, len(branches)), branches)
    if config.exits:
        before = (width, *hidden[:-1])
        stages = [
            nn.Sequential(nn.Linear(a, b), activation())
            for a, b in zip(before, hidden, strict=True)
        ]
        heads = [nn.Linear(b, out) for b in hidden]
        return exits(stages, heads, [nn.Linear(b, 2) for b in hidden[:-1]])
    return _mlp((width, *hidden, out), activation)


def _mlp(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def save_policy(policy: Policy, folder: Path) -> None:
    """Write a policy, statistics included: ``policy.safetensors`` and ``policy.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensorfile.write(folder / "policy.safetensors", policy.state_dict())
    text = json.dumps(plain(policy.config), indent=1) + "\n"
    write_atomically(folder / "policy.json", text.encode())


def load_policy(folder: Path) -> Policy:
    """A saved policy, in eval mode.

    Raises:
        ConfigError: ``policy.json`` is not there, or is none.
        WeightsError: ``policy.safetensors`` is damaged or does not fit it.
    """
    try:
        values = json.loads((folder / "policy.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{shown(str(folder))} holds no policy ({type(error).__name__}); give the folder "
            "weights/ of a run"
        ) from error
    policy = Policy(build(PolicyConfig, values, where="policy.json"))
    with (folder / "policy.safetensors").open("rb") as file:
        header = tensorfile.read_header(file, "policy.safetensors")
        tensors = tensorfile.read_tensors(file, header)
    wanted = {name: tensor.shape for name, tensor in policy.state_dict().items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != wanted:
        raise WeightsError(
            "policy.safetensors does not fit policy.json; take both from one folder",
            *(f"{name}: {tuple(shape)}" for name, shape in wanted.items()),
        )
    policy.load_state_dict(tensors)
    return policy.eval()
