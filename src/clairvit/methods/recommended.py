"""Recommended methods: the default where none is named, with its fallbacks, and one method per purpose.

The lists are in `recommended.toml`; the numbers behind them are in docs/results.md.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Recommendation:
    """A method, what it is recommended for, and why.

    Attributes:
        purpose: "default", or what a user wants: "faithful", "localising", "cheap", "black box".
        method: A method string.
        reason: Why, in a few words.
        evidence: The figures that speak for it, as docs/results.md has them.

    Example:
        >>> import clairvit as cv
        >>> cv.recommended_methods()[0].purpose
        'faithful'
    """

    purpose: str
    method: str
    reason: str
    evidence: str = ""


@functools.cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(resources.files("clairvit.methods").joinpath("recommended.toml").read_text("utf-8"))


def default_methods() -> tuple[Recommendation, ...]:
    """Return the default method and its fallbacks: the first that fits a model is used where no method is named."""
    return tuple(Recommendation("default", **entry) for entry in _tables()["default"])


def recommended_methods() -> tuple[Recommendation, ...]:
    """Return one method per purpose.

    Returns:
        `Recommendation`s with `.purpose`, `.method`, `.reason` and `.evidence`.

    Example:
        >>> import clairvit as cv
        >>> [item.method for item in cv.recommended_methods() if item.purpose == "faithful"]
        ['attnlrp+plus']
    """
    return tuple(Recommendation(entry.pop("name"), **entry) for entry in map(dict, _tables()["purpose"]))


def default_method() -> str:
    """Return the method string that is used where none is named, and where it fits the model."""
    return default_methods()[0].method
