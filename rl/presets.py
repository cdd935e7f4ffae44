"""Recipes of the policies in the zoo, by the full name of their weights.

Source: the hyperparameters began as those of Stable-Baselines3's zoo,
    https://github.com/DLR-RM/rl-baselines3-zoo, and were changed to learn in fewer CPU-seconds.
"""

from __future__ import annotations

from dataclasses import replace

from rl.recipe import PPORecipe
from zoo.training.recipe import AdamW

CARTPOLE = PPORecipe(
    env="CartPole-v1",
    total_steps=120_000,
    num_envs=32,
    steps=32,
    epochs=8,
    minibatches=4,
    gamma=0.98,
    gae_lambda=0.8,
    optimizer=AdamW(lr=2e-3, eps=1e-5, weight_decay=0.0),
    target=475.0,
)
ACROBOT = replace(
    CARTPOLE,
    env="Acrobot-v1",
    total_steps=250_000,
    steps=64,
    epochs=4,
    minibatches=8,
    gamma=0.99,
    gae_lambda=0.94,
    optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.0),
    normalize_observations=True,
    target=None,
)
MOUNTAINCARCONTINUOUS = replace(
    ACROBOT,
    env="MountainCarContinuous-v0",
    total_steps=400_000,
    steps=128,
    gamma=0.999,
    gae_lambda=0.95,
    log_std=1.0,
    normalize_rewards=True,
    entropy_coef=0.0,
)
PENDULUM = replace(
    CARTPOLE,
    env="Pendulum-v1",
    total_steps=300_000,
    steps=64,
    epochs=10,
    minibatches=8,
    gamma=0.92,
    gae_lambda=0.95,
    optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.0),
    activation="relu",
    normalize_rewards=True,
    target=None,
)
RECIPES: dict[str, PPORecipe] = {
    "ppo-cartpole.v1": CARTPOLE,
    "ppo-acrobot.v1": ACROBOT,
    "ppo-mountaincarcontinuous.v1": MOUNTAINCARCONTINUOUS,
    "ppo-pendulum.v1": PENDULUM,
}
