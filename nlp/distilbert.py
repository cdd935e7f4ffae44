"""DistilBERT: every other layer of BERT, taught by the whole of it; no segments, no pooler.

Paper: Sanh, Debut, Chaumond, Wolf 2019, "DistilBERT, a distilled version of BERT: smaller, faster,
cheaper and lighter", https://arxiv.org/abs/1910.01108.

The computation is that of `nlp.bert`, and what it says of padding holds here; names and heads are
other ones. State-dict keys and outputs are those of Hugging Face transformers 5.24.

Cards: distilbert-base-uncased.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nlp.bert import Bert, BertConfig, Packing, WordScores, attend


@dataclass(frozen=True, kw_only=True)
class DistilBertConfig(BertConfig):
    """Architecture of a `DistilBert`; the defaults are DistilBERT-base."""

    num_layers: int = 6
    type_vocab_size: int = 0


class Layer(nn.Module):
    """`nlp.bert.Layer` under other names."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        dim, hidden = config.embed_dim, config.mlp_dim
        self.num_heads = config.num_heads
        names = ("q_lin", "k_lin", "v_lin", "out_lin")
        self.attention = nn.ModuleDict({name: nn.Linear(dim, dim) for name in names})
        self.sa_layer_norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.ffn = nn.ModuleDict({"lin1": nn.Linear(dim, hidden), "lin2": nn.Linear(hidden, dim)})
        self.output_layer_norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch tokens dim"],
        mask: Bool[Tensor, "batch 1 queries tokens"] | Packing,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Hidden states after this block; only attention weights and the perceptron are dropped."""
        query, key, value = (self.attention[name](x) for name in ("q_lin", "k_lin", "v_lin"))
        dropout = self.dropout.p if self.training else 0.0
        y = attend(query, key, value, mask, self.num_heads, dropout)
        x = self.sa_layer_norm(x + self.attention["out_lin"](y))
        y = self.ffn["lin2"](F.gelu(self.ffn["lin1"](x)))
        return self.output_layer_norm(x + self.dropout(y))


class DistilBert(Bert):
    """DistilBERT with the head of `config.task`."""

    body_name = "distilbert"
    stack_name = "transformer"
    head_names = (
        "pre_classifier", "classifier", "qa_outputs",
        "vocab_transform", "vocab_layer_norm", "vocab_projector",
    )  # fmt: skip
    copies: ClassVar[dict[str, str]] = {
        "vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"
    }
    optional = re.compile(
        r"distilbert\.embeddings\.position_ids"
        r"|vocab_(transform|layer_norm|projector)\.(weight|bias)"
    )
    theirs: ClassVar[dict[str, str | tuple[str, ...]]] = {
        "vocab_size": "vocab_size",
        "embed_dim": "dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "mlp_dim": "hidden_dim",
        "dropout": ("dropout", "attention_dropout"),
        "pad_id": "pad_token_id",
    }
    their_name = "DistilBert"
    make_layer = Layer

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)

    def make_head(self, config: BertConfig) -> None:
        """The modules of the heads that BERT names otherwise."""
        if config.task == "text-classification":
            self.pre_classifier = nn.Linear(config.embed_dim, config.embed_dim)
            self.dropout = nn.Dropout(config.dropout)
            self.classifier = nn.Linear(config.embed_dim, config.num_classes)
        elif config.task == "fill-mask":
            self.vocab_transform = nn.Linear(config.embed_dim, config.embed_dim)
            self.vocab_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
            self.vocab_projector = WordScores(config)

    def score_words(self, x: Tensor, words: Tensor) -> Tensor:
        """Logits (batch, tokens, vocab) of hidden states and the matrix of word embeddings."""
        x = self.vocab_layer_norm(F.gelu(self.vocab_transform(x)))
        return self.vocab_projector(x, words)

    def score_classes(self, first: Tensor) -> Tensor:
        """Logits (batch, classes) of the hidden states of the first tokens."""
        return self.classifier(self.dropout(F.relu(self.pre_classifier(first))))
