"""From a card without files over training to weights of the zoo."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import zoo
from vision.augment import ImageRecipe
from zoo import cards, check, evaluation, registry
from zoo.cards import Metric
from zoo.errors import CardError, ConfigError, WeightsError, WeightsUnavailableError
from zoo.publishing import publish
from zoo.training.folder import state_metrics
from zoo.training.run import train

CARD = """
# a comment that stays
model      = "vision.resnet:ResNet"
task       = "vision.tasks:ImageClassification"
summary    = "A small network."
paper      = "https://arxiv.org/abs/1512.03385"
parameters = 1
head       = ["fc"]

[config]
depths = [1, 1, 1, 1]
width  = 8

[inputs.image]
dtype = "float32"
shape = ["batch", 3, "height", "width"]
example = { batch = 2, height = 32, width = 32 }

[outputs.logits]
dtype = "float32"
shape = ["batch", "num_classes"]

[weights.two]
config  = { num_classes = 2 }
labels  = "two"
licence = "MIT"

[weights.two.preprocessing]
size = 32
resize = "shorter"
crop = 32
interpolation = "bilinear"
antialias = true
mean = [0.5, 0.5, 0.5]
std = [0.2, 0.2, 0.2]
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of cards with weights that are still to be trained."""
    folder = tmp_path / "weights"
    (folder / "labels").mkdir(parents=True)
    (folder / "labels/two.txt").write_text("no\nyes\n")
    (folder / "small.toml").write_text(CARD)
    monkeypatch.setattr(cards, "CARDS", folder)
    return folder


@pytest.fixture
def trained(shelf: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = zoo.load("small.two", pretrained=False)
    return zoo.save(model, tmp_path / "run", labels=("no", "yes"))


def test_weights_that_are_still_to_be_trained_are_planned_and_no_more(shelf: Path) -> None:
    assert zoo.list_weights("small") == []
    assert list(zoo.card("small").planned) == ["two"]
    with pytest.raises(WeightsUnavailableError, match=r"train\.py small\.two makes it"):
        zoo.load("small.two")
    with pytest.raises(WeightsUnavailableError, match=r"train\.py small\.two"):
        zoo.load("small", pretrained="two")
    model = zoo.load("small.two", pretrained=False)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    assert registry.card_of(model).preprocessing["crop"] == 32


def test_what_only_trained_weights_have_is_refused_without_files(shelf: Path) -> None:
    (shelf / "small.toml").write_text(CARD.replace("licence =", "default = true\nlicence ="))
    with pytest.raises(CardError, match="lists no tensors, and yet"):
        zoo.card("small")


def test_published_weights_are_loaded_by_their_name(shelf: Path, trained: Path) -> None:
    path = publish(trained, "small.two")
    assert path == shelf / "small.toml"
    assert "# a comment that stays" in path.read_text()
    before, after = zoo.load(trained), zoo.load("small.two", verify="always")
    for name, tensor in before.state_dict().items():
        parameter = name in dict(before.named_parameters())
        expected = tensor.half().float() if parameter else tensor
        assert torch.equal(after.state_dict()[name], expected), name
    assert zoo.list_weights("small") == ["small.two"]
    assert zoo.pipeline("small.two").task.labels == ("no", "yes")
    table = tomllib.loads(path.read_text())["weights"]["two"]
    assert table["golden"] == "small.two.golden.safetensors"
    assert table["default"]
    assert (shelf / table["golden"]).exists()
    check.check_golden("small")
    publish(trained, "small.two")  # again, over what is there
    assert tomllib.loads(path.read_text())["weights"]["two"] == table


def test_weights_that_begin_with_those_of_another_card_are_published(
    shelf: Path, tmp_path: Path
) -> None:
    (shelf / "labels/two.txt").write_text("yes\nno\n")  # not the order of the folders' names
    torch.manual_seed(0)
    saved = zoo.save(zoo.load("small", width=8, num_classes=5), tmp_path / "body")
    body, *_ = saved.glob("*.safetensors")
    shutil.copy(body, shelf / body.name)
    digest = hashlib.sha256(body.read_bytes()).hexdigest()
    head, _, preprocessing = CARD.partition("[weights.two.preprocessing]")
    (shelf / "body.toml").write_text(
        f"{head.partition('[weights.two]')[0]}[weights.v1]\nlicence = 'Apache-2.0'\n"
        f"config = {{ num_classes = 5 }}\nfiles = [{{ name = '{body.name}', "
        f"size = {body.stat().st_size}, sha256 = '{digest}' }}]\n"
        f"[weights.v1.preprocessing]{preprocessing.replace('crop = 32', 'crop = 24')}"
    )
    for number in range(4):
        place = tmp_path / "data" / ("no", "yes")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (0, 60 * number, 0)).save(place / f"{number}.png")
    recipe = ImageRecipe(
        data=str(tmp_path / "data"), init="body.v1", config={"num_classes": 2}, epochs=1
    )
    result = train("small.two", recipe, tmp_path / "run", trackers=(), quiet=True)
    assert zoo.load(result.weights).card.labels == ("yes", "no")
    assert zoo.load(result.weights).card.preprocessing["crop"] == 32  # not that of the body
    publish(result.weights, "small.two")
    assert zoo.card("small.two").weights["two"].origin["derived_from"] == "body.v1"
    assert zoo.load("small.two").card.labels == ("yes", "no")


def test_another_model_than_the_cards_is_refused(
    shelf: Path, trained: Path, tmp_path: Path
) -> None:
    text = (shelf / "small.toml").read_text()
    with pytest.raises(ConfigError, match=r"write \[weights\.three\] into"):
        publish(trained, "small.three")
    with pytest.raises(ConfigError, match="is not on the card"):
        publish(trained, "small")
    for old, new, what in (
        ("num_classes = 2", "num_classes = 3", "config"),
        ("crop = 32", "crop = 24", "preprocessing"),
    ):
        (shelf / "small.toml").write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=f"the {what} of the folder"):
            publish(trained, "small.two")
    (shelf / "small.toml").write_text(text)
    (shelf / "labels/two.txt").write_text("no\nmaybe\n")
    with pytest.raises(ConfigError, match="the labels of the folder"):
        publish(trained, "small.two")


def test_a_number_of_the_run_is_measured_again_by_the_name(shelf: Path, trained: Path) -> None:
    command = f"python scripts/evaluate.py {trained}"
    number = Metric(name="set/test/top1", value=0.5, n=7, command=command, data_sha256="ab" * 32)
    state_metrics(trained, [number])
    publish(trained, "small.two")
    (metric,) = zoo.card("small").weights["two"].metrics
    assert metric.command == "python scripts/evaluate.py small.two"


def test_values_beyond_half_precision_are_refused(
    shelf: Path, trained: Path, tmp_path: Path
) -> None:
    model = zoo.load(trained)
    with torch.no_grad():
        model.fc.bias[0] = 1e6
    folder = zoo.save(model, tmp_path / "large")
    with pytest.raises(WeightsError, match=r"fc\.bias has values that half precision"):
        publish(folder, "small.two")
    assert not list(shelf.glob("*.safetensors"))


def test_a_number_that_is_new_gets_a_table_on_the_card(shelf: Path, trained: Path) -> None:
    publish(trained, "small.two")
    value = evaluation.Measured("small.two", "set/test/top1", 0.123456, 7, "ab" * 32, None)
    evaluation.write_metrics([value])
    evaluation.write_metrics([replace(value, value=0.5)])
    (metric,) = zoo.card("small").weights["two"].metrics
    assert (metric.name, metric.value, metric.n) == ("set/test/top1", 0.5, 7)
    assert metric.tolerance == evaluation.TOLERANCE
    assert metric.command == "python scripts/evaluate.py small.two"
    text = (shelf / "small.toml").read_text()
    assert "# a comment that stays" in text
    assert "\n\n[[weights.two.metrics]]\n" in text
    assert "\n\n\n" not in text
