"""Lists in one argument: methods whose options contain commas, classes whose names do."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from clairvit.errors import BadInput
from clairvit.methods.parsing import split_at_commas


def split_methods(text: str) -> list[str]:
    """'rollout(fusion=max,alpha=0.5),genatt' -> two methods: commas inside parentheses belong to a method."""
    depths = [0, *itertools.accumulate((letter == "(") - (letter == ")") for letter in text)]
    if min(depths) < 0 or depths[-1] > 0:
        wrong = "closes a parenthesis that was never opened" if min(depths) < 0 else "opens one and never closes it"
        raise BadInput(f"'{text}' {wrong}; write e.g. 'rollout(fusion=max),genatt'.")
    methods = [part.strip() for part in split_at_commas(text) if part.strip()]
    if not methods:
        raise BadInput("No method was given; write e.g. --method rollout,legrad or --method all.")
    return list(dict.fromkeys(methods))


def split_targets(texts: Iterable[str], labels: Collection[str]) -> list[str]:
    """Class names or numbers, separated by commas; a class whose own name has a comma may be written out in full."""
    whole = {label.casefold() for label in labels}
    targets: list[str] = []
    for text in texts:
        pieces = [text] if text.strip().casefold() in whole else text.split(",")
        named = [piece.strip() for piece in pieces if piece.strip()]
        if not named:
            raise BadInput(f"--target '{text}' names no class; write e.g. --target 'Bengal,Sphynx' or --target 3,17.")
        targets += named
    return targets


def split_numbers(text: str, option: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Return '0.5,0.4,0.3' as numbers of the kind that the option takes."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        wanted = (
            "R,G,B such as 0.485,0.456,0.406" if kind is float else "a number of pixels such as 256, or ROWS,COLUMNS"
        )
        raise BadInput(f"{option} {text} was given; expected {wanted}.") from error


def split_labels(text: str) -> str | list[str]:
    """'a photo of a cat,a photo of a dog' -> two labels; anything without a comma, or that exists, is a file."""
    if "," not in text or Path(text).exists():
        return text
    return [label.strip() for label in text.split(",") if label.strip()]
