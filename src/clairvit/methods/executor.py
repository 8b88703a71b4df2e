"""Run: walk the layers once and let every method take what it needs while the layer is on the desk."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from clairvit.errors import BadInput, ClairError, NotApplicable
from clairvit.methods.aggregation import Aggregation, reading
from clairvit.methods.explanation import Cost
from clairvit.methods.layer_view import LayerView, NotStackable, RunContext, laid_out, several
from clairvit.methods.result import MapFunction, as_map_result
from clairvit.methods.spec import MethodSpec
from clairvit.tracing.attention import AttentionCall, widened
from clairvit.tracing.gradient_barriers import blocked_gradient
from clairvit.tracing.layer import Layer
from clairvit.tracing.rules import RuleTable
from clairvit.tracing.trace import Trace

# How large a float32 tensor [layers·B, H, N, N] may be, in parts of the values of all layers: about a sixth of what the
# forward kept, which is free again by then, so that five of them fit.
TOGETHER = 1.6


@dataclass(eq=False)
class Result:
    """A method's raw maps, or why there are none."""

    maps: Tensor | None = None  # [B, rows, cols]
    layers: Tensor | None = None  # [L, B, rows, cols]
    error: ClairError | None = None
    seconds: float = 0.0
    more: Cost = field(default_factory=Cost)  # passes beyond the shared trace
    notes: list[str] = field(default_factory=list)
    blank: Sequence[bool] = ()  # images whose score nothing changes: no gradient, or the same whatever is removed
    standard_error: Tensor | None = None  # [B, rows, cols]
    chosen: Tensor | None = None  # bool [B, rows, cols]
    score: str | None = None  # the kind of score it explained, if another than the target's


def run(
    specs: Sequence[MethodSpec],
    trace: Trace,
    others: Mapping[RuleTable, Trace] = MappingProxyType({}),
    *,
    seed: int = 0,
    layers: bool = False,
) -> list[Result]:
    """One result for each bound method, in order. A method that does not fit the model gets its error as result.

    `others` are traces of the same target under the rule tables that methods read besides their own.
    """
    results = [Result() for _ in specs]
    context = RunContext(trace, others)
    walks = []
    # The caller's autocast is for the model; our sums stay as wide as they are.
    with torch.no_grad(), torch.autocast(trace.pixels.device.type, enabled=False):
        for spec, result in zip(specs, results, strict=True):
            with _Timed(result):
                _check_gradient(spec, trace)
                _check_pooling(spec, trace)
                if spec.aggregation is None:
                    _whole_image(spec, trace, seed, result)
                else:
                    walks.append(_LayerPass(spec, spec.aggregation, result, trace, layers))
        for ascending in (False, True):
            own = [walk for walk in walks if walk.aggregation.ascending == ascending]
            order = range(len(trace.layers)) if ascending else reversed(range(len(trace.layers)))
            wanted = [index for index in order if any(walk.wants(index) for walk in own)]
            for indices in at_once(wanted, trace):
                left = own if len(indices) == 1 else _visit_together(own, indices, trace, context)
                for index in indices if left else ():
                    _visit(left, LayerView(trace.layers[index], context), [index])
        for walk in walks:
            with _Timed(walk.result):
                walk.finish()
    for spec, result in zip(specs, results, strict=True):
        unmoved = result.blank or [False] * len(trace.pixels)
        result.blank = trace.blank if spec.passes == "backward" else unmoved
    return results


def at_once(indices: Sequence[int], trace: Trace) -> Iterator[list[int]]:
    """Layers in groups whose N×N matrices are made together: one by one on a CPU, a few hundred MB on a GPU."""
    group: list[int] = []
    for index in indices:
        layer, first = trace.layers[index], trace.layers[group[0] if group else index]
        fits = layer.call is not None and (len(group) + 1) * _square(layer.call) <= TOGETHER * _values(layer)
        if group and not (_starting_costs(trace) and fits and _gradients(first) == _gradients(layer)):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _starting_costs(trace: Trace) -> bool:
    """Does starting an operation cost more than a layer's numbers? Not on a CPU, where a layer should stay in cache."""
    return trace.pixels.is_cuda


def _square(call: AttentionCall) -> int:
    """Bytes of its A in float32."""
    return 4 * call.lead * call.v.shape[1] * call.queries * call.keys


def _values(layer: Layer) -> int:
    """Bytes of all layers' values."""
    assert layer.call is not None
    return layer.count * layer.call.v.nbytes


def _gradients(layer: Layer) -> tuple[bool, bool]:
    return layer.out_gradient is not None, layer.tokens_gradient is not None


def _visit_together(
    walks: Sequence[_LayerPass], indices: list[int], trace: Trace, context: RunContext
) -> list[_LayerPass]:
    """Visit layers at once with all methods that treat them alike; the others are given back."""
    view = several([trace.layers[index] for index in indices], context)
    return list(walks) if view is None else _visit(walks, view, indices)


def _visit(walks: Sequence[_LayerPass], whole: LayerView, indices: list[int]) -> list[_LayerPass]:
    """Show a view to every method that wants it; gives back those that must see its layers one by one."""
    reading_rows: LayerView | None = None
    left = []
    for walk in walks:
        if any(walk.wants(index) for index in indices):
            with _Timed(walk.result):
                try:
                    if walk.spec.method.output == "matrix" and not walk.spec.needs_all_rows:
                        reading_rows = reading_rows or whole.reading_rows()
                        walk.visit(reading_rows, indices)
                    else:
                        walk.visit(whole, indices)
                except NotStackable:
                    left.append(walk)
    return left


def _check_gradient(spec: MethodSpec, trace: Trace) -> None:
    plan = trace.recording.structure
    if plan.barriers and spec.reads_gradients:
        raise NotApplicable(blocked_gradient(plan.barriers, f"'{spec.text}'", attention=bool(plan.sites)))


def _check_pooling(spec: MethodSpec, trace: Trace) -> None:
    allowed = spec.requires.poolings
    if allowed and trace.layers and trace.layout.pooling not in allowed:  # no layers at all is said by the walk
        raise NotApplicable(
            f"'{spec.method.name}' is defined for models whose head reads {' or '.join(allowed)} pooling, and "
            f"{trace.recording.model.name} has {trace.layout.pooling} pooling. Use gradcam or decompx."
        )


class _LayerPass:
    """One method on its way through the layers."""

    def __init__(self, spec: MethodSpec, over: Aggregation, result: Result, trace: Trace, layers: bool) -> None:
        self.spec, self.aggregation, self.result, self.trace = spec, over, result, trace
        count = len(trace.layers)
        if not count:
            raise NotApplicable(
                f"{trace.recording.model.name}: no attention call was seen, and '{spec.text}' needs the layers of a "
                "Vision Transformer. Attention of another form than softmax(q kᵀ) v (factorised, linear) is not read, "
                "nor one that runs outside torch (xformers, flash-attn kernels: switch that off); use saliency."
            )
        self.used = over.used(count)
        self.keep_layers = layers
        self.row: Tensor | None = over.start_row(trace.read) if over.matrices_only else None
        self.rows_of_layers: dict[int, Tensor] = {}

    def wants(self, index: int) -> bool:
        return self.result.error is None and (index in self.used or self.keep_layers)

    def visit(self, view: LayerView, indices: list[int]) -> None:
        """Take what the method says of a layer, or of several at once."""
        used = [place for place, index in enumerate(indices) if index in self.used]
        try:
            said = view.once(
                self.spec.key, lambda: as_map_result(self.spec.method.function(view, **dict(self.spec.options))).maps
            )
        except (NotApplicable, BadInput):
            if used:
                raise
            self.keep_layers = False  # the method is there for some layers only, so there is no strip of all
            return
        each = said.reshape(len(indices), -1, *said.shape[1:])  # [layers, B, …]
        read = self.trace.read if said.ndim == 3 else said[: each.shape[1]]
        if said.ndim == 3 and said.shape[1] != read.shape[1]:
            assert self.trace.read_rows is not None
            read = read[:, self.trace.read_rows]
        if used:
            self._check_tokens(each)
            self.row = self.aggregation.steps(self.row, each[used[0] : used[-1] + 1], read)
        if self.keep_layers:
            self.rows_of_layers |= {index: reading(part, read) for index, part in zip(indices, each, strict=True)}

    def _check_tokens(self, each: Tensor) -> None:
        if self.row is not None and (self.row.shape[-1] != each.shape[-1] or len(self.row) not in (1, each.shape[1])):
            counts = [len(t) * t.shape[-1] // len(self.trace.pixels) for t in (self.row, each[0])]
            raise NotApplicable(
                f"'{self.spec.text}' adds up layers, and this model's token count changes between them "
                f"({counts[0]} and {counts[1]}). Use one layer: {self.spec.method.name}+last."
            )

    def finish(self) -> None:
        if self.result.error is not None:
            return
        assert self.row is not None
        row = self.aggregation.finish(self.row, len(self.trace.layers), self.trace.layout)
        grid_of = self.used[-1]
        self.result.maps = self._on_grid(row.clamp(min=0) if self.spec.relu else row, grid_of)
        if self.spec.method.caveats.note is not None:
            note = self.spec.method.caveats.note(self.trace, self.used, **dict(self.spec.options))
            self.result.notes += [] if note is None else [f"{self.spec.text}: {note}"]
        if self.keep_layers:
            shapes = {r.shape for r in self.rows_of_layers.values()}
            if len(shapes) == 1:
                rows = [self._on_grid(self.rows_of_layers[i], i) for i in sorted(self.rows_of_layers)]
                self.result.layers = torch.stack(rows)

    def _on_grid(self, row: Tensor, index: int) -> Tensor:
        """[B, N] without its prefix tokens, as [B, rows, cols]."""
        return laid_out(row, self.trace, index).expand(len(self.trace.pixels), -1, -1)


def _whole_image(spec: MethodSpec, trace: Trace, seed: int, result: Result) -> None:
    options = dict(spec.options)
    if trace.target is not None and spec.method.score != "logit":
        trace = replace(trace, target=trace.target.preferring(spec.method.score))
        result.score = trace.target.score if trace.target is not None else None
    if "seed" in _parameters(spec.method.function):
        options["seed"] = seed
    forwards, backwards = trace.recording.forwards, trace.recording.backwards
    output = as_map_result(spec.method.function(trace, **options))
    result.more = Cost(trace.recording.forwards - forwards, trace.recording.backwards - backwards)
    dtype = widened(trace.logits).dtype
    result.maps = (output.maps.clamp(min=0) if spec.relu else output.maps).to(dtype)
    result.standard_error = None if output.standard_error is None else output.standard_error.to(dtype)
    result.blank, result.chosen = output.unmoved, output.chosen
    result.notes += dict.fromkeys(output.notes)


@functools.cache
def _parameters(function: MapFunction) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


class _Timed:
    """Adds the time spent to a result, and keeps a refusal there so that the other methods go on."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        self.result.seconds += time.perf_counter() - self.started
        if isinstance(error, NotApplicable):
            self.result.error = error.with_traceback(None)  # its frames would hold the trace until the next collection
            return True
        return False
