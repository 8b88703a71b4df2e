"""What each endpoint computes: a model, a photo and a request in, a response out. Runs in the thread of a job queue."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clairvit._io import dumps_json
from clairvit._rng import make_generator
from clairvit.errors import BadInput
from clairvit.methods.explain import compare, explain
from clairvit.methods.explanation import Comparison, Explanation
from clairvit.methods.explanation_files import npz_bytes
from clairvit.methods.features import PatchFeatures, features, unit_vectors
from clairvit.methods.plain_language import plain_words
from clairvit.methods.refined import refined_by_fewer
from clairvit.methods.runs import Question, Run, iter_runs
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.context import EvalContext
from clairvit.metrics.curves import RemovalSchedule, area_under_curve, deletion_curve, insertion_curve
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.plotting.overlay import denormalised_photo
from clairvit.targets.similar import Similar
from clairvit.targets.text import Text
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward
from clairvit.web.result_cache import ResultCache, ResultKey
from clairvit.web.schemas import (
    Band,
    CheckRequest,
    CheckResponse,
    ClassScore,
    CurveBands,
    CurveRequest,
    CurveResponse,
    ExplainRequest,
    ExplainResponse,
    FeaturesRequest,
    FeaturesResponse,
    HeadMaps,
    MethodMaps,
    TraceRequest,
    TraceResponse,
    encode_array,
)
from clairvit.web.state import trace_photo
from clairvit.web.uploads import Upload, UploadStore

_OneMapRequest: TypeAlias = CurveRequest | CheckRequest
UNSURE = 0.5  # a probability of the first class below it comes with a caution
MOST_PAIRED_PATCHES = 1024  # whose cosines are 4 MB
RANDOM_ORDERS = 5  # whose mean and range is the random baseline


def explain_photo(
    cache: ResultCache,
    model: Model,
    photo: Upload,
    specs: Sequence[MethodSpec],
    request: ExplainRequest,
    other: Upload | None = None,
) -> Comparison:
    """Explain a photo; of several methods those that do not fit the model are skipped, a single one raises.

    The explanation of one method is kept in the cache.
    """
    batch = Batch(photo.pixels[model.name], (photo.id,), single=True)
    targets = requested_targets(model, request, other) or None
    arguments: dict[str, Any] = {"score": request.score, "seed": request.seed, "batch_size": batch_size(model)}
    if len(specs) > 1:
        comparison = compare(model, batch, specs, targets=targets, skip=True, **arguments)
    else:
        comparison = Comparison()
        begun = _refined_by_fewer(cache, result_key(photo, model.name, specs[0], request), specs[0])
        comparison[specs[0].text] = (
            begun.refine(dict(specs[0].options)["passes"], batch_size=batch_size(model))
            if begun is not None
            else explain(
                model, batch, specs[0], targets=targets, layers=request.layers, by_head=request.heads, **arguments
            )
        )
    if len(comparison) == 1:
        ((text, explanation),) = comparison.items()
        (spec,) = (spec for spec in specs if spec.text == text)
        cache.add(result_key(photo, model.name, spec, request), explanation, request.layers, request.heads)
    return comparison


def result_key(photo: Upload, model: str, spec: MethodSpec, request: ExplainRequest | _OneMapRequest) -> ResultKey:
    """Return what the maps of a request depend on."""
    score = None if isinstance(request, CurveRequest) else request.score
    prompts = [f"text {prompt}" for prompt in _listed(request.text)]
    others = [] if request.similar_to is None else [f"similar to {request.similar_to}"]
    readouts = (*prompts, *others)
    return ResultKey(photo.id, model, spec.text, tuple(_listed(request.target)), score, request.seed, readouts)


def _refined_by_fewer(cache: ResultCache, key: ResultKey, spec: MethodSpec) -> Explanation | None:
    """Return the cached map of the same request that half as many passes refined, or a quarter, …; None if none did."""
    fewer = (cache.find(replace(key, method=text)) for text in refined_by_fewer(spec))
    return next((explanation for explanation in fewer if explanation is not None), None)


def requested_targets(model: Model, request: ExplainRequest | _OneMapRequest, other: Upload | None) -> list[Any]:
    """Return the targets of a request: classes, prompts, and the similarity to another photo."""
    classes = _listed(request.target)  # by name or number
    targets: list[Any] = [int(text) if text.isascii() and text.isdigit() else text for text in classes]
    targets += [Text(prompt) for prompt in _listed(request.text)]
    return targets if other is None else [*targets, Similar(other.pixels[model.name], "the other photo")]


def one_target(model: Model, request: _OneMapRequest, other: Upload | None) -> Any:
    """Return the target of a request about one map; None is the predicted class."""
    targets = requested_targets(model, request, other)
    if len(targets) > 1:
        raise BadInput(f"{len(targets)} targets were named; expected one: target, text or similar_to.")
    return targets[0] if targets else None


def _listed(value: list[str] | str | None) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def cached_results(
    cache: ResultCache, photo: Upload, model: str, specs: Sequence[MethodSpec], request: ExplainRequest
) -> Comparison | None:
    """Return the explanation of a request that was computed before; None where something must be computed."""
    if len(specs) > 1:
        return None
    explanation = cache.find(result_key(photo, model, specs[0], request), request.layers, request.heads)
    if explanation is None:
        return None
    comparison = Comparison()
    comparison[specs[0].text] = explanation
    return comparison


def explain_once(
    cache: ResultCache,
    model: Model,
    photo: Upload,
    spec: MethodSpec,
    request: _OneMapRequest,
    other: Upload | None = None,
) -> Explanation:
    """Return the explanation of one target, computed only if it is not in the cache."""
    target = one_target(model, request, other)
    key = result_key(photo, model.name, spec, request)
    explanation = cache.find(key)
    if explanation is None:
        batch = Batch(photo.pixels[model.name], (photo.id,), single=True)
        explanation = explain(
            model, batch, spec, target, score=key.score, seed=request.seed, batch_size=batch_size(model)
        )
        cache.add(key, explanation)
    return explanation


def batch_size(model: Model) -> int:
    """Return the number of perturbed images per pass: 40 MB each on a small ViT, and a CPU is no faster with more."""
    return 8 if model.device.type == "cpu" else 64


def explain_response(
    comparison: Comparison, photo: Upload, model: Model, specs: Sequence[MethodSpec], request: ExplainRequest
) -> ExplainResponse:
    """Return the maps of all methods, and the prediction of the model."""
    first = next(iter(comparison.values()), None)
    if first is None:
        raise BadInput(f"None of the methods fits this model: {next(iter(comparison.skipped.values()))}")
    # the targets of a class-specific method are classes
    first = next((explanation for explanation in comparison.values() if explanation.class_specific), first)
    pixels, cautions = photo.pixels[model.name], list(photo.cautions)
    top = first.top_classes(0)
    if first.activation == "softmax" and top and top[0].probability is not None and top[0].probability < UNSURE:
        count = first.logits.shape[-1]
        cautions.append(f"The model is unsure: it must name one of its {count} classes, whatever the photo shows.")
    return ExplainResponse(
        photo=photo.id,
        model=model.name,
        targets=list(first.targets),
        classes=list(first.classes),
        activation=first.activation,
        probabilities=list(first.probabilities),
        class_scores=list(first.class_scores) if first.classifier else [None] * len(first.targets),
        target_scores=list(first.target_scores),
        other=request.similar_to,
        top=[
            ClassScore(index=guess.index, name=guess.name, probability=guess.probability, score=guess.score)
            for guess in top
        ],
        explanations=[_method_maps(spec, comparison[spec.text]) for spec in specs if spec.text in comparison],
        skipped=comparison.skipped,
        cautions=cautions,
        picture=_png(pixels[0], model) if request.picture else None,
        size=(int(pixels.shape[-2]), int(pixels.shape[-1])),
    )


def _method_maps(spec: MethodSpec, explanation: Explanation) -> MethodMaps:
    return MethodMaps(
        method=explanation.method,
        title=plain_words(spec).title,
        family=explanation.family,
        signed=explanation.signed,
        class_specific=explanation.class_specific,
        score=explanation.score,
        maps=encode_array(explanation.maps),
        standard_error=None if explanation.standard_error is None else encode_array(explanation.standard_error),
        refinement=None
        if explanation.refinement is None
        else [explanation.refinement.sentence(row) for row in range(len(explanation))],
        layers=None if explanation.layers is None else encode_array(explanation.layers),
        heads=None
        if explanation.heads is None
        else HeadMaps(method=explanation.heads.method, maps=encode_array(explanation.heads.maps)),
        forwards=explanation.cost.forwards,
        backwards=explanation.cost.backwards,
        seconds=explanation.cost.seconds,
        notes=list(explanation.notes),
    )


def explain_file(comparison: Comparison, kind: str) -> bytes:
    """Return the record (.json) or the arrays (.npz) of one explanation, as `clairvit explain` writes them."""
    explanation = next(iter(comparison.values()))
    if kind == "record":
        return dumps_json(explanation.to_dict()).encode()
    return npz_bytes({"": explanation})


def _png(pixels: Tensor, model: Model) -> str:
    """Return the model's input [3, H, W] as a PNG in base64."""
    buffer = io.BytesIO()
    Image.fromarray(np.round(denormalised_photo(pixels, model.preprocess) * 255).astype(np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def trace_response(model: Model, uploads: UploadStore, layer: int, request: TraceRequest) -> TraceResponse:
    """Return the attention of one layer, [N, N] of one head or of all fused, or one row of it."""
    trace = trace_photo(model, uploads, request.photo)
    if not 0 <= layer < len(trace.layers):
        raise BadInput(f"Layer {layer} was requested; expected 0 to {len(trace.layers) - 1}.")
    A = trace.layers[layer].A[0].detach()  # [H, N, N]
    if isinstance(request.head, int):
        if not 0 <= request.head < len(A):
            raise BadInput(f"Head {request.head} was requested; expected 0 to {len(A) - 1}, or mean, min, max.")
        matrix = A[request.head]
    else:
        matrix = {"mean": A.mean(0), "min": A.amin(0), "max": A.amax(0)}[request.head]
    layout = trace.in_order
    if request.patch is not None:
        if request.patch >= layout.patches:
            raise BadInput(f"Patch {request.patch} was requested; expected 0 to {layout.patches - 1}.")
        matrix = matrix[layout.prefix + request.patch][None]
    return TraceResponse(
        photo=request.photo,
        model=model.name,
        layer=layer,
        head=str(request.head),
        grid=layout.plane,
        prefix=layout.prefix,
        attention=encode_array(matrix),
    )


def features_response(model: Model, uploads: UploadStore, layer: int, request: FeaturesRequest) -> FeaturesResponse:
    """Return components, norms and cosines of the patch tokens of one layer, of one photo or of two in one basis."""
    ids = (request.photo,) if request.other is None else (request.photo, request.other)
    pixels = torch.cat([uploads.find(photo).pixels[model.name] for photo in ids])
    result = features(model, Batch(pixels, ids), layer=layer)
    patch, cosines = _requested_cosines(result, request)
    return FeaturesResponse(
        photo=request.photo,
        other=request.other,
        model=model.name,
        layer=layer,
        layer_name=result.layer_name,
        grid=result.grid,
        pca=encode_array(result.pca),
        limits=encode_array(result.limits),
        explained_variance_ratio=result.explained_variance_ratio.tolist(),
        norms=encode_array(result.norms),
        outliers=None if result.outliers is None else int(result.outliers.sum()),
        patch=patch,
        cosine=encode_array(cosines),
        notes=list(result.notes),
    )


def _requested_cosines(result: PatchFeatures, request: FeaturesRequest) -> tuple[int | None, Tensor]:
    """Return the cosines of all pairs of patches of all photos, or the patch at y, x and its row [1, patches]."""
    if (request.y is None) != (request.x is None):
        raise BadInput("One of y and x was given; expected both, for one patch, or none, for all pairs.")
    rows, columns = result.grid
    patches = len(result) * rows * columns
    if request.y is None or request.x is None:
        if patches > MOST_PAIRED_PATCHES:
            raise BadInput(f"The cosines of {patches} patches to each other were requested; name one by y and x.")
        units = unit_vectors(result.tokens).flatten(0, 2)  # [patches, d]
        return None, units @ units.T
    if request.of_other and len(result) == 1:
        raise BadInput("A patch of the second photo was requested, and there is one photo; name the second by other.")
    row, column, image = int(request.y * rows), int(request.x * columns), int(request.of_other)
    cosines = result.similarity(row, column, image).reshape(1, patches)
    return (image * rows + row) * columns + column, cosines


def curve_response(
    model: Model,
    photo: Upload,
    spec: MethodSpec,
    explanation: Explanation,
    request: CurveRequest,
    other: Upload | None = None,
) -> CurveResponse:
    """Return the score while patches are removed and inserted in the order of the map, and in random orders."""
    target = one_target(model, request, other)
    batch = Batch(photo.pixels[model.name], (photo.id,))
    question = Question.of(model, batch, target, batch_size=batch_size(model), scored="always")
    with own_grad_mode(), closing(iter_runs(question, ())) as runs:
        return _curve_of_run(next(runs), photo, spec, explanation, request)


def _curve_of_run(
    run: Run, photo: Upload, spec: MethodSpec, explanation: Explanation, request: CurveRequest
) -> CurveResponse:
    """Return the curves of one recorded photo."""
    resolved = run.targets[0]
    trace = run_backward(run.recording, resolved, None)
    maps = explanation.maps.to(run.logits.device)
    random_maps = [_random_map(trace.layout.plane, request.seed, k).to(maps) for k in range(RANDOM_ORDERS)]
    context = EvalContext(trace=trace, specs=(spec,), raw=(maps, *random_maps), seed=request.seed)
    schedule = RemovalSchedule(steps=request.steps, ends=True)
    counts = schedule.fractions_and_counts(context.patches)[1]
    curves = {
        "deletion": deletion_curve(context, schedule, request.removal, "prob", "deletion"),
        "insertion": insertion_curve(context, schedule, request.removal, "prob", "insertion"),
    }
    bands = {name: curve_bands(x, y[:, 0], counts) for name, (x, y) in curves.items()}
    return CurveResponse(
        photo=photo.id,
        model=run.model.name,
        method=spec.text,
        target=resolved.names[0],
        meaning=context.meaning("prob"),
        rank=context.rank[0, 0].tolist(),
        grid=trace.layout.plane,
        deletion=bands["deletion"],
        insertion=bands["insertion"],
        notes=[*explanation.notes, *context.notes_log.notes],
    )


def check_response(model: Model, photo: Upload, explanation: Explanation) -> CheckResponse:
    """Return how far to trust the map of one target."""
    result = explanation.check(model, batch_size=batch_size(model))
    fields = result[0].to_dict()
    del fields["name"]
    return CheckResponse.model_validate(
        {**fields, "photo": photo.id, "model": model.name, "method": explanation.method, "notes": list(result.notes)}
    )


def _random_map(grid: tuple[int, int], seed: int, k: int) -> Tensor:
    return torch.rand(1, *grid, generator=make_generator(seed, "page/random map", k), dtype=torch.float32, device="cpu")


def curve_bands(x: Tensor, y: Tensor, counts: list[int]) -> CurveBands:
    """Return the curve y[0] of the map and the band of the random orders y[1:], [1 + orders, S].

    Whether the map is better than chance is for the check alone to say: a few orders are too few for a second verdict.
    """
    return CurveBands(x=x.tolist(), counts=counts, method=_band(x, y[:1]), random=_band(x, y[1:]))


def _band(x: Tensor, y: Tensor) -> Band:
    """Return mean, minimum and maximum of curves y [orders, S]; NaN (a constant raw score) becomes null."""
    mean = y.mean(0)
    means, low, high = ([_finite(value) for value in values.tolist()] for values in (mean, y.amin(0), y.amax(0)))
    areas = [_finite(float(area_under_curve(x, curve, "width"))) for curve in y]
    return Band(mean=means, low=low, high=high, area=_finite(float(area_under_curve(x, mean, "width"))), areas=areas)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def json_line(content: dict[str, Any]) -> bytes:
    """Return one line of a streamed response."""
    return dumps_json(content, indent=None).encode() + b"\n"
