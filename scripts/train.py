"""``zoo train``, as a script; ``torchrun --nproc-per-node 2 scripts/train.py …`` takes several."""

import sys

from zoo.cli import main

if __name__ == "__main__":  # where processes that read are spawned, they import this file
    main(["train", *sys.argv[1:]])
