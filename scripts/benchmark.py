"""Ratios to named peers, measured in one interleaved run; prints a Markdown table."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from zoo.bench import HEADER, compare


def main(only: str = "") -> None:
    """Exit with 1 if a promise is not kept."""
    kept = True
    print(HEADER)
    with TemporaryDirectory() as folder:
        for outcome in compare(Path(folder), only=only):
            print(outcome, flush=True)
            kept &= outcome.kept
    sys.exit(0 if kept else 1)


main(*sys.argv[1:])
