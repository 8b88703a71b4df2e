"""PLUS and SkipPLUS of methods that make their map from the whole image: the sum over l of A(f_l)(x_l).

The sub-network f_l (`clairvit.tracing.tail`) is a model whose images are the tokens at block l, and the method is run
on it as on any model. Nothing of a method is known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import NotApplicable
from clairvit.methods.executor import Result, no_layers
from clairvit.methods.spec import MethodSpec
from clairvit.models.model import Model
from clairvit.numerics import widened
from clairvit.targets.base import TargetBatch, class_agnostic_target
from clairvit.tracing.recording import Recording
from clairvit.tracing.tail import parts_of, tail_of

MOST_NOTES = 3  # of the runs on single sub-networks, where a map is a sum over many
# Runs methods on images of a model for one target: (methods, model, pixels, photos, target) -> recording, results.
RunOn = Callable[[Sequence[MethodSpec], Model, Tensor, Tensor, TargetBatch], tuple[Recording, dict[str, list[Result]]]]


def run_on_tails(
    specs: Sequence[MethodSpec], recording: Recording, target: TargetBatch, run_on: RunOn, *, layers: bool
) -> dict[str, Result]:
    """Return method text -> result, of methods that are combined over sub-networks; each sub-network is run once.

    Args:
        specs: The methods; `spec.whole` of each is run on the sub-networks.
        recording: The forward pass of the whole model.
        target: The target of its images.
        run_on: How methods are run on a sub-network.
        layers: Keep the maps of single sub-networks, of all layers, too.
    """
    count = len(recording.inputs) if recording.calls else 0
    results = {spec.text: Result() for spec in specs}
    wanted: dict[str, range] = {}
    for spec in specs:
        if not count:
            results[spec.text].error = no_layers(spec, recording.structure, recording.model.name)
            continue
        assert spec.aggregation is not None
        wanted[spec.text] = range(count) if layers else spec.aggregation.used(count)
    by_layer: dict[str, dict[int, Result]] = {}  # of each method without its combinator
    for layer in sorted({layer for layers_of in wanted.values() for layer in layers_of}):
        of_layer = [spec for spec in specs if layer in wanted.get(spec.text, ())]
        wholes = list({spec.whole.text: spec.whole for spec in of_layer}.values())
        for text, result in _run_on_tail(wholes, recording, target, layer, run_on).items():
            by_layer.setdefault(text, {})[layer] = result
    for spec in specs:
        if spec.text in wanted:
            assert spec.aggregation is not None
            results[spec.text] = _sum(spec, by_layer[spec.whole.text], spec.aggregation.used(count), keep=layers)
    return results


def _run_on_tail(
    specs: Sequence[MethodSpec], recording: Recording, target: TargetBatch, layer: int, run_on: RunOn
) -> dict[str, Result]:
    """Return method text -> the result on the sub-network from one layer on, of all images."""
    started = time.perf_counter()
    try:
        parts = parts_of(recording, tail_of(recording, layer), layer)
    except NotApplicable as error:
        return {spec.text: Result(error=error.with_traceback(None)) for spec in specs}
    images = len(recording.pixels)
    rows_of_parts = [range(images)] if len(parts) == 1 else [range(row, row + 1) for row in range(images)]
    by_row = target if target.class_agnostic else target.by_row(recording.logits.detach())
    by_part: list[dict[str, list[Result]]] = []
    spent = Cost()
    for rows, (part, tokens) in zip(rows_of_parts, parts, strict=True):
        of_rows = class_agnostic_target(len(rows)) if target.class_agnostic else by_row.take(list(rows))
        photos = recording.pixels.detach()[rows.start : rows.stop]
        run, output = run_on(specs, part, tokens, photos, of_rows)
        by_part.append(output)
        spent = Cost(max(spent.forwards, run.forwards), max(spent.backwards, run.backwards))
    recording.forwards += spent.forwards
    recording.backwards += spent.backwards
    seconds = (time.perf_counter() - started) / len(specs)
    return {spec.text: _joined(spec, [output[spec.text][0] for output in by_part], seconds) for spec in specs}


def _joined(spec: MethodSpec, parts: Sequence[Result], seconds: float) -> Result:
    """Return the result of all images, given those of a few images each."""
    result = Result(seconds=seconds, error=next((part.error for part in parts if part.error is not None), None))
    if result.error is not None:
        return result
    result.maps = torch.cat([part.maps for part in parts if part.maps is not None])
    errors = [part.standard_error for part in parts if part.standard_error is not None]
    result.standard_error = torch.cat(errors) if len(errors) == len(parts) else None
    result.notes = list(dict.fromkeys(note for part in parts for note in part.note_texts()))
    result.unmoved = [bool(mark) for part in parts for mark in part.unmoved]
    result.score = parts[0].score
    own = [part.own_cost for part in parts]
    passes = Cost(max(cost.forwards for cost in own), max(cost.backwards for cost in own))
    result.own_cost = Cost(1, spec.backwards) + passes
    return result


def _sum(spec: MethodSpec, by_layer: dict[int, Result], used: range, *, keep: bool) -> Result:
    """Return the sum of the maps of the sub-networks that a combinator names."""
    parts = [by_layer[layer] for layer in used]
    result = Result(seconds=sum(part.seconds for part in parts))
    result.error = next((part.error for part in parts if part.error is not None), None)
    if result.error is not None:
        return result
    result.own_cost = sum((part.own_cost for part in parts), Cost())
    maps = [widened(part.maps) for part in parts if part.maps is not None]
    result.maps = torch.stack(maps).sum(0) if len(maps) > 1 else maps[0]
    if spec.relu:
        result.maps = result.maps.clamp(min=0)
    # The draws of two sub-networks are the same, so that the error of a sum does not follow from theirs.
    result.standard_error = parts[0].standard_error if len(parts) == 1 else None
    result.score = parts[0].score
    result.unmoved = [all(marks) for marks in zip(*(part.unmoved for part in parts), strict=True)]
    result.notes = _notes(spec, {layer: by_layer[layer].notes for layer in used})
    of_layers = [by_layer[layer].maps for layer in sorted(by_layer)]
    if keep and all(grid is not None for grid in of_layers):
        result.layers = torch.stack([grid for grid in of_layers if grid is not None])
    return result


def _notes(spec: MethodSpec, by_layer: dict[int, list[str]]) -> list[str]:
    """Return the notes of the sub-networks, the first few where they are many."""
    notes = list(dict.fromkeys(note for layer_notes in by_layer.values() for note in layer_notes))
    left = len(notes) - MOST_NOTES
    if left > 0 and len(by_layer) > 1:
        notes = [*notes[:MOST_NOTES], f"{spec.text}: {left} more notes of this kind, of other sub-networks or images"]
    if len(by_layer) > 1:
        notes.append(f"{spec.text}: the maps of sub-networks are added as they are, none is scaled")
    return notes
