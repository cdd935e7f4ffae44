"""The task of volumetric segmentation: a class for every voxel.

Source: Isensee et al. 2018 (loss, normalisation), https://arxiv.org/abs/1809.10486
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from vision.losses import deeply_supervised, dice_cross_entropy
from vision.metrics import dice
from zoo.cards import Card
from zoo.data import Dataset
from zoo.errors import DataError, shown
from zoo.training.recipe import Recipe


class VolumeSegmentation:
    """One class for each voxel; samples are ``{"volume": (channels, depth, height, width)}``.

    Args:
        card: Narrowed to the weights in use.
        file: Path of an auxiliary file of the weights; unused, volumes need none.
    """

    name: ClassVar[str] = "volume-segmentation"
    recipe: ClassVar[type[Recipe]] = Recipe
    datasets: ClassVar[dict[str, Dataset]] = {}

    def __init__(self, card: Card, file: Callable[[str], Path]) -> None:
        self.labels = card.labels
        self.in_channels: int = card.config.get("in_channels", 1)

    def read(self, raw: object) -> dict[str, Tensor]:
        """One prepared sample: every channel with mean 0 and deviation 1.

        Args:
            raw: Array or tensor of intensities, (depth, height, width) for one channel, else
                (channels, depth, height, width).

        Raises:
            DataError: Anything else, other channels, or values that are not finite.
        """
        if not isinstance(raw, np.ndarray | Tensor):
            raise DataError(
                f"a volume is {shown(raw)}; it takes an array (depth, height, width) or "
                "(channels, depth, height, width)"
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
        return {"volume": normalised(volume)}

    def example(
        self,
        raw: object,
        target: Any,
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """One sample with the class of every voxel, for `collate` and `loss`.

        Args:
            raw: As `read` takes it.
            target: Whole numbers, array or tensor (depth, height, width).
            recipe: Unused, nothing is augmented.
            generator: Unused.

        Raises:
            DataError: As `read`, or the labels have another size or are no whole numbers.
        """
        sample = self.read(raw)
        labels = torch.as_tensor(target)
        if labels.is_floating_point() or labels.shape != sample["volume"].shape[1:]:
            raise DataError(
                f"labels are {str(labels.dtype).removeprefix('torch.')} {tuple(labels.shape)}; "
                f"they take whole numbers {tuple(sample['volume'].shape[1:])}, as the volume has"
            )
        return {**sample, "target": labels.long()}

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
        self, model: nn.Module, batch: dict[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Dice plus cross-entropy, summed over the volumes, and their number.

        Args:
            model: Gives logits for ``batch["volume"]``, or a tuple of them, finest first.
            batch: Also holds ``target``, the class of every voxel.
            label_smoothing: Share of each target that all classes have alike, in [0, 1).
        """
        outputs, target = model(batch["volume"]), batch["target"]
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        loss = partial(dice_cross_entropy, label_smoothing=label_smoothing)
        return deeply_supervised(loss, outputs, target).sum(), len(target)

    def decode(
        self, logits: Float[Tensor, "batch classes depth height width"]
    ) -> list[dict[str, Any]]:
        """The most probable class of every voxel, and the voxels that each class has.

        Returns:
            For every volume ``mask``, a uint8 array (uint16 above 256 classes), and ``voxels``,
            number of voxels by label, without the background.
        """
        classes = logits.shape[1]
        kind = np.uint8 if classes <= 256 else np.uint16
        names = self.labels or [str(index) for index in range(classes)]
        answers = []
        for mask in logits.argmax(1).cpu().numpy().astype(kind):
            counts = np.bincount(mask.ravel(), minlength=classes)
            voxels = {names[index]: int(counts[index]) for index in range(1, classes)}
            answers.append({"mask": mask, "voxels": voxels})
        return answers

    def measure(
        self,
        predict: Callable[..., list[dict[str, Any]]],
        examples: Iterable[tuple[Any, Any]],
    ) -> dict[str, float]:
        """Dice coefficients in [0, 1], means over the volumes; two empty masks count as 1.

        Args:
            predict: Answers for a list of raw volumes, for example a pipeline.
            examples: Raw volumes with the class of every voxel; they are streamed.

        Returns:
            ``dice_LABEL`` for every label but the background, and ``dice``, their mean.

        Raises:
            DataError: There are no examples, or labels are no whole numbers or of another size.
        """
        sums: dict[str, float] = {}
        count = 0
        for raw, target in examples:
            (answer,) = predict([raw])
            for index, name in enumerate(answer["voxels"], 1):
                found = dice(answer["mask"], target, empty="one", label=index)
                sums[f"dice_{name}"] = sums.get(f"dice_{name}", 0.0) + found
            count += 1
        if not count:
            raise DataError("there are no examples to measure on; check the split")
        measured = {name: total / count for name, total in sums.items()}
        return {"dice": sum(measured.values()) / len(measured), **measured}

    def graph(self, model: nn.Module) -> nn.Module:
        """The network from intensities to logits, normalisation included."""
        return VolumeGraph(model)


class VolumeGraph(nn.Module):
    """A network that takes intensities as the scanner gives them.

    Args:
        model: Takes the normalised volume.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, volume: Float[Tensor, "batch channels depth height width"]
    ) -> Float[Tensor, "batch classes depth height width"]:
        """Logits."""
        return self.model(normalised(volume))


def normalised(
    volume: Float[Tensor, "*batch channels depth height width"],
) -> Float32[Tensor, "*batch channels depth height width"]:
    """Every channel with mean 0 and deviation 1; one of a single value becomes 0."""
    volume = volume.float()
    centred = volume - volume.mean((-3, -2, -1), keepdim=True)
    deviation = centred.square().mean((-3, -2, -1), keepdim=True).sqrt()
    return centred / torch.where(deviation == 0, 1.0, deviation)
