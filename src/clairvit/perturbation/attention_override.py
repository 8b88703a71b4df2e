"""Rewrite: attention scores changed on their way to the softmax, in every layer, however the model is written.

with Rewritten(batch, tokens, lambda scores: scores.masked_fill(hidden, -inf)):   # nobody looks at these tokens
    model.logits(pixels)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clairvit.tracing.attention import repeated, scaled_scores
from clairvit.tracing.undispatched import undispatched

Rewrite = Callable[[Tensor], Tensor]  # scores [B, H, queries, tokens] -> the same shape
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
MOST_EXTRA_KEYS = 2  # a class token that joins in a pool after the layers


class Rewritten(TorchFunctionMode):
    """`rewrite` sees the scores of each attention to the image's tokens, pools included; windows stay as they are."""

    def __init__(self, batch: int, tokens: int, rewrite: Rewrite) -> None:
        super().__init__()
        self.batch, self.tokens, self.rewrite = batch, tokens, rewrite
        self.seen = 0  # attention calls that were rewritten

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(func, args, kwargs)
        if func in _SOFTMAX:
            x = args[0] if args else kwargs["input"]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if x.ndim >= 3 and dim in (-1, x.ndim - 1) and self._to_tokens(x.shape[0], x.shape[-1]):
                rest = {name: value for name, value in kwargs.items() if name != "input"}
                return func(self._rewritten(x), *args[1:], **rest)
        if func is F.multi_head_attention_forward:
            with self:  # the mode is off inside a handler
                return undispatched(func)(*args, **kwargs)
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
        call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        q, k, v = call["query"], call["key"], call["value"]
        if not self._to_tokens(q.shape[0], k.shape[-2]) or call.get("is_causal"):
            return func(*args, **kwargs)
        scale = q.shape[-1] ** -0.5 if call.get("scale") is None else call["scale"]
        scores = scaled_scores(q, repeated(k, q), scale, call.get("attn_mask"))
        return self._rewritten(scores).softmax(-1).to(v.dtype) @ repeated(v, q)


def hiding(kept: Tensor) -> Rewrite:
    """Nobody looks at tokens that are not kept: bool [B, tokens]."""
    return lambda scores: scores.masked_fill(~kept[:, None, None, :], float("-inf"))
