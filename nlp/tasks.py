"""Tasks on text: what each reads, what it answers, how it is trained and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlp.answers import QuestionAnswering as QuestionAnswering  # tasks of the same models
from nlp.entities import TokenClassification as TokenClassification
from nlp.text import IGNORED, collate, sample
from nlp.text_task import (
    CHUNK,
    SEGMENTS,
    Predict,
    TextTask,
    chunks,
    columns,
    inputs_of,
    one_text,
    share,
    targets,
)
from zoo.cards import TensorSpec
from zoo.data import Dataset
from zoo.errors import ConfigError, DataError, shown
from zoo.ranking import ranked
from zoo.training.recipe import Recipe

TOP_SCORE = 5.0  # of STS-B: the same meaning


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
        return super().read(one_text(raw, self.name))

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

    def examine(self, raw: Any, target: Any) -> None:
        """Read both texts of a pair, only to see that they can be."""
        self.example(raw, target)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of texts; of pairs, all the first texts and then all the second ones."""
        mark = "second_"
        seconds = [
            {name.removeprefix(mark): t for name, t in row.items() if name.startswith(mark)}
            for row in samples
        ]
        return collate([*samples, *filter(None, seconds)]) | targets(samples)

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
        first, second = model(**inputs_of(batch)).chunk(2)
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

        pairs, scores = columns(list(examples))
        index = {text: i for i, text in enumerate(dict.fromkeys(t for pair in pairs for t in pair))}
        vectors = np.concatenate([predict(part) for part in chunks(index)])
        first, second = (vectors[[index[pair[side]] for pair in pairs]] for side in (0, 1))
        return {"spearman": float(spearmanr((first * second).sum(1), scores).statistic)}


class TextClassification(TextTask):
    """One class for each text or pair."""

    name = "text-classification"
    inputs = SEGMENTS
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
        logits, target = model(**inputs_of(batch)).float(), batch["target"]
        total = F.cross_entropy(logits, target, reduction="sum", label_smoothing=label_smoothing)
        return total, len(target)

    def decode(self, outputs: Tensor, *, top_k: int = 5) -> list[list[dict[str, Any]]]:
        """Classes by probability, best first."""
        return ranked(outputs, self.card.labels, top_k)

    def measure(self, predict: Predict, examples: Iterable[tuple[Any, int]]) -> dict[str, float]:
        """Share of texts whose most probable class is theirs."""
        return {"accuracy": share(predict, examples, "index")}


class FillMask(TextTask):
    """The words that a text lacks where it says ``[MASK]``, or ``<mask>`` for RoBERTa."""

    name = "fill-mask"
    target = "tokens"
    outputs: ClassVar[dict[str, TensorSpec]] = {
        "logits": TensorSpec(dtype="float32", shape=("batch", "tokens", "vocab_size"))
    }

    def read(self, raw: object) -> dict[str, Tensor]:
        """One text as the model takes it, and the characters of each token, for `decode`.

        Raises:
            DataError: It is no valid text, or none of the tokens that fit is the mask.
        """
        encoding = self.tokenizer.encode(one_text(raw, self.name))
        mask = self.tokenizer.mask_token
        if self.tokenizer.id_of(mask) not in encoding.ids:
            where = f" in the {len(encoding.ids)} tokens that fit" if encoding.dropped else ""
            raise DataError(f"{shown(raw)} has no {mask}{where}; write it where a word is missing")
        return {**sample(encoding), "offsets": torch.tensor(encoding.offsets)}

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Number of tokens that have a target; a batch may have none."""
        return int((batch["target"] != IGNORED).sum())

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Cross-entropy of the tokens whose target is not -100, sum and count."""
        logits, target = model(**inputs_of(batch)).flatten(0, 1), batch["target"].flatten()
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
        mask = self.tokenizer.mask_token
        places = (row["input_ids"] == self.tokenizer.id_of(mask)).nonzero().flatten()
        ends, best = row["offsets"][places, 1].tolist(), ranked(logits[places], None, top_k)
        return [
            {
                "start": end - len(mask),  # RoBERTa's takes the space before it, too
                "end": end,
                "text": self.tokenizer.token_of(record["index"]),
                "score": record["score"],
            }
            for end, records in zip(ends, best, strict=True)
            for record in records
        ]

    def measure(self, predict: Predict, examples: Iterable[tuple[str, str]]) -> dict[str, float]:
        """Share of texts whose first missing word is the most probable token."""
        return {"accuracy": share(predict, examples, "text")}
