"""A folder of Hugging Face transformers becomes a model of ours, and the reverse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import zoo
from nlp.bert import Bert
from zoo.errors import ConfigError, ExportError
from zoo.importing import convert

from .conftest import MINILM

IDS = torch.tensor([[2, 5, 9, 7, 3], [2, 6, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
SIZES = {"vocab_size": 100, "pad_token_id": 0, "max_position_embeddings": 82}
BERT = transformers.BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **SIZES
)
DISTILBERT = transformers.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, **SIZES)
ROBERTA = transformers.RobertaConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    type_vocab_size=1, layer_norm_eps=1e-5, **SIZES,
)  # fmt: skip
FAMILIES = {
    "bert-base-uncased": ("Bert", BERT),
    "distilbert-base-uncased": ("DistilBert", DISTILBERT),
    "roberta-base": ("Roberta", ROBERTA),
}
HEADS = {
    "fill-mask": "ForMaskedLM",
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}


def theirs(name: str, head: str, folder: Path) -> torch.nn.Module:
    """A random model of transformers, saved with its tokenizer."""
    kind, config = FAMILIES[name]
    labels = {} if head in ("ForMaskedLM", "ForQuestionAnswering") else {"num_labels": 3}
    torch.manual_seed(0)
    made = type(config)(**{**config.to_diff_dict(), **labels})
    if labels:
        made.id2label = {0: "no", 1: "yes", 2: "perhaps"}
    model = getattr(transformers, f"{kind}{head}")(made).eval()
    model.save_pretrained(folder)
    shutil.copyfile(MINILM / "tokenizer.json", folder / "tokenizer.json")
    return model


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model(input_ids=IDS, attention_mask=MASK)
    if hasattr(found, "start_logits"):
        return torch.stack([found.start_logits, found.end_logits], -1)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_theirs_becomes_ours_and_theirs_again(name, task, tmp_path):
    head, mask = HEADS[task], MASK.bool() if task != "text-classification" else ...
    reference = theirs(name, head, tmp_path / "theirs")
    done = convert(tmp_path / "theirs", name, tmp_path / "ours")  # config.json says all the rest
    model = zoo.load(tmp_path / "ours")
    assert (type(model).__name__, model.config.task) == (FAMILIES[name][0], task)
    assert (outputs(model) - outputs(reference))[mask].abs().max() <= 5e-6
    assert model.config.max_length == (81 if name == "roberta-base" else 82)  # pad_token_id is 0
    assert model.card.labels == (("no", "yes", "perhaps") if "class" in task else None)
    assert model.card.preprocessing["max_length"] == model.config.max_length
    assert not [note for note in done.notes if "preprocessing" in note]

    report = zoo.export(model, tmp_path / "again", format="transformers")
    assert report.max_rel_diff == 0
    kind = getattr(transformers, FAMILIES[name][0] + head)
    again, info = kind.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (outputs(again.eval()) - outputs(reference))[mask].abs().max() <= 5e-6
    assert again.config.architectures == [FAMILIES[name][0] + head]
    if "class" in task:
        assert again.config.id2label == {0: "no", 1: "yes", 2: "perhaps"}
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")("a short text")
    assert tokens["input_ids"] == [101, 1037, 2460, 3793, 102]


def test_the_embedding_model_is_written_with_its_limit_and_read_by_sentence_transformers(tmp_path):
    zoo.export("all-minilm-l6-v2", tmp_path, format="transformers", pretrained=True)
    config = json.loads((tmp_path / "config.json").read_text())
    published = json.loads((MINILM / "config.json").read_text())
    same = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "layer_norm_eps")
    assert {key: config[key] for key in same} == {key: published[key] for key in same}
    assert config["max_position_embeddings"] == 512
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 256
    model, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"pooler.dense.weight", "pooler.dense.bias"}  # never used
    assert not info["unexpected_keys"]
    inputs = {"input_ids": IDS + 1000, "attention_mask": MASK}
    with torch.no_grad():
        ours = zoo.load("all-minilm-l6-v2", pretrained=True).features(*inputs.values())
        found = model.eval()(**inputs).last_hidden_state
    assert (ours - found)[MASK.bool()].abs().max() <= 5e-6


def test_what_is_of_another_family_is_refused(tmp_path):
    theirs("roberta-base", "ForMaskedLM", tmp_path / "theirs")
    with pytest.raises(ConfigError, match="of a roberta with gelu; Bert is bert with gelu"):
        convert(tmp_path / "theirs", "bert-base-uncased", tmp_path / "ours")
    with pytest.raises(ConfigError, match="of a bert with gelu_new"):
        Bert.from_transformers({"model_type": "bert", "hidden_act": "gelu_new"})
    assert not (tmp_path / "ours").exists()


def test_a_model_that_transformers_lacks_and_a_file_in_the_way_are_refused(tmp_path):
    model = zoo.load("resnet18", width=4, depths=(1, 1, 1, 1))
    with pytest.raises(ExportError, match="none of the models that transformers has"):
        zoo.export(model, tmp_path / "out", format="transformers")
    assert not (tmp_path / "out").exists()
    (tmp_path / "taken").write_text("x")
    model = zoo.load("bert-base-uncased", num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8)
    with pytest.raises(ExportError, match="is a file; transformers opens a folder"):
        zoo.export(model, tmp_path / "taken", format="transformers")
