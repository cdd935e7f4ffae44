"""Numbers in English words and in digits, as a task that a small Transformer learns in minutes.

Both directions at once: ``forty-two`` becomes ``42``, and ``42`` becomes ``forty-two``. What is
read may be written in other ways (``one hundred and five``, ``twenty one``, ``1,205``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from zoo.data import Made
from zoo.errors import DataError, shown

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
LIMIT = 1_000_000  # numbers are below it
SMALL = 1000  # numbers below it are all in the training part, and the others are not measured on
SIZES = {"train": 60_000, "validation": 1_000, "test": 2_000}  # examples, half of each direction
HELD_OUT = {"validation": 0, "test": 1}  # remainder of a scrambled number; training has the others
PARTS = 16  # of the scrambled numbers


def spelled(number: int, *, conjunction: bool = False, hyphen: bool = True) -> str:
    """A number in words.

    Args:
        number: From 0 to 999,999.
        conjunction: ``one hundred and five``.
        hyphen: ``twenty-one`` and not ``twenty one``.

    Raises:
        DataError: It is out of range.
    """
    if not 0 <= number < LIMIT:
        raise DataError(f"{shown(number)} has no words here; give a number from 0 to {LIMIT - 1:,}")
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = TENS[number // 10 - 2], number % 10
        return tens + (("-" if hyphen else " ") + ONES[ones] if ones else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    high, low = divmod(number, size)
    text = f"{spelled(high, conjunction=conjunction, hyphen=hyphen)} {name}"
    if not low:
        return text
    joined = " and " if conjunction and low < 100 else " "
    return text + joined + spelled(low, conjunction=conjunction, hyphen=hyphen)


def examples(split: str) -> Iterator[tuple[str, str]]:
    """Pairs of a text and its answer; every call gives the same.

    Numbers of one digit to six are equally frequent. No number of a held-out part is trained on.
    """
    source = random.Random(split)
    for index in range(SIZES[split] // 2):
        number = index if split == "train" and index < SMALL else _drawn(source, split)
        words = spelled(number, conjunction=source.random() < 0.25, hyphen=source.random() < 0.75)
        yield words, str(number)
        yield f"{number:,}" if source.random() < 0.25 else str(number), spelled(number)


def _drawn(source: random.Random, split: str) -> int:
    """A number that belongs to this part."""
    while True:
        digits = source.randint(1, 6)
        number = source.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        # Knuth's multiplicative hash: neighbours are in different parts.
        part = (number * 2654435761 % 2**32) * PARTS >> 32 if number >= SMALL else PARTS - 1
        if HELD_OUT.get(split, part) == part and (split in HELD_OUT or part > 1):
            return number


def tokenizer() -> tokenizers.Tokenizer:
    """Words with the space or hyphen before them, and single digits."""
    words = [*ONES, *TENS, "hundred", "thousand", "and"]
    pieces = [*map(str, range(10)), ",", *words, *(f" {w}" for w in words)]
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *pieces, *(f"-{w}" for w in ONES[1:10])]
    model = tokenizers.Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    model.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")]
    )
    model.pre_tokenizer = pre_tokenizers.Split(Regex("[ -]?[a-z]+|[0-9]|."), "isolated")
    model.decoder = decoders.Fuse()
    model.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    model.add_special_tokens(names[:5])
    return model


NUMBERS = Made(name="numbers", splits=tuple(SIZES), make=examples)
