"""The task of volumetric segmentation: a class for every voxel.

A volume is turned so that its axes run to superior, anterior and right, brought to the spacing of
the weights, normalised, and looked at a window at a time; the mask goes back onto the volume's own
grid.

Source: Isensee et al. 2018 (loss, normalisation), https://arxiv.org/abs/1809.10486
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Integer
from torch import Tensor, nn

from vision.decathlon import CaseRows, case_set, open_task
from vision.losses import (
    Loss,
    cross_entropy,
    deeply_supervised,
    dice_cross_entropy,
    dice_loss,
    focal_loss,
    generalised_dice_loss,
    tversky_loss,
)
from vision.memory import forward_bytes
from vision.metrics import dice, hausdorff
from vision.mirroring import mirror_averaged, with_uncertainty
from vision.montage import write_montage
from vision.sliding import most_probable, peak_bytes, slabs, starts
from vision.volume_augment import LossName, VolumeRecipe, augmented
from vision.volume_plan import VolumePlan, make_plan
from vision.volumenet import Axes
from vision.volumes import (
    Spacing,
    Turn,
    Volume,
    VolumePreprocessing,
    check_same_grid,
    largest_components,
    millilitres,
    read_channels,
    read_grid,
    read_volume,
    resampled,
    resampled_mask,
    size_at,
    turned,
    upright,
    write_mask,
)
from zoo.cards import Card
from zoo.config import build
from zoo.data import Dataset
from zoo.errors import CardError, ConfigError, DataError, shown
from zoo.progress import shown_bytes
from zoo.training.recipe import Recipe

CHUNK = 8  # volumes that `measure` hands over at a time
HD95_TOLERANCE = 0.05  # mm: of a mean over cases, where one case moves by whole voxels
WINDOWS = 16  # that are predicted at once, at most
STAYS = Turn((0, 1, 2), (False, False, False))
CT_CASES, CT_VOXELS = 40, 10_000  # that the range of intensities of CT is planned from; of each


class VolumeSample(dict[str, Tensor]):
    """A prepared volume, and where it comes from.

    Attributes:
        source: The volume as it was read, first channel; None of a plain array.
        turn: Made its axes upright.
        spacing: Of the turned volume in mm, before it got other voxels; 1 of a plain array.
        size: The same, in voxels.
        out: Where its mask is to be written, if anywhere.
        montage: The same of a picture.
    """

    source: Volume | None
    turn: Turn
    spacing: Spacing
    size: Axes
    out: Path | None
    montage: Path | None


@dataclass(frozen=True)
class Found:
    """What a network says of one volume, on the grid that it sees.

    Attributes:
        mask: Class of every voxel.
        classes: Their number.
        uncertainty: In [0, 1], of every voxel, if it was asked for.
    """

    mask: Integer[Tensor, "depth height width"]
    classes: int
    uncertainty: Float32[Tensor, "depth height width"] | None = None


class VolumeSegmentation:
    """One class for each voxel; samples are ``{"volume": (channels, depth, height, width)}``.

    Args:
        card: Narrowed to the weights in use; its preprocessing is a `VolumePreprocessing`.
        file: Path of an auxiliary file of the weights; unused, volumes need none.
    """

    name: ClassVar[str] = "volume-segmentation"
    recipe: ClassVar[type[Recipe]] = VolumeRecipe
    batch_size: ClassVar[int] = 1  # volumes have sizes of their own
    each: ClassVar[tuple[str, ...]] = ("out", "montage")  # options that every item has by itself
    finetuning: ClassVar[dict[str, Any]] = {
        "batch_size": 2,
        "spatial": 0.2,
        "intensity": 1.0,
        "low_resolution": 0.25,
        "mirror": True,
    }
    datasets: ClassVar[dict[str, Dataset]] = {
        "hippocampus": case_set("hippocampus", "Task04_Hippocampus")
    }

    def __init__(self, card: Card, file: Callable[[str], Path]) -> None:
        where = f"{card.full_name}: preprocessing"
        self.preprocessing = build(
            VolumePreprocessing, card.preprocessing, where=where, error=CardError
        )
        self.labels = card.labels
        self.in_channels: int = card.config.get("in_channels", 1)
        self.classes: int | None = card.config.get("num_classes")
        named = [label for pair in self.preprocessing.pairs or () for label in pair]
        if self.classes is not None and max(named, default=0) >= self.classes:
            raise CardError(
                f"{where}: pairs name {max(named)}, and there are {self.classes} classes"
            )
        # Metrics of `measure` of which less is better.
        named_by = self.labels or [str(label) for label in range(self.classes or 2)]
        distances = ["hd95", *(f"hd95_{name}" for name in named_by[1:])]
        self.lower_is_better = (*distances, "missed", "false_alarms")
        self.tolerances = dict.fromkeys(distances, HD95_TOLERANCE)  # of what a card says of them

    def read(
        self, raw: object, *, out: str | Path | None = None, montage: str | Path | None = None
    ) -> VolumeSample:
        """One prepared sample.

        Args:
            raw: Path of a NIfTI file, or a `Volume`; for several channels a tuple of these, or the
                path of a file of four axes. Or an array or tensor of intensities, (depth, height,
                width) for one channel, else (channels, depth, height, width), which is taken to be
                upright and of the right spacing.
            out: The mask is written there, as NIfTI.
            montage: A picture of the mask on the volume is written there, as PNG.

        Raises:
            DataError: Anything else, other channels, or values that are not finite.
            ConfigError: The mask of an array is to be written, or one over its own volume.
        """
        source, turn, spacing = None, STAYS, (1.0, 1.0, 1.0)
        inputs = [Path(p).absolute() for p in _parts(raw) if isinstance(p, str | Path)]
        if out is not None and Path(out).absolute() in inputs:
            raise ConfigError(f"out is {shown(str(out))}, the input itself; give another place")
        if isinstance(raw, str | Path | Volume | tuple):
            channels = self._opened(raw)
            source, turn = channels[0], upright(channels[0].affine)
            spacing = turned(source, turn).spacing
            raw = np.stack([turn(channel.data) for channel in channels]).astype(np.float32)
        elif out is not None:
            raise ConfigError(
                f"out is {shown(str(out))} for an array, which has no grid in space; give the path "
                "of a NIfTI file, or a vision.volumes.Volume"
            )
        volume = self._checked(raw)
        depth, height, width = volume.shape[1:]
        size = depth, height, width
        wanted = self.preprocessing.spacing if source else None
        volume = resampled(volume, size_at(size, spacing, wanted))
        sample = VolumeSample(volume=normalised(volume, self.preprocessing))
        sample.source, sample.turn, sample.spacing, sample.size = source, turn, spacing, size
        sample.out = None if out is None else Path(out)
        sample.montage = None if montage is None else Path(montage)
        return sample

    def _opened(self, raw: object) -> list[Volume]:
        """All channels of a volume, on one grid."""
        if isinstance(raw, str | Path):
            return read_channels(raw, self.in_channels)
        parts = _parts(raw)
        volumes = [read_volume(p) if isinstance(p, str | Path) else p for p in parts]
        for part in volumes:
            if not isinstance(part, Volume):
                raise DataError(
                    f"a channel is {shown(part)}; it takes the path of a NIfTI file or a Volume"
                )
            check_same_grid(volumes[0], part)
        return volumes

    def _checked(self, raw: object) -> Float32[Tensor, "channels depth height width"]:
        """Intensities as the network takes them, not yet normalised."""
        if not isinstance(raw, np.ndarray | Tensor):
            raise DataError(
                f"a volume is {shown(raw)}; it takes the path of a NIfTI file, or an array (depth, "
                "height, width) or (channels, depth, height, width)"
            )
        volume = torch.as_tensor(raw)
        if volume.is_complex() or volume.ndim not in (3, 4):
            raise DataError(
                f"a volume is {str(volume.dtype).removeprefix('torch.')} {tuple(volume.shape)}; it "
                "takes numbers (depth, height, width) or (channels, depth, height, width)"
            )
        volume = (volume if volume.ndim == 4 else volume[None]).float()
        if volume.shape[0] != self.in_channels or not volume.numel():
            raise DataError(
                f"a volume is {tuple(volume.shape)}; the model takes {self.in_channels} channels "
                "of at least one voxel, channels first"
            )
        if not volume.isfinite().all():
            count = int((~volume.isfinite()).sum())
            raise DataError(f"{count:,} voxels are not finite; replace them by what air has there")
        return volume

    def example(
        self,
        raw: object,
        target: Any,
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """One sample with the class of every voxel, for `collate` and `loss`.

        Args:
            raw: As `read` takes it.
            target: Whole numbers: path of a NIfTI file or a `Volume` on the grid of `raw`; or an
                array or tensor (depth, height, width).
            recipe: A `VolumeRecipe` says which patch is taken and how it is changed; any other
                takes the whole volume.
            generator: Of what is drawn.
            size: Unused, patches have one size.

        Raises:
            DataError: As `read`, or the labels have another grid or are no classes.
        """
        sample = self.read(raw)
        labels = self._labels(target, sample, self.classes)
        volume = sample["volume"]
        if isinstance(recipe, VolumeRecipe):
            spacing = self.preprocessing.spacing or sample.spacing
            volume, labels = augmented(
                volume, labels, recipe, self.preprocessing, spacing, generator
            )
        return {"volume": volume, "target": labels}

    def _labels(
        self, target: Any, sample: VolumeSample, classes: int | None
    ) -> Integer[Tensor, "_ _ _"]:
        """Class of every voxel of a sample, below `classes` if that is known."""
        if isinstance(target, str | Path | Volume):
            volume = read_volume(target) if isinstance(target, str | Path) else target
            if sample.source is not None:
                check_same_grid(sample.source, volume)
            target = _whole(volume.data)
            target = np.ascontiguousarray(sample.turn(target))
        labels = torch.as_tensor(target)
        if labels.is_floating_point() or tuple(labels.shape) != sample.size:
            raise DataError(
                f"labels are {str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}; "
                f"they take whole numbers {sample.size}, as the volume has"
            )
        labels = labels.long()
        if classes is not None and (found := int(labels.max())) >= classes:
            raise DataError(
                f"a voxel has the label {found}; the model has the classes 0 to {classes - 1}"
            )
        depth, height, width = sample["volume"].shape[1:]
        return resampled_mask(labels, (depth, height, width))

    def examine(self, raw: object, target: Any) -> None:
        """Refuse a case that cannot be learnt from, whatever the number of its labels.

        Raises:
            DataError: As `example`.
        """
        self._labels(target, self.read(raw), None)

    def open_folder(self, folder: Path) -> CaseRows:
        """Cases of a folder in the layout of the Medical Segmentation Decathlon."""
        return open_task(folder)

    def plan(self, rows: Any, budget: int, known: set[str]) -> dict[str, Any]:
        """What a network that begins at random is like, from the files' headers.

        Args:
            rows: `CaseRows`, or a part of them.
            budget: Bytes that a step may take.
            known: Fields of the model's configuration; others are not planned.

        Returns:
            ``config``, ``preprocessing`` and fields of the ``recipe``, and ``lines`` for people.
        """
        grids = [read_grid(rows.raw(index)) for index in range(len(rows))]
        spacings, shapes = [spacing for _, spacing in grids], [shape for shape, _ in grids]
        made: VolumePlan = make_plan(spacings, shapes, budget)
        values: dict[str, Any] = {"spacing": made.spacing, "window": made.patch}
        values |= {"mirror": (0, 1, 2)}
        whole = rows
        while hasattr(whole, "rows"):  # of a part, the whole says what the channels are
            whole = whole.rows
        channels = whole.task.channels
        if len(channels) == 1 and channels[0].upper() == "CT":
            values |= ct_window(rows)
        config = {name: v for name, v in made.config.items() if name in known}
        if "deep_supervision" in known:
            config["deep_supervision"] = True
        if len(channels) > 1:
            config["in_channels"] = len(channels)
        batch = {"batch_size": made.batch_size}
        return {"config": config, "preprocessing": values, "recipe": batch, "lines": (made.line,)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Samples of one size as a batch.

        Raises:
            DataError: Sizes differ.
        """
        sizes = {tuple(sample["volume"].shape) for sample in samples}
        if len(sizes) > 1:
            raise DataError(
                f"volumes of {shown(sorted(sizes))} do not make a batch; batch_size=1 takes any"
            )
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def loss(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        label_smoothing: float = 0.0,
        loss: LossName = "dice_cross_entropy",
    ) -> tuple[Tensor, int]:
        """Loss summed over the volumes, and their number.

        Args:
            model: Gives logits for ``batch["volume"]``, or a tuple of them, finest first.
            batch: Also holds ``target``, the class of every voxel.
            label_smoothing: Share of each target that all classes have alike, in [0, 1).
            loss: As `VolumeRecipe` names it.
        """
        outputs, target = model(batch["volume"]), batch["target"]
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        chosen = loss_named(loss, label_smoothing)
        return deeply_supervised(chosen, outputs, target).sum(), len(target)

    def run(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        *,
        overlap: float = 0.5,
        mirror: bool = False,
        uncertainty: bool = False,
        memory_budget: int | None = None,
    ) -> list[Found]:
        """The most probable class of every voxel, decided slab by slab.

        Args:
            model: Gives logits.
            batch: Of `collate`.
            overlap: Share of a window that the next one covers again, in [0, 1).
            mirror: Average over mirrored volumes, along the axes that the weights allow.
            uncertainty: Also say how unsure each voxel is; mirrors too.
            memory_budget: Bytes that this may take beside the volume. It decides how many windows
                are predicted at once, and the predicted peak is printed first.

        Raises:
            ConfigError: One window alone takes more than the budget, or `overlap` is out of range.
        """
        volume = batch["volume"]
        depth, height, width = volume.shape[2:]
        window = self.preprocessing.window or (depth, height, width)
        predict: Callable[[Tensor], Tensor] = model
        if mirror or uncertainty:
            predict = mirror_averaged(model, self.preprocessing)
        if uncertainty:
            predict = with_uncertainty(predict)
        count = 1
        if memory_budget is not None:
            shape = (len(volume), volume.shape[1], depth, height, width)
            count = windows_within(memory_budget, model, shape, window, self.classes or 2, overlap)
        mask: Tensor | None = None
        unsure: Tensor | None = None
        for slab, begin in slabs(predict, volume, window, overlap=overlap, batch_size=count):
            end, classes = begin + slab.shape[2], slab.shape[1] - uncertainty
            if mask is None:
                kind = torch.uint8 if classes <= 256 else torch.int32
                mask = volume.new_empty((len(volume), *volume.shape[2:]), dtype=kind)
                unsure = torch.empty_like(mask, dtype=torch.float32) if uncertainty else None
            mask[:, begin:end] = most_probable(slab[:, :classes])
            if unsure is not None:
                unsure[:, begin:end] = slab[:, classes]
        assert mask is not None  # a volume has at least one slab
        maps = [None] * len(mask) if unsure is None else list(unsure)
        return [Found(one, classes, other) for one, other in zip(mask, maps, strict=True)]

    def decode(
        self,
        outputs: list[Found],
        *,
        samples: list[VolumeSample],
        largest_component: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Masks on the grid of the volumes as they were given.

        Args:
            outputs: Of `run`.
            samples: Of `read`; their files are written here.
            largest_component: Keep of each label the largest part only; None does what the weights
                say.

        Returns:
            For every volume ``mask``, a uint8 array (uint16 above 256 classes), and ``voxels``,
            number of voxels by label, without the background; of a file or a `Volume` also
            ``volumes_ml``, the same in ml; and ``uncertainty`` in [0, 1], if it was asked for.
        """
        clean = self.preprocessing.largest_component
        if largest_component is not None:
            clean = largest_component
        answers = []
        for found, sample in zip(outputs, samples, strict=True):
            kind = np.uint8 if found.classes <= 256 else np.uint16
            mask = resampled_mask(found.mask.cpu(), sample.size).numpy().astype(kind)
            if clean:
                mask = largest_components(mask)
            stood, mask = mask, np.ascontiguousarray(sample.turn.back(mask))
            names = list(self.labels or [str(index) for index in range(found.classes)])
            counts = np.bincount(mask.ravel(), minlength=found.classes)
            voxels = {names[index]: int(counts[index]) for index in range(1, found.classes)}
            answer: dict[str, Any] = {"mask": mask, "voxels": voxels}
            if sample.source is not None:
                answer["volumes_ml"] = millilitres(mask, sample.source, names)
            if found.uncertainty is not None:
                unsure = resampled(found.uncertainty.cpu()[None], sample.size)[0].numpy()
                answer["uncertainty"] = np.ascontiguousarray(sample.turn.back(unsure))
            if sample.out is not None and sample.source is not None:
                write_mask(mask, sample.source, sample.out)
            if sample.montage is not None:
                seen = resampled(sample["volume"][:1], sample.size)[0].numpy()
                write_montage(sample.montage, seen, stood, sample.spacing, names)
            answers.append(answer)
        return answers

    def measure(
        self,
        predict: Callable[..., list[dict[str, Any]]],
        examples: Iterable[tuple[Any, Any]],
    ) -> dict[str, float]:
        """Dice coefficients in [0, 1] and 95th percentiles of Hausdorff distances in mm.

        Both are means over the volumes. Two empty masks count as 1 and 0 mm; one that is empty
        where the other is not counts as 0 and as the diagonal of the volume, and is also counted.

        Args:
            predict: Answers for a list of raw volumes, for example a pipeline.
            examples: Raw volumes with the class of every voxel; they are streamed.

        Returns:
            ``dice_LABEL`` for every label but the background, and ``dice``, their mean; the same
            of ``hd95`` (the larger of both directions); ``missed`` and ``false_alarms``, numbers of
            labels that only the reference or only the answer has.

        Raises:
            DataError: There are no examples, or labels are no whole numbers or of another size.
        """
        sums: dict[str, dict[str, float]] = {"dice": {}, "hd95": {}}
        missed = false_alarms = count = 0
        source = iter(examples)
        while chunk := list(islice(source, CHUNK)):
            answers = predict([raw for raw, _ in chunk])
            for answer, (_, target) in zip(answers, chunk, strict=True):
                reference, spacing = _reference(target)
                for index, name in enumerate(answer["voxels"], 1):
                    pair = answer["mask"], reference
                    found = {
                        "dice": dice(*pair, empty="one", label=index),
                        "hd95": hausdorff(
                            *pair, spacing, empty="penalty", percentile=95, label=index
                        ),
                    }
                    for metric, value in found.items():
                        sums[metric][name] = sums[metric].get(name, 0.0) + value
                    has, should = (bool((mask == index).any()) for mask in pair)
                    missed += should and not has
                    false_alarms += has and not should
            count += len(chunk)
        if not count:
            raise DataError("there are no examples to measure on; check the split")
        measured: dict[str, float] = {}
        for metric, totals in sums.items():
            means = {f"{metric}_{name}": total / count for name, total in totals.items()}
            measured |= {metric: sum(means.values()) / len(means), **means}
        return {**measured, "missed": float(missed), "false_alarms": float(false_alarms)}

    def lines(self, items: list[Any], answers: list[dict[str, Any]]) -> list[str]:
        """Answers for people: the volume of every label."""
        return [
            f"{item}\t" + "  ".join(f"{name} {ml:.3f} ml" for name, ml in a["volumes_ml"].items())
            for item, a in zip(items, answers, strict=True)
        ]

    def graph(self, model: nn.Module) -> nn.Module:
        """The network from intensities to logits, normalisation included."""
        return VolumeGraph(model, self.preprocessing)


def _parts(raw: object) -> tuple[Any, ...]:
    """The channels of an input that are given one by one."""
    return raw if isinstance(raw, tuple) else (raw,)


class VolumeGraph(nn.Module):
    """A network that takes intensities as the scanner gives them.

    Args:
        model: Takes the normalised volume.
        spec: Says how it is normalised.
    """

    def __init__(self, model: nn.Module, spec: VolumePreprocessing) -> None:
        super().__init__()
        self.model, self.spec = model, spec

    def forward(
        self, volume: Float[Tensor, "batch channels depth height width"]
    ) -> Float[Tensor, "batch classes depth height width"]:
        """Logits."""
        return self.model(normalised(volume, self.spec))


def normalised(
    volume: Float[Tensor, "*batch channels depth height width"],
    spec: VolumePreprocessing | None = None,
) -> Float32[Tensor, "*batch channels depth height width"]:
    """Every channel with mean 0 and deviation 1; one of a single value becomes 0.

    Where `spec` has a mean and a deviation, those of the data set take the place of the volume's.
    """
    volume = volume.float()
    if spec is not None and spec.clip is not None:
        volume = volume.clamp(*spec.clip)
    if spec is not None and spec.mean is not None and spec.std is not None:
        return (volume - spec.mean) / spec.std
    centred = volume - volume.mean((-3, -2, -1), keepdim=True)
    deviation = centred.square().mean((-3, -2, -1), keepdim=True).sqrt()
    return centred / torch.where(deviation == 0, 1.0, deviation)


def loss_named(name: LossName, label_smoothing: float = 0.0) -> Loss:
    """A loss of two parts, of which cross-entropy or its focal form teaches where no label is.

    Raises:
        ConfigError: There is no such loss, or a smoothed target for the focal one.
    """
    entropy = partial(cross_entropy, label_smoothing=label_smoothing)
    if name == "dice_cross_entropy":
        return partial(dice_cross_entropy, label_smoothing=label_smoothing)
    if name == "tversky_cross_entropy":
        return lambda logits, target: tversky_loss(logits, target) + entropy(logits, target)
    if name == "generalised_dice_cross_entropy":
        return lambda logits, target: (
            generalised_dice_loss(logits, target) + entropy(logits, target)
        )
    if name == "dice_focal":
        if label_smoothing:
            raise ConfigError("dice_focal takes no label_smoothing; set it to 0")
        return lambda logits, target: dice_loss(logits, target) + focal_loss(logits, target)
    raise ConfigError(f"loss is {shown(name)}; see vision.volume_augment.LossName")


def windows_within(
    budget: int,
    model: nn.Module,
    shape: tuple[int, int, int, int, int],
    window: Axes,
    classes: int,
    overlap: float,
) -> int:
    """Windows to predict at once so that memory stays within a budget; prints the peak.

    Args:
        budget: Bytes.
        model: In eval mode.
        shape: Of the volume: batch, channels, depth, height, width.
        window: Voxels that the model sees at once.
        classes: Of its answers.
        overlap: Of the windows.

    Raises:
        ConfigError: One window alone takes more.
    """
    one = forward_bytes(model, (shape[0], shape[1], *window))
    one += 3 * 4 * shape[0] * classes * math.prod(window)  # probabilities, mirrored and added up
    places = (starts(n, size, overlap) for n, size in zip(shape[3:], window[1:], strict=True))
    most = min(WINDOWS, math.prod(map(len, places)))

    def peak(count: int) -> int:
        return peak_bytes(shape, classes, window, batch_size=count) + count * one

    if peak(1) > budget:
        raise ConfigError(
            f"memory_budget is {shown_bytes(budget)} and one window of {window} takes "
            f"{shown_bytes(peak(1))}; give as much, or weights with a smaller window"
        )
    count = 1
    while count < most and peak(count + 1) <= budget:
        count += 1
    print(
        f"predicted peak {shown_bytes(peak(count))} of {shown_bytes(budget)}, {count} windows of "
        f"{window} at once",
        file=sys.stderr,
    )
    return count


def ct_window(rows: Any) -> dict[str, Any]:
    """Range, mean and deviation of the intensities in labelled voxels of CT, in its own units.

    Source: Isensee et al. 2021, https://doi.org/10.1038/s41592-020-01008-z, methods: percentiles
        0.5 and 99.5 of the foreground.
    """
    voxels = []
    random = np.random.default_rng(0)
    for index in range(0, len(rows), max(1, len(rows) // CT_CASES)):
        raw, target = rows[index]
        inside = read_volume(raw).data[read_volume(target).data > 0]
        if len(inside):
            voxels.append(random.choice(inside, min(CT_VOXELS, len(inside)), replace=False))
    if not voxels:
        return {}
    values = np.concatenate(voxels).astype(np.float64)
    low, high = np.percentile(values, (0.5, 99.5))
    if not low < high:
        return {}
    values = values.clip(low, high)
    clip = (float(low), float(high))
    return {"clip": clip, "mean": float(values.mean()), "std": float(values.std())}


def _whole(data: np.ndarray) -> np.ndarray:
    """Labels as whole numbers, also where a file has stored them as floats."""
    whole = data.astype(np.int64)
    if data.dtype.kind == "f" and not np.array_equal(whole, data):
        raise DataError("labels are no whole numbers; give the file of the mask, not of the image")
    if whole.min() < 0:
        raise DataError(f"a voxel has the label {whole.min()}; labels count from 0")
    return whole


def _reference(target: Any) -> tuple[np.ndarray, Spacing]:
    """Labels to measure against, in the order of their file, with their spacing in mm."""
    if isinstance(target, str | Path):
        target = read_volume(target)
    if isinstance(target, Volume):
        return _whole(target.data), target.spacing
    return np.asarray(target), (1.0, 1.0, 1.0)
