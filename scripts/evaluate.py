"""``zoo evaluate``, as a script."""

import sys

from zoo.cli import main

main(["evaluate", *sys.argv[1:]])
