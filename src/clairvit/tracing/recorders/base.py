"""Recorder: what a method needs of a forward or backward pass beyond x dx q k v dO, as an object of its own.

A subclass names the kinds of operations it wants (`clairvit.tracing.ops`) and overrides the hooks it needs. A method
asks for it with `requires=Requires(recorders=(MyRecorder,))` and reads it as `layer[MyRecorder]` or
`trace[MyRecorder]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from torch import Tensor

from clairvit.errors import NotApplicable

if TYPE_CHECKING:
    from clairvit.tracing.attention_call import AttentionCall
    from clairvit.tracing.lineage import Trait
    from clairvit.tracing.recording import Recording
    from clairvit.tracing.structure import ModelStructure
    from clairvit.tracing.trace import GradientScope

GradientOf = Callable[[Tensor | None], Tensor | None]


class Op(NamedTuple):
    """One torch operation of a forward pass."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    kind: str | None  # as `ops.kind_of` names it
    block: int  # index of the block it is in; -1 before the first
    calls: Sequence[AttentionCall]  # attention calls so far, this operation's included
    nested: bool  # inside torch's own multi-head attention, which is an operation too
    after_blocks: bool  # the last block, or its attention, is done
    attended: int = 0  # attention calls so far, each counted that computes heads of a layer alone
    trait: Trait | None = None  # what the output is of one activation: a statistic, a norm that is written out
    held: Tensor | None = None  # the factor of a product that rules hold fixed: a norm's spread, an activation's gate
    holds_spread: bool = False


class Recorder:
    """Base class: hooks that are called during a forward pass and around each backward pass.

    Example:
        >>> from clairvit.tracing import ops
        >>> class Activations(Recorder):
        ...     kinds = frozenset({ops.ACTIVATION})
        ...
        ...     def __init__(self) -> None:
        ...         self.outputs = {}
        ...
        ...     def on_op(self, op: Op) -> None:
        ...         self.outputs[op.block] = op.output.detach()
        ...
        ...     def at_layer(self, index, recording):
        ...         return self.outputs[index]
        >>> import clairvit as cv
        >>> trace = cv.trace(cv.load("pets"), "demo", recorders=(Activations,))
        >>> sorted(trace[Activations].outputs) == list(range(len(trace.layers)))
        True
    """

    kinds: Collection[str] | None = frozenset()  # of the operations that `on_op` is called for; None: all

    def start(self, structure: ModelStructure, pixels: Tensor) -> None:
        """Prepare for one forward pass over `pixels` [B, 3, H, W]."""

    def before_op(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Inspect any operation before it runs; called only if overridden."""

    def on_op(self, op: Op) -> None:
        """Inspect an operation of one of `kinds`, after it ran."""

    def on_block(self, block: int, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        """Inspect the input of a block, as the model shapes it, before the block runs."""

    def on_blocks_end(self, tokens: Tensor | None, calls: Sequence[AttentionCall]) -> None:
        """Inspect the last block's output; None if that block is no module: then its attention is done."""

    def finish(self, recording: Recording) -> None:
        """Finish after the forward pass: select and detach what is kept."""

    def differentiated(self, scope: GradientScope) -> Sequence[Tensor]:
        """Return tensors of the graph at which backward passes shall leave gradients."""
        return ()

    def before_backward(self) -> None:
        """Prepare for one backward pass."""

    def after_backward(self, recording: Recording, gradient_of: GradientOf) -> Self:
        """Return what a trace keeps of this recorder: itself, or a copy with the values of this backward pass."""
        return self

    def at_layer(self, index: int, recording: Recording) -> Tensor | None:
        """Return the value of one layer, which methods read as `layer[…]`; None if it was not seen."""
        raise NotImplementedError(f"{type(self).__name__} has no value per layer; read it as trace[…].")

    def missing(self, index: int) -> NotApplicable:
        """Return the error for a layer without a value."""
        return NotApplicable(f"{type(self).__name__} was not seen in layer {index} of this model.")

    def release(self) -> None:
        """Drop every reference to the graph, which is freed."""
