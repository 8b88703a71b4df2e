"""Snapshots of the state of a module and of torch, which no call of the library may change."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.cluster.hierarchy  # adds warning filters when first imported, and methods import it late
import scipy.stats  # noqa: F401
import torch
from torch import Tensor, nn

from helpers.tiny_models import build

_PLAIN = (bool, int, float, str, bytes, tuple, frozenset, type(None))
_DEVICES = ("cpu", "cuda")


def messy(name: str) -> nn.Module:
    """Return a model with mixed training modes, gradients, requires_grad flags and hooks."""
    module = build(name)
    module.train()
    parts = list(module.modules())
    for part in parts[len(parts) // 2 :: 2]:
        part.training = False
    for number, p in enumerate(module.parameters()):
        p.requires_grad_(number % 3 != 0)
        if number % 2:
            p.grad = torch.full_like(p, 0.5)
    parts[-1].register_forward_hook(lambda *_: None)
    parts[1].register_forward_pre_hook(lambda *_: None)
    parts[-1].register_full_backward_hook(lambda *_: None)
    return module


@contextmanager
def unchanged(module: nn.Module | None = None) -> Iterator[None]:
    """Assert that the module, and what belongs to the process, are the same after the block, also after an error."""
    before, around = {} if module is None else fingerprint(module), surroundings()
    try:
        yield
    finally:
        after = {} if module is None else fingerprint(module)
        changed = differences(before, after) + differences(around, surroundings())
        assert not changed, f"changed: {changed}"


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Return the state by name, comparable with ==; tensors by their bits, identity and version counter."""
    state: dict[str, Any] = {}
    for name, part in module.named_modules():
        state[f"{name}.training"] = part.training
        state[f"{name}.attributes"] = sorted(vars(part))
        for attribute, value in vars(part).items():
            if "hook" in attribute and isinstance(value, dict):
                state[f"{name}.{attribute}"] = list(value.items())
            elif isinstance(value, _PLAIN):
                state[f"{name}.{attribute}"] = value
            elif isinstance(value, set):
                state[f"{name}.{attribute}"] = frozenset(value)
    for name, p in module.named_parameters(remove_duplicate=False):
        state[f"{name}: parameter"] = (*_bits(p), p.requires_grad, None if p.grad is None else _bits(p.grad))
        state[f"{name}: hooks"] = len(p._backward_hooks or ())
    for name, buffer in module.named_buffers(remove_duplicate=False):
        state[f"{name}: buffer"] = (*_bits(buffer), buffer.requires_grad)
    return state


def surroundings() -> dict[str, Any]:
    """Return the state of the process: random generators, torch modes, grad mode, warning filters, global hooks."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
        "modes": list(torch.overrides._get_current_function_mode_stack()),
        "dispatch modes": list(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "warnings": [str(filter_entry) for filter_entry in warnings.filters],
        "global hooks": [len(getattr(nn.modules.module, name)) for name in _GLOBAL_HOOKS],
    }


_GLOBAL_HOOKS = sorted(
    name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("hooks")
)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the entries that differ."""
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _bits(tensor: Tensor) -> tuple[int, int, bytes]:
    return id(tensor), tensor._version, tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
