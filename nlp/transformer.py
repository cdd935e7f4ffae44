"""The Transformer of 2017: encoder and decoder for text to text, and the encoder alone for classes.

Papers:
    Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser, Polosukhin 2017, "Attention is all
    you need", https://arxiv.org/abs/1706.03762; Xiong et al. 2020 (pre-norm),
    https://arxiv.org/abs/2002.04745; Wu et al. 2016 (beam search),
    https://arxiv.org/abs/1609.08144.

Differs from the papers:
    * Padding does not exist. Positions count the tokens that are attended to and the others are
      never read: a row alone equals the same row in any batch, padded on either side. A row
      without tokens gives zeros.
    * Sines and cosines alternate, as section 3.5 writes them; tensor2tensor, with which the
      paper's figures were made, puts all sines first.
    * Beam search keeps the best finished hypothesis and ends when none can overtake it.

State-dict keys of the two stacks are those of `torch.nn.Transformer`, whose post-norm stacks end
in a norm that the paper has not.

Cards: transformer-base, transformer-big, transformer-tiny, transformer-encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from zoo.errors import ConfigError, DataError
from zoo.training.recipe import AdamW, InverseRoot, Linear, Recipe


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Architecture of a `Transformer`; the defaults are the paper's base model."""

    vocab_size: int = 37000  # of both languages
    embed_dim: int = 512  # d_model
    num_layers: int = 6  # N, of each stack
    num_heads: int = 8  # h
    mlp_dim: int = 2048  # d_ff
    dropout: float = 0.1  # of every sublayer's output, and of the embeddings
    norm_first: bool = False  # x + Sublayer(LayerNorm(x)), and a norm after each stack
    activation: Literal["relu", "gelu"] = "relu"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_length: int = 512  # tokens of a row; sinusoids have no limit
    pad_id: int = 0
    start_id: int = 1  # what a target begins with
    end_id: int = 2  # and ends with

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "max_length")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if self.embed_dim % self.num_heads or self.embed_dim % 2:
            raise ConfigError(
                f"embed_dim is {self.embed_dim}; it takes an even multiple of "
                f"num_heads={self.num_heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it takes a number in [0, 1)")
        for name in ("pad_id", "start_id", "end_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it takes an id below the vocabulary's "
                    f"{self.vocab_size}"
                )


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(TransformerConfig):
    """Architecture of a `TransformerClassifier`, which has the encoder alone."""

    num_classes: int = 2


class KeysValues(NamedTuple):
    """What queries look at: two projections of the same tokens."""

    keys: Float[Tensor, "batch heads tokens head_dim"]
    values: Float[Tensor, "batch heads tokens head_dim"]


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention in several subspaces at once (section 3.2.2)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, self.num_heads = config.embed_dim, config.num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))  # W^Q, W^K, W^V
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)  # W^O

    def keys_values(self, memory: Float[Tensor, "batch tokens dim"]) -> KeysValues:
        """Keys and values of the tokens to look at; the same for whatever queries come."""
        return KeysValues(self._project(memory, 1), self._project(memory, 2))

    def forward(
        self,
        x: Float[Tensor, "batch queries dim"],
        memory: KeysValues,
        mask: Bool[Tensor, "batch queries tokens"],
    ) -> Float[Tensor, "batch queries dim"]:
        """Values averaged by the match of their keys with each query: softmax(QK^T / sqrt(d_k))V.

        Args:
            x: What the queries are made of.
            memory: Of `keys_values`.
            mask: True = attend. A query that attends to nothing has the average zero.

        Source: equation (1).
        """
        some = mask.any(-1, keepdim=True)
        # No backend meets a row without keys, whose softmax (and its gradient) may be NaN.
        y = F.scaled_dot_product_attention(
            self._project(x, 0), *memory, attn_mask=(mask | ~some)[:, None]
        )
        return self.out_proj(y.transpose(1, 2).flatten(2) * some)

    def _project(self, x: Tensor, which: int) -> Tensor:
        """One of the three projections, (batch, heads, tokens, head_dim)."""
        weight, bias = self.in_proj_weight.chunk(3)[which], self.in_proj_bias.chunk(3)[which]
        return F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """What layers of both stacks share: the feed-forward network and the residual connections."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.activation = {"relu": F.relu, "gelu": F.gelu}[config.activation]
        self.dropout = nn.Dropout(config.dropout)
        self.self_attn = MultiHeadAttention(config)
        self.linear1 = nn.Linear(config.embed_dim, config.mlp_dim)
        self.linear2 = nn.Linear(config.mlp_dim, config.embed_dim)
        self.norm1 = nn.LayerNorm(config.embed_dim)
        self.norm2 = nn.LayerNorm(config.embed_dim)

    def enter(self, norm: nn.Module, x: Tensor) -> Tensor:
        """What a sublayer takes."""
        return norm(x) if self.norm_first else x

    def leave(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """A sublayer's output `y` added to what entered: `LayerNorm(x + Sublayer(x))`."""
        x = x + self.dropout(y)
        return x if self.norm_first else norm(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Two linear maps with an activation between them (equation 2)."""
        return self.linear2(self.activation(self.linear1(x)))


class EncoderLayer(Layer):
    """Self-attention, then the feed-forward network."""

    def forward(
        self, x: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens tokens"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Hidden states after this layer."""
        y = self.enter(self.norm1, x)
        x = self.leave(self.norm1, x, self.self_attn(y, self.self_attn.keys_values(y), mask))
        return self.leave(self.norm2, x, self.feed_forward(self.enter(self.norm2, x)))


class LayerState(NamedTuple):
    """What a decoder layer keeps between two tokens."""

    past: KeysValues | None  # of the target so far
    memory: KeysValues  # of the source


class DecoderLayer(Layer):
    """Self-attention on the target so far, attention to the source, the feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.multihead_attn = MultiHeadAttention(config)
        self.norm3 = nn.LayerNorm(config.embed_dim)

    def forward(
        self,
        x: Float[Tensor, "batch targets dim"],
        mask: Bool[Tensor, "batch targets past_and_targets"],
        memory_mask: Bool[Tensor, "batch targets tokens"],
        state: LayerState,
    ) -> tuple[Float[Tensor, "batch targets dim"], LayerState]:
        """Hidden states of further target tokens, and the state that holds them too."""
        y = self.enter(self.norm1, x)
        past = self.self_attn.keys_values(y)
        if state.past is not None:
            past = KeysValues(
                torch.cat([state.past.keys, past.keys], 2),
                torch.cat([state.past.values, past.values], 2),
            )
        x = self.leave(self.norm1, x, self.self_attn(y, past, mask))
        y = self.enter(self.norm2, x)
        x = self.leave(self.norm2, x, self.multihead_attn(y, state.memory, memory_mask))
        x = self.leave(self.norm3, x, self.feed_forward(self.enter(self.norm3, x)))
        return x, LayerState(past, state.memory)


class Encoder(nn.Module):
    """A stack of encoder layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim) if config.norm_first else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "batch tokens dim"],
        mask: Bool[Tensor, "batch tokens"],
        layers: range | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Hidden states; zero at tokens that are not attended to, whatever stands there.

        Args:
            x: Of the tokens, or of the layers before.
            mask: True = attend.
            layers: Numbers of some of the layers; by default all of them.
        """
        x = torch.where(mask[..., None], x, 0)
        attend = mask[:, None, :].expand(-1, mask.shape[1], -1)
        for number in layers or range(len(self.layers)):
            x = self.layers[number](x, attend)
        if layers is None or layers.stop == len(self.layers):
            x = self.norm(x)
        return torch.where(mask[..., None], x, 0)


class DecoderState(NamedTuple):
    """What a decoder keeps between two tokens; `reordered` makes a beam's from it."""

    layers: tuple[LayerState, ...]
    memory_mask: Bool[Tensor, "batch tokens"]


class Decoder(nn.Module):
    """A stack of decoder layers; the whole target at once, or token by token."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim) if config.norm_first else nn.Identity()

    def start(
        self, memory: Float[Tensor, "batch tokens dim"], memory_mask: Bool[Tensor, "batch tokens"]
    ) -> DecoderState:
        """State before the first target token, from the encoder's output."""
        memory = torch.where(memory_mask[..., None], memory, 0)
        layers = (LayerState(None, la.multihead_attn.keys_values(memory)) for la in self.layers)
        return DecoderState(tuple(layers), memory_mask)

    def forward(
        self, x: Float[Tensor, "batch targets dim"], state: DecoderState
    ) -> tuple[Float[Tensor, "batch targets dim"], DecoderState]:
        """Hidden states of further target tokens, each of which sees those before it."""
        first, count = decoded(state), x.shape[1]
        index = torch.arange(first + count, device=x.device)
        mask = (index[first:, None] >= index).expand(x.shape[0], -1, -1)
        memory_mask = state.memory_mask[:, None, :].expand(-1, count, -1)
        states = []
        for layer, old in zip(self.layers, state.layers, strict=True):
            x, new = layer(x, mask, memory_mask, old)
            states.append(new)
        return self.norm(x), DecoderState(tuple(states), state.memory_mask)


def decoded(state: DecoderState) -> int:
    """Number of target tokens in a state."""
    past = state.layers[0].past
    return 0 if past is None else past.keys.shape[2]


def sinusoids(positions: Int[Tensor, "*shape"], dim: int) -> Float[Tensor, "*shape dim"]:
    """Position encodings: sines at even places, cosines at odd ones.

    Args:
        positions: From 0.
        dim: Even number of places.

    Source: section 3.5.
    """
    rates = torch.arange(0, dim, 2, device=positions.device) * (-math.log(10000) / dim)
    angles = positions[..., None] * rates.exp()
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


class Embeddings(nn.Module):
    """Tokens times sqrt(d_model), plus their positions (sections 3.4 and 3.5)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dim, self.pad_id, self.max_length = config.embed_dim, config.pad_id, config.max_length
        self.tokens = nn.Embedding(config.vocab_size, config.embed_dim)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_length, config.embed_dim) if learned else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, ids: Int[Tensor, "batch tokens"], positions: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """First hidden states.

        Raises:
            DataError: A row is longer than the table of learned positions, or an id is not in the
                vocabulary.
        """
        self._check(ids, positions)
        x = self.tokens(ids) * math.sqrt(self.dim)
        if self.positions is None:
            return self.dropout(x + sinusoids(positions, self.dim).to(x.dtype))
        return self.dropout(x + self.positions(positions))

    def _check(self, ids: Tensor, positions: Tensor) -> None:
        """Say what would be a bare index error; only on the CPU, where looking is cheap."""
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
            return
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.tokens.num_embeddings:
            raise DataError(
                f"token id {low if low < 0 else high} is not in the vocabulary of "
                f"{self.tokens.num_embeddings} tokens; use the tokenizer of these weights"
            )
        longest = int(positions.max()) + 1
        if self.positions is not None and longest > self.max_length:
            raise DataError(
                f"a row has {longest} tokens; the model takes at most {self.max_length}, cut it"
            )


def init_weights(module: nn.Module) -> None:
    """Initialise one module: Glorot's uniform matrices, zero biases, embeddings of variance 1/dim.

    The paper does not say; so does tensor2tensor.
    """
    if isinstance(module, MultiHeadAttention):
        for weight in module.in_proj_weight.chunk(3):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(module.in_proj_bias)
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


class Transformer(nn.Module):
    """Encoder and decoder (figure 1); one matrix embeds both languages and gives the logits."""

    init_weights = staticmethod(init_weights)

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.apply(self.init_weights)

    def features(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
    ) -> DecoderState:
        """The source as the decoder takes it, before the first target token.

        Args:
            input_ids: The source; ids that are not attended to may be anything.
            attention_mask: True or 1 = attend; without it, everything but `config.pad_id`.

        Raises:
            DataError: A row is too long, or an id is not in the vocabulary.
        """
        x, mask = _embed(self.embeddings, input_ids, attention_mask)
        return self.decoder.start(self.encoder(x, mask), mask)

    def decode(
        self, target_ids: Int[Tensor, "batch targets"], state: DecoderState
    ) -> tuple[Float[Tensor, "batch targets vocab"], DecoderState]:
        """Logits of what follows each of some further target tokens, and the state after them."""
        first = decoded(state)
        positions = torch.arange(first, first + target_ids.shape[1], device=target_ids.device)
        x = self.embeddings(target_ids, positions.expand_as(target_ids))
        x, state = self.decoder(x, state)
        return F.linear(x, self.embeddings.tokens.weight), state

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
        *,
        target_ids: Int[Tensor, "batch targets"],
    ) -> Float[Tensor, "batch targets vocab"]:
        """Logits of what follows each target token, given those before it.

        Args:
            input_ids: The source, as `features` takes it.
            attention_mask: Of the source.
            target_ids: Targets from `config.start_id` on, padded on the right with any id of the
                vocabulary: no token sees a later one.

        Raises:
            DataError: As `features`.
        """
        return self.decode(target_ids, self.features(input_ids, attention_mask))[0]

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the source to the target; there is no head, the matrix is shared."""
        stacks = ("encoder", "decoder")
        count = self.config.num_layers
        layers = [[f"{stack}.layers.{i}"] for stack in stacks for i in range(count)]
        layers[count - 1].append("encoder.norm")
        layers[-1].append("decoder.norm")
        return [["embeddings"], *layers, []]


class TransformerClassifier(nn.Module):
    """The encoder, the mean of its tokens, and one linear layer."""

    init_weights = staticmethod(init_weights)

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.embed_dim, config.num_classes)
        self.apply(self.init_weights)

    def features(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch dim"]:
        """Mean of the last hidden states of a row; arguments and errors as in `Transformer`."""
        x, mask = _embed(self.embeddings, input_ids, attention_mask)
        return _mean(self.encoder(x, mask), mask)

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
        token_type_ids: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch classes"]:
        """Logits; `token_type_ids` are not read, a separator tells the texts of a pair apart."""
        return self.classifier(self.dropout(self.features(input_ids, attention_mask)))

    def stage(
        self,
        x: Float[Tensor, "batch tokens dim"] | None,
        layers: range,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
        token_type_ids: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch ..."]:
        """What some layers make of what those before them gave: a part of `forward`.

        Args:
            x: Hidden states; None begins with the text.
            layers: Numbers of the layers. The last one of all is followed by the classifier.
            input_ids: As `forward` takes it, as the rest.
            attention_mask: The same.
            token_type_ids: The same.

        Returns:
            Hidden states, or what `forward` gives.
        """
        if x is None:
            x, mask = _embed(self.embeddings, input_ids, attention_mask)
        else:
            mask = _mask(self.embeddings, input_ids, attention_mask)
        x = self.encoder(x, mask, layers)
        if layers.stop < self.config.num_layers:
            return x
        return self.classifier(self.dropout(_mean(x, mask)))

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the text to the answer."""
        layers = [[f"encoder.layers.{i}"] for i in range(self.config.num_layers)]
        layers[-1].append("encoder.norm")
        return [["embeddings"], *layers, ["classifier"]]


def _embed(
    embeddings: Embeddings, input_ids: Tensor, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """First hidden states of a source, and its mask as bool."""
    if input_ids.ndim != 2:
        raise DataError(
            f"input_ids has shape {tuple(input_ids.shape)}; the model takes (batch, tokens): "
            "one text becomes a batch with input_ids[None]"
        )
    mask = _mask(embeddings, input_ids, attention_mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # among the tokens that are attended to
    return embeddings(torch.where(mask, input_ids, embeddings.pad_id), positions), mask


def _mask(embeddings: Embeddings, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    return input_ids != embeddings.pad_id if attention_mask is None else attention_mask != 0


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean (batch, dim) of the tokens of each row, which are zero where the mask is False."""
    return x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Hypothesis(NamedTuple):
    """The best continuation of each row."""

    ids: Int[Tensor, "batch length"]  # without the start, from the end token on filled with it
    scores: Float[Tensor, " batch"]  # log-probability over the length penalty


# Logits (rows, vocabulary) of what follows the tokens (rows,), and the state after them.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def greedy(step: Step, state: Any, start: Int[Tensor, " batch"], *, end: int, limit: int) -> Tensor:
    """The most probable token, again and again; ids (batch, length) as in `Hypothesis`.

    Args:
        step: One token further.
        state: Before the first token.
        start: First token of each row.
        end: Token after which a row is over.
        limit: Tokens of a row at most, with the end.
    """
    token, over, ids = start, torch.zeros_like(start, dtype=torch.bool), []
    while len(ids) < limit and not over.all():
        logits, state = step(token, state)
        token = torch.where(over, end, logits.argmax(-1))
        over = over | (token == end)
        ids.append(token)
    return torch.stack(ids, 1)


def beam_search(
    step: Step,
    state: Any,
    start: Int[Tensor, " batch"],
    *,
    end: int,
    limit: int,
    beams: int = 4,
    length_penalty: float = 0.6,
) -> Hypothesis:
    """The best sequence among those that the `beams` most probable beginnings lead to.

    A row does not depend on the others. With as many beams as there are beginnings, the search is
    exhaustive.

    Args:
        step: One token further.
        state: Before the first token: tuples of tensors whose first axis is the row.
        start: First token of each row.
        end: Token after which a sequence is over.
        limit: Tokens of a sequence at most, with the end; one that reaches it is over.
        beams: Unfinished sequences that are kept.
        length_penalty: Alpha; 0 prefers short sequences, 1 nearly the mean log-probability.

    Raises:
        ConfigError: There is no beam, no token, or a negative penalty.

    Source: section 6.1; Wu et al. 2016, equation (14), without the coverage penalty.
    """
    if beams < 1 or limit < 1 or length_penalty < 0:
        raise ConfigError(
            f"beams={beams}, limit={limit}, length_penalty={length_penalty}: a search takes "
            "at least one beam and one token, and a penalty of 0 or more"
        )

    def penalty(length: int) -> float:
        return ((5 + length) / 6) ** length_penalty

    rows = len(start)
    offsets = torch.arange(rows, device=start.device)[:, None] * beams
    state = reordered(state, torch.arange(rows, device=start.device).repeat_interleave(beams))
    token = start.repeat_interleave(beams)
    scores = torch.full((rows, beams), -math.inf, device=start.device)
    scores[:, 0] = 0  # all beams are equal yet, and one is enough
    ids = start.new_empty(rows, beams, 0)
    best = scores.new_full((rows,), -math.inf)
    best_ids = start.new_full((rows, limit), end)
    for length in range(1, limit + 1):
        logits, state = step(token, state)
        totals = scores[..., None] + logits.float().log_softmax(-1).unflatten(0, (rows, beams))
        over, which = totals[..., end].max(1)
        finished = F.pad(_pick(ids, which[:, None])[:, 0], (0, limit - length + 1), value=end)
        better = over / penalty(length) > best
        best = torch.where(better, over / penalty(length), best)
        best_ids = torch.where(better[:, None], finished, best_ids)

        totals[..., end] = -math.inf
        scores, flat = totals.flatten(1).topk(beams, 1)
        source, token = flat // totals.shape[2], flat % totals.shape[2]
        ids = torch.cat([_pick(ids, source), token[..., None]], 2)
        state, token = reordered(state, (offsets + source).flatten()), token.flatten()
        # What is to come only lowers a log-probability, and the longest is penalised the least.
        if (best >= scores[:, 0] / penalty(limit)).all():
            break
    else:
        better = scores[:, 0] / penalty(limit) > best
        best = torch.where(better, scores[:, 0] / penalty(limit), best)
        best_ids = torch.where(better[:, None], ids[:, 0], best_ids)
    longest = int((best_ids != end).sum(1).max())
    return Hypothesis(best_ids[:, : min(longest + 1, limit)], best)


def _pick(ids: Tensor, which: Tensor) -> Tensor:
    """Some beams of each row: (rows, beams, length) at (rows, count)."""
    return ids.gather(1, which[..., None].expand(-1, -1, ids.shape[2]))


def reordered(state: Any, rows: Int[Tensor, " count"]) -> Any:
    """Nested tuples of tensors with other rows: some left out, some repeated."""
    if isinstance(state, Tensor):
        return state[rows]
    if state is None:
        return None
    parts = (reordered(part, rows) for part in state)
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


@torch.no_grad()
def generate(
    model: Transformer,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
    *,
    limit: int = 128,
    beams: int = 4,
    length_penalty: float = 0.6,
) -> Hypothesis:
    """The best target of each source by `beam_search`.

    The defaults are the paper's, but for the limit (50 tokens more than the source).
    """

    def step(token: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        logits, state = model.decode(token[:, None], state)
        return logits[:, 0], state

    start = input_ids.new_full((len(input_ids),), model.config.start_id)
    return beam_search(
        step,
        model.features(input_ids, attention_mask),
        start,
        end=model.config.end_id,
        limit=limit,
        beams=beams,
        length_penalty=length_penalty,
    )


def highest_rate(embed_dim: int, warmup_steps: int) -> float:
    """Learning rate at the end of the warm-up (equation 3)."""
    return (embed_dim * warmup_steps) ** -0.5


# Section 5 for the base model: 100,000 steps, the first 4,000 of them to warm up; Adam decays
# no weights. Its data (4.5 million sentence pairs, 25,000 tokens a batch) is not among the zoo's.
PAPER = Recipe(
    optimizer=AdamW(lr=highest_rate(512, 4000), betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0),
    schedule=InverseRoot(warmup=0.04),
    label_smoothing=0.1,
    buckets=True,
)

RECIPES = {
    # Numbers in words and in digits, both ways.
    "numbers": Recipe(
        data="numbers/train",
        validation="numbers/validation",
        epochs=4,
        batch_size=32,
        optimizer=AdamW(lr=2e-3, betas=(0.9, 0.98), eps=1e-9),
        schedule=Linear(warmup=0.1),
        clip_norm=1.0,
        buckets=True,
    ),
    # The plain reference for SST-2: nothing but its own 67,349 sentences and phrases.
    "sst2": Recipe(
        data="sst2/train",
        validation="sst2/validation",
        epochs=3,
        batch_size=64,
        optimizer=AdamW(lr=1e-3, weight_decay=0.05),
        schedule=Linear(warmup=0.1),
        label_smoothing=0.1,
        clip_norm=1.0,
        buckets=True,
    ),
}
