"""Specs: a registered method or metric with its options settled, as a value. Text is parsed once, where it comes in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clairvit._facts import NO_FACTS, Facts
from clairvit.errors import UnknownName, did_you_mean
from clairvit.option_types import Option

PRESET_KEYWORDS = ("preset", "compat")  # options that stand for several others


@dataclass(frozen=True, kw_only=True)
class Registered:
    """What is registered under a name: a function, its options, and published variants of them (presets)."""

    name: str
    family: str
    paper: str
    function: Callable[..., Any] = field(repr=False)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    facts: Facts = field(default=NO_FACTS, repr=False)  # of the file beside its module

    @property
    def option_list(self) -> tuple[Option, ...]:
        """Every option: name, default, type, range and meaning."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its default."""
        return {option.name: option.default for option in self.option_list}

    @property
    def first_line(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    def preset(self, name: str) -> dict[str, Any]:
        """Return the options of a preset; raise UnknownName if there is none of this name."""
        if name not in self.presets:
            listed = ", ".join(self.presets) or "none"
            raise UnknownName(
                f"'{self.name}' has no preset '{name}'; it has {listed}.{did_you_mean(name, self.presets)}"
            )
        return dict(self.presets[name])


@dataclass(frozen=True)
class ParsedSpec:
    """Name, options and combinator, as they were typed or in canonical form; `str` is the text."""

    name: str
    inner: tuple[Any, ...] = ()  # methods inside the parentheses, texts or specs: smooth(genatt), ensemble(genatt, ixg)
    options: Mapping[str, Any] = field(default_factory=dict)
    combinator: str = ""  # what comes after the plus sign

    def __str__(self) -> str:
        inside = [*map(str, self.inner), *(f"{key}={value}" for key, value in sorted(self.options.items()))]
        arguments = f"({','.join(inside)})" if inside else ""
        return self.name + arguments + (f"+{self.combinator}" if self.combinator else "")

    def with_options(self, options: Mapping[str, Any]) -> ParsedSpec:
        """Return it with further options, which override its own."""
        return ParsedSpec(self.name, self.inner, {**self.options, **options}, self.combinator) if options else self


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Spec:
    """A registered method or metric with its options settled; `str(spec)` is its canonical text.

    Specs are values: two with the same text and function are equal, hash alike, and pickle as names and options.

    Args:
        options: Every option of the function with its value.
        canonical: Name, the options that are not the default, combinator.
    """

    options: tuple[tuple[str, Any], ...]
    canonical: ParsedSpec

    @property
    def registered(self) -> Registered:
        """The registered method or metric."""
        raise NotImplementedError

    @functools.cached_property
    def text(self) -> str:
        """The canonical text: the same text always means the same map or score."""
        return str(self.canonical)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spec) or type(other) is not type(self):
            return NotImplemented
        return self.text == other.text and _code(self.registered.function) == _code(other.registered.function)


def _code(function: Any) -> Any:
    """Return what two functions must share to be the same: a partial of one function with equal arguments is equal."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    return (function.__func__, function.__self__) if inspect.ismethod(function) else function


def with_preset(typed: Mapping[str, Any], options_of_preset: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return typed options with those of a preset in place of `preset=NAME`; what was typed next to it wins."""
    expanded = dict(typed)
    for keyword in PRESET_KEYWORDS:
        if keyword in expanded:
            expanded = {**options_of_preset(str(expanded.pop(keyword))), **expanded}
    return expanded


def changed_options(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not the default."""
    return {key: value for key, value in values.items() if value != defaults[key]}
