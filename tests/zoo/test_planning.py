"""A plan: what it takes, what it says, and that it comes back from its file as it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from zoo.errors import ConfigError
from zoo.inspection import Request
from zoo.planning import (
    PLAN,
    checked,
    make_plan,
    model_config,
    read_plan,
    restored,
    write_plan,
)
from zoo.training.recipe import SGD, Recipe

CPU = torch.device("cpu")


@pytest.fixture
def request_of(tmp_path):
    """A request for a small network on two colours of eight pictures, one of them broken."""
    rng = np.random.default_rng(0)
    for name, level in (("dark", 50), ("light", 200)):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(level - 40, level + 40, (20, 20, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "photos" / "dark" / "7.png").write_bytes(b"x")
    config = {"width": 8, "depths": (1, 1, 1, 1)}

    def make(**options) -> Request:
        fields = {"config": config, **options.pop("fields", {})}
        place = str(tmp_path / "photos")
        return Request(model="resnet18", data=place, pretrained=False, fields=fields, **options)

    return make


def test_a_plan_says_what_it_will_do(request_of):
    plan = make_plan(request_of(fields={"epochs": 2, "freeze": -1}, lr=0.5), device=CPU)
    text = "\n".join(plan.lines())
    model = zoo.load("resnet18", width=8, depths=(1, 1, 1, 1), num_classes=2)
    count = sum(p.numel() for p in model.parameters())
    for words in (
        f"resnet18, random weights, {count:,} parameters, 130 trained",
        "12 train, 3 validation",
        "2: dark (6), light (6)",
        "7.png",
        "2 epochs = 4 steps, batch 8, AdamW 0.5, Cosine, float32 on cpu",
    ):
        assert words in text
    assert plan.recipe.config == {"width": 8, "depths": (1, 1, 1, 1), "num_classes": 2}
    assert plan.recipe.random_resized_crop == (0.6, 1.0)  # the task's own choice
    assert 0 < plan.step_s < 60
    assert plan.seconds > 4 * plan.step_s
    # Weights, gradients and averages alone take 16 bytes a parameter.
    assert plan.bytes > 16 * plan.parameters


def test_a_plan_comes_back_from_its_file(request_of, tmp_path):
    request = request_of(fields={"optimizer": SGD(lr=0.1), "batch_size": 4})
    plan = make_plan(request, device=CPU)
    assert read_plan(request, tmp_path) == {}
    write_plan(plan, tmp_path / "run")
    again = restored(read_plan(request, tmp_path / "run"), request)
    assert again.plain() == plan.plain()
    assert again.lines() == plan.lines()
    for part in ("train", "validation"):
        rows, same = plan.rows[part], again.rows[part]
        assert [rows[i] for i in range(len(rows))] == [same[i] for i in range(len(same))]


def test_a_plan_of_something_else_is_refused(request_of, tmp_path):
    request = request_of()
    write_plan(make_plan(request, device=CPU), tmp_path / "run")
    with pytest.raises(ConfigError, match="epochs None where it is 3 now"):
        read_plan(request_of(fields={"epochs": 3}), tmp_path / "run")
    (Path(request.data) / "dark" / "8.png").write_bytes(b"new")
    with pytest.raises(ConfigError, match="other files under the same name"):
        read_plan(request, tmp_path / "run")
    held = json.loads((tmp_path / "run" / PLAN).read_text())
    for content in (
        "{",
        json.dumps({**held, "request": 3}),
        json.dumps({"request": held["request"]}),
    ):
        (tmp_path / "run" / PLAN).write_text(content)
        with pytest.raises(ConfigError, match="is damaged; give another --out"):
            read_plan(request, tmp_path / "run")


def test_the_number_of_classes_is_part_of_the_model(request_of):
    request = request_of()
    assert model_config(request, None) == request.fields["config"]
    assert model_config(request, ("a", "b"))["num_classes"] == 2


def test_fields_of_a_recipe_are_checked_by_name_and_type():
    given = {"epochs": 3, "optimizer": SGD(lr=0.1)}
    assert checked(Recipe, given) == {"epochs": 3.0, "optimizer": SGD(lr=0.1)}
    with pytest.raises(ConfigError, match="'epoch'; did you mean 'epochs'"):
        checked(Recipe, {"epoch": 3})
    with pytest.raises(ConfigError, match="epochs is 'x'"):
        checked(Recipe, {"epochs": "x"})
