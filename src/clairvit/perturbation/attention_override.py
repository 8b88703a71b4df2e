"""Change attention scores before the softmax, in every layer, however the model is written.

with AttentionOverride(batch, tokens, lambda scores: scores.masked_fill(hidden, -inf)):   # no token attends to these
    model.logits(pixels)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clairvit.tracing import ops
from clairvit.tracing.attention_call import repeated, scaled_scores

ScoreTransform = Callable[[Tensor], Tensor]  # scores [B, H, queries, tokens] -> the same shape
MAX_EXTRA_KEYS = 2  # class tokens that are added in a pool after the layers


class AttentionOverride(TorchFunctionMode):
    """Apply `transform` to the scores of each attention over the image's tokens, pools included; not inside windows."""

    def __init__(self, batch: int, tokens: int, transform: ScoreTransform) -> None:
        super().__init__()
        self.batch, self.tokens, self.transform = batch, tokens, transform
        self.calls = 0  # attention calls that were changed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = ops.kind_of(func)
        if kind == ops.ATTENTION:
            return self._fused(func, args, kwargs)
        if kind == ops.SOFTMAX and ops.is_over_last_axis(args, kwargs):
            x = ops.first_argument(args, kwargs)
            if self._covers_image(x.shape[0], x.shape[-1]):
                options = {name: value for name, value in kwargs.items() if name != "input"}
                return func(self._override(x), *args[1:], **options)
        if kind == ops.MULTI_HEAD:
            with self:  # the mode is off inside a handler
                return ops.without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _covers_image(self, leading: int, keys: int) -> bool:
        """Return whether attention of this batch size and number of keys is over the whole image."""
        return leading % self.batch == 0 and 0 <= keys - self.tokens <= MAX_EXTRA_KEYS

    def _override(self, scores: Tensor) -> Tensor:
        self.calls += 1
        by_image = scores.reshape(self.batch, -1, *scores.shape[-2:])  # heads may be folded into the batch
        extra = by_image.shape[-1] - self.tokens
        changed = self.transform(by_image[..., extra:])
        return torch.cat([by_image[..., :extra], changed], -1).reshape(scores.shape)

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = ops.attention_arguments(args, kwargs)
        q, k, v = call["query"], call["key"], call["value"]
        if not self._covers_image(q.shape[0], k.shape[-2]):
            return func(*args, **kwargs)
        scale = ops.attention_scale(q, call.get("scale"))
        mask = ops.causal_mask(q, k) if call.get("is_causal") else call.get("attn_mask")
        scores = scaled_scores(q, repeated(k, q), scale, mask)
        return self._override(scores).softmax(-1).to(v.dtype) @ repeated(v, q)


def mask_tokens(kept: Tensor) -> ScoreTransform:
    """Return a transform that lets no token attend to others that are not kept, bool [B, tokens].

    A token that is not kept attends to itself: under a causal mask it might have no other key, and a softmax over none
    is undefined. No kept token sees it.
    """

    def mask(scores: Tensor) -> Tensor:  # [B, H, queries, tokens]
        hidden = ~kept[:, None, None, :]
        if scores.shape[-2] == scores.shape[-1]:
            hidden = hidden & ~torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
        return scores.masked_fill(hidden, float("-inf"))

    return mask


class KeyMask(AttentionOverride):
    """Let no token attend to others outside `visible`, bool [B, tokens]; fused attention stays fused."""

    def __init__(self, visible: Tensor) -> None:
        super().__init__(len(visible), visible.shape[1], mask_tokens(visible))
        self.visible = visible

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = ops.attention_arguments(args, kwargs)
        q, k = call["query"], call["key"]
        if not self._covers_image(q.shape[0], k.shape[-2]):
            return func(*args, **kwargs)
        self.calls += 1
        visible = F.pad(self.visible, (k.shape[-2] - self.tokens, 0), value=True)  # [B, keys]
        visible = visible.repeat_interleave(q.shape[0] // self.batch, 0)  # heads may be folded into the batch
        visible = visible.reshape(len(visible), *(1,) * (q.ndim - 2), -1)  # [B·, 1, …, keys]
        mask = ops.causal_mask(q, k) if call.get("is_causal") else call.get("attn_mask")
        if mask is None:
            mask = visible
        elif mask.dtype == torch.bool:
            mask = mask & visible
        else:
            mask = mask.masked_fill(~visible, float("-inf"))
        return func(**(call | {"attn_mask": mask, "is_causal": False}))
