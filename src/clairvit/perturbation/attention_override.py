"""Rewrite: attention scores changed on their way to the softmax, in every layer, however the model is written.

with Rewritten(batch, tokens, lambda scores: scores.masked_fill(hidden, -inf)):   # nobody looks at these tokens
    model.logits(pixels)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clairvit.tracing import ops
from clairvit.tracing.attention import repeated, scaled_scores

Rewrite = Callable[[Tensor], Tensor]  # scores [B, H, queries, tokens] -> the same shape
MOST_EXTRA_KEYS = 2  # a class token that joins in a pool after the layers


class Rewritten(TorchFunctionMode):
    """`rewrite` sees the scores of each attention to the image's tokens, pools included; windows stay as they are."""

    def __init__(self, batch: int, tokens: int, rewrite: Rewrite) -> None:
        super().__init__()
        self.batch, self.tokens, self.rewrite = batch, tokens, rewrite
        self.seen = 0  # attention calls that were rewritten

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = ops.kind_of(func)
        if kind == ops.ATTENTION:
            return self._fused(func, args, kwargs)
        if kind == ops.SOFTMAX and ops.is_over_last_axis(args, kwargs):
            x = ops.first_argument(args, kwargs)
            if self._to_tokens(x.shape[0], x.shape[-1]):
                rest = {name: value for name, value in kwargs.items() if name != "input"}
                return func(self._rewritten(x), *args[1:], **rest)
        if kind == ops.MULTI_HEAD:
            with self:  # the mode is off inside a handler
                return ops.without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _to_tokens(self, lead: int, keys: int) -> bool:
        return lead % self.batch == 0 and 0 <= keys - self.tokens <= MOST_EXTRA_KEYS

    def _rewritten(self, scores: Tensor) -> Tensor:
        self.seen += 1
        whole = scores.reshape(self.batch, -1, *scores.shape[-2:])  # heads may be folded into the batch
        extra = whole.shape[-1] - self.tokens
        own = self.rewrite(whole[..., extra:])
        return torch.cat([whole[..., :extra], own], -1).reshape(scores.shape)

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = ops.attention_arguments(args, kwargs)
        q, k, v = call["query"], call["key"], call["value"]
        if not self._to_tokens(q.shape[0], k.shape[-2]) or call.get("is_causal"):
            return func(*args, **kwargs)
        scale = ops.attention_scale(q, call.get("scale"))
        scores = scaled_scores(q, repeated(k, q), scale, call.get("attn_mask"))
        return self._rewritten(scores).softmax(-1).to(v.dtype) @ repeated(v, q)


def hiding(kept: Tensor) -> Rewrite:
    """Nobody looks at tokens that are not kept: bool [B, tokens]."""
    return lambda scores: scores.masked_fill(~kept[:, None, None, :], float("-inf"))
