"""Inspect single forward and backward passes: outputs of each submodule, rounding bounds, changes of state."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from clairvit.models.model import Model
from clairvit.tracing.module_state import frozen_eval, this_thread_only

DEVIATIONS = 6.0  # λ of the probabilistic rounding bound: it is exceeded with probability below 2·exp(−λ²/2) = 3e-8


@dataclass(frozen=True)
class ModuleCall:
    """One call of one submodule, without its tensors."""

    name: str  # as in named_modules()
    kind: str  # the class of the submodule
    leaf: bool  # it contains no other submodule
    finite_input: bool
    finite_output: bool
    largest: float  # largest finite |output|
    checksum: tuple[float, ...]  # equal for equal outputs
    gradient_input: bool  # an input carries a gradient
    gradient_output: bool


@dataclass(frozen=True, eq=False)
class Inspection:
    """One forward pass: the scores, and every call of a submodule in the order in which the calls ended."""

    logits: Tensor  # [B, C]
    calls: tuple[ModuleCall, ...]
    operations: int  # torch functions that returned a floating-point tensor
    width: int  # the longest sum in one operation: columns of the widest weight matrix, or the number of tokens
    dtype: torch.dtype  # the coarsest floating-point type among parameters and results of operations

    @property
    def largest(self) -> float:
        """Return the largest finite |activation| of any submodule, the scores included."""
        scores = self.logits.detach().float()
        finite = scores[scores.isfinite()].abs()
        return max([float(finite.max()) if finite.numel() else 0.0, *(call.largest for call in self.calls)])

    @property
    def called(self) -> set[str]:
        """Return the names of the submodules that ran."""
        return {call.name for call in self.calls}


class _OpCounter(TorchFunctionMode):
    """Count the operations on floating-point tensors, and record their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.dtypes: set[torch.dtype] = set()
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused and isinstance(out, Tensor) and out.is_floating_point():
            self.operations += 1
            self.dtypes.add(out.dtype)
        return out


def inspect_forward(model: Model, pixels: Tensor, *, gradient: bool = False) -> Inspection:
    """Run the model once over pixels [B, 3, H, W] in eval mode and record each call of a submodule.

    With `gradient=True` parameters are frozen and the gradient of the pixels is tracked as far as the model allows.
    """
    calls: list[ModuleCall] = []
    longest = 1

    def call_recorder(name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any, Any], None]:
        leaf = next(module.children(), None) is None

        def record_call(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            nonlocal longest
            counter.paused = True
            inputs, outputs = _tensors((args, kwargs)), _tensors(out)
            longest = max([longest, *(int(t.shape[1]) for t in outputs if t.ndim == 3)])
            calls.append(
                ModuleCall(
                    name=name,
                    kind=type(module).__name__,
                    leaf=leaf,
                    finite_input=all(map(_is_finite, inputs)),
                    finite_output=all(map(_is_finite, outputs)),
                    largest=max(map(_largest, outputs), default=0.0),
                    checksum=tuple(_checksum(t) for t in outputs),
                    gradient_input=any(t.requires_grad for t in inputs),
                    gradient_output=any(t.requires_grad for t in outputs),
                )
            )
            counter.paused = False

        return record_call

    counter = _OpCounter()
    pixels = pixels.detach().clone().requires_grad_(gradient)
    with frozen_eval(model.module), torch.set_grad_enabled(gradient):
        hooks = [
            part.register_forward_hook(this_thread_only(call_recorder(name, part)), with_kwargs=True)
            for name, part in model.module.named_modules()
            if name
        ]
        try:
            with counter:
                logits = model.logits(pixels)
        finally:
            for hook in hooks:
                hook.remove()
    widths = [p[0].numel() for p in model.module.parameters() if p.ndim in (2, 4) and len(p) > 1]
    dtype = max({coarsest_dtype(model), *counter.dtypes}, key=lambda kind: torch.finfo(kind).eps)
    return Inspection(logits, tuple(calls), counter.operations, max([longest, *widths]), dtype)


def plain_forward(model: Model, pixels: Tensor) -> Tensor:
    """Return the scores [B, C] of one forward pass in eval mode, without gradients and hooks."""
    with frozen_eval(model.module), torch.no_grad():
        return model.logits(pixels)


@dataclass(frozen=True)
class BackwardPass:
    """One backward pass from all scores to the pixels."""

    reaches_scores: bool  # the scores have a gradient function
    largest: float  # largest |gradient| at the pixels; NaN where it is not finite
    recomputed: tuple[str, ...]  # submodules that ran again in the backward pass: gradient checkpointing
    blocked_by: str  # description of where the gradient ends; "" if it reaches the scores


def inspect_backward(model: Model, pixels: Tensor) -> BackwardPass:
    """Run one forward pass and one backward pass of a random combination of all scores; record what was recomputed."""
    recomputed: dict[str, None] = {}
    pixels = pixels.detach().clone().requires_grad_(True)
    running = "forward"

    def recompute_recorder(name: str) -> Callable[..., None]:
        def record_call(*_: Any) -> None:
            if running == "backward":
                recomputed[name] = None

        return record_call

    with frozen_eval(model.module), torch.inference_mode(False), torch.enable_grad():
        hooks = [
            part.register_forward_pre_hook(this_thread_only(recompute_recorder(name)))
            for name, part in model.module.named_modules()
            if name
        ]
        try:
            logits = model.logits(pixels)
            if logits.requires_grad:
                generator = torch.Generator().manual_seed(0)
                weights = torch.randn(logits.shape, generator=generator, dtype=torch.float32, device="cpu").to(logits)
                running = "backward"
                (logits * weights).sum().backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
    if not logits.requires_grad:
        return BackwardPass(False, 0.0, (), gradient_end(inspect_forward(model, pixels, gradient=True)))
    gradient = pixels.grad
    largest = 0.0 if gradient is None else float(gradient.detach().abs().max())
    return BackwardPass(True, largest if math.isfinite(largest) else math.nan, tuple(recomputed), "")


def gradient_end(inspection: Inspection) -> str:
    """Return where the gradient ends: in the first, innermost submodule that passes none on, or after the last one."""
    for call in inspection.calls:
        if call.gradient_input and not call.gradient_output and call.checksum:
            return f"in {call.name} ({call.kind})"
    carrying = [call for call in inspection.calls if call.gradient_output]
    return f"after {carrying[-1].name} ({carrying[-1].kind})" if carrying else "before the first submodule"


def first_difference(a: Inspection, b: Inspection) -> str:
    """Return "name (class)" of the first, innermost submodule whose output differs between two passes; "" if none."""
    for first, second in zip(a.calls, b.calls, strict=False):
        if first.name != second.name or first.checksum != second.checksum:
            return f"{first.name} ({first.kind})"
    return ""


def first_not_finite(inspection: Inspection) -> ModuleCall | None:
    """Return the first, innermost call with finite inputs and an output that is not; None if there is none."""
    return next((call for call in inspection.calls if call.finite_input and not call.finite_output), None)


@dataclass(frozen=True)
class RoundingBound:
    """The largest difference of two scores that rounding explains.

    bound = λ · sqrt(operations · width) · u · magnitude, u = eps / 2 the unit round-off of the model's precision. In
    `operations` operations in a row, each a sum of up to `width` terms, n = operations · width roundings add up; as
    independent errors they grow like sqrt(n), and λ · sqrt(n) · u is exceeded with probability below 2·exp(−λ²/2)
    (Higham & Mary, SIAM J. Sci. Comput. 2019). `magnitude` is the largest activation: where terms cancel,
    the terms count. If the model amplifies a change of its pixels by one unit round-off to more than u · magnitude,
    that counts instead.
    """

    unit: float
    operations: int
    width: int
    magnitude: float
    amplified: float  # the largest change of a score when each pixel changes by one unit round-off

    @property
    def growth(self) -> float:
        """Return λ · sqrt(operations · width)."""
        return DEVIATIONS * math.sqrt(self.operations * self.width)

    @property
    def scores(self) -> float:
        """Return the bound for a difference of scores."""
        return self.growth * max(self.unit * self.magnitude, self.amplified)

    def of_terms(self, magnitude: float) -> float:
        """Return the bound for a sum of terms whose absolute values add up to `magnitude`."""
        return self.growth * self.unit * magnitude


def rounding_bound(model: Model, pixels: Tensor, inspection: Inspection) -> RoundingBound:
    """Return the bound from the model's operations, widths, activations and sensitivity; one forward pass."""
    unit = torch.finfo(inspection.dtype).eps / 2
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, pixels.shape, generator=generator, device="cpu").to(pixels) * 2 - 1
    perturbed = plain_forward(model, pixels * (1 + 2 * unit * signs))
    change = (perturbed - inspection.logits.detach()).double().abs().max()
    amplified = float(change) / 2 if bool(change.isfinite()) else 0.0
    return RoundingBound(unit, inspection.operations, inspection.width, inspection.largest, amplified)


MAX_PARAMETERS = 500_000_000  # of a model that is copied to float64


def float64_copy(model: Model) -> Model | str:
    """Return the model with a copy of its module in float64, or why there is none."""
    module = model.module
    count = sum(parameter.numel() for parameter in module.parameters())
    if count > MAX_PARAMETERS:
        return f"{count:,} parameters are too many to copy"
    if model.device.type == "mps":
        return "the device has no float64"
    try:
        copied = replace(model, module=copy.deepcopy(module).double())
    except Exception as error:  # user code may raise anything
        return f"it cannot be copied ({type(error).__name__}: {error})"
    return copied


def coarsest_dtype(model: Model) -> torch.dtype:
    """Return the floating-point type with the largest eps among parameters and buffers."""
    kinds = {t.dtype for t in (*model.module.parameters(), *model.module.buffers()) if t.is_floating_point()}
    return max(kinds or {torch.float32}, key=lambda kind: torch.finfo(kind).eps)


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Return the state that a pass must not change, by name: values, gradients, flags and hooks."""
    state: dict[str, Any] = {}
    for name, part in module.named_modules():
        state[f"{name or 'module'}.training"] = part.training
        hooks = {key: len(value) for key, value in vars(part).items() if "hook" in key and isinstance(value, Mapping)}
        state[f"hooks of {name or 'module'}"] = hooks
    for name, parameter in module.named_parameters():
        gradient = None if parameter.grad is None else _digest(parameter.grad)
        state[f"parameter {name}"] = (_digest(parameter), parameter.requires_grad, gradient)
    for name, buffer in module.named_buffers():
        state[f"buffer {name}"] = _digest(buffer)
    return state


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries that differ."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Restore buffers that forward passes inside the block write to (counters, running statistics)."""
    saved = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in saved:
                part._buffers[name] = buffer
                if not _equal_with_nan(buffer, value):
                    buffer.copy_(value)


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype are equal; NaN equals NaN."""
    return a.shape == b.shape and bool(torch.eq(a, b).logical_or(a.ne(a) & b.ne(b)).all())


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    plain = tensor.detach().cpu().contiguous()
    bits = plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.reshape(-1)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=16).hexdigest()


def _tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in the inputs or outputs of a module."""
    leaves = tree_flatten(value)[0]
    nested = [part for leaf in leaves if isinstance(leaf, Mapping) for part in leaf.values()]
    return [t for t in (*leaves, *nested) if isinstance(t, Tensor) and t.is_floating_point()]


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _largest(tensor: Tensor) -> float:
    values = tensor.detach()
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def _checksum(tensor: Tensor) -> float:
    """Return Σ values · weights, with weights by position; NaN and infinity count as values."""
    values = tensor.detach().reshape(-1).float()
    weights = torch.arange(1, len(values) + 1, device=values.device) % 1021 + 1.0
    return float((values * weights).sum().nan_to_num(-1.0, -2.0, -3.0))
