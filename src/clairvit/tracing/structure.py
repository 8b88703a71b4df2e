"""Anatomy: one look at how a model is built, so that nobody has to say where its blocks, patches and class token are.

One forward of one image with every module watched. A block is the largest module that takes tokens and holds exactly
one attention call. The grid comes from the patch embedding, the prefix from the token count, the pooling from which
rows of the last attention the scores depend on. A model without attention has stages instead (`stages.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clairvit.errors import BadInput, ClairError
from clairvit.models.layout import Layout
from clairvit.models.model import Model
from clairvit.tracing.attention import AttentionCall, Kind
from clairvit.tracing.capture import Capture
from clairvit.tracing.gradient_barriers import Barrier, BarrierFinder
from clairvit.tracing.grid import channels_first, fits_image, in_order, one_image, square_patches
from clairvit.tracing.module_state import frozen_eval, own_grad_mode, this_thread_only
from clairvit.tracing.parts import MOST_PREFIX_TOKENS, AttentionSite
from clairvit.tracing.pooling import with_pooling
from clairvit.tracing.stages import Stage, StageOutput, find_stages


@dataclass(frozen=True)
class ModelStructure:
    """What a recording must know before it starts."""

    layout: Layout | None  # None: no patch tokens were found (a CNN, say)
    parts: tuple[AttentionSite, ...]  # in the order of the calls
    stages: tuple[Stage, ...]  # of a model without attention: its feature maps, first to last
    writes_in_place: bool  # a block changes its own input: recordings must keep a copy
    sequence_first: bool  # blocks take [N, B, d] (the original CLIP code)
    whole_blocks: bool  # a block's output is the next one's input; else only its attention half is a module
    in_order: bool  # patch tokens come row by row, after the prefix
    barriers: tuple[Barrier, ...] = ()  # layers that no gradient comes back through (quantised ones)

    @property
    def layers(self) -> tuple[AttentionSite, ...]:
        """The attention calls that are layers of the token stream."""
        return tuple(part for part in self.parts if part.kind not in ("pool", "aside"))


_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], ModelStructure]] = WeakKeyDictionary()


@own_grad_mode()
def model_structure(model: Model, pixels: Tensor) -> ModelStructure:
    """Looked up, or found by one forward of the first image; remembered as long as the model is built the same."""
    built = tuple(id(part) for part in model.module.modules()), getattr(model.module, "global_pool", None)
    key = (tuple(pixels.shape[1:]), pixels.dtype, pixels.device, model.layout, built)
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
    sees_image: bool  # the tokens depend on the pixels
    seen: StageOutput
    output: Tensor | None = None
    calls: int = 0  # attention calls inside it
    in_place: bool = False


class _Watch:
    """Hooks on every module and an eye on every function, for one forward."""

    def __init__(self, module: nn.Module, pixels: Tensor) -> None:
        self.pixels = pixels
        self.finder = BarrierFinder(module)
        self.capture = Capture(1, observer=self._see)
        self.stack: list[_Visit] = []
        self.visits: list[list[_Visit]] = []  # for each attention call, the modules around it, outermost first
        self.grids: list[tuple[int, int]] = []  # spatial sizes of the convolutions before the first attention
        self.read_by_head: list[Tensor] = []  # what the last linear layers were given, one vector an image
        self.outermost: list[StageOutput] = []  # every call of a module, as a tree
        self.called: Counter[nn.Module] = Counter()

    def _see(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        while len(self.visits) < len(self.capture.calls):
            self.visits.append(list(self.stack))
            self.read_by_head.clear()
        if func in (F.conv2d, torch.conv2d) and not self.capture.calls:
            self.grids.append((out.shape[-2], out.shape[-1]))
        if func is F.linear and args and args[0].ndim == 2 and len(args[0]) == 1:
            self.read_by_head.append(args[0])

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.finder.busy:
            return
        tokens = tokens_among(args, kwargs)
        if tokens is not None and (tokens is self.pixels or tokens.data_ptr() == self.pixels.data_ptr()):
            tokens = None
        version = 0 if tokens is None else tokens._version
        sees_image = tokens is not None and tokens.requires_grad
        seen = StageOutput(module, self.called[module])
        self.called[module] += 1
        (self.stack[-1].seen.parts if self.stack else self.outermost).append(seen)
        self.stack.append(_Visit(module, tokens, version, len(self.capture.calls), sees_image, seen))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if self.finder.busy:
            return None
        visit = self.stack.pop()
        linked = self.finder.check(module, args, kwargs, out)
        out = out if linked is None else linked
        visit.calls = len(self.capture.calls) - visit.first_call
        visit.output = tokens_among((out,) if isinstance(out, Tensor) else tuple(out) if _listy(out) else (), {})
        visit.in_place = visit.tokens is not None and visit.tokens._version != visit.version
        same = visit.output is visit.tokens and not visit.in_place
        visit.seen.gave(visit.tokens, visit.output, (self.pixels.shape[-2], self.pixels.shape[-1]), unchanged=same)
        return linked


def _listy(out: Any) -> bool:
    return isinstance(out, tuple | list)


def tokens_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first [B, N, d] or [B, h, w, d] float tensor a module is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim in (3, 4) and value.is_floating_point():
            return value
    return None


def _look(model: Model, pixels: Tensor) -> ModelStructure:
    module = model.module
    pixels = pixels.detach().clone().requires_grad_(True)
    watch = _Watch(module, pixels)
    with frozen_eval(module), torch.enable_grad():
        hooks = []
        try:
            for part in module.modules():
                if part is not module:
                    hooks.append(part.register_forward_pre_hook(this_thread_only(watch.enter), with_kwargs=True))
                    hooks.append(part.register_forward_hook(this_thread_only(watch.leave), with_kwargs=True))
            with watch.capture, _first_forward(model, pixels):
                scores = model.logits(pixels)
        finally:
            for hook in hooks:
                hook.remove()
            watch.capture.observer = None  # the two hold each other; the graph should go when we do
    calls = watch.capture.calls
    seeing = [_sees_image(call, visits) for call, visits in zip(calls, watch.visits, strict=True)]
    if not any(seeing):
        seeing = [True] * len(calls)  # none at all is another matter, said elsewhere
    blocks = [_block_of(visits) if sees else None for visits, sees in zip(watch.visits, seeing, strict=True)]
    image = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    parts, layout = _arrange(calls, seeing, blocks, watch.grids, image)
    if model.layout is not None:
        _check_given(model.layout, parts)
    elif layout is not None:
        layout = with_pooling(layout, calls, parts, [scores], watch.read_by_head)
    sorted_tokens = model.layout is not None or layout is None or _in_order(layout, blocks, pixels)
    in_place = any(visit is not None and visit.in_place for visit in blocks)
    seen = [visit for visit in blocks if visit is not None]
    # One image was looked at, so the axis of length 1 is the batch.
    sequence_first = any(v.tokens is not None and v.tokens.ndim == 3 and v.tokens.shape[0] != 1 for v in seen)
    stages = () if parts else find_stages(module, watch.outermost)
    barriers = tuple(watch.finder.barriers)
    return ModelStructure(
        model.layout or layout, parts, stages, in_place, sequence_first, _whole(seen), sorted_tokens, barriers
    )


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
    except (torch.OutOfMemoryError, ClairError):  # BadInput is a ValueError too
        raise
    except (AssertionError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        rows, cols = pixels.shape[-2:]
        raise BadInput(
            f"{model.name} failed on an image of {rows} × {cols} pixels ({type(error).__name__}: {error}). If that is "
            "not a size it takes, pass tensors of the right size, or paths and PIL images: these are resized to "
            "cv.wrap(…, size=)."
        ) from error


def _check_given(layout: Layout, parts: tuple[AttentionSite, ...]) -> None:
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


def _sees_image(call: AttentionCall, visits: list[_Visit]) -> bool:
    """Not so in a text tower, say. Under gradient checkpointing the output has no gradient, but the input has."""
    return call.out.requires_grad or any(visit.sees_image for visit in visits)


def _block_of(visits: list[_Visit]) -> _Visit | None:
    """Outermost first: the first module that takes tokens and holds this attention call alone."""
    return next((v for v in visits if v.calls == 1 and v.tokens is not None), None)


def _arrange(
    calls: list[AttentionCall],
    seeing: list[bool],
    blocks: list[_Visit | None],
    grids: list[tuple[int, int]],
    image: tuple[int, int],
) -> tuple[tuple[AttentionSite, ...], Layout | None]:
    """Tell layers from pools, find each layer's grid, and the layout of the first one."""
    parts: list[AttentionSite] = []
    layout: Layout | None = None
    for call, visit, sees_image in zip(calls, blocks, seeing, strict=True):
        if not sees_image:
            parts.append(AttentionSite("aside", None, None, call.queries, call.keys))
            continue
        tokens = None if visit is None or visit.tokens is None else visit.tokens
        count, grid = _count_tokens(tokens, call, image)
        if layout is None and (call.queries == call.keys or _reduces_keys(call, count)):
            layout = _lay_out(count, grid, grids, image)
        width = None if tokens is None else tokens.numel() // count  # channels of a token: one image was looked at
        kind = _kind(call, count, width, layout)
        if grid is None and layout is not None and count == layout.tokens:
            grid = layout.grid
        grid = grid or square_patches(count, image)  # the later stages of a hierarchical model
        parts.append(AttentionSite(kind, None if visit is None else visit.module, grid, call.queries, call.keys))
    return tuple(parts), layout


def _count_tokens(
    tokens: Tensor | None, call: AttentionCall, image: tuple[int, int]
) -> tuple[int, tuple[int, int] | None]:
    if tokens is None:
        return call.queries, None
    if tokens.ndim == 3:
        return int(tokens.shape[0] * tokens.shape[1]), None  # one image: [1, N, d] or [N, 1, d]
    rows, cols = map(int, tokens.shape[2:] if channels_first(tokens, image) else tokens.shape[1:3])
    if not fits_image(rows, cols, image):
        return call.queries, None  # [B, windows, N, d], say
    return rows * cols, (rows, cols)


def _kind(call: AttentionCall, count: int, width: int | None, layout: Layout | None) -> Kind:
    tokens = count if layout is None else layout.tokens
    if call.lead == 1 and call.queries == call.keys and call.keys == count:
        return "tokens" if count == tokens else "window"  # "window": a later stage, on a smaller grid
    patches = tokens if layout is None else layout.patches
    if call.lead == 1 and call.queries != call.keys and patches <= call.keys <= tokens + MOST_PREFIX_TOKENS:
        return "pool"
    if _reduces_keys(call, count):
        return "reduced"
    # The values of channels are as long as there are tokens, and the heads share all channels out among them.
    channels = call.lead == 1 and call.v.shape[-1] == count and width in (None, call.v.shape[1] * call.keys)
    return "channel" if channels else "window"


def _reduces_keys(call: AttentionCall, count: int) -> bool:
    """Does every token attend, to keys that were made fewer by a strided convolution or by pooling (SegFormer, PVT)?"""
    return call.lead == 1 and call.queries == count and 1 < call.keys < count


def _lay_out(
    count: int, grid: tuple[int, int] | None, grids: list[tuple[int, int]], image: tuple[int, int]
) -> Layout | None:
    if grid is not None:
        return Layout(grid, 0, "avg")
    # The last convolution before the tokens is the patch embedding, unless a later one made the keys fewer.
    fitting = [(rows, cols) for rows, cols in reversed(grids) if 0 <= count - rows * cols <= MOST_PREFIX_TOKENS]
    if fitting:
        rows, cols = min(fitting, key=lambda cells: count - cells[0] * cells[1])
        return Layout((rows, cols), count - rows * cols, "avg")
    for prefix in range(min(count, MOST_PREFIX_TOKENS)):  # no convolution: patches cut by hand, squares in an image
        fit = square_patches(count - prefix, image)
        if fit is not None:
            return Layout(fit, prefix, "avg")
    return None
