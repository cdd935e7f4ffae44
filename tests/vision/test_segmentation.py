from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vision.losses import dice_cross_entropy
from vision.metrics import dice
from vision.segmentation import VolumeGraph, VolumeSegmentation, normalised
from zoo.errors import DataError
from zoo.pipeline import Pipeline, preprocess
from zoo.registry import load, make_task

CHECK = {"channels": (2, 3, 4), "depths": (1, 1, 1)}


def task(**config: object) -> VolumeSegmentation:
    return make_task(load("unet3d", **CHECK, **config))


def ramp(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape)


class Fixed(nn.Module):
    """Gives the same outputs for every input."""

    def __init__(self, outputs: Tensor | tuple[Tensor, ...]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, volume: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.outputs


def test_intensities_are_normalised_by_hand() -> None:
    # 0, 1, 2, 3: mean 1.5, variance (2.25 + 0.25) / 2 = 1.25
    found = task().read(ramp(1, 2, 2))["volume"].flatten().tolist()
    assert found == pytest.approx([v / 1.25**0.5 for v in (-1.5, -0.5, 0.5, 1.5)])
    assert normalised(torch.full((1, 2, 2, 2), 7.0)).abs().max() == 0


def test_channels_are_normalised_apart_and_arrays_may_be_tensors() -> None:
    volume = torch.stack((torch.arange(8.0).reshape(2, 2, 2), torch.full((2, 2, 2), -3.0)))
    found = task(in_channels=2).read(volume)["volume"]
    assert found[0].mean().abs() < 1e-6
    assert found[0].square().mean().item() == pytest.approx(1)
    assert found[1].abs().max() == 0


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("scan", "a volume is 'scan'"),
        (np.zeros((4, 4)), "takes numbers (depth, height, width)"),
        (np.zeros((2, 4, 4, 4)), "the model takes 1 channels"),
        (np.zeros((4, 0, 4)), "at least one voxel"),
        (np.array([[[0.0, np.nan, np.inf]]]), "2 voxels are not finite"),
        (np.zeros((2, 2, 2), np.complex64), "complex64"),
    ],
)
def test_what_is_no_volume_is_refused(raw: object, text: str) -> None:
    with pytest.raises(DataError) as caught:
        task().read(raw)
    assert text in caught.value.line


def test_labels_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match=r"labels are int64 \(2, 2, 3\)"):
        task().example(ramp(2, 2, 2), np.zeros((2, 2, 3), np.int64))
    with pytest.raises(DataError, match="labels are float64"):
        task().example(ramp(2, 2, 2), np.zeros((2, 2, 2)))


def test_the_loss_is_a_sum_over_volumes_and_counts_them() -> None:
    logits = torch.randn(3, 2, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 2, (3, 2, 3, 4), generator=torch.Generator().manual_seed(1))
    batch = {"volume": torch.zeros(3, 1, 2, 3, 4), "target": target}
    total, count = task().loss(Fixed(logits), batch)
    assert count == 3
    torch.testing.assert_close(total, dice_cross_entropy(logits, target).sum())


def test_the_loss_weighs_deep_outputs() -> None:
    target = torch.zeros(1, 2, 2, 2, dtype=torch.long)
    outputs = (torch.zeros(1, 2, 2, 2, 2), torch.zeros(1, 2, 1, 1, 1))
    total, _ = task().loss(Fixed(outputs), {"volume": outputs[0], "target": target})
    entropy = float(np.log(2))
    fine, coarse = 0.8 + entropy, 1 - 1 / 1.5 + entropy
    assert total.item() == pytest.approx((2 * fine + coarse) / 3)


def test_a_batch_has_one_size() -> None:
    samples = [task().read(ramp(2, 2, n)) for n in (2, 3)]
    with pytest.raises(DataError, match="batch_size=1 takes any"):
        task().collate(samples)


def test_answers_are_the_mask_and_its_voxels() -> None:
    logits = torch.zeros(1, 3, 1, 1, 4)
    logits[0, 1, 0, 0, :3] = 1
    logits[0, 2, 0, 0, 2] = 2
    (answer,) = task().decode(logits)
    assert answer["mask"].dtype == np.uint8
    assert answer["mask"].tolist() == [[[1, 1, 2, 0]]]
    assert answer["voxels"] == {"1": 2, "2": 1}


def test_dice_is_a_mean_over_volumes_and_then_over_labels() -> None:
    logits = torch.zeros(1, 3, 1, 1, 4)
    logits[0, 1, 0, 0, :3] = 1
    logits[0, 2, 0, 0, 2] = 2  # 1 1 2 0
    examples = [(None, np.array([[[1, 0, 2, 2]]])), (None, np.array([[[1, 1, 0, 0]]]))]
    found = task(num_classes=3).measure(lambda raws: task().decode(logits), examples)
    first, second = (2 / 3 + 1) / 2, (2 / 3 + 0) / 2
    assert found == pytest.approx({"dice": (first + second) / 2, "dice_1": first, "dice_2": second})
    with pytest.raises(DataError, match="no examples"):
        task().measure(lambda raws: [], [])


def test_a_pipeline_answers_for_volumes_of_any_size() -> None:
    pipe = Pipeline(load("unet3d", **CHECK), batch_size=1)
    answers = pipe([ramp(5, 6, 7), ramp(9, 5, 5)])
    assert [a["mask"].shape for a in answers] == [(5, 6, 7), (9, 5, 5)]


def test_the_graph_takes_intensities() -> None:
    model = load("unet3d", **CHECK)
    raw = ramp(5, 6, 7)
    graph = make_task(model).graph(model)
    assert isinstance(graph, VolumeGraph)
    sample = preprocess(model)(raw)
    expected = model(sample[None])
    torch.testing.assert_close(graph(torch.from_numpy(raw)[None, None].float()), expected)


def test_a_ball_in_noise_is_found() -> None:
    torch.manual_seed(0)
    grid = torch.stack(torch.meshgrid(*[torch.arange(12.0)] * 3, indexing="ij")) - 5.5
    target = (grid.square().sum(0) < 16).long()
    noise = torch.randn(12, 12, 12, generator=torch.Generator().manual_seed(0))
    model = load("unet3d", **{**CHECK, "channels": (6, 8, 10)}, deep_supervision=True).train()
    judge = make_task(model)
    batch = judge.collate([judge.example(target + 0.5 * noise, target)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss, _ = judge.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (answer,) = judge.decode(model.eval()(batch["volume"]))
    assert dice(answer["mask"], target, empty="one") > 0.98
