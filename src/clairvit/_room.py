"""Rooms that are also verbs: `cv.trace(…)` and `cv.methods()` are calls, the folders of those names are packages.

Python binds an imported subpackage to its parent's attribute, so the verb would vanish as soon as anyone imported the
room. A room therefore answers a call itself, by handing it to its verb, which is imported only then.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def callable_room(package: str, verb: str) -> None:
    """Make the module `package` callable; `verb` is 'module:function'."""
    module_name, function = verb.split(":")

    class Room(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(module_name), function)(*args, **kwargs)

    sys.modules[package].__class__ = Room
