"""``python -m zoo`` is the ``zoo`` command."""

import os
import sys

import zoo

# Under -m the current folder comes first; there may lie a vision.py that is none of the zoo's.
if not sys.flags.safe_path and sys.path:
    home = os.path.dirname(os.path.dirname(os.path.abspath(zoo.__file__)))
    if os.path.abspath(sys.path[0]) != home:
        del sys.path[0]

from zoo.cli import main

main()
