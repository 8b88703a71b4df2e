"""How the user's model is run: what a trace needs of it is set inside `with frozen_eval(module)` and restored."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from clairvit.errors import CaptureError
from clairvit.models.submodules import submodules

Result = TypeVar("Result")
Flag = tuple[Any, str, Any]  # a module or parameter, one of its attributes, and the value before the trace


@dataclass(frozen=True)
class _RunningTrace:
    """A trace that is running in a thread."""

    thread: int
    changed: frozenset[int]  # ids of the modules and parameters whose state it changes
    used: frozenset[int]  # ids of all that it uses
    module: weakref.ref[nn.Module]
    before: list[Flag]  # what it puts back in the end


_running: dict[object, _RunningTrace] = {}
_changed = threading.Condition()
_this_thread = threading.local()

INFERENCE_WEIGHTS = (
    "The model's weights were made under torch.inference_mode(), and their flags could not be put back afterwards; "
    "expected ordinary ones. Build or load the model outside inference_mode."
)
CHECKPOINTED = (
    "An attention call is not part of the gradient graph; expected a plain differentiable forward. "
    "Switch off gradient checkpointing (torch.utils.checkpoint) and torch.no_grad() inside the model."
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
    that shares a submodule, or a parameter that has to be frozen; a trace in another thread waits for it. Models around
    the same frozen weights are traced at the same time: nothing of a frozen parameter is changed. The same thread may
    enter again.

    One entry of one dictionary says that a trace is running, so that an interruption leaves it there or not, never half
    of it. It has the list of what is put back, which a child process that is forked meanwhile needs too.
    """
    thread, token, parts, before = threading.get_ident(), object(), submodules(module), list[Flag]()
    modules = frozenset(map(id, parts))
    parameters = tuple(p for part in parts for p in part._parameters.values() if p is not None)
    used = modules.union(map(id, parameters))
    try:
        with _changed:
            while True:
                changed = modules | {id(parameter) for parameter in parameters if parameter.requires_grad}
                others = [trace for trace in _running.values() if trace.thread != thread]
                if all(trace.changed.isdisjoint(used) and changed.isdisjoint(trace.used) for trace in others):
                    break
                _changed.wait()
            _running[token] = _RunningTrace(thread, changed, used, weakref.ref(module), before)
        try:
            for part in parts:
                if part.training:
                    before.append((part, "training", True))
                    part.training = False
                for flag in _CHECKPOINTING_FLAGS:
                    if part.__dict__.get(flag) is True:
                        before.append((part, flag, True))
                        setattr(part, flag, False)
            for parameter in parameters:
                if parameter.requires_grad:
                    if parameter.is_inference():
                        raise CaptureError(INFERENCE_WEIGHTS)
                    before.append((parameter, "requires_grad", True))
                    parameter.requires_grad = False
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
    finally:
        with _changed:
            _running.pop(token, None)
            _changed.notify_all()


@contextmanager
def translate_autograd_errors() -> Iterator[None]:
    """Translate errors of a backward through the user's model."""
    try:
        yield
    except CheckpointError as error:
        raise CaptureError(
            "The model runs parts of its forward again in the backward pass (torch.utils.checkpoint), where a trace "
            "cannot follow; expected a plain forward. Switch off gradient checkpointing inside the model."
        ) from error
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise CaptureError(
            "The model overwrites a tensor that its own gradient needs; expected a differentiable forward. "
            "Look for x += … in its blocks and write x = x + …."
        ) from error


def this_thread_only(hook: Callable[..., Result]) -> Callable[..., Result | None]:
    """Return a module hook that acts on forward passes of the thread that registers it and ignores all others.

    The user's own code may run the model in another thread while it is traced; its tokens belong to no trace.
    """
    thread = threading.get_ident()

    @functools.wraps(hook)
    def checked(*args: Any, **kwargs: Any) -> Result | None:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    checked.thread = thread  # type: ignore[attr-defined]
    return checked


def _forget_other_threads() -> None:
    """End the traces of other threads in a child process: only the thread that forked goes on there.

    Their flags and hooks are still on the modules, and the lock may be held by a thread that is not there.
    """
    global _changed
    _changed = threading.Condition()
    for token, trace in list(_running.items()):
        if trace.thread == threading.get_ident():
            continue
        del _running[token]
        for owner, name, value in trace.before:
            setattr(owner, name, value)
        module = trace.module()
        for part in () if module is None else submodules(module):
            _remove_hooks(part, trace.thread)


def _remove_hooks(part: nn.Module, thread: int) -> None:
    """Remove the hooks that `this_thread_only` made for a thread."""
    kinds: tuple[dict[int, Any], ...] = (part._forward_hooks, part._forward_pre_hooks)
    keys = [key for hooks in kinds for key, hook in hooks.items() if getattr(hook, "thread", None) == thread]
    flags = (part._forward_hooks_with_kwargs, part._forward_pre_hooks_with_kwargs, part._forward_hooks_always_called)
    for key in keys:
        for entries in (*kinds, *flags):
            entries.pop(key, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
