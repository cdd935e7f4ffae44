from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import zoo
from nlp import transformer
from nlp.transformer import (
    ClassifierConfig,
    Decoder,
    DecoderState,
    Encoder,
    MultiHeadAttention,
    Transformer,
    TransformerClassifier,
    TransformerConfig,
    beam_search,
    generate,
    greedy,
    highest_rate,
    sinusoids,
)
from zoo.errors import ConfigError, DataError
from zoo.groups import freeze, layer_groups
from zoo.training.recipe import AdamW, Linear, Recipe
from zoo.training.schedules import factor

TINY = TransformerConfig(
    vocab_size=30, embed_dim=16, num_layers=2, num_heads=4, mlp_dim=24, max_length=20
)


def spread(model: nn.Module) -> nn.Module:
    """Weights that are large enough that every part of the model matters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def tiny(**changes) -> Transformer:
    return spread(Transformer(replace(TINY, **changes)))


def batch(lengths=(9, 1, 5)) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, padded on the right with 0, and their mask."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.randint(3, 30, mask.shape, generator=generator) * mask, mask


def hidden(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The same numbers as torch.nn, with the same tensors


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_encoder_is_that_of_torch(norm_first, activation):
    encoder = spread(Encoder(replace(TINY, norm_first=norm_first, activation=activation)))
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, activation, 1e-5, True, norm_first)
    norm = nn.LayerNorm(16) if norm_first else None
    reference = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False).eval()
    reference.load_state_dict(encoder.state_dict(), strict=True)
    _, mask = batch()
    x = hidden(*mask.shape, 16).requires_grad_()
    found, expected = encoder(x, mask), reference(x, src_key_padding_mask=~mask)
    assert (found - expected)[mask].abs().max() <= 5e-6
    weights = hidden(*x.shape, seed=3) * mask[..., None]
    grads = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected)]
    assert (grads[0] - grads[1])[mask].abs().max() <= 1e-5


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_decoder_is_that_of_torch(norm_first):
    decoder = spread(Decoder(replace(TINY, norm_first=norm_first)))
    layer = nn.TransformerDecoderLayer(16, 4, 24, 0.0, "relu", 1e-5, True, norm_first)
    reference = nn.TransformerDecoder(layer, 2, nn.LayerNorm(16) if norm_first else None).eval()
    reference.load_state_dict(decoder.state_dict(), strict=True)
    _, mask = batch()
    x, memory = hidden(3, 7, 16), hidden(*mask.shape, 16, seed=3)
    found, _ = decoder(x, decoder.start(memory, mask))
    causal = torch.ones(7, 7).triu(1).bool()
    expected = reference(x, memory, tgt_mask=causal, memory_key_padding_mask=~mask)
    assert (found - expected).abs().max() <= 5e-6


def test_the_whole_pre_norm_model_is_that_of_torch():
    model = tiny(norm_first=True)
    reference = nn.Transformer(16, 4, 2, 2, 24, 0.0, batch_first=True, norm_first=True).eval()
    stacks = {k: v for k, v in model.state_dict().items() if not k.startswith("embeddings")}
    reference.load_state_dict(stacks, strict=True)
    ids, _ = batch((6, 6))
    words = model.embeddings.tokens.weight

    def embedded(ids):
        return 4 * words[ids] + sinusoids(torch.arange(ids.shape[1]), 16)

    targets = ids[:, :5]
    expected = reference(embedded(ids), embedded(targets), tgt_mask=torch.ones(5, 5).triu(1).bool())
    found = model(ids, target_ids=targets)
    assert (found - expected @ words.T).abs().max() <= 1e-5


# Values by hand


def test_positions_are_those_of_the_formula():
    assert sinusoids(torch.tensor([1]), 4).tolist()[0] == pytest.approx(
        [0.841471, 0.540302, 0.0099998, 0.99995], abs=1e-6
    )
    found = sinusoids(torch.arange(300).view(2, 150), 6)
    for position in (0, 7, 299):
        expected = [
            f(position / 10000 ** (2 * i / 6)) for i in range(3) for f in (math.sin, math.cos)
        ]
        assert found.view(300, 6)[position].tolist() == pytest.approx(expected, abs=1e-4)


def test_attention_by_hand():
    attention = MultiHeadAttention(replace(TINY, embed_dim=2, num_heads=1))
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.eye(2).repeat(3, 1))
        attention.in_proj_bias.zero_()
        attention.out_proj.weight.copy_(torch.eye(2))
        attention.out_proj.bias.zero_()
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    found = attention(x, attention.keys_values(x), torch.tensor([[[True, True], [False, True]]]))
    near = math.exp(2**-0.5) / (math.exp(2**-0.5) + 1)
    assert found[0, 0].tolist() == pytest.approx([near, 1 - near], abs=1e-6)
    assert found[0, 1].tolist() == [0, 1]


def test_the_recipe_is_that_of_the_paper():
    assert highest_rate(512, 4000) == pytest.approx(6.9877e-4, rel=1e-4)
    rates = {s: transformer.PAPER.optimizer.lr * factor(transformer.PAPER.schedule, s - 1, 100_000)
             for s in (1, 4000, 100_000)}  # fmt: skip
    assert list(rates.values()) == pytest.approx([1.7469e-7, 6.9877e-4, 1.3975e-4], rel=1e-4)
    assert isinstance(transformer.PAPER, Recipe)
    assert isinstance(transformer.PAPER.optimizer, AdamW)
    assert transformer.PAPER.optimizer.weight_decay == 0


def test_initial_weights_have_the_variance_that_is_stated():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocab_size=500, embed_dim=64, num_layers=1))
    model.requires_grad_(False)
    assert model.embeddings.tokens.weight.std() == pytest.approx(64**-0.5, rel=0.05)
    for part in model.encoder.layers[0].self_attn.in_proj_weight.chunk(3):
        assert part.std() == pytest.approx((2 / 128) ** 0.5, rel=0.05)
    logits = model.eval()(torch.randint(3, 500, (2, 9)), target_ids=torch.randint(3, 500, (2, 5)))
    assert 0.3 < logits.std() < 3


# Padding does not exist


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_alone_equals_the_row_in_a_batch(norm_first, positions, side):
    model = tiny(norm_first=norm_first, positions=positions)
    ids, mask = batch()
    if side == "left":
        ids, mask = ids.flip(1), mask.flip(1)
    targets = batch((6, 4, 2))[0]
    garbage = torch.where(mask, ids, -(10**9))
    together = model(garbage, mask.long(), target_ids=targets)
    for row, length in enumerate((6, 4, 2)):
        alone = model(ids[row][mask[row]][None], target_ids=targets[row : row + 1, :length])
        assert (together[row, :length] - alone[0]).abs().max() <= 1e-5


def test_what_stands_in_the_pads_is_never_read():
    model, (_, mask) = tiny(), batch()
    clean = hidden(*mask.shape, 16) * mask[..., None]
    dirty = torch.where(mask[..., None], clean, math.nan)
    assert torch.equal(model.encoder(dirty, mask), model.encoder(clean, mask))
    outputs = [model.decoder(clean, model.decoder.start(x, mask))[0] for x in (dirty, clean)]
    assert torch.equal(*outputs)


def test_a_later_target_is_never_read():
    model, (ids, mask) = tiny(), batch()
    one, other = ids.clone(), ids.clone()
    other[:, 5:] = 7
    found = [model(ids, mask, target_ids=t) for t in (one, other)]
    assert torch.equal(found[0][:, :5], found[1][:, :5])
    assert not torch.equal(found[0][:, 5:], found[1][:, 5:])


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_a_row_without_tokens_is_defined(kind):
    model, (ids, mask) = tiny(dropout=0.0).train(), batch()
    empty = mask.clone()
    empty[1] = False
    found = model(ids, empty.to(kind), target_ids=ids)
    found.sum().backward()
    assert found.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    whole = model(ids, mask, target_ids=ids)
    assert torch.equal(found[[0, 2]], whole[[0, 2]])
    assert not torch.equal(found[1], whole[1])


def test_attention_without_keys_is_zero_and_has_finite_gradients():
    attention = spread(MultiHeadAttention(TINY))
    x = hidden(2, 3, 16).requires_grad_()
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    mask[1] = False
    found = attention(x, attention.keys_values(x), mask)
    assert torch.equal(found[1], attention.out_proj.bias.expand(3, -1))
    found.sum().backward()
    assert x.grad[0].any()
    assert not x.grad[1].any()


def test_the_classifier_averages_valid_tokens():
    config = ClassifierConfig(
        vocab_size=30, embed_dim=16, num_layers=2, num_heads=4, mlp_dim=24, num_classes=3
    )
    model, (ids, mask) = spread(TransformerClassifier(config)), batch()
    together = model(torch.where(mask, ids, -5), mask)
    assert together.shape == (3, 3)
    for row in range(3):
        alone = ids[row][mask[row]][None]
        assert (together[row] - model(alone)[0]).abs().max() <= 1e-5
        x = model.encoder(model.embeddings(alone, torch.arange(alone.shape[1])[None]),
                          torch.ones_like(alone, dtype=torch.bool))  # fmt: skip
        assert torch.allclose(model.features(alone), x.mean(1), atol=1e-6)
    assert not model.features(ids, torch.zeros_like(mask)).any()


# Refusals


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([[3, 30]]), "token id 30 is not in the vocabulary of 30"),
        (torch.tensor([[3, -1]]), "token id -1"),
        (torch.full((1, 21), 3), "a row has 21 tokens; the model takes at most 20"),
    ],
)
def test_what_does_not_fit_is_named(ids, words):
    with pytest.raises(DataError, match=words) as caught:
        tiny(positions="learned")(ids, target_ids=torch.tensor([[1]]))
    assert len(caught.value.line) <= 200


@pytest.mark.untyped
def test_a_row_without_its_batch_axis_is_named():
    with pytest.raises(DataError, match=r"input_ids has shape \(2,\)"):
        tiny()(torch.tensor([3, 4]), target_ids=torch.tensor([[1]]))


def test_pads_do_not_count_towards_the_limit():
    ids = torch.cat([torch.full((1, 20), 3), torch.zeros(1, 9, dtype=torch.int64)], 1)
    assert tiny(positions="learned").features(ids).memory_mask.sum() == 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"embed_dim": 18}, "multiple of num_heads=4"),
        ({"embed_dim": 5, "num_heads": 5}, "even"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"end_id": 30}, "end_id is 30"),
    ],
)
def test_impossible_architectures_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        replace(TINY, **change)


def test_depth_goes_from_the_source_to_the_target():
    for norm_first in (False, True):
        model = tiny(norm_first=norm_first)
        groups = layer_groups(model)
        assert len(groups) == 6
        assert [name for group in groups for name in group] == [
            name for name, _ in model.named_parameters()
        ]
        assert groups[0] == ["embeddings.tokens.weight"]
    classifier = zoo.load("transformer-encoder")
    freeze(classifier, -1)
    left = [name for name, p in classifier.named_parameters() if p.requires_grad]
    assert left == ["classifier.weight", "classifier.bias"]


# Decoding


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (3, 1, 2)])
def test_incremental_decoding_equals_full_decoding(positions, sizes):
    model, (ids, mask) = tiny(positions=positions), batch()
    targets = batch((6, 6, 6))[0]
    full = model(ids, mask, target_ids=targets)
    state, parts = model.features(ids, mask), []
    for part in targets.split(sizes, 1):
        logits, state = model.decode(part, state)
        parts.append(logits)
    assert (torch.cat(parts, 1) - full).abs().max() <= 1e-5


def table(rows):
    """A step of a made-up language: probabilities of what follows each last token."""
    logs = torch.tensor(rows).log()

    def step(token, state):
        return logs[token], state

    return step


# After the start (0), token 1 looks better than token 2, and leads nowhere: the best sequence is
# 2, end (0.4 * 0.9 = 0.36); greedy finds 1, 1, ... of 0.6 * 0.4 ^ n.
GARDEN = [
    [0.0, 0.6, 0.4, 0.0],
    [0.0, 0.4, 0.3, 0.3],
    [0.0, 0.05, 0.05, 0.9],
    [0.0, 0.0, 0.0, 1.0],
]
START = torch.zeros(1, dtype=torch.int64)


def test_greedy_takes_the_first_best_and_beam_search_the_best():
    step = table(GARDEN)
    assert greedy(step, (), START, end=3, limit=4).tolist() == [[1, 1, 1, 1]]
    found = beam_search(step, (), START, end=3, limit=4, beams=2, length_penalty=0.0)
    assert found.ids.tolist() == [[2, 3]]
    assert found.scores.exp().tolist() == pytest.approx([0.36])
    # Over ((5 + 2) / 6) ^ 1, by hand.
    found = beam_search(step, (), START, end=3, limit=4, beams=2, length_penalty=1.0)
    assert found.scores.tolist() == pytest.approx([math.log(0.36) / (7 / 6)])


def best_of_all(model, state, limit, alpha, end=2):
    """Every sequence that ends with the end or at the limit, scored in one pass each."""
    vocabulary, best = range(model.config.vocab_size), (-math.inf, ())
    for length in range(1, limit + 1):
        for ids in itertools.product(vocabulary, repeat=length):
            if end in ids[:-1] or (ids[-1] != end and length < limit):
                continue
            logits, _ = model.decode(torch.tensor([[1, *ids[:-1]]]), state)
            score = logits[0].log_softmax(-1)[range(length), list(ids)].sum().item()
            best = max(best, (score / ((5 + length) / 6) ** alpha, ids))
    return best


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_equals_exhaustive_search(alpha):
    model = tiny(vocab_size=4)
    source = torch.tensor([[3, 1, 3], [1, 0, 0]])
    with torch.no_grad():
        found = generate(model, source, limit=4, beams=64, length_penalty=alpha)
        for row in range(2):
            state = model.features(source[row : row + 1])
            score, ids = best_of_all(model, state, 4, alpha)
            assert found.scores[row].item() == pytest.approx(score, abs=1e-5)
            assert found.ids[row, : len(ids)].tolist() == list(ids)
            assert (found.ids[row, len(ids) :] == 2).all()


def test_the_search_of_a_row_does_not_depend_on_the_others():
    model, (ids, mask) = tiny(), batch((9, 1, 5, 3))
    together = generate(model, ids, mask, limit=8, beams=3)
    for row in range(4):
        alone = generate(model, ids[row][mask[row]][None], limit=8, beams=3)
        length = alone.ids.shape[1]
        assert together.ids[row, :length].tolist() == alone.ids[0].tolist()
        assert (together.ids[row, length:] == model.config.end_id).all()
        assert together.scores[row].item() == pytest.approx(alone.scores[0].item(), abs=1e-5)


def test_the_score_of_a_sequence_is_its_probability():
    model, (ids, mask) = tiny(), batch()
    found = generate(model, ids, mask, limit=6, beams=2, length_penalty=0.0)
    for row, sequence in enumerate(found.ids.tolist()):
        end = sequence.index(2) + 1 if 2 in sequence else len(sequence)
        target = torch.tensor([[1, *sequence[: end - 1]]])
        logits = model(ids[row : row + 1], mask[row : row + 1], target_ids=target)[0]
        score = logits.log_softmax(-1)[range(end), sequence[:end]].sum().item()
        assert found.scores[row].item() == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("change", [{"beams": 0}, {"limit": 0}, {"length_penalty": -1.0}])
def test_impossible_searches_are_refused(change):
    with pytest.raises(ConfigError, match="at least one beam"):
        beam_search(table(GARDEN), (), START, **{"end": 3, "limit": 4, **change})


def test_a_state_is_reordered_in_every_tensor():
    model, (ids, mask) = tiny(), batch()
    _, state = model.decode(ids[:, :2], model.features(ids, mask))
    rows = torch.tensor([2, 2, 0])
    moved = transformer.reordered(state, rows)
    assert isinstance(moved, DecoderState)
    expected, _ = model.decode(ids[:, 2:3], state)
    found, _ = model.decode(ids[rows, 2:3], moved)
    assert torch.allclose(found, expected[rows], atol=1e-6)


# It learns


def reversal(config: TransformerConfig, length: int, steps: int, size: int = 64) -> float:
    """Train on reversing random sequences; the share of new ones that greedy search gets right."""
    torch.manual_seed(0)
    model = Transformer(config).train()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)

    def sample(count, generator):
        lengths = torch.randint(1, length + 1, (count,), generator=generator)
        shape = (count, length)
        ids = torch.randint(3, config.vocab_size, shape, generator=generator)
        index = torch.arange(length)
        source = torch.where(index < lengths[:, None], ids, 0)
        turned = source.gather(1, (lengths[:, None] - 1 - index).clamp(min=0))
        target = torch.full((count, length + 1), -100)
        target[:, :-1] = torch.where(index < lengths[:, None], turned, -100)
        return source, target.scatter(1, lengths[:, None], config.end_id)

    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        rate = factor(Linear(warmup=0.1), step, steps)
        optimizer.param_groups[0]["lr"] = 4e-3 * rate
        source, target = sample(size, generator)
        shifted = torch.cat([torch.full((size, 1), config.start_id), target[:, :-1]], 1)
        logits = model(source, target_ids=shifted.clamp(min=0))
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), label_smoothing=0.1
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source, target = sample(256, torch.Generator().manual_seed(2))
    found = generate(model.eval(), source, limit=length + 1, beams=2).ids
    expected = target.where(target >= 0, config.end_id)[:, : found.shape[1]]
    return (found == expected).all(1).float().mean().item()


LEARNER = TransformerConfig(
    vocab_size=11,
    embed_dim=32,
    num_layers=1,
    num_heads=4,
    mlp_dim=64,
    dropout=0.0,
    norm_first=True,
)


def test_short_sequences_are_reversed_after_seconds():
    assert reversal(LEARNER, length=3, steps=250) >= 0.99


@pytest.mark.prove
def test_sequences_are_reversed_to_the_letter():
    config = replace(LEARNER, embed_dim=64, mlp_dim=128)
    assert reversal(config, length=6, steps=500) >= 0.99
