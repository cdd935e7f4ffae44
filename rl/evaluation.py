"""How good a policy is: returns of whole episodes on seeds that no training draws from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
from PIL import Image

from rl.actions import bound_of
from rl.envs import EVALUATION, Serial, make, named
from rl.policy import Policy
from zoo.errors import ConfigError, shown


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


@torch.no_grad()
def record(
    policy: Policy,
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    path: Path,
    seed: int = 0,
    *,
    every: int = 2,
) -> int:
    """Write a .gif of the first episode that `evaluate` plays with this seed.

    Args:
        policy: Takes its likeliest actions.
        env: Id of Gymnasium, or what makes an environment that renders rows of RGB.
        path: The file; its folder is made.
        seed: Of the episode.
        every: Steps from one picture to the next.

    Returns:
        Pictures written.

    Raises:
        ConfigError: It is no .gif, or the environment has no pictures.
    """
    if path.suffix != ".gif":
        raise ConfigError(f"video is {shown(str(path))}; it takes the name of a .gif")
    maker = named(env, render_mode="rgb_array") if isinstance(env, str) else env
    vector = Serial([maker], seed, stream=EVALUATION, bound=bound_of(policy.actions))
    state, pictures = policy.first(1), []
    while not vector.episodes:
        if vector.steps % every == 0:
            pictures.append(_picture(vector))
        mask = None if vector.mask is None else torch.from_numpy(vector.mask)
        obs, start = torch.from_numpy(vector.obs), torch.from_numpy(vector.start)
        params, state = policy.act(obs, state, start)
        vector.step(policy.actions.mode(params, mask).numpy())
    fps = vector.envs[0].metadata.get("render_fps", 30)
    vector.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *rest = pictures
    first.save(path, save_all=True, append_images=rest, duration=1000 * every / fps, loop=0)
    return len(pictures)


def _picture(vector: Serial) -> Image.Image:
    frame: Any = None
    try:
        frame = vector.envs[0].render()
    except NotImplementedError:
        pass
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"{vector.name} needs a package: {shown(str(error), 120)}") from error
    if frame is None:
        raise ConfigError(f"{vector.name} renders nothing; its render_mode must be 'rgb_array'")
    return Image.fromarray(frame).convert("P", palette=Image.Palette.ADAPTIVE)
