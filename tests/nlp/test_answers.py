from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn

import zoo
from nlp.answers import QuestionAnswering, f1, normalised
from zoo.errors import ConfigError, DataError

CONTEXT = "Ada Lovelace was born in London in 1815. She wrote the first program."


class Told(nn.Module):
    """A model whose logits are those that a table of tokens says: first and last of an answer."""

    def __init__(self, task: QuestionAnswering, table: dict[str, tuple[float, float]]) -> None:
        super().__init__()
        weight = torch.zeros(30522, 2)
        for token, logits in table.items():
            weight[task.tokenizer.id_of(token)] = torch.tensor(logits)
        self.table = nn.Embedding.from_pretrained(weight)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return self.table(input_ids)


def answer(task: QuestionAnswering, model: nn.Module, raws: list, **options):
    samples = [task.read(raw) for raw in raws]
    return task.decode(task.run(model, task.collate(samples)), samples, **options)


# Files


def squad(tmp_path, questions, context=CONTEXT, name="train.json"):
    path = tmp_path / name
    document = {"data": [{"title": "x", "paragraphs": [{"context": context, "qas": questions}]}]}
    path.write_text(json.dumps(document))
    return path


def test_a_file_of_squad_is_questions_with_spans_of_characters(tmp_path):
    asked = {"text": "London", "answer_start": 25}
    questions = [
        {"question": "Where?", "answers": [asked, {"text": " in London", "answer_start": 21}]},
        {"question": "Who?", "answers": [], "is_impossible": True},
    ]  # fmt: skip
    rows = QuestionAnswering.open_file(squad(tmp_path, questions))
    assert [rows[i] for i in range(2)] == [
        (("Where?", CONTEXT), ((25, 31), (22, 31))),
        (("Who?", CONTEXT), ()),
    ]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    "answers",
    [{"text": ["1815"], "answer_start": [35]}, [{"text": "1815", "answer_start": 35}]],
)
def test_rows_of_the_hub_are_the_same(tmp_path, name, answers):
    path = tmp_path / name
    path.write_text(json.dumps({"question": "When?", "context": CONTEXT, "answers": answers}))
    assert QuestionAnswering.open_file(path)[0] == (("When?", CONTEXT), ((35, 39),))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no questions as SQuAD writes them"),
        ("[]", "holds no question"),
        ('{"question": "a"}', "KeyError: .*context"),
        ("3", "no questions as SQuAD"),
        (
            '{"question": "q", "context": "abc", "answers": [{"text": "c", "answer_start": 0}]}',
            "the answer 'c' of 'q' is not at 0",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        QuestionAnswering.open_file(path)


# Reading


def test_a_question_is_given_beside_the_text_or_in_a_tuple(task_of):
    task = task_of(QuestionAnswering)
    one, other = task.read(CONTEXT, question="Where?"), task.read(("Where?", CONTEXT))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for raw in (CONTEXT, ("a", 3), None, ("a",)):
        with pytest.raises(DataError, match="is no text with a question"):
            task.read(raw)


@pytest.mark.parametrize("limit", [12, 24, 50])
def test_the_answer_is_the_target_of_every_window_that_holds_it_whole(task_of, limit):
    task = task_of(QuestionAnswering, max_length=limit)
    text = "filler words " * 20 + CONTEXT + " more words" * 20
    start = text.index("London in 1815")
    row = task.example(("Where?", text), ((start, start + 14),))
    texts = [
        "".join(text[a:b] for a, b in [(offsets[first][0], offsets[last][1])])
        for offsets, (first, last) in zip(
            row["offsets"].tolist(), row["target"].tolist(), strict=True
        )
        if first
    ]
    assert set(texts) == {"London in 1815"}
    held = [int(i) for i, (first, _) in enumerate(row["target"].tolist()) if not first]
    assert len(held) + len(texts) == len(row["input_ids"]) > 2
    assert row["attention_mask"].sum(1).max() <= limit


def test_a_question_takes_half_of_the_room_at_most(task_of):
    task = task_of(QuestionAnswering, max_length=23)
    with pytest.warns(UserWarning, match="40 tokens is cut to max_length=23: 30 are dropped"):
        row = task.read(("word " * 40, CONTEXT))
    assert row["context"].sum(1).max() == 10


# Loss and answers


def test_the_loss_is_the_mean_of_first_and_last_over_tokens_that_can_be_answers(task_of):
    task = task_of(QuestionAnswering)
    rows = [task.example(("Who is it?", "Ada wrote programs"), ((0, 3),)),
            task.example(("Why?", "it rains"), ())]  # fmt: skip
    uniform = Told(task, {})
    total, count = task.loss(uniform, task.collate(rows))
    # [CLS] and the words of the text: the question, [SEP] and padding have no share.
    expected = torch.tensor([1.0 + 3, 1.0 + 2]).log().sum()
    assert (float(total), count) == (pytest.approx(float(expected)), 2)
    assert task.count(task.collate(rows)) == 2
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1"):
        task.loss(uniform, task.collate(rows), 0.1)


def test_answers_are_those_of_transformers(task_of):
    """The pipeline of transformers, but for its rounding and its extension to whole words."""
    torch.manual_seed(3)
    task = task_of(QuestionAnswering)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    reference = transformers.BertForQuestionAnswering(config).eval()
    with torch.no_grad():
        reference.qa_outputs.weight.mul_(60)
    model = zoo.load(
        "all-minilm-l6-v2", task="question-answering",
        embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, norm_eps=1e-12,
    )  # fmt: skip
    names = model.convert_keys(reference.state_dict())
    model.load_state_dict({names[n]: t for n, t in reference.state_dict().items()})
    raw = ("Where was she born?", CONTEXT)
    row = task.read(raw)
    with torch.no_grad():
        outputs = reference(
            **{name: row[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        )
        logits = model(
            **{name: row[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        )
    assert torch.allclose(logits[..., 0], outputs.start_logits, atol=5e-6)
    assert torch.allclose(logits[..., 1], outputs.end_logits, atol=5e-6)
    able = row["context"][0].clone()
    able[0] = True
    starts, ends = (
        x[0].double().masked_fill(~able, -torch.inf).softmax(0)
        for x in (outputs.start_logits, outputs.end_logits)
    )
    pairs = {
        (i, j): float(starts[i] * ends[j])
        for i in range(1, len(able)) for j in range(i, min(i + 30, len(able)))
        if row["context"][0, i] and row["context"][0, j]
    }  # fmt: skip
    best = sorted(pairs.items(), key=lambda item: -item[1])[:3]
    found = task.decode(logits, [row], top_k=3)[0]
    assert [a["score"] for a in found] == pytest.approx([score for _, score in best], rel=1e-4)
    offsets = row["offsets"][0].tolist()
    assert [(a["start"], a["end"]) for a in found] == [
        (offsets[i][0], offsets[j][1]) for (i, j), _ in best
    ]


def test_the_best_answer_of_all_windows_wins_and_its_characters_are_those_of_the_text(task_of):
    text = "nothing at all " * 30 + CONTEXT
    table = {"london": (9.0, 2.0), "1815": (0.0, 8.0), "[CLS]": (4.0, 4.0)}
    for limit in (16, 40, 5000):
        task = task_of(QuestionAnswering, max_length=limit)
        model = Told(task, table)
        best, second = answer(task, model, [("Where?", text)], top_k=2)[0]
        (short,) = answer(task, model, [("Where?", "London 1815")])[0]
        assert best["text"] == "London in 1815"
        assert text[best["start"] : best["end"]] == best["text"]
        assert second["score"] < best["score"] <= 1
        assert short["text"] == "London 1815"


def test_an_answer_ends_after_it_begins_and_is_not_of_the_question(task_of):
    task = task_of(QuestionAnswering)
    model = Told(task, {"1815": (9.0, 0.0), "london": (0.0, 9.0)})
    (found,) = answer(task, model, [("London 1815?", CONTEXT)])[0]
    assert found["start"] <= found["end"]
    assert found["text"] in CONTEXT


def test_a_text_may_lack_an_answer(task_of):
    task = task_of(QuestionAnswering)
    model = Told(task, {"[CLS]": (9.0, 9.0), "london": (5.0, 5.0)})
    raw = ("Where?", CONTEXT)
    assert answer(task, model, [raw])[0][0]["text"] == "London"
    best, second = answer(task, model, [raw], no_answer=True, top_k=2)[0]
    assert (best["text"], best["start"], best["end"], second["text"]) == ("", 0, 0, "London")
    assert answer(task, model, [("Where?", "")])[0][0]["text"] == ""
    with pytest.raises(ConfigError, match="top_k is 0"):
        answer(task, model, [raw], top_k=0)


def test_exact_match_and_f1_are_those_of_squad(task_of):
    assert normalised("The  Cat, (a) dog!") == "cat dog"
    assert f1("the big cat", "a cat sat") == pytest.approx(0.5)
    assert (f1("", ""), f1("a", "the"), f1("cat", "")) == (1, 1, 0)

    def predict(raws, top_k, no_answer):
        assert (top_k, no_answer) == (1, True)
        return [[{"text": question}] for question, _ in raws]

    examples = [
        (("The cat", "x cat sat"), ((2, 5),)),
        (("big cat", "cat big big"), ((0, 3), (4, 7))),
        (("", "cat"), ()),
        (("cat", "dog"), ()),
    ]
    found = task_of(QuestionAnswering).measure(predict, iter(examples))
    assert found == pytest.approx({"exact_match": 2 / 4, "f1": (1 + 2 / 3 + 1 + 0) / 4})
    with pytest.raises(DataError, match="no examples"):
        task_of(QuestionAnswering).measure(predict, iter([]))


def test_a_users_file_becomes_a_model_that_answers(tiny_bert, tmp_path):
    places = ("rome", "paris", "london", "berlin", "madrid", "vienna")
    names = ("anna", "boris", "clara", "david")
    lines = []
    for i in range(120):
        name, place = names[i % 4], places[i // 4 % 6]
        text = f"{name} lives in {place} and works ."
        answers = {"text": [place], "answer_start": [text.index(place)]}
        lines.append(
            json.dumps({"question": f"where is {name} ?", "context": text, "answers": answers})
        )
    data = tmp_path / "homes.jsonl"
    data.write_text("\n".join(lines))
    done = zoo.finetune(
        tiny_bert, data, task="question-answering", out=tmp_path / "run", epochs=12, lr=5e-3,
        quiet=True,
    )  # fmt: skip
    assert done.metrics["validation/exact_match"] == done.metrics["validation/f1"] == 1.0
    pipe = zoo.pipeline(done.weights)
    text = "Clara lives in Vienna and works."
    found = pipe(text, question="Where is Clara?")[0]
    assert (found["text"], found["start"], found["end"]) == ("Vienna", 15, 21)
    (again,) = pipe([("Where is Clara?", text)])[0]
    assert again == {**found, "score": pytest.approx(found["score"], abs=1e-6)}
    assert "Vienna" in next(iter(pipe.task.lines([("Where is Clara?", text)], [[found]])))
