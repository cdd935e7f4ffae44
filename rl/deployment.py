"""A policy as one graph: raw observations in, what `env.step` takes out.

Statistics, memory, masks, the path through branches, and bounds are inside: whoever runs the file
needs nothing else. Actions of several parts are several outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from rl.actions import Choice, Discrete, Joint, Node, Normal
from rl.policy import Policy
from zoo.cards import Card, TensorSpec


class Acting(nn.Module):
    """The greedy program of a policy.

    Args:
        policy: Is shared, not copied.
        card: Of the policy.
        masked: Take a mask of what is allowed, (batch, masks), too.

    Attributes:
        card: The policy's, with the inputs and outputs of this graph.
        load_report: The policy's.
    """

    def __init__(self, policy: Policy, card: Card, *, masked: bool = False) -> None:
        super().__init__()
        self.policy, self.masked, self.config = policy, masked, policy.config
        self.load_report = getattr(policy, "load_report", None)
        width = policy.config.observation
        inputs = {
            "observation": TensorSpec(dtype="float32", shape=("batch", width), example={"batch": 2})
        }
        outputs = dict(_specs(policy.actions, "action"))
        if masked:
            inputs["mask"] = TensorSpec(
                dtype="bool", shape=("batch", policy.actions.masks), mask=True
            )
        if policy.memory is not None:
            state = TensorSpec(dtype="float32", shape=("batch", policy.first(1).shape[1]))
            inputs |= {"memory": state, "start": TensorSpec(dtype="bool", shape=("batch",))}
            outputs["next_memory"] = replace(state, example={})
        self.card = replace(card, inputs=inputs, outputs=outputs)

    def forward(
        self,
        observation: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        start: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The likeliest actions.

        Args:
            observation: Raw: (batch, observation).
            mask: True where allowed: (batch, masks).
            memory: Before this step, (batch, state); zeros at first.
            start: True where an episode starts: (batch,).

        Returns:
            The action's parts in the order of the card's outputs; with memory its next state.
        """
        params, _, *state = self.policy(observation, memory, start)
        latent = self.policy.actions.mode(params, mask)
        return (*_emitted(self.policy.actions, latent), *state)


def _emitted(node: Node, latent: Tensor) -> Iterator[Tensor]:
    """What `node.decode` gives, as tensors; of a choice the index and all options."""
    match node:
        case Discrete():
            yield latent[:, 0].long() + node.start
        case Normal():
            low, high = latent.new_tensor(node.low), latent.new_tensor(node.high)
            if node.bound == "tanh":
                half = torch.tensor(node.half_width, dtype=torch.float64)
                latent = (low.double() + half * (1 + latent.double().tanh())).float()
            shape = (node.latent,) if node.shape is None else node.shape
            yield latent.clamp(low, high).unflatten(-1, shape)
        case Joint(form="array"):
            each = zip(node.parts, latent.split([p.latent for p in node.parts], -1), strict=True)
            columns = [column for part, own in each for column in _emitted(part, own)]
            yield torch.stack(columns, -1)
        case Joint() | Choice():
            parts = latent.split([part.latent for part in node.nodes], -1)
            for part, own in zip(node.nodes, parts, strict=True):
                yield from _emitted(part, own)


def _specs(node: Node, name: str) -> Iterator[tuple[str, TensorSpec]]:
    """Name and form of each part, in the order of `_emitted`."""
    match node:
        case Discrete():
            yield name, TensorSpec(dtype="int64", shape=("batch",))
        case Normal():
            shape = (node.latent,) if node.shape is None else node.shape
            yield name, TensorSpec(dtype="float32", shape=("batch", *shape))
        case Joint(form="array"):
            yield name, TensorSpec(dtype="int64", shape=("batch", len(node.parts)))
        case Joint():
            names = node.names or tuple(map(str, range(len(node.parts))))
            for key, part in zip(names, node.parts, strict=True):
                yield from _specs(part, f"{name}_{key}")
        case Choice():
            yield f"{name}_index", TensorSpec(dtype="int64", shape=("batch",))
            for number, option in enumerate(node.options):
                yield from _specs(option, f"{name}_{number}")
