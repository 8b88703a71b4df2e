"""Pooling: which rows of the last attention the head reads, told by what the scores depend on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import CaptureError
from clairvit.models.model import Layout, Pooling
from clairvit.tracing.attention import AttentionCall
from clairvit.tracing.autograd_errors import CHECKPOINTED, translate_autograd_errors
from clairvit.tracing.parts import AttentionSite


def with_pooling(
    layout: Layout,
    calls: list[AttentionCall],
    parts: tuple[AttentionSite, ...],
    scores: list[Tensor],
    read_by_head: list[Tensor],
) -> Layout:
    """After the last attention every token goes its own way: rows with a gradient are rows the head reads."""
    own = [i for i, part in enumerate(parts) if part.kind not in ("pool", "aside")]
    if not own or parts[own[-1]].kind != "tokens" or layout.tokens != parts[own[-1]].queries:
        return layout  # windows, stages or channels come last: nothing reads single rows
    if not any(tensor.requires_grad for tensor in scores):
        raise CaptureError(
            "The model's output does not depend on its attention (detached output or torch.no_grad inside forward); "
            "expected a differentiable forward. Remove the no_grad, or pass layout=cv.Layout(…) to cv.wrap."
        )
    if not all(call.out.requires_grad for call, part in zip(calls, parts, strict=True) if part.kind != "aside"):
        raise CaptureError(CHECKPOINTED)
    pools = [i for i in range(own[-1] + 1, len(parts)) if parts[i].kind == "pool"]
    # A new head is often all zeros and passes no gradient; then ask what its linear layers were given.
    for outputs in (scores, read_by_head):
        for i in reversed(pools):  # a pool that is built but not read has no gradient
            rows = _rows_read(calls[i], outputs)
            if rows is not None:
                picked = rows.nonzero().flatten().tolist()
                return Layout(layout.grid, layout.prefix, "map", tuple((row, 1 / len(picked)) for row in picked))
        rows = _rows_read(calls[own[-1]], outputs)
        if rows is not None:
            return _reading(layout, rows.nonzero().flatten().tolist(), rows)
    return _guessed(layout)


def _rows_read(call: AttentionCall, outputs: list[Tensor]) -> Tensor | None:
    """[queries]: how strongly the outputs depend on each row of an attention; None if they do not at all."""
    noise = torch.Generator().manual_seed(0)  # any direction will do, as long as it is not a special one
    score = [(o * torch.randn(o.shape, generator=noise).to(o)).sum() for o in outputs if o.requires_grad]
    if not score:
        return None
    with translate_autograd_errors():
        (gradient,) = torch.autograd.grad(torch.stack(score).sum(), call.out, retain_graph=True, allow_unused=True)
    if gradient is None or not gradient.any():
        return None
    return call.heads(gradient).float().abs().sum((0, 1, 3))


def _reading(layout: Layout, rows: list[int], weight: Tensor) -> Layout:
    prefix = [row for row in rows if row < layout.prefix]
    patches = [row for row in rows if row >= layout.prefix]
    if not patches:
        pooling: Pooling = "token" if len(prefix) == 1 else "distilled"
        return Layout(layout.grid, layout.prefix, pooling, tuple((row, 1 / len(prefix)) for row in prefix))
    every = range(layout.prefix, layout.tokens)
    # CLS beside the patch mean (DINOv2 heads): one row then weighs as much as all patches together.
    if prefix and float(weight[prefix].max()) > 4 * float(weight[patches].median()):
        strong = [row for row in prefix if float(weight[row]) > 4 * float(weight[patches].median())]
        own = tuple((row, 0.5 / len(strong)) for row in strong)
        return Layout(layout.grid, layout.prefix, "mixed", own + tuple((row, 0.5 / len(every)) for row in every))
    read = [*prefix, *every]
    return Layout(layout.grid, layout.prefix, "avg", tuple((row, 1 / len(read)) for row in read))


def _guessed(layout: Layout) -> Layout:
    """No gradient reaches the last attention (a block that starts at zero): the usual heads."""
    if layout.prefix:
        return Layout(layout.grid, layout.prefix, "token", ((0, 1.0),))
    return Layout(layout.grid, 0, "avg", tuple((row, 1 / layout.patches) for row in range(layout.patches)))


def pool_row(pools: tuple[AttentionCall, ...], layout: Layout) -> Tensor:
    """What an attention pool reads of each token; several class-attention layers (CaiT) pass on what they had."""
    row: Tensor | None = None
    for call in pools:
        queries = call.A().mean(1)  # [B, queries, keys]
        latent = sum(weight * queries[:, index] for index, weight in layout.read)
        attention = latent if call is pools[-1] and isinstance(latent, Tensor) else queries.mean(1)
        extra = attention.shape[1] - layout.tokens  # CLS among the keys
        if extra < 0:  # a pool that is not given the prefix tokens reads nothing of them
            attention, extra = F.pad(attention, (-extra, 0)), 0
        row = attention[:, extra:] + (0 if row is None else attention[:, :extra].sum(1, keepdim=True) * row)
    assert row is not None
    return row
