"""Parsing of method strings: "rollout(fusion=max)+skipplus", "smooth(genatt+plus, n=20)"."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from typing import Any

from clairvit._spec import ParsedSpec
from clairvit.errors import Argument, BadInput, Verb

_EXPECTED = "expected NAME, NAME(option=value) or NAME+combinator, such as genatt+skipplus"
AUTO = "auto"  # as a start: the layer that a recipe holds
SEARCHED = "m"  # what FocusViT calls the layer to start at
STARTS = (SEARCHED, "start", "start_layer")
CALIBRATED = "calibrated"  # the name of a calibrated method that no file is named for
# A recipe in place of a method: its file, with or without the hash of its weights, or the hash alone.
RECIPE = re.compile(rf"(?P<file>.+\.json|{CALIBRATED})(?:#(?P<hash>[0-9a-f]{{12}}))?", re.IGNORECASE | re.DOTALL)


def parse_spec(text: str) -> ParsedSpec:
    """Return the name, options and combinator: "rollout(fusion=max)+from:6" -> rollout, {"fusion": "max"}, "from:6"."""
    if isinstance(text, str) and RECIPE.fullmatch(text.strip()):
        return ParsedSpec(text.strip())  # a path keeps its case, and may have any letters
    match = re.fullmatch(r"\s*([\w-]+)\s*(.*)", text, re.DOTALL) if isinstance(text, str) else None
    if match is None:
        raise BadInput(f"'{text}' is not a method; {_EXPECTED}.")
    name, after_name = match.groups()
    inside, tail = "", after_name
    if after_name.startswith("("):
        depths = itertools.accumulate((letter == "(") - (letter == ")") for letter in after_name)
        end = next((position for position, depth in enumerate(depths) if depth == 0), None)
        if end is None:
            raise BadInput(f"'{text}' is not a method: its parenthesis is never closed; {_EXPECTED}.")
        inside, tail = after_name[1:end], after_name[end + 1 :]
    if not re.fullmatch(r"\s*(?:\+[\w:-]+)*\s*", tail):
        raise BadInput(f"'{text}' is not a method; {_EXPECTED}.")
    combinators = tail.strip().split("+")[1:]
    if len(combinators) > 1:
        raise BadInput(f"'{text}' has {len(combinators)} combinators; expected one, such as {name}+{combinators[0]}.")
    inner, options = [], {}
    for item in split_at_commas(inside):
        option = re.fullmatch(r"\s*(\w+)\s*=(.*)", item, re.DOTALL)
        if option is not None and option[1] in options:
            raise BadInput(f"'{text}' gives {option[1]}= twice; expected it once.")
        if option is not None:
            options[option[1]] = _literal(option[2].strip())
        elif item.strip():
            inner.append(item.strip())
    return ParsedSpec(name.lower(), tuple(inner), options, combinators[0] if combinators else "")


def refuse_auto(name: str, combinator: str, options: Mapping[str, Any]) -> None:
    """Raise BadInput for a start layer "auto", which only a recipe can resolve."""
    typed = next((key for key in STARTS if options.get(key) == AUTO), None)
    if typed is None and combinator != f"from:{AUTO}":
        return
    text, layer = (f"{typed}={AUTO}", f"{name}({typed}=6)") if typed else (f"+{combinator}", f"{name}+from:6")
    raise BadInput(
        f"'{text}' reads the layer where {name} starts from a recipe, and none with it was given. Make one by ",
        start_search(name, file="recipe.json"),
        " and pass ",
        Argument("recipe", "recipe.json"),
        f", or type a layer: {layer}.",
    )


def start_search(method: str, file: str | None = None) -> Verb:
    """Return the advice to search the layer where a method starts, and to save what is found."""
    return Verb("choose", file=file, tune_start=[method])


def split_at_commas(text: str) -> list[str]:
    """Split at commas outside parentheses: 'rollout(fusion=max,alpha=0.5),genatt' gives two."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deep
        return value  # a bare word
