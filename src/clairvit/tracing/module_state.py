"""Module state: what a trace needs of the user's model is set inside `with frozen_eval(module)` and restored."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from clairvit.errors import CaptureError
from clairvit.models.submodules import submodules

Result = TypeVar("Result")
# Traces that are running: token -> the thread, the modules and parameters whose state it changes, and all that it uses.
_running: dict[object, tuple[int, frozenset[int], frozenset[int]]] = {}
_changed = threading.Condition()
_this_thread = threading.local()

INFERENCE_WEIGHTS = (
    "The model's weights were made under torch.inference_mode(), and their flags could not be put back afterwards; "
    "expected ordinary ones. Build or load the model outside inference_mode."
)
# timm and transformers recompute blocks in the backward pass when these are set; a trace could not see that.
_CHECKPOINTING_FLAGS = ("grad_checkpointing", "gradient_checkpointing")


@contextmanager
def own_grad_mode() -> Iterator[None]:
    """Enable gradients whatever mode the caller is in: evaluation code often runs under no_grad or inference_mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def traced_forward() -> Iterator[None]:
    """Mark that this thread runs a forward pass that is traced; refuse to begin one inside another."""
    if getattr(_this_thread, "traces", False):
        raise CaptureError(
            "An explanation was started while a forward pass was being traced, from a forward hook or from the "
            "model's own code; its operations would be taken for those of that pass. Keep what the hook is given, and "
            "explain after the pass."
        )
    _this_thread.traces = True
    try:
        yield
    finally:
        _this_thread.traces = False


@contextmanager
def frozen_eval(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode, freeze parameters, switch checkpointing off; restore everything, also after Ctrl-C.

    Hooks and flags live on the module and not on the thread, so one trace at a time may use a module, or any model
    that shares a submodule or a weight with it.
    """
    with _exclusive(module):
        before: list[tuple[Any, str, Any]] = []
        try:
            for submodule in submodules(module):
                attributes = submodule.__dict__
                if submodule.training:
                    before.append((submodule, "training", True))
                    submodule.training = False
                for flag in _CHECKPOINTING_FLAGS:
                    if attributes.get(flag) is True:
                        before.append((submodule, flag, True))
                        setattr(submodule, flag, False)
                for parameter in attributes["_parameters"].values():
                    if parameter is not None and parameter.requires_grad:
                        if parameter.is_inference():
                            raise CaptureError(INFERENCE_WEIGHTS)
                        before.append((parameter, "requires_grad", True))
                        parameter.requires_grad = False
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def this_thread_only(hook: Callable[..., Result]) -> Callable[..., Result | None]:
    """Return a module hook that acts on forward passes of the thread that registers it and ignores all others.

    The user's own code may run the model in another thread while it is traced; its tokens belong to no trace.
    """
    thread = threading.get_ident()

    @functools.wraps(hook)
    def checked(*args: Any, **kwargs: Any) -> Result | None:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return checked


@contextmanager
def _exclusive(module: nn.Module) -> Iterator[None]:
    """Wait until no other thread traces a model that shares a module, or a parameter that has to be frozen.

    Models around the same frozen weights are traced at the same time: nothing of a frozen parameter is changed.
    One entry of one dictionary says that a trace is running, so that an interruption leaves it there or not, never half
    of it. The same thread may enter again.
    """
    thread, token, parts = threading.get_ident(), object(), submodules(module)
    modules = frozenset(map(id, parts))
    parameters = tuple(p for part in parts for p in part._parameters.values() if p is not None)
    used = modules.union(map(id, parameters))

    def changed() -> frozenset[int]:
        return modules | {id(parameter) for parameter in parameters if parameter.requires_grad}

    def free() -> bool:
        mine = changed()
        return all(
            other == thread or (theirs.isdisjoint(used) and mine.isdisjoint(they_use))
            for other, theirs, they_use in _running.values()
        )

    try:
        with _changed:
            _changed.wait_for(free)
            _running[token] = (thread, changed(), used)
        yield
    finally:
        with _changed:
            _running.pop(token, None)
            _changed.notify_all()
