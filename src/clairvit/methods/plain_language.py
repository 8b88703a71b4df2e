"""Methods in plain language: a name, a sentence without formulas, and other names that people search for."""

from __future__ import annotations

from dataclasses import dataclass

from clairvit._facts import NO_FACTS, entries_of
from clairvit.methods.registry import COMBINATORS, METHODS
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


def plain_language(name: str, summary: str = "") -> PlainLanguage:
    """Return the plain words for a method or a combination; its own name and summary where none are written down."""
    method = METHODS.registered(name)
    facts = entries_of(__package__).get(name, NO_FACTS) if method is None else method.facts
    return PlainLanguage(facts.title or name, facts.sentence or summary or name, facts.also)


def plain_words(spec: MethodSpec) -> PlainLanguage:
    """Return the plain words for a method with options and combinators.

    'AttnLRP, all layers', 'RISE (samples=100)'. A combinator changes what a method does, so that the sentence is the
    combinator's unless the combination has words of its own.
    """
    if spec.text in entries_of(__package__):
        return plain_language(spec.text)
    if spec.canonical.name == "refine":
        (inner,) = spec.canonical.inner
        title = f"{plain_words(inner).title}, refined by {dict(spec.options)['passes']} passes"
        sentence = "Corrects that map by what happens to the answer when random parts are hidden, pass by pass."
        return PlainLanguage(title, sentence, ())
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
