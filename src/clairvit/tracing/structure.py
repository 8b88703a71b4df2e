"""Structure: how a model is built, found without being told where its blocks, patches and class token are.

It takes one forward of one image with hooks on every module. A block is the largest module that takes tokens and holds
exactly one attention call, or those that compute the heads of one layer (`call_graph.py`). The grid comes from the
patch embedding, its place in the sequence from the tokens that depend on the pixels, the pooling from which rows of the
last attention the scores depend on. A model without attention has stages instead (`stages.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from clairvit.errors import BadInput, CaptureError, ClairError, NotApplicable
from clairvit.models.forward_errors import forward_failure
from clairvit.models.model import Layout, Model, Pooling
from clairvit.models.readout import BoundInputs, Readout, token_stream
from clairvit.models.state_hash import weights_check
from clairvit.models.submodules import weak_modules
from clairvit.models.through_no_grad import ThroughNoGrad
from clairvit.numerics import widened
from clairvit.tracing import ops
from clairvit.tracing.attention_call import DECODER_KINDS, AttentionCall, Kind, joined
from clairvit.tracing.call_graph import CallGraph, TokensRead
from clairvit.tracing.capture import Capture, stream_hooks
from clairvit.tracing.capture_plan import CapturePlan, PlanLearner
from clairvit.tracing.decoder import decoder_kinds
from clairvit.tracing.fingerprint import Fingerprint, Path, fingerprint
from clairvit.tracing.gradient_barriers import Barrier, BarrierFinder
from clairvit.tracing.gradient_cuts import GradientCuts, differ, lacks, pixel_gradient
from clairvit.tracing.grid import (
    MOST_OTHER_TOKENS,
    MOST_PREFIX_TOKENS,
    cells_of_image,
    channels_first,
    fits_image,
    locate_patches,
    one_image,
    square_patches,
)
from clairvit.tracing.image_region import ImageRegion, region_of_pixels
from clairvit.tracing.module_state import (
    CHECKPOINTED,
    frozen_eval,
    own_grad_mode,
    this_thread_only,
    traced_forward,
    translate_autograd_errors,
)
from clairvit.tracing.output_source import UNKNOWN, OutputSourceFinder, check_output
from clairvit.tracing.recorders.base import Op, Recorder
from clairvit.tracing.residual_sums import without_views
from clairvit.tracing.rows_by_value import rows_by_value
from clairvit.tracing.rules.table import HeadsJoin, RuleTable
from clairvit.tracing.stages import ModuleCall, Stage, find_stages


@weak_modules("block")
@dataclass(frozen=True)
class AttentionSite:
    """One attention call of the model: what kind it is and which module is its block."""

    kind: Kind
    block: nn.Module | None  # None: no called module holds this attention alone
    grid: tuple[int, ...] | None  # of the block's tokens
    queries: int
    keys: int
    heads_apart: int = 1  # how many attention calls of the model compute its heads
    heads_join: HeadsJoin = "concatenated"

    @property
    def is_layer(self) -> bool:
        """Whether it belongs to the token stream: no pool, no other encoder, no decoder, and it sees the image."""
        return self.kind in ("tokens", "window", "reduced", "channel")


UNNAMED = "they meet in the scores alone"  # what is known of members without attention


@dataclass(frozen=True)
class ModelStructure:
    """What a recording must know before it starts."""

    layout: Layout | None  # None: no patch tokens were found (a CNN, say)
    sites: tuple[AttentionSite, ...]  # in the order of the calls
    stages: tuple[Stage, ...]  # of a model without attention: its feature maps, first to last
    writes_in_place: bool  # a block changes its own input: recordings must keep a copy
    sequence_first: bool  # blocks take [N, B, d] (the original CLIP code)
    whole_blocks: bool  # a block's output is the next one's input; else only its attention half is a module
    in_order: bool  # patch tokens lie row by row in the sequence, and cover the image
    barriers: tuple[Barrier, ...] = ()  # layers that no gradient comes back through (quantised), or where it is cut
    is_detached: bool = False  # a detach() in the forward changes the gradient, but does not end it
    reads_unknown: bool = False  # which tokens the scores read cannot be told: these leave torch
    painted: bool = False  # no tokens are seen: the layout is cells of the image, which are painted over
    region: ImageRegion | None = None  # that the patches lie on, where it is not the whole image
    members: tuple[str, ...] = ()  # networks side by side in the module, whose layers do not feed each other
    notes: tuple[str, ...] = ()  # what had to be assumed about the output, shown with results
    plan: CapturePlan | None = field(default=None, compare=False, repr=False)  # None: every operation must be seen
    weights: Hashable = field(default=None, compare=False, repr=False)  # the `weights_check` it was found with
    written: frozenset[Path] = field(default=frozenset(), compare=False, repr=False)  # by the module's own forward
    facts: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # what else was found out since

    @cached_property
    def layer_calls(self) -> tuple[int, ...]:
        """Which attention calls are layers of the token stream."""
        return tuple(index for index, site in enumerate(self.sites) if site.is_layer)

    def channels_first(self, feature_map: Tensor, pixels: Tensor) -> bool:
        """Return whether a feature map of images `pixels` [B, 3, H, W] is [B, d, h, w], not [B, h, w, d]."""
        image = (int(pixels.shape[-2]), int(pixels.shape[-1]))
        return channels_first(feature_map, image, tie=bool(self.stages))

    def as_tokens(self, tensor: Tensor, pixels: Tensor) -> Tensor:
        """Return [B, N, d], also from [N, B, d] and from feature maps [B, h, w, d] or [B, d, h, w]."""
        if tensor.ndim == 3:
            return tensor.transpose(0, 1) if self.sequence_first else tensor
        return tensor.flatten(2).transpose(1, 2) if self.channels_first(tensor, pixels) else tensor.flatten(1, 2)

    @cached_property
    def decoder_calls(self) -> tuple[int, ...]:
        """Which attention calls belong to a decoder."""
        return tuple(index for index, site in enumerate(self.sites) if site.kind in DECODER_KINDS)

    @cached_property
    def heads_apart(self) -> tuple[int, ...]:
        """How many attention calls of the model compute the heads of each call."""
        return tuple(site.heads_apart for site in self.sites)

    def check_members(self, model: str, reader: str) -> None:
        """Raise NotApplicable if networks lie side by side in the module, none of which is what `reader` reads."""
        if not self.members:
            return
        raise NotApplicable(
            f"{model} holds several networks side by side (an ensemble, mirrored copies, a second pass): "
            f"{self.members_apart}, so that there is no one chain of layers for {reader} to read; expected one "
            "network. Explain each network by itself: cv.explain(model.part, …).",
            alternative="a perturbation method",
        )

    @property
    def members_apart(self) -> str:
        """What the networks side by side are, in words."""
        if self.members == (UNNAMED,):
            return UNNAMED
        names = list(dict.fromkeys(f"'{name}'" if name else "the module itself" for name in self.members))
        return (
            f"{names[0]} runs on several versions of each image"
            if len(names) == 1
            else (f"{' and '.join(names)} do not feed each other")
        )

    def check_rules(self, table: RuleTable, reader: str) -> None:
        """Raise NotApplicable if a rule table would take the pieces of an output projection for layers of their own."""
        joins = {site.heads_join for site in self.sites} - {"concatenated"}
        if not all(table.is_the_same_in_parts(join) for join in joins):
            raise NotApplicable(
                f"Each head of this model has an output projection of its own, and the rules '{table}' of {reader} "
                "share out relevance within one linear layer or sum, so that the map would be another one than that of "
                "the same model with one projection; expected heads that are concatenated before it.",
                alternative="a gradient method",
            )

    @property
    def attention_seen(self) -> str:
        """How many attention calls were seen, in words, and of what size, where none is between all tokens."""
        if not self.sites:
            return "no attention call was seen"
        count = f"{len(self.sites)} attention call{'s were' if len(self.sites) > 1 else ' was'} seen"
        first = self.sites[0]
        size = f"the first has {first.queries} queries and {first.keys} keys"
        return count if self.layers else f"{count}, none between all tokens of an image ({size})"

    @property
    def heads_apart_of_pools(self) -> tuple[int, ...]:
        """The same of the calls after the layers."""
        return self.heads_apart[self.last_layer_call + 1 :]

    @cached_property
    def last_layer_call(self) -> int:
        """The attention call of the last layer; -1 if there is none."""
        return self.layer_calls[-1] if self.layer_calls else -1

    @cached_property
    def layers(self) -> tuple[AttentionSite, ...]:
        """The attention calls that are layers of the token stream."""
        return tuple(self.sites[index] for index in self.layer_calls)


@dataclass(frozen=True, eq=False)
class _Remembered:
    """A structure, and the state of the module that it was found in."""

    structure: ModelStructure
    state: Fingerprint | None  # None: it cannot be told, so that the structure is never used again


FIRST_PASS = "first pass"  # the image that the structure was found with, and its scores: until a second one is made
MOST_STRUCTURES = 16  # of one module: one for each size of images

_structures: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, _Remembered]] = WeakKeyDictionary()


@own_grad_mode()
def model_structure(model: Model, pixels: Tensor) -> ModelStructure:
    """Return the structure: found by one forward of the first image, remembered until the module is changed."""
    module = model.module
    while isinstance(module, BoundInputs):
        module = module.module
    stated = module.__dict__.get("structure")  # of a sub-network, which has it from the model that it is a part of
    if isinstance(stated, ModelStructure):
        return stated
    with frozen_eval(model.module):
        if isinstance(model.module, Readout):
            model.module.prepare(pixels[:1])
        key = (
            tuple(pixels.shape[1:]),
            pixels.dtype,
            pixels.device,
            model.layout,
            model.assumes_classes,
            model.through_no_grad,
        )
        weights = weights_check(model.module)
        remembered = _structures.setdefault(model.module, OrderedDict())
        entry = remembered.get(key)
        can_hold = entry is not None and entry.state is not None and entry.structure.weights == weights
        if entry is not None and can_hold and entry.state == fingerprint(model.module, entry.structure.written):
            return entry.structure  # nothing has changed that decides it
    entry = remembered[key] = _look_at(model, pixels[:1], weights)
    remembered.move_to_end(key)
    while len(remembered) > MOST_STRUCTURES:
        remembered.popitem(last=False)
    return entry.structure


def forget_structures(module: nn.Module) -> None:
    """Forget what was found out about a module: a pass took another path than the structure says."""
    _structures.pop(module, None)


def _look_at(model: Model, pixels: Tensor, weights: Hashable) -> _Remembered:
    """Find the structure, and which attributes the module's own forward writes: these decide nothing."""
    with frozen_eval(model.module):
        before = fingerprint(model.module)
    structure = _find_structure(model, pixels)
    with frozen_eval(model.module):
        after = fingerprint(model.module)
        if before is None or after is None:
            return _Remembered(replace(structure, weights=weights), None)
        written = before.changed_paths(after)
        state = fingerprint(model.module, written) if written else after
    return _Remembered(replace(structure, weights=weights, written=written), state)


@dataclass(eq=False)
class _Visit:
    """One call of one module."""

    module: nn.Module
    tokens: Tensor | None  # the token tensor among its arguments
    version: int
    node: Any  # where these tokens lie in the autograd graph when the module is entered; None: nowhere
    first_call: int  # attention calls before it
    sees_image: bool  # the tokens depend on the pixels
    call: ModuleCall
    output: Tensor | None = None
    calls: int = 0  # attention calls inside it
    in_place: bool = False


class _ModuleVisits(Recorder):
    """Hooks on every module, and the attention, convolutions and linear layers, of one forward."""

    kinds = frozenset(
        {ops.ATTENTION, ops.SOFTMAX, ops.CONV, ops.LINEAR, ops.BATCH_NORM, ops.BIASED_MATMUL, *ops.MATRIX_PRODUCTS}
    )

    def __init__(self, module: nn.Module, pixels: Tensor) -> None:
        self.module = module
        self.pixels = pixels
        self.finder = BarrierFinder(module)
        self.calls: list[AttentionCall] = []  # of the capture, which shows its operations to this recorder
        self.stack: list[_Visit] = []
        self.visits: list[list[_Visit]] = []  # for each attention call, the modules around it, outermost first
        self.grad_enabled: list[bool] = []  # for each attention call; False inside torch.no_grad or a checkpoint
        self.grids: list[tuple[int, ...]] = []  # sizes of the convolutions' outputs before the first attention
        self.embedded = 1  # how many images the last of these convolutions saw
        self.read_by_head: list[Tensor] = []  # inputs of the last linear layers, one vector per image
        self.outermost: list[ModuleCall] = []  # every call of a module, as a tree
        self.call_counts: Counter[nn.Module] = Counter()
        self.learner = PlanLearner()

    def on_op(self, op: Op) -> None:
        if len(self.visits) == len(op.calls):
            self.learner.operation(op.kind)
        while len(self.visits) < len(op.calls):
            self.learner.call(op.calls[len(self.visits)])
            self.visits.append(list(self.stack))
            self.grad_enabled.append(torch.is_grad_enabled())
            self.read_by_head.clear()
        if op.kind == ops.CONV and not op.calls:
            is_clip = self.pixels.ndim == 5 and op.output.ndim == 4  # whose frames are a batch
            sides = (len(op.output), *op.output.shape[-2:]) if is_clip else op.output.shape[2:]
            self.grids.append(tuple(map(int, sides)))  # rows and columns, or frames, rows and columns
            self.embedded = len(op.output)
        if op.kind == ops.LINEAR and op.args and op.args[0].ndim == 2 and len(op.args[0]) == 1:
            self.read_by_head.append(op.args[0])

    def hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for module in self.module.modules():
            if module is not self.module:
                handles.append(module.register_forward_pre_hook(this_thread_only(self._enter), with_kwargs=True))
                handles.append(module.register_forward_hook(this_thread_only(self._leave), with_kwargs=True))
        return handles

    def place(self) -> tuple[str, str]:
        """Return the name and the type of the module that is running."""
        module = self.stack[-1].module if self.stack else self.module
        return self.finder.names.get(id(module), ""), type(module).__name__

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.finder.busy:
            return
        self.learner.boundary(module, leaving=False)
        tokens = tokens_among(args, kwargs)
        if tokens is not None and (tokens is self.pixels or tokens.data_ptr() == self.pixels.data_ptr()):
            tokens = None
        version = _version(tokens)
        sees_image = tokens is not None and tokens.requires_grad
        call = ModuleCall(module, self.call_counts[module])
        self.call_counts[module] += 1
        (self.stack[-1].call.inner if self.stack else self.outermost).append(call)
        node = None if tokens is None else tokens.grad_fn
        self.stack.append(_Visit(module, tokens, version, node, len(self.calls), sees_image, call))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if self.finder.busy:
            return None
        self.learner.boundary(module, leaving=True)
        visit = self.stack.pop()
        linked = self.finder.check(module, args, kwargs, out)
        out = out if linked is None else linked
        visit.calls = len(self.calls) - visit.first_call
        outputs = (out,) if isinstance(out, Tensor) else tuple(out) if isinstance(out, tuple | list) else ()
        visit.output = tokens_among(outputs, {})
        visit.in_place = visit.tokens is not None and _version(visit.tokens) != visit.version
        same = visit.output is visit.tokens and not visit.in_place
        image = (self.pixels.shape[-2], self.pixels.shape[-1])
        visit.call.set_output(visit.tokens, visit.output, image, unchanged=same)
        return linked


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def tokens_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first [B, N, d] or [B, h, w, d] float tensor a module is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim in (3, 4) and value.is_floating_point():
            return value
    return None


@dataclass(eq=False)
class _Look:
    """One forward of one image, with all that was seen of it."""

    pixels: Tensor
    watch: _ModuleVisits
    tokens_read: TokensRead
    output_source: OutputSourceFinder
    cuts: GradientCuts
    scores: Tensor

    @property
    def calls(self) -> list[AttentionCall]:
        return self.watch.calls

    @cached_property
    def gradient(self) -> Tensor | None:
        return pixel_gradient(self.scores, self.pixels)


def _look(model: Model, pixels: Tensor, mode: TorchFunctionMode | None = None, *, gradient: bool = True) -> _Look:
    """Run the model once; `mode` may keep gradients on, `gradient=False` switches them off."""
    module = model.module
    pixels = pixels.detach().clone().requires_grad_(gradient)
    watch, tokens_read, output_source = _ModuleVisits(module, pixels), TokensRead(), OutputSourceFinder(module, pixels)
    cuts = GradientCuts(watch.place)
    capture = Capture(1, recorders=(watch, tokens_read, cuts, *([output_source] if model.assumes_classes else [])))
    watch.calls = capture.calls
    with frozen_eval(module), torch.set_grad_enabled(gradient), traced_forward():
        hooks: list[RemovableHandle] = []
        try:
            hooks += watch.hooks()
            hooks += stream_hooks(module, capture)
            with capture, _first_forward(model, pixels), mode or nullcontext():
                scores = model.logits(pixels)
        finally:
            for hook in hooks:
                hook.remove()
    return _Look(pixels, watch, tokens_read, output_source, cuts, scores)


@dataclass(frozen=True, eq=False)
class _Sight:
    """The look that shows most of the model's graph, and what the model's own forward lacks of it."""

    look: _Look
    barriers: tuple[Barrier, ...] = ()
    is_detached: bool = False  # a detach() changes the gradient, but does not end it


def _find_sight(model: Model, pixels: Tensor) -> _Sight:
    """Look at a forward pass; where it leaves the graph, look again with gradients kept on."""
    try:
        look = _look(model, pixels)
    except BadInput:  # it may take no tensor that requires a gradient (numpy)
        look = _look(model, pixels, gradient=False)
    cuts = dict(look.cuts.cuts)
    barriers: list[Barrier] = []
    is_detached = False
    for mode, causes in (
        (ThroughNoGrad(), ("no_grad", "inference_mode")),
        (ThroughNoGrad(detached=True), ("detach", "outside torch")),
    ):
        cut = next((cuts[cause] for cause in causes if cause in cuts), None)
        if cut is None and look.pixels.requires_grad:
            continue
        try:
            further = _look(model, pixels, mode)
        except BadInput:
            continue
        cuts |= {cause: cut_there for cause, cut_there in further.cuts.cuts.items() if cause not in cuts}
        if len(further.calls) != len(look.calls):
            continue  # another path when gradients are on: nothing of it can be compared
        # What a decoder detaches (the queries that RT-DETR chooses) is left out of the gradient on purpose.
        on_purpose = mode.detached and any(call.requires_grad for call in look.calls)
        blocked = not on_purpose and lacks(look.calls, further.calls)
        if blocked or (look.gradient is None and further.gradient is not None):
            barriers.append(cut or Barrier("", type(model.module).__name__, "unknown"))
            look = further
        elif not look.watch.finder.barriers and differ(look.gradient, further.gradient):
            barriers += [cut] if cut is not None and cut.is_passable else []
            is_detached = is_detached or (cut is not None and not cut.is_passable)
    if not look.scores.requires_grad and not barriers:
        order = ("outside torch", "detach", "no_grad", "inference_mode")
        unknown = Barrier("", type(model.module).__name__, "unknown")
        barriers = [next((cuts[cause] for cause in order if cause in cuts), unknown)]
    return _Sight(look, (*barriers, *look.watch.finder.barriers), is_detached)


def _find_structure(model: Model, pixels: Tensor) -> ModelStructure:
    module = model.module
    sight = _find_sight(model, pixels)
    look, watch = sight.look, sight.look.watch
    pixels, scores, tokens_read = look.pixels, look.scores, look.tokens_read
    graph = CallGraph(look.calls, [scores], tokens_read)
    heads_apart = graph.heads()
    firsts = [sum(heads_apart[:index]) for index in range(len(heads_apart))]  # of each layer's calls
    calls = [_of_all_heads(look.calls[i : i + n]) for i, n in zip(firsts, heads_apart, strict=True)]
    around = [watch.visits[first] for first in firsts]  # the modules around each call
    sees_image = [
        _sees_image(call, visits, watch.grad_enabled[first])
        for call, visits, first in zip(calls, around, firsts, strict=True)
    ]
    # Layers that are hidden from torch may lie between head and scores.
    source = UNKNOWN if sight.barriers else look.output_source.source(scores)
    notes = check_output(model, source, scores) if model.assumes_classes else ()
    if not any(sees_image):
        sees_image = [True] * len(calls)  # none at all is reported elsewhere
    block_of = _block_of if pixels.ndim == 4 else _block_of_clip
    blocks = [
        block_of(visits, first, count) if sees else None
        for visits, first, count, sees in zip(around, firsts, heads_apart, sees_image, strict=True)
    ]
    blocks = _with_stream(blocks, scores)
    image = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    sites, layout = _classify(calls, sees_image, blocks, watch.grids, image, _fitting(model.layout, calls))
    sites = tuple(replace(site, heads_apart=count) for site, count in zip(sites, heads_apart, strict=True))
    joins = [graph.join_of(first, count) for first, count in zip(firsts, heads_apart, strict=True)]
    sites = tuple(replace(site, heads_join=join) for site, join in zip(sites, joins, strict=True))
    sites, members = _without_other_networks(sites, graph, firsts, around, module)
    if not members and pixels.ndim == 4 and token_stream(module) is None:
        sites, members = _without_copies_of_the_image(sites, blocks, module, watch.embedded)
    if not members and graph.joins_networks():
        sites, members = _as_members(sites), (UNNAMED,)
    blocks = [None if site.kind == "unrelated" else visit for visit, site in zip(blocks, sites, strict=True)]
    tokens_read.forget()
    if token_stream(module) is not None:  # a readout that names its layers says where the patches are too
        layout = model.layout
    visits = [
        visit
        for visit, site in zip(blocks, sites, strict=True)
        if visit is not None and site.kind not in ("encoder", "member", *DECODER_KINDS)
    ]
    if model.layout is not None:
        _check_layout(model.layout, sites)
    located, region = layout, None
    if layout is not None and token_stream(module) is None:
        located, region = _located(layout, visits, calls, sites, pixels)
    stages = () if sites else find_stages(module, watch.outermost)
    painted = layout is None and model.layout is None and not stages and not sites and bool(sight.barriers)
    if painted and pixels.ndim == 4:
        layout = located = Layout(cells_of_image(image), 0, "avg")
    if stages and not isinstance(module, Readout):
        region = _region_of_stages(model, sight.look, stages[-1].grid)
    stated = _stated_layout(model, located or layout, sites)
    reads_unknown = stated is None and not scores.requires_grad
    if stated is None and layout is not None:
        layout = with_pooling(located or layout, calls, sites, [scores], watch.read_by_head)
        by_value = _pooling_by_value(model, pixels, layout, calls, sites) if reads_unknown else None
        layout, reads_unknown = by_value or layout, reads_unknown and by_value is None
        if pixels.ndim == 5 and layout.prefix and visits and sites[-1].kind == "window":
            layout = _with_rows_of_output(layout, visits[-1].output, [scores])
    inputs = [visit.tokens for visit in visits]
    if members and stages:  # of one of the networks, whose grid serves for painting over patches
        layout, stages = Layout(stages[-1].grid, 0, "avg"), ()
    return ModelStructure(
        layout=stated or layout,
        sites=sites,
        stages=stages,
        writes_in_place=any(visit.in_place for visit in visits),
        # One image was looked at, so the axis of length 1 is the batch.
        sequence_first=any(x is not None and x.ndim == 3 and x.shape[0] != 1 for x in inputs),
        whole_blocks=_are_whole(visits),
        in_order=region is None and (model.layout is not None or layout is None or located is not None),
        region=region,
        barriers=sight.barriers,
        is_detached=sight.is_detached,
        reads_unknown=reads_unknown,
        painted=painted,
        members=members,
        notes=notes,
        plan=watch.learner.plan(module),
        facts={FIRST_PASS: (pixels.detach(), scores.detach())},
    )


def _region_of_stages(model: Model, look: _Look, grid: tuple[int, int]) -> ImageRegion | None:
    """Return the part of the image that a CNN's scores depend on; None: all of it, or they depend on none."""
    region = _region_read(look, grid)
    if region is None:
        return None
    noise = torch.randn(
        look.pixels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(look.pixels)
    # of the user's image, black bars may be what no unit passes on
    mode = ThroughNoGrad(detached=True) if look.cuts.cuts else None
    return _region_read(_look(model, noise, mode), grid)


def _region_read(look: _Look, grid: tuple[int, int]) -> ImageRegion | None:
    if look.gradient is None:
        return None
    weight = look.gradient[0].abs().sum(0)
    return region_of_pixels(weight.sum(0) if weight.ndim == 3 else weight, grid)


def _stated_layout(model: Model, inferred: Layout | None, sites: tuple[AttentionSite, ...]) -> Layout | None:
    """Return the layout that the user stated, with the rows that a readout says it reads; None: rows are inferred."""
    layout, last = model.layout or inferred, next((site for site in reversed(sites) if site.is_layer), None)
    if layout is None or last is None or last.kind != "tokens" or last.queries != layout.tokens:
        return model.layout
    read = model.module.read_layout(layout) if isinstance(model.module, Readout) else None
    return read or model.layout


def _located(
    layout: Layout, blocks: list[_Visit], calls: list[AttentionCall], sites: tuple[AttentionSite, ...], pixels: Tensor
) -> tuple[Layout | None, ImageRegion | None]:
    """Return `locate_patches` of the first tokens [N, d] of the layout: a block's input, or values of an attention."""
    inputs = [visit.tokens for visit in blocks if visit.tokens is not None and not visit.in_place]
    streams = (one_image(tokens, (int(pixels.shape[-2]), int(pixels.shape[-1]))) for tokens in inputs)
    tokens = next((tokens for tokens in streams if len(tokens) == layout.tokens), None)
    if tokens is not None:
        return locate_patches(tokens, layout, pixels)
    # The values of a block that is no module, or that overwrites its input, are made of each token by itself.
    first = next((call.v for call, site in zip(calls, sites, strict=True) if site.kind == "tokens"), None)
    if first is None or len(first) != 1 or first.shape[2] != layout.tokens:
        return layout, None
    try:
        return locate_patches(first[0].transpose(0, 1).flatten(1), layout, pixels)
    except CaptureError:  # it overwrites what its own gradient needs, which methods that read gradients report
        return layout, None


@contextmanager
def _first_forward(model: Model, pixels: Tensor) -> Iterator[None]:
    """Translate errors of the first forward of an image size: that is where a size that does not fit shows."""
    try:
        yield
    except (torch.OutOfMemoryError, ClairError):  # BadInput is a ValueError too
        raise
    except (AssertionError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise BadInput(" ".join(forward_failure(model, pixels, error))) from error


def _fitting(layout: Layout | None, calls: list[AttentionCall]) -> Layout | None:
    """Return the layout that was given, if an attention call is between exactly its tokens."""
    counts = {call.queries for call in calls if call.lead == 1 and call.queries == call.keys}
    return layout if layout is not None and layout.tokens in counts else None


def _check_layout(layout: Layout, sites: tuple[AttentionSite, ...]) -> None:
    counts = sorted({site.queries for site in sites if site.kind == "tokens"})
    if counts and layout.tokens not in counts:
        sides = " × ".join(map(str, layout.grid))
        others = f"{layout.prefix} prefix tokens" + (f" and {layout.suffix} suffix tokens" if layout.suffix else "")
        raise BadInput(
            f"layout= says {sides} patches and {others}, {layout.tokens} together, but the model's attention "
            f"is between {' or '.join(map(str, counts))}; expected the same number. "
            "Leave layout out to have it inferred, or change grid, prefix or suffix."
        )


# Autograd nodes that mix channels or tokens: a path without them carries the token stream.
_MIXING = ("Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "ScaledDot", "Softmax")
_SUMS = ("Add", "Sub", "Stack", "Lerp")


def _with_stream(blocks: list[_Visit | None], scores: Tensor) -> list[_Visit | None]:
    """Return the blocks, None in the place of attention modules whose input is not the token stream.

    Where norm and residual sum lie in the code around an attention module, it is given a normalised copy of the stream.
    A module is given the stream itself if it takes the output of the block before, hands its own on to the next one, or
    if its input is added to something, inside or behind it. A module without a graph is left as it is.
    """
    chained = {
        id(visit)
        for a, b in itertools.pairwise(blocks)
        if a is not None and b is not None and a.output is not None and b.tokens is not None
        if a.output.data_ptr() == b.tokens.data_ptr()
        for visit in (a, b)
    }
    unclear = [block for block in blocks if block is not None and id(block) not in chained]
    terms = _terms_of_sums(scores) if unclear else set()

    def is_given_stream(visit: _Visit) -> bool:
        return id(visit) in chained or visit.node is None or without_views(visit.node) in terms or _goes_on(visit)

    return [block if block is not None and is_given_stream(block) else None for block in blocks]


def _terms_of_sums(scores: Tensor) -> set[Any]:
    """Return the autograd nodes of all terms of sums of two activations that the scores depend on."""
    terms: set[Any] = set()
    pending, visited = [scores.grad_fn], {None, scores.grad_fn}
    while pending:
        node = pending.pop()
        if node is None:
            continue
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if len(parents) > 1 and node.name().startswith(_SUMS):
            terms.update(map(without_views, parents))
        pending += [parent for parent in parents if parent not in visited]
        visited.update(parents)
    return terms


def _goes_on(visit: _Visit) -> bool:
    """Return whether the tokens that a module is given go on in its output, past all matrix products."""
    end = None if visit.output is None else visit.output.grad_fn
    if end is None:
        return True
    oldest, pending, visited = visit.node._sequence_nr(), [end], {end}
    while pending:
        node = pending.pop()
        if node is visit.node:
            return True
        for parent, _ in node.next_functions:
            if parent is None or parent in visited or parent._sequence_nr() < oldest:
                continue
            visited.add(parent)
            if not parent.name().startswith(_MIXING):
                pending.append(parent)
    return False


def _are_whole(blocks: list[_Visit]) -> bool:
    """Return whether a block's output is the next block's input; True where no pair of blocks can tell."""
    same = [
        (a.output.data_ptr(), a.output.shape) == (b.tokens.data_ptr(), b.tokens.shape)
        for a, b in itertools.pairwise(blocks)
        if a.output is not None and b.tokens is not None
    ]
    return any(same) or not same


def _sees_image(call: AttentionCall, visits: list[_Visit], grad_enabled: bool) -> bool:
    """Return whether an attention depends on the image; under gradient checkpointing only its input shows it.

    The first self-attention of a decoder does not: it is between queries that have not looked at the image yet.
    """
    return call.requires_grad or (not grad_enabled and any(visit.sees_image for visit in visits))


def _of_all_heads(calls: Sequence[AttentionCall]) -> AttentionCall:
    return joined(calls) if len(calls) > 1 else calls[0]


def _without_other_networks(
    sites: tuple[AttentionSite, ...],
    graph: CallGraph,
    firsts: Sequence[int],
    around: Sequence[list[_Visit]],
    module: nn.Module,
) -> tuple[tuple[AttentionSite, ...], tuple[str, ...]]:
    """Return the sites without layers that the scores do not read, and the names of networks side by side.

    Where there are several networks, none of their layers is a layer of the model.
    """
    layers = [index for index, site in enumerate(sites) if site.is_layer]
    read = [index for index in layers if firsts[index] in graph.read_by_scores]
    if not read:  # no graph, which is reported elsewhere
        return sites, ()
    blocks = {id(site.block) for site in (sites[index] for index in read) if site.block is not None}
    again = [  # a second pass through the same blocks
        index
        for index in layers
        if index not in read
        and id(sites[index].block) in blocks
        and not any(graph.feeds(firsts[other], firsts[index]) for other in read)
    ]
    pairs = [(read[0], index) for index in again] + [
        (first, second)
        for first, second in itertools.combinations(read, 2)
        if not graph.feeds(firsts[first], firsts[second])
        and not graph.meet(firsts[first], firsts[second])
        and not (_differ(sites[first], sites[second]) and graph.feed_another(firsts[first], firsts[second]))
    ]
    if not pairs:
        unread = set(layers) - set(read)
        return tuple(
            replace(site, kind="unrelated", block=None) if index in unread else site for index, site in enumerate(sites)
        ), ()
    first, second = pairs[0]
    return _as_members(sites), _names_of_members(around[first], around[second], module)


def _differ(first: AttentionSite, second: AttentionSite) -> bool:
    """Return whether two layers are not both between all tokens: streams of other resolutions may join later."""
    return (first.kind, second.kind) != ("tokens", "tokens")


def _as_members(sites: tuple[AttentionSite, ...]) -> tuple[AttentionSite, ...]:
    return tuple(replace(site, kind="member") if site.is_layer else site for site in sites)


def _without_copies_of_the_image(
    sites: tuple[AttentionSite, ...], blocks: Sequence[_Visit | None], module: nn.Module, embedded: int
) -> tuple[tuple[AttentionSite, ...], tuple[str, ...]]:
    """Return the sites and members where patches of several versions of the one image are embedded as a batch."""
    visits = [visit for visit, site in zip(blocks, sites, strict=True) if site.is_layer]
    tokens = [visit.tokens for visit in visits if visit is not None and visit.tokens is not None]
    if embedded == 1 or not tokens or any(embedded not in x.shape[:2] for x in tokens):
        return sites, ()
    names = {id(part): name for name, part in module.named_modules()}
    return _as_members(sites), tuple({names.get(id(visit.module), ""): None for visit in visits[:1] if visit})


def _names_of_members(first: list[_Visit], second: list[_Visit], module: nn.Module) -> tuple[str, ...]:
    """Return the names of the two outermost modules that hold one of two attention calls each."""
    names = {id(part): name for name, part in module.named_modules()}
    shared = sum(1 for a, b in zip(first, second, strict=False) if a is b)
    a, b = ((visits[shared:] or visits[-1:]) for visits in (first, second))
    return tuple(names.get(id(visits[0].module), "") if visits else "" for visits in (a, b))


def _block_of(visits: list[_Visit], first: int, count: int) -> _Visit | None:
    """Return the outermost module that takes tokens and holds the `count` calls of one layer alone."""
    return next((v for v in visits if (v.first_call, v.calls) == (first, count) and v.tokens is not None), None)


def _block_of_clip(visits: list[_Visit], first: int, count: int) -> _Visit | None:
    """Return the block of an attention call in a model of clips.

    Divided attention runs over the frames of one place, then over the places of one frame: both take folded tokens
    [places, frames, d], and the module that takes all tokens [1, N, d] holds both calls.
    """
    block = _block_of(visits, first, count)
    if block is None or block.tokens is None or 1 in block.tokens.shape[:2]:
        return block
    whole = [v for v in visits if v.calls == 2 * count and v.tokens is not None and 1 in v.tokens.shape[:2]]
    return whole[0] if whole else block


def _classify(
    calls: list[AttentionCall],
    sees_image: list[bool],
    blocks: list[_Visit | None],
    grids: list[tuple[int, ...]],
    image: tuple[int, int],
    given: Layout | None,
) -> tuple[tuple[AttentionSite, ...], Layout | None]:
    """Return each call's kind, block and grid, and the layout: the user's, or that of the first layer."""
    sites: list[AttentionSite] = []
    layout = given
    for call, visit, sees in zip(calls, blocks, sees_image, strict=True):
        if not sees:
            sites.append(AttentionSite("unrelated", None, None, call.queries, call.keys))
            continue
        tokens = None if visit is None or visit.tokens is None else visit.tokens
        count, grid = _count_tokens(tokens, call, image)
        if layout is None and (call.queries == call.keys or _reduces_keys(call, count)):
            layout = _layout_of(count, grid, grids, image)
        width = None if tokens is None else tokens.numel() // count  # channels of a token: one image was looked at
        kind = _kind(call, count, width, layout)
        if given is not None and count != given.tokens and kind in ("tokens", "window", "reduced"):
            kind = "encoder"
        if grid is None and layout is not None and count == layout.tokens:
            grid = layout.grid
        if not any(len(sides) == 3 for sides in grids):  # an image
            grid = grid or square_patches(count, image)  # the later stages of a hierarchical model
        sites.append(AttentionSite(kind, None if visit is None else visit.module, grid, call.queries, call.keys))
    for index, visit in enumerate(blocks[:-1]):
        if visit is not None and visit is blocks[index + 1]:  # its block ends with the next call
            sites[index] = replace(sites[index], kind="divided")
    for index, kind in decoder_kinds(calls).items():
        sites[index] = replace(sites[index], kind=kind)
    return tuple(sites), layout


def _count_tokens(
    tokens: Tensor | None, call: AttentionCall, image: tuple[int, int]
) -> tuple[int, tuple[int, ...] | None]:
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
    if call.lead == 1 and 1 < call.keys < call.queries:
        return "reduced"
    # The values of channels are as long as there are tokens, and the heads share all channels out among them.
    channels = call.lead == 1 and call.v.shape[-1] == count and width in (None, call.v.shape[1] * call.keys)
    return "channel" if channels else "window"


def _reduces_keys(call: AttentionCall, count: int) -> bool:
    """Return whether all tokens attend to keys made fewer by a strided convolution or pooling (SegFormer, PVT)."""
    return call.lead == 1 and call.queries == count and 1 < call.keys < count


def _layout_of(
    count: int, grid: tuple[int, ...] | None, grids: list[tuple[int, ...]], image: tuple[int, int]
) -> Layout | None:
    if grid is not None:
        return Layout(grid, 0, "avg")
    # The last convolution before the tokens is the patch embedding, unless a later one made the keys fewer. One over
    # [N, 1] tokens is a linear layer.
    grids = [sides for sides in grids if len(sides) != 2 or fits_image(*sides, image)] or grids
    fitting = _smallest_remainder(count, grids, MOST_PREFIX_TOKENS)
    if fitting is not None or any(len(sides) == 3 for sides in grids):  # patches of a clip are no squares in an image
        return fitting
    for prefix in range(min(count, MOST_PREFIX_TOKENS)):  # no convolution: patches cut by hand, squares in an image
        fit = square_patches(count - prefix, image)
        if fit is not None:
            return Layout(fit, prefix, "avg")
    return _smallest_remainder(count, grids, MOST_OTHER_TOKENS)


def _smallest_remainder(count: int, grids: list[tuple[int, ...]], most: int) -> Layout | None:
    """Return the layout of the grid that leaves the fewest of `count` tokens over; None if none leaves 0 … `most`."""
    fitting = [sides for sides in reversed(grids) if 0 <= count - math.prod(sides) <= most]
    if not fitting:
        return None
    sides = min(fitting, key=lambda cells: count - math.prod(cells))
    return Layout(sides, count - math.prod(sides), "avg")


# Pooling: which rows of the last attention the head reads


def with_pooling(
    layout: Layout,
    calls: list[AttentionCall],
    sites: tuple[AttentionSite, ...],
    scores: list[Tensor],
    read_by_head: list[Tensor],
) -> Layout:
    """Return the layout with its pooling: rows of the last attention that have a gradient are those the head reads."""
    layers = [i for i, site in enumerate(sites) if site.is_layer]
    if not layers or sites[layers[-1]].kind != "tokens" or layout.tokens != sites[layers[-1]].queries:
        return layout  # windows, stages or channels come last: nothing reads single rows
    if not any(tensor.requires_grad for tensor in scores):
        return _usual_layout(layout)  # not told: see `ModelStructure.reads_unknown`
    if not all(
        call.requires_grad for call, site in zip(calls, sites, strict=True) if site.kind not in ("unrelated", "query")
    ):
        raise CaptureError(CHECKPOINTED)
    pools = [i for i in range(layers[-1] + 1, len(sites)) if sites[i].kind == "pool"]
    has_cross = any(site.kind == "cross" for site in sites)
    decoder = [i for i, site in enumerate(sites) if has_cross and site.kind in ("query", "cross")][-1:]
    # A new head is often all zeros and passes no gradient; then see what its linear layers read.
    for outputs in (scores, read_by_head):
        for i in reversed(pools):  # a pool that is built but not read has no gradient
            rows = _rows_read(calls[i], outputs)
            if rows is not None:
                read = rows.nonzero().flatten().tolist()
                return replace(layout, pooling="map", read=tuple((row, 1 / len(read)) for row in read))
        for i in decoder:
            rows = _rows_read(calls[i], outputs)
            if rows is not None:
                read = rows.nonzero().flatten().tolist()
                return replace(layout, pooling="query", read=tuple((row, 1 / len(read)) for row in read))
        rows = _rows_read(calls[layers[-1]], outputs)
        if rows is not None:
            return _layout_reading(layout, rows.nonzero().flatten().tolist(), rows)
    return _usual_layout(layout)


def _rows_read(call: AttentionCall, outputs: list[Tensor]) -> Tensor | None:
    """Return how strongly the outputs depend on each row of an attention, [queries]; None if they do not at all."""
    noise = torch.Generator().manual_seed(0)  # any direction will do, as long as it is not a special one
    score = [
        (o * torch.randn(o.shape, generator=noise, dtype=torch.float32, device="cpu").to(o)).sum()
        for o in outputs
        if o.requires_grad
    ]
    if not score:
        return None
    with translate_autograd_errors():
        gradients = torch.autograd.grad(
            torch.stack(score).sum(), call.outputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
    if not any(gradient.any() for gradient in gradients):
        return None
    return _without_rounding(widened(call.heads(gradients)).abs().sum((0, 1, 3)))


def _without_rounding(rows: Tensor) -> Tensor:
    """Return how strongly rows are read, zero where that is rounding: a row that is added and taken away again.

    In half precision that cannot be told: the rows of a mean may weigh as little as rounding does.
    """
    return rows.where(rows > rows.max() * torch.finfo(rows.dtype).eps * 2**5, 0).float()


def _pooling_by_value(
    model: Model, pixels: Tensor, layout: Layout, calls: list[AttentionCall], sites: tuple[AttentionSite, ...]
) -> Layout | None:
    """Return the layout with its pooling, where scores leave torch after the last block; None if it cannot be told."""
    last = len(sites) - 1
    if last < 0 or sites[last].kind != "tokens" or sites[last].queries != layout.tokens:
        return None  # windows, or a pool or decoder after the blocks
    if any(site.heads_apart != 1 for site in sites):
        return None  # a layer's heads are calls of their own
    weights = rows_by_value(model, pixels, layout, calls[last], last)
    return None if weights is None else _layout_reading(layout, weights.nonzero().flatten().tolist(), weights)


def _with_rows_of_output(layout: Layout, output: Tensor | None, scores: list[Tensor]) -> Layout:
    """Return the layout with the rows of the last block's output [1, N, d] that the scores depend on.

    Divided attention has no row for each token, so that the attention itself cannot be asked.
    """
    if output is None or tuple(output.shape[:2]) != (1, layout.tokens) or not output.requires_grad:
        return layout
    total = torch.stack([score.sum() for score in scores if score.requires_grad]).sum()
    with translate_autograd_errors():
        (gradient,) = torch.autograd.grad(total, output, retain_graph=True, allow_unused=True)
    if gradient is None or not gradient.any():
        return layout
    rows = _without_rounding(widened(gradient[0]).abs().sum(-1))
    return _layout_reading(layout, rows.nonzero().flatten().tolist(), rows)


def _layout_reading(layout: Layout, rows: list[int], weight: Tensor) -> Layout:
    others = [row for row in rows if row not in layout.patch_rows]
    patches = [row for row in rows if row in layout.patch_rows]
    if not patches:
        pooling: Pooling = "token" if len(others) == 1 else "distilled"
        return replace(layout, pooling=pooling, read=tuple((row, 1 / len(others)) for row in others))
    if len(patches) == 1 and not others and layout.patches > 1:  # a patch in the place of a class token
        return replace(layout, pooling="token", read=((patches[0], 1.0),))
    all_patches = layout.patch_rows
    # CLS next to the patch mean (DINOv2 heads): one row then weighs as much as all patches together.
    if others and float(weight[others].max()) > 4 * float(weight[patches].median()):
        strong = [row for row in others if float(weight[row]) > 4 * float(weight[patches].median())]
        of_others = tuple((row, 0.5 / len(strong)) for row in strong)
        of_patches = tuple((row, 0.5 / len(all_patches)) for row in all_patches)
        return replace(layout, pooling="mixed", read=of_others + of_patches)
    read = [*others, *all_patches]
    return replace(layout, pooling="avg", read=tuple((row, 1 / len(read)) for row in read))


def _usual_layout(layout: Layout) -> Layout:
    """Return the usual pooling, where no gradient reaches the last attention (a block that starts at zero)."""
    return replace(layout, pooling="token" if layout.other_rows else "avg", read=())


def pool_row(pools: tuple[AttentionCall, ...], layout: Layout) -> Tensor:
    """Return how much an attention pool reads of each token, [B, N]; several class-attention layers (CaiT) add up."""
    row: Tensor | None = None
    for call in pools:
        queries = call.A().mean(1)  # [B, queries, keys]
        latent = sum(weight * queries[:, index] for index, weight in layout.read)
        attention = latent if call is pools[-1] and isinstance(latent, Tensor) else queries.mean(1)
        if attention.shape[1] == layout.patches:  # a pool that sees the patches alone reads nothing of other tokens
            attention = layout.pad_patches(attention)
        extra = attention.shape[1] - layout.tokens  # CLS among the keys
        if extra < 0:  # nor of the first tokens, where it does not see these
            attention, extra = F.pad(attention, (-extra, 0)), 0
        row = attention[:, extra:] + (0 if row is None else attention[:, :extra].sum(1, keepdim=True) * row)
    assert row is not None
    return row
