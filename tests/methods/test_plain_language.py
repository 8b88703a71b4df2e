"""Every built-in method has a name and a sentence for readers who know no formulas."""

from __future__ import annotations

import re

import pytest

from clairvit._facts import entries_of
from clairvit.methods.plain_language import plain_language, plain_words
from clairvit.methods.recommended import default_methods, recommended_methods
from clairvit.methods.registry import list_methods
from clairvit.methods.spec import resolve_method

FUNCTIONS = ("smooth", "shift", "ensemble")  # they take other methods and are not listed alone
NAMES = [method.name for method in list_methods() if method.name not in FUNCTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_plain_words(name: str) -> None:
    words = plain_language(name)
    assert words.title != name, "add title and sentence to the file beside its module"
    assert re.fullmatch(r"[A-Z][^=_^|]*\.", words.sentence), "one sentence without formulas"
    assert len(words.sentence) < 120


def test_titles_are_unique_and_all_are_of_methods() -> None:
    titles = [plain_language(name).title for name in NAMES]
    assert len({*titles}) == len(titles)
    combinations = [name for name, facts in entries_of("clairvit.methods").items() if "+" in name and facts.title]
    assert combinations
    assert all(resolve_method(text).text == text for text in combinations)


def test_the_title_of_a_method_with_options_and_combinator() -> None:
    titles = {
        "attnlrp+plus": "AttnLRP, all layers",
        "rise(samples=100)": "RISE (samples=100)",
        "decompx+from:6": "DecompX, from layer 6",
        "ixg+layer:3": "Gradient × input, layer 3",
        "rollout": "Attention rollout",
    }
    for text, title in titles.items():
        assert plain_words(resolve_method(text)).title == title


def test_the_sentence_of_a_combination_is_not_that_of_the_method_alone() -> None:
    """Raw attention is of the last layer; its sum over layers is not."""
    assert "last layer" in plain_words(resolve_method("raw-attention")).sentence
    for text in ("raw-attention+skipplus", "raw-attention+plus", "raw-attention+layer:3"):
        assert "last layer" not in plain_words(resolve_method(text)).sentence
    for texts in (recommended_methods(), default_methods()):
        for item in texts:
            assert plain_language(item.method).title != item.method, "a recommended combination has words of its own"


def test_a_method_without_plain_words_has_its_own_name() -> None:
    assert plain_language("mine", "formula").title == "mine"
    assert plain_language("mine", "formula").sentence == "formula"
