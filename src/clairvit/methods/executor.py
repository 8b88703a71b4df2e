"""Executor: visit the layers once, and compute what all methods need of a layer while it is at hand."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.cuda import layers as gpu_layers
from clairvit.errors import BadInput, ClairError, NotApplicable
from clairvit.methods.aggregation import Aggregation, Total, VectorAggregation, reading
from clairvit.methods.encoder_decoder import reads_queries, token_relevance
from clairvit.methods.layer_product import LayerProduct
from clairvit.methods.layer_view import LayerView, RunContext, check_plane, tokens_to_grid
from clairvit.methods.result import LayerGrid, MapFunction, MapResult, NumbersNote, Refinement, as_map_result
from clairvit.methods.spec import MethodSpec
from clairvit.numerics import index_tensor, repeat_cells, spread_evenly, widened
from clairvit.tracing.attention_reductions import query_tiles
from clairvit.tracing.gradient_barriers import blocked_gradient
from clairvit.tracing.grid import on_grid
from clairvit.tracing.rules import RuleTable
from clairvit.tracing.rules.coverage import note_on
from clairvit.tracing.structure import ModelStructure
from clairvit.tracing.trace import Trace

LAYER_MAP_FORMS = {"matrix": ("B", "rows", "N"), "tokens": ("B", "N")}


@dataclass(eq=False)
class Result:
    """A method's raw maps, or why there are none."""

    maps: Tensor | None = None  # [B, rows, cols]
    layers: Tensor | None = None  # [L, B, rows, cols]
    layer_grids: tuple[LayerGrid, ...] = ()  # of layers of different sizes, whose cells `layers` repeats
    other_tokens: Tensor | None = None  # [B, T], of the tokens that are no patches, in their order
    error: ClairError | None = None
    seconds: float = 0.0
    own_cost: Cost = field(default_factory=Cost)  # passes beyond the shared trace
    notes: list[str] = field(default_factory=list)
    number_notes: list[NumbersNote] = field(default_factory=list)
    # images whose score nothing changes: no gradient, or the same whatever is removed; [B], or empty
    unmoved: Sequence[bool] | Tensor = ()
    standard_error: Tensor | None = None  # [B, rows, cols]
    chosen: Tensor | None = None  # bool [B, rows, cols]
    refinement: Refinement | None = None  # of maps that passes refined
    score: str | None = None  # the kind of score it explained, if another than the target's

    def note_texts(self) -> list[str]:
        """Return all notes; those made of numbers wait for the device."""
        return [*self.notes, *(text for note in self.number_notes for text in note.read())]


def run(
    specs: Sequence[MethodSpec],
    trace: Trace,
    others: Mapping[RuleTable, Trace] = MappingProxyType({}),
    *,
    seed: int = 0,
    layers: bool = False,
) -> list[Result]:
    """Return one result per method, in order. A method that does not fit the model gets its error as result.

    Args:
        specs: The methods; all read this trace.
        trace: One forward and at most one backward.
        others: Traces of the same target under second rule tables.
        seed: Of methods that draw random numbers.
        layers: Keep the maps of single layers too.
    """
    results = [Result() for _ in specs]
    context = RunContext(trace, others)
    passes = []
    # The caller's autocast is for the model; our sums stay as wide as they are.
    with torch.no_grad(), torch.autocast(trace.pixels.device.type, enabled=False):
        for spec, result in zip(specs, results, strict=True):
            with _timed(result):
                result.notes += _check_fit(spec, trace)
                if spec.aggregation is None:
                    _run_image_method(spec, trace, seed, result, layers=layers)
                elif trace.decoder and reads_queries(spec, trace):
                    row = token_relevance(spec, trace, context)  # [B, N]
                    maps = tokens_to_grid(row, trace, len(trace.layers) - 1)
                    result.maps = maps.clamp(min=0) if spec.relu else maps
                else:
                    passes.append(_LayerPass(spec, spec.aggregation, result, trace, layers))
        for ascending in (False, True):
            ordered = [layer_pass for layer_pass in passes if layer_pass.aggregation.ascending == ascending]
            order = range(len(trace.layers)) if ascending else reversed(range(len(trace.layers)))
            used = [index for index in order if any(layer_pass.wants(index) for layer_pass in ordered)]
            if gpu_layers.is_launch_bound(trace):  # several at once
                gpu_layers.visit_layers(ordered, used, context, _show, _visit_layer)
                continue
            for index in used:
                _visit_layer(ordered, LayerView(trace.layers[index], context))
        for layer_pass in passes:
            with _timed(layer_pass.result):
                layer_pass.finish()
    for spec, result in zip(specs, results, strict=True):
        traces = {table: trace if table == trace.rules else others.get(table) for table in spec.tables}
        result.notes += [
            note_on(read.without_rule, str(table)) for table, read in traces.items() if read and read.without_rule
        ]
        if spec.passes == "backward":
            result.unmoved = trace.zero_gradient
        elif not len(result.unmoved):
            result.unmoved = [False] * len(trace.pixels)
    return results


def _visit_layer(passes: Sequence[_LayerPass], view: LayerView) -> None:
    """Show a layer to every method that needs it."""
    _show(_visit_large(passes, view) if view.is_large else passes, view, [view.index])


def _show(passes: Sequence[_LayerPass], view: LayerView, indices: list[int]) -> list[_LayerPass]:
    """Show the view of some layers to each method that needs one of them; return those that must see them one by one.

    A method that reads a matrix as the head does sees these rows of it alone.
    """
    rows_view: LayerView | None = None
    unstackable = []
    for layer_pass in passes:
        if not any(layer_pass.wants(index) for index in indices):
            continue
        try:
            with _timed(layer_pass.result):
                if layer_pass.spec.method.output == "matrix" and not layer_pass.spec.needs_all_rows:
                    rows_view = rows_view or view.reading_rows()
                    layer_pass.visit(rows_view, indices)
                else:
                    layer_pass.visit(view, indices)
        except gpu_layers.NotStackable:
            unstackable.append(layer_pass)
    return unstackable


def _visit_large(passes: Sequence[_LayerPass], view: LayerView) -> list[_LayerPass]:
    """Read a layer without its N×N matrices where methods allow it; return the methods that need another view."""
    index, rest = view.index, [layer_pass for layer_pass in passes if not layer_pass.multiplies(view)]
    reading = [layer_pass for layer_pass in passes if layer_pass not in rest and layer_pass.wants(index)]
    for layer_pass in reading:
        with _timed(layer_pass.result):
            layer_pass.begin_product(view)
    by_form = [p for p in reading if p.product is not None and p.spec.requires.heads is not None and view.reads_sums]
    if by_form:
        with _timed(*(layer_pass.result for layer_pass in by_form)):
            forms = [form for p in by_form if (form := p.spec.requires.heads) is not None]
            LayerProduct.from_sums([p.product for p in by_form if p.product is not None], forms, view)
    by_tile = [layer_pass for layer_pass in reading if layer_pass not in by_form]
    for rows in query_tiles(view.layer.between_tokens(), view.tile_bytes) if by_tile else ():
        tile = view.tile(rows)
        for layer_pass in by_tile:
            with _timed(layer_pass.result):
                layer_pass.add_tile(tile, rows)
    for layer_pass in reading:
        with _timed(layer_pass.result):
            layer_pass.finish_product(index)
    return rest


def _check_fit(spec: MethodSpec, trace: Trace) -> list[str]:
    """Raise NotApplicable for a method that does not fit what was recorded; return notes on what it leaves out.

    A method that reads inside the model could read another one than it is meant for, a gradient may be blocked, patches
    may lie on no plane, and the head may pool in a way that the method is not defined for.
    """
    recording, structure = trace.recording, trace.recording.structure
    if spec.requires.recorders or set(spec.gradients) - {"pixels"}:
        structure.check_members(recording.model.name, f"'{spec.text}'")
    for table in spec.tables:
        structure.check_rules(table, f"'{spec.text}'")
    if structure.barriers and spec.reads_gradients:
        raise blocked_gradient(structure.barriers, f"'{spec.text}'", attention=bool(structure.sites))
    lost = "the forward calls detach(), so that the gradient leaves out what the scores owe to the detached tensors"
    notes = [f"{spec.text}: {lost}"] if structure.is_detached and spec.reads_gradients else []
    if spec.requires.plane:
        check_plane(trace, spec.method.name)
    allowed = spec.requires.poolings
    if allowed and trace.layers and trace.layout.pooling not in allowed:  # without layers the layer pass says so
        raise NotApplicable(
            f"'{spec.method.name}' is defined for models whose head reads {' or '.join(allowed)} pooling, and "
            f"{recording.model.name} has {trace.layout.pooling} pooling.",
            methods=("gradcam", "decompx"),
        )
    return notes


def no_layers(spec: MethodSpec, structure: ModelStructure, model: str) -> NotApplicable:
    """Return why a method that combines layers does not fit a model in which none were seen."""
    barriers = structure.barriers
    return NotApplicable(
        f"{model}: {structure.attention_seen}, and '{spec.text}' needs the layers of a Vision Transformer. Attention "
        "of another form than softmax(q kᵀ) v (factorised, linear) is not read, nor queries in chunks, nor one inside "
        "torch.vmap or outside torch (xformers, flash-attn kernels: switch that off).",
        methods=() if barriers else ("saliency",),
        alternative="a perturbation method" if barriers else None,
    )


class _LayerPass:
    """The state of one method while the layers are visited."""

    def __init__(self, spec: MethodSpec, aggregation: Aggregation, result: Result, trace: Trace, layers: bool) -> None:
        self.spec, self.aggregation, self.result, self.trace = spec, aggregation, result, trace
        count = len(trace.layers)
        if not count:
            raise no_layers(spec, trace.recording.structure, trace.recording.model.name)
        self.used = aggregation.used(count)
        if spec.method.output == "matrix":
            unfit = [layer for layer in trace.layers if layer.call is not None and layer.call.kind != "tokens"]
            if any(layer.index in self.used for layer in unfit):
                unfit[0].between_tokens()  # raises: the first such layer says most about the model
        # The number of tokens of every layer of a plain Vision Transformer; None where it changes on the way.
        plain = all(layer.call is not None and layer.call.kind == "tokens" for layer in trace.layers)
        counts = {int(layer.tokens.shape[1]) for layer in trace.layers if layer.tokens is not None}
        self.tokens = counts.pop() if plain and len(counts) == 1 else None
        self.keep_layers = layers
        self.row: Tensor | None = aggregation.start_row(trace.readout_weights) if aggregation.matrices_only else None
        self.last_index = self.used[-1]  # the layer that was added to `row` last
        self.stages: list[tuple[Tensor, int]] = []  # sums over layers of one size [B, N] each, and one of those layers
        self.rows_of_layers: dict[int, Tensor] = {}
        self.product: LayerProduct | None = None  # of the large layer that is being read

    def wants(self, index: int) -> bool:
        return self.result.error is None and (index in self.used or self.keep_layers)

    def visit(self, view: LayerView, indices: list[int]) -> None:
        """Add the map of a layer, or of several at once."""
        used = [position for position, index in enumerate(indices) if index in self.used]
        maps = self._maps(view, is_used=bool(used))
        if maps is None:
            return
        layer_maps = maps.reshape(len(indices), -1, *maps.shape[1:])  # [layers, B, …]
        read = self.trace.readout_weights if maps.ndim == 3 else maps[: layer_maps.shape[1]]
        if maps.ndim == 3 and maps.shape[1] != read.shape[1]:
            assert self.trace.readout_rows is not None
            read = read[:, self.trace.readout_rows]
        if used:
            self._check_tokens(layer_maps.shape[1], layer_maps.shape[-1], is_matrix=layer_maps.ndim == 4)
            self.row = self.aggregation.steps(self.row, layer_maps[used[0] : used[-1] + 1], read)
            self.last_index = indices[used[-1]]
        if self.keep_layers:
            self.rows_of_layers |= {
                i: reading(layer_map, read) for i, layer_map in zip(indices, layer_maps, strict=True)
            }

    def _maps(self, view: LayerView, *, is_used: bool) -> Tensor | None:
        """Return the method's layer map; None where it has none of a layer that it does not need."""
        try:
            return view.once(self.spec.key, lambda: self._checked_maps(view))
        except (NotApplicable, BadInput):
            if is_used:
                raise
            self.keep_layers = False  # the method is defined for some layers only, so not all can be kept
            return None

    def _checked_maps(self, view: LayerView) -> Tensor:
        """Return what the method's function gives; raise BadInput where that is no map of a layer."""
        output = self.spec.method.function(view, **dict(self.spec.options))
        maps = output.maps if isinstance(output, MapResult) else output
        form = LAYER_MAP_FORMS[self.spec.method.output]
        if not isinstance(maps, Tensor) or maps.ndim != len(form):
            raise _wrong_output(self.spec, maps, f"a tensor [{', '.join(form)}] per layer")
        if self.spec.method.output == "tokens" and self.tokens not in (None, maps.shape[1]):
            layout = view.layout
            if layout.pooling != "map" or maps.shape[1] != layout.patches:  # an attention pool may see patches alone
                raise _wrong_output(self.spec, maps, f"a number for each of the {self.tokens} tokens, [B, N]")
        return maps

    def multiplies(self, view: LayerView) -> bool:
        """Return whether it reads all rows of a layer's matrix, as vector × matrix, and can have them one by one."""
        reads_all = self.spec.needs_all_rows or view.trace.readout_rows is None
        return (
            self.spec.method.output == "matrix"
            and reads_all
            and not self.spec.requires.all_rows
            and isinstance(self.aggregation, VectorAggregation)
        )

    def begin_product(self, view: LayerView) -> None:
        """Begin to read a large layer's matrix."""
        call, is_used = view.layer.between_tokens(), view.index in self.used
        assert isinstance(self.aggregation, VectorAggregation)
        if is_used:
            self._check_tokens(call.lead, call.keys, is_matrix=True)
        aggregation = self.aggregation if is_used else None
        self.product = LayerProduct(aggregation, self.row, self.trace.readout_weights, keep_layer=self.keep_layers)

    def add_tile(self, tile: LayerView, rows: slice) -> None:
        """Add some rows of the layer that is being read."""
        if self.product is not None and self.wants(tile.index):
            maps = self._maps(tile, is_used=tile.index in self.used)
            self.product = None if maps is None else self.product
            if self.product is not None and maps is not None:
                self.product.add_tile(maps, rows)

    def finish_product(self, index: int) -> None:
        """Take what was read of a large layer."""
        product, self.product = self.product, None
        if product is None or not self.wants(index):
            return
        if index in self.used:
            self.row, self.last_index = product.advance(), index
        if self.keep_layers:
            self.rows_of_layers[index] = product.layer_row()

    def _check_tokens(self, batch: int, tokens: int, *, is_matrix: bool) -> None:
        """Begin a new stage where a sum comes to layers of another size; raise where layers are multiplied."""
        row = self.row
        if row is not None and (row.shape[-1] != tokens or len(row) not in (1, batch)):
            if isinstance(self.aggregation, Total) and not is_matrix:  # one number per token
                self.stages.append((row, self.last_index))
                self.row = None
                return
            counts = [size // len(self.trace.pixels) for size in (len(row) * row.shape[-1], batch * tokens)]
            raise NotApplicable(
                f"'{self.spec.text}' adds up layers, and this model's token count changes between them "
                f"({counts[0]} and {counts[1]}). Use one layer: {self.spec.method.name}+last."
            )

    def finish(self) -> None:
        """Fill in the result: the map on its grid, notes, and single layers."""
        if self.result.error is not None:
            return
        assert self.row is not None
        stages = [*self.stages, (self.row, self.last_index if self.stages else self.used[-1])]
        rows = [self.aggregation.finish(row, len(self.trace.layers), self.trace.layout) for row, _ in stages]
        batch = len(self.trace.pixels)
        parts = [tokens_to_grid(row, self.trace, index) for row, (_, index) in zip(rows, stages, strict=True)]
        parts = [maps.expand(batch, *maps.shape[1:]) for maps in parts]
        total = parts[0] if len(parts) == 1 else self._sum_of_stages(parts)
        self.result.maps = total.clamp(min=0) if self.spec.relu else total
        if len(rows) == 1 and rows[0].shape[1] == self.trace.layout.tokens:
            other_rows = index_tensor(tuple(self.trace.layout.other_rows), rows[0].device)
            others = rows[0].index_select(1, other_rows).expand(batch, -1)
            self.result.other_tokens = others.clamp(min=0) if self.spec.relu else others
        if self.spec.method.caveats.note is not None:
            note = self.spec.method.caveats.note(self.trace, self.used, **dict(self.spec.options))
            if isinstance(note, NumbersNote):
                self.result.number_notes.append(replace(note, prefix=f"{self.spec.text}: "))
            elif note is not None:
                self.result.notes.append(f"{self.spec.text}: {note}")
        if self.keep_layers:
            self._keep_layers(batch)

    def _keep_layers(self, batch: int) -> None:
        """Fill in the maps of single layers; those of different sizes on the finest grid, their cells repeated."""
        indices = sorted(self.rows_of_layers)
        grids = [
            on_grid(self.rows_of_layers[i], self.trace.in_order, self.trace.layers[i].grid, self.trace.pixels)
            for i in indices
        ]
        maps = [grid.expand(batch, *grid.shape[1:]) for grid in grids if grid is not None]
        if not maps or len(maps) < len(grids):
            return
        sizes = {tuple(part.shape[1:]) for part in maps}
        if len(sizes) > 1:
            if any(part.ndim != 3 for part in maps):
                return
            named = zip(indices, maps, strict=True)
            self.result.layer_grids = tuple(
                LayerGrid(self.trace.layers[i].name or f"layer {i}", *part.shape[1:]) for i, part in named
            )
            finest = max(size[0] for size in sizes), max(size[1] for size in sizes)
            maps = [repeat_cells(part, finest) for part in maps]
        stacked = torch.stack(maps)
        self.result.layers = stacked.clamp(min=0) if self.spec.relu else stacked

    def _sum_of_stages(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of maps of several sizes on the finest grid, [B, rows, cols]; each cell is spread evenly."""
        finest = max((int(part.shape[-2]), int(part.shape[-1])) for part in parts)
        sizes = ", ".join(dict.fromkeys(f"{part.shape[-2]}×{part.shape[-1]}" for part in reversed(parts)))
        self.result.notes.append(
            f"{self.spec.text}: layers of different sizes ({sizes}) were added on the finest grid, each cell spread "
            "evenly over the finer cells that it covers."
        )
        return torch.stack([spread_evenly(part, finest) for part in parts]).sum(0)


def _run_image_method(spec: MethodSpec, trace: Trace, seed: int, result: Result, *, layers: bool) -> None:
    """Run a method that makes its map from the whole trace, and fill in its result."""
    options = dict(spec.options)
    if trace.target is not None and spec.method.score != "logit":
        trace = replace(trace, target=trace.target.with_preferred_score(spec.method.score))
        result.score = trace.target.score if trace.target is not None else None
    if "seed" in _parameters(spec.method.function):
        options["seed"] = seed
    forwards, backwards = trace.recording.forwards, trace.recording.backwards
    output = as_map_result(spec.method.function(trace, **options))
    axes = trace.pixels.ndim - 1  # clips have frames too
    if not isinstance(output.maps, Tensor) or output.maps.ndim != axes or len(output.maps) != len(trace.pixels):
        form = "[B, rows, cols]" if axes == 3 else "[B, frames, rows, cols]"
        raise _wrong_output(spec, output.maps, f"a tensor {form} with a map for each of {len(trace.pixels)} images")
    result.own_cost = Cost(trace.recording.forwards - forwards, trace.recording.backwards - backwards)
    dtype = widened(trace.logits).dtype
    result.maps = (output.maps.clamp(min=0) if spec.relu else output.maps).to(dtype)
    result.standard_error = None if output.standard_error is None else output.standard_error.to(dtype)
    result.layers = output.layers().to(dtype) if layers and output.layers is not None else None
    result.unmoved, result.chosen, result.refinement = output.unmoved, output.chosen, output.refinement
    result.notes += dict.fromkeys(output.notes)


def _wrong_output(spec: MethodSpec, output: object, expected: str) -> BadInput:
    """Return the error of a method whose function returned something else than the map that it was registered for."""
    shape = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    return BadInput(
        f"The method '{spec.method.name}' is registered with output='{spec.method.output}', and its function returned "
        f"{shape}; expected {expected}."
    )


@functools.lru_cache(maxsize=256)  # functions may hold tensors
def _parameters(function: MapFunction) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


@contextlib.contextmanager
def _timed(*results: Result) -> Iterator[None]:
    """Add the time spent to a result, or to several alike; keep a NotApplicable error there: other methods go on."""
    started = time.perf_counter()
    try:
        yield
    except NotApplicable as error:
        for result in results:
            # The frames of its traceback would hold the trace until the next collection.
            result.error = error.with_traceback(None)
    finally:
        seconds = (time.perf_counter() - started) / len(results)
        for result in results:
            result.seconds += seconds
