"""Branching in two stages: distil a cheap actor, then leave it where it disagrees.

The robust way beside PPO on the joint: a policy that is good already teaches a smaller one, on the
states that the pupil itself visits; a gate then learns in which states both would act differently,
and sends those, and no others, to the teacher.

Source: Ross et al. 2011, https://arxiv.org/abs/1011.0686 (DAgger), for whose states are learned on;
    Hinton et al. 2015, https://arxiv.org/abs/1503.02531, for densities as targets.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl.actions import Discrete
from rl.branching import Branch
from rl.envs import Vector
from rl.policy import Policy
from zoo.errors import ConfigError


def distil(
    teacher: Policy,
    vector: Vector,
    hidden: tuple[int, ...],
    *,
    rounds: int = 8,
    steps: int = 128,
    epochs: int = 40,
    lr: float = 3e-3,
    seed: int = 0,
) -> tuple[Policy, Tensor]:
    """A pupil whose actor has these hidden layers, and the states that it has learned on.

    Args:
        teacher: One choice of several, without memory or branches.
        vector: Environments that the teacher knows; they go on from where they are.
        hidden: Widths of the pupil's actor; none is a linear one.
        rounds: Of visiting states and learning on all of them. In the first the teacher acts.
        steps: Of every environment in a round.
        epochs: Passes over the states in a round.
        lr: Learning rate of Adam.
        seed: Of the pupil's weights and the order of states.

    Returns:
        The pupil, with the teacher's critic and statistics; states (n, observation), raw.

    Raises:
        ConfigError: The teacher's actions are no single choice, or it has memory or branches.
    """
    if not isinstance(teacher.tree, Discrete) or teacher.memory is not None:
        raise ConfigError("distil takes a teacher of one discrete action, without memory, branches")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pupil = Policy(replace(teacher.config, hidden=hidden))
    pupil.critic = teacher.critic  # is not learned here
    if teacher.normalizer is not None and pupil.normalizer is not None:
        pupil.normalizer.load_state_dict(teacher.normalizer.state_dict())
    optimizer = torch.optim.Adam(pupil.actor.parameters(), lr)
    seen = torch.empty(0, teacher.config.observation)
    for number in range(rounds):
        visited = _visit(teacher if number == 0 else pupil, vector, steps, generator)
        seen = torch.cat((seen, visited))
        with torch.no_grad():
            wanted = F.log_softmax(_logits(teacher, seen), -1)
        for _ in range(epochs):
            for rows in torch.randperm(len(seen), generator=generator).split(1024):
                own = F.log_softmax(_logits(pupil, seen[rows]), -1)
                loss = F.kl_div(own, wanted[rows], reduction="batchmean", log_target=True)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return pupil, seen


def exit_where_alike(
    teacher: Policy,
    pupil: Policy,
    states: Tensor,
    *,
    missed: float = 0.02,
    epochs: int = 200,
    lr: float = 0.05,
) -> Policy:
    """One policy of both: the pupil's actor first, the teacher's where they would differ.

    Args:
        teacher: As `distil` takes it.
        pupil: What `distil` gave.
        states: To learn on which states they differ: (n, observation), raw.
        missed: Share of the states where both differ that the gate may leave to the pupil; its
            threshold is set by that.
        epochs: Steps of Adam on all states.
        lr: Learning rate.

    Returns:
        A policy with two branches: 0 is the pupil's actor, 1 the teacher's.

    Raises:
        ConfigError: `missed` is not in [0, 1).
    """
    if not 0 <= missed < 1:
        raise ConfigError(f"missed is {missed}; it takes 0 or more, less than 1")
    both = Policy(replace(teacher.config, branches=(pupil.config.hidden, teacher.config.hidden)))
    both.critic, both.normalizer = teacher.critic, teacher.normalizer
    assert isinstance(both.actor, Branch)
    both.actor.branches[0], both.actor.branches[1] = pupil.actor, teacher.actor
    gate = both.actor.gate
    assert isinstance(gate, nn.Linear)
    with torch.no_grad():
        x = states if teacher.normalizer is None else teacher.normalizer(states)
        differ = _logits(teacher, states).argmax(-1) != _logits(pupil, states).argmax(-1)
    optimizer = torch.optim.Adam(gate.parameters(), lr)
    # Both kinds of states weigh the same: where the pupil is good, they differ in few.
    share = differ.float().mean().clamp(1e-6, 1 - 1e-6)
    weight = torch.where(differ, 0.5 / share, 0.5 / (1 - share))
    for _ in range(epochs):
        logits = gate(x)
        loss = F.binary_cross_entropy_with_logits(
            logits[:, 1] - logits[:, 0], differ.float(), weight
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = gate(x)
        score = (logits[:, 1] - logits[:, 0])[differ]
        if len(score):  # the threshold that misses no more than allowed
            gate.bias[1] -= score.sort().values[int(missed * len(score))] - 1e-6
        else:
            gate.bias[0] += (logits[:, 1] - logits[:, 0]).max() + 1
    return both.eval()


@torch.no_grad()
def _visit(policy: Policy, vector: Vector, steps: int, generator: torch.Generator) -> Tensor:
    """States that a policy comes through: (steps * n, observation)."""
    found = []
    for _ in range(steps):
        obs = torch.from_numpy(vector.obs)
        found.append(obs)
        mask = None if vector.mask is None else torch.from_numpy(vector.mask)
        vector.step(policy.tree.sample(_logits(policy, obs), mask, generator).numpy())
    return torch.cat(found)


def _logits(policy: Policy, obs: Tensor) -> Tensor:
    logits: Tensor = policy(obs)[0]
    return logits
