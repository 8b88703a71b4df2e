"""Every built-in method has a name and a sentence for readers who know no formulas."""

from __future__ import annotations

import re

import pytest

from clairvit.methods.plain_language import _table, plain_language, plain_title
from clairvit.methods.registry import list_methods
from clairvit.methods.spec import resolve_method

FUNCTIONS = ("smooth", "shift", "ensemble")  # they take other methods and are not listed alone
NAMES = [method.name for method in list_methods() if method.name not in FUNCTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_plain_words(name: str) -> None:
    words = plain_language(name)
    assert name in _table(), "add it to methods/plain_language.toml"
    assert re.fullmatch(r"[A-Z][^=_^|]*\.", words.sentence), "one sentence without formulas"
    assert len(words.sentence) < 120


def test_titles_are_unique_and_all_are_of_methods() -> None:
    titles = [plain_language(name).title for name in NAMES]
    assert len({*titles}) == len(titles)
    assert {*_table()} == {*NAMES}


def test_the_title_of_a_method_with_options_and_combinator() -> None:
    titles = {
        "attnlrp+plus": "AttnLRP, all layers",
        "rise(samples=100)": "RISE (samples=100)",
        "decompx+from:6": "DecompX, from layer 6",
        "ixg+layer:3": "Gradient × input, layer 3",
        "rollout": "Attention rollout",
    }
    for text, title in titles.items():
        assert plain_title(resolve_method(text)) == title


def test_a_method_without_plain_words_has_its_own_name() -> None:
    assert plain_language("mine", "formula").title == "mine"
    assert plain_language("mine", "formula").sentence == "formula"
