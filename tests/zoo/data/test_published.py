"""The loader on the published CIFAR-10 and SST-2."""

from __future__ import annotations

import os
import time

import pytest
import torch

import zoo
from nlp.tasks import TextClassification
from vision.augment import ImageRecipe
from vision.images import ImagePreprocessing
from vision.tasks import ImageClassification
from zoo import registry
from zoo.cards import card
from zoo.data.caching import cached
from zoo.data.loader import Batches
from zoo.data.rows import open_rows

pytestmark = [
    pytest.mark.skipif("ZOO_DATA" not in os.environ, reason="needs the published sets"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
CIFAR = ImagePreprocessing(
    size=32,
    resize="shorter",
    crop=32,
    interpolation="bilinear",
    antialias=True,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.247, 0.2435, 0.2616),
)
RECIPE = ImageRecipe(crop_padding=4, flip=True, cutout=8)


def images() -> ImageClassification:
    task = ImageClassification(card("resnet18").with_tag(None), lambda name: None)
    task.preprocessing = CIFAR
    return task


def test_cifar10_by_number_is_cifar10_in_order():
    task = images()
    rows = open_rows("cifar10/test", task)
    assert rows.counts().tolist() == [1000] * 10
    assert rows.classes[:3] == ("airplane", "automobile", "bird")
    examples = task.datasets["cifar10"].examples("test")
    assert all(rows[i] == example for i, example in enumerate(examples))


def test_sst2_by_number_is_sst2_in_order():
    rows = open_rows("sst2/validation", TextClassification)
    assert rows.classes == ("negative", "positive")
    examples = TextClassification.datasets["sst2"].examples("validation")
    assert [rows[i] for i in range(len(rows))] == list(examples)


@pytest.mark.prove
@pytest.mark.parametrize("keep", [False, True], ids=["decoded each time", "cached"])
def test_training_waits_for_data_less_than_8_percent_of_the_time(keep, capsys):
    """ResNet-18, 32 pixels, batch 128, two workers, after the first pass of the workers' start."""
    task, model = images(), zoo.load("resnet18", num_classes=10).train()
    rows = open_rows("cifar10/train", task)
    rows = cached(rows, task.decoded, 1 << 28) if keep else rows

    def make(raw, target, generator):
        return task.example(raw, target, RECIPE, generator)

    batches = Batches(rows, make, task.collate, batch_size=128, seed=0, workers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = batches.steps()
    for step in steps:
        if step.number == 5:
            began, waited = time.perf_counter(), batches.wait
        (batch,) = step.batches
        loss, count = task.loss(model, batch)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 40:
            break
    share = (batches.wait - waited) / (time.perf_counter() - began)
    seconds = (time.perf_counter() - began) / 36
    steps.close()
    with capsys.disabled():
        print(f"\nwaiting for data: {share:.1%} of a step of {seconds:.3f} s")
    assert registry.card_of(model).name == "resnet18"
    assert share < 0.08
