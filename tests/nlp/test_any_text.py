"""Whatever text comes: an answer that is stable and finite, or one clear line."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import zoo
from nlp.answers import QuestionAnswering
from nlp.entities import TokenClassification
from zoo.errors import DataError

# First and last character of scripts and of what texts are not expected to hold.
RANGES = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF),
    (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F),
    (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFE00, 0xFE0F), (0x1F300, 0x1FAFF),
    (0xE0000, 0xE007F), (0xF0000, 0xF00FF), (0x10FF00, 0x10FFFF), (0x00, 0x1F), (0x7F, 0x9F),
)  # fmt: skip
HALVES = (0xD800, 0xDFFF)  # lone surrogates, which are no text
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three people joined to one letter
SPECIAL = (
    "", " ", "\0", "a\0b", "\n\r\t", "\u200b", "\ufeff", "[CLS] [SEP] [MASK] [PAD]", "##ing",
    FAMILY, "\U0001f1e9\U0001f1ea", "e\u0301" * 50, "\u0645\u0631\u062d\u0628", "\u05e9\u05dc",
    "\u202eabc\u202c", "\ufb01", "\u0130", "\u00df", "a" * 300, "\uff11\uff12", "\ud800",
    "a\udfffb", "\U0001d4b3", "x" * 100_000, "word " * 20_000, "\u0301" * 1000,
)  # fmt: skip


def texts(count: int) -> Iterator[str]:
    """The special ones, then random ones of few characters and of many, of one script or of all."""
    yield from SPECIAL
    source = random.Random(0)
    for _ in range(count - len(SPECIAL)):
        length = int(10 ** source.uniform(0, 2.5)) - 1
        able = RANGES if source.random() < 0.5 else (source.choice(RANGES), (0x20, 0x20))
        letters = [chr(source.randint(*source.choice(able))) for _ in range(length)]
        if source.random() < 0.05:
            letters.insert(source.randint(0, length), chr(source.randint(*HALVES)))
        yield "".join(letters)


def is_text(text: str) -> bool:
    return not any(HALVES[0] <= ord(letter) <= HALVES[1] for letter in text)


def check(pipe, tasks, count: int) -> None:
    answers = {}
    for text in texts(count):
        if not is_text(text):
            for read, raw in (
                (pipe, text), (tasks[0].read, text), (tasks[1].read, ("Who?", text)),
            ):  # fmt: skip
                with pytest.raises(DataError, match="half a character") as caught:
                    read(raw)
                assert len(caught.value.line) <= 200
            continue
        answers[text] = vector = pipe(text)
        assert np.isfinite(vector).all()
        assert abs(np.linalg.norm(vector) - 1) < 1e-5
        entities, asked = tasks[0].read(text), tasks[1].read(("Who?", text))
        for row in (entities, asked):
            assert row["attention_mask"].sum(1).max() <= pipe.task.tokenizer.max_length
            low, high = (int(bound) for bound in row["input_ids"].aminmax())
            assert 0 <= low <= high < 30522
        # Characters of words are those of the text, in its order, and none is of two words.
        spans = entities["offsets"][entities["heads"]]
        assert bool((spans[:, 0] < spans[:, 1]).all()) or not len(spans)
        assert not len(spans) or int(spans[:, 1].max()) <= len(text)
        assert bool((spans[1:, 0] >= spans[:-1, 0]).all())
    again = pipe(list(answers))
    assert np.abs(again - np.stack(list(answers.values()))).max() <= 2e-5


@pytest.fixture
def pipe(tiny_bert):
    return zoo.pipeline(tiny_bert)


@pytest.fixture
def tasks(task_of):
    return [task_of(TokenClassification), task_of(QuestionAnswering)]


@pytest.mark.filterwarnings("ignore:a text of")
def test_300_texts_of_all_kinds(pipe, tasks):
    check(pipe, tasks, 300)


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:a text of")
def test_10000_texts_of_all_kinds(pipe, tasks):
    check(pipe, tasks, 10_000)


def test_nothing_that_was_read_before_changes_an_answer(pipe):
    first = pipe("a text")
    for text in ("[MASK]", "\0", FAMILY * 200, ""):
        with torch.inference_mode():
            pipe(text)
    assert np.array_equal(pipe("a text"), first)
