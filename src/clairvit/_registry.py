"""Registry: values by name, with suggestions for names that do not exist."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from clairvit._facts import package_facts
from clairvit.errors import UnknownName, did_you_mean

T = TypeVar("T")
_recording: ContextVar[list[Registration] | None] = ContextVar("_recording", default=None)


@contextmanager
def recorded() -> Iterator[list[Registration]]:
    """Return a list of what is registered inside the block."""
    registrations: list[Registration] = []
    token = _recording.set(registrations)
    try:
        yield registrations
    finally:
        _recording.reset(token)


@dataclass(frozen=True, eq=False)
class Registration:
    """A value that was registered, and what had its name before."""

    registry: Registry[Any]
    name: str
    former: Any
    former_position: int | None

    @property
    def replaced(self) -> bool:
        """Whether there was a value of this name."""
        return self.former_position is not None

    def undo(self) -> None:
        """Put back what had the name before."""
        self.registry.put_back(self.name, self.former, self.former_position)


class Registry(Generic[T]):
    """Map names to values of one kind; an unknown name raises `UnknownName` with the nearest names.

    Args:
        kind: What the values are, as the message says it: "paper", "method".
        values: The first values by name; `register` adds more.
        aliases: A function to the names that other packages use -> our names, for the suggestions of `did_you_mean`.
        package: A package whose modules register values: those with a file of facts beside them (`_facts.py`). They
            are imported when a name is first looked up or listed.
        modules: Further modules that do.
        load_others: A function that imports what other packages register, once; their values come last.
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
        aliases: Callable[[], Mapping[str, Sequence[str]]] | None = None,
        *,
        package: str = "",
        modules: Sequence[str] = (),
        load_others: Callable[[], None] = lambda: None,
        advice: str = "Choose one of: {names}.",
    ) -> None:
        self.kind = kind
        self.advice = advice
        self._values = dict(values or {})
        self._aliases = aliases
        self._package = package
        self._more_modules = tuple(modules)
        self._load_others = load_others
        self._position = dict.fromkeys(self._values, 0)  # values are listed by it, then as registered
        self._loaded = not (package or modules)
        self._changes = 0

    def register(self, name: str, value: T, *, module: str = "") -> None:
        """Add a value, or replace the one of this name.

        Args:
            name: What users type.
            value: What it stands for.
            module: The module that defines it. Values are listed in the order of `modules`, however these were
                imported; those of other modules come last.
        """
        modules = self._modules
        position = modules.index(module) if module in modules else len(modules)
        record = _recording.get()
        if record is not None:
            record.append(Registration(self, name, self._values.get(name), self._position.get(name)))
        self._position.setdefault(name, position)
        self._values[name] = value
        self._changes += 1

    def put_back(self, name: str, value: T, position: int | None) -> None:
        """Give a name the value that it had; None as position: it had none."""
        if position is None:
            self._values.pop(name, None)
            self._position.pop(name, None)
        else:
            self._values[name], self._position[name] = value, position
        self._changes += 1

    @property
    def changes(self) -> int:
        """How often a name got a value, or lost it again: as long as it stays the same, names mean the same."""
        self._load()
        return self._changes

    def registered_so_far(self, name: str) -> T | None:
        """Return the value of a name of the package, or of what others registered already; import no other package."""
        self._load(others=False)
        return self._values.get(name)

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
        near = did_you_mean(name, names, self.aliases) if near is None else near
        return UnknownName(f"There is no {self.kind} '{name}'.{near} {self.advice.format(names=', '.join(names))}")

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """Names that other packages use -> our names."""
        return {} if self._aliases is None else self._aliases()

    @property
    def _modules(self) -> tuple[str, ...]:
        """The modules that register values, in the order of lists; none is imported."""
        return (*(package_facts(self._package) if self._package else ()), *self._more_modules)

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
            self._changes += 1

    def _load(self, others: bool = True) -> None:
        """Import the modules that register values, once; where `others` is false, none of other packages."""
        if not self._loaded:
            with recorded():  # kept apart from what a caller records: these stay
                for module in self._modules:
                    importlib.import_module(module)
            self._loaded = True  # at the end: until then, another thread imports (and waits) too
        if others:
            self._load_others()

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
