"""Targets: what is explained, as a differentiable score per image.

`cv.targets.Contrast("cat", "dog")`; a class of your own derives from `Target`. `__init__.pyi` lists the public names.
"""

from __future__ import annotations

import importlib
from typing import Any

import lazy_loader

_target, _, _names = lazy_loader.attach_stub(__name__, __file__)
_INSIDE = ("Direction", "Neuron")  # blocks are found by tracing, which builds on targets
__all__ = [*_names, *_INSIDE]


def __getattr__(name: str) -> Any:
    if name in _INSIDE:
        return getattr(importlib.import_module("clairvit.tracing.neuron"), name)
    return _target(name)


def __dir__() -> list[str]:
    return sorted(__all__)
