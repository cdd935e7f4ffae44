"""What vision models are used for: raw inputs to samples, and outputs to answers and numbers.

The classes here hold no parameters; a card names one, and `zoo.registry` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from vision.augment import ImageRecipe, augmented
from vision.images import ImagePreprocessing, Pixels, decode, prepare
from zoo.cards import Card
from zoo.config import build
from zoo.data import Dataset
from zoo.errors import CardError, DataError, shown
from zoo.ranking import ranked
from zoo.training.recipe import Recipe

CHUNK = 256  # encoded images held at a time while measuring
# Files of a folder that are taken as images; Pillow tells by their content what they are.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

# For models without weights, whose card has no preprocessing: the usual one of ImageNet.
UNTRAINED = ImagePreprocessing(
    size=256,
    resize="shorter",
    crop=224,
    interpolation="bilinear",
    antialias=True,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)


def read_parquet(path: Path, *, column: str) -> Iterator[tuple[bytes, int]]:
    """Encoded images and labels of a parquet file as the Hugging Face hub lays it out, in order.

    Args:
        path: The file; it is streamed.
        column: Name of the image column, a struct with the field ``bytes``.

    Raises:
        DataError: Not a parquet file, or one without these columns.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(CHUNK, columns=[f"{column}.bytes", "label"]):
                images = batch.column(column).field("bytes").to_pylist()
                yield from zip(images, batch.column("label").to_pylist(), strict=True)
    except (pyarrow.ArrowInvalid, KeyError) as error:
        raise DataError(
            f"{shown(str(path))} is not a parquet file with the columns '{column}' and 'label'; "
            "get the published one"
        ) from error


class ImageClassification:
    """One label for one image; samples are ``{"image": (channels, height, width)}``.

    Args:
        card: Narrowed to the weights in use; without preprocessing in it, `UNTRAINED` holds.
        file: Path of an auxiliary file of the weights; unused, images need none.
    """

    name: ClassVar[str] = "image-classification"
    recipe: ClassVar[type[Recipe]] = ImageRecipe
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    # Of fine-tuning on images of any kind and size; mirrored digits would be other signs.
    finetuning: ClassVar[dict[str, Any]] = {"random_resized_crop": (0.6, 1.0)}
    datasets: ClassVar[dict[str, Dataset]] = {
        "imagenet-sample": Dataset(
            name="imagenet-sample",
            files={"validation": "imagenet-sample/data/validation-00000-of-00001.parquet"},
            read=partial(read_parquet, column="image"),
            columns=("image", "label"),
            home="https://www.image-net.org",
        ),
        "cifar10": Dataset(
            name="cifar10",
            files={
                "train": "cifar10/plain_text/train-00000-of-00001.parquet",
                "test": "cifar10/plain_text/test-00000-of-00001.parquet",
            },
            read=partial(read_parquet, column="img"),
            columns=("img", "label"),
            home="https://huggingface.co/datasets/uoft-cs/cifar10",
        ),
    }

    def __init__(self, card: Card, file: Callable[[str], Path]) -> None:
        where = f"{card.full_name}: preprocessing"
        self.preprocessing = (
            build(ImagePreprocessing, card.preprocessing, where=where, error=CardError)
            if card.preprocessing
            else UNTRAINED
        )
        self.labels = card.labels
        channels = card.config.get("in_channels", card.inputs["image"].shape[1])
        if not isinstance(channels, int):
            raise CardError(
                f"{card.full_name}: the input 'image' has {shown(channels)} channels; give a number"
            )
        self.in_channels = channels

    def read(self, raw: object, *, layout: str | None = None) -> dict[str, Tensor]:
        """One prepared sample; `vision.images.decode` says what `raw` and `layout` may be."""
        image = decode(raw, layout=layout)
        return {"image": prepare(image, self.preprocessing, self.in_channels)}

    def example(
        self,
        raw: object,
        target: int,
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """One sample with its class, for `collate` and `loss`.

        Args:
            raw: What `vision.images.decode` takes.
            target: The class.
            recipe: Says how to augment; None prepares the image as for an answer.
            generator: Of the augmentation.
            size: Pixels of both sides, in place of the card's crop.
        """
        image = decode(raw)
        sample = augmented(image, self.preprocessing, self.in_channels, recipe, generator, size)
        return {"image": sample, "target": torch.tensor(target)}

    def decoded(self, raw: object) -> Pixels:
        """The pixels, which are a raw input too: what is worth keeping in a cache."""
        return decode(raw)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Samples of one size as a batch."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def inputs_of(
        self, batch: Mapping[str, Tensor], other: ImageClassification
    ) -> dict[str, Tensor]:
        """What this network sees of a batch that `other` prepared: its size, its normalisation.

        The images' size is to `other`'s crop as the result's is to this one's.
        """
        image = batch["image"]
        scale = self.preprocessing.crop / other.preprocessing.crop
        size = [max(1, round(side * scale)) for side in image.shape[2:]]
        if size != list(image.shape[2:]):
            image = F.interpolate(image, size=size, mode="bilinear", antialias=scale < 1)
        mean, std = self.preprocessing.statistics(self.in_channels)
        old_mean, old_std = other.preprocessing.statistics(other.in_channels)
        factor = image.new_tensor(old_std) / image.new_tensor(std)
        offset = (image.new_tensor(old_mean) - image.new_tensor(mean)) / image.new_tensor(std)
        return {"image": torch.addcmul(offset[:, None, None], image, factor[:, None, None])}

    def loss(
        self, model: nn.Module, batch: dict[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Cross-entropy in nats, summed over the images, and their number.

        Args:
            model: Gives logits for ``batch["image"]``.
            batch: Also holds ``target``: the int64 class of every image, or the float share of
                every class, shape (batch, classes), as `zoo.training.mixing.mix` gives it.
            label_smoothing: Share of each target that all classes have alike, in [0, 1].
        """
        logits, target = model(batch["image"]).float(), batch["target"]
        total = F.cross_entropy(logits, target, reduction="sum", label_smoothing=label_smoothing)
        return total, len(target)

    def decode(
        self, logits: Float[Tensor, "batch classes"], *, top_k: int = 5
    ) -> list[list[dict[str, Any]]]:
        """The `top_k` most probable classes of each image, as `zoo.ranking.ranked` gives them."""
        return ranked(logits, self.labels, top_k)

    def measure(
        self,
        predict: Callable[..., list[list[dict[str, Any]]]],
        examples: Iterable[tuple[Any, int]],
    ) -> dict[str, float]:
        """Accuracies in [0, 1]: the class is the first answer, or one of the first five.

        Args:
            predict: Answers for a list of raw images, for example a pipeline.
            examples: Raw images with their classes; they are streamed, and each counts once.

        Raises:
            DataError: There are no examples.
        """
        source = iter(examples)
        count = top1 = top5 = 0
        while chunk := list(islice(source, CHUNK)):
            answers = predict([raw for raw, _ in chunk], top_k=5)
            for answer, (_, target) in zip(answers, chunk, strict=True):
                found = [record["index"] for record in answer]
                top1 += found[0] == target
                top5 += target in found
            count += len(chunk)
        if not count:
            raise DataError("there are no examples to measure on; check the split")
        return {"top1": top1 / count, "top5": top5 / count}

    def graph(self, model: nn.Module) -> nn.Module:
        """The network from pixels at the card's crop to logits, normalisation included."""
        return ImageGraph(model, *self.preprocessing.statistics(self.in_channels))


class ImageGraph(nn.Module):
    """A network that takes 8-bit pixels; without its card it still cannot be fed the wrong scale.

    Args:
        model: Takes the normalised image.
        mean: Of every channel, for values in [0, 1].
        std: The same.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        for name, values in (("mean", mean), ("std", std)):
            tensor = torch.tensor(values, dtype=torch.float32)
            self.register_buffer(name, tensor[:, None, None], persistent=False)

    def forward(
        self, image: UInt8[Tensor, "batch channels height width"]
    ) -> Shaped[Tensor, "batch classes"]:
        """Logits."""
        return self.model((image / 255 - self.mean) / self.std)
