"""Registry: values by name, with suggestions for names that do not exist."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from clairvit.errors import UnknownName, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Map names to values of one kind; an unknown name raises `UnknownName` with the nearest names.

    Args:
        kind: What the values are, as the message says it: "paper", "method".
        values: The first values by name; `register` adds more.
        aliases: Names that other packages use -> our names, for the suggestions of `did_you_mean`.
        modules: Modules that register values; they are imported when a name is first looked up or listed.
        advice: The last sentence of the message; {names} stands for all names.

    Example:
        >>> colours = Registry("colour", {"red": 1, "green": 2})
        >>> colours.resolve("red")
        1
        >>> colours.resolve("gren")
        Traceback (most recent call last):
        clairvit.errors.UnknownName: There is no colour 'gren'. Did you mean 'green'? Choose one of: red, green.
    """

    def __init__(
        self,
        kind: str,
        values: Mapping[str, T] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
        *,
        modules: Sequence[str] = (),
        advice: str = "Choose one of: {names}.",
    ) -> None:
        self.kind = kind
        self.advice = advice
        self._values = dict(values or {})
        self._aliases = aliases
        self._modules = tuple(modules)
        self._position = dict.fromkeys(self._values, 0)  # values are listed by it, then as registered
        self._loaded = not modules

    def register(self, name: str, value: T, *, module: str = "") -> None:
        """Add a value, or replace the one of this name.

        Args:
            name: What users type.
            value: What it stands for.
            module: The module that defines it. Values are listed in the order of `modules`, however these were
                imported; those of other modules come last.
        """
        position = self._modules.index(module) if module in self._modules else len(self._modules)
        self._position.setdefault(name, position)
        self._values[name] = value

    def registered(self, name: str) -> T | None:
        """Return the value of a name if it is registered already; import nothing."""
        return self._values.get(name)

    def resolve(self, name: str) -> T:
        """Return the value of a name.

        Raises:
            UnknownName: If there is none; the message suggests the nearest names.
        """
        self._load()
        if name not in self._values:
            raise self.unknown(name)
        return self._values[name]

    def unknown(self, name: str, near: str | None = None) -> UnknownName:
        """Return the error for an unknown name; `near` takes the place of " Did you mean …?"."""
        names = self.names
        near = did_you_mean(name, names, self._aliases) if near is None else near
        return UnknownName(f"There is no {self.kind} '{name}'.{near} {self.advice.format(names=', '.join(names))}")

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of the listing."""
        self._load()
        return tuple(sorted(self._values, key=self._position.__getitem__))

    def values(self) -> list[T]:
        """Return all values, in the order of `names`."""
        return [self._values[name] for name in self.names]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo at the end of the block what is registered inside."""
        self._load()
        values, position = dict(self._values), dict(self._position)
        try:
            yield
        finally:
            self._values, self._position = values, position

    def _load(self) -> None:
        """Import the modules that register values, once."""
        if not self._loaded:
            for module in self._modules:
                importlib.import_module(module)
            self._loaded = True  # at the end: until then, another thread imports (and waits) too

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
