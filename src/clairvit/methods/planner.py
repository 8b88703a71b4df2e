"""Together: many methods and targets on one recording, with one backward for each target and rule table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clairvit.methods.executor import Result, run
from clairvit.methods.explanation import Cost
from clairvit.methods.spec import MethodSpec
from clairvit.models.model import Model
from clairvit.targets.base import Target
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.structure import model_structure
from clairvit.tracing.trace import GradientScope, Trace, run_backward


def record_for(specs: Sequence[MethodSpec], model: Model, pixels: Tensor) -> Recording:
    """One forward with all that these methods will ask of it."""
    single = singles(specs)
    passable = not model_structure(model, pixels).barriers  # else methods that read gradients are refused, one by one
    return record(
        model,
        pixels,
        tables=[table for table in by_trace(single) if table is not None] or ["plain"],
        differentiable=passable and any(spec.passes in ("backward", "local") for spec in single),
        local=any(spec.passes == "local" for spec in single),
        inside=any(spec.inside for spec in single),
        middles=any(spec.middles for spec in single),
        biases=sorted({spec.biases for spec in single if spec.biases is not None}) if passable else (),
    )


@own_grad_mode()
def run_all(
    specs: Sequence[MethodSpec],
    recording: Recording,
    targets: Sequence[Target],
    *,
    seed: int = 0,
    layers: bool = False,
) -> dict[str, list[Result]]:
    """Method text -> one result for each target."""
    single = singles(specs)
    groups = by_trace(single)
    results: dict[str, list[Result]] = {spec.text: [] for spec in single}
    last = list(groups)[-1]
    for goal in targets:
        others: dict[str, Trace] = {}  # those that a method of another group reads too
        for table, group in groups.items():
            # The last backward frees the graph, so that the walk over its N×N matrices has the room.
            keep = not (goal is targets[-1] and table == last) or table is None
            readers = [*group, *(spec for spec in single if spec.also == table is not None)]
            rules = None if recording.structure.barriers else table
            trace = run_backward(
                recording, goal, rules, keep=keep, reach=reach_of(readers, len(recording.inputs), layers)
            )
            for spec, result in zip(group, run(group, trace, others, seed=seed, layers=layers), strict=True):
                results[spec.text].append(result)
            if len(readers) > len(group) and table is not None:
                others[table] = trace
            del trace  # its gradients should not lie beside the next one's
    for spec in specs:
        if spec.members:
            columns = zip(*(results[one.text] for one in spec.members), strict=True)
            results[spec.text] = [_joined(spec, column) for column in columns]
    return results


def spent_on(recording: Recording, specs: Sequence[MethodSpec], targets: int = 1) -> Cost:
    """The passes of a recording that these methods were run on, with the backwards that local ones make themselves."""
    local = targets * any(spec.passes == "local" for spec in singles(specs))
    return Cost(recording.forwards, recording.backwards + local)


def singles(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """The methods to be run: an ensemble is its members, and none is run twice."""
    return list({one.text: one for spec in specs for one in spec.members or (spec,)}.values())


def _joined(spec: MethodSpec, members: Sequence[Result]) -> Result:
    """An ensemble's result for one target."""
    found = Result(seconds=sum(one.seconds for one in members), notes=[n for one in members for n in one.notes])
    found.more = sum((one.more for one in members), Cost())
    found.blank = [any(marks) for marks in zip(*(one.blank for one in members), strict=True)]
    found.error = next((one.error for one in members if one.error is not None), None)
    maps = [one.maps for one in members if one.maps is not None]
    if found.error is None:
        with torch.no_grad():
            found.maps = spec.method.function(maps, **dict(spec.options))
    return found


def by_trace(specs: list[MethodSpec]) -> dict[str | None, list[MethodSpec]]:
    """Group methods by the rule table of the trace they read, those with N×N matrices last.

    First come those that need the graph itself (None), last the plain table. What needs no backward joins the last.
    """
    groups: dict[str | None, list[MethodSpec]] = {}
    local = [spec for spec in specs if spec.passes == "local"]
    if local:
        groups[None] = local
    own = {table for spec in specs for table in (spec.rules, spec.also) if table is not None}
    for table in sorted(own, key=lambda name: (name == "plain", name)):
        groups[table] = [spec for spec in specs if spec.rules == table]
    free = [spec for spec in specs if spec.passes in ("none", "forward")]
    if free:
        groups.setdefault(list(groups)[-1] if groups else None, []).extend(free)
    return groups


def reach_of(group: list[MethodSpec], count: int, layers: bool) -> GradientScope:
    """How far back the gradient must go for these methods."""
    read = [spec for spec in group if spec.passes == "backward"]
    first = 0 if layers else min((spec.first_layer(count) for spec in read if count), default=count)
    return GradientScope(
        first,
        attention=any(spec.needs_attention for spec in read),
        tokens=any(spec.needs_tokens for spec in read),
        pixels=any(spec.needs_pixels for spec in read),
    )
