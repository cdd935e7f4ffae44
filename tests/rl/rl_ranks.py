"""What the processes of test_ranks.py run: ``torchrun rl_ranks.py FOLDER``."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from rl.envs import make
from rl.ppo import Learner, Minibatch, gae, train
from rl.recipe import PPORecipe
from rl.rollout import Rollout, rollout
from rl.state import make_policy
from zoo import tensorfile
from zoo.training import distributed

RECIPE = PPORecipe(
    env="CartPole-v1",
    num_envs=4,
    steps=16,
    total_steps=256,
    minibatches=2,
    epochs=2,
    hidden=(8,),
    normalize_observations=True,
    normalize_rewards=True,
    kl_stop=0.02,
)
BRANCHED = replace(RECIPE, branches=((), (8,)), normalize_rewards=False)


def gradients(recipe: PPORecipe, first: int, last: int) -> dict[str, Tensor]:
    """After a loss on environments first to last of a rollout, and the statistics after it."""
    policy = make_policy(make("CartPole-v1", 4, 0), recipe)
    generator = torch.Generator().manual_seed(1)
    seen, _ = rollout(policy, make("CartPole-v1", 4, 0), policy.first(4), 16, generator)
    rows = (seen.reward, seen.value, seen.next_value, seen.terminated, seen.truncated)
    advantage, returns = gae(
        *(row.double() if row.is_floating_point() else row for row in rows), 0.99, 0.95
    )
    learner = Learner(policy, recipe)
    part = Rollout(
        **{
            f.name: None if (t := getattr(seen, f.name)) is None else t[:, first:last]
            for f in fields(Rollout)
        }
    )
    flat = Rollout(
        **{
            f.name: None if (t := getattr(part, f.name)) is None else t.flatten(0, 1)[None]
            for f in fields(Rollout)
        }
    )
    columns = advantage[:, first:last], returns[:, first:last]
    batch = Minibatch(flat, torch.zeros(0, 0), *(c.float().flatten()[None] for c in columns))
    loss = learner.loss(batch)
    loss.total.backward()
    assert policy.normalizer is not None
    policy.normalizer.update(part.obs[part.valid])
    found = {f"gradient.{n}": p.grad for n, p in policy.named_parameters() if p.grad is not None}
    found |= {f"normalizer.{n}": t for n, t in policy.normalizer.state_dict().items()}
    (kl,) = distributed.all_sum([float(loss.kl)])
    return found | {"kl": torch.tensor(kl / distributed.world_size())}


def main(folder: Path) -> None:
    with distributed.start("cpu"):
        rank = distributed.rank()
        for name, recipe in (("plain", RECIPE), ("branched", BRANCHED)):
            shares = gradients(recipe, 2 * rank, 2 * rank + 2)
            tensorfile.write(folder / f"{name}-{rank}.safetensors", shares, {})
    policy = train(recipe=RECIPE, folder=folder / "run", trackers=()).policy
    tensorfile.write(folder / f"trained-{rank}.safetensors", policy.state_dict(), {})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
