"""Reinforcement learning: PPO and policies whose branches are part of the action."""
