from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import zoo
from nlp.entities import Span, TokenClassification, runs
from nlp.text import IGNORED
from zoo.errors import ConfigError, DataError

LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
CONLL = """-DOCSTART- -X- -X- O

# id 1
Angela NNP B-NP B-PER
Merkel NNP I-NP I-PER
left VBD B-VP O
New NNP B-NP B-LOC
York-City NNP I-NP I-LOC
. . O O

# O
London NNP B-NP B-LOC
"""


class Told(nn.Module):
    """A model that gives each token the label that a table of words says, whatever the context."""

    def __init__(self, task: TokenClassification, table: dict[str, str]) -> None:
        super().__init__()
        weight = torch.zeros(30522, len(LABELS))
        weight[:, 0] = 5.0
        for word, label in table.items():
            weight[task.tokenizer.id_of(word)] = 10.0 * torch.eye(len(LABELS))[LABELS.index(label)]
        self.table = nn.Embedding.from_pretrained(weight)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return self.table(input_ids)


def answer(task: TokenClassification, model: nn.Module, texts: list[str]):
    samples = [task.read(text) for text in texts]
    return task.decode(task.run(model, task.collate(samples)), samples)


# Schemes


@pytest.mark.parametrize(
    ("labels", "spans"),
    [
        ("O O", []),
        ("B-X I-X O B-X B-X", [(0, 2, "X"), (3, 4, "X"), (4, 5, "X")]),
        ("I-X I-X O I-Y", [(0, 2, "X"), (3, 4, "Y")]),  # IOB1
        ("I-X B-X I-X", [(0, 1, "X"), (1, 3, "X")]),  # IOB1: B only where two are neighbours
        ("B-X I-Y I-Y", [(0, 1, "X"), (1, 3, "Y")]),
        ("S-X B-X I-X E-X S-X", [(0, 1, "X"), (1, 4, "X"), (4, 5, "X")]),  # BIOES
        ("U-X B-X L-X I-X", [(0, 1, "X"), (1, 3, "X"), (3, 4, "X")]),  # BILOU
        ("", []),
    ],
)
def test_every_scheme_is_read_as_conlleval_reads_it(labels, spans):
    assert list(runs(labels.split())) == spans


# Files


def test_a_conll_file_is_sentences_with_spans_of_characters(tmp_path):
    path = tmp_path / "train.conll"
    path.write_text(CONLL)
    rows = TokenClassification.open_file(path)
    assert rows.classes == LABELS
    assert [rows[i] for i in range(len(rows))] == [
        (
            "Angela Merkel left New York-City .",
            (Span(0, 13, "PER"), Span(19, 32, "LOC")),
        ),
        ("# London", (Span(2, 8, "LOC"),)),
    ]
    assert not rows.classified


@pytest.mark.parametrize(
    "row",
    [
        {"tokens": ["in", "Rome"], "tags": ["O", "B-LOC"]},
        {"tokens": ["in", "Rome"], "ner_tags": ["O", "S-LOC"]},
        {"text": "in Rome", "entities": [[3, 7, "LOC"]]},
        {"text": "in Rome", "spans": [{"start": 3, "end": 7, "label": "LOC"}]},
        {"text": "in Rome", "label": [[3, 7, "LOC"]]},
    ],
)
def test_json_lines_of_any_common_kind_are_the_same(tmp_path, row):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n\n")
    rows = TokenClassification.open_file(path)
    assert rows[0] == ("in Rome", (Span(3, 7, "LOC"),))
    assert rows.classes == ("O", "B-LOC", "I-LOC")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.conll", "word\n", "line 1: 'word' is no word with a label"),
        ("a.conll", "a O\nb NNP\n", "line 2: 'b NNP' is no word with a label"),
        ("a.conll", "\n", "holds no sentence"),
        ("a.jsonl", "[1]\n", "line 1 is no text with entities"),
        ("a.jsonl", '{"tokens": ["a"], "tags": []}', "1 tokens and 0 tags"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [3]}', "the label 3 is not O, B-X or I-X"),
        ("a.jsonl", '{"text": "a", "entities": [[0, 2, "X"]]}', "are no characters of the text"),
        ("a.json", "{", "line 1 is no text"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_by_its_line(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        TokenClassification.open_file(path)


def test_a_file_that_is_no_text_and_a_type_the_model_lacks_are_refused(tmp_path):
    (tmp_path / "x.conll").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="as text"):
        TokenClassification.open_file(tmp_path / "x.conll")
    (tmp_path / "y.conll").write_text("Rome B-CITY\n")
    with pytest.raises(DataError, match="'CITY' is no type of the model; it has 'O, B-LOC"):
        TokenClassification.open_file(tmp_path / "y.conll", LABELS)


# Words, labels and windows


def test_words_have_the_label_of_the_span_they_lie_in(task_of):
    task = task_of(TokenClassification, LABELS)
    row = task.example("Mr. U.N. Owen, embarrassingly", (Span(4, 8, "PER"), Span(9, 13, "LOC")))
    tokens = [task.tokenizer.token_of(int(i)) for i in row["input_ids"][0]]
    found = [
        (t, LABELS[y]) for t, y in zip(tokens, row["target"][0].tolist(), strict=True) if y >= 0
    ]
    assert found == [
        ("mr", "O"), (".", "O"),
        ("u", "B-PER"), (".", "I-PER"), ("n", "I-PER"), (".", "I-PER"),
        ("owen", "B-LOC"), (",", "O"), ("embarrassing", "O"),
    ]  # fmt: skip
    assert tokens[-2:] == ["##ly", "[SEP]"]
    assert row["target"][0, -2:].tolist() == [IGNORED, IGNORED]
    assert task.count(task.collate([row])) == 9


def test_a_type_without_a_label_is_refused(task_of):
    with pytest.raises(ConfigError, match=r"has no label B-LOX; did you mean 'B-LOC'"):
        task_of(TokenClassification, LABELS).example("Rome", (Span(0, 4, "LOX"),))


@pytest.mark.parametrize("limit", [5, 8, 13, 21, 64])
def test_each_word_of_a_long_text_is_labelled_once_in_the_window_with_most_around_it(
    task_of, limit
):
    task = task_of(TokenClassification, LABELS, limit)
    text = " ".join(f"word{i} embarrassingly U.N." for i in range(30))
    row = task.read(text)
    whole = task_of(TokenClassification, LABELS, 100_000).read(text)
    assert len(whole["input_ids"]) == 1 < len(row["input_ids"])
    assert row["attention_mask"].sum(1).max() <= limit
    assert row["offsets"][row["heads"]].tolist() == whole["offsets"][whole["heads"]].tolist()
    # Neighbouring windows share a quarter, and give each half of it to one of them.
    for one, other in pairwise(range(len(row["heads"]) - 1)):
        a, b = (row["heads"][i].nonzero().flatten() for i in (one, other))
        right = int(row["attention_mask"][one].sum()) - 1 - int(a[-1]) if len(a) else 0
        assert right >= (limit - 2) // 4 // 2 - 2
        assert not len(b) or int(b[0]) >= 1 + (limit - 2) // 4 // 2


def test_entities_are_spans_of_characters_whatever_the_windows(task_of):
    table = {"angela": "B-PER", "smith": "I-PER", "rome": "B-LOC", "york": "I-LOC"}
    text = "Angela Smith, embarrassingly, left Rome for York . " * 20
    found = {}
    for limit in (9, 40, 10_000):
        task = task_of(TokenClassification, LABELS, limit)
        found[limit] = answer(task, Told(task, table), [text, "Rome"])
    assert found[9] == found[40] == found[10_000]
    entities, (short,) = found[40]
    assert [(e["text"], e["label"]) for e in entities[:3]] == [
        ("Angela Smith", "PER"), ("Rome", "LOC"), ("York", "LOC"),
    ]  # fmt: skip
    assert len(entities) == 60
    assert all(text[e["start"] : e["end"]] == e["text"] for e in entities)
    assert short["score"] == pytest.approx(1 / (1 + 4 * math.exp(-10)))


def test_an_empty_text_has_no_entities(task_of):
    task = task_of(TokenClassification, LABELS)
    assert answer(task, Told(task, {}), ["", "  \n", "nothing"]) == [[], [], []]
    row = task.example("", ())
    total, count = task.loss(Told(task, {}), task.collate([row]))
    assert (float(total), count) == (0.0, 0)


def test_the_loss_is_that_of_the_words_and_sums_over_texts(task_of):
    task = task_of(TokenClassification, LABELS, 12)
    model = Told(task, {"rome": "B-LOC"})
    rows = [
        task.example("embarrassingly in Rome " * 9, (Span(18, 22, "LOC"),)),
        task.example("Rome", ()),
    ]
    total, count = task.loss(model, task.collate(rows))
    parts = [task.loss(model, task.collate([row])) for row in rows]
    assert count == sum(n for _, n in parts) == 28
    assert torch.allclose(total, sum(t for t, _ in parts))
    # Of 10 times Rome one is right; what is wrong costs 10 nats, what is right next to none.
    assert float(total) == pytest.approx(9 * 10, rel=0.05)


def test_entities_are_right_as_a_whole_or_wrong(task_of):
    def predict(texts):
        record = {"start": 0, "end": 4, "label": "LOC"}
        return [{"a": [record], "b": [{**record, "end": 3}], "c": []}[text] for text in texts]

    task, gold = task_of(TokenClassification, LABELS), (Span(0, 4, "LOC"),)
    found = task.measure(predict, iter([("a", gold), ("b", gold), ("c", gold)]))
    assert found == pytest.approx({"f1": 2 / 5, "precision": 1 / 2, "recall": 1 / 3})
    assert task.measure(predict, iter([("c", ())]))["f1"] == 0
    with pytest.raises(DataError, match="no examples"):
        task.measure(predict, iter([]))


# From a file to answers


def test_a_users_file_becomes_a_model_that_finds_entities(tiny_bert, tmp_path):
    people, places = ("anna", "boris", "clara", "david"), ("rome", "paris", "london", "berlin")
    lines = []
    for i in range(96):
        one, other = people[i % 4], places[i // 4 % 4]
        verb = ("visits", "likes", "leaves")[i % 3]
        lines += [f"{one} B-PER", f"{verb} O", f"{other} B-LOC", "city I-LOC", ". O", ""]
    data = tmp_path / "names.conll"
    data.write_text("\n".join(lines))
    done = zoo.finetune(
        tiny_bert, data, task="token-classification", out=tmp_path / "run", epochs=12, lr=5e-3,
        quiet=True,
    )  # fmt: skip
    assert done.metrics["validation/f1"] == 1.0
    assert done.confusion is None
    assert any("held out for validation" in line for line in done.plan.findings)
    pipe = zoo.pipeline(done.weights)
    text = "Boris visits Paris city. " * 40  # longer than the model takes at once
    found = pipe(text)
    assert [(e["text"], e["label"]) for e in found] == [
        ("Boris", "PER"),
        ("Paris city", "LOC"),
    ] * 40
    assert pipe([text, "Anna likes Rome city ."])[0] == [
        {**e, "score": pytest.approx(e["score"], abs=1e-6)} for e in found
    ]
    assert "Boris (PER" in next(iter(pipe.task.lines([text], [found])))
