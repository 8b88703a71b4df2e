"""Gradient barriers: layers whose output depends on their input while no gradient comes back through them.

Quantised layers (int8 kernels have no backward), layers that compute under torch.no_grad(), rounding without a
straight-through estimator. A gradient that has to pass one of them is missing or incomplete, so every map that is
read off it would be wrong. Nothing is assumed from class names: each layer's gradient is computed, and where there is
none the layer is run again on a changed input, so that one which only makes positions for its input does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import CheckpointError

from clairvit.errors import Alternative, NotApplicable
from clairvit.tracing.module_state import frozen_eval, own_grad_mode, this_thread_only

NO_KERNEL = "NotImplemented"  # part of the name of autograd's node for an operation without a backward
CHANGE = 0.1  # of the input's standard deviation: how far an input is moved to see whether the output follows


# What ends the graph: a layer without a backward, or the forward itself (`gradient_cuts.py`).
Cause = Literal["layer", "no_grad", "inference_mode", "detach", "outside torch", "unknown"]


@dataclass(frozen=True)
class Barrier:
    """A layer that blocks the gradient, or in which the forward leaves the graph."""

    name: str  # as in named_modules(): "blocks.0.attn.qkv"
    type: str  # as nn.Module prints it: "DynamicQuantizedLinear"
    cause: Cause = "layer"

    def __str__(self) -> str:
        return f"'{self.name}' ({self.type})" if self.name else f"the model itself ({self.type})"

    @property
    def reason(self) -> str:
        """Why no gradient comes back, where the forward itself is the cause; "" for a layer."""
        return _REASONS.get(self.cause, "").format(place=self)

    @property
    def is_passable(self) -> bool:
        """Whether `through_no_grad=True` keeps the graph."""
        return self.cause in ("no_grad", "inference_mode")


_REASONS: dict[Cause, str] = {
    "no_grad": "the forward runs under torch.no_grad() from {place} on",
    "inference_mode": "the forward runs under torch.inference_mode() from {place} on",
    "detach": "the forward detaches its tensors in {place}",
    "outside torch": "the forward leaves torch in {place} (numpy, say)",
    "unknown": "its scores do not depend on the image in a way that torch can follow",
}
_ADVICE: dict[Cause, str] = {
    "no_grad": "pass through_no_grad=True to cv.wrap, which keeps the graph there and changes no value",
    "inference_mode": "pass through_no_grad=True to cv.wrap, which keeps the graph there and changes no value",
    "detach": "remove the detach(), which through_no_grad=True does not pass, since code may mean it",
}


def blocked_gradient(barriers: Sequence[Barrier], reader: str, *, attention: bool = True) -> NotApplicable:
    """Return the error of a reader of gradients (a method, "A trace with a backward"), naming the first barrier.

    `attention` says whether the model has attention that can be read instead.
    """
    alternative: Alternative = "an attention or perturbation method" if attention else "a perturbation method"
    if barriers[0].reason:
        advice = _ADVICE.get(barriers[0].cause, "take a method that needs none")
        return NotApplicable(
            f"{reader} reads gradients, which are missing or incomplete: {barriers[0].reason}. Expected a "
            f"differentiable forward: {advice}.",
            alternative=alternative,
        )
    count = len(barriers) - 1
    others = "" if not count else f" and {count} other layer{'s' if count > 1 else ''}"
    return NotApplicable(
        f"{reader} reads gradients, and none comes back through {barriers[0]}{others}: quantised, or run under "
        "torch.no_grad(); expected layers with a gradient, as the model has before quantisation.",
        alternative=alternative,
    )


class BarrierFinder:
    """Check every module call of one forward; `check` is a forward hook with keyword arguments."""

    def __init__(self, module: nn.Module) -> None:
        self.names = {id(part): name for name, part in module.named_modules()}
        self.barriers: list[Barrier] = []
        self.busy = False  # a module is being run again: hooks of its submodules must do nothing
        self._blocked: dict[int, bool] = {}  # by module: one called many times is checked until it blocks

    def check(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Return the output with a stand-in gradient path if the module blocks the gradient, else None.

        Innermost modules come first, so a container is checked only for what its submodules let through.
        """
        if not torch.is_grad_enabled():  # inside no_grad() or a checkpoint: the module around it is checked
            return None
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
        outputs = [x for x in tree_flatten(out)[0] if _carries_values(x)]
        if not inputs or not outputs or any(x is y for x in inputs for y in outputs):
            return None
        if not self._blocks(module, args, kwargs, inputs, outputs):
            return None
        name = self.names.get(id(module), "")
        if all(barrier.name != name for barrier in self.barriers):
            kind: str = module._get_name()  # type: ignore[no-untyped-call]
            self.barriers.append(Barrier(name, kind))
        return tree_map(lambda x: _Linked.apply(x.detach(), *inputs) if _differentiable(x) else x, out)

    def _blocks(self, module: nn.Module, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        if self._blocked.get(id(module)):
            return True
        if _gradient_returns(inputs, outputs, thorough=not any(module.children())):
            return False
        self.busy = True
        try:
            follows = _follows_input(module, args, kwargs, outputs)
        finally:
            self.busy = False
        self._blocked[id(module)] = follows
        return follows


@own_grad_mode()
def gradient_barriers(module: nn.Module, pixels: Tensor) -> tuple[Barrier, ...]:
    """Return the layers that block the gradient between `pixels` and the output, in the order they are run.

    One forward of the first image; the module is left as it was.

    Args:
        module: Any module that takes images; what it returns does not matter.
        pixels: Preprocessed images, [B, 3, H, W].

    Returns:
        Barriers, first to last; empty if the gradient passes everywhere.

    Example:
        >>> gradient_barriers(torch.ao.quantization.quantize_dynamic(vit, {nn.Linear}), pixels)[0]  # doctest: +SKIP
        Barrier(name='blocks.0.attn.qkv', type='DynamicQuantizedLinear')
    """
    finder = BarrierFinder(module)

    def hook(part: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        return None if finder.busy else finder.check(part, args, kwargs, out)

    checked = this_thread_only(hook)
    with frozen_eval(module), torch.enable_grad():
        handles = []
        try:
            handles += [part.register_forward_hook(checked, with_kwargs=True) for part in module.modules()]
            module(pixels[:1].detach().clone().requires_grad_(True))
        finally:
            for handle in handles:
                handle.remove()
    return tuple(finder.barriers)


class _Linked(torch.autograd.Function):
    """The same value, with a gradient that says which tokens (or cells) of the inputs an output belongs to."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.shapes = [x.shape for x in inputs]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None, *(_spread(gradient.abs(), shape) for shape in ctx.shapes))


def _spread(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Return each token's (or cell's) total gradient in an input of this shape; the sum everywhere if shapes differ."""
    if gradient.shape[:-1] == shape[:-1]:  # [..., d_out] -> [..., d_in]
        return gradient.sum(-1, keepdim=True).expand(shape).contiguous()
    if gradient.ndim == 4 and len(shape) == 4:  # [B, C_out, h, w] -> [B, C_in, H, W]
        return F.interpolate(gradient.sum(1, keepdim=True), shape[2:]).expand(shape).contiguous()
    return gradient.sum().expand(shape).contiguous()


def _carries_values(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_quantized)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _gradient_returns(inputs: list[Tensor], outputs: list[Tensor], *, thorough: bool) -> bool:
    """Return whether some gradient comes from the outputs back to the inputs; `thorough` runs the backward."""
    alive = [x for x in outputs if x.requires_grad]
    nodes = [x.grad_fn for x in alive]
    if not alive or all(node is not None and NO_KERNEL in node.name() for node in nodes):
        return False
    if not thorough:
        return True
    generator = torch.Generator().manual_seed(0)  # any direction will do, as long as it is not a special one
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(x) for x in alive]
    try:
        gradients = torch.autograd.grad(alive, inputs, directions, retain_graph=True, allow_unused=True)
    except CheckpointError:
        return True  # recomputed in the backward: the trace's own backward reports that
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


@torch.no_grad()
def _follows_input(module: nn.Module, args: Any, kwargs: Any, outputs: list[Tensor]) -> bool:
    """Return whether the output changes with the values of the inputs; positions for an input's shape do not."""
    generator = torch.Generator().manual_seed(0)

    def moved(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        spread = value.float().std() if value.numel() > 1 else value.float().abs().sum()
        step = CHANGE * torch.where(spread > 0, spread, torch.ones_like(spread))
        return value.detach() + (
            step * torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu").to(step)
        ).to(value.dtype)

    with torch._C.DisableTorchFunction():  # a capture must not see this
        rerun = module.forward(*tree_map(moved, args), **tree_map(moved, kwargs))
    others = [x for x in tree_flatten(rerun)[0] if _carries_values(x)]
    return any(
        a.shape != b.shape or not torch.equal(_plain(a), _plain(b)) for a, b in zip(outputs, others, strict=False)
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
