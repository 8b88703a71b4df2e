"""Positions: what a model knows of places (rotary angles, relative biases), cut down to the tokens that were kept.

Constants that are as long as the whole image meet a sequence that got shorter. Two ways in: a block is handed them as
arguments, or an operation inside a block would fail on the two lengths. Both are indexed by the kept tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clairvit.tracing import ops

_ELEMENTWISE = ops.SUMS | ops.DIFFERENCES | {ops.MULTIPLY, ops.MULTIPLY_IN_PLACE}
_TERNARY = (torch.addcmul, torch.where)


class Positions(TorchFunctionMode):
    """kept [V, K]: the tokens that each variant has left of `tokens`, among them the `prefix` that comes first."""

    def __init__(self, kept: Tensor, tokens: int, prefix: int) -> None:
        super().__init__()
        self.kept = {tokens: kept, tokens - prefix: kept[:, prefix:] - prefix}  # by the length that they index
        self.tokens = tokens
        # A length of 1 fits everything, so that no operation would fail, and constants meet each other in it too (rows
        # and columns that are subtracted). Then only what depends on the tokens, told by its gradient, cuts a constant.
        self.ambiguous = any(rows.shape[1] == 1 for rows in self.kept.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = ops.kind_of(func)
        if kind in _ELEMENTWISE or func in _TERNARY:
            tensors = [a for a in args if isinstance(a, Tensor)]
            args = tuple(self._fitted(a, tensors) if isinstance(a, Tensor) else a for a in args)
        elif kind == ops.ATTENTION:
            kwargs = ops.attention_arguments(args, kwargs)
            mask = kwargs.get("attn_mask")
            if isinstance(mask, Tensor):
                q, k = kwargs["query"], kwargs["key"]
                shape = torch.Size((*q.shape[:-1], k.shape[-2]))
                kwargs["attn_mask"] = self._cut(mask, shape)
            args = ()
        elif kind == ops.MULTI_HEAD:
            with self:  # the mode is off inside a handler
                return ops.without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _fitted(self, tensor: Tensor, among: list[Tensor]) -> Tensor:
        for other in among:
            if other is not tensor and (not self.ambiguous or (other.requires_grad and not tensor.requires_grad)):
                tensor = self._cut(tensor, other.shape)
        return tensor

    def _cut(self, constant: Tensor, shape: torch.Size) -> Tensor:
        """The constant's rows for the kept tokens, where it is too long for `shape`."""
        axes = [
            -axis
            for axis in range(1, min(constant.ndim, len(shape)) + 1)
            if constant.shape[-axis] != shape[-axis]
            and constant.shape[-axis] in self.kept
            and shape[-axis] == self.kept[constant.shape[-axis]].shape[1]
        ]
        return self.chosen(constant, axes, len(shape)) if axes else constant

    def chosen(self, constant: Tensor, axes: list[int], ndim: int = 0) -> Tensor:
        """[…, N, …] -> [V, …, K, …] with at least `ndim` axes; two axes of an N×N bias are indexed together."""
        if constant.ndim >= max(ndim, 3) and constant.shape[0] == 1:
            constant = constant[0]  # made for a batch of one
        if any(constant.shape[axis] not in self.kept for axis in axes):
            return constant
        rows = [self.kept[constant.shape[axis]] for axis in axes]  # [V, K] each
        if len(axes) == 1:
            picked = constant.movedim(axes[0], 0)[rows[0]].movedim(1, axes[0])
        else:
            last, before = rows  # axes -1 and -2
            picked = constant[..., before[:, :, None], last[:, None, :]].movedim(-3, 0)
        missing = max(ndim, 0) - picked.ndim
        return picked.reshape(len(picked), *(1,) * missing, *picked.shape[1:]) if missing > 0 else picked

    def handed(self, value: Any) -> Any:
        """A block's argument: rotary angles […, N, d], also in pairs, and biases […, N, N] are cut to what is kept."""
        if isinstance(value, tuple | list):
            return type(value)(self.handed(part) for part in value)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[-2] not in self.kept:
            return value
        # Angles may happen to be as many as patches; a bias has a head axis and speaks of the prefix tokens too.
        square = value.ndim > 2 and value.shape[-1] == value.shape[-2] == self.tokens
        return self.chosen(value, [-1, -2] if square else [-2], ndim=4)
