"""Recording: one forward pass with everything a trace needs, ready for one backward per target and rule table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from clairvit.errors import CaptureError, NotApplicable
from clairvit.execution import ExecutionOptions
from clairvit.models.model import Model
from clairvit.tracing.attention import AttentionCall
from clairvit.tracing.autograd_errors import CHECKPOINTED, translate_autograd_errors
from clairvit.tracing.capture import Capture
from clairvit.tracing.gradient_barriers import blocked_gradient
from clairvit.tracing.grid import channels_first
from clairvit.tracing.module_state import frozen_eval, own_grad_mode, this_thread_only
from clairvit.tracing.recorders.bias_maps import BiasMaps, drawn_on
from clairvit.tracing.recorders.bias_terms import BiasAccumulator, watched
from clairvit.tracing.recorders.head_replay import HeadReplay
from clairvit.tracing.recorders.op_log import OpLog
from clairvit.tracing.recorders.patch_embedding import Embedding
from clairvit.tracing.recorders.residual import PostAttentionResidual
from clairvit.tracing.rules.table import Switch, rule_table
from clairvit.tracing.stages import Watcher
from clairvit.tracing.structure import ModelStructure, model_structure, tokens_among


@dataclass(eq=False)
class LastLinear:
    """The last linear layer of a block, as places in the graph: the tensors themselves (4 N d each) are not kept."""

    given: GradientEdge
    weight: Tensor
    made: GradientEdge


@dataclass(eq=False)
class Recording:
    """The graph of one forward. Tensors named here are the model's own, in the graph, not copies."""

    model: Model
    structure: ModelStructure
    pixels: Tensor  # [B, 3, H, W], a leaf
    logits: Tensor  # [B, C]
    inputs: tuple[Tensor | None, ...]  # block inputs (a CNN's feature maps), one a layer, as the model shapes them
    calls: tuple[AttentionCall, ...]  # the attention of each layer
    pools: tuple[AttentionCall, ...]  # attention pools after the layers
    last_linears: dict[int, LastLinear]  # layer -> the last linear layer of its block, if asked for
    tape: HeadReplay | None  # from the last block's output to the logits
    normed: Tensor | None  # the last block's normalised input; where patches are averaged, its normalised output
    embedding: Embedding | None  # where the pixels become patches
    switch: Switch | None
    tables: tuple[str, ...]
    differentiable: bool
    middles: dict[int, Tensor | None] = field(default_factory=dict)  # layer -> its stream after attention, if asked for
    film: OpLog | None = None  # every operation from the first block on, if asked for; cut from the graph
    ledgers: dict[str, BiasAccumulator] = field(default_factory=dict)  # what biases add, by kind, where asked for
    bias_maps: BiasMaps | None = None
    forwards: int = field(default=1)  # passes over the batch, with those that `Trace.again` made for it
    backwards: int = field(default=0)
    options: ExecutionOptions = field(default_factory=ExecutionOptions)  # how perturbed inputs of it are run

    def __repr__(self) -> str:
        """Return one line: model, images and passes."""
        passes = f"{self.forwards} forward, {self.backwards} backward"
        pixels = tuple(self.pixels.shape)
        return f"Recording({self.model.name!r}, pixels {pixels}, {len(self.calls)} attention calls, {passes})"

    @property
    def end(self) -> Tensor | None:
        """The last block's output; a CNN's last feature map."""
        if self.structure.stages:
            return self.inputs[-1]
        return None if self.tape is None else self.tape.start

    def _channels_first(self, feature_map: Tensor) -> bool:
        image = (int(self.pixels.shape[-2]), int(self.pixels.shape[-1]))
        return channels_first(feature_map, image, tie=bool(self.structure.stages))

    def as_tokens(self, tensor: Tensor) -> Tensor:
        """[B, N, d], also from [N, B, d] and from feature maps [B, h, w, d] or [B, d, h, w]."""
        if tensor.ndim == 3:
            return tensor.transpose(0, 1) if self.structure.sequence_first else tensor
        return tensor.flatten(2).transpose(1, 2) if self._channels_first(tensor) else tensor.flatten(1, 2)

    def from_tokens(self, tokens: Tensor, like: Tensor | None = None) -> Tensor:
        """[B, N, d] in the shape of the last block's output, or of `like`; the opposite of `as_tokens`."""
        end = self.end if like is None else like
        if end is None or end.ndim == 3:
            return tokens.transpose(0, 1) if self.structure.sequence_first else tokens
        if self._channels_first(end):
            return tokens.transpose(1, 2).reshape(len(tokens), -1, *end.shape[2:])
        return tokens.reshape(len(tokens), *end.shape[1:3], -1)

    def let_go(self) -> None:
        """Free the graph; values stay. Tensors of the graph would keep all of it, so each is cut."""
        self.differentiable = False
        self.logits = self.logits.detach()
        self.inputs = tuple(None if x is None else x.detach() for x in self.inputs)
        for call in (*self.calls, *self.pools):
            call.cut()
        if self.embedding is not None:
            self.embedding.cut()
        self.tape = self.normed = None
        self.last_linears.clear()

    def gradients(
        self, score: Callable[[Tensor], Tensor], table: str, of: Sequence[Tensor], *, keep: bool
    ) -> tuple[Tensor | None, ...]:
        """d(sum of the images' scores)/d(of), by one backward under a rule table."""
        if not self.differentiable or table not in self.tables:
            raise CaptureError(
                f"This recording has a graph for {', '.join(self.tables) if self.differentiable else 'no gradients'}; "
                f"'{table}' was asked of it. Record again with rules='{table}'."
            )
        rules = rule_table(table)
        if self.switch is not None:
            self.switch.table = rules
        y = score(self.logits)
        y = (y / y.detach().where(y != 0, torch.ones_like(y))).sum() if rules.unit else y.sum()
        if not y.requires_grad:
            raise CaptureError(
                "The target's score does not depend on the image in a differentiable way; expected a score computed "
                "from the logits with torch operations. Check the target function, or look for torch.no_grad() in the "
                "model."
            )
        self.backwards += 1
        for ledger in self.ledgers.values():
            ledger.begin()
        if self.bias_maps is not None:
            self.bias_maps.begin()
        with translate_autograd_errors():
            return torch.autograd.grad(y, of, retain_graph=keep, allow_unused=True)


@own_grad_mode()
def record(
    model: Model,
    pixels: Tensor,
    *,
    tables: Sequence[str] = ("plain",),
    differentiable: bool = True,
    local: bool = False,
    inside: bool = False,
    middles: bool = False,
    start: Tensor | None = None,
    biases: Collection[str] = (),
) -> Recording:
    """Run the model once over `pixels` [B, 3, H, W].

    `local=True` also notes what makes one-block gradients cheap, `inside=True` every operation of the blocks,
    `middles=True` the residual stream after attention.
    `start` takes the place of the first block's input (a CNN's first feature map), shaped as the model shapes it.
    `biases` names what a backward shall add up beside gradients: "learned" biases, "implicit" ones too; "maps" of them.
    """
    plan = model_structure(model, pixels)
    if differentiable and plan.barriers:
        raise NotApplicable(blocked_gradient(plan.barriers, "A trace with a backward", attention=bool(plan.parts)))
    pixels = pixels.detach().clone().requires_grad_(differentiable)
    switch = Switch.among(tables) if differentiable else None
    capture = Capture(len(pixels), switch)
    capture.sequence_first = plan.sequence_first
    film = OpLog() if inside else None
    capture.middles = PostAttentionResidual() if middles else None
    ledgers = watched(capture, biases, plan, len(pixels))
    bias_maps = drawn_on(capture, biases, pixels.shape)
    layers = [i for i, part in enumerate(plan.parts) if part.kind not in ("pool", "aside")]
    inputs: list[Tensor] = []
    last_linears: dict[int, LastLinear] = {}
    last_call = layers[-1] if layers else -1
    reads_patches = plan.layout is not None and plan.layout.pooling == "avg"

    def note_last_linear() -> None:
        if local and differentiable and capture.last_linear is not None and capture.calls:
            given, weight, made = capture.last_linear
            if given.requires_grad and made.requires_grad and made.grad_fn is not None:
                place = LastLinear(get_gradient_edge(given), weight, get_gradient_edge(made))
                last_linears[capture.calls[-1].block] = place

    def enter(module: Any, args: Any, kwargs: Any) -> Any:
        tokens = tokens_among(args, kwargs)
        if tokens is None:
            return None
        note_last_linear()
        if start is not None and not inputs:
            tokens.copy_(start)  # in place, so that a residual beside the module starts from it too
        inputs.append(tokens)
        watched = len(capture.calls) == last_call and not reads_patches
        capture.enter_block(len(inputs) - 1, tokens, watch_norm=watched)
        # A block that overwrites its input is given its own; ours must stay what it was.
        own = tokens.clone() if plan.writes_in_place else tokens
        if film is not None:
            capture.film = film.entering(own)
        if capture.middles is not None:
            capture.middles.entering(own, len(capture.calls))
        if own is tokens:
            return None
        capture.block_input = own if watched else None
        return (
            tuple(own if a is tokens else a for a in args),
            {name: own if a is tokens else a for name, a in kwargs.items()},
        )

    def leave(module: Any, args: Any, out: Any) -> None:
        if len(capture.calls) == last_call + 1 and capture.tape is None:
            note_last_linear()
            tokens = tokens_among((out,) if isinstance(out, Tensor) else tuple(out), {})
            capture.tape = HeadReplay(start=tokens)
            if reads_patches:
                capture.block_input = tokens  # the final norm is the one that matters

    stages = Watcher(plan.stages, start)
    with frozen_eval(model.module), torch.set_grad_enabled(differentiable):
        hooks = stages.hooks()
        try:
            blocks = {id(plan.parts[i].block): plan.parts[i].block for i in layers}
            for block in blocks.values():
                if block is not None:
                    hooks.append(block.register_forward_pre_hook(this_thread_only(enter), with_kwargs=True))
            last_block = plan.parts[last_call].block if layers else None
            if plan.whole_blocks and last_block is not None:
                hooks.append(last_block.register_forward_hook(this_thread_only(leave)))
            elif layers:
                capture.tape_after = last_call + 1
            with capture:
                logits = model.logits(pixels)
        finally:
            for hook in hooks:
                hook.remove()
            capture.observer = None  # the two hold each other

    calls = capture.calls
    _check(plan, calls, differentiable)
    for call, part in zip(calls, plan.parts, strict=True):
        call.kind = part.kind
    if last_block is None:
        capture.tape = None  # nobody can say where the last block ends
    elif capture.tape is not None and not plan.whole_blocks:
        capture.tape.start_at_last_sum(inputs[-1].shape)
    if film is not None:
        last = None if capture.tape is None else capture.tape.start
        film.seal([(calls[i].block, calls[i].out) for i in layers], last, logits)
    return Recording(
        model=model,
        structure=plan,
        pixels=pixels,
        logits=logits,
        inputs=tuple(inputs[calls[i].block] if plan.parts[i].block is not None else None for i in layers)
        or stages.maps(),
        calls=tuple(calls[i] for i in layers),
        last_linears={
            layer: last_linears[calls[i].block] for layer, i in enumerate(layers) if calls[i].block in last_linears
        },
        pools=tuple(call for call in calls[last_call + 1 :] if call.kind == "pool"),
        tape=capture.tape,
        normed=capture.normed,
        embedding=Embedding.found(capture.first_conv, pixels, inputs[0] if inputs else None),
        switch=switch,
        tables=tuple(tables),
        differentiable=differentiable,
        film=film,
        middles={} if capture.middles is None else {k: capture.middles.found.get(i) for k, i in enumerate(layers)},
        ledgers=ledgers,
        bias_maps=bias_maps,
    )


def _check(plan: ModelStructure, calls: list[AttentionCall], differentiable: bool) -> None:
    if len(calls) != len(plan.parts):
        raise CaptureError(
            f"The model made {len(calls)} attention calls, {len(plan.parts)} on an earlier run of the same image size; "
            "expected the same path every time. Switch off random depth or early exits, then trace again."
        )
    seeing = [call for call, part in zip(calls, plan.parts, strict=True) if part.kind != "aside"]
    if differentiable and any(not call.out.requires_grad for call in seeing):
        raise CaptureError(CHECKPOINTED)
