"""A registry finds values by name, and suggests names for those that do not exist."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

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
    registry = Registry("number", {"three": 3, "four": 4}, aliases=lambda: {"drei": ["three"]})
    with pytest.raises(
        UnknownName, match=r"There is no number 'thre'\. Did you mean 'three'\? Choose one of: three, four\."
    ):
        registry.resolve("thre")
    with pytest.raises(UnknownName, match="Did you mean 'three'"):
        registry.resolve("drei")


def test_the_message_ends_with_the_advice() -> None:
    registry = Registry("number", {"three": 3, "four": 4}, advice="Count: {names}.")
    assert str(registry.unknown("five", near=" Or so.")) == "There is no number 'five'. Or so. Count: three, four."


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a registry and two modules that register in it; the second one is imported first."""
    (tmp_path / "counting").mkdir()
    files = {
        "__init__": "from clairvit._registry import Registry\n"
        "NUMBERS = Registry('number', modules=['counting.two', 'counting.one'])",
        "two": "import counting.one\ncounting.NUMBERS.register('two', 2, module=__name__)",
        "one": "import counting\ncounting.NUMBERS.register('one', 1, module=__name__)",
    }
    for name, text in files.items():
        (tmp_path / "counting" / f"{name}.py").write_text(text + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "counting"
    for name in [name for name in sys.modules if name.partition(".")[0] == "counting"]:
        del sys.modules[name]


def test_modules_are_imported_when_a_name_is_needed(package: str) -> None:
    registry: Registry[int] = importlib.import_module(package).NUMBERS
    registry.register("three", 3)
    assert (registry.registered("three"), registry.registered("one")) == (3, None)
    assert "counting.one" not in sys.modules
    assert "one" in registry
    assert registry.names == ("two", "one", "three"), "in the order of the modules, not of their imports"
    registry.register("two", 22)
    assert registry.values() == [22, 1, 3], "a value that replaces another one keeps its place"


def test_a_block_restores_what_was_registered() -> None:
    registry = Registry("number", {"one": 1})

    def fail_after_registering() -> None:
        with registry.restored():
            registry.register("one", 10)
            registry.register("two", 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_registering()
    assert (registry.names, registry.values()) == (("one",), [1])
