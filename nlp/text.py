"""Text preprocessing: from a string, or a pair of strings, to token ids, and from ids to a batch.

The tokenizer is the one of the weights, and its limit is the one on their card. What the file of a
tokenizer says about padding and length is switched off: it may disagree with the model (the one of
all-MiniLM-L6-v2 pads and cuts to 128, its model was made for 256).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from zoo.errors import CardError, DataError, WeightsError, shown

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100  # target of a token that has none; cross-entropy leaves it out


@dataclass(frozen=True, kw_only=True)
class TextPreprocessing:
    """How text becomes ids; the table `preprocessing` of a card."""

    tokenizer: str = "tokenizer.json"  # file of the weights; a vocabulary, if it ends in .txt
    max_length: int = 512  # tokens of a row, with [CLS] and [SEP]
    lowercase: bool = True  # for a vocabulary, which does not say it

    def __post_init__(self) -> None:
        if self.max_length < 3:
            raise CardError(f"max_length is {self.max_length}; [CLS] and two [SEP] alone take 3")


@dataclass(frozen=True)
class Encoding:
    """One text, or one pair, as tokens."""

    ids: list[int]
    type_ids: list[int]  # segment of each token: 0, or 1 in the second text of a pair
    offsets: list[tuple[int, int]]  # characters of its text; (0, 0) for an added [CLS] or [SEP]
    dropped: int  # tokens that did not fit


class Tokenizer:
    """A tokenizer file with one limit of length.

    Attributes:
        truncated: How many texts had to be cut so far. The first one gives a warning.
    """

    def __init__(self, path: Path, preprocessing: TextPreprocessing) -> None:
        """Read a file.

        Args:
            path: ``tokenizer.json`` of Hugging Face tokenizers, or a vocabulary of BERT (``.txt``),
                one token a line.
            preprocessing: The limit, and the case for a vocabulary.

        Raises:
            WeightsError: The file is neither.
        """
        try:
            if path.suffix == ".txt":
                self.model = from_vocabulary(path, lowercase=preprocessing.lowercase)
            else:
                self.model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            reason = f"cannot read the tokenizer {shown(path.name)}: {error}"
            raise WeightsError(reason, str(path)) from error
        self.model.no_padding()
        self.model.no_truncation()
        self.max_length = preprocessing.max_length
        self.truncated = 0

    def encode(self, text: object) -> Encoding:
        """Tokens of a text or of a pair; what is too long loses its end, the longer text first.

        An empty text is [CLS] [SEP]. Control characters are left out.

        Args:
            text: A str, or a tuple of two.

        Raises:
            DataError: It is no text, or no valid one.
        """
        texts = text if isinstance(text, tuple) and len(text) == 2 else (text,)
        if not all(isinstance(part, str) for part in texts):
            raise DataError(f"{shown(text)} is no text; give a str, or a tuple of two for a pair")
        parts = [self._tokens(part) for part in texts]
        lengths = [len(part.ids) for part in parts]
        kept = cut(lengths, self.max_length - self.model.num_special_tokens_to_add(len(parts) == 2))
        for part, length in zip(parts, kept, strict=True):
            part.truncate(length)
        whole = self.model.post_process(*parts)
        dropped = sum(lengths) - sum(kept)
        self._report(sum(lengths), dropped)
        return Encoding(whole.ids, whole.type_ids, whole.offsets, dropped)

    def id_of(self, token: str) -> int | None:
        """Id of a token, None where the vocabulary lacks it."""
        return self.model.token_to_id(token)

    def token_of(self, index: int) -> str:
        """The token as the vocabulary writes it; one that continues a word starts with ``##``."""
        return self.model.id_to_token(index)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, without [CLS], [SEP] and other special ones."""
        return self.model.decode(list(ids), skip_special_tokens=True)

    def _tokens(self, text: str) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text holds half a character (a lone surrogate) at {error.start}; "
                "read it from its bytes with errors='replace'"
            ) from error
        return self.model.encode(text, add_special_tokens=False)

    def _report(self, length: int, dropped: int) -> None:
        if dropped and not self.truncated:
            warnings.warn(
                f"a text of {length} tokens is cut to max_length={self.max_length}: {dropped} are "
                "dropped; further ones are cut without a warning, and counted in "
                "pipeline.task.tokenizer.truncated",
                stacklevel=3,
            )
        self.truncated += dropped > 0


def from_vocabulary(path: Path, *, lowercase: bool) -> tokenizers.Tokenizer:
    """The tokenizer of BERT: cleaned text, words and punctuation, then pieces of words.

    Source: google-research/bert, `tokenization.py`.
    """
    pieces = models.WordPiece.from_file(str(path), unk_token="[UNK]")
    model = tokenizers.Tokenizer(pieces)
    missing = [token for token in SPECIAL if model.token_to_id(token) is None]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    model.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, model.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    model.decoder = decoders.WordPiece()
    model.add_special_tokens(list(SPECIAL))
    return model


def cut(lengths: Sequence[int], budget: int) -> list[int]:
    """How many tokens are kept of one text or of two: the longer one is cut first.

    Where both are cut the longer one keeps the odd token; of equal ones, the second.
    """
    if sum(lengths) <= budget:
        return list(lengths)
    if len(lengths) == 1:
        return [budget]
    short = min(*lengths, budget // 2)
    return [short, budget - short] if lengths[0] <= lengths[1] else [budget - short, short]


def sample(encoding: Encoding) -> dict[str, Tensor]:
    """What the model takes, for one row without a batch axis; segments only where there are two."""
    ids = torch.tensor(encoding.ids)
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if any(encoding.type_ids):
        row["token_type_ids"] = torch.tensor(encoding.type_ids)
    return row


def collate(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of any lengths as one batch, padded on the right; `attention_mask` is 0 there."""
    names = ["input_ids", "attention_mask"]
    if any("token_type_ids" in row for row in samples):
        names.append("token_type_ids")  # rows without it are segment 0 throughout
    return {
        name: pad_sequence(
            [row.get(name, torch.zeros_like(row["input_ids"])) for row in samples],
            batch_first=True,
        )
        for name in names
    }
