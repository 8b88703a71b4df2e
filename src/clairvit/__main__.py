"""python -m clairvit: the command line, where its own name is not on the path."""

from __future__ import annotations

import sys

from clairvit.cli import main

if __name__ == "__main__":
    sys.exit(main())
