from __future__ import annotations

import hashlib

import pytest

import zoo
from nlp.spelled_numbers import NUMBERS, SIZES, SMALL, examples, spelled, tokenizer
from nlp.text_to_text import TextToText
from zoo.cards import card
from zoo.data.rows import open_rows
from zoo.errors import DataError, WeightsUnavailableError
from zoo.training.run import make_model, recipe_of


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (42, "forty-two"),
        (100, "one hundred"),
        (909, "nine hundred nine"),
        (1000, "one thousand"),
        (12_345, "twelve thousand three hundred forty-five"),
        (700_007, "seven hundred thousand seven"),
        (
            999_999,
            "nine hundred ninety-nine thousand nine hundred ninety-nine",
        ),
    ],
)
def test_numbers_in_words(number, words):
    assert spelled(number) == words


def test_the_ways_of_writing_that_are_read():
    assert spelled(105_021, conjunction=True) == "one hundred and five thousand and twenty-one"
    assert spelled(42, hyphen=False) == "forty two"
    for number in (-1, 1_000_000):
        with pytest.raises(DataError, match="give a number from 0 to 999,999"):
            spelled(number)


def test_no_two_numbers_have_the_same_words():
    words = {spelled(number) for number in range(0, 1_000_000, 7)}
    assert len(words) == len(range(0, 1_000_000, 7))


def test_no_number_that_is_measured_on_was_trained_on():
    parts = {split: list(examples(split)) for split in SIZES}
    assert {split: len(pairs) for split, pairs in parts.items()} == SIZES
    numbers = {s: {int(t) for _, t in pairs if t.isdigit()} for s, pairs in parts.items()}
    assert not numbers["train"] & (numbers["validation"] | numbers["test"])
    assert not numbers["validation"] & numbers["test"]
    assert set(range(SMALL)) <= numbers["train"]
    assert min(numbers["test"]) >= SMALL
    assert list(examples("test")) == parts["test"]  # the same in every call
    answers = {(text, answer) for text, answer in parts["test"] if not answer.isdigit()}
    assert all(answer == spelled(int(text.replace(",", ""))) for text, answer in answers)


def test_every_text_is_known_pieces_and_comes_back_from_them():
    model = tokenizer()
    for text, answer in list(examples("test"))[:500]:
        for part in (text, answer):
            encoding = model.encode(part)
            assert model.token_to_id("[UNK]") not in encoding.ids
            assert model.decode(encoding.ids) == part
    assert model.encode("  FORTY  Two ").ids == model.encode("forty two").ids


def test_the_tokenizer_of_the_card_is_this_one(tmp_path):
    known = (
        card("transformer-tiny").planned.get("numbers")
        or card("transformer-tiny").weights["numbers"]
    )
    path = tmp_path / "tokenizer.json"
    tokenizer().save(str(path))
    assert known.auxiliary[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer().get_vocab_size() == known.config["vocab_size"]


def test_the_recipe_finds_its_data_and_its_tokenizer():
    recipe = recipe_of("transformer-tiny.numbers")
    model = make_model("transformer-tiny.numbers", recipe)
    task = TextToText(model.card, lambda name: zoo.weights.find_file(model.card, name))
    rows = open_rows(recipe.data, task)
    assert (len(rows), rows.classes) == (SIZES["train"], None)
    batch = task.collate([task.example(*rows[i]) for i in range(6)])
    assert task.count(batch) == sum(len(task.read(rows[i][1])["input_ids"]) - 1 for i in range(6))
    total, _ = task.loss(model, batch)
    total.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert NUMBERS.sha256("test") == NUMBERS.sha256("test") != NUMBERS.sha256("validation")
    with pytest.raises(DataError, match="numbers has no split 'tests'; did you mean 'test'"):
        NUMBERS.examples("tests")


def test_weights_that_are_planned_say_how_they_are_made():
    if "numbers" in card("transformer-tiny").weights:
        assert zoo.pipeline("transformer-tiny.numbers")("forty-two")["text"] == "42"
    else:
        with pytest.raises(WeightsUnavailableError, match=r"train\.py transformer-tiny\.numbers"):
            zoo.load("transformer-tiny.numbers")
