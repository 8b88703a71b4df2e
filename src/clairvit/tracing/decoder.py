"""Decoder: queries that read the image tokens by cross-attention and attend to each other (DETR, Q-Former, TrOCR).

Nothing is told from names or shapes: the first cross-attention has queries that do not depend on the image and values
that do; later calls are cross-attention as long as their keys do not depend on what the first one returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.models.model import Layout
from clairvit.tracing.attention_call import AttentionCall, Kind
from clairvit.tracing.module_state import translate_autograd_errors


def decoder_kinds(calls: Sequence[AttentionCall]) -> dict[int, Kind]:
    """Return the kinds of a decoder's attention calls by index: "cross", "query" and "reverse"; none: no decoder.

    Learned queries that read the image without attending to each other are an attention pool, not a decoder.
    """
    # Learned queries do not depend on the image, and read values that do.
    learned = (call.q is not None and not call.q.requires_grad and call.v.requires_grad for call in calls)
    first = next((index for index, is_learned in enumerate(learned) if is_learned), None)
    if first is None:
        return _queries_without_cross_attention(calls)
    queries = calls[first].queries
    kinds: dict[int, Kind] = {first: "cross"}
    for index in reversed(range(first)):  # before the first cross-attention the queries have not seen the image
        call = calls[index]
        if call.requires_grad or not call.queries == call.keys == queries:
            break
        kinds[index] = "query"
    for index in range(first + 1, len(calls)):
        call = calls[index]
        if call.k is None:
            continue
        reads_queries = _depends_on(call.k, calls[first].outputs)
        if call.queries == queries:
            kinds[index] = "query" if reads_queries and call.keys == queries else "cross"
        elif reads_queries and call.keys == queries:
            kinds[index] = "reverse"
    return dict(sorted(kinds.items())) if "query" in kinds.values() else {}


def _queries_without_cross_attention(calls: Sequence[AttentionCall]) -> dict[int, Kind]:
    """Return the attention between queries that read the image by other means (deformable attention samples it).

    These queries attend to each other before they have seen the image, and again afterwards.
    """
    unseen: set[int] = set()  # numbers of queries
    kinds: dict[int, Kind] = {}
    for index, call in enumerate(calls):
        if call.queries == call.keys and not call.requires_grad:
            unseen.add(call.queries)
        elif call.queries == call.keys and call.queries in unseen:
            kinds[index] = "query"
    return kinds


def _depends_on(tensor: Tensor, sources: Sequence[Tensor]) -> bool:
    if not tensor.requires_grad:
        return False
    with translate_autograd_errors():
        gradients = torch.autograd.grad(tensor.sum(), sources, retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in gradients)


def check_decoder(calls: Sequence[AttentionCall], layout: Layout) -> None:
    """Raise NotApplicable unless cross-attention of the decoder was seen, and all of it reads the layout's tokens."""
    if calls and not any(call.kind == "cross" for call in calls):
        raise NotApplicable(
            f"The {calls[0].queries} queries of this model's decoder read the image without a matrix of attention "
            "(deformable attention samples feature maps), and attention methods need one.",
            alternative="a gradient method",
        )
    if any(call.kind == "reverse" for call in calls):
        raise NotApplicable(
            "The image tokens of this model attend to the queries of its decoder too (two-way attention), for which "
            "attention methods are not defined.",
            alternative="a gradient method",
        )
    for call in calls:
        if call.kind == "cross" and call.keys != layout.tokens:
            raise NotApplicable(
                f"The decoder of this model attends from {call.queries} queries to {call.keys} keys, which are not its "
                f"{layout.tokens} image tokens (several feature maps, say).",
                alternative="a gradient method",
            )


def query_weights(last: AttentionCall, gradient: Tensor | None, layout: Layout) -> Tensor:
    """Return how much the score reads of each query, [1 or B, queries], as weights that sum to 1.

    Only operations on single queries follow the last attention of a decoder, so that the queries read are those with a
    gradient [B, H, queries, dh] there, in equal parts; without a gradient they are those that the model's output reads.
    """
    stated = last.v.new_zeros(last.queries, dtype=torch.promote_types(last.v.dtype, torch.float32))
    for row, weight in layout.read:
        stated[row] = weight
    if gradient is None:
        return stated[None]
    has_gradient = gradient.ne(0).any(1).any(-1)  # [B, queries]
    counts = has_gradient.sum(1, keepdim=True)
    return torch.where(counts > 0, has_gradient / counts.clamp(min=1), stated)


def cross_attention_row(calls: Sequence[AttentionCall], weights: Tensor) -> Tensor:
    """Return how much the queries of weights [1 or B, Q] read of each image token, [B, N]: the last cross-attention."""
    last = [call for call in calls if call.kind == "cross"][-1]
    return (weights[:, None] @ last.A().mean(1))[:, 0]
