"""``zoo smoke``, as a script."""

import sys

from zoo.cli import main

main(["smoke", *sys.argv[1:]])
