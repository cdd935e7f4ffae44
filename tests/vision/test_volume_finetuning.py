"""From a folder of NIfTI files to a trained, measured and saved network, on balls in noise."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

import zoo
from vision.decathlon import FILE
from zoo.cards import list_weights
from zoo.data.loader import Batches
from zoo.errors import DataError
from zoo.finetuning import finetune
from zoo.registry import make_task
from zoo.training.run import Example, recipe_of

SMALL = {"channels": (8, 12, 16), "depths": (1, 1, 1)}
FIELDS = {
    "config": SMALL,
    "epochs": 16,
    "lr": 2e-2,
    "evaluate_every": 64,
    "batch_size": 2,
    "spatial": 0.0,
    "intensity": 0.0,
    "low_resolution": 0.0,
}


def balls(folder: Path, cases: int = 10, *, modality: str = "MRI") -> Path:
    """Cases with two balls, one of them darker, in voxels of 1 x 1 x 2 mm; one case is empty."""
    random = np.random.default_rng(0)
    training = []
    for number in range(cases):
        shape = tuple(int(n) for n in random.integers(14, 19, 3))
        grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
        labels = np.zeros(shape, np.uint8)
        for label, radius in ((1, 4), (2, 3)) if number else ():
            middle = [random.integers(5, n - 5) for n in shape]
            labels[((grid - middle) ** 2).sum(-1) < radius**2] = label
        image = np.array([0, 60, -60])[labels] + 10 * random.normal(size=shape)
        files = {}
        for kind, data in (("image", image.astype(np.int16)), ("label", labels)):
            path = folder / f"{kind}sTr" / f"ball_{number:02}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(data, np.diag([1.0, 1.0, 2.0, 1.0])), path)
            files[kind] = f"./{path.relative_to(folder)}"
        training.append(files)
    content = {
        "name": "Balls",
        "labels": {"0": "background", "1": "bright", "2": "dark"},
        "modality": {"0": modality},
        "training": training,
    }
    (folder / FILE).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("balls")
    return finetune(
        "unet3d",
        balls(place / "Task77_Balls"),
        out=place / "run",
        pretrained=False,
        quiet=True,
        **FIELDS,
    )


def test_the_plan_follows_the_data_and_is_saved_with_the_weights(done) -> None:
    plan = json.loads((done.folder / "plan.json").read_text())
    card = zoo.load(done.weights).card
    assert card.labels == ("background", "bright", "dark")
    assert card.preprocessing["spacing"] == plan["preprocessing"]["spacing"] == [2.0, 1.0, 1.0]
    assert card.preprocessing["window"] == plan["preprocessing"]["window"]
    assert tuple(card.config["channels"]) == SMALL["channels"]  # what is asked for wins
    assert card.config["deep_supervision"]
    assert any(line.startswith("planned: patches of") for line in done.plan.findings)
    assert (len(done.plan.rows["train"]), len(done.plan.rows["validation"])) == (8, 2)


def test_what_was_learnt_is_measured_and_answers(done, tmp_path: Path) -> None:
    assert done.metrics["validation/dice"] > 0.8
    assert {"validation/dice_bright", "validation/hd95_dark"} <= done.metrics.keys()
    assert done.metrics["validation/hd95"] < 10
    assert done.confusion is None
    rows = done.plan.rows["validation"]
    answer = zoo.pipeline(done.weights)(rows.raw(0), out=tmp_path / "mask.nii.gz")
    assert set(answer["volumes_ml"]) == {"bright", "dark"}
    written = nibabel.load(tmp_path / "mask.nii.gz")
    assert written.shape == answer["mask"].shape == nibabel.load(rows.raw(0)).shape


def test_the_same_command_goes_on_with_the_same_plan(done) -> None:
    again = finetune(
        "unet3d",
        done.plan.request.data,
        out=done.folder,
        pretrained=False,
        quiet=True,
        **FIELDS,
    )
    assert again.plan.preprocessing == done.plan.plain()["preprocessing"]
    assert again.metrics == done.metrics


def test_trained_weights_are_fine_tuned_with_their_own_plan(done, tmp_path: Path) -> None:
    more = finetune(
        done.weights,
        done.plan.request.data,
        out=tmp_path / "run",
        quiet=True,
        epochs=0.5,
        lr=1e-4,
    )
    card = zoo.load(more.weights).card
    assert card.preprocessing == zoo.load(done.weights).card.preprocessing
    assert more.metrics["validation/dice"] > 0.7


def test_unreadable_cases_are_named_and_left_out(tmp_path: Path) -> None:
    from zoo.inspection import Request, look

    folder = balls(tmp_path / "Task78", 7)
    (folder / "imagesTr" / "ball_03.nii.gz").write_bytes(b"x")
    (folder / "labelsTr" / "ball_05.nii.gz").unlink()
    task = make_task(zoo.load("unet3d", **SMALL))
    rows, findings, left_out = look(Request(model="unet3d", data=str(folder)), task)
    assert left_out == {"train": [3, 5]}
    text = "\n".join(findings)
    assert "case ball_03" in text
    assert "case ball_05: there is no file" in text
    assert sum(map(len, rows.values())) == 5


def test_intensities_of_ct_are_planned_from_labelled_voxels(tmp_path: Path) -> None:
    task = make_task(zoo.load("unet3d", **SMALL))
    rows = task.open_folder(balls(tmp_path / "Task79", 6, modality="CT"))
    made = task.plan(rows, 2**31, {"channels"})
    low, high = made["preprocessing"]["clip"]
    assert -110 < low < -60 < 60 < high < 110
    assert -60 < made["preprocessing"]["mean"] < 60
    assert 40 < made["preprocessing"]["std"] < 70
    assert set(made["config"]) == {"channels"}


def test_a_case_that_cannot_be_a_sample_is_named(tmp_path: Path) -> None:
    folder = balls(tmp_path / "Task80", 2)
    task = make_task(zoo.load("unet3d", **SMALL))
    rows = task.open_folder(folder)
    Path(rows.raw(1)).write_bytes(b"x")
    recipe = recipe_of("unet3d.hippocampus")
    batches = Batches(rows, Example(task, recipe), task.collate, batch_size=2, seed=0)
    with pytest.raises(DataError, match="case ball_01"):
        next(batches.steps())


@pytest.mark.parametrize("name", ["unet3d.hippocampus", "attention_unet3d.hippocampus"])
def test_the_hippocampus_has_a_recipe_and_a_card_that_fit(name: str) -> None:
    recipe = recipe_of(name)
    model = zoo.load(name, pretrained=False)
    judge = make_task(model)
    assert judge.labels is None or judge.labels == ("background", "anterior", "posterior")
    window = judge.preprocessing.window
    assert all(n % m == 0 for n, m in zip(window, model.size_multiple, strict=True))
    for place in (recipe.data, recipe.validation):
        dataset, _, split = place.partition("/")
        assert split in judge.datasets[dataset].files
    assert all(name.partition(".")[0] in other for other in list_weights(name.partition(".")[0]))
