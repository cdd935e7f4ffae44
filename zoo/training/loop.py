"""The one supervised loop: microbatches, reduction, clipping, step, schedule, average; then again.

What makes a resumed run equal to an unbroken one, bit for bit: data are a pure function of (seed,
epoch, index), the noise of a step is one of (seed, step, rank), and everything else that changes is
in `Run.state`.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.errors import ConfigError, NonFiniteError, nearest, shown
from zoo.training import checkpoint, distributed
from zoo.training.mixing import mix
from zoo.training.precision import first_bad_layer
from zoo.training.schedules import factor
from zoo.training.state import (
    Batch,
    Interrupted,
    Run,
    Statistics,
    finite,
    noise_state,
    seed_noise,
)

if TYPE_CHECKING:
    from zoo.data.loader import Step
    from zoo.training.distributed import Stop
    from zoo.training.tracking import Progress, Tracker

LOG_EVERY = 10  # steps between two lines of metrics.jsonl
SKIPS_IN_A_ROW = 20  # non-finite steps after which a run that skips them ends all the same
SHOWN_ITEMS = 8  # items that the report of a non-finite step names


def fit(run: Run, stop: Stop, trackers: Tracker, progress: Progress) -> None:
    """Train to the end, evaluating and saving on the way; goes on where the run stands.

    Raises:
        NonFiniteError: A loss or a gradient is not finite and the recipe does not skip that, or
            not so many; or the state to be saved is not finite.
        Interrupted: The process was asked to end; there is a checkpoint of this very step.
    """
    run.wrapped.train()
    steps: Any = run.batches.steps(run.position.step)
    with closing(steps):
        while True:
            run.settle()
            if run.evaluate and run.due(run.recipe.evaluate_every):
                evaluate(run, trackers, progress)
            if run.due(run.recipe.checkpoint_every):
                save(run)
            if run.finished:
                return
            if stop.wanted():
                save(run)
                raise Interrupted
            train_step(run, next(steps))
            log(run, trackers, progress)


def train_step(run: Run, step: Step) -> None:
    """One batch: the gradient of the mean loss over all its items on all ranks, and an update.

    Raises:
        NonFiniteError: See `fit`.
    """
    recipe, position = run.recipe, run.position
    set_rates(run)
    seed_noise(recipe.seed, step.number)
    statistics = None if run.must_stop else Statistics(run.model)
    batches = [taught(run, mixed(run, on_device(run, batch))) for batch in step.batches]
    count = count_items(run, step, batches)
    share = run.shares / max(count, 1)  # the reduction takes a mean over the ranks
    passes = [doubled(run, batch, share) for batch in batches] + fillers(run, len(batches))
    loss_sum = accumulate(run, passes, share)
    parameters = list(run.model.parameters())
    norm_of = run.stages.total_norm if run.stages else nn.utils.get_total_norm
    stepped = run.precision.step(run.optimizer, parameters, recipe.clip_norm, norm_of)
    run.norm = stepped.norm
    run.items += step.items
    if stepped.skipped:
        skip(run, step, batches, statistics)
    else:
        (total,) = distributed.all_sum([loss_sum.item()])
        position.loss_sum += total
        position.loss_count += count
        position.updates += 1
        position.skipped_in_a_row = 0
        if run.ema:
            run.ema.update(run.model)
    run.optimizer.zero_grad()
    position.step += 1


def accumulate(run: Run, passes: list[tuple[dict[str, Tensor], float]], share: float) -> Tensor:
    """Add up the gradients of all passes; gives the sum of the losses that this rank computes.

    Args:
        run: The model and its precision.
        passes: Microbatches with the weights of their losses.
        share: Weight of one item.
    """
    losses = torch.zeros((), device=run.device)

    def weighted(model: Any, number: int) -> Tensor:
        batch, weight = passes[number]
        loss = run.loss(model, batch)
        losses.add_(loss.detach().float() * (weight / share))
        # Times NaN if it is not finite: then so is the gradient, on every rank.
        return run.precision.scale_up(loss * (weight + 0 * loss.detach()))

    if run.stages:
        microbatches = [batch for batch, _ in passes]
        run.stages.backward(microbatches, lambda output, i: weighted(lambda **_: output, i))
        return losses
    for number in range(len(passes)):
        with distributed.sync_gradients(run.wrapped, last=number == len(passes) - 1):
            weighted(run.wrapped, number).backward()
    return losses


def skip(
    run: Run, step: Step, batches: list[dict[str, Tensor]], statistics: Statistics | None
) -> None:
    """Count a step that changed nothing; raise where that is not allowed."""
    run.position.skipped += 1
    run.position.skipped_in_a_row += 1
    if statistics is None or run.position.skipped_in_a_row >= SKIPS_IN_A_ROW:
        raise NonFiniteError(*report(run, step, batches))
    statistics.restore()


def set_rates(run: Run) -> None:
    """Learning rates of the next update."""
    now = factor(run.recipe.schedule, run.position.updates, run.total)
    if run.lowering:
        now = run.lowering.factor
    for group, rate in zip(run.optimizer.param_groups, run.rates, strict=True):
        group["lr"] = rate * now


def count_items(run: Run, step: Step, batches: list[dict[str, Tensor]]) -> int:
    """What the loss of a step is divided by: its items on all ranks, or what the task counts."""
    counting = getattr(run.task, "count", None)
    if counting is None:
        return step.items
    count = sum(int(counting(batch)) for batch in batches)
    return distributed.all_sum([count])[0] if run.shares > 1 else count


def on_device(run: Run, batch: Batch) -> dict[str, Tensor]:
    """The batch where the model is."""
    moved = {n: t.to(run.device, non_blocking=True) for n, t in batch.items()}
    if run.recipe.channels_last:
        images = {name: tensor for name, tensor in moved.items() if tensor.ndim == 4}
        last = torch.channels_last
        moved |= {name: image.contiguous(memory_format=last) for name, image in images.items()}
    return moved


def mixed(run: Run, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch after mixup or cutmix, if the recipe wants one."""
    recipe = run.recipe
    if not (recipe.mixup or recipe.cutmix):
        return batch
    classes = int(run.model.config.num_classes)  # type: ignore[union-attr, arg-type]
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    image, target = mix(
        batch["image"],
        batch["target"],
        classes,
        mixup=recipe.mixup,
        cutmix=recipe.cutmix,
        generator=generator,
    )
    return {**batch, "image": image, "target": target}


def taught(run: Run, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with the teacher's targets, if the recipe names one."""
    return {**batch, "target": run.teacher.targets(batch)} if run.teacher else batch


def doubled(run: Run, batch: dict[str, Tensor], weight: float) -> tuple[dict[str, Tensor], float]:
    """A pass of a microbatch with the weight of its loss.

    A single item stands there twice at half the weight where there are batch norms, which take no
    single value: the last batch of an epoch may have one item.
    """
    if not run.has_norms or len(next(iter(batch.values()))) > 1:
        return batch, weight
    return {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}, weight / 2


def fillers(run: Run, passes: int) -> list[tuple[dict[str, Tensor], float]]:
    """Passes without weight for a rank that has too few, since all reduce their gradients together.

    One pass is enough where gradients are reduced at its end; parameters that are sharded are
    gathered in each.
    """
    world, sharded = distributed.world_size(), run.recipe.strategy == "fsdp"
    wanted = run.recipe.microbatches if sharded and world > 1 else 1
    if passes >= wanted:
        return []
    return [doubled(run, on_device(run, run.batches.filler()), 0.0)] * (wanted - passes)


def report(run: Run, step: Step, batches: list[dict[str, Tensor]]) -> tuple[str, ...]:
    """What went wrong in a non-finite step: the layer, and the items it met."""
    what, items = "a gradient is not finite", [i for part in step.indices for i in part]
    bad = [n for n, p in run.model.named_parameters() if p.grad is not None and not finite(p.grad)]
    if bad:
        what += f", first that of {bad[-1]}"  # a backward pass begins at the end
    if run.recipe.strategy == "ddp":  # else one rank alone cannot run the model
        for batch, indices in zip(batches, step.indices, strict=False):
            seed_noise(run.recipe.seed, step.number)
            again = partial(run.loss, run.model, batch)
            layer = first_bad_layer(run.model, again)
            if layer is not None or not finite(again()):
                what = f"the loss is not finite, first bad layer {layer or 'the loss itself'}"
                items = indices
                break
    names = [run.batches.rows.where(index) for index in items]
    more = f" and {len(names) - SHOWN_ITEMS} more" if len(names) > SHOWN_ITEMS else ""
    skips = "" if run.must_stop else f", the {SKIPS_IN_A_ROW}th time in a row"
    return (
        f"step {step.number}: {what}{skips}; lower the learning rate, clip gradients (clip_norm), "
        "or set nonfinite to skip",
        f"items: {', '.join(names[:SHOWN_ITEMS])}{more}",
        f"the last good checkpoint: {run.saved if run.saved is not None else 'none'}",
    )


def log(run: Run, trackers: Tracker, progress: Progress) -> None:
    """Every ten steps a line: means since the last one."""
    position = run.position
    if position.step % LOG_EVERY and not run.finished:
        return
    now = time.monotonic()
    seconds = max(now - run.began, 1e-9)
    values: dict[str, float] = {"epoch": round(run.epoch, 6)}
    if position.loss_count:
        values["loss"] = position.loss_sum / position.loss_count
    values["lr"] = max(group["lr"] for group in run.optimizer.param_groups)
    values["norm"] = run.norm
    if position.skipped:
        values["skipped"] = position.skipped
    values["items_per_s"] = round(run.items / seconds, 2)
    values["wait"] = round((run.batches.wait - run.waited) / seconds, 4)
    position.loss_sum, position.loss_count, run.items = 0.0, 0, 0
    run.began, run.waited = now, run.batches.wait
    trackers.log(position.step, values)
    position.lines += 1
    progress.show(position.step, {k: v for k, v in values.items() if k in ("epoch", "loss")})


def evaluate(run: Run, trackers: Tracker, progress: Progress) -> None:
    """Measure the model, or the average of its weights, and remember which step was the best.

    Raises:
        Interrupted: The process was asked to end meanwhile; a resumed run measures again.
    """
    assert run.evaluate is not None
    recipe, position = run.recipe, run.position
    if position.evaluated == position.step:
        return
    began = time.monotonic()
    run.share_statistics()
    try:
        with run.averaged():
            measured = run.evaluate(run.answering)
    except Interrupted:
        save(run)
        raise
    metric = recipe.metric or next(iter(measured))
    if metric not in measured:
        raise ConfigError(
            f"metric is {shown(metric)};{nearest(metric, measured)} {run.task.name} measures "
            f"{', '.join(measured)}"
        )
    value = measured[metric] * (-1 if metric in getattr(run.task, "lower_is_better", ()) else 1)
    position.evaluated, position.measured = position.step, measured
    run.saved = None  # an interrupted evaluation has left a checkpoint without its outcome
    if run.lowering:
        run.lowering.measured(value)
    if not math.isnan(value) and (position.best is None or value > position.best):
        position.best, position.best_step, position.stale = value, position.step, 0
    else:
        position.stale += 1
    values = {f"validation/{name}": number for name, number in measured.items()}
    trackers.log(position.step, {"epoch": round(run.epoch, 6), **values})
    position.lines += 1
    progress.show(position.step, values)
    run.began += time.monotonic() - began  # no training meanwhile


def save(run: Run) -> None:
    """Write a checkpoint of this step, unless there is one.

    Raises:
        NonFiniteError: The state is poisoned; the last good checkpoint stays.
    """
    position = run.position
    if run.saved == position.step:
        return
    state = run.state()
    floats = {n: t for n, t in state["model"].items() if t.is_floating_point() and not t.is_meta}
    bad = next((name for name, tensor in floats.items() if not finite(tensor)), None)
    for name in filter(None, distributed.gather(bad)):  # each rank knows its own layers alone
        raise NonFiniteError(
            f"step {position.step}: {name} is not finite and nothing is saved; lower the "
            "learning rate or clip gradients (clip_norm)",
            f"the last good checkpoint: {run.saved if run.saved is not None else 'none'}",
        )
    checkpoint.save(
        run.folder / "checkpoints",
        position.step,
        state,
        keep=run.recipe.keep,
        best=position.best_step,
        part=noise_state(run.device),
    )
    run.saved = position.step
