"""What each rank of test_loop.py does, alone or with another: ``loop_ranks.py OUT SIZES``."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import zoo
from tests.prove.resumes import make_world
from vision.augment import ImageRecipe
from zoo import cards, registry
from zoo.data.loader import Step
from zoo.data.rows import ListRows
from zoo.training import distributed
from zoo.training.evaluation import Evaluation
from zoo.training.loop import train_step
from zoo.training.recipe import SGD, Recipe
from zoo.training.run import make_batches, make_model
from zoo.training.state import Run

CPU = torch.device("cpu")
PLAIN = SGD(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)


class Weighted:
    """A task whose loss is the weight of the model times the target."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return (model(torch.ones_like(batch["target"])) * batch["target"]).sum(), len(batch)


def unequal_ranks() -> float:
    """Gradient where rank 0 has 7 items of loss 1 and rank 1 has 6 of loss 2 (DDP-01)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    rows = ListRows("rows", [(0.0, 0.0)] * 13)
    recipe = Recipe(optimizer=PLAIN, batch_size=13)
    task = Weighted()
    task.example = task.collate = None
    run = Run(model, task, recipe, make_batches(rows, task, recipe, CPU), Path(), device=CPU)
    items = [torch.ones(7, 1), 2 * torch.ones(6, 1)]
    if distributed.world_size() == 2:
        items = [items[distributed.rank()]]
    run.settle()
    train_step(run, Step(0, 0, [{"target": torch.cat(items)}], 13))
    reported = run.position.loss_sum / run.position.loss_count
    assert abs(reported - (1 - model.weight.item())) < 1e-6
    return reported


def one_step(n: int) -> dict[str, Any]:
    """Gradient and counts of one step over n images in two microbatches, and an evaluation."""
    chance = np.random.default_rng(n)
    images = chance.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    rows = ListRows("images", [(image, i % 3) for i, image in enumerate(images)], tuple("abc"))
    recipe = ImageRecipe(optimizer=PLAIN, batch_size=n, microbatches=2)
    model: Any = make_model("tiny.small", recipe)
    model.freeze_norms()  # or an item's gradient would depend on the others
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    task = registry.make_task(model)
    run = Run(model, task, recipe, make_batches(rows, task, recipe, CPU), Path(), device=CPU)
    run.settle()
    train_step(run, next(run.batches.steps(0)))
    seen: list[int] = []
    measure = type(task).measure

    with distributed.Stop() as stop:
        evaluation = Evaluation(model, rows, recipe, stop)
        asked = evaluation._predict

        def predict(raws: list[Any], **options: Any) -> Any:
            answers = asked(raws, **options)
            seen.append(len(answers))
            return answers

        metrics = measure(task, predict, (rows[i] for i in range(n)))
        assert metrics == evaluation(model)
    gradient = {name: (before[name] - p.detach()).tolist() for name, p in model.named_parameters()}
    return {
        "gradient": gradient,
        "loss": run.position.loss_sum,
        "count": run.position.loss_count,
        "metrics": metrics,
        "seen": sum(seen),
    }


def beginnings() -> dict[str, Any]:
    """Fresh weights, equal on all ranks, and augmented images, which differ (DDP-03)."""
    recipe = ImageRecipe(batch_size=16, crop_padding=8, flip=True, cutout=8)
    model = make_model("tiny.small", recipe)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    rows = ListRows("images", [(image, 0)] * 16, tuple("abc"))
    batches = make_batches(rows, registry.make_task(model), recipe, CPU)
    pixels = next(batches.steps(0)).batches[0]["image"]
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "images": [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in pixels],
    }


def main(out: Path, sizes: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    cards.CARDS = out / "cards"
    assert zoo.list_models() == ["tiny"]
    with distributed.start("cpu"):
        found = {
            "unequal": unequal_ranks(),
            "beginnings": distributed.gather(beginnings()),
            "steps": {str(n): one_step(n) for n in sizes},
        }
        if distributed.is_main():
            (out / f"{distributed.world_size()}.json").write_text(json.dumps(found))
    return found


def assert_equal(out: Path, sizes: list[int]) -> None:
    """What two ranks wrote is what one process wrote: gradients to 1e-6, counts exactly."""
    one, two = (json.loads((out / f"{n}.json").read_text()) for n in (1, 2))
    assert abs(one["unequal"] - 19 / 13) < 1e-12
    assert one["unequal"] == two["unequal"]
    first, second = two["beginnings"]
    assert first["weights"] == second["weights"] == one["beginnings"][0]["weights"]
    assert not set(first["images"]) & set(second["images"])
    assert {*first["images"], *second["images"]} == set(one["beginnings"][0]["images"])
    for n in sizes:
        a, b = one["steps"][str(n)], two["steps"][str(n)]
        assert a["count"] == b["count"] == n
        assert a["seen"] == b["seen"] == n
        assert a["metrics"] == b["metrics"]
        assert abs(a["loss"] - b["loss"]) <= 1e-6 * abs(a["loss"])
        for name, gradient in a["gradient"].items():
            worst = np.abs(np.array(gradient) - np.array(b["gradient"][name])).max()
            assert worst <= 1e-6, (n, name)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)  # a hang shows where, and fails
    if not (Path(sys.argv[1]) / "cards").exists():
        make_world(Path(sys.argv[1]))
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
