"""RoBERTa: BERT's layers, pretrained longer and on more text, without pairs of segments.

Paper: Liu et al. 2019, "RoBERTa: a robustly optimized BERT pretraining approach",
https://arxiv.org/abs/1907.11692.

Differs from `nlp.bert` in its vocabulary (pieces of bytes), its heads, and its table of positions:
the first rows, up to that of the padding's id, belong to no token. What `nlp.bert` says of padding
holds here. State-dict keys and outputs are those of Hugging Face transformers 5.24.

Cards: roberta-base.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlp.bert import Bert, BertConfig, WordScores


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """Architecture of a `Roberta`; the defaults are RoBERTa-base."""

    vocab_size: int = 50265
    type_vocab_size: int = 1
    norm_eps: float = 1e-5
    pad_id: int = 1

    @property
    def first_position(self) -> int:
        """Row of the table of positions that the first token of a text takes."""
        return self.pad_id + 1


class LanguageHead(WordScores):
    """`nlp.bert.MaskedLanguageHead` under other names."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.dense = nn.Linear(config.embed_dim, config.embed_dim)
        self.layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """Logits over the vocabulary, (batch, tokens, vocab)."""
        return super().forward(self.layer_norm(F.gelu(self.dense(x))), words)


class Roberta(Bert):
    """RoBERTa with the head of `config.task`."""

    body_name = "roberta"
    their_name = "Roberta"
    head_names = ("classifier", "qa_outputs", "lm_head")
    copies: ClassVar[dict[str, str]] = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }
    optional = re.compile(
        r"roberta\.embeddings\.position_ids|roberta\.pooler\.dense\.(weight|bias)"
        r"|lm_head\.(bias|(decoder|dense|layer_norm)\.(weight|bias))"
    )

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__(config)

    def make_head(self, config: BertConfig) -> None:
        """The modules of the heads that BERT names otherwise."""
        if config.task == "text-classification":
            dense = nn.Linear(config.embed_dim, config.embed_dim)
            out = nn.Linear(config.embed_dim, config.num_classes)
            self.dropout = nn.Dropout(config.dropout)
            self.classifier = nn.ModuleDict({"dense": dense, "out_proj": out})
        elif config.task == "fill-mask":
            self.lm_head = LanguageHead(config)

    def score_words(self, x: Tensor, words: Tensor) -> Tensor:
        """Logits (batch, tokens, vocab) of hidden states and the matrix of word embeddings."""
        return self.lm_head(x, words)

    def score_classes(self, first: Tensor) -> Tensor:
        """Logits (batch, classes) of the hidden states of the first tokens."""
        x = torch.tanh(self.classifier["dense"](self.dropout(first)))
        return self.classifier["out_proj"](self.dropout(x))
