"""Named entities: a label for every word, read as spans of characters.

Labels follow IOB2: ``B-X`` at the first word of an entity of type X, ``I-X`` at its others, ``O``
outside. A word is what the tokenizer splits before it makes pieces, and its label is that of its
first piece. What is learnt and measured are spans, so the words of a file need not be the
tokenizer's.

Source: Tjong Kim Sang, De Meulder 2003 (CoNLL-2003), https://aclanthology.org/W03-0419; Devlin et
al. 2018, https://arxiv.org/abs/1810.04805, section 5.3 (first pieces).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlp.text import IGNORED, collate_windows, read_lines
from nlp.text_task import (
    Predict,
    WindowTask,
    by_text,
    characters,
    chunks,
    inputs_of,
    one_text,
    widened,
)
from zoo.cards import TensorSpec
from zoo.data.rows import ListRows, Rows
from zoo.errors import ConfigError, DataError, nearest, shown
from zoo.training.recipe import Recipe

# IOB of either kind, and BIOES or BILOU, which also mark the last word and a single one.
LABEL = re.compile(r"O|([BIELSU])-(\S+)")


class Span(NamedTuple):
    """An entity: characters from `start` to before `end`."""

    start: int
    end: int
    label: str  # its type


class TokenClassification(WindowTask):
    """The entities of a text, which may be of any length."""

    name = "token-classification"
    tables: ClassVar[tuple[str, ...]] = (".conll", ".bio", ".iob", ".txt", ".jsonl", ".json")
    outputs: ClassVar[dict[str, TensorSpec]] = {
        "logits": TensorSpec(dtype="float32", shape=("batch", "tokens", "num_classes"))
    }

    def read(self, raw: object) -> dict[str, Tensor]:
        """One text as windows that the model takes.

        Raises:
            DataError: It is no valid text.
        """
        text = one_text(raw, self.name)
        return self.windowed(text, self.tokenizer.windows(text))

    def example(
        self,
        raw: str,
        target: Sequence[Span],
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """A text with the labels of its words; the last three are not used.

        Raises:
            ConfigError: The model has no label for one of the types.
        """
        row = self.read(raw)
        labels = torch.full(row["heads"].shape, IGNORED)
        offsets = row["offsets"][row["heads"]].tolist()
        labels[row["heads"]] = torch.tensor(self._labels(offsets, target), dtype=torch.int64)
        return {**row, "target": labels}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The windows of what `read` or `example` gave, one below the other."""
        batch = collate_windows(samples)
        if "target" in samples[0]:
            batch["target"] = widened([row["target"] for row in samples], IGNORED)
        return batch

    def _labels(self, words: Sequence[Sequence[int]], spans: Iterable[Span]) -> list[int]:
        names = self.card.labels or ()
        ids = {name: index for index, name in enumerate(names)}
        found = [ids.get("O", 0)] * len(words)
        for start, end, label in spans:
            inside = [i for i, (first, last) in enumerate(words) if first < end and last > start]
            for order, i in enumerate(inside):
                name = f"{'I' if order else 'B'}-{label}"
                if name not in ids:
                    raise ConfigError(
                        f"{self.card.full_name} has no label {name};{nearest(name, names)} "
                        f"it has {shown(', '.join(names) or 'none', 80)}"
                    )
                found[i] = ids[name]
        return found

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Number of words that have a label; a batch may have none."""
        return int((batch["target"] != IGNORED).sum())

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Cross-entropy of the words, sum and count."""
        logits = model(**inputs_of(batch)).flatten(0, 1).float()
        total = F.cross_entropy(
            logits,
            batch["target"].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
        return total, self.count(batch)

    def decode(
        self, outputs: Tensor, samples: Sequence[Mapping[str, Tensor]]
    ) -> list[list[dict[str, Any]]]:
        """The entities of each text, in its order.

        Args:
            outputs: Logits, shape (windows, tokens, classes).
            samples: What `read` gave for each text.

        Returns:
            For each text, records ``{"start", "end", "text", "label", "score"}``: characters, the
            type, and the mean probability of the labels of its words.
        """
        return [
            self._entities(row, logits)
            for row, logits in zip(samples, by_text(outputs, samples), strict=True)
        ]

    def _entities(self, row: Mapping[str, Tensor], logits: Tensor) -> list[dict[str, Any]]:
        values = logits[row["heads"]].double()
        if values.isnan().any():
            raise DataError("the model gave NaN for this input; look for NaN in its weights")
        scores, best = values.softmax(-1).max(-1)
        names = self.card.labels or [f"B-{i}" for i in range(logits.shape[-1])]
        offsets = row["offsets"][row["heads"]].tolist()
        found = []
        for first, last, label in runs([names[index] for index in best.tolist()]):
            start, end = offsets[first][0], offsets[last - 1][1]
            record = {"start": start, "end": end, "text": characters(row, start, end)}
            found.append({**record, "label": label, "score": float(scores[first:last].mean())})
        return found

    def lines(self, texts: Sequence[str], answers: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
        """For people: each text with its entities."""
        for text, answer in zip(texts, answers, strict=True):
            found = (f"{a['text']} ({a['label']} {a['score']:.3f})" for a in answer)
            yield f"{text}\t" + "  ".join(found)

    def measure(
        self, predict: Predict, examples: Iterable[tuple[str, Sequence[Span]]]
    ) -> dict[str, float]:
        """Precision, recall and F1 of whole entities: characters and type are right or wrong."""
        right = found = wanted = total = 0
        for chunk in chunks(examples):
            total += len(chunk)
            answers = predict([text for text, _ in chunk])
            for answer, (_, target) in zip(answers, chunk, strict=True):
                spans = {Span(a["start"], a["end"], a["label"]) for a in answer}
                right += len(spans & set(target))
                found, wanted = found + len(spans), wanted + len(set(target))
        if not total:
            raise DataError("there are no examples to measure on; check the split")
        return {
            "f1": 2 * right / max(found + wanted, 1),
            "precision": right / max(found, 1),
            "recall": right / max(wanted, 1),
        }

    @classmethod
    def open_file(cls, path: Path, classes: Sequence[str] | None = None) -> Rows:
        """Texts with their entities: a CoNLL file, or JSON lines.

        CoNLL: a word a line with its label in the last column, an empty line after each sentence.
        JSON: ``{"tokens": [...], "tags": [...]}``, or ``{"text": ..., "entities": [...]}`` with
        ``[start, end, label]`` or ``{"start", "end", "label"}``.

        Args:
            path: The file.
            classes: Labels of the model that is continued; by default those that occur.

        Raises:
            DataError: The file is something else; the message names the line.
        """
        lines = read_lines(path)
        read = read_conll if path.suffix.lower() not in (".jsonl", ".json") else read_json_lines
        examples = list(read(lines, path.name))
        if not examples:
            raise DataError(f"{shown(path.name)} holds no sentence; give one word a line")
        types = sorted({span.label for _, spans in examples for span in spans})
        names = tuple(classes or ("O", *(f"{mark}-{t}" for t in types for mark in "BI")))
        if strangers := [t for t in types if f"B-{t}" not in names]:
            raise DataError(
                f"{shown(path.name)}: {shown(strangers[0])} is no type of the model; it has "
                f"{shown(', '.join(names), 60)}"
            )
        return ListRows(path.name, examples, names)


def runs(labels: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """First word, one past the last word, and type of every entity.

    Whatever the scheme, and where a label contradicts the one before it, as ``conlleval`` reads
    them: an entity begins at B, S or U, or where the type changes, and ends after E, L, S or U.
    """
    start, kind, over = 0, "", True
    for i, label in enumerate([*labels, "O"]):
        mark, _, found = label.partition("-")
        if kind and (over or mark in "BSU" or found != kind):
            yield start, i, kind
            kind = ""
        if found and not kind:
            start, kind = i, found
        over = mark in ("E", "L", "S", "U")


def of_words(words: Sequence[str], labels: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """Words with a space between them, and their entities."""
    ends, end = [], -1
    for word in words:
        end += 1 + len(word)
        ends.append(end)
    spans = (
        Span(ends[first] - len(words[first]), ends[last - 1], kind)
        for first, last, kind in runs(labels)
    )
    return " ".join(words), tuple(spans)


def read_conll(lines: Iterable[str], name: str) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Sentences of a CoNLL file; comments and ``-DOCSTART-`` are passed over.

    Raises:
        DataError: A line lacks its label, or has none of the schemes.
    """
    words: list[str] = []
    labels: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        columns = line.split()
        is_label = bool(columns) and LABEL.fullmatch(columns[-1]) is not None
        if not columns or columns[0] == "-DOCSTART-":
            if words:
                yield of_words(words, labels)
            words, labels = [], []
        elif columns[0].startswith("#") and not words and not (is_label and len(columns) > 1):
            continue
        elif len(columns) < 2 or not is_label:
            raise DataError(
                f"{shown(name)}, line {number}: {shown(line, 40)} is no word with a label at its "
                "end; labels are O, B-X, I-X"
            )
        else:
            words.append(columns[0])
            labels.append(columns[-1])


def read_json_lines(lines: Iterable[str], name: str) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Texts of a JSON file with one object a line.

    Raises:
        DataError: A line is something else.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _from_tags(row) if "tokens" in row else _from_spans(row)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{shown(name)}, line {number} is no text with entities: "
                f"{type(error).__name__}: {shown(str(error), 60)}"
            ) from error


def _from_tags(row: Mapping[str, Any]) -> tuple[str, tuple[Span, ...]]:
    key = next(key for key in ("tags", "ner_tags", "labels") if key in row or key == "labels")
    words, labels = row["tokens"], row[key]
    if len(words) != len(labels):
        raise ValueError(f"{len(words)} tokens and {len(labels)} {key}")
    if bad := [x for x in labels if not isinstance(x, str) or not LABEL.fullmatch(x)]:
        raise ValueError(f"the label {bad[0]!r} is not O, B-X or I-X")
    return of_words(words, labels)


def _from_spans(row: Mapping[str, Any]) -> tuple[str, tuple[Span, ...]]:
    key = next(key for key in ("entities", "spans", "label") if key in row or key == "label")
    text, spans = row["text"], []
    for item in row[key]:
        start, end, label = (
            (item["start"], item["end"], item["label"]) if isinstance(item, Mapping) else item
        )
        if not 0 <= start < end <= len(text) or not re.fullmatch(r"\S+", label):
            raise ValueError(f"{item!r} are no characters of the text with a label")
        spans.append(Span(start, end, label))
    return text, tuple(sorted(spans))
