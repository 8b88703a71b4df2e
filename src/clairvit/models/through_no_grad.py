"""ThroughNoGrad: gradients stay on in a forward that switches them off, without a change to the module."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DETACHING = frozenset({torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__})  # type: ignore[attr-defined]
LEAVING_TORCH = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.__dlpack__})


class ThroughNoGrad(TorchFunctionMode):
    """Keep gradients on inside torch.no_grad, torch.set_grad_enabled(False) and torch.inference_mode.

    Every value stays what it was: only the graph is recorded. `detached` keeps it through detach() and .data as well,
    which is for finding out what depends on what: code that detaches may mean it.
    """

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            return None
        if self.detached and func in LEAVING_TORCH:
            return func(args[0].detach(), *args[1:], **kwargs)
        # Leaving inference mode switches gradients on. Elsewhere they are off in an autograd.Function's forward alone.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            if self.detached and func in DETACHING and args[0].requires_grad:
                return args[0].view_as(args[0])
            return func(*args, **kwargs)
