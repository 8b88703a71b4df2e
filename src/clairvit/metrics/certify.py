"""The verb `certify`: what the model's answer needs on a share of photos; `Explanation.certify` marks it on a map.

For each calibration photo: its map by one forward (and backward), and one pass for each number of top patches that is
tried, with the tokens of the others dropped. `metrics/certificate.py` has the statistics.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from clairvit._rng import image_seeds
from clairvit.data.dataset import ErrorHandler, ImageDataset
from clairvit.data.hashing import digest
from clairvit.errors import BadInput, ClairWarning, NotApplicable, UnknownName, Verb, did_you_mean
from clairvit.methods.explain import explain
from clairvit.methods.explanation import Explanation
from clairvit.methods.planner import run_all
from clairvit.methods.runs import OnError, Question, Run, error_handler, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.answer_size import SIZES, answer_is_target, answer_sizes, size_grid, why_no_answer
from clairvit.metrics.certificate import (
    STATEMENTS,
    Certificate,
    CertifiedPatches,
    Statement,
    check_count,
    check_keep,
)
from clairvit.metrics.context import EvalContext, inverse_permutation, planar_maps, sort_with_ties, tie_orders
from clairvit.metrics.localisation import object_masks, patch_foreground
from clairvit.metrics.own_code import code_hash
from clairvit.models.coerce import ModelLike, as_model
from clairvit.models.images import Batch, to_device
from clairvit.models.model import Model
from clairvit.models.state_hash import state_hash
from clairvit.numerics import pool_to_grid
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import check_removal
from clairvit.perturbation.token_dropping import drop_strategy
from clairvit.targets.base import NO_SCORE, class_name
from clairvit.targets.contrast import Contrast
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.trace import run_backward

NAME = "certify"  # of the progress, and of notes
SHORT_HASH = 12  # characters of a hash that are shown
TESTED_AT_ONCE = 8  # photos


def certify(
    model: ModelLike,
    images: Any,
    method: str | MethodSpec | None = None,
    keep: float = 0.9,
    *,
    statement: Statement = "keep",
    target: Any = None,
    masks: Any = None,
    mask_kind: str = "nonzero",
    sizes: int = SIZES,
    removal: str = "token",
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
) -> Certificate:
    """Certify how many top patches of a method's maps alone keep the model's answer, on a share of photos.

    Split conformal prediction: for a further photo that is exchangeable with the calibration photos the statement holds
    with a probability of at least `keep`, whatever the model and the method.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`: a classifier of one class per image (softmax).
        images: The calibration photos, as in `cv.explain`: photos like those that the statement will be about, and not
            those that the method was fitted to. ⌈1/α⌉ − 1 or more with α = 1 − keep, 100 and more are better.
        method: The method that ranks the patches; None is the default for the model.
        keep: The share of photos on which the statement holds, 1 − α.
        statement: "keep": the top q patches alone keep the answer; "change": hiding the top q changes it; "region": the
            inside of the region drawn in each photo (`masks`) alone keeps it.
        target: None: the answer is the predicted class. A class: only photos that the model calls so. `cv.Contrast` of
            two classes a and b: only photos where a is above b, and the answer is that it is.
        masks: The regions, as in `cv.evaluate`: patches of which half or more lies in the region are left.
        mask_kind: As in `cv.evaluate`.
        sizes: How many numbers of patches are tried, one pass for each; small ones lie closest together.
        removal: How the other patches are removed: token (dropped from the sequence), mean, blur, …
        on_error: As in `cv.evaluate`.
        seed: The seed of everything random.
        batch_size: As in `cv.evaluate`.
        autocast: As in `cv.evaluate`.

    Returns:
        A `Certificate`: `.q` patches, `.sentence`, `.save("certificate.json")`. `ex.certify(certificate)` marks the
        patches on a map. Of regions `.share` is the interval of the share of photos.

    Raises:
        BadInput: Too few photos for this share, or options that cannot be used.
        NotApplicable: The model does not answer by one class, or the method does not fit it.

    Example:
        >>> import clairvit as cv
        >>> import torch
        >>> noise = torch.randn(9, 3, 96, 96, generator=torch.Generator().manual_seed(0))
        >>> certificate = cv.certify("scenes", noise, "ixg", keep=0.9)
        >>> certificate.n, certificate.q == max(certificate.sizes)
        (9, True)
    """
    keep = check_statement(statement, keep)
    check_removal(removal)
    if sizes < 2:
        raise BadInput(f"sizes={sizes} was given; expected 2 or more numbers of patches to try, such as {SIZES}.")
    spec = None if method is None else resolve_method(method)
    request = CertificationRequest(keep, statement, sizes, removal, error_handler(on_error))
    if statement == "region" and spec is not None:
        raise BadInput(f"The method '{spec.text}' was given, and regions are drawn by a person; expected no method.")
    question = Question.of_dataset(
        model,
        images,
        target,
        masks=masks,
        mask_kind=mask_kind,
        seed=seed,
        batch_size=batch_size,
        autocast=autocast,
    )
    _check_question(question, request)
    if spec is None and statement != "region":
        first = question.first_image(skip=request.on_error is not None)
        spec = resolve_method(explain(question.model, first.pixels).method)
    return _certificate(question, request, spec, _observe(question, request, spec))


def check_statement(statement: str, keep: float) -> float:
    """Return the share as a Python number; raise an error for a statement or a share that there is not."""
    if statement not in STATEMENTS:
        raise UnknownName(
            f"There is no statement {statement!r}; expected one of {', '.join(STATEMENTS)}."
            f"{did_you_mean(str(statement), STATEMENTS)}"
        )
    return check_keep(keep)


@dataclass(frozen=True, eq=False)
class CertificationRequest:
    """What is certified, and how."""

    keep: float
    statement: Statement
    sizes: int
    removal: str
    on_error: ErrorHandler | None


@dataclass(frozen=True, eq=False)
class Photo:
    """What was observed on one calibration photo."""

    row: int  # of the data set
    name: str
    content: str  # a hash of the pixels that the model sees
    size: int | None
    holds: bool


@dataclass(eq=False)
class Observed:
    """The photos that were observed, what is the same for all of them, and which were left out."""

    photos: list[Photo] = field(default_factory=list)
    facts: set[tuple[Any, ...]] = field(default_factory=set)  # grid, size, classes, target, score, replaced
    weights: str = ""
    other_answers: list[str] = field(default_factory=list)
    unmasked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _check_question(question: Question, request: CertificationRequest) -> None:
    """Refuse what has no answer, or too few photos, before any pass."""
    assert isinstance(question.images, ImageDataset)
    if question.targets.kind == "label":
        raise BadInput(
            "target='label' was given, and the true class of a new photo is not known; expected None (the predicted "
            "class), a class, or a contrast of two."
        )
    if question.targets.items is not None and isinstance(question.targets.items[0], list | tuple):
        raise BadInput("A list of targets was given; expected one for all photos, or None: the predicted class.")
    if any(model is not question.model for model in question.models):
        raise NotApplicable(
            f"The target reads another output of {question.model.name} than its class scores, which has no answer that "
            "could be kept; expected None (the predicted class), a class, or a contrast of two."
        )
    if request.statement == "region" and not question.images.has_masks:
        raise BadInput("statement='region' was given without regions; expected masks=, one per photo.")
    check_count(len(question.images), request.keep, request.statement)


@own_grad_mode()
def _observe(question: Question, request: CertificationRequest, spec: MethodSpec | None) -> Observed:
    """Return the answer size, or whether the region keeps the answer, of each photo."""
    observed = Observed()
    specs = [] if spec is None else [spec]
    with closing(iter_runs(question, specs, on_error=request.on_error, label=NAME)) as runs:
        for run in runs:
            _observe_run(question, request, specs, run, observed)
    return observed


def _observe_run(
    question: Question, request: CertificationRequest, specs: Sequence[MethodSpec], run: Run, observed: Observed
) -> None:
    """Add what is observed on a few photos."""
    target, logits = run.targets[0], run.recording.logits.detach()
    reason = why_no_answer(target, int(logits.shape[1]))
    if reason or not run.model.classifier:
        raise NotApplicable(
            f"{run.model.name} gives no answer that could be kept: {reason or 'its output is an embedding'}; expected "
            "a classifier of one class per image (softmax), and a class or a contrast of two as the target."
        )
    trace = run_backward(run.recording, target, None)
    results = [result for (result,) in run_all(specs, run.recording, run.targets, seed=question.seed).values()]
    if results and results[0].error is not None:
        raise results[0].error
    maps = [planar_maps(result.maps.detach(), trace) for result in results if result.maps is not None]
    context = EvalContext(
        trace=trace, specs=tuple(specs), raw=tuple(maps), masks=run.batch.masks, void=run.batch.void, seed=question.seed
    )
    if request.statement == "region":
        holds, sizes = _regions_keep(context, request.removal)
    else:
        values = answer_sizes(context, request.sizes, request.statement, request.removal, NAME)[0]
        values = values.masked_fill(context.invalid[0], math.inf)  # a map with NaN ranks no patch
        sizes = [None if math.isinf(value) else int(value) for value in values.tolist()]
        holds = [True] * len(sizes)
    is_answer = answer_is_target(target)(logits, list(range(len(logits)))).tolist()
    lacks_mask = run.batch.lacks_mask or (False,) * len(run.rows)
    for place, row in enumerate(run.rows):
        name = run.batch.names[place]
        if not is_answer[place]:
            observed.other_answers.append(name)
        elif request.statement == "region" and lacks_mask[place]:
            observed.unmasked.append(name)
        else:
            content = digest(run.batch.pixels[place])
            observed.photos.append(Photo(row, name, content, sizes[place], holds[place]))
    rows = target.rows if question.targets.items is not None else ()
    classes = {tuple(index for index, _ in row) for row in rows if isinstance(row, tuple)} or {()}
    score = NO_SCORE
    if results and specs[0].method.class_specific:
        score = results[0].score or target.score
    size, layout = context.size, context.trace.layout
    names = set(target.names) if question.targets.items is not None else {""}
    replaced = _replaced(run, request.removal)
    observed.facts |= {(layout.grid, size, one, name, score, replaced) for one in classes for name in names}
    observed.weights = run.weights_hash.value
    observed.notes += [note for note in (*run.batch.notes, *context.notes_log.notes) if note not in observed.notes]


def _regions_keep(context: EvalContext, removal: str) -> tuple[list[bool], list[int | None]]:
    """Return whether the patches of each region alone keep the answer, and their number; a region without one fails."""
    foreground, _ = patch_foreground(*object_masks(context), context.trace.layout.plane, "area")
    inside = foreground.flatten(1) > 0  # [B, patches]
    with context.probe(removal, NAME, 1) as probe:
        keeps = probe.score_kept(inside[:, None], answer_is_target(context.target))[:, 0] > 0
    return (keeps & inside.any(1)).tolist(), inside.sum(1).tolist()


def _replaced(run: Run, removal: str) -> str:
    """Return what is done to removed patches where their tokens are not left out of the sequence; "" where they are."""
    if removal != "token":
        return f"removed patches are painted over, removal={removal}"
    mode = drop_strategy(run.recording).mode
    if mode == "zero":
        return "the tokens of removed patches are set to zero"
    return "removed patches are painted with the mean colour" if mode == "none" else ""


def _certificate(
    question: Question, request: CertificationRequest, spec: MethodSpec | None, observed: Observed
) -> Certificate:
    """Return the certificate of what was observed; raise BadInput where too little is left."""
    dataset = question.images
    assert isinstance(dataset, ImageDataset)
    first_with: dict[str, Photo] = {}
    for photo in observed.photos:
        first_with.setdefault(photo.content, photo)
    photos = list(first_with.values())
    repeated = len(observed.photos) - len(photos)
    left_out = {
        "are copies of others": repeated,
        "have another answer than the target": len(observed.other_answers),
        "have no region": len(observed.unmasked),
    }
    reasons = tuple(f"{count} photos {why} and were left out" for why, count in left_out.items() if count)
    notes = [*question.model.assumptions, *dataset.notes, *observed.notes, *reasons]
    check_count(len(photos), request.keep, request.statement, reasons)
    if len(observed.facts) > 1:
        (first, second, *_) = sorted(map(repr, observed.facts))
        raise BadInput(
            f"The photos give different grids of patches, sizes or targets ({first} and {second}); expected the same "
            "for all: one size of image, and a target that means one class."
        )
    ((grid, size, classes, name, score, replaced),) = observed.facts
    return Certificate(
        statement=request.statement,
        method="" if spec is None else spec.text,
        keep=request.keep,
        names=tuple(photo.name for photo in photos),
        sizes=tuple(photo.size for photo in photos),
        holds=tuple(photo.holds for photo in photos) if request.statement == "region" else (),
        tried=() if request.statement == "region" else _tried(math.prod(grid), request),
        grid=tuple(grid),
        size=size,
        classes=classes,
        target=name,
        score=score,
        removal=request.removal,
        replaced=replaced,
        seed=question.seed,
        autocast=question.execution.autocast,
        model=question.model.name,
        weights=observed.weights,
        preprocess=_preprocess(question.model),
        data=digest(*sorted(dataset.content_hash(photo.row).encode() for photo in photos)),
        code="" if spec is None else code_hash(spec),
        notes=tuple(dict.fromkeys(notes)),
    )


def _tried(patches: int, request: CertificationRequest) -> tuple[int, ...]:
    grid = size_grid(patches, request.sizes)
    return grid if request.statement == "keep" else grid[:-1]


def _preprocess(model: Model) -> dict[str, Any]:
    """Return the preprocessing without which channels are shown, which changes no score."""
    return {name: value for name, value in model.preprocess.to_dict().items() if name != "display"}


# A map and a certificate


@own_grad_mode()
def certify_explanation(
    explanation: Explanation,
    certificate: Certificate | PathLike[str] | str,
    *,
    test: bool = False,
    model: ModelLike | None = None,
) -> CertifiedPatches:
    """Mark the patches that a certificate is about; what `Explanation.certify` does."""
    certificate = certificate if isinstance(certificate, Certificate) else read_certificate(certificate)
    _check_fits(explanation, certificate)
    count = certificate.q
    assert count is not None
    pooled = pool_to_grid(explanation.maps.detach().cpu().double(), certificate.grid).flatten(1)
    ties = tie_orders(image_seeds(explanation.pixels, certificate.seed), certificate.patches)
    rank = inverse_permutation(sort_with_ties(pooled[None], ties))[0]
    patches = (rank < count).reshape(-1, *certificate.grid)
    marked = CertifiedPatches(patches, explanation.names, explanation.targets, certificate)
    return _tested(explanation, marked, model) if test else marked


def read_certificate(path: PathLike[str] | str, method: str | None = None) -> Certificate:
    """Return the certificate of a file; raise BadInput if it is not about maps, or not of the method that is named."""
    certificate = Certificate.load(path)
    _check_is_about_maps(certificate)
    if method is not None:
        _check_method(method, certificate)
    return certificate


def _check_is_about_maps(certificate: Certificate) -> None:
    """Raise BadInput for a certificate that names no number of patches."""
    if certificate.statement == "region":
        raise BadInput(
            "This certificate is about regions that were drawn in the photos, and a map has none; expected one for "
            "maps. ",
            Verb("certify", file="certificate.json"),
            " makes it.",
        )
    if certificate.q is None:
        raise BadInput(f"This certificate names no number of patches: {certificate.sentence}")


def _check_fits(explanation: Explanation, certificate: Certificate) -> None:
    """Raise BadInput for maps that a certificate says nothing about."""
    if not len(explanation):
        raise BadInput("The explanation has no maps; expected at least one.")
    _check_is_about_maps(certificate)
    _check_method(explanation.method, certificate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # of weights that have changed, which is the error below
        weights = explanation.weights_hash
    if weights != certificate.weights:
        raise BadInput(
            f"The certificate was made for {certificate.model} (weights {certificate.weights[:SHORT_HASH]}), and these "
            f"maps are of {explanation.model} with other weights ({weights[:SHORT_HASH] or 'changed since'}); expected "
            "the same model. Make one for this model by ",
            Verb("certify", file="certificate.json"),
            ".",
        )
    given = {name: value for name, value in explanation.preprocess.to_dict().items() if name != "display"}
    if given != dict(certificate.preprocess):
        raise BadInput(
            f"The calibration photos were prepared otherwise ({certificate.preprocess}) than these ({given}); expected "
            "the same preprocessing."
        )
    size, shape = tuple(explanation.pixels.shape[-2:]), tuple(explanation.maps.shape[1:])
    if size != certificate.size or (shape != certificate.grid and shape[-2:] != size):
        raise BadInput(
            f"These maps are {_by(shape)} of images of {_by(size)} pixels, and the certificate is for "
            f"{_by(certificate.grid)} patches of images of {_by(certificate.size)}; expected the same size."
        )
    if explanation.score != certificate.score:
        raise BadInput(
            f"These maps explain the score '{explanation.score}', and the certificate is for maps of "
            f"'{certificate.score}'; expected maps without score=."
        )
    if explanation.seed != certificate.seed:
        raise BadInput(
            f"These maps were made with seed {explanation.seed}, and the certificate with {certificate.seed}; expected "
            f"maps of seed {certificate.seed}."
        )
    for row in range(len(explanation)):
        _check_target(explanation, certificate, row)
    for name, values in zip(explanation.names, explanation.maps, strict=True):
        if not values.isfinite().all():
            raise BadInput(f"The map of {name} has NaN or infinity, so that it ranks no patches; expected numbers.")


def _check_method(method: str, certificate: Certificate) -> None:
    """Raise BadInput for maps of another method, or of one whose code was changed."""
    if method != certificate.method:
        raise BadInput(
            f"The certificate is for maps of '{certificate.method}', and these are of '{method}'; expected the same "
            "method, as each needs patches of its own."
        )
    if code_hash(resolve_method(method)) != certificate.code:
        raise BadInput(
            f"The code of '{method}' was changed after the certificate was made; expected the same. Make it again by ",
            Verb("certify", file="certificate.json"),
            ".",
        )


def _check_target(explanation: Explanation, certificate: Certificate, row: int) -> None:
    """Raise BadInput unless one map is of the answer that the certificate is about, and the model gives it."""
    logits = explanation.logits[row].double()
    answer, name = int(logits.argmax()), explanation.names[row]
    answer_name = class_name(explanation.labels, answer)
    if len(certificate.classes) == 2:
        a, b = certificate.classes
        if explanation.class_specific and explanation.targets[row] != certificate.target:
            raise BadInput(
                f"The map of {name} is of {explanation.targets[row]}, and the certificate of {certificate.target}; "
                "expected the same contrast."
            )
        if not logits[a] > logits[b]:
            raise BadInput(f"For {name} {certificate.target} is not above 0, as it is for the calibration photos.")
        return
    if explanation.class_specific and explanation.classes[row] != answer:
        raise BadInput(
            f"The map of {name} is of {explanation.targets[row]}, and the model's answer is {answer_name}: the "
            "certificate is about its answer; expected a map of the predicted class."
        )
    if certificate.classes and answer != certificate.classes[0]:
        raise BadInput(
            f"The model's answer for {name} is {answer_name}, and the certificate is about photos that it calls "
            f"{certificate.target}."
        )


def _tested(explanation: Explanation, marked: CertifiedPatches, model: ModelLike | None) -> CertifiedPatches:
    """Return the same patches with whether the statement holds on each photo: one more pass."""
    certificate = marked.certificate
    if model is None:
        if explanation.origin is None:
            raise BadInput(
                "This explanation was read from a file and holds no model; expected the model that was explained: "
                "ex.certify(certificate, test=True, model=model)."
            )
        model = explanation.origin.models[0].base or explanation.origin.models[0]
    tested = as_model(model, explanation.pixels)
    if state_hash(tested.module) != certificate.weights:
        raise BadInput(f"The weights of {tested.name} are not those of the certificate; expected the same model.")
    contrast = Contrast(*certificate.classes) if len(certificate.classes) == 2 else None
    batch = Batch(to_device(explanation.pixels, tested), explanation.names)
    seed, autocast = certificate.seed, certificate.autocast
    question = Question.of(tested, batch, contrast, seed=seed, autocast=autocast, one_batch=True)
    keep = marked.patches.flatten(1) if certificate.statement == "keep" else ~marked.patches.flatten(1)
    held: list[bool] = []
    answers: list[str] = []
    with closing(iter_runs(question, (), size=TESTED_AT_ONCE)) as runs:
        for run in runs:
            trace = run_backward(run.recording, run.targets[0], None)
            variants = keep[list(run.rows), None].to(trace.pixels.device)  # [B, 1, patches]
            with probing(trace, certificate.removal, label=NAME, forwards=1, seed=seed) as probe:
                logits = probe.score_kept(variants, lambda logits, _: logits)[:, 0]
            is_target = answer_is_target(run.targets[0])(logits, list(range(len(logits)))) > 0
            held += (is_target if certificate.statement == "keep" else ~is_target).tolist()
            answers += [class_name(explanation.labels, index) for index in logits.argmax(1).tolist()]
    return replace(marked, held=tuple(held), answers=tuple(answers))


def _by(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes))
