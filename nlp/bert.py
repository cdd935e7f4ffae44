"""BERT, the bidirectional Transformer encoder, with the head of one task.

Papers:
    Devlin, Chang, Lee, Toutanova 2018, "BERT: pre-training of deep bidirectional transformers for
    language understanding", https://arxiv.org/abs/1810.04805; Reimers, Gurevych 2019 (sentence
    embeddings), https://arxiv.org/abs/1908.10084.

Differs from the papers:
    * Padding does not exist. Positions count the tokens that are attended to, the others are never
      read, and the first token is found by the mask: a row alone equals the same row in any batch,
      padded on either side. On the CPU it is not computed either.
    * Weights start from a normal distribution, not from a truncated one.
    * There is no head for next-sentence prediction; published tensors of it are dropped.
    * Sentence embeddings have unit length.

State-dict keys and outputs are those of Hugging Face transformers 5.24.

Cards: all-minilm-l6-v2, minilm-l6, bert-base-uncased, bert-large-uncased.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_type_hints

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.errors import ConfigError, DataError
from zoo.training.recipe import AdamW, Linear, Recipe


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Architecture of a `Bert`; the defaults are BERT-base."""

    vocab_size: int = 30522
    embed_dim: int = 768  # H in the paper
    num_layers: int = 12  # L
    num_heads: int = 12  # A
    mlp_dim: int = 3072  # 4H
    max_length: int = 512  # tokens of a row that are attended to
    type_vocab_size: int = 2  # segments A and B; with fewer than two, segments are not read
    norm_eps: float = 1e-12
    dropout: float = 0.1  # of hidden states and of attention weights
    pad_id: int = 0
    task: Literal[
        "sentence-embedding",
        "text-classification",
        "token-classification",
        "question-answering",
        "fill-mask",
    ] = "fill-mask"
    num_classes: int = 2  # of texts or of tokens
    pooling: Literal["mean", "cls"] = "mean"  # sentence-embedding only
    gradient_checkpointing: bool = False  # in training: less memory, one more forward pass

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "max_length")
        for name in (*sizes, "num_classes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it takes at least 1")
        if self.type_vocab_size < 0:
            raise ConfigError(f"type_vocab_size is {self.type_vocab_size}; it takes at least 0")
        if self.embed_dim % self.num_heads:
            raise ConfigError(
                f"embed_dim is {self.embed_dim}, which {self.num_heads} heads do not divide; "
                "choose num_heads among its divisors"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it takes a number in [0, 1)")
        if not 0 <= self.pad_id < self.vocab_size:
            raise ConfigError(
                f"pad_id is {self.pad_id}; it takes an id below the vocabulary's {self.vocab_size}"
            )

    @property
    def first_position(self) -> int:
        """Row of the table of positions that the first token of a text takes."""
        return 0


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, normalised (figure 2)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.word_embeddings = nn.Embedding(config.vocab_size, dim, padding_idx=config.pad_id)
        self.position_embeddings = nn.Embedding(config.first_position + config.max_length, dim)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        positions: Int[Tensor, "batch tokens"],
        token_type_ids: Int[Tensor, "batch tokens"],
    ) -> Float[Tensor, "batch tokens dim"]:
        """First hidden states."""
        x = self.word_embeddings(input_ids)
        if hasattr(self, "token_type_embeddings"):
            x = x + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))


@dataclass(frozen=True)
class Packing:
    """Rows of a batch one after the other without padding, the shorter ones first.

    What is done to each token alone is done to all at once; attention is computed for rows of equal
    length together, so that it needs no mask.

    Attributes:
        index: Place of each token in the flattened batch, int64 (tokens,).
        groups: How many rows of which length follow one another.
    """

    index: Tensor
    groups: tuple[tuple[int, int], ...]

    @staticmethod
    def of(mask: Bool[Tensor, "batch tokens"]) -> Packing:
        """The packing of the tokens that are attended to."""
        lengths = mask.sum(1)
        order = lengths.argsort(stable=True)
        rows, columns = mask[order].nonzero(as_tuple=True)
        found, counts = lengths[lengths > 0].unique(return_counts=True)
        groups = tuple(zip(counts.tolist(), found.tolist(), strict=True))
        return Packing(order[rows] * mask.shape[1] + columns, groups)

    def packed(self, x: Shaped[Tensor, "batch tokens *dim"]) -> Shaped[Tensor, "1 packed *dim"]:
        """The values of the tokens that are attended to."""
        return x.flatten(0, 1)[self.index][None]

    def padded(
        self, x: Float[Tensor, "1 packed dim"], batch: int, tokens: int
    ) -> Float[Tensor, "batch tokens dim"]:
        """The batch again, zero where nothing is attended to."""
        whole = x.new_zeros(batch * tokens, x.shape[2])
        return whole.index_copy(0, self.index, x[0]).view(batch, tokens, -1)


def attend(
    query: Float[Tensor, "batch tokens dim"],
    key: Float[Tensor, "batch tokens dim"],
    value: Float[Tensor, "batch tokens dim"],
    mask: Bool[Tensor, "batch 1 queries tokens"] | Packing | None,
    num_heads: int,
    dropout: float,
) -> Float[Tensor, "batch tokens dim"]:
    """Scaled dot-product attention of every head, side by side; None attends to everything."""
    if isinstance(mask, Packing):
        sizes = [rows * length for rows, length in mask.groups]
        pieces = zip(*(x[0].split(sizes) for x in (query, key, value)), strict=True)
        parts = [
            attend(*(x.view(rows, length, -1) for x in piece), None, num_heads, dropout)
            for piece, (rows, length) in zip(pieces, mask.groups, strict=True)
        ]
        return torch.cat([part.flatten(0, 1) for part in parts])[None]
    query, key, value = (
        x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # batch heads tokens dim
        for x in (query, key, value)
    )
    x = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention without its output projection."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.query = nn.Linear(config.embed_dim, config.embed_dim)
        self.key = nn.Linear(config.embed_dim, config.embed_dim)
        self.value = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(
        self,
        x: Float[Tensor, "batch tokens dim"],
        mask: Bool[Tensor, "batch 1 queries tokens"] | Packing,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Values averaged by the match of their keys with each query."""
        dropout = self.dropout if self.training else 0.0
        return attend(self.query(x), self.key(x), self.value(x), mask, self.num_heads, dropout)


class AddNorm(nn.Module):
    """Projection, dropout, residual connection and layer norm: `LayerNorm(x + Sublayer(x))`."""

    def __init__(self, in_dim: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(in_dim, config.embed_dim)
        self.LayerNorm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, y: Float[Tensor, "batch tokens in_dim"], x: Float[Tensor, "batch tokens dim"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """`y` projected and added to `x`, normalised."""
        return self.LayerNorm(x + self.dropout(self.dense(y)))


class Layer(nn.Module):
    """One Transformer block: self-attention, then a two-layer perceptron (post-norm)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config), "output": AddNorm(dim, config)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(dim, config.mlp_dim)})
        self.output = AddNorm(config.mlp_dim, config)

    def forward(
        self,
        x: Float[Tensor, "batch tokens dim"],
        mask: Bool[Tensor, "batch 1 queries tokens"] | Packing,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Hidden states after this block."""
        x = self.attention["output"](self.attention["self"](x, mask), x)
        # The exact gelu, by erf: the tanh form is off by up to 5e-4.
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class WordScores(nn.Module):
    """Scores of every word at every position; the matrix is that of the word embeddings."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self, x: Float[Tensor, "batch tokens dim"], words: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Logits over the vocabulary."""
        return F.linear(x, words, self.bias)


class MaskedLanguageHead(WordScores):
    """A layer of its own, and the scores of every word at every position."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.transform = nn.ModuleDict(
            {
                "dense": nn.Linear(config.embed_dim, config.embed_dim),
                "LayerNorm": nn.LayerNorm(config.embed_dim, eps=config.norm_eps),
            }
        )

    def forward(
        self, x: Float[Tensor, "batch tokens dim"], words: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "batch tokens vocab"]:
        """Logits over the vocabulary."""
        x = self.transform["LayerNorm"](F.gelu(self.transform["dense"](x)))
        return super().forward(x, words)


class Bert(nn.Module):
    """BERT with the head of `config.task`; its kin differ in names, positions and heads."""

    # How this family's files name things: the body, its stack, and the heads.
    body_name: ClassVar[str] = "bert"
    stack_name: ClassVar[str] = "encoder"
    head_names: ClassVar[tuple[str, ...]] = ("bert.pooler", "classifier", "qa_outputs", "cls")
    # The output matrix and bias, which some files store a second time under the name of a layer.
    copies: ClassVar[dict[str, str]] = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    # Tensors of published files that a task may do without: what pretraining needed, and copies.
    optional: ClassVar[re.Pattern[str]] = re.compile(
        r"bert\.embeddings\.position_ids|bert\.pooler\.dense\.(weight|bias)"
        r"|cls\.predictions\.(bias|decoder\.(weight|bias)"
        r"|transform\.(dense|LayerNorm)\.(weight|bias))"
        r"|cls\.seq_relationship\.(weight|bias)"
    )
    # Fields of the configuration as Hugging Face transformers calls them, and its heads.
    theirs: ClassVar[dict[str, str | tuple[str, ...]]] = {
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "type_vocab_size": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
        "dropout": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "pad_id": "pad_token_id",
    }
    their_name: ClassVar[str] = "Bert"
    their_heads: ClassVar[dict[str, str]] = {
        "sentence-embedding": "Model",
        "text-classification": "ForSequenceClassification",
        "token-classification": "ForTokenClassification",
        "question-answering": "ForQuestionAnswering",
        "fill-mask": "ForMaskedLM",
    }
    make_layer: ClassVar[type[nn.Module]] = Layer
    packs = True  # on the CPU rows are computed without their padding

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        layers = nn.ModuleList(self.make_layer(config) for _ in range(config.num_layers))
        stack = nn.ModuleDict({"layer": layers})
        body = nn.ModuleDict({"embeddings": Embeddings(config), self.stack_name: stack})
        self.add_module(self.body_name, body)
        if config.task == "token-classification":
            self.dropout = nn.Dropout(config.dropout)
            self.classifier = nn.Linear(config.embed_dim, config.num_classes)
        elif config.task == "question-answering":
            self.qa_outputs = nn.Linear(config.embed_dim, 2)
        else:
            self.make_head(config)
        self.apply(self.init_weights)

    def make_head(self, config: BertConfig) -> None:
        """The modules of a head that the family's members name and build in ways of their own."""
        if config.task == "text-classification":
            dense = nn.Linear(config.embed_dim, config.embed_dim)
            self.bert["pooler"] = nn.ModuleDict({"dense": dense})
            self.dropout = nn.Dropout(config.dropout)
            self.classifier = nn.Linear(config.embed_dim, config.num_classes)
        elif config.task == "fill-mask":
            self.cls = nn.ModuleDict({"predictions": MaskedLanguageHead(config)})

    def score_words(self, x: Tensor, words: Tensor) -> Tensor:
        """Logits (batch, tokens, vocab) of hidden states and the matrix of word embeddings."""
        return self.cls["predictions"](x, words)

    def score_classes(self, first: Tensor) -> Tensor:
        """Logits (batch, classes) of the hidden states of the first tokens."""
        return self.classifier(self.dropout(torch.tanh(self.bert["pooler"]["dense"](first))))

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        """Initialise one module: weights normal(0, 0.02), biases and the padding word zero.

        Source: appendix A.2; google-research/bert, `modeling.py`.
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear | nn.LayerNorm | WordScores):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight.detach()[module.padding_idx])

    def features(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
        token_type_ids: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Last hidden states; zero at tokens that are not attended to.

        Args:
            input_ids: Ids of the vocabulary; those that are not attended to may be anything.
            attention_mask: True or 1 = attend; without it, everything but `config.pad_id`.
            token_type_ids: Segment of each token; 0 without it.

        Raises:
            DataError: A row is longer than `config.max_length`, or an id is not in the vocabulary.
        """
        mask = self._mask(input_ids, attention_mask)
        layers = range(self.config.num_layers)
        return self._hidden(None, layers, input_ids, mask, token_type_ids)

    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | Bool[Tensor, "batch tokens"] | None = None,
        token_type_ids: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch ..."]:
        """Answers of the task; arguments and errors are those of `features`.

        Returns:
            sentence-embedding: vectors of unit length (batch, dim), zero for a row without tokens.
            text-classification: logits (batch, classes). fill-mask: logits (batch, tokens, vocab).
            token-classification: logits (batch, tokens, classes). question-answering: logits
            (batch, tokens, 2) of the first and of the last token of the answer.
        """
        layers = range(self.config.num_layers)
        return self.stage(None, layers, input_ids, attention_mask, token_type_ids)

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
            layers: Numbers of the layers. The last one of all is followed by the task's head.
            input_ids: As `forward` takes it, as the rest.
            attention_mask: The same.
            token_type_ids: The same.

        Returns:
            Hidden states, or what `forward` gives.
        """
        mask = self._mask(input_ids, attention_mask)
        x = self._hidden(x, layers, input_ids, mask, token_type_ids)
        if layers.stop < self.config.num_layers:
            return x
        if self.config.task == "token-classification":
            return self.classifier(self.dropout(x))
        if self.config.task == "question-answering":
            return self.qa_outputs(x)
        if self.config.task == "fill-mask":
            return self.score_words(x, self.get_parameter(self._words))
        first = mask & (_positions(mask) == 0)
        if self.config.task == "text-classification":
            return self.score_classes(_mean(x, first))
        x = _mean(x, mask if self.config.pooling == "mean" else first)
        length = x.norm(dim=-1, keepdim=True)
        # Not a small constant: the gradient of a zero vector would be divided by it, and overflow.
        return x / torch.where(length == 0, 1, length)

    @property
    def _words(self) -> str:
        return f"{self.body_name}.embeddings.word_embeddings.weight"

    def tied_names(self) -> list[str]:
        """Parameters of the embeddings that the head reads too."""
        return [self._words] if self.config.task == "fill-mask" else []

    def depth_order(self) -> list[list[str]]:
        """Key prefixes from the text to the answer: embeddings, each layer, the task's head."""
        stack = f"{self.body_name}.{self.stack_name}.layer"
        layers = [[f"{stack}.{i}"] for i in range(self.config.num_layers)]
        return [[f"{self.body_name}.embeddings"], *layers, list(self.head_names)]

    def to_transformers(self, labels: Sequence[str] | None = None) -> dict[str, Any]:
        """``config.json`` of this model for Hugging Face transformers.

        Args:
            labels: Names of the classes, where there are any.
        """
        config: dict[str, Any] = {
            "architectures": [self.their_name + self.their_heads[self.config.task]],
            "model_type": self.their_name.lower(),
            "hidden_act": "gelu",
            "max_position_embeddings": self.config.first_position + self.config.max_length,
        }
        for own, names in self.theirs.items():
            names = names if isinstance(names, tuple) else (names,)
            config |= dict.fromkeys(names, getattr(self.config, own))
        if self.config.task.endswith("-classification"):
            names = labels or [f"LABEL_{i}" for i in range(self.config.num_classes)]
            config["id2label"] = {str(i): name for i, name in enumerate(names)}
            config["label2id"] = {name: i for i, name in enumerate(names)}
        return config

    @classmethod
    def from_transformers(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of our configuration that a ``config.json`` of transformers states.

        Raises:
            ConfigError: It is of another family, or of an activation that this one does not have.
        """
        kind, activation = found.get("model_type"), found.get("hidden_act", "gelu")
        if kind != cls.their_name.lower() or activation != "gelu":
            raise ConfigError(
                f"config.json is of a {kind} with {activation}; {cls.__name__} is "
                f"{cls.their_name.lower()} with gelu"
            )
        config: dict[str, Any] = {}
        for own, names in cls.theirs.items():
            name = names[0] if isinstance(names, tuple) else names
            if name in found:
                config[own] = found[name]
        heads = {cls.their_name + head: task for task, head in cls.their_heads.items()}
        tasks = [heads[name] for name in found.get("architectures") or () if name in heads]
        if tasks:
            config["task"] = tasks[0]
        if tasks and tasks[0].endswith("-classification"):
            config["num_classes"] = len(found.get("id2label", (0, 1)))
        if "max_position_embeddings" in found:
            default = get_type_hints(cls.__init__)["config"]
            first = default(pad_id=config.get("pad_id", default().pad_id)).first_position
            config["max_length"] = found["max_position_embeddings"] - first
        return config

    def convert_keys(self, names: Iterable[str]) -> dict[str, str | None]:
        """This model's name of every stored tensor, or None for one that the task does not need.

        Knows every form in which BERT is published: with or without the name of the body, layer
        norms named weight/bias or gamma/beta, with position ids, pretraining heads, and copies of
        the tied output matrix and bias: a copy gets the name of its original, which it must equal.
        A name of no known form stands for itself.
        """
        names, own = list(names), set(self.state_dict())
        copies = self.copies if self.config.task == "fill-mask" else {}
        bare = not any(name.startswith(f"{self.body_name}.") for name in names)
        found: dict[str, str | None] = {name: name for name in names}
        taken = own & found.keys()
        for name in (n for n in names if n not in own):
            new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
            new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
            if bare:
                parts = rf"^(?=(embeddings|{self.stack_name}|pooler)\.)"
                new = re.sub(parts, f"{self.body_name}.", new)
            if new in own and new not in taken:
                found[name] = new
                taken.add(new)
            elif new not in own and self.optional.fullmatch(new):
                del found[name]  # a copy comes last, so that its original is the one in use
                found[name] = copies.get(new)
        return found

    def _mask(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return input_ids != self.config.pad_id if attention_mask is None else attention_mask != 0

    def _hidden(
        self,
        x: Tensor | None,
        layers: range,
        input_ids: Tensor,
        mask: Tensor,
        token_type_ids: Tensor | None,
    ) -> Tensor:
        """Hidden states after some layers; zero at tokens that are not attended to."""
        if input_ids.ndim != 2:
            raise DataError(
                f"input_ids has shape {tuple(input_ids.shape)}; the model takes (batch, tokens): "
                "one text becomes a batch with input_ids[None]"
            )
        packing = None
        if self.packs and not torch.compiler.is_compiling() and mask.device.type == "cpu":
            packing = Packing.of(mask)
        if packing and packing.groups:
            attend: Any = packing
        else:
            packing = None
            # One row of the mask a query: with one row for all, ONNX's Attention does not run.
            attend = mask[:, None, None, :].expand(-1, -1, mask.shape[1], -1)
        body = self.get_submodule(self.body_name)
        if x is None:
            self._check(input_ids, mask)
            input_ids = torch.where(mask, input_ids, self.config.pad_id)
            if token_type_ids is None or self.config.type_vocab_size < 2:
                segments = torch.zeros_like(input_ids)
            else:
                segments = token_type_ids * mask
            inputs = input_ids, _positions(mask) + self.config.first_position, segments
            x = body["embeddings"](*(map(packing.packed, inputs) if packing else inputs))
        elif packing:
            x = packing.packed(x)
        recompute = self.config.gradient_checkpointing and self.training
        for layer in (body[self.stack_name]["layer"][number] for number in layers):
            x = checkpoint(layer, x, attend, use_reentrant=False) if recompute else layer(x, attend)
        if packing:
            return packing.padded(x, *mask.shape)
        # Backends differ in what attention gives to a row without tokens.
        return torch.where(mask[..., None], x, 0)

    def _check(self, input_ids: Tensor, mask: Tensor) -> None:
        """Say what would be a bare index error; ids only on the CPU, where looking is cheap."""
        if torch.compiler.is_compiling():
            return
        limit, vocabulary = self.config.max_length, self.config.vocab_size
        if input_ids.shape[1] > limit and (longest := int(mask.sum(1).max())) > limit:
            raise DataError(f"a row has {longest} tokens; the model takes at most {limit}, cut it")
        if input_ids.device.type == "cpu" and mask.any():
            low, high = (int(bound) for bound in input_ids[mask].aminmax())
            if low < 0 or high >= vocabulary:
                raise DataError(
                    f"token id {low if low < 0 else high} is not in the vocabulary of "
                    f"{vocabulary} tokens; use the tokenizer that belongs to these weights"
                )


def _positions(mask: Bool[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """Index of each token among those of its row that are attended to."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _mean(
    x: Float[Tensor, "batch tokens dim"], chosen: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch dim"]:
    """Mean of the chosen tokens, zero where there are none."""
    return (x * chosen[..., None]).sum(1) / chosen.sum(1, keepdim=True).clamp(min=1)


# Source: Devlin et al. 2018, appendix A.3; six layers take a higher rate than their twelve.
RECIPES = {
    "sst2": Recipe(
        data="sst2/train",
        validation="sst2/validation",
        init="all-minilm-l6-v2.sbert",
        task="text-classification",
        config={"num_classes": 2},
        epochs=3,
        batch_size=32,
        optimizer=AdamW(lr=4e-5),
        schedule=Linear(warmup=0.06),
        precision="bfloat16",
        clip_norm=1.0,
        ema=0.999,
        label_smoothing=0.1,
        buckets=True,
    )
}
