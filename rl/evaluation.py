"""How good a policy is: returns of whole episodes on seeds that no training draws from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import torch

from rl.actions import bound_of
from rl.envs import EVALUATION, make
from rl.policy import Policy
from zoo.errors import ConfigError


@torch.no_grad()
def evaluate(
    policy: Policy,
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    episodes: int = 100,
    seed: int = 0,
    *,
    greedy: bool = True,
) -> list[float]:
    """Returns of whole episodes that no training sees, one in each of so many environments.

    Args:
        policy: Its statistics stand still.
        env: Id of Gymnasium, or a class or function that makes one.
        episodes: How many.
        seed: Of the episodes, and of the actions if they are drawn.
        greedy: Take the likeliest action; else draw.

    Raises:
        ConfigError: The environment is not the one the policy was trained for.
        DataError: It raised an error, or allowed no action.
    """
    bound = bound_of(policy.actions)
    vector = make(env, episodes, seed, stream=EVALUATION, bound=bound)
    if vector.actions != policy.actions or vector.features.width != policy.config.observation:
        raise ConfigError(
            f"{vector.name} has {vector.features.width} numbers to see and "
            f"{vector.actions.params} parameters of actions, the policy "
            f"{policy.config.observation} and {policy.actions.params}; give the one it was "
            "trained for"
        )
    generator = torch.Generator().manual_seed(seed)
    state = policy.first(episodes)
    returns: dict[int, float] = {}
    while len(returns) < episodes:
        mask = None if vector.mask is None else torch.from_numpy(vector.mask)
        obs, start = torch.from_numpy(vector.obs), torch.from_numpy(vector.start)
        if greedy:
            params, state = policy.act(obs, state, start)
            action = policy.actions.mode(params, mask)
        else:
            out = policy.unroll(obs[None], state, start[None])
            state = out.state
            action = policy.taken(policy.tree.sample(out.params[0], mask, generator))
        vector.step(action.numpy())
        for episode in vector.episodes:
            returns.setdefault(episode.env, episode.reward)
        vector.episodes.clear()
    vector.close()
    return [returns[env] for env in range(episodes)]
