"""Proximal policy optimisation, from top to bottom.

How good was what was done (`gae`), what is minimised (`ppo_loss`), how (`Learner.update`), and the
loop (`train`); `rl.rollout` acts, `rl.state` keeps the run. Each detail of the published list
stands at its line by its number: "core 1" to "core 13", "continuous 1" to "continuous 9", "LSTM 1"
to "LSTM 5".

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, and Huang et al. 2022,
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.

Differs from what is usual: an episode that was cut short is no end, the value of the observation it
was cut at counts on; rows that are no samples are left out of everything; observations are
normalised by statistics that stand still while an iteration lasts, so that the first ratio is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from rl.branching import Branch, Branched
from rl.envs import make
from rl.policy import Output, Policy, save_policy
from rl.recipe import PPORecipe
from rl.rollout import Rollout
from rl.state import Result, Training, make_policy
from zoo.data.order import seed_of
from zoo.errors import ConfigError, NonFiniteError
from zoo.training import distributed
from zoo.training.folder import Resume, begin, described, follow
from zoo.training.optimizers import make_optimizer
from zoo.training.precision import Precision
from zoo.training.recipe import Recipe
from zoo.training.schedules import factor
from zoo.training.state import Interrupted
from zoo.training.tracking import Progress, Silent, Tracker

ENVIRONMENTS, ORDER = 2, 3  # streams of a seed; 1 is that of the weights

Env = str | Callable[[], gymnasium.Env[Any, Any]] | gymnasium.vector.VectorEnv[Any, Any, Any]


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (core 5); all arguments and results are (steps, n).

    Args:
        reward: Of each step.
        value: Of the state before it.
        next_value: Of the state after it, whatever the environment showed next.
        terminated: That state is final and has no value.
        truncated: The episode was cut after it: its value counts, nothing behind it does.
        gamma: Discount.
        gae_lambda: Decay of what is seen.

    Source: Schulman et al. 2015, https://arxiv.org/abs/1506.02438, equation 16.
    """
    delta = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * (~(terminated | truncated)).to(delta.dtype)
    advantage = torch.empty_like(delta)
    following = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantage[t] = following = delta[t] + decay[t] * following
    return advantage, advantage + value


def normalized(advantage: Tensor) -> Tensor:
    """Advantages with mean 0 and deviation 1 over all ranks (core 7); one alone stays itself."""
    rows = advantage.double()
    count, total = distributed.all_sum([float(len(rows)), float(rows.sum())])
    if count < 2:
        return advantage
    mean = total / count
    (squares,) = distributed.all_sum([float(((rows - mean) ** 2).sum())])
    deviation = math.sqrt(squares / (count - 1)) + 1e-8
    return ((rows - mean) / deviation).to(advantage.dtype)


class Loss(NamedTuple):
    """What is minimised, and what it is made of (core 10 and 12).

    Attributes:
        total: Of a minibatch.
        policy: The clipped surrogate.
        value: Half the squared error of the values.
        entropy: Mean, in nats.
        kl: Divergence from the policy that acted, by the estimate (r - 1) - log r.
        kl_plain: The same by the estimate -log r.
        clipped: Share of ratios beyond the clip.
    """

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    kl_plain: Tensor
    clipped: Tensor


def ppo_loss(
    log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    *,
    old_log_prob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    returns: Tensor,
    clip: float,
    value_clip: float | None = None,
    value_coef: float = 0.5,
    entropy_coef: float = 0.0,
    count: float | None = None,
) -> Loss:
    """The clipped loss of samples; all tensors are (n,).

    Args:
        log_prob: Of the actions, now.
        entropy: Of the densities, now.
        value: Of the states, now.
        old_log_prob: Of the actions, when they were drawn.
        old_value: Of the states, then.
        advantage: Of the actions.
        returns: What the values should be.
        clip: Change of the ratio that is rewarded.
        value_clip: Change of a value that is rewarded; None clips nothing.
        value_coef: Of half the squared error.
        entropy_coef: Of the entropy.
        count: What sums are divided by, where the samples are not all; n if None.

    Source: Schulman et al. 2017, equations 7 and 9.
    """

    def mean(each: Tensor) -> Tensor:
        return each.sum() / (count or max(len(each), 1))

    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    # core 8: the worse of both, so that no step is rewarded beyond the clip
    surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
    error = (value - returns) ** 2
    if value_clip is not None:  # core 9
        near = old_value + (value - old_value).clamp(-value_clip, value_clip)
        error = torch.max(error, (near - returns) ** 2)
    policy_loss, value_loss, bonus = -mean(surrogate), 0.5 * mean(error), mean(entropy)
    total = policy_loss + value_coef * value_loss - entropy_coef * bonus  # core 10
    with torch.no_grad():  # core 12
        kl, kl_plain = mean(ratio - 1 - log_ratio), mean(-log_ratio)
        clipped = mean(((ratio - 1).abs() > clip).to(ratio.dtype))
    return Loss(total, policy_loss, value_loss, bonus, kl, kl_plain, clipped)


@dataclass
class Minibatch:
    """Samples of a rollout: fields as there, (steps, n, ...), with what they should come to."""

    seen: Rollout
    state: Tensor
    advantage: Tensor
    returns: Tensor


def minibatches(
    whole: Minibatch, parts: int, recurrent: bool, generator: torch.Generator
) -> Iterator[Minibatch]:
    """Every sample once, in another order each time (core 6).

    Without memory the samples are single rows, (1, n, ...), valid ones alone; with it they are
    environments with all their steps (LSTM 4).
    """
    valid = whole.seen.valid
    rows = torch.arange(valid.shape[1]) if recurrent else valid.flatten().nonzero()[:, 0]
    order = rows[torch.randperm(len(rows), generator=generator)]

    def some(tensor: Any, index: Tensor) -> Any:
        if tensor is None:
            return None
        return tensor[:, index] if recurrent else tensor.flatten(0, 1)[index][None]

    for index in order.tensor_split(parts):
        seen = {f.name: some(getattr(whole.seen, f.name), index) for f in fields(Rollout)}
        state = whole.state[index] if recurrent else whole.state.new_zeros(len(index), 0)
        parted = some(whole.advantage, index), some(whole.returns, index)
        yield Minibatch(Rollout(**seen), state, *parted)


class _Unrolled(nn.Module):
    """`Policy.unroll` as the forward that gradients of several ranks go through."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Tensor, state: Tensor, start: Tensor) -> Output:
        return self.policy.unroll(obs, state, start)


class Learner:
    """A policy and all that changes as it learns.

    Args:
        policy: Is trained in place.
        recipe: How.
    """

    def __init__(self, policy: Policy, recipe: PPORecipe) -> None:
        self.policy, self.recipe = policy, recipe
        self.optimizer = make_optimizer(policy, Recipe(optimizer=recipe.optimizer))
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.precision = Precision(recipe.precision, "cpu")
        unrolled = _Unrolled(policy)
        self.wrapped: nn.Module = distributed.wrap(unrolled, "ddp", False, torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(
            seed_of(recipe.seed, ORDER, distributed.rank()) >> 1
        )
        self.iteration = 0

    @property
    def progress(self) -> float:
        """Share of the training that is done, in [0, 1]."""
        return min(1.0, self.iteration / self.recipe.iterations)

    def prepare(self) -> None:
        """What is set anew before each rollout: the temperature of the gates."""
        if isinstance(self.policy.actor, Branch):
            self.policy.actor.set_temperature(self.recipe.pricing.temperature_at(self.progress))

    def loss(self, batch: Minibatch) -> Loss:
        """The loss of a minibatch, of all ranks together."""
        recipe, seen, tree = self.recipe, batch.seen, self.policy.tree
        with self.precision.autocast():
            out: Output = self.wrapped(seen.obs, batch.state, seen.start)
        # Rows that are samples; without memory there are no others here.
        at: Any = 0 if self.policy.memory is None else seen.valid
        mask = None if seen.mask is None else seen.mask[at]
        params, advantage = out.params[at], batch.advantage[at]
        if recipe.normalize_advantages:
            advantage = normalized(advantage)
        (count,) = distributed.all_sum([len(params)])
        clip = factor(recipe.clip_schedule, self.iteration, recipe.iterations)
        loss = ppo_loss(
            tree.log_prob(params, seen.action[at], mask),
            tree.entropy(params, mask),
            out.value[at],
            old_log_prob=seen.log_prob[at],
            old_value=seen.value[at],
            advantage=advantage,
            returns=batch.returns[at],
            clip=recipe.clip * clip,
            value_clip=None if recipe.value_clip is None else recipe.value_clip * clip,
            value_coef=recipe.value_coef,
            entropy_coef=recipe.entropy_coef,
            count=max(count, 1) / distributed.world_size(),  # gradients are averaged over ranks
        )
        if isinstance(tree, Branched):
            bonus = recipe.pricing.bonus(tree, params, self.progress)
            loss = loss._replace(total=loss.total + bonus)
        return loss

    def update(self, seen: Rollout, state: Tensor) -> dict[str, float]:
        """Learn from a rollout; the numbers to watch (core 12).

        Args:
            seen: The rollout.
            state: Of the memory before it (LSTM 5).

        Raises:
            NonFiniteError: A loss or a gradient is not finite.
        """
        recipe = self.recipe
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):  # core 4
            group["lr"] = rate * factor(recipe.schedule, self.iteration, recipe.iterations)
        reward = self._scaled(seen)
        advantage, returns = gae(
            reward,
            seen.value,
            seen.next_value,
            seen.terminated,
            seen.truncated,
            recipe.gamma,
            recipe.gae_lambda,
        )
        whole = Minibatch(seen, state, advantage, returns)
        losses: list[Loss] = []
        for batch in self._batches(whole):
            loss = self.loss(batch)
            losses.append(Loss(*(part.detach() for part in loss)))
            if recipe.kl_stop is not None:  # before the step that would go further
                (kl,) = distributed.all_sum([float(loss.kl)])
                if kl / distributed.world_size() > recipe.kl_stop:
                    break
            self.precision.backward(loss.total)
            # core 11: the norm is that of all parameters together
            stepped = self.precision.step(
                self.optimizer, self.policy.parameters(), recipe.clip_norm
            )
            if stepped.skipped:
                raise NonFiniteError(
                    f"iteration {self.iteration}: the gradient's norm is {stepped.norm} and the "
                    f"loss {float(loss.total):.4g}; lower the learning rate or normalise"
                )
            self.optimizer.zero_grad()
        if self.policy.normalizer is not None:  # continuous 6; it stood still until here
            self.policy.normalizer.update(seen.obs[seen.valid])
        self.iteration += 1
        return self._numbers(losses, seen, returns)

    def _batches(self, whole: Minibatch) -> Iterator[Minibatch]:
        recurrent = self.policy.memory is not None
        for _ in range(self.recipe.epochs):
            yield from minibatches(whole, self.recipe.minibatches, recurrent, self.generator)

    def _scaled(self, seen: Rollout) -> Tensor:
        scaler, tree, all_rewards = self.policy.scaler, self.policy.tree, seen.reward
        if isinstance(tree, Branched):
            pricing = self.recipe.pricing
            all_rewards = pricing.reward(all_rewards, tree, seen.action, self.progress)
        if scaler is None:
            return all_rewards.float()
        for reward, ended, valid in zip(
            all_rewards, seen.terminated | seen.truncated, seen.valid, strict=True
        ):
            scaler.update_sums(reward, ended, valid, self.recipe.gamma)
        scaled: Tensor = scaler(all_rewards)  # continuous 8 and 9
        return scaled

    def _numbers(self, losses: list[Loss], seen: Rollout, returns: Tensor) -> dict[str, float]:
        value, returns, tree = seen.value[seen.valid], returns[seen.valid], self.policy.tree
        means = dict(zip(Loss._fields, torch.tensor(losses).mean(0).tolist(), strict=True))
        spread = returns.var(correction=0)
        cost = tree.cost(seen.action)[seen.valid] if isinstance(tree, Branched) else None
        explained = 1 - (returns - value).var(correction=0) / spread if spread > 0 else spread
        return {
            **{f"loss/{name}": means[name] for name in ("total", "policy", "value")},
            **{name: means[name] for name in ("entropy", "kl", "kl_plain", "clipped")},
            "explained_variance": float(explained),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "updates": float(len(losses)),
            **({} if cost is None else {"cost": float(cost.mean())}),
        }


def train(
    env: Env | None = None,
    recipe: PPORecipe | None = None,
    folder: str | Path | None = None,
    *,
    resume: Resume = "auto",
    trackers: Sequence[str] = (),
    quiet: bool = True,
    name: str | None = None,
) -> Result:
    """Train a policy from nothing, or go on where a run was left.

    Under torchrun each rank has its share of the environments. A resumed run equals an unbroken
    one, bit for bit, if the environments are given by name or by what makes one.

    Args:
        env: Id of Gymnasium, a class or function that makes one, or a vector environment; the
            recipe's if None.
        recipe: How; None is the default one.
        folder: Gets ``recipe.json``, ``metrics.jsonl``, ``checkpoints/`` and ``weights/``; None
            keeps nothing.
        resume: "auto" goes on with what the folder holds, "never" removes it; or a checkpoint.
        trackers: Views of ``metrics.jsonl``, see `zoo.training.tracking`.
        quiet: Show no progress.
        name: Of a card's weights, for ``recipe.json``: `rl.tasks` then writes them. None is the
            environment's, and the policy is written as `rl.policy.load_policy` reads it.

    Raises:
        ConfigError: An unknown environment, spaces that do not fit, or another run's folder.
        DataError: An environment raised an error, or allowed no action.
        NonFiniteError: An observation, a reward, a loss or a gradient is not finite.
        SystemExit: The process was asked to end; there is a checkpoint of this very iteration.
    """
    recipe = recipe or PPORecipe()
    wanted = env if env is not None else recipe.env
    if wanted == "":
        raise ConfigError("no environment is given; give one, or set the recipe's env")
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        with distributed.start("cpu"), distributed.Stop() as stop:
            ranks, rank = distributed.world_size(), distributed.rank()
            if recipe.num_envs % ranks:
                raise ConfigError(
                    f"num_envs is {recipe.num_envs} and there are {ranks} processes; take a "
                    "multiple of that"
                )
            n, seed = recipe.num_envs // ranks, seed_of(recipe.seed, ENVIRONMENTS)
            vector = make(wanted, n, seed, first=rank * n, bound=recipe.bound)
            place = Path(folder).absolute() if folder is not None else None
            run = Training(vector, Learner(make_policy(vector, recipe), recipe), place)
            try:
                return _train(run, stop, resume, trackers, quiet, name)
            finally:
                vector.close()
    finally:
        torch.set_num_threads(threads)


def _train(
    run: Training,
    stop: distributed.Stop,
    resume: Resume,
    trackers: Sequence[str],
    quiet: bool,
    name: str | None,
) -> Result:
    """The loop."""
    recipe = run.recipe
    tracker: Tracker = Silent()
    if run.folder is not None:
        description = described(name or run.vector.name, recipe)
        begin(run, run.folder, description, resume, quiet=quiet)
        tracker = follow(run, run.folder, trackers, description)
    progress = Progress(
        recipe.iterations,
        done=run.position.step,
        items=recipe.num_envs * recipe.steps,
        wanted=not quiet and distributed.is_main(),
    )
    began = monotonic()
    try:
        while not run.finished:
            numbers = run.iterate()
            tracker.log(run.position.step, numbers)
            run.position.lines += 1
            progress.show(run.position.step, numbers)
            asked, every = stop.wanted(), recipe.checkpoint_every
            if run.folder and (asked or run.finished or (every and run.position.step % every == 0)):
                run.save()
            if asked and not run.finished:
                raise Interrupted
    except Interrupted:
        progress.say(f"stopped after iteration {run.position.step}; the same command goes on")
        stop.leave()
    finally:
        progress.close()
        tracker.close()
    policy = run.learner.policy.eval()
    if run.folder is not None and distributed.is_main() and name is None:
        save_policy(policy, run.folder / "weights")
    mean = fmean(run.recent) if run.recent else float("nan")
    return Result(policy, mean, run.samples, run.position.step, monotonic() - began)
