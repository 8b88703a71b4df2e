"""Options of methods, metrics and aggregations: their types say what is allowed (`Range`) and what they mean (`Doc`).

n: Annotated[int, Range(ge=1, unit="passes", example=50), Doc("how many noisy copies are averaged")] = 50

pydantic checks values against the types; `options_of` lists the options of a function or dataclass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from clairvit.errors import BadInput, WrongType, did_you_mean

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

M = TypeVar("M")


OUT_OF_RANGE = "out_of_range"  # pydantic's name for what a `Range` refuses


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as metadata of its type: finite, and ≥ `ge`, > `gt`, ≤ `le`, < `lt` where given."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    unit: str = ""  # what is counted or measured: "1 or more passes"
    example: float | None = None

    def __contains__(self, value: float) -> bool:
        above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        below = (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = self.gt if self.ge is None else self.ge
        high = self.lt if self.le is None else self.le
        lowest = f"{low:g} or more" if self.gt is None else f"more than {low:g}"
        if high is None:
            text = lowest
        elif self.ge is not None and self.le is not None:
            text = f"from {low:g} to {high:g}"
        else:
            text = f"{lowest} and {'below' if self.le is None else 'at most'} {high:g}"
        return f"{text} {self.unit}".rstrip()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let pydantic refuse numbers outside; None and words have no range."""
        from pydantic_core import PydanticCustomError, core_schema

        def inside(value: Any) -> Any:
            if isinstance(value, int | float) and value not in self:
                raise PydanticCustomError(OUT_OF_RANGE, str(self))
            return value

        return core_schema.no_info_after_validator_function(inside, handler(source))

    def error(self, name: str, value: float) -> BadInput:
        """Return the error for a value outside."""
        example = "" if self.example is None else f", such as {name}={self.example:g}"
        return BadInput(f"{name}={value:g} was given; expected {self}{example}.")


@dataclass(frozen=True)
class Doc:
    """What an option means, as metadata of its type: one plain fragment of a sentence for lists, docs and the page."""

    text: str


@dataclass(frozen=True)
class LocalPath:
    """Marks an option that is a path on this machine unless it is one of `words`, as metadata of its type."""

    words: tuple[str, ...] = ()


Passes = Annotated[int, Range(ge=1, unit="passes", example=50)]


def checked_index(value: Any, what: str) -> int:
    """Return an integer of Python or NumPy as int; raise unless it is one from 0. `what` begins the message."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise WrongType(f"{what} is {value!r}; expected an integer from 0.")
    if value < 0:
        raise BadInput(f"{what} is {value}; expected an integer from 0.")
    return int(value)


@dataclass(frozen=True)
class Option:
    """An option by its name, with its default and its type: what is allowed, and what it means.

    Args:
        name: What users type.
        default: Its value where none is given.
        type: The annotation, with `Range`, `Doc` and `LocalPath` as metadata.
    """

    name: str
    default: Any
    type: Any

    @property
    def doc(self) -> str:
        """What it means; empty where the type does not say."""
        return next((doc.text for doc in _metadata(self.type, Doc)), "")

    @functools.cached_property
    def range(self) -> Range | None:
        """The bounds of its number."""
        return next(_metadata(self.type, Range), None)

    @functools.cached_property
    def words_beside_paths(self) -> tuple[str, ...] | None:
        """The words of an option that otherwise is a path on this machine; None: it is no path."""
        return next((path.words for path in _metadata(self.type, LocalPath)), None)

    @property
    def alternatives(self) -> list[Any]:
        """The values and kinds of values that it takes: words of a Literal, and classes."""
        return _alternatives(self.type)

    @property
    def choices(self) -> str:
        """What it takes, in words: "mean | max | min | whole number", "true | false"."""
        return " | ".join(self._choices().values())

    @property
    def allowed(self) -> str:
        """What it takes, with its range: "whole number, 1 or more passes"."""
        numbers = {int, float} if self.range is not None else set()
        return " | ".join(f"{w}, {self.range}" if kind in numbers else w for kind, w in self._choices().items())

    def checked(self, value: Any, typed: str | None = None) -> Any:
        """Return the value in the option's type, if the type allows it; a whole number becomes a float where needed.

        Args:
            value: What was given.
            typed: The name that the user typed, where it is another one.

        Raises:
            BadInput: The type does not allow it.
        """
        from pydantic import ValidationError

        name = typed or self.name
        if value is None and "none" in self.alternatives:  # typed in a string, `none` may be either
            value = "none"
        try:
            return _adapter(self.type).validate_python(value)
        except ValidationError as error:
            kinds = {problem["type"] for problem in error.errors(include_url=False)}
        if self.range is not None and OUT_OF_RANGE in kinds:
            raise self.range.error(name, value)
        raise BadInput(f"{name}={value} was given; expected {self._expected()}.{self._near(value)}")

    def _choices(self) -> dict[Any, str]:
        """Return the words and kinds of values that it takes, each in words."""
        kinds = {int: "whole number", float: "number", bool: "true | false", str: "text", type(None): "none"}
        return {kind: kinds.get(kind, _name(kind)) for kind in self.alternatives}

    def _expected(self) -> str:
        words = {int: "a number", float: "a number", bool: "True or False", type(None): "None"}
        expected = [repr(choice) for choice in self.alternatives if isinstance(choice, str)]
        expected += [words.get(kind, _name(kind)) for kind in self.alternatives if not isinstance(kind, str)]
        return " or ".join(dict.fromkeys(expected))

    def _near(self, value: Any) -> str:
        choices = [choice for choice in self.alternatives if isinstance(choice, str)]
        return did_you_mean(value, choices) if isinstance(value, str) else ""


def options_of(owner: Callable[..., Any], skipped: Collection[str] = ()) -> dict[str, Option]:
    """Return the options of a function (its parameters) or a dataclass (its fields) by name, without those skipped."""
    return {name: option for name, option in _options_of(owner).items() if name not in skipped}


@functools.cache
def _options_of(owner: Callable[..., Any]) -> Mapping[str, Option]:
    hints = _hints(getattr(owner, "func", owner))  # of a partial: its function's
    parameters = inspect.signature(owner).parameters.values()
    return {p.name: Option(p.name, p.default, hints.get(p.name, Any)) for p in parameters}


def _hints(owner: Any) -> dict[str, Any]:
    """Return annotations with their metadata, without those that name what only a type checker imports."""
    try:
        return get_type_hints(owner, include_extras=True)
    except NameError:
        hints: dict[str, Any] = {}
        for name, annotation in inspect.unwrap(owner).__annotations__.items():
            single = SimpleNamespace(__annotations__={name: annotation})
            with contextlib.suppress(NameError):
                hints |= get_type_hints(single, inspect.unwrap(owner).__globals__, include_extras=True)
        return hints


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def _alternatives(hint: Any) -> list[Any]:
    """Return the values and kinds of values that a type allows, without metadata: words of a Literal, and classes."""
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [alternative for part in get_args(hint) for alternative in _alternatives(part)]
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint]


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def check_range(owner: Any, name: str, value: Any, *, typed: str | None = None) -> None:
    """Raise BadInput if the option `name` of a function or dataclass declares a range that does not hold the value.

    Args:
        owner: The function whose parameter, or the class whose field, the option is.
        name: The parameter or field.
        value: What it is to be; None and words have no range.
        typed: The name that the user typed, where it is another one.
    """
    bounds = _options_of(owner)[name].range
    if bounds is not None and isinstance(value, int | float) and value not in bounds:
        raise bounds.error(typed or name, value)


def check_fields(instance: Any) -> None:
    """Raise BadInput if a field of a dataclass instance is outside its declared range: for `__post_init__`."""
    for field in dataclasses.fields(instance):
        check_range(type(instance), field.name, getattr(instance, field.name))


def local_paths(owner: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the options of a function that name a path on this machine: a server does not read these for others."""
    words = {name: option.words_beside_paths for name, option in _options_of(owner).items() if name in options}
    return [name for name, allowed in words.items() if allowed is not None and options[name] not in allowed]


def _metadata(hint: Any, kind: type[M]) -> Iterator[M]:
    """Yield the metadata of a kind in a type, the outermost first, also inside a union: Annotated[int, …] | None."""
    metadata = getattr(hint, "__metadata__", ())
    yield from (item for item in reversed(metadata) if isinstance(item, kind))
    for part in get_args(hint)[:1] if metadata else get_args(hint):
        yield from _metadata(part, kind)
