"""What models of sound are used for: raw inputs to samples, and outputs to answers and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from audio.augment import SoundRecipe, augmented
from audio.features import FeatureSpec
from audio.fsdd import FSDD
from audio.sound import SUFFIXES, at_rate, read_sound
from zoo.cards import Card
from zoo.config import build
from zoo.data import Dataset
from zoo.errors import CardError, DataError
from zoo.ranking import ranked
from zoo.training.recipe import Recipe

CHUNK = 256  # clips held at a time while measuring


@dataclass(frozen=True, kw_only=True)
class SoundPreprocessing:
    """What a clip is made into before the network, whose features are its own.

    Attributes:
        sample_rate: Samples a second, the same as that of the network's features.
    """

    sample_rate: int = 16_000


class AudioClassification:
    """One label for one clip; samples are ``{"samples": (n,)}``, and batches have a mask.

    Args:
        card: Narrowed to the weights in use.
        file: Path of an auxiliary file of the weights; unused, sound needs none.

    Raises:
        CardError: The network's features are of another rate than the card prepares.
    """

    name: ClassVar[str] = "audio-classification"
    recipe: ClassVar[type[Recipe]] = SoundRecipe
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    finetuning: ClassVar[dict[str, Any]] = {"speed": 0.1, "gain_db": 6.0, "noise_share": 0.5}
    datasets: ClassVar[dict[str, Dataset]] = {"fsdd": FSDD}

    def __init__(self, card: Card, file: Callable[[str], Path]) -> None:
        where = f"{card.full_name}: preprocessing"
        self.preprocessing = build(
            SoundPreprocessing, card.preprocessing, where=where, error=CardError
        )
        self.labels = card.labels
        self.sample_rate = self.preprocessing.sample_rate
        own = card.weights[card.tag].config if card.tag else {}
        features = {**own, **card.config}.get("features", {})
        if isinstance(features, Mapping):
            features = build(FeatureSpec, features, where=where, error=CardError)
        if features.sample_rate != self.sample_rate:
            raise CardError(
                f"{where}: sample_rate is {self.sample_rate}, and the network's features are of "
                f"{features.sample_rate}; write the same"
            )

    def read(self, raw: object, *, sample_rate: int | None = None) -> dict[str, Tensor]:
        """One clip at the network's rate; `audio.sound.read_sound` says what is taken."""
        return {"samples": at_rate(read_sound(raw, sample_rate=sample_rate), self.sample_rate)}

    def example(
        self,
        raw: object,
        target: int,
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """One clip with its class, for `collate` and `loss`.

        Args:
            raw: What `audio.sound.read_sound` takes.
            target: The class.
            recipe: Says how to augment; None prepares the clip as for an answer.
            generator: Of the augmentation.
            size: Unused; clips have their own length.
        """
        samples = augmented(self.read(raw)["samples"], self.sample_rate, recipe, generator)
        return {"samples": samples, "target": torch.tensor(target)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Clips padded to the longest, and a mask of what is theirs."""
        longest = max(len(sample["samples"]) for sample in samples)
        batch = {"samples": [], "mask": []}
        for sample in samples:
            rest = longest - len(sample["samples"])
            batch["samples"].append(F.pad(sample["samples"], (0, rest)))
            mask = torch.ones(len(sample["samples"]), dtype=torch.int64)
            batch["mask"].append(F.pad(mask, (0, rest)))
        if "target" in samples[0]:
            batch["target"] = [sample["target"] for sample in samples]
        return {name: torch.stack(tensors) for name, tensors in batch.items()}

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Cross-entropy in nats, summed over the clips, and their number."""
        logits, target = model(batch["samples"], batch["mask"]).float(), batch["target"]
        total = F.cross_entropy(logits, target, reduction="sum", label_smoothing=label_smoothing)
        return total, len(target)

    def decode(self, logits: Tensor, *, top_k: int = 5) -> list[list[dict[str, Any]]]:
        """The `top_k` most probable classes of each clip, as `zoo.ranking.ranked` gives them."""
        return ranked(logits, self.labels, top_k)

    def measure(
        self,
        predict: Callable[..., list[list[dict[str, Any]]]],
        examples: Iterable[tuple[Any, int]],
    ) -> dict[str, float]:
        """Share of clips whose most probable class is theirs.

        Raises:
            DataError: There are no examples.
        """
        source, count, right = iter(examples), 0, 0
        while chunk := list(islice(source, CHUNK)):
            answers = predict([raw for raw, _ in chunk], top_k=1)
            right += sum(a[0]["index"] == t for a, (_, t) in zip(answers, chunk, strict=True))
            count += len(chunk)
        if not count:
            raise DataError("there are no examples to measure on; check the split")
        return {"accuracy": right / count}
