"""A trained network's probabilities as the targets of another."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import zoo
from tests.prove.resumes import difference, make_world, outcome, recipe_for
from vision.images import ImagePreprocessing, decode
from vision.tasks import ImageClassification
from zoo import cards, registry
from zoo.errors import ConfigError
from zoo.training.precision import Precision
from zoo.training.recipe import Recipe
from zoo.training.run import train
from zoo.training.teaching import Teacher

CPU = torch.device("cpu")
LABELS = ("b", "g", "r")
FLOAT = Precision("float32", CPU)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, a card, and the folder of trained weights of it."""
    folder = tmp_path_factory.mktemp("teaching") / "world"
    make_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "CARDS", folder / "cards")
        recipe = recipe_for("plain", folder)
        train("tiny.small", recipe, folder / "teacher", trackers=(), quiet=True)
    return folder


@pytest.fixture(autouse=True)
def _cards(world, monkeypatch):
    monkeypatch.setattr(cards, "CARDS", world / "cards")


@pytest.fixture
def teacher(world):
    return str(world / "teacher" / "weights")


@pytest.fixture
def student(teacher):
    return registry.make_task(zoo.load(teacher))


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_targets_are_labels_and_the_teachers_probabilities_by_their_shares(teacher, student, share):
    model = zoo.load(teacher)
    image = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    probabilities = model(image).softmax(1)
    taught = Teacher(teacher, share, student, LABELS, CPU, FLOAT)
    labels = torch.tensor([0, 2, 1, 0])
    for target in (labels, torch.eye(3)[labels]):
        found = taught.targets({"image": image, "target": target})
        expected = share * probabilities + (1 - share) * torch.eye(3)[labels]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert not found.requires_grad
    assert not taught.model.training


def test_a_teacher_sees_the_image_by_its_own_preparation():
    """The image of another normalisation and size is that of the teacher's own card."""
    usual = ImagePreprocessing(
        size=32,
        resize="shorter",
        crop=32,
        interpolation="bilinear",
        antialias=True,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.4),
    )
    teacher, student = (
        SimpleNamespace(preprocessing=p, in_channels=3)
        for p in (usual, replace(usual, mean=(0.1, 0.2, 0.9), std=(0.5, 0.6, 0.7)))
    )
    pixels = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
    image = decode(pixels).numpy()
    own, other = (
        (torch.from_numpy(image / 255).permute(1, 2, 0) - torch.tensor(p.preprocessing.mean))
        / torch.tensor(p.preprocessing.std)
        for p in (teacher, student)
    )
    batch = {"image": other.permute(2, 0, 1)[None].float()}
    seen = ImageClassification.inputs_of(teacher, batch, student)["image"]
    torch.testing.assert_close(seen[0], own.permute(2, 0, 1).float(), atol=1e-5, rtol=1e-5)
    teacher.preprocessing = replace(usual, size=48, crop=48)
    small = {"image": batch["image"][:, :, :20]}  # an earlier, smaller size of the training
    assert ImageClassification.inputs_of(teacher, small, student)["image"].shape == (1, 3, 30, 48)


@pytest.mark.untyped  # the shape checks draw from Python's own random numbers
def test_a_student_learns_from_the_teacher_alone_and_a_stopped_run_goes_on(
    teacher, world, tmp_path
):
    recipe = recipe_for("plain", world, teacher=teacher, cutmix=1.0, evaluate_every=5)
    whole = train("tiny.small", recipe, tmp_path / "whole", trackers=(), quiet=True)
    untaught = replace(recipe, teacher=None)
    alone = train("tiny.small", untaught, tmp_path / "alone", trackers=(), quiet=True)
    assert difference(outcome(whole.folder), outcome(alone.folder)) is not None
    half = shutil.copytree(whole.folder, tmp_path / "half")
    for path in sorted((half / "checkpoints").iterdir())[-1:]:
        shutil.rmtree(path)
    train("tiny.small", recipe, half, trackers=(), quiet=True)
    assert difference(outcome(whole.folder), outcome(half)) is None


def test_a_teacher_of_other_things_is_refused(teacher, student, tmp_path):
    zoo.save(zoo.load(teacher), tmp_path / "other", labels=("x", "y", "z"))
    with pytest.raises(ConfigError, match=r"knows the classes .* they have to be the same"):
        Teacher(str(tmp_path / "other"), 1.0, student, LABELS, CPU, FLOAT)
    with pytest.raises(ConfigError, match=r"the data have None; they have to be the same"):
        Teacher(teacher, 1.0, student, None, CPU, FLOAT)
    with pytest.raises(ConfigError, match="words takes none, leave it out"):
        Teacher(teacher, 1.0, SimpleNamespace(name="words"), LABELS, CPU, FLOAT)
    with pytest.raises(ConfigError, match="the tasks have to be the same"):
        Teacher(teacher, 1.0, SimpleNamespace(name="words", inputs_of=None), LABELS, CPU, FLOAT)
    for share in (0, 1.1):
        with pytest.raises(ConfigError, match="teacher_share is"):
            Recipe(teacher_share=share)
