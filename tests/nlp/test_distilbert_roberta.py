"""DistilBERT and RoBERTa: BERT's layers under the names of their own files."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import zoo
from nlp.distilbert import DistilBert, DistilBertConfig
from nlp.roberta import Roberta, RobertaConfig
from zoo import tensorfile
from zoo.groups import layer_groups

TOKENS = ("token-classification", "question-answering", "fill-mask")  # an answer a token
TASKS = ("sentence-embedding", "text-classification", *TOKENS)
TINY = {
    "vocab_size": 60,
    "embed_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_dim": 48,
    "max_length": 24,
}


@dataclass(frozen=True)
class Family:
    """A relative of BERT beside that of transformers."""

    card: str
    model: type[nn.Module]
    config: type[Any]
    prefix: str
    theirs: Any  # the configuration of transformers like TINY
    kinds: dict[str, type[Any]]
    lacking: dict[str, torch.Tensor]  # stored tensors that a task may do without

    def tiny(self, task: str) -> Any:
        torch.manual_seed(1)
        return self.model(self.config(**TINY, num_classes=3, task=task)).eval()

    def theirs_for(self, task: str) -> Any:
        """The configuration of transformers; to answer questions takes two outputs a token."""
        config = copy.deepcopy(self.theirs)
        config.num_labels = 2 if task == "question-answering" else 3
        return config

    def reference(self, task: str, *, spread: float = 0.2) -> Any:
        """The small model of transformers, its weights large enough that every part matters."""
        torch.manual_seed(0)
        model = self.kinds[task](self.theirs_for(task)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=spread)
        return model

    def batch(self, lengths=(11, 1, 7, 4)) -> tuple[torch.Tensor, torch.Tensor]:
        """Random ids, padded on the right, and their mask."""
        generator = torch.Generator().manual_seed(1)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.randint(2, 60, mask.shape, generator=generator)
        return torch.where(mask, ids, self.config().pad_id), mask

    def published(self) -> dict[str, torch.Tensor]:
        """Tensors of a pretraining file, with all that a task may lack."""
        return {**self.reference("fill-mask").state_dict(), **self.lacking}


DISTILBERT = Family(
    card="distilbert-base-uncased",
    model=DistilBert,
    config=DistilBertConfig,
    prefix="distilbert.",
    theirs=transformers.DistilBertConfig(
        vocab_size=60,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=24,
        num_labels=3,
    ),
    kinds={
        "text-classification": transformers.DistilBertForSequenceClassification,
        "token-classification": transformers.DistilBertForTokenClassification,
        "question-answering": transformers.DistilBertForQuestionAnswering,
        "fill-mask": transformers.DistilBertForMaskedLM,
        "sentence-embedding": transformers.DistilBertModel,
    },
    lacking={"distilbert.embeddings.position_ids": torch.arange(24)[None]},
)
ROBERTA = Family(
    card="roberta-base",
    model=Roberta,
    config=RobertaConfig,
    prefix="roberta.",
    theirs=transformers.RobertaConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=26,  # two more than tokens
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        num_labels=3,
    ),
    kinds={
        "text-classification": transformers.RobertaForSequenceClassification,
        "token-classification": transformers.RobertaForTokenClassification,
        "question-answering": transformers.RobertaForQuestionAnswering,
        "fill-mask": transformers.RobertaForMaskedLM,
        "sentence-embedding": transformers.RobertaModel,
    },
    lacking={
        "roberta.embeddings.position_ids": torch.arange(26)[None],
        "roberta.pooler.dense.weight": torch.ones(32, 32),
        "roberta.pooler.dense.bias": torch.ones(32),
    },
)


@pytest.fixture(params=[DISTILBERT, ROBERTA], ids=lambda family: family.card)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def logits_of(outputs: Any) -> torch.Tensor:
    """The answer of a head of transformers as one tensor."""
    if hasattr(outputs, "start_logits"):
        return torch.stack([outputs.start_logits, outputs.end_logits], -1)
    return outputs.logits


def fill(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Load stored tensors by the model's own key table, strictly."""
    names = model.convert_keys(tensors)
    model.load_state_dict({names[n]: t for n, t in tensors.items() if names[n]}, strict=True)
    return model.eval()


@pytest.mark.parametrize("task", TASKS)
def test_outputs_and_gradients_are_those_of_transformers(family, task):
    other, (ids, mask) = family.reference(task), family.batch()
    model = fill(family.tiny(task), other.state_dict())
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if task == "sentence-embedding":
        found, expected = model.features(ids, mask), other(**inputs).last_hidden_state
    else:
        found, expected = model(ids, mask), logits_of(other(**inputs))
    valid = ... if task == "text-classification" else mask
    assert (found - expected)[valid].abs().max() <= 5e-6
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (found * weights)[valid].sum().backward()
    (expected * weights)[valid].sum().backward()
    gradients = {model.convert_keys([n])[n]: p.grad for n, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        scale = gradients[name].abs().max()
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-4 * scale + 1e-5, name


@pytest.mark.parametrize("task", TASKS)
def test_transformers_opens_what_is_saved_with_nothing_missing(family, task, tmp_path):
    model = zoo.load(family.card, task=task, **TINY, **(
        {"num_classes": 3} if task.endswith("-classification") else {}
    ))  # fmt: skip
    zoo.save(model, tmp_path / "saved")
    stored = load_file(next((tmp_path / "saved").glob("*.safetensors")))
    folder = tmp_path / "theirs"
    family.kinds[task](family.theirs_for(task)).config.save_pretrained(folder)
    tensorfile.write(folder / "model.safetensors", stored, {"format": "pt"})
    other, report = family.kinds[task].from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert not {k for k in report["missing_keys"] if "pooler" not in k}
    ids, mask = family.batch()
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    with torch.no_grad():
        if task == "sentence-embedding":
            pair = model.features(ids, mask), other.eval()(**inputs).last_hidden_state
        else:
            pair = model(ids, mask), logits_of(other.eval()(**inputs))
    valid = ... if task == "text-classification" else mask
    assert (pair[0] - pair[1])[valid].abs().max() <= 5e-6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("task", TASKS)
def test_a_row_alone_equals_the_row_in_a_batch(family, task, side):
    model, (ids, mask) = (
        fill(family.tiny(task), family.reference(task).state_dict()),
        family.batch(),
    )
    if side == "left":
        ids, mask = ids.flip(1), mask.flip(1)
    with torch.no_grad():
        together = model(torch.where(mask, ids, 10**9), mask)
        for row, valid in enumerate(mask):
            alone = model(ids[row][valid][None])[0]
            part = together[row][valid] if task in TOKENS else together[row]
            assert torch.allclose(part, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("task", ["fill-mask", "sentence-embedding"])
def test_published_forms_load_as_the_same_tensors(family, task, bare):
    stored = family.published()
    expected = fill(family.tiny(task), stored).state_dict()
    if bare:
        stored = {name.removeprefix(family.prefix): tensor for name, tensor in stored.items()}
    found = fill(family.tiny(task), stored).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("task", TASKS)
def test_a_change_of_any_letter_of_any_key_is_found(family, task):
    model = family.tiny(task)
    stored = {**family.published(), **model.state_dict()}
    for name in stored:
        wrong = [
            name[:place] + ("x" if letter != "x" else "y") + name[place + 1 :]
            for place, letter in enumerate(name)
        ]
        found = model.convert_keys([*(n for n in stored if n != name), *wrong])
        assert all(found[other] == other for other in wrong), name
        assert set(model.state_dict()).isdisjoint(wrong)


@pytest.mark.parametrize("task", TASKS)
def test_depth_goes_from_the_embeddings_to_the_head(family, task):
    model = family.tiny(task)
    groups = layer_groups(model)
    assert len(groups) == 4
    assert groups[0][0] == f"{family.prefix}embeddings.word_embeddings.weight"
    assert [n for g in groups for n in g] == [n for n, _ in model.named_parameters()]
    assert bool(groups[-1]) == (task != "sentence-embedding")


def test_segments_are_not_read(family):
    model, (ids, mask) = family.tiny("text-classification"), family.batch()
    assert torch.equal(model(ids, mask, torch.ones_like(ids)), model(ids, mask))


@pytest.mark.parametrize(
    ("family", "count"),
    [(DISTILBERT, 66_362_880), (ROBERTA, 124_645_632 - 768 * 768 - 768)],  # without a pooler
    ids=lambda value: getattr(value, "card", ""),
)
def test_the_base_model_has_the_published_size(family, count):
    with torch.device("meta"):
        model = family.model(family.config(task="sentence-embedding"))
    assert sum(p.numel() for p in model.parameters()) == count


def test_positions_of_roberta_begin_after_its_padding():
    with torch.device("meta"):
        model = Roberta(RobertaConfig(task="sentence-embedding"))
    assert model.roberta["embeddings"].position_embeddings.num_embeddings == 514
