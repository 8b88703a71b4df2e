"""Run the command line as `python -m clairvit`, where the script `clairvit` is not on the path."""

from __future__ import annotations

import sys

from clairvit.cli import main

if __name__ == "__main__":
    sys.exit(main())
