"""Models that tests share: built and inspected once in a process.

Inspecting a tiny model costs five times as much as explaining an image by it. After each test `tests/conftest.py`
compares the models that were asked for with what they were, to the bit; one that was changed is shared no longer. A
test that changes a model, and asks for it a second time, takes a copy (`tiny_models.fresh`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import clairvit as cv

_models: dict[Hashable, tuple[cv.Model, dict[str, Any]]] = {}
_requested: set[Hashable] = set()  # since the last check


def shared_model(key: Hashable, build: Callable[[], cv.Model]) -> cv.Model:
    """Return the model of a key, built when it is first asked for."""
    from helpers.module_fingerprint import fingerprint

    if key not in _models:
        model = build()
        _models[key] = model, fingerprint(model.module)
    _requested.add(key)
    return _models[key][0]


def forget_changed_models() -> dict[Hashable, list[str]]:
    """Return what changed in the models that were asked for since the last call, and share these no longer."""
    from helpers.module_fingerprint import differences, fingerprint

    changed = {}
    while _requested:
        key = _requested.pop()
        model, before = _models[key]
        if names := differences(before, fingerprint(model.module)):
            changed[key] = names
            del _models[key]
    return changed
