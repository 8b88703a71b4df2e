"""Code: a hash of methods and metrics that are registered outside the package, and of what they use.

The name of an own method says nothing of what it computes today, so that its code is part of a cell's identity. What is
hashed is what Python runs (bytecode, constants, defaults), so that comments and line breaks change nothing, and a file
that was edited after its import does not either. Built-in methods and metrics have no hash: ClairViT's version is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.registry import MetricSpec, resolve_metric

PACKAGE = __name__.partition(".")[0]
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...))
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in _PATHS)
# Fields that change no number
_TEXTS = ("paper", "family", "discrepancies", "undefined", "cost", "extra_cost", "facts", "caveats")
_PRESETS = ("presets", "preset", "moved")  # a preset is in the options, or is the function


class Codes(NamedTuple):
    """The hashes of own methods and metrics, as pairs of canonical text and hash; built-in ones are left out."""

    methods: tuple[tuple[str, str], ...] = ()
    metrics: tuple[tuple[str, str], ...] = ()

    def of(self, method: str, metric: str) -> str | None:
        """Return the code of a cell as a store has it, "method/metric"; None if both are built in."""
        pair = dict(self.methods).get(method, ""), dict(self.metrics).get(metric, "")
        return "/".join(pair) if any(pair) else None

    def among(self, methods: Iterable[str], metrics: Iterable[str]) -> Codes:
        """Return those of some methods and metrics."""
        chosen = set(methods), set(metrics)
        kept = (tuple(item for item in items if item[0] in texts) for items, texts in zip(self, chosen, strict=True))
        return Codes(*kept)


def codes_of(methods: Iterable[str | MethodSpec], metrics: Iterable[str | MetricSpec]) -> Codes:
    """Return the hashes of those methods and metrics that run code from outside the package."""
    pairs = (
        [(str(method), code_hash(resolve_method(method))) for method in methods],
        [(str(metric), code_hash(resolve_metric(metric))) for metric in metrics],
    )
    return Codes(*(tuple(pair for pair in of_kind if pair[1]) for of_kind in pairs))


def code_hash(value: Any) -> str:
    """Return a hash of the code that a spec or a function runs outside the package; "" if there is none."""
    walk = _Walk()
    content = walk.described(value)
    return _short(content.encode()) if walk.has_own_code else ""


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@dataclasses.dataclass(eq=False)
class _Walk:
    """Describe values by text that is the same in every process, following the functions that they refer to."""

    has_own_code: bool = False
    # Packages that registered a method or metric: installed ones too
    _registered_by: set[str] = dataclasses.field(default_factory=set)
    # id -> text, and the object, so that its id stays its own
    _texts: dict[int, tuple[str, Any]] = dataclasses.field(default_factory=dict)

    def described(self, value: Any) -> str:
        """Return the text of a value."""
        if isinstance(value, _CONSTANTS):
            return repr(value)
        if id(value) not in self._texts:
            self._texts[id(value)] = "recursion", value  # until its parts are known
            content = ",".join(self._parts(value))
            self._texts[id(value)] = f"{type(value).__name__} {_short(content.encode())}", value
        return self._texts[id(value)][0]

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, MethodSpec | MetricSpec):
            yield from self._parts_of_spec(value)
        elif isinstance(value, functools.partial):
            yield from map(self.described, (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            yield from map(self.described, (value.__func__, value.__self__))
        elif isinstance(value, FunctionType):
            yield from self._parts_of_function(value)
        elif isinstance(value, type):
            yield from self._parts_of_class(value)
        elif isinstance(value, dict):
            yield from sorted(f"{self.described(key)}:{self.described(item)}" for key, item in value.items())
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.described, value))
        elif isinstance(value, list | tuple):
            yield from map(self.described, value)
        elif isinstance(value, Tensor | np.ndarray):
            array = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value
            yield f"{array.shape} {_short(np.ascontiguousarray(array).tobytes())}"
        elif isinstance(value, nn.Module):
            yield from map(self.described, (type(value), dict(value.state_dict())))
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif dataclasses.is_dataclass(value) or self._is_own(type(value)):
            yield from map(self.described, (type(value), dict(getattr(value, "__dict__", {}))))
        else:
            yield f"{type(value).__module__}.{type(value).__qualname__}"
            if (wrapped := getattr(value, "__wrapped__", None)) is not None:  # functools.cache
                yield self.described(wrapped)

    def _parts_of_spec(self, spec: MethodSpec | MetricSpec) -> Iterator[str]:
        registered = spec.method if isinstance(spec, MethodSpec) else spec.metric
        self._registered_by.add(getattr(registered.function, "__module__", "").partition(".")[0])
        yield self.described(registered.function)
        for field in dataclasses.fields(registered):
            if field.name not in ("function", *_TEXTS, *_PRESETS):
                yield f"{field.name}={self.described(getattr(registered, field.name))}"
        yield self.described(dict(spec.options))
        if isinstance(spec, MethodSpec):
            yield from map(self.described, (spec.aggregation, spec.members))

    def _parts_of_function(self, function: FunctionType) -> Iterator[str]:
        """Yield what a function runs if it is own, and what it holds: those of built-in ones may hold own methods."""
        if self._is_own(function):
            self.has_own_code = True
            yield from self._parts_of_code(function.__code__)
            yield from map(self.described, (function.__defaults__, function.__kwdefaults__))
            for name in sorted(_names(function.__code__)):
                if name in function.__globals__:
                    yield f"{name}={self._of_global(function.__globals__[name], _names(function.__code__))}"
        else:
            yield f"{function.__module__}.{function.__qualname__}"
        for cell in function.__closure__ or ():
            try:
                yield self.described(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet
                yield "empty"
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            yield self.described(wrapped)

    def _of_global(self, value: Any, names: Iterable[str]) -> str:
        """Return the text of a global; of an own module, what the function's names mean there."""
        if isinstance(value, ModuleType) and self._is_own(value):
            attributes = {name: vars(value)[name] for name in sorted(names) if name in vars(value)}
            return self.described(attributes)
        return self.described(value)

    def _parts_of_class(self, kind: type) -> Iterator[str]:
        yield kind.__qualname__
        if self._is_own(kind):
            self.has_own_code = True
            for name, member in sorted(vars(kind).items()):
                if not name.startswith("__") or isinstance(member, FunctionType):
                    member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                    member = (member.fget, member.fset) if isinstance(member, property) else member
                    yield f"{name}={self.described(member)}"
            yield from map(self.described, kind.__bases__)

    def _parts_of_code(self, code: CodeType) -> Iterator[str]:
        """Yield the instructions, names and constants of a function and of the functions in it; no line numbers."""
        yield code.co_code.hex()
        yield from map(repr, (code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self._parts_of_code(constant)
            else:
                yield self.described(constant)

    def _is_own(self, value: Any) -> bool:
        """Return whether a function, class or module is own: not of ClairViT, Python or an installed package."""
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        package = module.partition(".")[0]
        if package in (PACKAGE, "builtins"):
            return False
        if package in self._registered_by:
            return True
        try:
            file = inspect.getfile(value)
        except (TypeError, OSError):  # built into the interpreter, or typed at a prompt
            return package in ("__main__", "__mp_main__") or package not in sys.modules
        return not os.path.abspath(file).startswith(_INSTALLED)


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a function and the functions in it read."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, nested))
