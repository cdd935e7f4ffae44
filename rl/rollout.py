"""Acting: n environments for a while, and all that is learned from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl.envs import Vector
from rl.policy import Policy


@dataclass
class Rollout:
    """What is learned from: steps of n environments (core 1), each field (steps, n, ...).

    Attributes:
        obs: Raw observations.
        start: True where an episode starts.
        action: Latent, that is not clipped nor squashed (continuous 5).
        log_prob: Of the actions when they were drawn.
        value: Of the observations, as estimated then.
        next_value: Of the true next observations.
        reward: Raw, or scaled.
        terminated: Final states.
        truncated: Episodes cut short.
        valid: False where a row is no sample.
        mask: What was allowed, (steps, n, masks); with no masks, None.
    """

    obs: Tensor
    start: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    mask: Tensor | None


@torch.no_grad()
def rollout(
    policy: Policy, vector: Vector, state: Tensor, steps: int, generator: torch.Generator
) -> tuple[Rollout, Tensor]:
    """Act for a while.

    Args:
        policy: Draws the actions.
        vector: The environments; they go on from where they are.
        state: Of the memory: (n, state).
        steps: Of each environment.
        generator: Of the actions.

    Returns:
        What was seen, and the state of the memory after it.
    """
    n, tree = vector.num_envs, policy.tree
    numbers, flags = (steps, n), torch.empty(steps, n, dtype=torch.bool)
    seen = Rollout(
        obs=torch.empty(*numbers, vector.obs.shape[1]),
        start=flags.clone(),
        action=torch.empty(*numbers, tree.latent),
        log_prob=torch.empty(numbers),
        value=torch.empty(numbers),
        next_value=torch.empty(numbers),
        reward=torch.empty(numbers, dtype=torch.float64),
        terminated=flags.clone(),
        truncated=flags.clone(),
        valid=flags.clone(),
        mask=None if vector.mask is None else torch.empty(*numbers, tree.masks, dtype=torch.bool),
    )
    for t in range(steps):
        seen.obs[t], seen.start[t] = torch.from_numpy(vector.obs), torch.from_numpy(vector.start)
        if seen.mask is not None:
            seen.mask[t] = torch.from_numpy(vector.mask)
        mask = None if seen.mask is None else seen.mask[t]
        params, value, state = policy.unroll(seen.obs[t : t + 1], state, seen.start[t : t + 1])
        seen.value[t] = value[0]
        seen.action[t] = tree.sample(params[0], mask, generator)
        seen.log_prob[t] = tree.log_prob(params[0], seen.action[t], mask)
        step = vector.step(policy.taken(seen.action[t]).numpy())
        for name in ("reward", "terminated", "truncated", "valid"):
            getattr(seen, name)[t] = torch.from_numpy(getattr(step, name))
        cut = np.flatnonzero(step.truncated)
        if len(cut):  # a limit of time ends no state: its value is that of where it was cut
            seen.next_value[t, cut] = policy.value(torch.from_numpy(step.obs[cut]), state[cut])
    after = torch.cat((seen.value[1:], policy.value(torch.from_numpy(vector.obs), state)[None]))
    seen.next_value = torch.where(seen.truncated, seen.next_value, after)
    return seen, state
