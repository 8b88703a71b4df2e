"""AttentionCall: one attention that the model computed, however it was written, in one common form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.numerics import on_tensor_cores, wide_product, widened

# reduced: from all tokens to fewer, spatially reduced keys; encoder: between other tokens than those of the layout that
# was given (the vision tower of a language model); query, cross, reverse: between the queries of a decoder, from these
# to the image tokens, and back; divided: along one axis of a clip; unrelated: attention that does not see the image, or
# that the scores do not read; member: of one of several networks side by side
Kind = Literal[
    "tokens",
    "pool",
    "window",
    "reduced",
    "channel",
    "encoder",
    "query",
    "cross",
    "reverse",
    "divided",
    "unrelated",
    "member",
]
DECODER_KINDS: tuple[Kind, ...] = ("query", "cross", "reverse")
Rows = Tensor | slice  # query rows: their indices, or a tile of them
TILE_SHARE = 0.25  # how large a tile [B, H, tile, N] may be, as a share of the values v of all layers
SUMS_TILE_SHARE = 0.03  # the same where only sums are wanted: the graph of the forward may still be there
SMALLEST_TILE_BYTES = 2**22  # 4 MiB: smaller tiles cost more in calls than they save


@dataclass(eq=False)
class AttentionCall:
    """`outputs` are tensors in the model's graph; `heads` turns them (or their gradients) into [B, H, queries, dh].

    There is one output, or several where a model computes the heads of a layer in calls of their own (`joined`). Fused
    calls keep q, k and the mask, from which A is derived on access. Explicit ones (matmul, softmax, matmul) keep the A
    and S that the model has already computed.
    """

    v: Tensor  # [B, H, keys, dh]
    outputs: tuple[Tensor, ...]
    forms: tuple[Callable[[Tensor], Tensor], ...]  # each output -> its heads, [B, h, queries, dh]
    q: Tensor | None = None  # [B, H, queries, dh]
    k: Tensor | None = None  # [B, H, keys, dh]
    scale: float = 1.0
    mask: Tensor | None = None  # added to the scores (or bool: True = may attend)
    weights: Tensor | None = None  # explicit A as it meets v, [B, H, queries, keys]
    scores: Tensor | None = None  # explicit S, before the softmax
    block: int = -1  # which block it belongs to, filled in by the recording
    kind: Kind = "tokens"
    parts: tuple[AttentionCall, ...] = ()  # the calls that it joins, as long as the recording has its graph

    @property
    def requires_grad(self) -> bool:
        """Whether each output is part of the graph."""
        return all(output.requires_grad for output in self.outputs)

    def heads(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the outputs, or tensors in their place such as their gradients, as [B, H, queries, dh]."""
        heads = [form(tensor) for form, tensor in zip(self.forms, tensors, strict=True)]
        return heads[0] if len(heads) == 1 else torch.cat(equally_wide(heads), 1)

    def output_of_head(self, head: int) -> tuple[int, int]:
        """Return which output holds a head, and which of its heads that is."""
        for index, (form, output) in enumerate(zip(self.forms, self.outputs, strict=True)):
            count = int(form(output.detach()).shape[1])
            if head < count:
                return index, head
            head -= count
        raise IndexError(head)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of A: (sequences, heads, queries, keys)."""
        of_queries = self.q if self.weights is None else self.weights
        assert of_queries is not None
        lead, heads, keys = self.v.shape[:3]
        return lead, heads, int(of_queries.shape[-2]), keys

    @property
    def queries(self) -> int:
        return self.shape[2]

    @property
    def keys(self) -> int:
        return int(self.v.shape[-2])

    @property
    def lead(self) -> int:
        """Sequences in the batch: the images, or images × windows."""
        return int(self.v.shape[0])

    def detach(self) -> None:
        """Keep the values, leave the graph."""
        self.v, self.outputs, self.parts = self.v.detach(), tuple(output.detach() for output in self.outputs), ()
        for name in ("q", "k", "mask", "weights", "scores"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.detach())

    def S(self, rows: Rows | None = None) -> Tensor:
        """Return the scaled scores before the softmax, [B, H, rows, keys]; `rows` selects queries."""
        if self.weights is not None:
            if self.scores is None or self.scores.shape != self.weights.shape:
                raise NotApplicable(
                    "The scores before this model's softmax were not seen.",
                    alternative="a method that reads attention and its gradient",
                )
            return _select(self.scores.detach(), rows)
        return scaled_scores(_required(self.q), _required(self.k), self.scale, self.mask, rows)

    def A(self, rows: Rows | None = None) -> Tensor:
        """Return the attention, [B, H, rows, keys]; row = query, rows sum to 1."""
        if self.weights is not None:
            return _wide(_select(self.weights.detach(), rows))
        return self.S(rows).softmax(-1)

    def G(self, gradient: Tensor, rows: Rows | None = None) -> Tensor:
        """Return dy/dA from the gradient [B, H, queries, dh] of the output: O = A v, so it is exactly gradient · vᵀ."""
        return wide_product(_select(gradient.detach(), rows), self.v.detach().transpose(-2, -1))


def are_alike(calls: Sequence[AttentionCall]) -> bool:
    """Return whether the calls of several layers can be read as one."""
    first = calls[0]
    if len({(call.v.shape, call.scale, call.kind, call.weights is None, call.q is None) for call in calls}) > 1:
        return False
    return not (any(call.mask is not None for call in calls) or (first.weights is None and first.q is None))


def joined(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Return calls that compute some heads of a layer each as one of all heads, [B, H, N, …], outside the graph.

    Scales that differ become part of q, and heads that are narrower than others are filled up with zeros, which changes
    neither A nor G.
    """
    first = calls[0]
    scales = {call.scale for call in calls}
    scale = first.scale if len(scales) == 1 else 1.0

    def together(name: str) -> Tensor | None:
        tensors = [tensor.detach() for tensor in (getattr(call, name) for call in calls) if tensor is not None]
        if len(tensors) < len(calls):
            return None
        if name == "q" and len(scales) > 1:
            tensors = [tensor * call.scale for tensor, call in zip(tensors, calls, strict=True)]
        return torch.cat(equally_wide(tensors), 1)

    v = together("v")
    assert v is not None
    q, k, weights, scores = (together(name) for name in ("q", "k", "weights", "scores"))
    return replace(
        first,
        v=v,
        outputs=tuple(output for call in calls for output in call.outputs),
        forms=tuple(form for call in calls for form in call.forms),
        q=q,
        k=k,
        scale=scale,
        mask=_joined_masks(calls),
        weights=weights,
        scores=scores,
        parts=tuple(calls),
    )


def can_join(calls: Sequence[AttentionCall]) -> bool:
    """Return whether calls have the same images, queries and keys, and all of them or none are fused."""
    return len({(call.lead, call.queries, call.keys, call.weights is None) for call in calls}) == 1


def _joined_masks(calls: Sequence[AttentionCall]) -> Tensor | None:
    """Return what is added to the scores of all heads, [B or 1, H, queries, keys]; None if no call has a mask."""
    if all(call.mask is None for call in calls):
        return None
    masks = []
    for call in calls:
        q = _required(call.q)
        mask = q.new_zeros(()) if call.mask is None else call.mask.detach()
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
        masks.append(mask.expand(call.lead, q.shape[1], call.queries, call.keys))
    return torch.cat(masks, 1)


def equally_wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, narrower ones filled up with zeros along the last axis."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor for tensor in tensors]


def merged(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Return calls that are alike as one, [layers·B, H, N, …]."""
    first = calls[0]

    def stacked(name: str) -> Tensor | None:
        tensors = [tensor.detach() for tensor in (getattr(call, name) for call in calls) if tensor is not None]
        return torch.cat(tensors) if len(tensors) == len(calls) else None

    v = stacked("v")
    assert v is not None
    q, k, weights, scores = (stacked(name) for name in ("q", "k", "weights", "scores"))
    return replace(first, v=v, outputs=(v,), forms=(_unchanged,), q=q, k=k, weights=weights, scores=scores, parts=())


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def scaled_scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None, rows: Rows | None = None) -> Tensor:
    """Return q kᵀ · scale + mask, [B, H, rows, keys]."""
    if on_tensor_cores(q):  # the scale comes after the product, where it is not rounded to half precision
        scores = wide_product(_select(q.detach(), rows), k.detach().transpose(-2, -1)).mul_(scale)
    else:
        scores = (_select(_wide(q), rows) * scale) @ _wide(k).transpose(-2, -1)
    if mask is None:
        return scores
    mask = mask.detach() if mask.shape[-2] == 1 else _select(mask.detach(), rows)
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def tile_bytes(call: AttentionCall, layers: int, *, sums_only: bool = False) -> int:
    """Return how many bytes a tile [B, H, tile, N] of one of `layers` such attentions may take.

    A trace keeps x, q, k, v and their gradients, about a third of what a plain forward + backward holds at its peak; a
    handful of tiles of this size fit into the rest.
    """
    share = min(SUMS_TILE_SHARE, TILE_SHARE) if sums_only else TILE_SHARE
    values = call.v.numel() * max(4, call.v.dtype.itemsize)  # their bytes in float32 at least
    return max(SMALLEST_TILE_BYTES, int(share * layers * values))


def is_large(call: AttentionCall, layers: int) -> bool:
    """Return whether A of one of `layers` such attentions is more than two tiles: better not computed as a whole."""
    whole = math.prod(call.shape) * max(4, call.v.dtype.itemsize)  # bytes of A
    return whole > 2 * tile_bytes(call, layers)


def common_form(tensor: Tensor, batch: int) -> Tensor:
    """Return [B, H, N, d], also from [B·H, N, d] (torch's multi-head attention) and [B, windows, H, N, d]."""
    if tensor.ndim == 3:
        lead = batch if tensor.shape[0] % batch == 0 else tensor.shape[0]
        return tensor.reshape(lead, -1, *tensor.shape[-2:])
    return tensor.flatten(0, tensor.ndim - 4)


def repeated(kv: Tensor, q: Tensor) -> Tensor:
    """Return the shared key or value heads of grouped-query attention, repeated for every query head."""
    if kv.ndim < 4 or kv.shape[-3] == q.shape[-3]:
        return kv
    return kv.repeat_interleave(q.shape[-3] // kv.shape[-3], -3)


def _select(matrix: Tensor, rows: Rows | None) -> Tensor:
    return matrix if rows is None else matrix[..., rows, :]


def _wide(tensor: Tensor) -> Tensor:
    return widened(tensor.detach())


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
