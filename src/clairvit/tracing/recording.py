"""Recording: one forward pass with everything a trace needs, ready for one backward per target and rule table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from clairvit.errors import CaptureError
from clairvit.execution import ExecutionOptions
from clairvit.models.model import Model
from clairvit.models.readout import unwrap_readout
from clairvit.tracing import ops
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.capture import Capture, stream_hooks
from clairvit.tracing.capture_plan import CapturePlan, WindowSwitch, same_calls
from clairvit.tracing.gradient_barriers import blocked_gradient
from clairvit.tracing.module_state import (
    CHECKPOINTED,
    frozen_eval,
    own_grad_mode,
    this_thread_only,
    traced_forward,
)
from clairvit.tracing.recorders.base import Op, Recorder
from clairvit.tracing.rules import ActiveRuleTable, RuleTable, rule_table
from clairvit.tracing.rules.coverage import uncovered_operations
from clairvit.tracing.stages import StageRecorder
from clairvit.tracing.structure import FIRST_PASS, ModelStructure, forget_structures, model_structure, tokens_among

R = TypeVar("R", bound=Recorder)


@dataclass(eq=False)
class Recording:
    """The graph of one forward. Tensors named here are the model's own, in the graph, not copies."""

    model: Model
    structure: ModelStructure
    pixels: Tensor  # [B, 3, H, W], a leaf
    logits: Tensor  # [B, C]
    inputs: tuple[Tensor | None, ...]  # block inputs (a CNN's feature maps), one per layer, as the model shapes them
    end: Tensor | None  # the last block's output; a CNN's last feature map
    calls: tuple[AttentionCall, ...]  # the attention of each layer
    pools: tuple[AttentionCall, ...]  # attention pools after the layers
    decoder: tuple[AttentionCall, ...]  # attention between a decoder's queries, and from these to the image tokens
    switch: ActiveRuleTable | None
    rules: tuple[RuleTable, ...]
    differentiable: bool
    recorders: Mapping[type[Recorder], Recorder]
    forwards: int = field(default=1)  # passes over the batch, with those of `Trace.rerun`
    backwards: int = field(default=0)
    options: ExecutionOptions = field(default_factory=ExecutionOptions)  # how perturbed inputs of it are run
    _output_nodes: tuple[Any, ...] = ()  # of what the module returned
    _without_rule: dict[RuleTable, tuple[str, ...]] = field(default_factory=dict)  # names of operations
    fitting: dict[str, bool] = field(default_factory=dict)  # method -> whether it fits the model, of those asked about
    notes: tuple[str, ...] = ()  # about the pass, for every result that is made of it
    photos: Tensor | None = None  # what random draws for each image depend on, where that are not the pixels

    def __repr__(self) -> str:
        """Return one line: model, images and passes."""
        passes = f"{self.forwards} forward, {self.backwards} backward"
        pixels = tuple(self.pixels.shape)
        return f"Recording({self.model.name!r}, pixels {pixels}, {len(self.calls)} attention calls, {passes})"

    def __getitem__(self, recorder: type[R]) -> R:
        """Return the recorder of this class, as it is after the forward pass."""
        return recorder_of(self.recorders, recorder)

    @property
    def first_block_input(self) -> Tensor | None:
        """The first input of a block that was seen; None for a CNN."""
        return None if self.structure.stages else next((x for x in self.inputs if x is not None), None)

    def as_tokens(self, tensor: Tensor) -> Tensor:
        """Return [B, N, d], also from [N, B, d] and from feature maps [B, h, w, d] or [B, d, h, w]."""
        return self.structure.as_tokens(tensor, self.pixels)

    def from_tokens(self, tokens: Tensor, like: Tensor | None = None) -> Tensor:
        """Return [B, N, d] in the shape of the last block's output, or of `like`; the inverse of `as_tokens`."""
        model_shaped = self.end if like is None else like
        if model_shaped is None or model_shaped.ndim == 3:
            return tokens.transpose(0, 1) if self.structure.sequence_first else tokens
        if self.structure.channels_first(model_shaped, self.pixels):
            return tokens.transpose(1, 2).reshape(len(tokens), -1, *model_shaped.shape[2:])
        return tokens.reshape(len(tokens), *model_shaped.shape[1:3], -1)

    def release_graph(self) -> None:
        """Free the graph; values stay. One tensor of the graph would keep all of it, so each is detached."""
        self.differentiable = False
        self._output_nodes = ()
        self.logits = self.logits.detach()
        self.inputs = tuple(None if x is None else x.detach() for x in self.inputs)
        self.end = self.inputs[-1] if self.structure.stages else None
        for call in (*self.calls, *self.pools, *self.decoder):
            call.detach()
        for recorder in self.recorders.values():
            recorder.release()

    def operations_without_rule(self, rules: RuleTable) -> tuple[str, ...]:
        """Return the names of the operations that a rule table should have had a rule for, while there is a graph."""
        if rules not in self._without_rule:
            self._without_rule[rules] = uncovered_operations(self.logits, self._output_nodes, rules)
        return self._without_rule[rules]


def recorder_of(recorders: Mapping[type[Recorder], Recorder], kind: type[R]) -> R:
    """Return the recorder of a class; raise CaptureError if it was not in use."""
    recorder = recorders.get(kind)
    if not isinstance(recorder, kind):
        in_use = ", ".join(other.__name__ for other in recorders) or "none"
        raise CaptureError(
            f"{kind.__name__} was not recorded; recorders in use: {in_use}. Record with recorders=({kind.__name__},), "
            f"or register the method with requires=Requires(recorders=({kind.__name__},))."
        )
    return recorder


@own_grad_mode()
def record(
    model: Model,
    pixels: Tensor,
    *,
    rules: Sequence[str | RuleTable] = ("plain",),
    differentiable: bool = True,
    recorders: Iterable[type[Recorder]] = (),
    start: Tensor | None = None,
    structure: ModelStructure | None = None,
) -> Recording:
    """Run the model once over `pixels` [B, 3, H, W].

    A pass that makes other attention calls than the structure says, or enters other blocks, shows that the structure
    is out of date, because of something that the model's fingerprint does not tell. It is then found again, once.

    Args:
        model: The model.
        pixels: Preprocessed images.
        rules: The rule tables that backward passes may follow.
        differentiable: Keep the graph for backward passes.
        recorders: What to record beyond block inputs and attention; read it as `recording[OpLog]`.
        start: Replaces the first block's input (a CNN's first feature map), shaped as the model shapes it.
        structure: The structure, where it was found in this call already; None: found, or remembered.

    Raises:
        NotApplicable: The graph is asked for, and a layer of the model blocks the gradient.
        CaptureError: The model took another path than on its first image of this size.
    """
    tables = tuple(map(rule_table, rules))
    kinds = tuple(dict.fromkeys(recorders))
    with frozen_eval(model.module), torch.set_grad_enabled(differentiable):
        structure = structure or model_structure(model, pixels)
        forward = _run_forward(model, structure, pixels, tables, kinds, start, differentiable=differentiable)
        if forward.difference() is not None:
            forget_structures(model.module)
            structure = model_structure(model, pixels)
            forward = _run_forward(model, structure, pixels, tables, kinds, start, differentiable=differentiable)
            forward.check_path()
    calls = forward.capture.calls
    for call, site in zip(calls, structure.sites, strict=True):
        call.kind = site.kind
    if differentiable and any(not call.requires_grad for call in calls if call.kind != "unrelated"):
        raise CaptureError(CHECKPOINTED)
    layers = structure.layer_calls
    inputs: tuple[Tensor | None, ...] = tuple(
        None if structure.sites[i].block is None else forward.inputs[calls[i].block] for i in layers
    )
    recording = Recording(
        model=model,
        structure=structure,
        pixels=forward.pixels,
        logits=forward.logits,
        inputs=inputs or forward.stages.maps(),
        end=forward.end(),
        calls=tuple(calls[i] for i in layers),
        pools=tuple(call for call in calls[structure.last_layer_call + 1 :] if call.kind == "pool"),
        decoder=tuple(calls[i] for i in structure.decoder_calls),
        switch=forward.switch,
        rules=tables,
        differentiable=differentiable,
        recorders=forward.recorders,
        notes=_notes(model, structure, forward),
        _output_nodes=forward.output_nodes,
    )
    for recorder in forward.recorders.values():
        recorder.finish(recording)
    return recording


def _run_forward(
    model: Model,
    structure: ModelStructure,
    pixels: Tensor,
    rules: tuple[RuleTable, ...],
    kinds: Collection[type[Recorder]],
    start: Tensor | None,
    *,
    differentiable: bool,
) -> _ForwardPass:
    """Return a forward pass over a copy of the pixels; a planned one that leaves its plan is repeated without."""
    if differentiable and structure.barriers:
        raise blocked_gradient(structure.barriers, "A trace with a backward", attention=bool(structure.sites))
    leaf = pixels.detach().clone().requires_grad_(differentiable)
    for planned in (True, False):
        switch = ActiveRuleTable.among(rules) if differentiable else None
        forward = _ForwardPass(structure, leaf, switch, {kind: kind() for kind in kinds}, start)
        forward.logits = forward.run(model, planned=planned)
        if not forward.has_left_plan:
            break  # else never a guess: every operation is seen
    return forward


def _notes(model: Model, structure: ModelStructure, forward: _ForwardPass) -> tuple[str, ...]:
    """Return notes about the precision of the pass, and whether another one over the same image gives other scores.

    The pass that found the structure and the first recording after it are both made anyway; what they show is
    remembered with the structure.
    """
    device, dtypes = forward.pixels.device.type, [forward.logits.dtype, model.dtype]
    notes: list[str] = []
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
        notes.append(
            f"The model ran under torch.autocast ({str(dtypes[-1]).removeprefix('torch.')}), which was on where this "
            "was called: maps are less exact. Explain outside it for full precision."
        )
    first = structure.facts.pop(FIRST_PASS, None)
    if first is not None and forward.start is None and torch.equal(first[0], forward.pixels[:1]):
        structure.facts["random"] = _differ(forward.logits.detach()[:1], first[1], dtypes)
    if structure.facts.get("random"):
        notes.append(
            "Two passes over the same image gave different scores, in evaluation mode too (dropout that stays on, "
            "noise, a state that changes): another run gives another map."
        )
    return tuple(notes)


def _differ(scores: Tensor, others: Tensor, dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether two scores differ by more than a deep network of these dtypes rounds, in batches of any size."""
    if scores.shape != others.shape:
        return True
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point) ** 0.5
    return bool((scores - others).abs().max() > rounding * others.abs().max())


@dataclass(eq=False)
class _LastSum(Recorder):
    """Where no module ends with the last block: its output is the last sum of the token stream."""

    kinds = ops.SUMS
    sums: dict[torch.Size, Tensor] = field(default_factory=dict)  # the last one of each shape

    def on_op(self, op: Op) -> None:
        if op.after_blocks and not op.nested:
            self.sums[op.output.shape] = op.output


class _ForwardPass:
    """Hooks on the blocks, and the capture, of one forward pass."""

    def __init__(
        self,
        structure: ModelStructure,
        pixels: Tensor,
        switch: ActiveRuleTable | None,
        recorders: Mapping[type[Recorder], Recorder],
        start: Tensor | None,
    ) -> None:
        self.structure, self.pixels, self.switch, self.start = structure, pixels, switch, start
        self.recorders = recorders
        self.logits = pixels  # replaced by those of the pass
        self.inputs: list[Tensor] = []  # of each block
        self._entered: list[nn.Module] = []
        self.stages = StageRecorder(structure.stages, start)
        last = structure.last_layer_call
        self._last_block = structure.sites[last].block if last >= 0 else None
        self._hooks_end = structure.whole_blocks and self._last_block is not None
        self._ended = False
        self.has_left_plan = False  # a planned pass did not meet the attention calls it expected
        self._output: Tensor | None = None  # of the last block
        self.output_nodes: tuple[Any, ...] = ()  # of what the module returns
        self._last_sum = _LastSum()
        for recorder in recorders.values():
            recorder.start(structure, pixels)
        self.capture = Capture(
            len(pixels),
            switch,
            [*recorders.values(), *([] if structure.whole_blocks else [self._last_sum])],
            sequence_first=structure.sequence_first,
            final_call=-1 if self._hooks_end or last < 0 else last + 1,
            differentiated=structure.decoder_calls,
            heads_apart=structure.heads_apart,
        )

    def run(self, model: Model, *, planned: bool) -> Tensor:
        """Return the logits; with `planned` the capture is on only where attention is computed, if that is known."""
        plan = self.structure.plan if planned and not self.capture.sees_operations else None
        hooks = self.stages.hooks() if self.structure.stages else []
        try:
            enter = this_thread_only(self._enter)
            blocks = {id(site.block): site.block for site in self.structure.layers if site.block is not None}
            hooks += [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks.values()]
            if self._hooks_end and self._last_block is not None:
                hooks.append(self._last_block.register_forward_hook(this_thread_only(self._leave)))
            hooks += stream_hooks(model.module, self.capture)
            if self.switch is not None:
                returning = unwrap_readout(model.module)
                hooks.append(returning.register_forward_hook(this_thread_only(self._return)))
            with traced_forward():
                if plan is None or plan.holds is False:
                    with self.capture:
                        return model.logits(self.pixels)
                if plan.holds:
                    return self._run_planned(model, plan)
                return self._check_plan(model, plan)
        finally:
            for hook in hooks:
                hook.remove()

    def _run_planned(self, model: Model, plan: CapturePlan) -> Tensor:
        with plan.installed(WindowSwitch(self.capture)):
            logits = model.logits(self.pixels)
        self.has_left_plan = self.difference() is not None
        if self.has_left_plan:
            plan.holds = False
        return logits

    def _check_plan(self, model: Model, plan: CapturePlan) -> Tensor:
        """Run with the capture on throughout; the plan holds if a second one in its windows sees the same calls."""
        second = Capture(len(self.pixels), heads_apart=self.structure.heads_apart)
        with self.capture, plan.installed(WindowSwitch(second)):
            logits = model.logits(self.pixels)
        plan.holds = same_calls(self.capture.calls, second.calls)
        return logits

    def difference(self) -> Literal["count", "blocks", "sizes"] | None:
        """Return what the pass did otherwise than the structure says: how many attention calls, where, or how large."""
        calls, sites = self.capture.calls, self.structure.sites
        if len(calls) != len(sites):
            return "count"
        for i in self.structure.layer_calls:
            number, block = calls[i].block, sites[i].block
            if block is not None and not (0 <= number < len(self._entered) and self._entered[number] is block):
                return "blocks"
        same = all(call.shape[-2:] == (site.queries, site.keys) for call, site in zip(calls, sites, strict=True))
        return None if same else "sizes"

    def _enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        tokens = tokens_among(args, kwargs)
        if tokens is None:
            return None
        if self.start is not None and not self.inputs:
            tokens.copy_(self.start)  # in place, so that a residual next to the module starts from it too
        self.inputs.append(tokens)
        self._entered.append(module)
        # A block that overwrites its input gets a copy; ours must stay what it was.
        block_input = tokens.clone() if self.structure.writes_in_place else tokens
        self.capture.enter_block(block_input)
        if block_input is tokens:
            return None
        return (
            tuple(block_input if a is tokens else a for a in args),
            {name: block_input if a is tokens else a for name, a in kwargs.items()},
        )

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if len(self.capture.calls) == self.structure.last_layer_call + 1 and not self._ended:
            self._ended = True
            self._output = tokens_among((out,) if isinstance(out, Tensor) else tuple(out), {})
            self.capture.end_blocks(self._output)

    def _return(self, module: Any, args: Any, out: Any) -> None:
        leaves = tree_flatten(out)[0] if not isinstance(out, Mapping) else [*out.values()]
        self.output_nodes = tuple(x.grad_fn for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None)

    def end(self) -> Tensor | None:
        """Return the last block's output; None where that block is no module."""
        if self.structure.stages:
            return self.stages.maps()[-1]
        if self._last_block is None or self._hooks_end:
            return self._output
        last_attention = self.capture.calls[self.structure.last_layer_call].outputs[-1]
        return self._last_sum.sums.get(self.inputs[-1].shape, last_attention)

    def check_path(self) -> None:
        """Raise CaptureError if the model went another way than the structure, which was just found, says."""
        difference = self.difference()
        if difference == "count":
            calls, sites = self.capture.calls, self.structure.sites
            raise CaptureError(
                f"The model made {len(calls)} attention calls, {len(sites)} in the pass before it over an image of the "
                "same size; expected the same path every time. Switch off random depth or early exits, then try again."
            )
        if difference == "blocks":
            raise CaptureError(
                "The model went through other blocks than in the pass before it over an image of the same size; "
                "expected the same path every time. Explain its parts by themselves."
            )
