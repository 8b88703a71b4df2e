"""Ranges of numeric options: declared in the option's type, enforced where options of methods and metrics are resolved.

n: Annotated[int, Range(ge=1, unit="passes", example=50)] = 50
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from clairvit.errors import BadInput, WrongType

M = TypeVar("M")


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


def check_range(owner: Any, name: str, value: Any, *, typed: str | None = None) -> None:
    """Raise BadInput if the option `name` of a function or dataclass declares a range that does not hold the value.

    Args:
        owner: The function whose parameter, or the class whose field, the option is.
        name: The parameter or field.
        value: What it is to be; None and words have no range.
        typed: The name that the user typed, where it is another one.
    """
    bounds = _ranges(owner).get(name)
    if bounds is None or not isinstance(value, int | float) or value in bounds:
        return
    key = typed or name
    example = "" if bounds.example is None else f", such as {key}={bounds.example:g}"
    raise BadInput(f"{key}={value:g} was given; expected {bounds}{example}.")


def check_fields(instance: Any) -> None:
    """Raise BadInput if a field of a dataclass instance is outside its declared range: for `__post_init__`."""
    for field in dataclasses.fields(instance):
        check_range(type(instance), field.name, getattr(instance, field.name))


def local_paths(owner: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the options of a function that name a path on this machine: a server does not read these for others."""
    hints = get_type_hints(getattr(owner, "func", owner), include_extras=True)  # of a partial: its function's
    return [
        name
        for name, hint in hints.items()
        for path in _metadata(hint, LocalPath)
        if name in options and options[name] not in path.words
    ]


@functools.cache
def _ranges(owner: Any) -> dict[str, Range]:
    hints = get_type_hints(owner, include_extras=True)
    return {name: bounds for name, hint in hints.items() for bounds in _metadata(hint, Range)}


def _metadata(hint: Any, kind: type[M]) -> Iterator[M]:
    """Yield the metadata of a kind in a type, also inside unions: Annotated[int, Range(…)] | None."""
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        if isinstance(part, kind):
            yield part
        else:
            yield from _metadata(part, kind)
