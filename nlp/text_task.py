"""What all tasks on text share: the tokenizer of the weights, reading, padding, counting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from nlp.text import (
    IGNORED,
    INPUTS,
    TextPreprocessing,
    Tokenizer,
    Window,
    collate,
    sample,
    sample_of_windows,
)
from zoo.cards import Card, TensorSpec
from zoo.config import build
from zoo.data import Dataset, Made
from zoo.errors import CardError, DataError, shown
from zoo.training.recipe import Recipe

CHUNK = 1024  # examples that `measure` hands over at a time
ROWS = 32  # windows of long texts that the model sees at a time

Predict = Callable[..., Any]  # a pipeline: a list of raw inputs -> their answers

# Of a task whose models tell the texts of a pair apart.
SEGMENTS = {"token_type_ids": TensorSpec(dtype="int64", shape=("batch", "tokens"), range=(0, 2))}


class TextTask:
    """What every task on text shares: the tokenizer of the weights, reading and padding.

    Args:
        card: Narrowed to the weights in use.
        file: Path of an auxiliary file of the weights: the tokenizer.
    """

    name: ClassVar[str]
    target: ClassVar[Literal["class", "number", "text", "tokens", "spans"]] = "class"
    recipe: ClassVar[type[Recipe]] = Recipe
    inputs: ClassVar[dict[str, TensorSpec]] = {}  # beside ids and mask
    outputs: ClassVar[dict[str, TensorSpec]]  # of a model that is loaded for this task
    datasets: ClassVar[dict[str, Dataset | Made]] = {}
    budget: ClassVar[int] = 1024  # tokens of a batch: its hidden states stay in a core's cache

    def __init__(self, card: Card, file: Callable[[str], Path]) -> None:
        self.card, self._file = card, file
        where = f"{card.full_name}: preprocessing"
        self.preprocessing = build(
            TextPreprocessing, card.preprocessing, where=where, error=CardError
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the weights, opened when it is first needed."""
        return Tokenizer(self._file(self.preprocessing.tokenizer), self.preprocessing)

    def read(self, raw: object) -> dict[str, Tensor]:
        """One text, or a pair, as the model takes it, without a batch axis.

        Raises:
            DataError: It is neither, or no valid text.
        """
        return sample(self.tokenizer.encode(raw))

    def example(
        self,
        raw: Any,
        target: Any,
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """One text with its target, for `collate` and `loss`.

        Texts are not augmented: the last three are there because images are.
        """
        return {**self.read(raw), "target": torch.as_tensor(target)}

    def examine(self, raw: Any, target: Any) -> None:
        """Read an item as it is learnt, only to see that it can be.

        Raises:
            DataError: It cannot.
        """
        self.read(raw)

    def length(self, raw: Any) -> int:
        """Characters of a text or a pair, which tells its tokens well enough to sort by."""
        return sum(map(len, raw)) if isinstance(raw, tuple) else len(raw)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Number of items that the loss of a batch is a sum over."""
        return len(batch["target"])

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of what `read` or `example` gave."""
        return collate(samples) | targets(samples)

    def graph(self, model: nn.Module) -> nn.Module:
        """Ids and mask to the task's outputs: pooling and heads are part of the model."""
        return model


class WindowTask(TextTask):
    """A task that answers with places in a text, which may be of any length.

    A sample holds the windows of one text, a batch those of all its texts.
    """

    target = "spans"

    def windowed(self, text: str, windows: Sequence[Window]) -> dict[str, Tensor]:
        """The windows of a text, its characters and those of each token, for `decode`."""
        return {
            **sample_of_windows(windows),
            "text": torch.tensor([ord(letter) for letter in text], dtype=torch.int64),
            "offsets": _padded([torch.tensor(w.encoding.offsets) for w in windows]),
            "heads": _padded([torch.tensor(w.heads) for w in windows]),
        }

    def run(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits of every window, `ROWS` of them at a time: a text may have thousands."""
        names = list(batch)
        pieces = zip(*(batch[name].split(ROWS) for name in names), strict=True)
        return torch.cat([model(**dict(zip(names, piece, strict=True))) for piece in pieces])


def by_text(outputs: Tensor, samples: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """The outputs of a batch of windows, text by text, without the padding of the batch."""
    counts = [len(row["input_ids"]) for row in samples]
    for part, row in zip(outputs.cpu().split(counts), samples, strict=True):
        yield part[:, : row["input_ids"].shape[1]]


def widened(rows: Sequence[Tensor], value: int) -> Tensor:
    """Windows of all texts, (windows, tokens) each, one below the other; `value` fills them up."""
    widest = max(row.shape[1] for row in rows)
    return torch.cat([F.pad(row, (0, widest - row.shape[1]), value=value) for row in rows])


def characters(row: Mapping[str, Tensor], start: int, end: int) -> str:
    """Some characters of a sample's text."""
    return "".join(map(chr, row["text"][start:end].tolist()))


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch goes to the model."""
    return {name: batch[name] for name in INPUTS if name in batch}


def targets(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Targets of a batch, if it has any: one a row, or one a token, padded to be ignored."""
    if "target" not in samples[0]:
        return {}
    found = [row["target"] for row in samples]
    if found[0].ndim:
        return {"target": pad_sequence(found, batch_first=True, padding_value=IGNORED)}
    return {"target": torch.stack(found)}


def chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    """The items in lists of `CHUNK`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def columns(examples: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Raw inputs and targets."""
    if not examples:
        raise DataError("there are no examples to measure on; check the split")
    return [raw for raw, _ in examples], [target for _, target in examples]


def share(predict: Predict, examples: Iterable[tuple[Any, Any]], key: str) -> float:
    """Share of examples whose best answer holds the target under `key`."""
    right = total = 0
    for chunk in chunks(examples):
        raws, targets = columns(chunk)
        answers = predict(raws, top_k=1)
        right += sum(a[0][key] == target for a, target in zip(answers, targets, strict=True))
        total += len(chunk)
    if not total:
        raise DataError("there are no examples to measure on; check the split")
    return right / total


def one_text(raw: object, name: str) -> str:
    """The raw input of a task that takes single texts.

    Raises:
        DataError: It is something else.
    """
    if not isinstance(raw, str):
        raise DataError(f"{shown(raw)} is no text; {name} takes a str, or a list of them")
    return raw


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)
