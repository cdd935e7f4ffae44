"""``zoo finetune``, as a script."""

import sys

from zoo.cli import main

if __name__ == "__main__":  # where processes that read are spawned, they import this file
    main(["finetune", *sys.argv[1:]])
