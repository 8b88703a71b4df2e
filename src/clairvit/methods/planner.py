"""Together: many methods and targets on one recording, with one backward for each target and rule table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clairvit.methods.executor import Result, run
from clairvit.methods.explanation import Cost
from clairvit.methods.spec import MethodSpec
from clairvit.models.model import Model
from clairvit.targets.target import Target
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.structure import model_structure
from clairvit.tracing.trace import GradientScope, Trace, run_backward


def record_for(bounds: Sequence[MethodSpec], model: Model, pixels: Tensor) -> Recording:
    """One forward with all that these methods will ask of it."""
    single = singles(bounds)
    passable = not model_structure(model, pixels).barriers  # else methods that read gradients are refused, one by one
    return record(
        model,
        pixels,
        tables=[table for table in by_trace(single) if table is not None] or ["plain"],
        differentiable=passable and any(bound.passes in ("backward", "local") for bound in single),
        local=any(bound.passes == "local" for bound in single),
        inside=any(bound.inside for bound in single),
        middles=any(bound.middles for bound in single),
        biases=sorted({bound.biases for bound in single if bound.biases is not None}) if passable else (),
    )


@own_grad_mode()
def run_all(
    bounds: Sequence[MethodSpec],
    recording: Recording,
    targets: Sequence[Target],
    *,
    seed: int = 0,
    layers: bool = False,
) -> dict[str, list[Result]]:
    """Method text -> one result for each target."""
    single = singles(bounds)
    groups = by_trace(single)
    results: dict[str, list[Result]] = {bound.text: [] for bound in single}
    last = list(groups)[-1]
    for goal in targets:
        others: dict[str, Trace] = {}  # those that a method of another group reads too
        for table, group in groups.items():
            # The last backward frees the graph, so that the walk over its N×N matrices has the room.
            keep = not (goal is targets[-1] and table == last) or table is None
            readers = [*group, *(bound for bound in single if bound.also == table is not None)]
            rules = None if recording.structure.barriers else table
            trace = run_backward(
                recording, goal, rules, keep=keep, reach=reach_of(readers, len(recording.inputs), layers)
            )
            for bound, result in zip(group, run(group, trace, others, seed=seed, layers=layers), strict=True):
                results[bound.text].append(result)
            if len(readers) > len(group) and table is not None:
                others[table] = trace
            del trace  # its gradients should not lie beside the next one's
    for bound in bounds:
        if bound.members:
            columns = zip(*(results[one.text] for one in bound.members), strict=True)
            results[bound.text] = [_joined(bound, column) for column in columns]
    return results


def spent_on(recording: Recording, bounds: Sequence[MethodSpec], targets: int = 1) -> Cost:
    """The passes of a recording that these methods were run on, with the backwards that local ones make themselves."""
    local = targets * any(bound.passes == "local" for bound in singles(bounds))
    return Cost(recording.forwards, recording.backwards + local)


def singles(bounds: Sequence[MethodSpec]) -> list[MethodSpec]:
    """The methods to be run: an ensemble is its members, and none is run twice."""
    return list({one.text: one for bound in bounds for one in bound.members or (bound,)}.values())


def _joined(bound: MethodSpec, members: Sequence[Result]) -> Result:
    """An ensemble's result for one target."""
    found = Result(seconds=sum(one.seconds for one in members), notes=[n for one in members for n in one.notes])
    found.more = sum((one.more for one in members), Cost())
    found.blank = [any(marks) for marks in zip(*(one.blank for one in members), strict=True)]
    found.error = next((one.error for one in members if one.error is not None), None)
    maps = [one.maps for one in members if one.maps is not None]
    if found.error is None:
        with torch.no_grad():
            found.maps = bound.method.function(maps, **dict(bound.options))
    return found


def by_trace(bounds: list[MethodSpec]) -> dict[str | None, list[MethodSpec]]:
    """Group methods by the rule table of the trace they read, those with N×N matrices last.

    First come those that need the graph itself (None), last the plain table. What needs no backward joins the last.
    """
    groups: dict[str | None, list[MethodSpec]] = {}
    local = [bound for bound in bounds if bound.passes == "local"]
    if local:
        groups[None] = local
    own = {table for bound in bounds for table in (bound.rules, bound.also) if table is not None}
    for table in sorted(own, key=lambda name: (name == "plain", name)):
        groups[table] = [bound for bound in bounds if bound.rules == table]
    free = [bound for bound in bounds if bound.passes in ("none", "forward")]
    if free:
        groups.setdefault(list(groups)[-1] if groups else None, []).extend(free)
    return groups


def reach_of(group: list[MethodSpec], count: int, layers: bool) -> GradientScope:
    """How far back the gradient must go for these methods."""
    read = [bound for bound in group if bound.passes == "backward"]
    first = 0 if layers else min((bound.first_layer(count) for bound in read if count), default=count)
    return GradientScope(
        first,
        attention=any(bound.needs_attention for bound in read),
        tokens=any(bound.needs_tokens for bound in read),
        pixels=any(bound.needs_pixels for bound in read),
    )
