"""The command line. Nothing here imports torch, numpy or matplotlib before a command needs them."""

from __future__ import annotations

from clairvit.cli.app import main as main
