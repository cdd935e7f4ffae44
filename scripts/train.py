"""``zoo train``, as a script; ``torchrun --nproc-per-node 2 scripts/train.py …`` takes several."""

import sys

from zoo.cli import main

main(["train", *sys.argv[1:]])
