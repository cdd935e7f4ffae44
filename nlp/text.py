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
INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # of a model
MASKS = ("[MASK]", "<mask>")  # of BERT and its kin, of RoBERTa
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


@dataclass(frozen=True)
class Window:
    """A piece of a text that the model takes at once, perhaps after a question."""

    encoding: Encoding
    of_text: list[bool]  # tokens of the text itself
    # First pieces of words. Windows overlap; a word is in that in which more stands around it.
    heads: list[bool]


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

    def windows(self, text: str, question: str | None = None) -> list[Window]:
        """A text of any length in pieces that fit, a quarter of each in the next one too.

        Args:
            text: Nothing of it is dropped.
            question: Goes before every piece; it may take half of the room, the rest is dropped.

        Raises:
            DataError: One is no valid text.
        """
        tokens = self._tokens(text)
        asked: list[tokenizers.Encoding] = []
        room = self.max_length - self.model.num_special_tokens_to_add(question is not None)
        if room < 1:
            raise DataError(f"max_length={self.max_length} leaves no room for a text; raise it")
        if question is not None:
            asked = [self._tokens(question)]
            length = len(asked[0].ids)
            if length > room // 2:
                asked[0].truncate(room // 2)
            kept = len(asked[0].ids)
            self._report(length, length - kept)
            room -= kept
        words, overlap = tokens.word_ids, room // 4
        heads = [word != before for before, word in zip([None, *words], words, strict=False)]
        tokens.truncate(room, stride=overlap)
        pieces = [tokens, *tokens.overflowing]
        step = room - overlap
        bounds = [0, *(i * step + overlap // 2 for i in range(1, len(pieces))), len(words)]
        windows = []
        for i, piece in enumerate(pieces):
            whole = self.model.post_process(*asked, piece)
            of_text = [part == len(asked) for part in whole.sequence_ids]
            own = [False] * len(of_text)
            first = of_text.index(True) - i * step if piece.ids else 0
            for place in range(bounds[i], bounds[i + 1]):
                own[first + place] = heads[place]
            encoding = Encoding(whole.ids, whole.type_ids, whole.offsets, 0)
            windows.append(Window(encoding, of_text, own))
        return windows

    @property
    def mask_token(self) -> str:
        """What stands for a missing word."""
        return next((t for t in MASKS if self.id_of(t) is not None), MASKS[0])

    def id_of(self, token: str) -> int | None:
        """Id of a token, None where the vocabulary lacks it."""
        return self.model.token_to_id(token)

    def token_of(self, index: int) -> str:
        """The token as people read it; a piece that continues a word starts with ``##``.

        Pieces of bytes, which hold the space before a word, are given without it.
        """
        if isinstance(self.model.decoder, decoders.ByteLevel):
            return self.model.decode([index], skip_special_tokens=False).strip()
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


def read_lines(path: Path) -> list[str]:
    """Lines of a text file.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {shown(str(path))} as text: {error}") from error


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
    # Where some rows have a second segment, those without it are segment 0 throughout.
    names = INPUTS if any(INPUTS[2] in row for row in samples) else INPUTS[:2]
    return {
        name: pad_sequence(
            [row.get(name, torch.zeros_like(row["input_ids"])) for row in samples],
            batch_first=True,
        )
        for name in names
    }


def sample_of_windows(windows: Sequence[Window]) -> dict[str, Tensor]:
    """What the model takes, for one text: one row a window, padded on the right."""
    rows = [sample(window.encoding) for window in windows]
    return collate_windows([{name: t[None] for name, t in row.items()} for row in rows])


def collate_windows(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The windows of all texts, one below the other, as one batch."""
    return collate(
        [
            {name: row[name][i] for name in INPUTS if name in row}
            for row in samples
            for i in range(len(row["input_ids"]))
        ]
    )
