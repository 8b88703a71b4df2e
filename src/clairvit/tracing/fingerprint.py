"""Fingerprint: everything that decides which operations a module runs, in a form that can be compared.

What is found out about a model (its structure, its capture plan, how its tokens are dropped) holds as long as nothing
that decides it has changed. `fingerprint` tells the flags and other attributes of all submodules with what they hold
(lists, dictionaries, configurations, nested objects, functions), hooks, a forward that was set on an instance, the
methods and attributes of classes, and the global variables and closures that functions of the user's own code read.
Parameters and buffers are compared by `models.state_hash.change_check`.

Nothing is kept alive: weak references and numbers stand for modules, tensors and functions. What cannot be told: state
of libraries, of C extensions and of the operating system. A pass that takes another path because of these is noticed by
its attention calls and blocks (`recording.py`).
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import enum
import functools
import os
import pathlib
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from clairvit.models.state_hash import change_check
from clairvit.models.submodules import submodules

Path = tuple[Any, ...]  # where a value was seen: the number of a submodule, names, positions

MOST_ENTRIES = 10_000  # of a container; of larger ones identity and length are told
MOST_VALUES = 20_000  # that are looked at; with more, the state of a module cannot be told
MOST_LEVELS = 40  # of values that hold values
MOST_LIBRARY_LEVELS = 2  # of objects of libraries inside each other: a configuration of parts, not a whole trainer

_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, slice, range}
)
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "timm", "transformers", "open_clip", "numpy", "scipy", "PIL", "einops", "clairvit"),
    *("accelerate", "lightning", "lightning_fabric", "peft", "pytorch_lightning", "torchmetrics"),
}
# Classes of the standard library whose objects hold values of the user
_HOLDERS = (argparse.Namespace, types.SimpleNamespace, type(os.environ), collections.UserDict, collections.UserList)
# What every module has: hooks are told one by one, `training` and recomputation are switched off in every trace
_STANDARD = frozenset({*vars(nn.Module()), "grad_checkpointing", "gradient_checkpointing"})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True)
class Fingerprint:
    """What decides which operations a module runs; equal fingerprints mean that nothing was seen to change."""

    parts: tuple[Any, ...]  # weak references to the submodules, in their order
    values: dict[Path, Any]
    tensors: Any  # the content of tensors that are no parameters and buffers

    __hash__ = None  # type: ignore[assignment]

    def changed_paths(self, other: Fingerprint) -> frozenset[Path]:
        """Return where another fingerprint of the same module has another value."""
        missing = object()
        paths = self.values.keys() | other.values.keys()
        return frozenset(p for p in paths if self.values.get(p, missing) != other.values.get(p, missing))


def fingerprint(module: nn.Module, ignored: Collection[Path] = frozenset()) -> Fingerprint | None:
    """Return the fingerprint of a module; None if it holds too much for it to be told.

    `ignored` are places that the module's own forward writes to: counters, stored attention, tables by image size.
    """
    parts = submodules(module)
    reader = _Reader(ignored, {id(part): (number,) for number, part in enumerate(parts)})
    try:
        reader.read_modules(parts)
    except _TooMuchError:
        return None
    return Fingerprint(
        tuple(map(weakref.ref, parts)),
        reader.values,
        change_check([(str(index), tensor) for index, tensor in enumerate(reader.tensors)]),
    )


class _TooMuchError(Exception):
    """A module holds more values than can be compared in every call."""


@dataclass(eq=False)
class _Reader:
    """Tell values by the path to them."""

    _ignored: Collection[Path]
    _seen: dict[int, Path]  # id of what was told: the first path to it
    values: dict[Path, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    _library_levels: int = 0

    def read_modules(self, parts: list[nn.Module]) -> None:
        """Tell the attributes, hooks and classes of all submodules."""
        values, ignored = self.values, self._ignored
        classes = dict.fromkeys(map(type, parts))
        readouts = {kind for kind in classes if _is_library(kind.__module__, ("clairvit",))}
        for number, part in enumerate(parts):
            is_readout = type(part) in readouts  # what it found out is no flag
            for name, value in list(part.__dict__.items()):
                if name not in _STANDARD and not (is_readout and name.startswith("_")):
                    path = (number, name)
                    if type(value) not in _PLAIN:
                        self.read(path, value)
                    elif path not in ignored:
                        values[path] = value
            for kind_of_hook in _HOOKS:
                if hooks := part.__dict__[kind_of_hook]:
                    self._read_hooks((number, kind_of_hook), hooks)
        for name, hooks in (
            ("pre", torch_module._global_forward_pre_hooks),
            ("after", torch_module._global_forward_hooks),
        ):
            if hooks:
                self._read_hooks(("all", name), hooks)
        for kind in classes:
            for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
                self._read_class(("class", id(base)), base)

    def read(self, path: Path, value: Any) -> None:
        """Tell a value, and what it holds; one that was told before by the first path to it."""
        if path in self._ignored:
            return
        if len(self.values) > MOST_VALUES or len(path) > MOST_LEVELS:
            raise _TooMuchError
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum | pathlib.PurePath):
            self.values[path] = value
            return
        if (first := self._seen.get(id(value))) is not None:
            self.values[path] = ("again", first)
            return
        self._seen[id(value)] = path
        if isinstance(value, Tensor | np.ndarray):
            self._read_tensor(path, value)
        elif isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
            self._read_container(path, kind, value)
        elif isinstance(value, types.FunctionType):
            self._read_function(path, value)
        elif isinstance(value, types.MethodType):
            self._read_items(path, kind, [("function", value.__func__), ("self", value.__self__)])
        elif isinstance(value, functools.partial):
            self._read_items(path, kind, [("function", value.func), ("given", value.args), ("named", value.keywords)])
        elif isinstance(value, contextvars.ContextVar):
            self._read_items(path, kind, [("value", value.get(None))])
        elif isinstance(value, type):
            self._read_class(path, value)
        elif isinstance(value, types.ModuleType) or not _holds_values(kind):
            self.values[path] = _identity(value)
        else:
            self._read_object(path, kind, value)

    def _read_items(self, path: Path, what: Any, items: Iterable[tuple[Any, Any]]) -> None:
        """Tell what a value is and the names of what it holds, then these one by one."""
        listed = list(items)
        self.values[path] = (what, tuple(name for name, _ in listed))
        for name, value in listed:
            self.read((*path, name), value)

    def _read_hooks(self, path: Path, hooks: dict[int, Any]) -> None:
        """Tell the user's hooks; those of a running trace are set and removed by it."""
        if path not in self._ignored:
            of_user = [hook for hook in list(hooks.values()) if not _is_of_library(hook, ("clairvit",))]
            if of_user:
                self._read_items(path, "hooks", enumerate(of_user))

    def _read_tensor(self, path: Path, value: Any) -> None:
        if isinstance(value, np.ndarray):
            self.values[path] = ("array", str(value.dtype), value.shape, id(value))
            numbers = value.dtype.kind in "biufc" and value.dtype.itemsize <= 8
            if numbers and value.flags.c_contiguous and value.flags.writeable:
                self.tensors.append(torch.from_numpy(value.reshape(-1).view(np.uint8)))
            return
        self.values[path] = ("tensor", value.dtype, value.shape, value.device, id(value))
        if value.grad_fn is None and not value.is_meta:  # else it is a result, and no part of the model
            self.tensors.append(value)

    def _read_container(self, path: Path, kind: type, value: Collection[Any]) -> None:
        """Tell the entries of a container; of a very large one its identity and length."""
        if len(value) > MOST_ENTRIES:
            self.values[path] = (kind, id(value), len(value))
            return
        if isinstance(value, dict):
            keys, entries = tuple(dict.keys(value)), tuple(dict.values(value))
            plain_keys = _PLAIN.issuperset(map(type, keys))
            if plain_keys and _PLAIN.issuperset(map(type, entries)):
                self.values[path] = (kind, keys, entries)
            else:
                names = keys if plain_keys else tuple(map(_identity, keys))
                self._read_items(path, kind, zip(names, entries, strict=True))
            if kind is not dict and _holds_values(kind):
                self._read_object((*path, "attributes"), kind, value)
            return
        entries = tuple(value)
        if _PLAIN.issuperset(map(type, entries)):
            self.values[path] = (kind, frozenset(entries) if isinstance(value, set | frozenset) else entries)
        elif isinstance(value, set | frozenset):
            self.values[path] = (kind, frozenset(map(_identity, entries)))
        else:
            self._read_items(path, (kind, len(entries)), enumerate(entries))

    def _read_function(self, path: Path, function: types.FunctionType) -> None:
        """Tell the code of a function, its defaults, what it encloses and, of the user's own, the globals it reads."""
        if _is_of_library(function) and function.__closure__ is None:
            self.values[path] = _identity(function)
            return
        cells: list[tuple[Any, Any]] = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells.append((name, cell.cell_contents))
            except ValueError:  # not filled yet
                continue
        given = [("defaults", function.__defaults__), ("keywords", function.__kwdefaults__)]
        attributes = [(("attribute", name), value) for name, value in function.__dict__.items()]
        self._read_items(path, function.__code__, [*given, *cells, *attributes])
        if not _is_of_library(function):
            self._read_globals(function)

    def _read_globals(self, function: types.FunctionType) -> None:
        variables, names = function.__globals__, dict.fromkeys(_names_read(function.__code__))
        for name in names:
            if name not in variables:
                continue
            value, path = variables[name], ("global", id(variables), name)
            if path in self.values:
                continue
            if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                members = vars(value)
                self._read_items(path, "module", [(inner, members[inner]) for inner in names if inner in members])
            elif isinstance(value, types.ModuleType):
                self.values[path] = id(value)
                if "environ" in names and value is os:
                    self.read((*path, "environ"), os.environ)
            else:
                self.read(path, value)

    def _read_class(self, path: Path, kind: type) -> None:
        """Tell the methods of a class and, of the user's own, its attributes; of torch's own the forward."""
        self._seen.setdefault(id(kind), path)
        attributes = dict(vars(kind))
        if kind.__module__.startswith("torch."):
            self.values[path] = _identity(attributes.get("forward"))
            return
        library = _is_library(kind.__module__)
        self.values[path] = id(kind)
        for name, value in attributes.items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, types.FunctionType):
                if library:
                    self.values[*path, name] = weakref.ref(function)
                else:
                    self.read((*path, name), function)
            elif type(value) in _PLAIN and not name.startswith("__"):
                self.values[*path, name] = value
            elif not library and not name.startswith("__") and not _is_descriptor(value):
                self.read((*path, name), value)

    def _read_object(self, path: Path, kind: type, value: Any) -> None:
        """Tell the attributes of an object and, of the user's own, its class."""
        library = _is_library(kind.__module__) and not issubclass(kind, (*_HOLDERS, nn.Module))
        if library and self._library_levels == MOST_LIBRARY_LEVELS:
            self.values[path] = _identity(value)
            return
        self._library_levels += library
        self._read_items(path, id(kind), list(_attributes(kind, value)))
        self._library_levels -= library
        if not _is_library(kind.__module__) and id(kind) not in self._seen:
            self._read_class((*path, "class"), kind)


def _attributes(kind: type, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, those in slots too."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
    skipped = _STANDARD - {"_parameters", "_buffers", "_modules", *_HOOKS} if isinstance(value, nn.Module) else ()
    for name, attribute in list(getattr(value, "__dict__", {}).items()):
        if name not in skipped:
            yield name, attribute


def _holds_values(kind: type) -> bool:
    """Return whether objects of a class have values of their own: a configuration, a namespace, the user's own."""
    if issubclass(kind, _HOLDERS):
        return True
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names | {"clairvit"}:
        return False  # files, locks, loggers, threads; our own objects are never changed
    return any("__dict__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__)


def _is_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__get__") or hasattr(type(value), "__set__")


def _names_read(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that a function, or one inside it, reads."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_read(constant)


def _is_library(name: str | None, libraries: Collection[str] = _LIBRARIES) -> bool:
    return (name or "").partition(".")[0] in libraries


def _is_of_library(function: Any, libraries: Collection[str] = _LIBRARIES) -> bool:
    return _is_library(getattr(function, "__module__", None), libraries)


def _identity(value: Any) -> Any:
    """Return what stands for an object in comparisons: itself if plain, its address with a weak reference, or its type.

    The address is compared first, so that no `__eq__` of the user's is called; the reference tells whether the object
    there is still the same one, and keeps nothing alive.
    """
    if type(value) in _PLAIN or isinstance(value, enum.Enum):
        return value
    try:
        return id(value), weakref.ref(value)
    except TypeError:
        return type(value), id(value)
