"""Slice positional constants (rotary angles, relative biases) to the tokens that were kept.

Constants as long as the whole image meet a sequence that got shorter. They come in two ways: as arguments of a block,
or in an operation inside a block that would fail on the two lengths. Both are indexed by the kept tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clairvit.models.model import Layout
from clairvit.tracing import ops

_ELEMENTWISE = ops.SUMS | ops.DIFFERENCES | {ops.MULTIPLY, ops.MULTIPLY_IN_PLACE}
_TERNARY = (torch.addcmul, torch.where)


class PositionSlicing(TorchFunctionMode):
    """Slice constants inside the `with` to `kept` [V, K], the indices of each variant's tokens.

    All tokens of the layout that are no patches are among them, in order. With `batch_axis`, rotary angles [1, N, d]
    that blocks are given have a batch axis and none of heads, as in transformers' language models.
    """

    def __init__(self, kept: Tensor, layout: Layout, *, batch_axis: bool = False) -> None:
        super().__init__()
        self.batch_axis = batch_axis
        patches = kept[:, layout.prefix : kept.shape[1] - layout.suffix] - layout.prefix
        self.kept = {layout.tokens: kept, layout.patches: patches}  # by the length that they index
        self.tokens = layout.tokens
        # A length of 1 broadcasts, so that no operation would fail, and constants are combined with each other too
        # (rows minus columns). Then a constant is sliced only to fit a tensor that depends on the tokens, which
        # requires_grad tells.
        self.ambiguous = any(rows.shape[1] == 1 for rows in self.kept.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = ops.kind_of(func)
        if kind in _ELEMENTWISE or func in _TERNARY:
            tensors = [a for a in args if isinstance(a, Tensor)]
            args = tuple(self._sliced_to_fit(a, tensors) if isinstance(a, Tensor) else a for a in args)
        elif kind == ops.ATTENTION:
            kwargs = ops.attention_arguments(args, kwargs)
            mask = kwargs.get("attn_mask")
            if isinstance(mask, Tensor):
                q, k = kwargs["query"], kwargs["key"]
                shape = torch.Size((*q.shape[:-1], k.shape[-2]))
                kwargs["attn_mask"] = self._sliced(mask, shape)
            args = ()
        elif kind == ops.MULTI_HEAD:
            with self:  # the mode is off inside a handler
                return ops.without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _sliced_to_fit(self, tensor: Tensor, operands: list[Tensor]) -> Tensor:
        """Return one operand of an elementwise operation, sliced to the shapes of the others."""
        for other in operands:
            if other is not tensor and (not self.ambiguous or (other.requires_grad and not tensor.requires_grad)):
                tensor = self._sliced(tensor, other.shape)
        return tensor

    def _sliced(self, constant: Tensor, shape: torch.Size) -> Tensor:
        """Return the constant, indexed by the kept tokens along the axes where it is too long for `shape`."""
        axes = [
            -axis
            for axis in range(1, min(constant.ndim, len(shape)) + 1)
            if constant.shape[-axis] != shape[-axis]
            and constant.shape[-axis] in self.kept
            and shape[-axis] == self.kept[constant.shape[-axis]].shape[1]
        ]
        return self._indexed(constant, axes, len(shape)) if axes else constant

    def _indexed(self, constant: Tensor, axes: list[int], ndim: int = 0) -> Tensor:
        """Return [V, …, K, …] of […, N, …], with at least `ndim` axes; two axes of an N×N bias are indexed together."""
        if constant.ndim >= max(ndim, 3) and constant.shape[0] == 1:
            constant = constant[0]  # computed for a batch of one
        if any(constant.shape[axis] not in self.kept for axis in axes):
            return constant
        rows = [self.kept[constant.shape[axis]] for axis in axes]  # [V, K] each
        if len(axes) == 1:
            indexed = constant.movedim(axes[0], 0)[rows[0]].movedim(1, axes[0])
        else:
            columns, lines = rows  # axes -1 and -2
            indexed = constant[..., lines[:, :, None], columns[:, None, :]].movedim(-3, 0)
        missing = ndim - indexed.ndim
        return indexed.reshape(len(indexed), *(1,) * missing, *indexed.shape[1:]) if missing > 0 else indexed

    def slice_argument(self, value: Any) -> Any:
        """Return a block's argument with rotary angles […, N, d], also in pairs, and biases […, N, N] sliced."""
        if isinstance(value, tuple | list):
            return type(value)(self.slice_argument(part) for part in value)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[-2] not in self.kept:
            return value
        # Angles may happen to be as many as patches; a bias has a head axis and includes the other tokens.
        square = value.ndim > 2 and value.shape[-1] == value.shape[-2] == self.tokens
        if self.batch_axis and not square and value.ndim == 3 and value.shape[0] == 1:
            return self._indexed(value, [-2], ndim=3)  # [V, K, d]
        return self._indexed(value, [-1, -2] if square else [-2], ndim=4)
