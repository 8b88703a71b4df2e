"""A registry finds values by name, and suggests names for those that do not exist."""

from __future__ import annotations

import pytest

from clairvit._registry import Registry
from clairvit.errors import UnknownName


def test_values_are_found_by_name_in_their_order() -> None:
    registry = Registry("number", {"one": 1})
    registry.register("two", 2)
    assert (registry.names, list(registry), len(registry)) == (("one", "two"), ["one", "two"], 2)
    assert registry.resolve("two") == 2
    assert "one" in registry
    assert "three" not in registry


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    registry = Registry("number", {"three": 3, "four": 4}, aliases={"drei": ["three"]})
    with pytest.raises(
        UnknownName, match=r"There is no number 'thre'\. Did you mean 'three'\? Choose one of: three, four\."
    ):
        registry.resolve("thre")
    with pytest.raises(UnknownName, match="Did you mean 'three'"):
        registry.resolve("drei")
