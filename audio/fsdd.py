"""The Free Spoken Digit Dataset: 3,000 recordings of ten digits by six speakers.

Source: Jackson et al., https://github.com/Jakobovski/free-spoken-digit-dataset; its official test
set is the first five recordings of every digit by every speaker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zoo.data import Dataset
from zoo.errors import DataError, shown

TEST = 5  # recordings of every digit and speaker, from the first


@dataclass(frozen=True)
class DigitSet(Dataset):
    """Recordings as (path, digit); the splits are ``train`` and ``test``."""

    def examples(self, split: str) -> Iterator[tuple[str, int]]:
        """Every recording of a split, by the name of its file.

        Raises:
            DataError: There is no such split, or a file is named otherwise.
        """
        for path in sorted(self.path(split).glob("*.wav")):
            digit, _, rest = path.stem.partition("_")
            number = rest.rpartition("_")[2]
            if not (digit.isdigit() and int(digit) < 10 and number.isdigit()):
                raise DataError(
                    f"{shown(path.name)} is not called DIGIT_SPEAKER_NUMBER.wav; put the published "
                    "recordings there, and nothing else"
                )
            if (int(number) < TEST) == (split == "test"):
                yield str(path), int(digit)

    def sha256(self, split: str) -> str:
        """Of the names and bytes of all files of a split."""
        digest = hashlib.sha256()
        for path, _ in self.examples(split):
            file = Path(path)
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()


FSDD = DigitSet(
    name="fsdd",
    files=dict.fromkeys(("train", "test"), "fsdd/recordings"),
    read=lambda path: iter(()),  # `examples` reads
    home="https://github.com/Jakobovski/free-spoken-digit-dataset",
)
