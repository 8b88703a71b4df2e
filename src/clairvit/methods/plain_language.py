"""Methods in plain language: a name, a sentence without formulas, and other names that people search for."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from clairvit.methods.registry import COMBINATORS
from clairvit.methods.spec import MethodSpec

# What a combinator does to a method, after its name.
_SUFFIXES = {
    "plus": "all layers",
    "skipplus": "later layers",
    "rollout": "followed through the layers",
    "flow": "as a flow",
    "last": "last layer",
}


@dataclass(frozen=True)
class PlainLanguage:
    """The name of a method for readers who know no formulas, one sentence, and further names for searching."""

    title: str
    sentence: str
    also: tuple[str, ...] = ()


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("clairvit.methods").joinpath("plain_language.toml").read_text("utf-8"))


def plain_language(name: str, summary: str = "") -> PlainLanguage:
    """Return the plain words for a registered method; its own name and summary where none are written down."""
    entry = _table().get(name)
    if entry is None:
        return PlainLanguage(name, summary or name)
    return PlainLanguage(entry["title"], entry["sentence"], tuple(entry.get("also", ())))


def plain_words(spec: MethodSpec) -> PlainLanguage:
    """Return the plain words for a method with options and combinators.

    'AttnLRP, all layers', 'RISE (samples=100)'. A combinator changes what a method does, so that the sentence is the
    combinator's unless the combination has words of its own.
    """
    if spec.text in _table():
        return plain_language(spec.text)
    base = plain_language(spec.method.name, spec.method.summary)
    options, _, combinator = spec.text.removeprefix(spec.method.name).partition("+")
    title, sentence = base.title, base.sentence
    if combinator:
        words = _SUFFIXES.get(combinator, combinator)
        title += f", {words.replace('layer:', 'layer ').replace('from:', 'from layer ')}"
        kind = {"layer": "layer:K", "from": "from:M"}.get(combinator.partition(":")[0], combinator)
        sentence = f"{base.title}: {COMBINATORS.get(kind, combinator)}."
    return PlainLanguage(f"{title} {options}" if options else title, sentence, base.also)


assert {*_SUFFIXES} <= {*COMBINATORS}
