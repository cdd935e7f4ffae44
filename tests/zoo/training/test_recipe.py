from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import get_args

import pytest

from zoo.errors import ConfigError
from zoo.training import recipe as recipes
from zoo.training.recipe import (
    LAMB,
    SGD,
    AdamW,
    Constant,
    Cosine,
    Lion,
    Muon,
    OneCycle,
    Plateau,
    Recipe,
    from_plain,
    to_plain,
)


@dataclass(frozen=True, kw_only=True)
class PictureRecipe(Recipe):
    sizes: tuple[tuple[float, int], ...] = ()
    scale: tuple[float, float] | None = None


@pytest.mark.parametrize("optimizer", get_args(recipes.Optimizer))
@pytest.mark.parametrize("schedule", get_args(recipes.Schedule))
def test_a_recipe_comes_back_from_json(optimizer: type, schedule: type) -> None:
    recipe = PictureRecipe(
        data="cifar10/train",
        config={"depths": [1, 2], "block": "basic"},
        epochs=0.3,
        optimizer=optimizer(lr=0.1 + 0.2),
        schedule=schedule(),
        sizes=((0.5, 48), (1.0, 64)),
        scale=(0.25, 1.0),
        seed=2**40,
    )
    text = json.dumps(to_plain(recipe))
    assert from_plain(PictureRecipe, json.loads(text)) == recipe


def test_a_written_recipe_is_whole() -> None:
    plain = to_plain(Recipe())
    assert set(plain) == {field.name for field in fields(Recipe)}
    assert plain["optimizer"] == {
        "kind": "AdamW",
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }


def test_absent_fields_have_their_defaults() -> None:
    assert from_plain(Recipe, {"epochs": 3}) == replace(Recipe(), epochs=3.0)
    assert from_plain(Recipe, {"optimizer": {"kind": "Lion", "lr": 1}}).optimizer == Lion(lr=1.0)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"epoch": 3}, "r.json has no field 'epoch'; did you mean 'epochs'"),
        ({"epochs": "3"}, "r.json: epochs is '3'; it takes a number"),
        ({"epochs": 0}, "r.json: Recipe: epochs is 0.0; it takes more than 0"),
        ({"epochs": float("nan")}, "r.json: epochs is nan; it takes a finite number"),
        ({"precision": "bf16"}, "r.json: precision is 'bf16'"),
        ({"optimizer": {"kind": "adamw", "lr": 1.0}}, "kind is 'adamw'; did you mean 'AdamW'?"),
        ({"optimizer": {"lr": 1.0}}, "r.json: optimizer.kind is None; it is one of SGD, AdamW"),
        ({"optimizer": {"kind": "AdamW"}}, "r.json: optimizer lacks lr"),
        ({"optimizer": {"kind": "SGD", "lr": "5e-4"}}, "r.json: optimizer: lr is '5e-4'; it takes"),
        ({"optimizer": {"kind": "SGD", "lr": -1}}, "r.json: optimizer: SGD: lr is -1.0; it takes"),
        ({"schedule": {"kind": "Cosine", "warm": 1}}, "r.json: schedule has no field 'warm'"),
        ({"schedule": 3}, "r.json: schedule is 3; it takes a table"),
    ],
)
def test_a_wrong_recipe_names_file_field_and_value(values: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_plain(Recipe, values, where="r.json")
    assert line in error.value.line
    assert error.value.line.startswith("r.json")
    assert len(error.value.line) <= 200


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Recipe(batch_size=0), "batch_size"),
        (lambda: Recipe(microbatches=0), "microbatches"),
        (lambda: Recipe(clip_norm=0.0), "clip_norm"),
        (lambda: Recipe(ema=1.0), "ema"),
        (lambda: Recipe(label_smoothing=1.0), "label_smoothing"),
        (lambda: Recipe(layer_decay=0.0), "layer_decay"),
        (lambda: Recipe(freeze_epochs=-1.0), "freeze_epochs"),
        (lambda: Recipe(workers=-1), "workers"),
        (lambda: Recipe(cache=-0.5), "cache"),
        (lambda: Recipe(evaluate_every=0), "evaluate_every"),
        (lambda: Recipe(keep=0), "keep"),
        (lambda: Recipe(patience=-1), "patience"),
        (lambda: Recipe(seed=-1), "seed"),
        (lambda: SGD(lr=0.1, momentum=0.0), "nesterov"),
        (lambda: AdamW(lr=0.1, betas=(0.9, 1.0)), "betas"),
        (lambda: LAMB(lr=0.1, eps=0.0), "eps"),
        (lambda: Muon(lr=0.1, adam_lr=0.0), "adam_lr"),
        (lambda: Cosine(warmup=1.5), "warmup"),
        (lambda: OneCycle(peak=-0.1), "peak"),
        (lambda: Plateau(factor=1.0), "factor"),
        (lambda: Constant(warmup=-1.0), "warmup"),
    ],
)
def test_every_range_is_checked(make: object, name: str) -> None:
    with pytest.raises(ConfigError, match=rf": {name} is "):
        make()  # type: ignore[operator]


def test_importing_a_recipe_imports_no_torch() -> None:
    code = "import sys, zoo.training.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
