"""Registry: values by name, with suggestions for names that do not exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from clairvit.errors import UnknownName, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Map names to values of one kind; an unknown name raises `UnknownName` with the nearest names.

    Args:
        kind: What the values are, as the message says it: "paper", "executor".
        values: The first values by name; `register` adds more.
        aliases: Names that other packages use -> our names, for the suggestions of `did_you_mean`.

    Example:
        >>> colours = Registry("colour", {"red": 1, "green": 2})
        >>> colours.resolve("red")
        1
        >>> colours.resolve("gren")
        Traceback (most recent call last):
        clairvit.errors.UnknownName: There is no colour 'gren'. Did you mean 'green'? Choose one of: red, green.
    """

    def __init__(
        self, kind: str, values: Mapping[str, T] | None = None, aliases: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.kind = kind
        self._values = dict(values or {})
        self._aliases = aliases

    def register(self, name: str, value: T) -> None:
        """Add a value, or replace the one of this name."""
        self._values[name] = value

    def resolve(self, name: str) -> T:
        """Return the value of a name.

        Raises:
            UnknownName: If there is none; the message suggests the nearest names and lists all.
        """
        if name not in self._values:
            near = did_you_mean(name, self._values, self._aliases)
            raise UnknownName(f"There is no {self.kind} '{name}'.{near} Choose one of: {', '.join(self._values)}.")
        return self._values[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
