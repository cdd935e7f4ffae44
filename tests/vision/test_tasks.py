from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn import functional as F

from vision.images import decode, prepare
from vision.tasks import UNTRAINED, ImageClassification, ImageGraph, read_parquet
from zoo.cards import Card, File, TensorSpec, Weights
from zoo.data.rows import check, open_rows
from zoo.errors import CardError, ConfigError, DataError
from zoo.pipeline import Pipeline

SMALL: dict[str, Any] = {
    "size": 8,
    "resize": "shorter",
    "crop": 8,
    "interpolation": "bilinear",
    "antialias": True,
    "mean": [0.4, 0.5, 0.6],
    "std": [0.2, 0.25, 0.3],
}


def no_file(name: str) -> Path:
    raise AssertionError(f"{name} was asked for; images need no files")


def make_card(folder: Path, *, labels: list[str] | None = None, **changes: Any) -> Card:
    """A card with one set of weights, narrowed to it, as `zoo.load` hands it to a task."""
    (folder / "labels").mkdir(exist_ok=True)
    if labels is not None:
        (folder / "labels" / "some.txt").write_text("\n".join(labels) + "\n")
    weights = Weights(
        files=(File(name="a.safetensors"),),
        licence="MIT",
        labels=None if labels is None else "some",
        preprocessing=changes.pop("preprocessing", SMALL),
    )
    card = Card(
        model="vision.resnet:ResNet",
        task="vision.tasks:ImageClassification",
        summary="",
        paper="",
        parameters=0,
        inputs={"image": TensorSpec(dtype="float32", shape=("batch", 3, "height", "width"))},
        outputs={"logits": TensorSpec(dtype="float32", shape=("batch", "num_classes"))},
        weights={"tag": weights},
        name="net",
        folder=folder,
    )
    return replace(card.with_tag("tag"), **changes)


def make_task(folder: Path, **options: Any) -> ImageClassification:
    return ImageClassification(make_card(folder, **options), no_file)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


class MeanColour(nn.Module):
    """Three classes, whose logits are the mean of each channel; deterministic and per item."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, image: Tensor) -> Tensor:
        return self.scale * image.mean((2, 3))


# --- construction


def test_the_preprocessing_is_the_cards(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    array = noise(20, 30)
    sample = task.read(array)
    assert sample.keys() == {"image"}
    assert torch.equal(sample["image"], prepare(decode(array), task.preprocessing, 3))
    assert task.preprocessing.mean == (0.4, 0.5, 0.6)


def test_a_model_without_weights_prepares_as_for_imagenet(tmp_path: Path) -> None:
    card = make_card(tmp_path).with_tag(None)
    task = ImageClassification(card, no_file)
    assert task.preprocessing == UNTRAINED
    assert task.labels is None
    sample = task.read(np.full((300, 400, 3), 128, np.uint8))["image"]
    assert sample.shape == (3, 224, 224)
    assert sample[:, 0, 0].tolist() == pytest.approx([0.0741, 0.2052, 0.4265], abs=1e-4)


def test_a_wrong_preprocessing_names_the_card_and_the_nearest_field(tmp_path: Path) -> None:
    with pytest.raises(CardError) as caught:
        make_task(tmp_path, preprocessing=SMALL | {"croop": 3})
    assert "net.tag" in caught.value.line
    assert "'crop'" in caught.value.line


@pytest.mark.parametrize("in_channels", [1, 4])
def test_an_adapted_network_gets_its_own_number_of_channels(
    tmp_path: Path, in_channels: int
) -> None:
    task = make_task(tmp_path, config={"in_channels": in_channels})
    raw = np.full((9, 9, in_channels), 128, np.uint8)
    sample = task.read(raw)["image"]
    assert sample.shape == (in_channels, 8, 8)
    torch.testing.assert_close(sample, torch.full_like(sample, (128 / 255 - 0.5) / 0.25))


def test_an_input_without_a_number_of_channels_is_refused(tmp_path: Path) -> None:
    spec = TensorSpec(dtype="float32", shape=("batch", "channels", "height", "width"))
    with pytest.raises(CardError, match="'channels'"):
        make_task(tmp_path, inputs={"image": spec})


# --- samples, batches, loss


def test_a_stated_layout_reaches_the_decoder(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    array = noise(20, 30)
    expected = task.read(array)["image"]
    assert torch.equal(task.read(array.transpose(2, 0, 1), layout="CHW")["image"], expected)
    with pytest.raises(DataError, match="layout='CHW'"):
        task.read(array.transpose(2, 0, 1))


def test_a_batch_holds_every_sample_under_its_name(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    samples = [task.read(noise(9 + n, 12, n)) | {"target": torch.tensor(n)} for n in range(3)]
    batch = task.collate(samples)
    assert batch["image"].shape == (3, 3, 8, 8)
    assert torch.equal(batch["image"][1], samples[1]["image"])
    assert batch["target"].tolist() == [0, 1, 2]
    assert batch["target"].dtype == torch.int64


def test_the_loss_is_a_sum_so_that_unequal_batches_add_up(tmp_path: Path) -> None:
    task, model = make_task(tmp_path), MeanColour()
    image = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, 1, 0])
    total, count = task.loss(model, {"image": image, "target": target})
    parts = [
        task.loss(model, {"image": image[p], "target": target[p]}) for p in ([0, 1], [2, 3, 4])
    ]
    assert count == 5
    torch.testing.assert_close(total, sum(part for part, _ in parts))
    torch.testing.assert_close(total / count, F.cross_entropy(image.mean((2, 3)), target))
    total.backward()
    assert model.scale.grad is not None


def test_the_loss_of_a_half_precision_model_is_computed_in_float32(tmp_path: Path) -> None:
    image = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    total, _ = make_task(tmp_path).loss(
        MeanColour().bfloat16(), {"image": image, "target": torch.zeros(64, dtype=torch.int64)}
    )
    assert total.dtype == torch.float32


def test_an_example_is_augmented_if_a_recipe_says_so(tmp_path: Path) -> None:
    task, raw = make_task(tmp_path), png(noise(8, 8))
    plain = task.example(raw, 2)
    assert torch.equal(plain["image"], task.read(raw)["image"])
    assert (plain["target"].item(), plain["target"].dtype) == (2, torch.int64)
    recipe = task.recipe(flip=True)
    seen = [
        task.example(raw, 2, recipe, torch.Generator().manual_seed(seed))["image"]
        for seed in range(20)
    ]
    assert {torch.equal(image, plain["image"]) for image in seen} == {True, False}
    assert {torch.equal(image.flip(-1), plain["image"]) for image in seen} == {True, False}
    assert task.example(raw, 2, size=6)["image"].shape == (3, 6, 6)
    assert torch.equal(task.example(task.decoded(raw), 2)["image"], plain["image"])


def test_what_suits_fine_tuning_is_part_of_the_recipe(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    assert task.recipe(**task.finetuning).random_resized_crop == (0.6, 1.0)


def test_targets_may_be_shares_and_may_be_smoothed(tmp_path: Path) -> None:
    task, model = make_task(tmp_path), MeanColour()
    image = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, 1])
    hard, count = task.loss(model, {"image": image, "target": target})
    soft = {"image": image, "target": F.one_hot(target, 3).float()}
    total, same = task.loss(model, soft)
    assert count == same == 4
    torch.testing.assert_close(total, hard)
    # A tenth of the target is given to all three classes alike.
    even = -image.mean((2, 3)).log_softmax(1).mean(1).sum()
    for batch in ({"image": image, "target": target}, soft):
        smoothed, _ = task.loss(model, batch, label_smoothing=0.1)
        torch.testing.assert_close(smoothed, 0.9 * hard + 0.1 * even)


# --- answers


def test_answers_are_records_best_first(tmp_path: Path) -> None:
    task = make_task(tmp_path, labels=["cat", "dog", "eel"])
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    first, second = task.decode(logits, top_k=2)
    assert [(record["label"], record["index"]) for record in first] == [("dog", 1), ("eel", 2)]
    assert [record["score"] for record in first] == pytest.approx([0.66524, 0.24473], abs=1e-5)
    assert (second[0]["label"], second[0]["index"]) == ("cat", 0)


def test_no_more_answers_than_classes_and_their_scores_add_up_to_one(tmp_path: Path) -> None:
    (answer,) = make_task(tmp_path).decode(torch.tensor([[1.0, 2.0, 3.0]]))
    assert len(answer) == 3
    assert sum(record["score"] for record in answer) == pytest.approx(1, abs=1e-12)
    assert [record["label"] for record in answer] == ["2", "1", "0"]


def test_of_equal_classes_the_smaller_index_comes_first(tmp_path: Path) -> None:
    (answer,) = make_task(tmp_path).decode(torch.zeros(1, 1000), top_k=1000)
    assert [record["index"] for record in answer] == list(range(1000))


@pytest.mark.parametrize("top_k", [0, -1])
def test_less_than_one_answer_is_refused(tmp_path: Path, top_k: int) -> None:
    with pytest.raises(ConfigError, match="top_k"):
        make_task(tmp_path).decode(torch.zeros(1, 3), top_k=top_k)


def test_labels_for_other_classes_are_refused(tmp_path: Path) -> None:
    task = make_task(tmp_path, labels=["cat", "dog"])
    with pytest.raises(CardError, match="2 labels for 3 classes"):
        task.decode(torch.zeros(1, 3))


def test_a_pipeline_gives_each_image_the_answer_it_has_alone(tmp_path: Path) -> None:
    model = MeanColour()
    model.card = make_card(tmp_path, labels=["red", "green", "blue"])
    pipe = Pipeline(model, batch_size=2)
    images = [png(noise(5 + 7 * n, 40 - 6 * n, n)) for n in range(5)]
    together = pipe(images, top_k=3)
    assert len(together) == 5
    for image, answer in zip(images, together, strict=True):
        alone = pipe(image, top_k=3)
        assert [record["index"] for record in alone] == [record["index"] for record in answer]
        scores = [record["score"] for record in alone]
        assert scores == pytest.approx([record["score"] for record in answer], abs=1e-6)
    green = np.zeros((9, 9, 3), np.uint8) + np.array([0, 255, 0], np.uint8)
    assert pipe(green)[0]["label"] == "green"


# --- measuring


def answers(*indices: int) -> list[dict[str, Any]]:
    return [{"label": str(index), "index": index, "score": 0.1} for index in indices]


def test_accuracies_count_every_example_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def predict(raws: list[int], *, top_k: int) -> list[list[dict[str, Any]]]:
        assert top_k == 5
        asked.extend(raws)
        return [answers(0, 1, 2, 3, 4) for _ in raws]

    def examples() -> Iterator[tuple[int, int]]:
        for n in range(600):
            yield n, (0, 0, 3, 7)[n % 4]

    found = make_task(tmp_path).measure(predict, examples())
    assert found == {"top1": 0.5, "top5": 0.75}
    assert asked == list(range(600))


def test_few_classes_are_measured_too(tmp_path: Path) -> None:
    found = make_task(tmp_path).measure(
        lambda raws, top_k: [answers(1, 0) for _ in raws], [("a", 0), ("b", 1)]
    )
    assert found == {"top1": 0.5, "top5": 1.0}


def test_the_fifth_answer_of_three_classes(tmp_path: Path) -> None:
    """Case TRN-08."""
    task = make_task(tmp_path)
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    found = task.measure(
        lambda rows, top_k: task.decode(logits[rows], top_k=top_k), [(0, 0), (1, 0)]
    )
    assert found == {"top1": 0.5, "top5": 1.0}


def test_nothing_to_measure_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no examples"):
        make_task(tmp_path).measure(lambda raws, top_k: [], [])


# --- data sets


@pytest.mark.parametrize(("name", "column"), [("imagenet-sample", "image"), ("cifar10", "img")])
def test_every_split_of_a_data_set_is_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, column: str
) -> None:
    dataset = ImageClassification.datasets[name]
    assert dataset.name == name
    images = [png(noise(4, 4, n)) for n in range(300)]
    for path in dataset.files.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"bytes": image, "path": None} for image in images]
        table = pyarrow.table({column: rows, "label": [n % 10 for n in range(300)]})
        parquet.write_table(table, tmp_path / path, row_group_size=7)
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    for split in dataset.files:
        assert list(dataset.examples(split)) == [(images[n], n % 10) for n in range(300)]


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    text, foreign, unlabelled = (tmp_path / f"{name}.parquet" for name in "abc")
    text.write_text("not a table")
    parquet.write_table(pyarrow.table({"sentence": ["a"], "label": [0]}), foreign)
    parquet.write_table(pyarrow.table({"image": [{"bytes": b"", "path": ""}]}), unlabelled)
    for path in (text, foreign, unlabelled):
        with pytest.raises(DataError) as caught:
            list(read_parquet(path, column="image"))
        assert path.name in caught.value.line
        assert len(caught.value.line) <= 200


def test_a_folder_of_all_sorts_is_read_and_what_is_broken_is_named(tmp_path: Path) -> None:
    task, array = make_task(tmp_path), noise(9, 9)
    photos = tmp_path / "photos"
    for name in ("ant", "bee", "cow"):
        (photos / name).mkdir(parents=True)
    for n, suffix in enumerate(("jpg", "png", "webp", "gif", "bmp", "tiff")):
        Image.fromarray(array).save(photos / "ant" / f"{n}.{suffix}")
    (photos / "ant" / "really a png.jpg").write_bytes(png(array))
    Image.fromarray(array).convert("CMYK").save(photos / "bee" / "print.jpg")
    (photos / "bee" / "cut.png").write_bytes(png(array)[:-60])
    (photos / "bee" / "empty.jpg").write_bytes(b"")
    (photos / "cow" / "text.png").write_text("no picture")
    (photos / "cow" / "notes.txt").write_text("no picture either")
    rows = open_rows(photos, task)
    report, left = check(rows, task)
    assert [Path(rows.raw(i)).name for i, _, _ in report.unreadable] == [
        "cut.png",
        "empty.jpg",
        "text.png",
    ]
    assert (report.empty, report.single) == (["cow"], ["bee"])
    assert len(report.formats) == 6
    assert all(len(line) <= 420 for line in report.lines())
    batch = task.collate([task.example(*left[i]) for i in range(len(left))])
    assert batch["image"].shape == (8, 3, 8, 8)
    assert batch["target"].tolist() == [0] * 7 + [1]


# --- the graph from pixels to logits


@pytest.mark.parametrize("in_channels", [1, 3])
def test_the_graph_normalises_as_reading_does(tmp_path: Path, in_channels: int) -> None:
    task = make_task(tmp_path, config={"in_channels": in_channels})
    pixels = torch.from_numpy(noise(8, 8)[..., :in_channels]).permute(2, 0, 1)
    graph = task.graph(nn.Flatten())
    assert isinstance(graph, ImageGraph)
    batch = torch.stack([pixels, 255 - pixels])
    torch.testing.assert_close(graph(batch)[0], task.read(pixels)["image"].flatten())
    assert not graph.state_dict()
