"""Answers to questions: the characters of a text that answer a question about it.

Source: Rajpurkar et al. 2016 (SQuAD), https://arxiv.org/abs/1606.05250, and its evaluation script;
Devlin et al. 2018, https://arxiv.org/abs/1810.04805, sections 4.2 and 4.3.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlp.text import collate_windows, read_lines
from nlp.text_task import (
    SEGMENTS,
    Predict,
    WindowTask,
    by_text,
    characters,
    chunks,
    inputs_of,
    widened,
)
from zoo.cards import TensorSpec
from zoo.data.rows import ListRows, Rows
from zoo.errors import ConfigError, DataError, shown
from zoo.training.recipe import Recipe

LONGEST = 30  # tokens of an answer
Characters = tuple[int, int]  # of a text: the first, and one past the last


class QuestionAnswering(WindowTask):
    """The part of a text, of any length, that answers a question."""

    name = "question-answering"
    tables: ClassVar[tuple[str, ...]] = (".json", ".jsonl")
    inputs = SEGMENTS
    outputs: ClassVar[dict[str, TensorSpec]] = {
        "logits": TensorSpec(dtype="float32", shape=("batch", "tokens", 2))
    }

    def read(self, raw: object, *, question: str | None = None) -> dict[str, Tensor]:
        """A question and a text as windows that the model takes.

        Args:
            raw: The text; or a question and a text, as a tuple.
            question: Where the text stands alone.

        Raises:
            DataError: One is missing, or no valid text.
        """
        asked, text = (question, raw) if question is not None else _pair(raw)
        if not isinstance(asked, str) or not isinstance(text, str):
            raise DataError(
                f"{shown(raw)} is no text with a question; give a str and question=, or a tuple "
                "of the question and the text"
            )
        windows = self.tokenizer.windows(text, asked)
        row = self.windowed(text, windows)
        of_text = [torch.tensor(window.of_text) for window in windows]
        row["context"] = nn.utils.rnn.pad_sequence(of_text, batch_first=True)
        return row

    def length(self, raw: Any) -> int:
        """Characters of question and text."""
        return sum(map(len, raw))

    def example(
        self,
        raw: tuple[str, str],
        target: Sequence[Characters],
        recipe: Recipe | None = None,
        generator: torch.Generator | None = None,
        size: int | None = None,
    ) -> dict[str, Tensor]:
        """A question, a text and the first of its answers; the last three are not used.

        The target has the first and the last token of the answer, one row a window; of a window
        that lacks it, in part or whole, [CLS] twice.
        """
        row = self.read(raw)
        able = row["context"].clone()
        able[:, 0] = True
        places = [
            _tokens_of(target[0], offsets, context) if target else (0, 0)
            for offsets, context in zip(row["offsets"], row["context"], strict=True)
        ]
        return {**row, "able": able, "target": torch.tensor(places)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The windows of what `read` or `example` gave, one below the other."""
        batch = collate_windows(samples)
        if "target" in samples[0]:
            batch["target"] = torch.cat([row["target"] for row in samples])
            batch["able"] = widened([row["able"] for row in samples], False)
        return batch

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Number of windows."""
        return len(batch["target"])

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label_smoothing: float = 0.0
    ) -> tuple[Tensor, int]:
        """Mean of the cross-entropies of the first and the last token; sum over windows and count.

        Raises:
            ConfigError: Labels are to be smoothed; tokens that cannot be have no share of them.

        Source: Devlin et al. 2018, sections 4.2 and 4.3; only tokens of the text, and [CLS], can
            be the answer's.
        """
        if label_smoothing:
            raise ConfigError(f"label_smoothing is {label_smoothing}; {self.name} takes 0")
        logits = model(**inputs_of(batch)).float()
        logits = logits.masked_fill(~batch["able"][..., None], -torch.inf)
        total = F.cross_entropy(logits, batch["target"], reduction="sum")
        return total / 2, self.count(batch)

    def decode(
        self,
        outputs: Tensor,
        samples: Sequence[Mapping[str, Tensor]],
        *,
        top_k: int = 1,
        no_answer: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """The most probable answers of each text, best first.

        Args:
            outputs: Logits, shape (windows, tokens, 2).
            samples: What `read` gave for each text.
            top_k: How many, of different characters.
            no_answer: The text may lack an answer, as in SQuAD 2: then it is the empty one.

        Returns:
            For each text, records ``{"start", "end", "text", "score"}``; the score is the product
            of the probabilities of the first and the last token among all tokens of the text.
        """
        if type(top_k) is not int or top_k < 1:
            raise ConfigError(f"top_k is {shown(top_k)}; it takes a whole number of at least 1")
        return [
            self._answers(row, logits, top_k, no_answer)
            for row, logits in zip(samples, by_text(outputs, samples), strict=True)
        ]

    def _answers(
        self, row: Mapping[str, Tensor], logits: Tensor, top_k: int, no_answer: bool
    ) -> list[dict[str, Any]]:
        if logits.isnan().any():
            raise DataError("the model gave NaN for this input; look for NaN in its weights")
        context = row["context"]
        able = context.clone()
        able[:, 0] = True
        values = logits.double().masked_fill(~able[..., None], -torch.inf)
        values = values.flatten(0, 1).log_softmax(0).view_as(logits)
        none = float(values[:, 0].sum(-1).min().exp())
        values = values.masked_fill(~context[..., None], -torch.inf)
        tokens = values.shape[1]
        fit = torch.ones(tokens, tokens, dtype=torch.bool).triu().tril(LONGEST - 1)
        best: dict[Characters, float] = {(0, 0): none} if no_answer else {}
        for (first, last), offsets in zip(values.transpose(1, 2), row["offsets"], strict=True):
            pairs = (first[:, None] + last).masked_fill(~fit, -torch.inf).flatten()
            scores, places = pairs.topk(min(top_k, len(pairs)))
            for score, place in zip(scores.exp().tolist(), places.tolist(), strict=True):
                start, end = int(offsets[place // tokens, 0]), int(offsets[place % tokens, 1])
                if score > best.get((start, end), 0.0):
                    best[start, end] = score
        order = sorted((best or {(0, 0): none}).items(), key=lambda item: (-item[1], item[0]))
        return [
            {"start": start, "end": end, "text": characters(row, start, end), "score": score}
            for (start, end), score in order[:top_k]
        ]

    def lines(self, texts: Sequence[Any], answers: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
        """For people: each question with its answers."""
        for (question, _), answer in zip(texts, answers, strict=True):
            yield f"{question}\t" + "  ".join(f"{a['text']} {a['score']:.3f}" for a in answer)

    def measure(
        self,
        predict: Predict,
        examples: Iterable[tuple[tuple[str, str], Sequence[Characters]]],
    ) -> dict[str, float]:
        """Exact match and F1 of words with the nearest of the right answers, as SQuAD counts."""
        exact = overlap = total = 0.0
        for chunk in chunks(examples):
            able = not all(target for _, target in chunk)
            answers = predict([raw for raw, _ in chunk], top_k=1, no_answer=able)
            for answer, ((_, text), target) in zip(answers, chunk, strict=True):
                right = [text[start:end] for start, end in target] or [""]
                exact += max(normalised(answer[0]["text"]) == normalised(r) for r in right)
                overlap += max(f1(answer[0]["text"], r) for r in right)
                total += 1
        if not total:
            raise DataError("there are no examples to measure on; check the split")
        return {"f1": overlap / total, "exact_match": exact / total}

    @classmethod
    def open_file(cls, path: Path, classes: Sequence[str] | None = None) -> Rows:
        """Questions on texts with their answers: a file of SQuAD, or JSON lines.

        A line has ``question``, ``context`` and ``answers``, as SQuAD's own files nest them or as
        the Hugging Face hub writes them: ``{"text": [...], "answer_start": [...]}``.

        Raises:
            DataError: The file is something else, or an answer is not where it is said to be.
        """
        text = "\n".join(read_lines(path))
        try:
            rows = list(_rows(text, path.suffix.lower() == ".jsonl"))
            examples = [((row["question"], row["context"]), _spans(row)) for row in rows]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{shown(path.name)} holds no questions as SQuAD writes them: "
                f"{type(error).__name__}: {shown(str(error), 80)}"
            ) from error
        if not examples:
            raise DataError(f"{shown(path.name)} holds no question; give at least one")
        return ListRows(path.name, examples)


def normalised(answer: str) -> str:
    """An answer in lower case without punctuation, articles and more than one space.

    Source: ``evaluate-v1.1.py`` of SQuAD.
    """
    letters = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def f1(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall of words; 1 where both answers have none.

    Source: ``evaluate-v2.0.py`` of SQuAD.
    """
    given, wanted = normalised(answer).split(), normalised(right).split()
    if not given or not wanted:
        return float(given == wanted)
    same = sum((Counter(given) & Counter(wanted)).values())
    return 2 * same / (len(given) + len(wanted))


def _pair(raw: object) -> tuple[object, object]:
    return (raw[0], raw[1]) if isinstance(raw, tuple) and len(raw) == 2 else (None, raw)


def _tokens_of(answer: Characters, offsets: Tensor, context: Tensor) -> tuple[int, int]:
    """First and last token of an answer in a window; (0, 0) where it is not whole there."""
    start, end = answer
    first, last = offsets.unbind(1)
    inside = (context & (first < end) & (last > start)).nonzero().flatten()
    if not len(inside) or first[context].min() > start or last[context].max() < end:
        return 0, 0
    return int(inside[0]), int(inside[-1])


def _rows(text: str, by_line: bool) -> Iterator[Mapping[str, Any]]:
    """Questions with their texts, however nested."""
    if by_line:
        yield from (json.loads(line) for line in text.split("\n") if line.strip())
        return
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        yield from _rows(text, True)
        return
    if isinstance(found, dict) and "data" in found:
        for article in found["data"]:
            for paragraph in article.get("paragraphs", ()):
                for question in paragraph["qas"]:
                    yield {**question, "context": paragraph["context"]}
            if "paragraphs" not in article:
                yield article
    else:
        yield from (found if isinstance(found, list) else [found])


def _spans(row: Mapping[str, Any]) -> tuple[Characters, ...]:
    """The answers of a question as characters of its text, without spaces around them."""
    answers = row["answers"]
    if isinstance(answers, Mapping):
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(answers["text"], answers["answer_start"], strict=True)
        ]
    if row.get("is_impossible"):
        return ()
    found = []
    for answer in answers:
        text, start = answer["text"], answer["answer_start"]
        if row["context"][start : start + len(text)] != text or start < 0 or not text.strip():
            raise ValueError(f"the answer {text!r} of {row['question']!r} is not at {start}")
        left = len(text) - len(text.lstrip())
        found.append((start + left, start + left + len(text.strip())))
    return tuple(found)
