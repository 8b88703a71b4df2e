"""Specs: a registered method or metric with its options settled, as a value. Text is parsed once, where it comes in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clairvit._facts import NO_FACTS, Facts
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.option_types import Option


@dataclass(frozen=True, kw_only=True)
class Registered:
    """What is registered under a name: a function, its options, and published variants of them (presets)."""

    name: str
    family: str
    paper: str
    function: Callable[..., Any] = field(repr=False)
    # Name -> options, or the entry of a variant (`clairvit._presets`): then `preset` is its name, and `moved` are the
    # options of earlier versions that it has now
    presets: Mapping[str, Mapping[str, Any] | Registered] = field(default_factory=dict, repr=False)
    preset: str = ""
    moved: tuple[str, ...] = field(default=(), repr=False)
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


def settled_options(
    name: str, options: Sequence[Option], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every option with its value, and those that are not the default.

    Args:
        name: What has the options.
        options: What it takes.
        given: Options by name, checked here; the others have their defaults.

    Raises:
        UnknownName: An option that it does not have.
        BadInput: A value that an option cannot have.
    """
    by_name = {option.name: option for option in options}
    defaults = {option.name: option.default for option in options}
    values = dict(defaults)
    for key, value in given.items():
        if key not in by_name:
            listed = ", ".join(by_name) or "none"
            raise UnknownName(f"'{name}' has no option '{key}'; it has {listed}.{did_you_mean(key, by_name)}")
        values[key] = by_name[key].checked(value)
    return values, changed_options(values, defaults)


def changed_options(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not the default."""
    return {key: value for key, value in values.items() if value != defaults[key]}


def is_built_in(function: Callable[..., Any]) -> bool:
    """Return whether a function is this package's own."""
    return (getattr(function, "__module__", "") or "").startswith("clairvit.")  # None in code that was only typed


def check_name(name: object, kind: str) -> None:
    """Refuse what cannot be typed as the name of a method or metric."""
    if not isinstance(name, str) or not name or not name.replace("-", "").isalnum() or name != name.lower():
        raise BadInput(
            f"{name!r} is no name for a {kind}; expected lower-case letters, digits and dashes, such as 'my-{kind}'."
        )


def check_is_free(name: str, kind: str, present: Registered | None, reserved: Collection[str] = ()) -> None:
    """Refuse the name of a built-in; what a user registered may be registered again, as by a cell that runs twice."""
    if name in reserved or (present is not None and is_built_in(present.function)):
        raise BadInput(
            f"There is a built-in {kind} '{name}'; expected another name, such as 'my-{name}'. overwrite=True replaces "
            "it in this process."
        )


def check_choice(name: str, field: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is not among the choices of a field."""
    if value not in choices:
        near = did_you_mean(str(value), choices)
        listed = ", ".join(map(repr, choices))
        raise BadInput(f"{field}={value!r} was given for '{name}'; expected one of {listed}.{near}")


def check_function(name: str, function: Callable[..., Any], first: str = "") -> None:
    """Refuse a function without the parameter that the library fills, or with options that could not be typed.

    Args:
        name: What is registered.
        function: What it is registered for.
        first: The name of its first parameter; a metric's may have any name.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or (first and parameters[0].name != first):
        example = {
            "layer": "def f(layer: cv.extend.LayerView, power: float = 1.0), which is called for each layer",
            "trace": "def f(trace: cv.Trace, power: float = 1.0), as output='image' is made from the whole trace",
        }.get(first, "def f(context: cv.extend.EvalContext, power: float = 1.0)")
        seen = f"has the first parameter '{parameters[0].name}'" if parameters else "takes no argument"
        raise BadInput(f"The function of '{name}' {seen}; expected {example}.")
    for parameter in parameters[1:]:
        if parameter.default is inspect.Parameter.empty or parameter.annotation is inspect.Parameter.empty:
            raise BadInput(
                f"The option '{parameter.name}' of '{name}' has no default or no annotation; expected both, such as "
                f"{parameter.name}: float = 1.0."
            )
