"""Tasks on text: what each reads, what it answers, how it is trained and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from nlp.text import IGNORED, TextPreprocessing, Tokenizer, collate, sample
from zoo.cards import Card, TensorSpec
from zoo.config import build
from zoo.data import Dataset
from zoo.errors import CardError, ConfigError, DataError, shown
from zoo.ranking import ranked
from zoo.training.recipe import Recipe

CHUNK = 1024  # examples that `measure` hands over at a time
TOP_SCORE = 5.0  # of STS-B: the same meaning

Predict = Callable[..., Any]  # a pipeline: a list of raw inputs -> their answers


def read_parquet(path: Path, *, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Rows of a parquet file as the Hugging Face hub lays it out, in order.

    Args:
        path: The file; it is streamed.
        columns: Their names, in the order in which each row gives them.

    Raises:
        DataError: Not a parquet file, or one without these columns.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(CHUNK, columns=list(columns)):
                yield from zip(*(batch.column(c).to_pylist() for c in columns), strict=True)
    except (pyarrow.ArrowInvalid, KeyError) as error:
        raise DataError(
            f"{shown(str(path))} is not a parquet file with the columns {', '.join(columns)}; "
            "get the published one"
        ) from error


def read_pairs(path: Path) -> Iterator[tuple[tuple[str, str], float]]:
    """Pairs of sentences with their scores from 0 to 5, as STS-B is published."""
    for first, second, score in read_parquet(path, columns=("sentence1", "sentence2", "label")):
        yield (first, second), score


class TextTask:
    """What every task on text shares: the tokenizer of the weights, reading and padding.

    Args:
        card: Narrowed to the weights in use.
        file: Path of an auxiliary file of the weights: the tokenizer.
    """

    name: ClassVar[str]
    target: ClassVar[Literal["class", "number", "tokens"]] = "class"
    recipe: ClassVar[type[Recipe]] = Recipe
    inputs: ClassVar[dict[str, TensorSpec]] = {}  # beside ids and mask
    outputs: ClassVar[dict[str, TensorSpec]]  # of a model that is loaded for this task
    datasets: ClassVar[dict[str, Dataset]] = {}

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

    def length(self, raw: Any) -> int:
        """Characters of a text or a pair, which tells its tokens well enough to sort by."""
        return sum(map(len, raw)) if isinstance(raw, tuple) else len(raw)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Number of items that the loss of a batch is a sum over."""
        return len(batch["target"])

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of what `read` or `example` gave."""
        return collate(samples) | _targets(samples)

    def graph(self, model: nn.Module) -> nn.Module:
        """Ids and mask to the task's outputs: pooling and heads are part of the model."""
        return model


class SentenceEmbedding(TextTask):
    """A vector of unit length for each text; the dot product of two is their likeness."""

    name = "sentence-embedding"
    target = "number"
    outputs: ClassVar[dict[str, TensorSpec]] = {
        "sentence_embedding": TensorSpec(dtype="float32", shape=("batch", "embed_dim"))
    }
    datasets: ClassVar[dict[str, Dataset]] = {
        "stsb": Dataset(
            name="stsb",
            files={
                "train": "glue/stsb/train-00000-of-00001.parquet",
                "validation": "glue/stsb/validation-00000-of-00001.parquet",
                "test": "glue/stsb/test-00000-of-00001.parquet",
            },
            read=read_pairs,
            columns=("sentence1", "sentence2", "label"),
            home="https://huggingface.co/datasets/nyu-mll/glue",
        )
    }

    def read(self, raw: object) -> dict[str, Tensor]:
        """One text as the model takes it, without a batch axis.

        Raises:
            DataError: It is no text, or a pair, of which each text has its own vector.
        """
        if not isinstance(raw, str):
            raise DataError(f"{shown(raw)} is no text; {self.name} takes a str, or a list of them")
        return super().read(raw)

    def example(
        self,
        raw: tuple[str, str],
        target: float,
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """A pair of texts with its score from 0 to 5; the last three are not used."""
        first, second = map(self.read, raw)
        other = {f"second_{name}": tensor for name, tensor in second.items()}
        return {**first, **other, "target": torch.tensor(float(target))}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of texts; of pairs, all the first texts and then all the second ones."""
        mark = "second_"
        seconds = [
            {name.removeprefix(mark): t for name, t in row.items() if name.startswith(mark)}
            for row in samples
        ]
        return collate([*samples, *filter(None, seconds)]) | _targets(samples)

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Squared error of the cosine of each pair against its score, sum and count.

        Raises:
            ConfigError: Labels are to be smoothed; scores are no classes.

        Source: Reimers and Gurevych 2019, section 3, regression objective.
        """
        if label_smoothing:
            raise ConfigError(f"label_smoothing is {label_smoothing}; {self.name} takes 0")
        first, second = model(**_inputs(batch)).chunk(2)
        cosine = (first * second).sum(-1)
        return (cosine - batch["target"] / TOP_SCORE).square().sum(), len(cosine)

    def decode(self, outputs: Tensor) -> list[np.ndarray]:
        """One float32 vector a row."""
        return list(outputs.float().cpu().numpy())

    @staticmethod
    def gather(answers: Sequence[np.ndarray]) -> np.ndarray:
        """The answers to a list as one array (n, dim)."""
        return np.stack(answers)

    def lines(self, texts: Sequence[str], answers: Sequence[np.ndarray]) -> Iterator[str]:
        """For people: the texts after the first by their likeness to it, best first."""
        first, *others = answers
        yield f"{texts[0]}  ({len(first)} numbers)"
        scores = [float(first @ other) for other in others]
        for score, text in sorted(zip(scores, texts[1:], strict=True), reverse=True):
            yield f"{score:6.3f}  {text}"

    def measure(self, predict: Predict, examples: Iterable[tuple[Any, float]]) -> dict[str, float]:
        """Spearman's rank correlation of the cosine of each pair with its score."""
        from scipy.stats import spearmanr  # half a second to import

        pairs, scores = _columns(list(examples))
        index = {text: i for i, text in enumerate(dict.fromkeys(t for pair in pairs for t in pair))}
        vectors = np.concatenate([predict(part) for part in _chunks(index)])
        first, second = (vectors[[index[pair[side]] for pair in pairs]] for side in (0, 1))
        return {"spearman": float(spearmanr((first * second).sum(1), scores).statistic)}


class TextClassification(TextTask):
    """One class for each text or pair."""

    name = "text-classification"
    inputs: ClassVar[dict[str, TensorSpec]] = {  # pairs have two segments
        "token_type_ids": TensorSpec(dtype="int64", shape=("batch", "tokens"), range=(0, 2))
    }
    outputs: ClassVar[dict[str, TensorSpec]] = {
        "logits": TensorSpec(dtype="float32", shape=("batch", "num_classes"))
    }
    datasets: ClassVar[dict[str, Dataset]] = {
        "sst2": Dataset(
            name="sst2",
            files={
                "train": "glue/sst2/train-00000-of-00001.parquet",
                "validation": "glue/sst2/validation-00000-of-00001.parquet",
            },
            read=partial(read_parquet, columns=("sentence", "label")),
            columns=("sentence", "label"),
            home="https://huggingface.co/datasets/nyu-mll/glue",
        )
    }

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Cross-entropy, sum and count; `label_smoothing` of each target goes to all classes."""
        logits, target = model(**_inputs(batch)).float(), batch["target"]
        total = F.cross_entropy(logits, target, reduction="sum", label_smoothing=label_smoothing)
        return total, len(target)

    def decode(self, outputs: Tensor, *, top_k: int = 5) -> list[list[dict[str, Any]]]:
        """Classes by probability, best first."""
        return ranked(outputs, self.card.labels, top_k)

    def measure(self, predict: Predict, examples: Iterable[tuple[Any, int]]) -> dict[str, float]:
        """Share of texts whose most probable class is theirs."""
        return {"accuracy": _share(predict, examples, "index")}


class FillMask(TextTask):
    """The words that a text lacks where it says ``[MASK]``."""

    name = "fill-mask"
    target = "tokens"
    outputs: ClassVar[dict[str, TensorSpec]] = {
        "logits": TensorSpec(dtype="float32", shape=("batch", "tokens", "vocab_size"))
    }

    def read(self, raw: object) -> dict[str, Tensor]:
        """One text as the model takes it, and the characters of each token, for `decode`.

        Raises:
            DataError: It is no valid text, or none of the tokens that fit is ``[MASK]``.
        """
        if not isinstance(raw, str):
            raise DataError(f"{shown(raw)} is no text; {self.name} takes a str, or a list of them")
        encoding = self.tokenizer.encode(raw)
        if self.tokenizer.id_of("[MASK]") not in encoding.ids:
            where = f" in the {len(encoding.ids)} tokens that fit" if encoding.dropped else ""
            raise DataError(f"{shown(raw)} has no [MASK]{where}; write it where a word is missing")
        return {**sample(encoding), "offsets": torch.tensor(encoding.offsets)}

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Number of tokens that have a target; a batch may have none."""
        return int((batch["target"] != IGNORED).sum())

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Cross-entropy of the tokens whose target is not -100, sum and count."""
        logits, target = model(**_inputs(batch)).flatten(0, 1), batch["target"].flatten()
        total = F.cross_entropy(
            logits.float(),
            target,
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
        return total, self.count(batch)

    def decode(
        self, outputs: Tensor, samples: Sequence[Mapping[str, Tensor]], *, top_k: int = 5
    ) -> list[list[dict[str, Any]]]:
        """For each ``[MASK]`` in turn, the `top_k` most probable tokens, best first.

        Args:
            outputs: Logits, shape (batch, tokens, vocabulary).
            samples: What `read` gave for each row.
            top_k: How many for each ``[MASK]``.

        Returns:
            For each text, records ``{"start", "end", "text", "score"}``; the characters are those
            of the ``[MASK]``.
        """
        return [
            self._fill(row, logits.cpu(), top_k)
            for row, logits in zip(samples, outputs, strict=True)
        ]

    def _fill(self, row: Mapping[str, Tensor], logits: Tensor, top_k: int) -> list[dict[str, Any]]:
        places = (row["input_ids"] == self.tokenizer.id_of("[MASK]")).nonzero().flatten()
        spans, best = row["offsets"][places].tolist(), ranked(logits[places], None, top_k)
        return [
            {
                "start": start,
                "end": end,
                "text": self.tokenizer.token_of(record["index"]),
                "score": record["score"],
            }
            for (start, end), records in zip(spans, best, strict=True)
            for record in records
        ]

    def measure(self, predict: Predict, examples: Iterable[tuple[str, str]]) -> dict[str, float]:
        """Share of texts whose first missing word is the most probable token."""
        return {"accuracy": _share(predict, examples, "text")}


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "target"}


def _targets(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Targets of a batch, if it has any: one a row, or one a token, padded to be ignored."""
    if "target" not in samples[0]:
        return {}
    targets = [row["target"] for row in samples]
    if targets[0].ndim:
        return {"target": pad_sequence(targets, batch_first=True, padding_value=IGNORED)}
    return {"target": torch.stack(targets)}


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def _columns(examples: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Raw inputs and targets."""
    if not examples:
        raise DataError("there are no examples to measure on; check the split")
    return [raw for raw, _ in examples], [target for _, target in examples]


def _share(predict: Predict, examples: Iterable[tuple[Any, Any]], key: str) -> float:
    """Share of examples whose best answer holds the target under `key`."""
    right = total = 0
    for chunk in _chunks(examples):
        raws, targets = _columns(chunk)
        answers = predict(raws, top_k=1)
        right += sum(a[0][key] == target for a, target in zip(answers, targets, strict=True))
        total += len(chunk)
    if not total:
        raise DataError("there are no examples to measure on; check the split")
    return right / total
