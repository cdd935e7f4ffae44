from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file

import zoo
from nlp.distilbert import DistilBert, DistilBertConfig
from zoo import tensorfile
from zoo.groups import layer_groups

TASKS = ("sentence-embedding", "text-classification", "fill-mask")
TINY = {
    "vocab_size": 60,
    "embed_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_dim": 48,
    "max_length": 24,
}
HUGGING_FACE = transformers.DistilBertConfig(
    vocab_size=60,
    dim=32,
    n_layers=2,
    n_heads=4,
    hidden_dim=48,
    max_position_embeddings=24,
    num_labels=3,
)
KINDS = {
    "text-classification": transformers.DistilBertForSequenceClassification,
    "fill-mask": transformers.DistilBertForMaskedLM,
    "sentence-embedding": transformers.DistilBertModel,
}


def reference(task: str, *, spread: float = 0.2):
    """The small model of transformers, its weights large enough that every part matters."""
    torch.manual_seed(0)
    model = KINDS[task](HUGGING_FACE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model


def tiny(task: str, **config) -> DistilBert:
    torch.manual_seed(1)
    return DistilBert(DistilBertConfig(**{**TINY, "num_classes": 3, **config}, task=task)).eval()


def fill(model: DistilBert, tensors: dict[str, torch.Tensor]) -> DistilBert:
    """Load stored tensors by the model's own key table, strictly."""
    names = model.convert_keys(tensors)
    model.load_state_dict({names[n]: t for n, t in tensors.items() if names[n]}, strict=True)
    return model.eval()


def batch(lengths=(11, 1, 7, 4)) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, padded on the right, and their mask."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 60, mask.shape, generator=generator)
    return torch.where(mask, ids, DistilBertConfig().pad_id), mask


@pytest.mark.parametrize("task", TASKS)
def test_outputs_and_gradients_are_those_of_transformers(task):
    other, (ids, mask) = reference(task), batch()
    model = fill(tiny(task), other.state_dict())
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if task == "sentence-embedding":
        found, expected = model.features(ids, mask), other(**inputs).last_hidden_state
    else:
        found, expected = model(ids, mask), other(**inputs).logits
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
def test_transformers_opens_what_is_saved_with_nothing_missing(task, tmp_path):
    model = zoo.load("distilbert-base-uncased", task=task, **TINY, **(
        {"num_classes": 3} if task == "text-classification" else {}
    ))  # fmt: skip
    zoo.save(model, tmp_path / "saved")
    stored = load_file(next((tmp_path / "saved").glob("*.safetensors")))
    folder = tmp_path / "theirs"
    KINDS[task](HUGGING_FACE).config.save_pretrained(folder)
    tensorfile.write(folder / "model.safetensors", stored, {"format": "pt"})
    other, report = KINDS[task].from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert not {k for k in report["missing_keys"] if "pooler" not in k}
    ids, mask = batch()
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    with torch.no_grad():
        if task == "sentence-embedding":
            pair = model.features(ids, mask), other.eval()(**inputs).last_hidden_state
        else:
            pair = model(ids, mask), other.eval()(**inputs).logits
    valid = ... if task == "text-classification" else mask
    assert (pair[0] - pair[1])[valid].abs().max() <= 5e-6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("task", TASKS)
def test_a_row_alone_equals_the_row_in_a_batch(task, side):
    model, (ids, mask) = fill(tiny(task), reference(task).state_dict()), batch()
    if side == "left":
        ids, mask = ids.flip(1), mask.flip(1)
    with torch.no_grad():
        together = model(torch.where(mask, ids, 10**9), mask)
        for row, valid in enumerate(mask):
            alone = model(ids[row][valid][None])[0]
            part = together[row][valid] if task == "fill-mask" else together[row]
            assert torch.allclose(part, alone, rtol=0, atol=1e-5)


def published() -> dict[str, torch.Tensor]:
    """Tensors of a pretraining file, with all that a task may lack."""
    return {
        **reference("fill-mask").state_dict(),
        "distilbert.embeddings.position_ids": torch.arange(24)[None],
    }


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("task", ["fill-mask", "sentence-embedding"])
def test_published_forms_load_as_the_same_tensors(task, bare):
    stored = published()
    expected = fill(tiny(task), stored).state_dict()
    if bare:
        stored = {name.removeprefix("distilbert."): tensor for name, tensor in stored.items()}
    found = fill(tiny(task), stored).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("task", TASKS)
def test_a_change_of_any_letter_of_any_key_is_found(task):
    model = tiny(task)
    stored = {**published(), **model.state_dict()}
    for name in stored:
        wrong = [
            name[:place] + ("x" if letter != "x" else "y") + name[place + 1 :]
            for place, letter in enumerate(name)
        ]
        found = model.convert_keys([*(n for n in stored if n != name), *wrong])
        assert all(found[other] == other for other in wrong), name
        assert set(model.state_dict()).isdisjoint(wrong)


@pytest.mark.parametrize("task", TASKS)
def test_depth_goes_from_the_embeddings_to_the_head(task):
    model = tiny(task)
    groups = layer_groups(model)
    assert len(groups) == 4
    assert groups[0][0] == "distilbert.embeddings.word_embeddings.weight"
    assert [n for g in groups for n in g] == [n for n, _ in model.named_parameters()]
    assert bool(groups[-1]) == (task != "sentence-embedding")


def test_segments_are_not_read():
    model, (ids, mask) = tiny("text-classification"), batch()
    assert torch.equal(model(ids, mask, torch.ones_like(ids)), model(ids, mask))


def test_the_base_model_has_the_published_size():
    with torch.device("meta"):
        model = DistilBert(DistilBertConfig(task="sentence-embedding"))
    assert sum(p.numel() for p in model.parameters()) == 66_362_880
