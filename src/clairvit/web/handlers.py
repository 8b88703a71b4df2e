"""The work behind each address: a model, a photo and what was asked in; a reply out. Runs in a lane's thread."""

from __future__ import annotations

import base64
import io
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clairvit._io import dumps_json
from clairvit.errors import BadInput
from clairvit.execution import ExecutionOptions
from clairvit.methods.explain import compare, explain
from clairvit.methods.explanation import Comparison, Explanation
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.context import EvalContext
from clairvit.metrics.curves import Walk, area_under_curve, falling, rising
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.perturbation.rng import make_generator
from clairvit.plotting.labels import guesses
from clairvit.plotting.overlay import photo_of
from clairvit.plotting.save import record
from clairvit.targets.resolve import resolve
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward
from clairvit.web.schemas import (
    Band,
    CurveAsked,
    CurveReply,
    ExplainAsked,
    ExplainReply,
    Guess,
    HeadMaps,
    MapReply,
    TraceAsked,
    TraceReply,
    Walked,
    numbers,
)
from clairvit.web.state import seen
from clairvit.web.uploads import Upload, UploadStore

ORDERS_BY_LOT = 5  # whose mean and range is the random baseline


def explain_photo(model: Model, photo: Upload, specs: Sequence[MethodSpec], asked: ExplainAsked) -> Comparison:
    """Methods that do not fit the model are left out of a list; alone, the reason is an error."""
    batch = Batch(photo.pixels[model.name], (photo.mark,), single=True)
    targets: Any = [class_of(text) for text in asked.target] or None
    how: dict[str, Any] = {"score": asked.score, "seed": asked.seed, "batch_size": most_at_once(model)}
    if len(specs) > 1:
        return compare(model, batch, [spec.text for spec in specs], targets=targets, skip=True, **how)
    (spec,) = specs
    made = explain(model, batch, spec.text, targets=targets, layers=asked.layers, by_head=asked.heads, **how)
    found = Comparison()
    found[spec.text] = made
    return found


def most_at_once(model: Model) -> int:
    """Perturbed images in one pass. A backward holds 40 MB each, on a small ViT, and a CPU is no faster with more."""
    return 8 if model.device.type == "cpu" else 64


def class_of(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def as_reply(found: Comparison, photo: Upload, model: Model, asked: ExplainAsked) -> ExplainReply:
    first = next(iter(found.values()), None)
    if first is None:
        raise BadInput(f"None of the methods fits this model: {next(iter(found.skipped.values()))}")
    first = next((one for one in found.values() if one.class_specific), first)  # its targets are classes
    pixels = photo.pixels[model.name]
    return ExplainReply(
        photo=photo.mark,
        model=model.name,
        targets=list(first.targets),
        classes=list(first.classes),
        activation=first.activation,
        probabilities=list(first.probabilities),
        class_scores=list(first.class_scores) if first.classifier else [None] * len(first.targets),
        top=[Guess(index=g.index, name=g.name, probability=g.probability, score=g.score) for g in guesses(first, 0)],
        explanations=[_as_map(one) for one in found.values()],
        skipped=found.skipped,
        picture=_png(pixels[0], model) if asked.picture else None,
        size=(int(pixels.shape[-2]), int(pixels.shape[-1])),
    )


def _as_map(one: Explanation) -> MapReply:
    return MapReply(
        method=one.method,
        family=one.family,
        signed=one.signed,
        class_specific=one.class_specific,
        score=one.score,
        maps=numbers(one.maps),
        standard_error=None if one.standard_error is None else numbers(one.standard_error),
        layers=None if one.layers is None else numbers(one.layers),
        heads=None if one.heads is None else HeadMaps(method=one.heads.method, maps=numbers(one.heads.maps)),
        forwards=one.cost.forwards,
        backwards=one.cost.backwards,
        seconds=one.cost.seconds,
        notes=list(one.notes),
    )


def as_file(found: Comparison, kind: str) -> bytes:
    """The record (.json) or the arrays (.npz) of one explanation, as `clairvit explain --out` writes them."""
    one = next(iter(found.values()))
    if kind == "record":
        return dumps_json(record(one)).encode()
    with tempfile.TemporaryDirectory(prefix="clairvit-") as folder:
        return one.save(Path(folder) / "maps.npz").read_bytes()


def _png(pixels: Tensor, model: Model) -> str:
    """What the model saw, [3, H, W], as base64."""
    buffer = io.BytesIO()
    Image.fromarray(np.round(photo_of(pixels, model.preprocess) * 255).astype(np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def attention_of(model: Model, photos: UploadStore, layer: int, asked: TraceAsked) -> TraceReply:
    trace = seen(model, photos, asked.photo)
    if not 0 <= layer < len(trace.layers):
        raise BadInput(f"Layer {layer} was asked for; expected 0 to {len(trace.layers) - 1}.")
    A = trace.layers[layer].A[0].detach()  # [H, N, N]
    if isinstance(asked.head, int):
        if not 0 <= asked.head < len(A):
            raise BadInput(f"Head {asked.head} was asked for; expected 0 to {len(A) - 1}, or mean, min, max.")
        matrix = A[asked.head]
    else:
        matrix = {"mean": A.mean(0), "min": A.amin(0), "max": A.amax(0)}[asked.head]
    layout = trace.in_order
    if asked.patch is not None:
        if asked.patch >= layout.patches:
            raise BadInput(f"Patch {asked.patch} was asked for; expected 0 to {layout.patches - 1}.")
        matrix = matrix[layout.prefix + asked.patch][None]
    return TraceReply(
        photo=asked.photo,
        model=model.name,
        layer=layer,
        head=str(asked.head),
        grid=layout.grid,
        prefix=layout.prefix,
        attention=numbers(matrix),
    )


def curve_of(model: Model, photo: Upload, spec: MethodSpec, asked: CurveAsked) -> CurveReply:
    """The score as the patches go and come in the map's order, and in a few orders by lot."""
    return _curve_of(model, photo, spec, asked, ExecutionOptions.from_caller(most_at_once(model)))


@own_grad_mode()
def _curve_of(
    model: Model, photo: Upload, spec: MethodSpec, asked: CurveAsked, execution: ExecutionOptions
) -> CurveReply:
    recording = record_for([spec], model, photo.pixels[model.name], execution)
    target: Any = None if asked.target is None else class_of(asked.target)
    logits = recording.logits.detach()
    (goal,) = resolve(target, logits, model.labels, classifier=model.classifier, activation=model.activation)
    (result,) = run_all([spec], recording, [goal], seed=asked.seed)[spec.text]
    if result.error is not None:
        raise result.error
    assert result.maps is not None
    trace = run_backward(recording, goal, None)
    luck = [_by_lot(trace.layout.grid, asked.seed, k).to(result.maps) for k in range(ORDERS_BY_LOT)]
    case = EvalContext(trace=trace, specs=(spec,), raw=(result.maps.detach(), *luck), seed=asked.seed)
    walk = Walk(steps=asked.steps, ends=True)
    counts = walk.stops(case.patches)[1]
    walks = {
        "deletion": falling(case, walk, asked.removal, "prob", "deletion"),
        "insertion": rising(case, walk, asked.removal, "prob", "insertion"),
    }
    told = {
        name: Walked(x=x.tolist(), counts=counts, method=_band(x, y[:1, 0]), random=_band(x, y[1:, 0]))
        for name, (x, y) in walks.items()
    }
    return CurveReply(
        photo=photo.mark,
        model=model.name,
        method=spec.text,
        target=goal.names[0],
        meaning=case.meaning("prob"),
        rank=case.rank[0, 0].tolist(),
        grid=trace.layout.grid,
        deletion=told["deletion"],
        insertion=told["insertion"],
        notes=[*result.notes, *case.aside.notes],
    )


def _by_lot(grid: tuple[int, int], seed: int, k: int) -> Tensor:
    return torch.rand(1, *grid, generator=make_generator(seed, k))


def _band(x: Tensor, y: Tensor) -> Band:
    """[orders, S]; what is undefined (raw scores that nothing changes) is null, which JSON knows and NaN is not."""
    mean = y.mean(0)
    mean_line, low, high = ([_known(v) for v in line.tolist()] for line in (mean, y.amin(0), y.amax(0)))
    return Band(mean=mean_line, low=low, high=high, area=_known(float(area_under_curve(x, mean, "width"))))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def line(content: dict[str, Any]) -> bytes:
    """One line of a streamed reply."""
    return dumps_json(content, indent=None).encode() + b"\n"
