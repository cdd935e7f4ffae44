"""Sides of `zoo.bench` that train: the loop, a bare one, transformers.Trainer, Lightning.

All of a pair train the same model of the zoo on the same items, made by the same task, in batches
of the same size and in the same precision; a job is some steps, and nothing before or after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zoo import registry
from zoo.data.rows import ListRows, Rows
from zoo.errors import require
from zoo.training.loop import log, train_step
from zoo.training.recipe import AdamW, Recipe
from zoo.training.run import make_batches, prepare_model
from zoo.training.state import Run
from zoo.training.tracking import Progress, Silent

Job = Callable[[], Any]

CPU = torch.device("cpu")
STEPS = 8
BASE = Recipe(batch_size=32, optimizer=AdamW(lr=1e-4))
# Name -> model, its configuration, and the recipe.
WORK: dict[str, tuple[str, dict[str, Any], Recipe]] = {
    "cifar10": ("resnet18", {"num_classes": 10}, BASE),
    "sst2": ("all-minilm-l6-v2", {"task": "text-classification"}, BASE),
    "resnet50": ("resnet50", {}, replace(BASE, batch_size=8)),
    "encoder": ("bert-base-uncased", {"task": "text-classification"}, replace(BASE, batch_size=8)),
}


class Prepared:
    """The task of a card, with items that are tensors already: what is timed is the loop."""

    def __init__(self, task: Any) -> None:
        self.loss, self.collate = task.loss, task.collate

    def example(
        self, raw: dict[str, Tensor], target: int, recipe: Any, generator: Any, size: Any = None
    ) -> dict[str, Tensor]:
        """The item with its target."""
        return {**raw, "target": torch.tensor(target)}


def _work(name: str, **changes: Any) -> tuple[nn.Module, Any, Rows, Recipe]:
    """Model, task, rows and recipe."""
    model_name, config, recipe = WORK[name]
    recipe = replace(recipe, **changes)
    torch.manual_seed(0)
    model = registry.load(model_name, **config).train()
    prepare_model(model, recipe, CPU)
    chance, n = np.random.default_rng(0), (STEPS + 2) * recipe.batch_size
    if "image" in registry.card_of(model).inputs:
        side = 32 if name == "cifar10" else 224
        image = chance.normal(size=(n, 3, side, side)).astype(np.float32)
        items: list[Any] = [{"image": torch.from_numpy(pixels)} for pixels in image]
        task = registry.make_task(model)
    else:
        from importlib import import_module

        ids = torch.from_numpy(chance.integers(1000, 2000, (n, 128 if name == "encoder" else 24)))
        items = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
        module, _, cls = registry.card_of(model).task.partition(":")
        task = getattr(import_module(module), cls).__new__(getattr(import_module(module), cls))
    rows = ListRows(name, [(item, i % 2) for i, item in enumerate(items)], ("a", "b"))
    return model, Prepared(task), rows, recipe


def ours(name: str, **changes: Any) -> Callable[[Path], Job]:
    """The loop of the zoo."""

    def side(folder: Path) -> Job:
        model, task, rows, recipe = _work(name, **changes)
        run = Run(model, task, recipe, make_batches(rows, task, recipe, CPU), folder, device=CPU)
        run.settle()
        steps = run.batches.steps(0)
        silent, progress = Silent(), Progress(run.total, wanted=False)

        def job() -> None:
            for _ in range(STEPS):
                train_step(run, next(steps))
                log(run, silent, progress)

        train_step(run, next(steps))  # not counted: the optimiser makes its state
        return job

    return side


def bare(name: str) -> Callable[[Path], Job]:
    """A loop as one writes it by hand."""

    def side(folder: Path) -> Job:
        model, task, rows, recipe = _work(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(batch: dict[str, Tensor]) -> None:
            loss, count = task.loss(model, batch)
            (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()

        batches = _forever(task, rows, recipe)
        step(next(batches))

        def job() -> None:
            for _ in range(STEPS):
                step(next(batches))

        return job

    return side


def lightning(name: str) -> Callable[[Path], Job]:
    """Lightning's Trainer."""

    def side(folder: Path) -> Job:
        pl: Any = require("lightning", "bench")
        model, task, rows, recipe = _work(name)

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
                loss, count = task.loss(self.model, batch)
                mean: Tensor = loss / count
                return mean

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def trainer(steps: int) -> Any:
            return pl.Trainer(
                max_steps=steps,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=str(folder),
            )

        module, loader = Module(), _loader(task, rows, recipe)
        trainer(1).fit(module, loader)
        return lambda: trainer(STEPS).fit(module, loader)

    return side


def transformers(name: str) -> Callable[[Path], Job]:
    """The Trainer of transformers, around the zoo's model."""

    def side(folder: Path) -> Job:
        hf: Any = require("transformers", "bench")
        model, task, rows, recipe = _work(name)

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(
                self, labels: Tensor, num_items_in_batch: Any = None, **inputs: Tensor
            ) -> dict[str, Tensor]:
                loss, count = task.loss(self.model, {**inputs, "target": labels})
                return {"loss": loss / count}

        def collate(items: list[Any]) -> dict[str, Tensor]:
            batch = _collate(task)(items)
            return {**batch, "labels": batch.pop("target")}

        def trainer(steps: int) -> Any:
            arguments = hf.TrainingArguments(
                output_dir=str(folder / "trainer"),
                max_steps=steps,
                per_device_train_batch_size=recipe.batch_size,
                learning_rate=1e-4,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                remove_unused_columns=False,
                logging_strategy="no",
            )
            return hf.Trainer(
                model=wrapped, args=arguments, train_dataset=rows, data_collator=collate
            )

        wrapped = Wrapped()
        trainer(1).train()
        return lambda: trainer(STEPS).train() and None

    return side


def _collate(task: Any) -> Callable[[list[Any]], dict[str, Tensor]]:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = task.collate(
            [task.example(raw, target, None, None) for raw, target in items]
        )
        return batch

    return collate


def _loader(task: Any, rows: Rows, recipe: Recipe) -> DataLoader[Any]:
    return DataLoader(
        rows,  # type: ignore[arg-type]  # anything with a length and items serves
        batch_size=recipe.batch_size,
        shuffle=True,
        collate_fn=_collate(task),
    )


def _forever(task: Any, rows: Rows, recipe: Recipe) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from _loader(task, rows, recipe)
