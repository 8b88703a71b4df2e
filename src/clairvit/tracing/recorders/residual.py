"""Middles: the residual stream between a block's attention and its MLP, seen in passing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_IN_PLACE = (Tensor.__iadd__, Tensor.add_)  # the MLP will be added to the same tensor


class PostAttentionResidual:
    """x_mid of each attention call: the first sum after it that the block's own input is a term of.

    Nothing else is kept. A method that takes the sum apart needs a film of the block (see `inside.py`).
    """

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}  # attention call -> x_mid, cut from the graph
        self._stream: Tensor | None = None
        self._calls = 0

    def entering(self, tokens: Tensor, calls: int) -> None:
        self._stream, self._calls = tokens, calls

    def see(self, function: Any, args: tuple[Any, ...], out: Any, calls: int) -> None:
        stream = self._stream
        if stream is None or calls != self._calls + 1 or function not in (*_SUMS, *_IN_PLACE):
            return
        if any(a is stream for a in args) and isinstance(out, Tensor) and out.shape == stream.shape:
            self.found[calls - 1] = out.detach().clone() if function in _IN_PLACE else out.detach()
            self._stream = None
