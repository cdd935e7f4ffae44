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
from rl.memory import Memory
from rl.normalize import Normalizer, RewardScaler
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
        memory: Size of an LSTM before both; 0 is none.
        log_std: First logarithm of the deviations of real actions.
        normalize_observations: Keep statistics of observations and normalise by them.
        normalize_rewards: Keep statistics of discounted rewards; only training reads them.
    """

    observation: int
    actions: dict[str, Any] = field(default_factory=dict)
    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"
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
        tree: Of the actions.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.tree = actions.from_plain(config.actions)
        width = config.observation
        self.normalizer = Normalizer(width) if config.normalize_observations else None
        self.scaler = RewardScaler() if config.normalize_rewards else None
        self.memory = Memory(width, config.memory) if config.memory else None
        learned = self.tree.learned
        # Where the head's parameters and those that are alike in every state go.
        order = sorted(range(len(learned)), key=lambda place: learned[place])
        self._order = sorted(range(len(order)), key=order.__getitem__)
        width = config.memory or width
        activation = ACTIVATIONS[config.activation]
        self.actor = _mlp((width, *config.hidden, learned.count(False)), activation)
        self.critic = _mlp((width, *config.hidden, 1), activation)
        self.log_std = nn.Parameter(torch.empty(learned.count(True))) if any(learned) else None
        self.init_weights()

    def init_weights(self) -> None:
        """Orthogonal weights, biases of 0 (core detail 2).

        Gains: sqrt(2) for hidden layers, 0.01 for the actor's last, 1 for the critic's.
        """
        for mlp, last in ((self.actor, 0.01), (self.critic, 1.0)):
            layers = [layer for layer in mlp if isinstance(layer, nn.Linear)]
            for layer in layers:
                gain = last if layer is layers[-1] else math.sqrt(2)
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)
        if self.memory is not None:
            self.memory.init_weights()
        if self.log_std is not None:
            nn.init.constant_(self.log_std, self.config.log_std)  # continuous detail 2

    def first(self, n: int) -> Tensor:
        """State of the memory before anything was seen: (n, state); without memory (n, 0)."""
        return torch.zeros(n, 0) if self.memory is None else self.memory.first(n)

    def forward(self, obs: Tensor, state: Tensor, start: Tensor) -> Output:
        """Densities and values.

        Args:
            obs: Raw observations: (steps, n, observation).
            state: Of the memory before the first step: (n, state).
            start: True where an episode starts: (steps, n).
        """
        x = obs if self.normalizer is None else self.normalizer(obs)
        if self.memory is not None:
            x, state = self.memory(x, state, start)
        params = self.actor(x).float()
        if self.log_std is not None:
            same = self.log_std.expand(*params.shape[:-1], -1)
            params = torch.cat((params, same), -1)[..., self._order]
        return Output(params, self.critic(x).squeeze(-1).float(), state)

    def value(self, obs: Tensor, state: Tensor) -> Tensor:
        """Values of observations (n, observation) that go on from `state`: (n,)."""
        value: Tensor = self(obs[None], state, torch.zeros(1, len(obs), dtype=torch.bool)).value[0]
        return value


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
