"""Activation patching: replace activations while the model runs. Nothing of the model is changed.

with ActivationPatching(recording, {4: values, 5: others}, positions) as patching:   # values [n, d], positions [n]
    model.logits(pixels)                                                             # a batch of n images
assert patching.applied == 2

edits = {Place("heads", 3): [lambda heads: zeros]}   # the output of attention call 3, [B, H, N, dh]
with PlacePatching(recording, batch, edits):
    model.logits(pixels)

Blocks are those of the recording, in the order in which they are entered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clairvit.errors import CaptureError, NotApplicable
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.capture import Capture, stream_hooks
from clairvit.tracing.module_state import this_thread_only
from clairvit.tracing.recording import Recording
from clairvit.tracing.structure import ModelStructure, tokens_among

Edit = Callable[[Tensor], Tensor | None]  # an activation -> its replacement of the same shape; None leaves it


class BlockInputPatching(ABC):
    """Replace the inputs [B, N, d] of blocks inside the `with`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._entered = 0
        self._hooks: list[RemovableHandle] = []

    @abstractmethod
    def edit(self, block: int, tokens: Tensor) -> Tensor | None:
        """Return the input that a block gets instead of `tokens`, [B, N, d]; None leaves it."""

    def __enter__(self) -> Self:
        replace = this_thread_only(self._replace)
        for block in _blocks(self._recording.structure):
            self._hooks.append(block.register_forward_pre_hook(replace, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _replace(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tokens = tokens_among(args, kwargs)
        if tokens is None:
            return None
        block = self._entered
        self._entered += 1
        patched = self.edit(block, self._recording.as_tokens(tokens))  # [B, N, d]
        if patched is None:
            return None
        block_input = _in_memory_like(tokens, self._recording.from_tokens(patched, like=tokens))
        if not self._recording.structure.whole_blocks:
            tokens.data = block_input  # the same tensor object: a residual outside the module sees it too
            return None
        return (
            tuple(block_input if a is tokens else a for a in args),
            {name: block_input if a is tokens else a for name, a in kwargs.items()},
        )


class ActivationPatching(BlockInputPatching):
    """Give row i of a batch the activation values[block][i] at its token positions[i], inside the `with`."""

    def __init__(self, recording: Recording, values: Mapping[int, Tensor], positions: Tensor) -> None:
        super().__init__(recording)
        self._values, self._positions = values, positions
        self.applied = 0  # blocks whose input was changed

    def edit(self, block: int, tokens: Tensor) -> Tensor | None:
        values = self._values.get(block)
        if values is None:
            return None
        self.applied += 1
        patched = tokens.clone()  # [n, N, d]
        patched[torch.arange(len(patched), device=patched.device), self._positions] = values.to(patched)
        return patched


class Place(NamedTuple):
    """Where an activation is computed in a forward pass.

    tokens: the input [B, N, d] of a block; heads: the output [B, H, N, dh] of an attention call, before the output
    projection; sum: a term [B, N, d] of a sum. Each is numbered from 0 in the order of the pass, as in a recording:
    attention calls in the token stream (`tracing/capture.py: stream_hooks`), sums from the first block on. What comes
    before, such as a vision tower, may run image by image, so that its numbers depend on the batch.
    """

    kind: Literal["tokens", "heads", "sum"]
    number: int
    term: int = 0  # of a sum: 0 or 1


class _BlockInputEdits(BlockInputPatching):
    """Apply the edits of a `PlacePatching` to block inputs."""

    def __init__(self, patching: PlacePatching) -> None:
        super().__init__(patching.recording)
        self._patching = patching

    def edit(self, block: int, tokens: Tensor) -> Tensor | None:
        self._patching.enter_block(tokens)
        return self._patching.edited(Place("tokens", block), tokens)


class PlacePatching(Capture):
    """Apply edits, in order, to the activations at places of one forward pass over `batch` images, inside the `with`.

    Leaving the `with` raises CaptureError if a place was not reached.
    """

    def __init__(self, recording: Recording, batch: int, edits: Mapping[Place, Sequence[Edit]]) -> None:
        super().__init__(batch, sequence_first=recording.structure.sequence_first)
        self.recording, self._edits = recording, edits
        self._blocks: _BlockInputEdits | None = None  # inside the `with` alone: it refers back to this object
        self._reached: set[Place] = set()
        self._nesting = 0  # the capture enters itself again inside torch's own multi-head attention
        self._hooks: list[RemovableHandle] = []
        self._sums = -1

    def __enter__(self) -> Self:
        if self._blocks is None:
            self._blocks = _BlockInputEdits(self)
            self._blocks.__enter__()
            self._hooks = stream_hooks(self.recording.model.module, self)
        self._nesting += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._nesting -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._nesting or self._blocks is None:
            return
        self._blocks.__exit__(*error)
        self._blocks = None
        for hook in self._hooks:
            hook.remove()
        missed = [place for place in self._edits if place not in self._reached]
        if missed and error[0] is None:
            raise CaptureError(
                f"{len(missed)} of {len(self._edits)} activations were not computed in this forward pass; expected the "
                "same path every time. Switch off random depth or early exits, then try again."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._block >= 0 and ops.kind_of(func) in ops.SUMS:
            self._sums += 1
            args = self._edit_sum(func, args, kwargs or {})
        calls = len(self.calls)
        out = super().__torch_function__(func, types, args, kwargs)
        if len(self.calls) > calls and self.calls[-1].outputs[0] is out:
            return self._edit_heads(self.calls[-1])
        return out

    def edited(self, place: Place, activation: Tensor) -> Tensor | None:
        """Return the activation after all edits at a place; None where nothing replaces it."""
        edited = None
        for edit in self._edits.get(place, ()):
            self._reached.add(place)
            replacement = edit(activation if edited is None else edited)
            edited = edited if replacement is None else replacement
        return edited

    def _edit_heads(self, call: AttentionCall) -> Tensor:
        place = Place("heads", len(self.calls) - 1)
        (output,) = call.outputs  # heads that are calls of their own are places of their own
        edited = self.edited(place, call.heads((output,)))
        if edited is None:
            return output
        patched = output.clone()
        heads = call.heads((patched,))
        if heads.untyped_storage().data_ptr() != patched.untyped_storage().data_ptr():
            raise NotApplicable(
                "The output of this model's attention is no tensor of separate heads that could be written to; use "
                "part='attention' instead."
            )
        heads.copy_(edited)
        return patched

    def _edit_sum(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        for term, value in enumerate(args[:2]):
            place = Place("sum", self._sums, term)
            edited = self.edited(place, self.recording.as_tokens(value)) if place in self._edits else None
            if edited is None:
                continue
            patched = _in_memory_like(value, self.recording.from_tokens(edited, like=value))
            if term == 0 and ops.is_in_place(func, kwargs):
                patched = value.copy_(patched)  # the sum is written into this tensor, which others may read
            args = (*args[:term], patched, *args[term + 1 :])
        return args


class BlockOutputs:
    """Keep the token output of each block inside the `with`, as the model shapes it, in the order of the calls."""

    def __init__(self, structure: ModelStructure) -> None:
        self._structure = structure
        self._hooks: list[RemovableHandle] = []
        self.outputs: list[Tensor | None] = []

    def __enter__(self) -> Self:
        store = this_thread_only(self._store)
        for block in _blocks(self._structure):
            self._hooks.append(block.register_forward_hook(store, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _store(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if tokens_among(args, kwargs) is not None:
            output = tokens_among((out,) if isinstance(out, Tensor) else tuple(out), {})
            self.outputs.append(output if output is None else output.detach().clone())


def _blocks(structure: ModelStructure) -> list[nn.Module]:
    """Return the block modules, each one once."""
    return list({id(site.block): site.block for site in structure.layers if site.block is not None}.values())


def _in_memory_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return values in the memory format of a tensor: kernels, and so the roundings, are those of the tensor."""
    return torch.empty_like(tensor, requires_grad=False).copy_(values)
