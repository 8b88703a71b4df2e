"""Capture plan: where in a forward pass attention is computed, so that a capture need not see every torch call.

The first look at a model (`structure.py`) notes, per attention call, the last module that was entered or left before
its first operation (q kᵀ, or the fused call) and the next one afterwards: a window. In later forward passes hooks at
these two places switch the capture on and off, and the operations of norms, MLPs and projections run without it.

A plan is used only after a check: a pass with one capture on throughout and a second one on inside the windows, which
must see the same attention calls. It belongs to the structure, which is found again whenever something has been changed
(`fingerprint.py`). A planned pass that does not meet the expected attention calls is repeated without a plan
(`recording.py`). Rule tables that swap the backward of other operations, and recorders that ask for operations, see
every call as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils.hooks import RemovableHandle

from clairvit.models.submodules import submodules, weak_modules
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.capture import Capture
from clairvit.tracing.module_state import this_thread_only

# These decide by themselves whether they run as one fused call, and a function mode is part of that decision.
_WITH_FAST_PATH = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.TransformerDecoderLayer)


@weak_modules("module")
@dataclass(frozen=True)
class Boundary:
    """The moment when a module is entered, or left."""

    module: nn.Module
    leaving: bool


@dataclass(frozen=True)
class Window:
    """From before the first operation of an attention call to after its last; `closes` None: to the end."""

    opens: Boundary
    closes: Boundary | None


@dataclass(eq=False)
class CapturePlan:
    """The windows of all attention calls of a forward pass, and whether a pass has shown them to be right."""

    windows: tuple[Window, ...]
    holds: bool | None = None  # None: not checked yet; False: a planned pass saw other attention calls

    @contextmanager
    def installed(self, switch: WindowSwitch) -> Iterator[None]:
        """Let a switch open and close at the boundaries, inside the `with`."""
        opening = {window.opens for window in self.windows}
        closing = {window.closes for window in self.windows if window.closes is not None}
        handles: list[RemovableHandle] = []
        try:
            for boundary in dict.fromkeys([*closing, *opening]):
                actions = [switch.close] * (boundary in closing) + [switch.open] * (boundary in opening)
                handles.append(_hook(boundary, actions))
            yield
        finally:
            for handle in handles:
                handle.remove()
            switch.close()


def _hook(boundary: Boundary, actions: Sequence[Callable[[], None]]) -> RemovableHandle:
    def act(*_: Any) -> None:
        for action in actions:
            action()

    module, hook = boundary.module, this_thread_only(act)
    return module.register_forward_hook(hook) if boundary.leaving else module.register_forward_pre_hook(hook)


class WindowSwitch:
    """Switch a capture on when a window opens, and off when it closes."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._is_open = False

    def open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._capture.forget_products()  # older ones than the window's belong to other calls
            self._capture.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        # A function mode that was entered meanwhile and is still there comes off first; the window stays open for now.
        if self._is_open and _get_current_function_mode() is self._capture:  # type: ignore[no-untyped-call]
            self._is_open = False
            self._capture.__exit__(None, None, None)


class PlanLearner:
    """Find the windows of the attention calls in a forward pass that is told of every module and product."""

    def __init__(self) -> None:
        self._last: Boundary | None = None
        self._before_product: Boundary | None = None  # the last boundary before q kᵀ
        self._before_softmax: Boundary | None = None
        self._windows: list[tuple[Boundary | None, Boundary | None]] = []
        self._closed = 0  # how many windows have their end
        self._entered: Counter[nn.Module] = Counter()
        self.is_possible = True

    def boundary(self, module: nn.Module, *, leaving: bool) -> None:
        """Note that a module is entered or left."""
        self._last = Boundary(module, leaving)
        self._entered[module] += not leaving
        self._windows[self._closed :] = [(opens, self._last) for opens, _ in self._windows[self._closed :]]
        self._closed = len(self._windows)

    def operation(self, kind: str | None) -> None:
        """Note an operation that is no attention call."""
        if kind == ops.SOFTMAX:
            self._before_softmax = self._last
        elif kind in (ops.MATMUL, ops.EINSUM, ops.BIASED_MATMUL):
            self._before_product = self._last
        elif kind == ops.BATCH_NORM:  # the capture corrects its gradient wherever it is
            self.is_possible = False

    def call(self, call: AttentionCall) -> None:
        """Note an attention call that has just been computed."""
        first = self._before_product if call.q is not None else self._before_softmax
        self._windows.append((self._last if call.weights is None else first, None))

    def plan(self, module: nn.Module) -> CapturePlan | None:
        """Return the plan; None where a boundary is not unique in the pass, or modules choose their own path."""
        windows = [Window(opens, closes) for opens, closes in self._windows if opens is not None]
        ends = [end for window in windows for end in (window.opens, window.closes) if end is not None]
        if not windows or len(windows) < len(self._windows) or not self.is_possible:
            return None
        if any(self._entered[end.module] != 1 for end in ends):
            return None
        if any(isinstance(part, _WITH_FAST_PATH) for part in submodules(module)):
            return None
        return CapturePlan(tuple(windows))


def same_calls(calls: Sequence[AttentionCall], others: Sequence[AttentionCall]) -> bool:
    """Return whether two captures of one pass saw the same attention calls, with the same tensors."""

    def address(tensor: Tensor | None) -> tuple[Any, ...] | None:
        return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride())

    def tensors(call: AttentionCall) -> tuple[Any, ...]:
        kept = (address(tensor) for tensor in (call.q, call.k, call.v, call.mask, call.weights, call.scores))
        return (*map(id, call.outputs), call.scale, *kept)

    pairs = [[part for call in one for part in call.parts or (call,)] for one in (calls, others)]
    return list(map(tensors, pairs[0])) == list(map(tensors, pairs[1]))
