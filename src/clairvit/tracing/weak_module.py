"""Fields of dataclasses that name a module without keeping it alive.

What is remembered about a model names its blocks. A block may refer to its model (`block.owner = [model]`), which a
strong reference would keep alive for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Class = TypeVar("Class", bound=type)


def weak_modules(*names: str) -> Callable[[Class], Class]:
    """Return a decorator of a dataclass whose fields of these names hold a module, or None, by a weak reference.

    Reading a field when its module is gone raises ReferenceError.
    """

    def decorate(kind: Class) -> Class:
        for name in names:
            setattr(kind, name, _WeakModule(name))
        return kind

    return decorate


class _WeakModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        reference = instance.__dict__[self._name]
        module = None if reference is None else reference()
        if reference is not None and module is None:
            raise ReferenceError(f"The {self._name} of a {owner.__name__} is no longer there.")
        return module

    def __set__(self, instance: Any, value: nn.Module | None) -> None:
        instance.__dict__[self._name] = None if value is None else weakref.ref(value)
