"""Torch functions that are written in Python, run so that a mode sees what they do."""

from __future__ import annotations

import functools
import types


@functools.cache
def undispatched(function: types.FunctionType) -> types.FunctionType:
    """A Python torch function without its 'is a mode on?' question, so that it runs its own body under a mode."""
    scope = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
