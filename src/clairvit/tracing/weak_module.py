"""Fields of dataclasses that name a module without keeping it alive.

What is remembered about a model names its blocks. A block may refer to its model (`block.owner = [model]`), which a
strong reference would keep alive for ever.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, overload

from torch import nn

Value = TypeVar("Value", bound=nn.Module | None)


class WeakModule(Generic[Value]):
    """A field that holds a module, or None, by a weak reference: `block: WeakModule[nn.Module | None] = WeakModule()`.

    Reading it when the module is gone raises ReferenceError.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_weak_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> WeakModule[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        """Return the module."""
        if instance is None:
            raise AttributeError(self._name)  # the field has no default
        reference = instance.__dict__[self._name]
        module = None if reference is None else reference()
        if reference is not None and module is None:
            raise ReferenceError(f"The module in {type(instance).__name__} is no longer there.")
        return module

    def __set__(self, instance: object, value: Value) -> None:
        """Hold a module, or None."""
        instance.__dict__[self._name] = None if value is None else weakref.ref(value)
