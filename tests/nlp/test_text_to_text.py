from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

import zoo
from nlp.text import SPECIAL
from nlp.text_to_text import TextToText
from nlp.transformer import Hypothesis
from zoo.errors import ConfigError, DataError

SIZES = {"vocab_size": 31, "embed_dim": 32, "num_layers": 1, "num_heads": 4, "mlp_dim": 64}


def letters(path: Path) -> None:
    """A tokenizer of single letters, with [CLS] before a text (1) and [SEP] after it (2)."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *string.ascii_lowercase]
    ids = {name: i for i, name in enumerate(names)}
    model = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.decoder = decoders.Fuse()
    model.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    model.add_special_tokens(list(SPECIAL))
    model.save(str(path))


@pytest.fixture
def trained(tmp_path):
    """A saved model with its tokenizer, as weights on a card have it."""
    torch.manual_seed(0)
    model = zoo.load("transformer-tiny", **SIZES)
    file = tmp_path / "letters.json"
    letters(file)
    # The card of the weights, as `zoo train` would write it.
    task = TextToText(model.card, lambda name: file)
    return model, task


def test_a_text_goes_from_the_start_to_the_end(trained):
    _, task = trained
    assert task.read("ab")["input_ids"].tolist() == [1, 5, 6, 2]
    example = task.example("ab", "z")
    assert example["target"].tolist() == [1, 30, 2]
    batch = task.collate([example, task.example("abc", "yza")])
    assert batch["target"].tolist() == [[1, 30, 2, -100, -100], [1, 29, 30, 5, 2]]
    assert task.count(batch) == 6


def test_the_loss_is_the_sum_over_targets_and_padding_adds_nothing(trained):
    model, task = trained
    model.eval()
    rows = [task.example("ab", "z"), task.example("abcd", "yzxw")]
    together, count = task.loss(model, task.collate(rows))
    alone = [task.loss(model, task.collate([row])) for row in rows]
    assert count == 7
    assert together.item() == pytest.approx(sum(loss.item() for loss, _ in alone), rel=1e-5)


def test_label_smoothing_gives_a_share_to_the_whole_vocabulary(trained):
    model, task = trained
    batch = task.collate([task.example("ab", "z")])
    logits = model(batch["input_ids"], target_ids=torch.tensor([[1, 30]]))[0].log_softmax(-1)
    expected = -sum(
        0.9 * logits[place, target] + 0.1 * logits[place].mean()
        for place, target in enumerate((30, 2))
    )
    found, _ = task.loss(model, batch, label_smoothing=0.1)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_answers_are_texts_with_probabilities(trained):
    _, task = trained
    hypothesis = Hypothesis(torch.tensor([[5, 6, 2], [30, 2, 2]]), torch.tensor([0.5, 0.25]).log())
    assert task.decode(hypothesis) == [
        {"text": "ab", "score": pytest.approx(0.5)},
        {"text": "z", "score": pytest.approx(0.25)},
    ]


def test_a_pipeline_searches_and_answers_do_not_depend_on_the_list(trained, monkeypatch):
    model, task = trained
    monkeypatch.setattr("zoo.registry.make_task", lambda _: task)
    pipe = zoo.pipeline(model)
    texts = ["abc", "z", "hello", ""]
    together = pipe(texts, beams=3, max_tokens=6)
    for text, answer in zip(texts, together, strict=True):
        alone = pipe(text, beams=3, max_tokens=6)
        assert alone["text"] == answer["text"]
        assert alone["score"] == pytest.approx(answer["score"], abs=1e-5)
        assert 0 < alone["score"] <= 1
        json.dumps(alone)
    with pytest.raises(ConfigError, match="has no option 'beam'; did you mean 'beams'"):
        pipe("abc", beam=3)
    with pytest.raises(ConfigError, match="at least one beam"):
        pipe("abc", beams=0)
    for wrong in (("a", "b"), 3, None):
        with pytest.raises(DataError, match="is no text"):
            pipe(wrong)


def test_exact_match_counts_every_text_once(trained):
    _, task = trained
    answers = {"ab": "ba", "cd": "cd", "e": "e"}
    examples = [("ab", "ba"), ("cd", "dc"), ("e", "e")]
    found = task.measure(lambda raws: [{"text": answers[raw]} for raw in raws], examples)
    assert found == {"exact_match": pytest.approx(2 / 3)}
    with pytest.raises(DataError, match="no examples"):
        task.measure(lambda raws: [], [])
