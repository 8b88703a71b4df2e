"""The user's model is a guest: what a trace needs is set inside `with visiting(module)` and put back on the way out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from clairvit.errors import CaptureError

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()

INFERENCE_WEIGHTS = (
    "The model's weights were made under torch.inference_mode(), and their flags could not be put back afterwards; "
    "expected ordinary ones. Build or load the model outside inference_mode."
)
# timm and transformers recompute blocks in the backward pass when these are set; a trace could not see that.
_CHECKPOINTING_FLAGS = ("grad_checkpointing", "gradient_checkpointing")


@contextmanager
def own_grad_mode() -> Iterator[None]:
    """Gradients on, whatever mode the caller is in: evaluation code often runs under no_grad or inference_mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def visiting(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, frozen parameters, no gradient checkpointing; everything restored, also after Ctrl-C.

    Hooks and flags live on the module and not on the thread, so one trace at a time may visit a module.
    """
    with _locks_guard:
        lock = _locks.setdefault(module, threading.RLock())
    with lock:
        before: list[tuple[Any, str, Any]] = []
        try:
            for part in module.modules():
                own = part.__dict__
                if part.training:
                    before.append((part, "training", True))
                    part.training = False
                for flag in _CHECKPOINTING_FLAGS:
                    if own.get(flag) is True:
                        before.append((part, flag, True))
                        setattr(part, flag, False)
                for parameter in own["_parameters"].values():
                    if parameter is not None and parameter.requires_grad:
                        if parameter.is_inference():
                            raise CaptureError(INFERENCE_WEIGHTS)
                        before.append((parameter, "requires_grad", True))
                        parameter.requires_grad = False
            yield
        finally:
            for thing, name, value in before:
                setattr(thing, name, value)
