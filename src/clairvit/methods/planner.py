"""Planner: many methods and targets on one recording, with one backward per target and rule table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import ClairError, NotApplicable
from clairvit.execution import ExecutionOptions
from clairvit.methods.alternatives import with_named_methods
from clairvit.methods.executor import Result, run
from clairvit.methods.result import as_map_result
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.methods.tails import run_on_tails
from clairvit.models.model import Model
from clairvit.targets.base import TargetBatch, class_agnostic_target
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.rules import PLAIN, RuleTable
from clairvit.tracing.structure import ModelStructure, model_structure
from clairvit.tracing.trace import GradientScope, Trace, run_backward


def record_for(
    specs: Sequence[MethodSpec],
    model: Model,
    pixels: Tensor,
    options: ExecutionOptions | None = None,
    structure: ModelStructure | None = None,
) -> Recording:
    """Run one forward that records all that these methods require; `options` are for perturbed passes that follow.

    `structure` is that of the model for these images, where it is known in this call.
    """
    single = singles(specs)
    structure = structure or model_structure(model, pixels)
    passable = not structure.barriers  # else methods that read gradients are refused, one by one
    recording = record(
        model,
        pixels,
        rules=[table for table in by_rules(single) if table is not None] or [PLAIN],
        differentiable=passable and any(spec.passes in ("backward", "local") for spec in single),
        recorders=dict.fromkeys(recorder for spec in single for recorder in spec.requires.recorders),
        structure=structure,
    )
    recording.options = options or recording.options
    return recording


@own_grad_mode()
def run_all(
    specs: Sequence[MethodSpec],
    recording: Recording,
    targets: Sequence[TargetBatch],
    *,
    seed: int = 0,
    layers: bool = False,
) -> dict[str, list[Result]]:
    """Return method text -> one result per target."""
    single = singles(specs)
    if not single:
        return {}
    results: dict[str, list[Result]] = {spec.text: [] for spec in single}
    on_tails, single = [spec for spec in single if spec.on_tails], [spec for spec in single if not spec.on_tails]
    groups = by_rules(single)
    last, count = (list(groups) or [None])[-1], len(recording.inputs)
    for target in targets:
        others: dict[RuleTable, Trace] = {}  # those that a method of another group reads too
        for table, group in groups.items():
            # The last backward frees the graph, so that its memory is free for N×N matrices.
            keep = not (target is targets[-1] and table == last) or table is None
            readers = [*group, *(spec for spec in single if spec.second_rules == table is not None)]
            rules = None if recording.structure.barriers else table
            # How far back the gradient must go for these methods, and where it is read.
            backward = [spec for spec in readers if spec.passes == "backward"]
            first = 0 if layers else min((spec.first_layer(count) for spec in backward if count), default=count)
            places = {place for spec in backward for place in spec.gradients}
            scope = GradientScope(first, *(at in places for at in ("attention", "tokens", "pixels", "embedding")))
            recorders = {recorder for spec in readers for recorder in spec.requires.recorders}
            trace = run_backward(recording, target, rules, keep=keep, scope=scope, recorders=recorders)
            for spec, result in zip(group, run(group, trace, others, seed=seed, layers=layers), strict=True):
                results[spec.text].append(_advised(result, recording, target))
            if len(readers) > len(group) and table is not None:
                others[table] = trace
            del trace  # free its gradients before the next backward
        if on_tails:
            run_on = functools.partial(_run_on, recording.options, seed)
            for text, result in run_on_tails(on_tails, recording, target, run_on, layers=layers).items():
                results[text].append(_advised(result, recording, target))
    for spec in specs:
        if spec.members:
            columns = zip(*(results[member.text] for member in spec.members), strict=True)
            results[spec.text] = [_ensemble_result(spec, column) for column in columns]
    return results


def _run_on(
    options: ExecutionOptions,
    seed: int,
    specs: Sequence[MethodSpec],
    model: Model,
    pixels: Tensor,
    photos: Tensor,
    target: TargetBatch,
) -> tuple[Recording, dict[str, list[Result]]]:
    """Run methods on images of a sub-network, whose random draws depend on the photos that these were made of."""
    recording = record_for(specs, model, pixels, options)
    recording.photos = photos
    return recording, run_all(specs, recording, [target], seed=seed)


def _advised(result: Result, recording: Recording, target: TargetBatch) -> Result:
    """Return a result whose error, if it has one, names methods that fit the model."""
    if isinstance(result.error, NotApplicable):
        result.error = with_named_methods(result.error, functools.partial(_fits, recording, target))
    return result


_asks_what_fits: ContextVar[bool] = ContextVar("_asks_what_fits", default=False)


def _fits(recording: Recording, target: TargetBatch, name: str) -> bool:
    """Return whether a method that is to be advised fits the model: by running it on the first image.

    Methods of many passes are not run: they need answers, which the recording shows to exist, and patches to remove.
    """
    spec = resolve_method(name)
    is_quick = not (spec.method.slow or spec.own_cost().forwards)
    capturing = recording.pixels.is_cuda and torch.cuda.is_current_stream_capturing()
    if _asks_what_fits.get() or capturing:
        return True
    if not is_quick:
        return recording.structure.layout is not None or bool(recording.structure.stages)
    if name not in recording.fitting:
        asking = _asks_what_fits.set(True)
        try:
            first = record_for([spec], recording.model, recording.pixels[:1].detach())
            single = class_agnostic_target(1) if target.class_agnostic else target.by_row(recording.logits).take([0])
            (result,) = run_all([spec], first, [single])[spec.text]
            recording.fitting[name] = result.error is None
        except ClairError:
            recording.fitting[name] = False
        finally:
            _asks_what_fits.reset(asking)
    return recording.fitting[name]


def spent_on(recording: Recording, specs: Sequence[MethodSpec], targets: int = 1) -> Cost:
    """Return the passes of a recording that these methods were run on, with the backwards of single blocks."""
    local = targets * any(spec.passes == "local" for spec in singles(specs))
    return Cost(recording.forwards, recording.backwards + local)


def singles(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """Return the methods to run: an ensemble is its members, and none is run twice."""
    return list({single.text: single for spec in specs for single in spec.members or (spec,)}.values())


def _ensemble_result(spec: MethodSpec, members: Sequence[Result]) -> Result:
    """Return an ensemble's result for one target."""
    result = Result(
        seconds=sum(member.seconds for member in members), notes=[note for member in members for note in member.notes]
    )
    result.own_cost = sum((member.own_cost for member in members), Cost())
    result.number_notes = [note for member in members for note in member.number_notes]
    result.unmoved = _unmoved_in_one([member.unmoved for member in members])
    result.error = next((member.error for member in members if member.error is not None), None)
    maps = [member.maps for member in members if member.maps is not None]
    if result.error is None:
        try:
            with torch.no_grad():
                result.maps = as_map_result(spec.method.function(maps, **dict(spec.options))).maps
        except NotApplicable as error:
            result.error = error.with_traceback(None)
    return result


def _unmoved_in_one(marks: Sequence[Sequence[bool] | Tensor]) -> Sequence[bool] | Tensor:
    """Return which images are marked by a member, [B]; stays on the device if the marks of a member are there."""
    tensors = list({id(mark): mark for mark in marks if isinstance(mark, Tensor)}.values())
    listed = [mark for mark in marks if not isinstance(mark, Tensor)]
    in_lists = [any(row) for row in zip(*listed, strict=True)]
    if not tensors:
        return in_lists
    in_tensors = torch.stack(tensors).any(0)
    return in_tensors | torch.tensor(in_lists, device=in_tensors.device) if any(in_lists) else in_tensors


def misfits(specs: Sequence[MethodSpec], models: Sequence[Model], *, skip: bool) -> dict[str, str]:
    """Return method text -> why it does not fit, of methods that were fitted to another model; raise without `skip`."""
    errors = {spec.text: error for model in models for spec in specs if (error := spec.misfit(model)) is not None}
    if errors and not skip:
        raise next(iter(errors.values()))
    return {text: str(error) for text, error in errors.items()}


def by_rules(specs: Sequence[MethodSpec]) -> dict[RuleTable | None, list[MethodSpec]]:
    """Group methods by the rule table of the trace they read.

    First come those that need the graph itself (None), last the plain table. What needs no backward joins the last.
    """
    groups: dict[RuleTable | None, list[MethodSpec]] = {}
    local = [spec for spec in specs if spec.passes == "local"]
    if local:
        groups[None] = local
    tables = {table for spec in specs for table in spec.tables}
    for table in sorted(tables, key=lambda table: (table == PLAIN, table.name, table.parameters)):
        groups[table] = [spec for spec in specs if spec.rules == table]
    without_backward = [spec for spec in specs if spec.passes in ("none", "forward")]
    if without_backward:
        groups.setdefault(list(groups)[-1] if groups else None, []).extend(without_backward)
    return groups
