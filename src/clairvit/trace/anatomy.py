"""Anatomy: one look at how a model is built, so that nobody has to say where its blocks, patches and class token are.

One forward of one image with every module watched. A block is the largest module that takes tokens and holds exactly
one attention call. The grid comes from the patch embedding, the prefix from the token count, the pooling from which
rows of the last attention the scores depend on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clairvit.errors import BadInput, CaptureError
from clairvit.models.layout import Layout, Pooling
from clairvit.models.model import Model
from clairvit.trace.attention import AttentionCall, Kind
from clairvit.trace.capture import Capture
from clairvit.trace.complaints import CHECKPOINTED, way_back
from clairvit.trace.grid import channels_first, in_order, off_proportion, one_image, square_patches
from clairvit.trace.guest import own_grad_mode, visiting

MOST_PREFIX_TOKENS = 64  # CLS, distillation, registers: nobody has more


@dataclass(frozen=True)
class Part:
    """One attention call of the model: what kind it is and which module is its block."""

    kind: Kind
    block: nn.Module | None  # None: no called module holds this attention alone
    grid: tuple[int, int] | None  # of the block's tokens
    queries: int
    keys: int


@dataclass(frozen=True)
class Anatomy:
    """What a recording must know before it starts."""

    layout: Layout | None  # None: no patch tokens were found (a CNN, say)
    parts: tuple[Part, ...]  # in the order of the calls
    writes_in_place: bool  # a block changes its own input: recordings must keep a copy
    sequence_first: bool  # blocks take [N, B, d] (the original CLIP code)
    whole_blocks: bool  # a block's output is the next one's input; else only its attention half is a module
    in_order: bool  # patch tokens come row by row, after the prefix

    @property
    def layers(self) -> tuple[Part, ...]:
        """The attention calls that are layers of the token stream (all but the pools)."""
        return tuple(part for part in self.parts if part.kind != "pool")


_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Anatomy]] = WeakKeyDictionary()


@own_grad_mode()
def anatomy(model: Model, pixels: Tensor) -> Anatomy:
    """Looked up, or found by one forward of the first image; remembered for each image size."""
    key = (tuple(pixels.shape[1:]), pixels.dtype, pixels.device, model.layout)
    found = _known.setdefault(model.module, {})
    if key not in found:
        found[key] = _look(model, pixels[:1])
    return found[key]


@dataclass(eq=False)
class _Visit:
    """One call of one module."""

    module: nn.Module
    tokens: Tensor | None  # the token tensor it was given
    version: int
    first_call: int  # attention calls before it
    output: Tensor | None = None
    calls: int = 0  # attention calls inside it
    in_place: bool = False


class _Watch:
    """Hooks on every module and an eye on every function, for one forward."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels
        self.capture = Capture(1, observer=self._see)
        self.stack: list[_Visit] = []
        self.visits: list[list[_Visit]] = []  # for each attention call, the modules around it, outermost first
        self.grids: list[tuple[int, int]] = []  # spatial sizes of the convolutions before the first attention
        self.read_by_head: list[Tensor] = []  # what the last linear layers were given, one vector an image

    def _see(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        while len(self.visits) < len(self.capture.calls):
            self.visits.append(list(self.stack))
            self.read_by_head.clear()
        if func in (F.conv2d, torch.conv2d) and not self.capture.calls:
            self.grids.append((out.shape[-2], out.shape[-1]))
        if func is F.linear and args and args[0].ndim == 2 and len(args[0]) == 1:
            self.read_by_head.append(args[0])

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = tokens_among(args, kwargs)
        if tokens is not None and (tokens is self.pixels or tokens.data_ptr() == self.pixels.data_ptr()):
            tokens = None
        version = 0 if tokens is None else tokens._version
        self.stack.append(_Visit(module, tokens, version, len(self.capture.calls)))

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        visit = self.stack.pop()
        visit.calls = len(self.capture.calls) - visit.first_call
        visit.output = tokens_among((out,) if isinstance(out, Tensor) else tuple(out) if _listy(out) else (), {})
        visit.in_place = visit.tokens is not None and visit.tokens._version != visit.version


def _listy(out: Any) -> bool:
    return isinstance(out, tuple | list)


def tokens_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first [B, N, d] or [B, h, w, d] float tensor a module is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim in (3, 4) and value.is_floating_point():
            return value
    return None


def _look(model: Model, pixels: Tensor) -> Anatomy:
    module = model.module
    pixels = pixels.detach().clone().requires_grad_(True)
    watch = _Watch(pixels)
    with visiting(module), torch.enable_grad():
        hooks = []
        try:
            for part in module.modules():
                if part is not module:
                    hooks.append(part.register_forward_pre_hook(watch.enter, with_kwargs=True))
                    hooks.append(part.register_forward_hook(watch.leave))
            with watch.capture, _first_forward(model, pixels):
                scores = model.logits(pixels)
        finally:
            for hook in hooks:
                hook.remove()
            watch.capture.observer = None  # the two hold each other; the graph should go when we do
    blocks = [_block_of(visits) for visits in watch.visits]
    calls = watch.capture.calls
    image = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    parts, layout = _arrange(calls, blocks, watch.grids, image)
    if model.layout is not None:
        _check_given(model.layout, parts)
    elif layout is not None:
        layout = _with_pooling(layout, calls, parts, [scores], watch.read_by_head)
    sorted_tokens = model.layout is not None or layout is None or _in_order(layout, blocks, pixels)
    in_place = any(visit is not None and visit.in_place for visit in blocks)
    seen = [visit for visit in blocks if visit is not None]
    # One image was looked at, so the axis of length 1 is the batch.
    sequence_first = any(v.tokens is not None and v.tokens.ndim == 3 and v.tokens.shape[0] != 1 for v in seen)
    return Anatomy(model.layout or layout, parts, in_place, sequence_first, _whole(seen), sorted_tokens)


def _in_order(layout: Layout, blocks: list[_Visit | None], pixels: Tensor) -> bool:
    told = [v.tokens for v in blocks if v is not None and v.tokens is not None and not v.in_place]
    streams = [one_image(tokens, (int(pixels.shape[-2]), int(pixels.shape[-1]))) for tokens in told]
    tokens = next((t for t in streams if len(t) == layout.tokens), None)  # [N, d]
    return tokens is None or in_order(tokens, layout, pixels)


@contextmanager
def _first_forward(model: Model, pixels: Tensor) -> Iterator[None]:
    """The first forward of an image size is where a size that does not fit shows."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, ValueError, RuntimeError) as error:
        rows, cols = pixels.shape[-2:]
        raise BadInput(
            f"{model.name} failed on an image of {rows} × {cols} pixels ({type(error).__name__}: {error}). If that is "
            "not a size it takes, pass tensors of the right size, or paths and PIL images: these are resized to "
            "cv.wrap(…, size=)."
        ) from error


def _check_given(layout: Layout, parts: tuple[Part, ...]) -> None:
    counts = sorted({part.queries for part in parts if part.kind == "tokens"})
    if counts and layout.tokens not in counts:
        rows, cols = layout.grid
        raise BadInput(
            f"layout= says {rows} × {cols} patches and {layout.prefix} prefix tokens, {layout.tokens} together, but "
            f"the model's attention is between {' or '.join(map(str, counts))}; expected the same number. "
            "Leave layout out to have it inferred, or change grid or prefix."
        )


def _whole(blocks: list[_Visit]) -> bool:
    """Is a block's output what the next block is given? Where no pair tells (one block), take it for granted."""
    told = [
        (a.output.data_ptr(), a.output.shape) == (b.tokens.data_ptr(), b.tokens.shape)
        for a, b in itertools.pairwise(blocks)
        if a.output is not None and b.tokens is not None
    ]
    return any(told) or not told


def _block_of(visits: list[_Visit]) -> _Visit | None:
    """Outermost first: the first module that takes tokens and holds this attention call alone."""
    return next((v for v in visits if v.calls == 1 and v.tokens is not None), None)


def _arrange(
    calls: list[AttentionCall], blocks: list[_Visit | None], grids: list[tuple[int, int]], image: tuple[int, int]
) -> tuple[tuple[Part, ...], Layout | None]:
    """Tell layers from pools, find each layer's grid, and the layout of the first one."""
    parts: list[Part] = []
    layout: Layout | None = None
    for call, visit in zip(calls, blocks, strict=True):
        tokens = None if visit is None or visit.tokens is None else visit.tokens
        count, grid = _count_tokens(tokens, call, image)
        if layout is None and call.queries == call.keys:
            layout = _lay_out(count, grid, grids, image)
        kind = _kind(call, count, layout)
        if grid is None and layout is not None and count == layout.tokens:
            grid = layout.grid
        grid = grid or square_patches(count, image)  # the later stages of a hierarchical model
        parts.append(Part(kind, None if visit is None else visit.module, grid, call.queries, call.keys))
    return tuple(parts), layout


def _count_tokens(
    tokens: Tensor | None, call: AttentionCall, image: tuple[int, int]
) -> tuple[int, tuple[int, int] | None]:
    if tokens is None:
        return call.queries, None
    if tokens.ndim == 3:
        return int(tokens.shape[0] * tokens.shape[1]), None  # one image: [1, N, d] or [N, 1, d]
    rows, cols = map(int, tokens.shape[2:] if channels_first(tokens, image) else tokens.shape[1:3])
    if off_proportion(rows, cols, image) > 0.2:
        return call.queries, None  # [B, windows, N, d], say
    return rows * cols, (rows, cols)


def _kind(call: AttentionCall, count: int, layout: Layout | None) -> Kind:
    tokens = count if layout is None else layout.tokens
    if call.lead == 1 and call.queries == call.keys and call.keys == count:
        return "tokens" if count == tokens else "window"  # "window": a later stage, on a smaller grid
    patches = tokens if layout is None else layout.patches
    if call.lead == 1 and call.queries != call.keys and patches <= call.keys <= tokens + MOST_PREFIX_TOKENS:
        return "pool"
    # The values of channels are as long as there are tokens.
    return "channel" if call.lead == 1 and call.v.shape[-1] == count else "window"


def _lay_out(
    count: int, grid: tuple[int, int] | None, grids: list[tuple[int, int]], image: tuple[int, int]
) -> Layout | None:
    if grid is not None:
        return Layout(grid, 0, "avg")
    for rows, cols in reversed(grids):  # the last convolution before the tokens is the patch embedding
        if 0 <= count - rows * cols <= MOST_PREFIX_TOKENS:
            return Layout((rows, cols), count - rows * cols, "avg")
    for prefix in range(min(count, MOST_PREFIX_TOKENS)):  # no convolution: patches cut by hand, squares in an image
        fit = square_patches(count - prefix, image)
        if fit is not None:
            return Layout(fit, prefix, "avg")
    return None


def _with_pooling(
    layout: Layout,
    calls: list[AttentionCall],
    parts: tuple[Part, ...],
    scores: list[Tensor],
    read_by_head: list[Tensor],
) -> Layout:
    """After the last attention every token goes its own way: rows with a gradient are rows the head reads."""
    own = [i for i, part in enumerate(parts) if part.kind != "pool"]
    if not own or parts[own[-1]].kind != "tokens" or layout.tokens != parts[own[-1]].queries:
        return layout  # windows, stages or channels come last: nothing reads single rows
    if not any(tensor.requires_grad for tensor in scores):
        raise CaptureError(
            "The model's output does not depend on its attention (detached output or torch.no_grad inside forward); "
            "expected a differentiable forward. Remove the no_grad, or pass layout=cv.Layout(…) to cv.wrap."
        )
    if not all(call.out.requires_grad for call in calls):
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
    with way_back():
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
