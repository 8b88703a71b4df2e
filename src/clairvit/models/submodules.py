"""Walk a module once, without recursion: `nn.Module.modules()` and its relatives cost milliseconds per walk.

A verb asks a model several questions per call (devices, flags, names of tensors), so that these walks add up to a tenth
of the time of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


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


def tensors_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers by name, not those of its submodules."""
    for tensors in (part._parameters, part._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor
