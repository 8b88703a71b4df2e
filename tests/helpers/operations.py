"""Modes that see every torch operation: how large its results are, the bytes alive, a failure in place of the k-th."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LargestResult(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operation = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel() > self.elements:
                self.elements, self.operation = tensor.numel(), str(func)
        return result


class PeakBytes(TorchDispatchMode):
    """Count the bytes of the tensors that operations made and that are alive, and the most there were at once.

    Storages are counted, a view adds none. What an operation is given from outside (weights, the image) is not counted,
    nor what a kernel allocates for itself, so that the number is the same on every machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self.operation = ""  # that reached the peak
        self._counted: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._counted[tensor.untyped_storage()] = True
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._counted:
                self._counted[storage] = True
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        if self.alive > self.peak:
            self.peak, self.operation = self.alive, str(func)
        return result

    def _free(self, count: int) -> None:
        self.alive -= count


class FailAt(TorchFunctionMode):
    """Count calls of torch functions, and raise in place of call number `at`, or of every call from there on.

    Attributes of tensors (`p.requires_grad = True`) and the switch of no_grad are no operations and are let through.
    """

    SWITCHES = ("__get__", "__set__", "_set_grad_enabled")

    def __init__(self, error: Callable[[], BaseException], at: int | None = None, *, repeatedly: bool = False) -> None:
        super().__init__()
        self.error, self.at, self.repeatedly = error, at, repeatedly
        self.calls = 0
        self.raised = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in self.SWITCHES:
            self.calls += 1
            if self.at is not None and (self.calls == self.at or (self.repeatedly and self.calls > self.at)):
                self.raised += 1
                raise self.error()
        return func(*args, **(kwargs or {}))
