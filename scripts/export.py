"""``zoo export``, as a script."""

import sys

from zoo.cli import main

main(["export", *sys.argv[1:]])
