from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zoo
from vision.losses import cross_entropy, dice_cross_entropy, tversky_loss
from vision.metrics import dice
from vision.segmentation import VolumeGraph, VolumeSegmentation, loss_named, normalised
from vision.sliding import sliding_window
from vision.volume_augment import LossName
from vision.volumes import Turn, read_volume, turned
from zoo.cards import Weights
from zoo.cli import main
from zoo.errors import CardError, ConfigError, DataError
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
        ("scan", "there is no file 'scan'"),
        (7, "a volume is 7"),
        ((7,), "a channel is 7"),
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


def answered(judge: VolumeSegmentation, logits: Tensor) -> dict:
    """The answer for a volume whose logits are given."""
    samples = [judge.read(ramp(*logits.shape[2:]))]
    found = judge.run(Fixed(logits), judge.collate(samples))
    (answer,) = judge.decode(found, samples=samples)
    return answer


def test_answers_are_the_mask_and_its_voxels() -> None:
    logits = torch.zeros(1, 3, 1, 1, 4)
    logits[0, 1, 0, 0, :3] = 1
    logits[0, 2, 0, 0, 2] = 2
    answer = answered(task(num_classes=3), logits)
    assert answer["mask"].dtype == np.uint8
    assert answer["mask"].tolist() == [[[1, 1, 2, 0]]]
    assert answer["voxels"] == {"1": 2, "2": 1}


def test_dice_is_a_mean_over_volumes_and_then_over_labels() -> None:
    logits = torch.zeros(1, 3, 1, 1, 4)
    logits[0, 1, 0, 0, :3] = 1
    logits[0, 2, 0, 0, 2] = 2  # 1 1 2 0
    judge = task(num_classes=3)
    examples = [(None, np.array([[[1, 0, 2, 2]]])), (None, np.array([[[1, 1, 0, 0]]]))]
    found = judge.measure(lambda raws: [answered(judge, logits) for _ in raws], examples)
    first, second = (2 / 3 + 1) / 2, (2 / 3 + 0) / 2
    dices = {"dice": (first + second) / 2, "dice_1": first, "dice_2": second}
    # Distances of label 1: 1 0 both ways of the first pair, whose 95th percentile is 0.95; then 0.
    # Of label 2: 0 1; then a false alarm, the diagonal of 1 x 1 x 4 voxels.
    one, two = 0.95 / 2, (0.95 + 18**0.5) / 2
    distances = {"hd95": (one + two) / 2, "hd95_1": one, "hd95_2": two}
    assert found == pytest.approx({**dices, **distances, "missed": 0, "false_alarms": 1})
    with pytest.raises(DataError, match="no examples"):
        task().measure(lambda raws: [], [])


def test_a_pipeline_answers_for_volumes_of_any_size() -> None:
    pipe = Pipeline(load("unet3d", **CHECK))
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
    answer = Pipeline(model)(target + 0.5 * noise)
    assert dice(answer["mask"], target, empty="one") > 0.98


# Files, and what is done with windows.

SPEC = {"spacing": (1.0, 1.0, 1.0), "window": (8, 8, 8), "mirror": (0, 1, 2), "pairs": ()}


def planned(**spec: object) -> nn.Module:
    """A small network whose weights have a preprocessing."""
    model = load("unet3d", **CHECK, num_classes=3)
    weights = Weights(licence="MIT", preprocessing={**SPEC, **spec})
    model.card = replace(model.card, tag="x", weights={"x": weights})
    return model


def scan(path: Path, shape: tuple[int, ...] = (9, 11, 10), **options: object) -> Path:
    """A volume whose first axis runs from right to left, with voxels of 1 x 2 x 1 mm."""
    matrix = np.diag([-1.0, 2.0, 1.0, 1.0])
    data = options.get("data")
    if data is None:
        data = np.random.default_rng(0).integers(0, 999, shape).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(data, options.get("affine", matrix)), path)
    return path


def test_a_file_gives_a_mask_on_its_own_grid_and_millilitres(tmp_path: Path) -> None:
    path = scan(tmp_path / "scan.nii.gz")
    pipe = Pipeline(planned())
    answer = pipe(path, out=tmp_path / "mask.nii.gz", montage=tmp_path / "look.png")
    assert answer["mask"].shape == (9, 11, 10)
    written = nibabel.load(tmp_path / "mask.nii.gz")
    assert np.array_equal(np.asarray(written.dataobj), answer["mask"])
    assert np.array_equal(written.affine, nibabel.load(path).affine)
    expected = {name: 0.002 * count for name, count in answer["voxels"].items()}
    assert answer["volumes_ml"] == pytest.approx(expected)
    assert sum(answer["voxels"].values()) == np.count_nonzero(answer["mask"])
    assert (tmp_path / "look.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_masks_and_never_over_a_volume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = scan(tmp_path / "one.nii.gz"), scan(tmp_path / "other.nii.gz", (5, 6, 9))
    before = one.read_bytes()
    network = str(zoo.save(planned(), tmp_path / "network"))

    def told(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["predict", network, *map(str, arguments)])
        text = capsys.readouterr()
        return text.err if ended.value.code else text.out

    assert "ml" in told(one, "--out", tmp_path / "mask.nii.gz")
    told(one, other, "--out", tmp_path / "masks")
    expected = zoo.pipeline(Path(network))(one)["mask"]
    for place in (tmp_path / "mask.nii.gz", tmp_path / "masks" / "one.nii.gz"):
        assert np.array_equal(np.asarray(nibabel.load(place).dataobj), expected)
    assert nibabel.load(tmp_path / "masks" / "other.nii.gz").shape == (5, 6, 9)
    assert "the input itself" in told(one, "--out", tmp_path)
    assert "two inputs are called 'one.nii.gz'" in told(one, one, "--out", tmp_path / "masks")
    assert one.read_bytes() == before


def test_the_answer_does_not_depend_on_how_the_file_lies(tmp_path: Path) -> None:
    pipe = Pipeline(planned(spacing=(1.0, 2.0, 1.0)))
    straight = scan(tmp_path / "scan.nii.gz", affine=np.diag([1.0, 2.0, 1.0, 1.0]))
    volume = read_volume(straight)
    found = pipe(straight)["mask"]
    for turn in (Turn((1, 2, 0), (True, False, False)), Turn((2, 1, 0), (False, True, True))):
        other = pipe(turned(volume, turn))["mask"]
        assert np.array_equal(turn.back(other), found)


def test_a_list_takes_volumes_of_any_size_and_a_place_for_each(tmp_path: Path) -> None:
    small, large = scan(tmp_path / "s.nii.gz", (5, 6, 9)), scan(tmp_path / "l.nii.gz", (12, 9, 9))
    pipe = Pipeline(planned())
    outs = [tmp_path / "one.nii.gz", tmp_path / "two.nii.gz"]
    together = pipe([large, small], out=outs)
    for path, out, answer in zip((large, small), outs, together, strict=True):
        alone = pipe(path)
        assert np.array_equal(alone["mask"], answer["mask"])
        assert np.array_equal(np.asarray(nibabel.load(out).dataobj), answer["mask"])
    with pytest.raises(ConfigError, match="a list of 2 inputs takes a list of as many"):
        pipe([large, small], out="mask.nii.gz")
    with pytest.raises(ConfigError, match="has no grid in space"):
        pipe(ramp(8, 8, 8), out=tmp_path / "x.nii.gz")


def test_a_volume_alone_is_the_volume_in_a_batch() -> None:
    volumes = [np.random.default_rng(n).normal(size=(9, 12, 10)) for n in range(3)]
    model = planned()
    together = Pipeline(model, batch_size=3)(volumes, uncertainty=True)
    for volume, answer in zip(volumes, together, strict=True):
        alone = Pipeline(model)(volume, uncertainty=True)
        assert np.array_equal(alone["mask"], answer["mask"])
        assert np.abs(alone["uncertainty"] - answer["uncertainty"]).max() < 2e-5


def test_windows_are_stitched_as_the_full_answer_is() -> None:
    model = planned()
    judge = make_task(model)
    batch = judge.collate([judge.read(np.random.default_rng(0).normal(size=(13, 9, 17)))])
    with torch.no_grad():
        (found,) = judge.run(model, batch, overlap=0.25)
        whole = sliding_window(model, batch["volume"], (8, 8, 8), overlap=0.25)
    assert torch.equal(found.mask, whole.argmax(1)[0])
    assert found.mask.dtype == torch.uint8


def test_uncertainty_is_in_0_to_1_and_on_the_file_s_grid(tmp_path: Path) -> None:
    answer = Pipeline(planned())(scan(tmp_path / "scan.nii.gz"), uncertainty=True)
    assert answer["uncertainty"].shape == answer["mask"].shape
    assert 0 <= answer["uncertainty"].min() < answer["uncertainty"].max() <= 1 + 1e-6


def test_mirrors_make_a_network_symmetric() -> None:
    volume = np.random.default_rng(0).normal(size=(8, 8, 8))
    pipe = Pipeline(planned())
    found = pipe(volume, mirror=True)["mask"]
    assert np.array_equal(pipe(np.flip(volume, 2).copy(), mirror=True)["mask"], np.flip(found, 2))
    plain = pipe(np.flip(volume, 2).copy())["mask"]
    assert not np.array_equal(plain, np.flip(pipe(volume)["mask"], 2))


def test_memory_is_foretold_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    model = planned()
    pipe, volume = Pipeline(model), np.random.default_rng(0).normal(size=(8, 20, 20))
    with pytest.raises(ConfigError, match="one window of"):
        pipe(volume, memory_budget=100)
    calls: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    least, most = pipe(volume, memory_budget=10**6), pipe(volume, memory_budget=10**9)
    hook.remove()
    assert np.array_equal(least["mask"], most["mask"])
    assert max(calls) == 16  # 4 x 4 windows of a layer, all at once
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("predicted peak")
    assert "16 windows of (8, 8, 8)" in lines[-1]


@pytest.mark.parametrize(
    ("said", "asked", "count"),
    [(False, None, 28), (False, True, 27), (True, None, 27), (True, False, 28)],
)
def test_the_largest_part_is_kept_where_asked_or_said(
    said: bool, asked: bool | None, count: int
) -> None:
    logits = torch.zeros(1, 3, 8, 8, 8)
    logits[0, 1, :3, :3, :3] = logits[0, 1, 7, 7, 7] = 1
    judge = make_task(planned(largest_component=said))
    samples = [judge.read(ramp(8, 8, 8))]
    found = judge.run(Fixed(logits), judge.collate(samples))
    (answer,) = judge.decode(found, samples=samples, largest_component=asked)
    assert answer["voxels"]["1"] == count


def test_more_than_256_classes_have_a_wider_mask() -> None:
    judge = make_task(load("unet3d", **CHECK))
    logits = torch.zeros(1, 300, 1, 1, 3)
    logits[0, 299, 0, 0, 1] = 1
    samples = [judge.read(ramp(1, 1, 3))]
    (answer,) = judge.decode(judge.run(Fixed(logits), {"volume": logits[:, :1]}), samples=samples)
    assert answer["mask"].dtype == np.uint16
    assert answer["mask"].tolist() == [[[0, 299, 0]]]


def test_channels_come_in_one_file_or_in_several(tmp_path: Path) -> None:
    judge = task(in_channels=2)
    data = np.random.default_rng(0).integers(0, 99, (4, 5, 6, 2)).astype(np.int16)
    both = scan(tmp_path / "both.nii.gz", data=data)
    parts = [scan(tmp_path / f"{n}.nii.gz", data=data[..., n]) for n in range(2)]
    torch.testing.assert_close(judge.read(both)["volume"], judge.read(tuple(parts))["volume"])
    other = scan(tmp_path / "other.nii.gz", data=data[..., 0], affine=np.eye(4))
    with pytest.raises(DataError, match="mm apart"):
        judge.read((parts[0], other))


def test_labels_lie_on_their_image_or_are_refused(tmp_path: Path) -> None:
    judge = make_task(planned(spacing=None))
    image = scan(tmp_path / "scan.nii.gz")
    labels = np.random.default_rng(1).integers(0, 3, (9, 11, 10)).astype(np.float64)
    sample = judge.example(image, scan(tmp_path / "labels.nii.gz", data=labels))
    # Superior, anterior and right: the file's first axis runs to the left, so it is reversed.
    assert np.array_equal(sample["target"].numpy(), labels.transpose(2, 1, 0)[:, :, ::-1])
    for name, data, text in (
        ("four", labels + 2, "the label 4; the model has the classes 0 to 2"),
        ("half", labels + 0.5, "labels are no whole numbers"),
        ("minus", labels - 1, "the label -1; labels count from 0"),
    ):
        with pytest.raises(DataError) as caught:
            judge.example(image, scan(tmp_path / f"{name}.nii.gz", data=data))
        assert text in caught.value.line
    judge.examine(image, tmp_path / "four.nii.gz")  # it may be trained with more classes
    with pytest.raises(DataError, match="mm apart"):
        judge.examine(image, scan(tmp_path / "x.nii.gz", data=labels, affine=np.eye(4)))


def test_intensities_of_a_data_set_take_the_place_of_the_volume_s() -> None:
    spec = {"clip": (-100.0, 300.0), "mean": 100.0, "std": 50.0}
    model = planned(spacing=None, window=None, **spec)
    volume = torch.tensor([[[-1000.0, 100.0, 150.0, 3000.0]]])
    found = make_task(model).read(volume)["volume"]
    assert found.flatten().tolist() == [-4.0, 0.0, 1.0, 4.0]
    raw = torch.rand(1, 1, 6, 6, 6) * 500
    graph = make_task(model).graph(model)
    torch.testing.assert_close(graph(raw), model(normalised(raw, graph.spec)))


def test_pairs_of_labels_that_are_not_there_are_refused() -> None:
    with pytest.raises(CardError, match="pairs name 3, and there are 3 classes"):
        make_task(planned(pairs=((1, 3),)))


@pytest.mark.parametrize("name", get_args(LossName))
def test_every_loss_teaches_where_no_label_is(name: str) -> None:
    logits = torch.zeros(1, 3, 4, 4, 4, requires_grad=True)
    batch = {"volume": torch.zeros(1, 1, 4, 4, 4), "target": torch.zeros(1, 4, 4, 4).long()}
    total, count = task(num_classes=3).loss(Fixed(logits), batch, loss=name)
    total.backward()
    assert (count, bool(logits.grad[:, 0].lt(0).all())) == (1, True)


def test_losses_are_named_and_summed() -> None:
    logits = torch.randn(2, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 3, (2, 3, 3, 3), generator=torch.Generator().manual_seed(1))
    entropy = cross_entropy(logits, target, label_smoothing=0.1)
    found = loss_named("tversky_cross_entropy", 0.1)(logits, target)
    torch.testing.assert_close(found, tversky_loss(logits, target) + entropy)
    with pytest.raises(ConfigError, match="takes no label_smoothing"):
        loss_named("dice_focal", 0.1)


@pytest.mark.untyped
def test_a_loss_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss is 'dice'"):
        loss_named("dice")


def test_misses_are_counted_and_never_dropped() -> None:
    judge = task(num_classes=3)
    empty = {"mask": np.zeros((2, 2, 2), np.uint8), "voxels": {"1": 0, "2": 0}}
    target = np.zeros((2, 2, 2), np.int64)
    target[0, 0, 0] = 1
    found = judge.measure(lambda raws: [empty] * len(raws), [(None, target)] * 10)
    assert (found["missed"], found["false_alarms"]) == (10, 0)
    assert (found["dice_1"], found["dice_2"]) == (0, 1)
    assert found["hd95_1"] == pytest.approx(12**0.5)
    assert set(judge.lower_is_better) >= {"hd95", "hd95_1", "hd95_2", "missed"}
    assert judge.tolerances.keys() == {"hd95", "hd95_1", "hd95_2"}
