"""Activation patching: replace the activations of single tokens at the inputs of some blocks while the model runs.

with ActivationPatching(recording, {4: values, 5: others}, positions) as patching:   # values [n, d], positions [n]
    model.logits(pixels)                                                             # a batch of n images
assert patching.applied == 2

Blocks are those of the recording, in the order in which they are entered. Nothing of the model is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clairvit.tracing.module_state import this_thread_only
from clairvit.tracing.recording import Recording
from clairvit.tracing.structure import tokens_among


class ActivationPatching:
    """Give row i of a batch the activation values[block][i] at its token positions[i], inside the `with`."""

    def __init__(self, recording: Recording, values: Mapping[int, Tensor], positions: Tensor) -> None:
        self._recording, self._values, self._positions = recording, values, positions
        self._entered = 0
        self._hooks: list[RemovableHandle] = []
        self.applied = 0  # blocks whose input was changed

    def __enter__(self) -> Self:
        blocks = {id(site.block): site.block for site in self._recording.structure.layers if site.block is not None}
        replace = this_thread_only(self._replace)
        self._hooks = [block.register_forward_pre_hook(replace, with_kwargs=True) for block in blocks.values()]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _replace(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tokens = tokens_among(args, kwargs)
        if tokens is None:
            return None
        values = self._values.get(self._entered)
        self._entered += 1
        if values is None:
            return None
        self.applied += 1
        patched = self._recording.as_tokens(tokens).clone()  # [n, N, d]
        patched[torch.arange(len(patched), device=patched.device), self._positions] = values.to(patched)
        block_input = self._recording.from_tokens(patched, like=tokens).contiguous()
        if not self._recording.structure.whole_blocks:
            tokens.data = block_input  # the same tensor object: a residual outside the module sees it too
            return None
        return (
            tuple(block_input if a is tokens else a for a in args),
            {name: block_input if a is tokens else a for name, a in kwargs.items()},
        )
