"""Ratios to named peers, measured in one interleaved run; prints a Markdown table."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from zoo.bench import HEADER, SUITES, run_suite

if __name__ == "__main__":
    names = sys.argv[1:] or list(SUITES)
    kept = True
    print(HEADER)
    for name in names:
        with TemporaryDirectory() as folder:
            for outcome in run_suite(name, Path(folder)):
                print(outcome, flush=True)
                kept &= outcome.kept
    sys.exit(0 if kept else 1)
