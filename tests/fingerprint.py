"""Everything about a module, and about torch, that a visit must leave as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Comparable with ==. Tensors are there with their bits, their identity and how often they were written to."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        found[f"{name}.training"] = part.training
        found[f"{name}.attributes"] = sorted(vars(part))
        for attribute, value in vars(part).items():
            if "hook" in attribute and isinstance(value, dict):
                found[f"{name}.{attribute}"] = list(value.items())
            elif isinstance(value, _PLAIN):
                found[f"{name}.{attribute}"] = value
    for name, p in module.named_parameters(remove_duplicate=False):
        found[f"{name}: parameter"] = (*_bits(p), p.requires_grad, None if p.grad is None else _bits(p.grad))
        found[f"{name}: hooks"] = len(p._backward_hooks or ())
    for name, buffer in module.named_buffers(remove_duplicate=False):
        found[f"{name}: buffer"] = _bits(buffer)
    return found


def surroundings() -> dict[str, Any]:
    """What belongs to the process: random numbers, modes, the grad switch."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
        "modes": list(torch.overrides._get_current_function_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "global hooks": len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not the same any more."""
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _bits(tensor: Tensor) -> tuple[int, int, bytes]:
    return id(tensor), tensor._version, tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
