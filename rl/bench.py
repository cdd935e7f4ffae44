"""Speed of training, side by side with plain loops and libraries, in steps per CPU-second.

All sides learn CartPole-v1 by the same hyperparameters on one thread. CPU-seconds of the process
count, which other programs on the machine disturb far less than seconds of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import gymnasium
import torch
from torch import nn

from rl.envs import make
from rl.ppo import Learner
from rl.recipe import PPORecipe
from rl.state import Training, make_policy
from zoo.errors import require

Iterate = Callable[[], Any]


def recipe_of(num_envs: int) -> PPORecipe:
    """Hyperparameters of a number of environments: those of CleanRL's ppo.py, in larger batches."""
    steps = {4: 128, 64: 64, 1024: 16}[num_envs]
    return PPORecipe(
        env="CartPole-v1",
        num_envs=num_envs,
        steps=steps,
        total_steps=10**7,
        minibatches=4,
        epochs=2 if num_envs == 1024 else 4,
        value_clip=0.2,
        entropy_coef=0.01,
    )


def ours(num_envs: int) -> Iterate:
    """An iteration of `rl.ppo` on Gymnasium's vectorised environment."""
    recipe = recipe_of(num_envs)
    vector = make(gymnasium.make_vec("CartPole-v1", num_envs), num_envs, 0)
    return Training(vector, Learner(make_policy(vector, recipe), recipe), None).iterate


def plain(num_envs: int) -> Iterate:
    """An iteration of a plain loop: `torch.distributions`, tensors converted at every step."""
    recipe, env = recipe_of(num_envs), gymnasium.make_vec("CartPole-v1", num_envs)
    actor = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    critic = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)
    now = torch.as_tensor(env.reset(seed=0)[0])
    done = torch.zeros(num_envs)
    shape = recipe.steps, num_envs

    def iterate() -> None:
        nonlocal now, done
        seen, ended = torch.zeros(*shape, 4), torch.zeros(shape)
        actions, old, values, rewards = (torch.zeros(shape) for _ in range(4))
        for t in range(recipe.steps):
            seen[t], ended[t] = now, done
            with torch.no_grad():
                density = torch.distributions.Categorical(logits=actor(now))
                action = density.sample()
                values[t], old[t] = critic(now).flatten(), density.log_prob(action)
            actions[t] = action
            obs, reward, terminated, truncated, _ = env.step(action.numpy())
            rewards[t] = torch.tensor(reward)
            now, done = torch.as_tensor(obs), torch.as_tensor(terminated | truncated).float()
        with torch.no_grad():
            following, after, trace = critic(now).flatten(), done, torch.zeros(num_envs)
            advantage = torch.zeros(shape)
            for t in reversed(range(recipe.steps)):
                if t < recipe.steps - 1:
                    following, after = values[t + 1], ended[t + 1]
                delta = rewards[t] + 0.99 * following * (1 - after) - values[t]
                advantage[t] = trace = delta + 0.99 * 0.95 * (1 - after) * trace
            returns = advantage + values
        flat = [x.flatten(0, 1) for x in (seen, actions, old, values, advantage, returns)]
        size = recipe.steps * num_envs // recipe.minibatches
        for _ in range(recipe.epochs):
            for rows in torch.randperm(recipe.steps * num_envs).split(size):
                s, a, o, v, adv, r = (x[rows] for x in flat)
                density = torch.distributions.Categorical(logits=actor(s))
                ratio = (density.log_prob(a) - o).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                policy = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
                value = critic(s).flatten()
                near = v + (value - v).clamp(-0.2, 0.2)
                error = torch.max((value - r) ** 2, (near - r) ** 2).mean()
                loss = policy + 0.25 * error - 0.01 * density.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    return iterate


def stable_baselines3(num_envs: int) -> Iterate:
    """An iteration of Stable-Baselines3's PPO on its own vector environment."""
    library = require("stable_baselines3", "bench")
    recipe = recipe_of(num_envs)
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

    model = library.PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", num_envs, seed=0),
        n_steps=recipe.steps,
        batch_size=recipe.steps * num_envs // recipe.minibatches,
        n_epochs=recipe.epochs,
        learning_rate=2.5e-4,
        clip_range_vf=0.2,
        ent_coef=0.01,
        vf_coef=0.25,  # its error is not halved
        device="cpu",
    )
    steps = recipe.steps * num_envs
    return lambda: model.learn(steps, reset_num_timesteps=False)


SIDES: dict[str, Callable[[int], Iterate]] = {
    "refzoo": ours,
    "plain loop": plain,
    "Stable-Baselines3": stable_baselines3,
}


def speeds(num_envs: int, sides: list[str], *, seconds: float = 2.0) -> dict[str, float]:
    """Steps per CPU-second of each side, taken in turn; medians.

    Args:
        num_envs: 4, 64 or 1024.
        sides: Keys of `SIDES`.
        seconds: CPU time of each side, at least.

    Raises:
        MissingPackageError: A library is not installed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        iterates = {side: SIDES[side](num_envs) for side in sides}
        steps = recipe_of(num_envs).steps * num_envs
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for iterate in iterates.values():
            iterate()
        while min(sum(each) for each in taken.values()) < seconds:
            for side, iterate in iterates.items():
                began = time.process_time()
                iterate()
                taken[side].append(time.process_time() - began)
        return {side: steps / median(each) for side, each in taken.items()}
    finally:
        torch.set_num_threads(threads)
