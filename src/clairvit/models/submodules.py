"""Submodules: walk a module once, and name its parts without keeping it alive.

`nn.Module.modules()` and its relatives cost milliseconds per walk. A verb asks a model several questions per call
(devices, flags, names of tensors), so that these walks add up to a tenth of the time of a small model.

What is remembered about a model names its blocks. A block may refer to its model (`block.owner = [model]`), which a
strong reference would keep alive for ever: `weak_modules` makes such fields of a dataclass weak.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

COMPILED_ADVICE = "Build the model again without .compile(), or use torch.compile(module), which is removed."
MOST_NAMED = 3  # compiled submodules that a message lists
Class = TypeVar("Class", bound=type)


def submodules(module: nn.Module) -> list[nn.Module]:
    """Return the module and all modules inside it, each once, parents first."""
    visited = {id(module)}
    order = [module]
    for part in order:  # grows while it is read
        for child in part._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                order.append(child)
    return order


def named_submodules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every place of a module with its prefix ("", "blocks.", "blocks.0."), a shared module at each place."""
    places = [("", module)]
    for prefix, part in places:
        for name, child in part._modules.items():
            if child is not None:
                places.append((f"{prefix}{name}.", child))
    return places


def compiled_in_place(module: nn.Module) -> list[str]:
    """Return the names of the submodules that `module.compile()` compiled in place: they run code that hides them."""
    if not any("_compiled_call_impl" in part.__dict__ for part in submodules(module)):
        return []
    return [
        prefix.removesuffix(".") or "the module"
        for prefix, part in named_submodules(module)
        if part.__dict__.get("_compiled_call_impl") is not None
    ]


def compiled_sentence(names: list[str]) -> str:
    """Return what is wrong with submodules that were compiled in place."""
    others = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    were = "was" if len(names) == 1 else "were"
    return (
        f"{', '.join(names[:MOST_NAMED])}{others} {were} compiled in place (module.compile()) and "
        f"{'runs' if len(names) == 1 else 'run'} compiled code, which cannot be traced."
    )


def tensors_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers by name, not those of its submodules."""
    for tensors in (part._parameters, part._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


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
