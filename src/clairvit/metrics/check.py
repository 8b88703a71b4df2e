"""Check maps: does a map predict what hiding parts of the photo does, and does the answer mean anything?

64 passes with random sets of patches kept, the very sets that `refine` spends, are shared by all maps of an image. Two
more passes per map hide what it marks most. One pass is of the image itself (with the backwards of methods of other
families), one of a noisy copy (the method again). Removed tokens are dropped, so that a pass is about half a forward.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import image_seeds
from clairvit.errors import BadInput, ClairWarning, UnknownName
from clairvit.execution import ExecutionOptions, check_seed
from clairvit.methods.collect import varies
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Explanation
from clairvit.methods.planner import run_all, spent_on
from clairvit.methods.runs import Question, Run, TargetList, chunk_size, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.answer_check import (
    AnswerFacts,
    Reference,
    check_answer,
    embeddings_of,
    looks_untrained,
    photo_reasons,
)
from clairvit.metrics.check_result import (
    LARGEST_EFFECT,
    OUTLIERS_MATTER,
    PREDICTS,
    UNSTABLE,
    CheckResult,
    MapCheck,
    Quantity,
    RemovalEffect,
    judge,
)
from clairvit.metrics.context import EvalContext, planar_maps
from clairvit.metrics.removal_prediction import correlation, edge_map, middle_maps, partial_correlation
from clairvit.metrics.robustness import explain_noisy_copies, scaled_noise
from clairvit.metrics.similarity import spearman
from clairvit.models.activation import Activation, probabilities
from clairvit.models.coerce import ModelLike, as_model
from clairvit.models.images import Batch, to_device
from clairvit.models.model import Model
from clairvit.models.readout import bound_inputs
from clairvit.models.state_hash import state_hash
from clairvit.numerics import pool_to_grid, widened
from clairvit.perturbation.random_sets import BLOCK, contrasts, keep_sets
from clairvit.targets.base import TargetBatch, class_name
from clairvit.targets.resolve import readouts_by_image, readouts_of
from clairvit.targets.similar import SIMILAR_TO
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.outlier_tokens import outlier_patches
from clairvit.tracing.trace import run_backward

PASSES = 64  # random sets of patches that are kept, in blocks of 8 of one size
FEWEST_PASSES = 32
LEAST_HIDDEN, MOST_HIDDEN = 0.1, 1 / 3  # shares of the patches that the map's own removals hide
BRIGHTEST = 0.1  # of the patches, among which outlier tokens are counted
NOISE = 0.1  # standard deviation in normalised pixels: about 6 of 255 grey levels
# One well-known method per family; the first three of other families than the map's that fit the model are compared.
FAMILY_METHODS = ("attnlrp+plus", "genatt", "rollout", "ixg", "gradcam")
UNTRAINED = "The weights of the model look random: its normalisation layers are as they began."
YARDSTICKS = ("attnlrp+plus", "genatt")  # whose own maps of the target a supported map must come near
COMPARED = 3
TIES_MATTER = 0.1  # of the removed patches: drawn from equally bright ones
PROBABILITY_SCORES = ("logit", "prob", "logprob", "neg_loss")  # kinds of score that grow with the probability


def check_explanation(
    explanation: Explanation,
    model: ModelLike | None = None,
    *,
    target: Any = None,
    passes: int = PASSES,
    reference: Reference | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    autocast: str | None = None,
) -> CheckResult:
    """Check the maps of an explanation; what `Explanation.check` does."""
    if not len(explanation):
        raise BadInput("The explanation has no maps; expected at least one to check.")
    groups = _models_and_targets(explanation, model, target)
    for _, checked_model, _ in groups:
        _check_weights(checked_model, explanation)
    batch = Batch(explanation.pixels, explanation.names)
    seed = check_seed(explanation.seed if seed is None else seed)
    settings = Settings(
        check_passes(passes),
        seed,
        explanation.class_specific,
        reference,
        ExecutionOptions.from_caller(batch_size, autocast),
    )
    return _check_groups(groups, batch, explanation.maps, _spec_of(explanation.method), settings)


def check_maps(
    model: ModelLike,
    images: Any,
    maps: Any,
    target: Any = None,
    *,
    method: str | MethodSpec | None = None,
    passes: int = PASSES,
    reference: Reference | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> CheckResult:
    """Check how far maps of any origin can be trusted, at about 70 shortened passes per image.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; all of them are one batch. Several maps of one image, each next to a copy of it,
            share its passes.
        maps: [B, rows, cols], on the patches or finer, one per image; larger values are brighter.
        target: What they explain, as in `cv.explain`: one target per image.
        method: The method that made them, which then explains a noisy copy for the stability; None: not measured.
        passes: How many random sets of patches are tried, 32 or more.
        reference: What images look like that the model is meant for, of `cv.reference`.
        seed: The seed of random sets and noise.
        batch_size: At most so many perturbed images in one pass; None: chosen by size.
        autocast: "bfloat16" makes perturbed passes faster and less exact.
        inputs: As in `cv.explain`.

    Returns:
        A `CheckResult` with one `MapCheck` per map.

    Raises:
        BadInput: Maps of another number or shape, or images or targets that cannot be used.
        NotApplicable: The model has no patches that could be removed.

    Example:
        >>> import clairvit as cv, torch
        >>> cv.check_maps("pets", "demo", torch.ones(1, 14, 14)).verdict
        'not better than chance'
    """
    question = Question.of(
        model, images, target, seed=seed, batch_size=batch_size, autocast=autocast, inputs=inputs, one_batch=True
    )
    batch = question.images
    assert isinstance(batch, Batch)
    tensor = torch.as_tensor(maps)
    axes = "rows, columns" if batch.pixels.ndim == 4 else "frames, rows, columns"
    if tensor.ndim != batch.pixels.ndim - 1 or len(tensor) != len(batch):
        raise BadInput(
            f"Maps of shape {list(tensor.shape)} were given for {len(batch)} images; expected "
            f"[{len(batch)}, {axes}], one map per image."
        )
    question.targets.check_count(batch)
    spec = None if method is None else resolve_method(method)
    class_specific = spec is None or spec.method.class_specific
    settings = Settings(check_passes(passes), question.seed, class_specific, reference, question.execution)
    result = _check_groups(_resolve_groups(question), batch, tensor, spec, settings)
    return replace(result, cost=result.cost + Cost(forwards=1))  # the scores that the target is resolved by


Group = tuple[list[int], Model, TargetBatch]  # rows of the maps that one model made, the model, and their target


@dataclass(frozen=True)
class Settings:
    """How maps are checked: the number of random sets, the seed, and what the answer is held against.

    Args:
        passes: Random sets of patches.
        seed: Of random sets and noise.
        class_specific: Whether the maps are of one class, so that it is asked whether they are specific to it.
        reference: What images look like that the model is meant for.
        execution: How perturbed images are run.
    """

    passes: int
    seed: int
    class_specific: bool
    reference: Reference | None
    execution: ExecutionOptions

    def doubts(self, model: Model, pixels: Tensor) -> list[tuple[str, ...]]:
        """Return for each image what the reference says against it, as sentences."""
        if self.reference is None:
            return [()] * len(pixels)
        distances = self.reference.distance(embeddings_of(model, pixels)).tolist()
        return [
            () if distance <= self.reference.limit else (self.reference.sentence(distance),) for distance in distances
        ]


def check_passes(passes: int) -> int:
    """Return the number of random sets; raise BadInput for one that is no number or too small."""
    if isinstance(passes, bool) or not isinstance(passes, Integral) or passes < FEWEST_PASSES:
        raise BadInput(f"passes={passes!r} was given; expected {FEWEST_PASSES} or more random sets of patches.")
    return int(passes)


@own_grad_mode()
def _check_groups(
    groups: Sequence[Group], batch: Batch, maps: Tensor, spec: MethodSpec | None, settings: Settings
) -> CheckResult:
    """Check the maps [B, rows, cols] of a batch model by model, a few images at a time; return them in their order."""
    results: list[CheckResult] = []
    order: list[int] = []
    for rows, model, target in groups:
        started = time.perf_counter()
        of_image = list(_rows_by_image(batch.pixels[rows]).values())  # places in `rows`, per image
        width = max(map(len, of_image))
        places = [[each[min(k, len(each) - 1)] for each in of_image] for k in range(width)]  # [targets][images]
        firsts = [rows[place] for place in places[0]]
        images = Batch(batch.pixels[firsts].to(model.device), tuple(batch.names[row] for row in firsts))
        targets = TargetList(tuple(target.take(each) for each in places))
        question = Question(model, images, targets, ((model,),) * width, None, settings.seed, settings.execution)
        panel = _panel(target)
        parts: list[CheckResult] = []
        with closing(iter_runs(question, panel, size=chunk_size(model), label="check")) as runs:
            for run in runs:
                of_run = [maps[[rows[each[image]] for image in run.rows]] for each in places]
                checks, notes = _check_run(run, of_run, panel, spec, settings)
                by_row = {
                    rows[of_image[image][k]]: checks[k][at]
                    for at, image in enumerate(run.rows)
                    for k in range(len(of_image[image]))
                }
                named = tuple(replace(check, name=batch.names[row]) for row, check in by_row.items())
                order += by_row
                cost, shared = spent_on(run.recording, panel, width), len(run.rows) / len(by_row)
                cost = Cost(math.ceil(cost.forwards * shared), math.ceil(cost.backwards * shared))
                parts.append(CheckResult(named, cost, settings.seed, notes))
        result = parts[0].joined(parts[1:])
        results.append(replace(result, cost=replace(result.cost, seconds=time.perf_counter() - started)))
    joined = results[0].joined(results[1:]) if len(results) > 1 else results[0]
    return joined if order == sorted(order) else joined.take([order.index(row) for row in range(len(order))])


def _rows_by_image(pixels: Tensor) -> dict[int, list[int]]:
    """Return the rows of equal images [B, …] under one number each, so that they share their passes."""
    by_seed: dict[int, list[int]] = {}
    for row, seed in enumerate(image_seeds(pixels, 0)):
        first = by_seed.get(seed, [row])[0]
        key = seed if torch.equal(pixels[first], pixels[row]) else -row - 1  # a checksum may meet by chance
        by_seed.setdefault(key, []).append(row)
    return by_seed


def _check_weights(model: Model, explanation: Explanation) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # of weights that have changed, which is the error below
        explained = explanation.weights_hash
    if state_hash(model.module) != explained:
        raise BadInput(
            f"The weights of {model.name} are not those that were explained; expected the same model. Explain the "
            "images again, then check."
        )


def _models_and_targets(explanation: Explanation, model: ModelLike | None, target: Any) -> list[Group]:
    """Return rows with their model and target: those that were explained, or what the caller gives again."""
    origin = explanation.origin
    if model is None and origin is None:
        raise BadInput(
            "This explanation was read from a pickle, or joined from several models, and holds no model; expected "
            "the model that was explained: ex.check(model)."
        )
    if model is None and target is None:
        assert origin is not None
        return origin.groups()
    base = (origin.models[0].base or origin.models[0]) if model is None and origin is not None else model
    assert base is not None
    checked_model = as_model(base, explanation.pixels)
    if target is not None:
        if model is None and origin is not None:
            bases = [explained.base or explained for explained in origin.models]  # inputs of a map's image belong to it
            readouts = readouts_of(bases, target)
        else:
            readouts = readouts_by_image(checked_model, target, len(explanation.pixels))
        return _resolve_groups(_about(explanation, checked_model, target, readouts))
    if origin is not None:
        _check_weights(checked_model, explanation)
        return [
            (group_rows, explained if explained.base or bound_inputs(explained.module) else checked_model, resolved)
            for group_rows, explained, resolved in origin.groups()
        ]
    if explanation.class_specific and None in explanation.classes:
        raise BadInput(
            "The explanation's target is no class (a contrast or a function), and it was read from a pickle; expected "
            "target= as it was explained: ex.check(model, target=…)."
        )
    classes = None if None in explanation.classes else list(explanation.classes)
    return _resolve_groups(_about(explanation, checked_model, classes, [checked_model]))


def _about(explanation: Explanation, model: Model, target: Any, readouts: Sequence[Model]) -> Question:
    """Return the question about the images of an explanation, given the model that each image's target reads."""
    batch = Batch(to_device(explanation.pixels, model), explanation.names)
    same = len({id(readout) for readout in readouts}) == 1
    by_target = (tuple(readouts[:1] if same else readouts),)
    targets = TargetList(None if target is None else (target,))
    return Question(model, batch, targets, by_target, None, explanation.seed, ExecutionOptions())


@own_grad_mode()
def _resolve_groups(question: Question) -> list[Group]:
    """Return the images whose targets read the same output of the model, that output's model, and their targets."""
    groups: dict[int, tuple[list[int], Model, list[TargetBatch]]] = {}
    with closing(iter_runs(question, ())) as runs:
        for run in runs:
            rows, _, targets = groups.setdefault(id(run.model), ([], run.model, []))
            rows += run.rows
            targets.append(run.targets[0].by_row(run.recording.logits))
    return [
        (rows, model, targets[0] if len(targets) == 1 else TargetBatch.concat(targets))
        for rows, model, targets in groups.values()
    ]


def _spec_of(method: str) -> MethodSpec | None:
    """Return the spec of an explanation's method; None if it is not registered any more."""
    try:
        return resolve_method(method)
    except UnknownName:
        return None


def _check_run(
    run: Run,
    maps: Sequence[Tensor],
    panel: Sequence[MethodSpec],
    spec: MethodSpec | None,
    settings: Settings,
) -> tuple[list[list[MapCheck]], tuple[str, ...]]:
    """Check maps [targets][B, rows, cols] of a few images: one recording, one probe, one noisy copy per target."""
    recording = run.recording
    results = run_all(panel, recording, run.targets, seed=settings.seed) if panel else {}
    contexts = [
        EvalContext(
            trace=(trace := run_backward(recording, target, None)),
            specs=() if spec is None else (spec,),
            raw=(planar_maps(of_target.to(recording.logits.device), trace),),
            seed=settings.seed,
        )
        for target, of_target in zip(run.targets, maps, strict=True)
    ]
    trace = contexts[0].trace
    design = Design.of(contexts[0].patches, settings.passes, settings.seed, _spent(spec))
    measured = _measure(contexts, design)
    untrained = (UNTRAINED,) if looks_untrained(run.model.module) else ()
    photos = _Photos(
        run.batch.names,
        edge_map(trace.pixels, trace.layout.grid).cpu(),
        [(*untrained, *photo_reasons(pixels, run.model)) for pixels in trace.pixels],
        settings.doubts(run.model, trace.pixels),
    )
    checks: list[list[MapCheck]] = []
    notes: list[str] = []
    for place, context in enumerate(contexts):
        others = _other_maps(context, results, place)
        stability, reason = _stability(context, spec)
        checks.append(_checks_of(context, design, measured[place], others, stability, photos, spec, settings))
        notes += [*context.notes_log.notes, *reason]
    return checks, tuple(dict.fromkeys(notes))


@dataclass(frozen=True, eq=False)
class _Photos:
    """What is known of the photos themselves, whatever the target."""

    names: Sequence[str]
    edges: Tensor  # [B, patches]
    certain: Sequence[Sequence[str]]  # reasons why there is nothing to explain
    doubts: Sequence[Sequence[str]]  # what the reference says against them


def _checks_of(
    context: EvalContext,
    design: Design,
    measured: Sequence[Measured],
    others: Mapping[str, Tensor],
    stability: Sequence[float | None] | None,
    photos: _Photos,
    spec: MethodSpec | None,
    settings: Settings,
) -> list[MapCheck]:
    """Return the checks of all images for one target."""
    agreement = _agreement(context, others, "" if spec is None else spec.method.family)
    outliers, model, grid = _outliers(context), context.trace.recording.model, context.trace.layout.grid
    marked = max(design.hidden, default=0)
    checks = []
    for row, name in enumerate(photos.names):
        own, method_map, order = measured[row], context.maps[0, row].flatten().cpu(), context.order[0, row].cpu()
        evidence = Evidence()
        if bool(method_map.isfinite().all()) and own.is_finite:
            yardsticks = [others[text][row].flatten().cpu() for text in YARDSTICKS if text in others]
            evidence = weigh(design, own, method_map, order, yardsticks, photos.edges[row], grid)
        rival = rival_of(context.target, row, context.trace.logits[row]) if settings.class_specific else None
        check = MapCheck(
            name=name,
            target=context.target.names[row],
            method="" if spec is None else spec.text,
            quantity=quantity_of(context.target, row),
            full=float(own.full[0]),
            removals=removals_of(design, own, context.patches),
            prediction=evidence.prediction,
            partial=evidence.partial,
            yardstick=evidence.yardstick,
            specific=None if rival is None else evidence.specific,
            rival=None if rival is None else class_name(model.labels, rival),
            stability=None if stability is None else stability[row],
            agreement=agreement[row],
            outliers=None if (counted := outliers[row]) is None else counted[0],
            outlier_share=None if counted is None else counted[1],
            verdict=None,
            grid=tuple(grid),
            brightest=tuple(order[:marked].tolist()),
        )
        checks.append(_judged(check, row, context, own, design, photos.doubts[row], photos.certain[row]))
    return checks


def _panel(target: TargetBatch) -> list[MethodSpec]:
    """Return one method per family; without a score those that need none."""
    specs = map(resolve_method, FAMILY_METHODS)
    return [spec for spec in specs if not (target.class_agnostic and spec.method.class_specific)]


def _spent(spec: MethodSpec | None) -> int:
    """Return how many random sets a refined map was fitted to: it is tested on others."""
    members = () if spec is None else spec.members or (spec,)
    budgets = [dict(member.options).get("passes", 0) for member in members if member.method.name.startswith("refine(")]
    return max(map(int, budgets), default=0)


# The value of a target: what the sentence speaks of, and the evidence that correlations are computed from.


def quantity_of(target: TargetBatch, row: int) -> Quantity:
    """Return what is measured of a target: the probability of a class, another score, or a similarity.

    Contrasts, functions and raw scores have no probability of their own.
    """
    if target.class_agnostic:
        return "similarity"
    is_class = target.classes[row] is not None and isinstance(target.rows[row], tuple)
    grows = target.score in PROBABILITY_SCORES and target.activation != "raw"
    return "probability" if is_class and grows else "score"


def log_odds(logits: Tensor, index: int, activation: str) -> Tensor:
    """Return log p / (1 − p) of a class, [n], of logits [n, C] in float64, exactly also where p is nearly 1.

    softmax: z_c − log Σ_{j ≠ c} exp z_j; sigmoid: z_c.
    """
    scores = logits.double()
    if activation == "sigmoid":
        return scores[:, index]
    others = scores.index_fill(1, torch.tensor([index], device=scores.device), -math.inf)
    return scores[:, index] - others.logsumexp(1)


def rival_of(target: TargetBatch, row: int, logits: Tensor) -> int | None:
    """Return the class with the highest of scores [C] but for the target's; None where classes do not compete."""
    index = target.classes[row]
    if index is None or quantity_of(target, row) != "probability" or target.activation != "softmax" or len(logits) < 2:
        return None
    return int(logits.index_fill(0, torch.tensor([index], device=logits.device), -math.inf).argmax())


def scores_of_class(logits: Tensor, index: int, rival: int | None, activation: Activation = "softmax") -> Tensor:
    """Return probability, log-odds and difference to the runner-up of a class, [n, 3], of logits [n, C] in float64."""
    scores = logits.double()
    p = probabilities(scores, activation)
    assert p is not None
    difference = torch.full_like(scores[:, 0], math.nan) if rival is None else scores[:, index] - scores[:, rival]
    return torch.stack([p[:, index], log_odds(logits, index, activation), difference], 1)


def _values_of(target: TargetBatch, row: int, original: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of logits [n, C] to one map's value, evidence and difference to the runner-up, [n, 3].

    `original` are the scores [C] of the image itself. The difference is NaN where there is no runner-up.
    """
    single, quantity, index = target.take([row]), quantity_of(target, row), target.classes[row]
    rival = rival_of(target, row, original)

    def values(logits: Tensor) -> Tensor:
        nothing = torch.full((len(logits),), math.nan, dtype=torch.float64, device=logits.device)
        if quantity == "similarity":
            value = torch.cosine_similarity(logits.double(), original[None].double(), dim=1)
            return torch.stack([value, value, nothing], 1)
        if quantity == "probability" and index is not None:
            return scores_of_class(logits, index, rival, target.activation)
        if single.sums_classes:
            score = single.take([0] * len(logits))(widened(logits)).double()
        else:  # the user's function, which may know the other images of its batch
            score = torch.cat([single(scores[None]) for scores in widened(logits)]).double()
        return torch.stack([score, score, nothing], 1)

    return values


# The passes


@dataclass(frozen=True, eq=False)
class Design:
    """The random sets of a check, and the sizes of what the maps' own removals hide.

    Args:
        keep: bool [S, patches], the sets; `refine` spends the same.
        mixing: [n, S], contrasts within blocks of one size.
        equations: [n, patches], K = mixing · keep.
        hidden: How many patches a map's own removals hide: as many as some of the sets, rising.
    """

    keep: Tensor
    mixing: Tensor
    equations: Tensor
    hidden: tuple[int, ...]

    @classmethod
    def of(cls, patches: int, passes: int, seed: int, spent: int = 0) -> Design:
        """Return the design for so many patches; `spent` sets are left out, which a refined map was fitted to."""
        start = math.ceil(spent / BLOCK) * BLOCK
        keep = keep_sets(patches, start + passes, seed)[start:]
        mixing = contrasts(passes)
        sizes = sorted({int(count) for count in (~keep).sum(1) if count})
        usual = [size for size in sizes if LEAST_HIDDEN <= size / patches <= MOST_HIDDEN]
        return cls(keep, mixing, mixing @ keep.double(), tuple(usual or sizes[:1]))

    def removal_equations(self, measured: Measured, order: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Return [hidden, patches] and [hidden]: the mean of the sets that hide as many, minus a map's own removal.

        They are orthogonal to the contrasts within blocks, and scaled so that all errors have one variance.
        """
        rows = torch.zeros(len(self.hidden), len(order), dtype=torch.float64)
        gaps = torch.zeros(len(self.hidden), dtype=torch.float64)
        for place, count in enumerate(self.hidden):
            sets = self.sets_hiding(count)
            scale = (1 + 1 / len(sets)) ** -0.5
            shown = torch.ones(len(order), dtype=torch.float64).index_fill(0, order[:count], 0.0)
            rows[place] = scale * (self.keep[sets].double().mean(0) - shown)
            gaps[place] = scale * (measured.sets[sets, column].mean() - measured.top[place, column])
        return rows, gaps

    def sets_hiding(self, count: int) -> Tensor:
        """Return the numbers of the sets that hide so many patches."""
        return ((~self.keep).sum(1) == count).nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Measured:
    """Value, evidence and difference to the runner-up, [..., 3], of one image for one target."""

    full: Tensor  # [3]
    sets: Tensor  # [S, 3]
    top: Tensor  # [hidden, 3], without what the map marks most
    rounding: float  # what may be round-off of the model's scores

    @property
    def is_finite(self) -> bool:
        """Return whether the score of the image and those of all removals are numbers."""
        return all(bool(values[..., :2].isfinite().all()) for values in (self.full, self.sets, self.top))

    @property
    def moves(self) -> bool:
        """Return whether anything changes the evidence by more than rounding."""
        return float((torch.cat([self.sets, self.top])[:, 1] - self.full[1]).abs().max()) > self.rounding


def _measure(contexts: Sequence[EvalContext], design: Design) -> list[list[Measured]]:
    """Score the sets and the removals of all maps in one call of the probe: [targets][images]."""
    first = contexts[0]
    logits = widened(first.trace.logits)
    functions = [[_values_of(context.target, row, logits[row]) for context in contexts] for row in range(len(logits))]

    def score(variants: Tensor, images: list[int]) -> Tensor:
        rows = torch.tensor(images, device=variants.device)
        values = torch.empty(len(images), len(contexts), 3, dtype=torch.float64, device=variants.device)
        for image in dict.fromkeys(images):
            chosen = rows == image
            values[chosen] = torch.stack([function(variants[chosen]) for function in functions[image]], 1)
        return values

    shown = design.keep.to(logits.device).expand(len(logits), -1, -1)
    own = [context.rank[0] >= count for context in contexts for count in design.hidden]
    keep = torch.cat([shown, torch.stack(own, 1)], 1) if own else shown
    with first.probe("token", "check", keep.shape[1]) as probe:
        values = probe.score_kept(keep, score).cpu()  # [B, V, targets, 3]
    full = score(logits, list(range(len(logits)))).cpu()  # [B, targets, 3]
    rounding = 64 * torch.finfo(first.trace.logits.dtype).eps * first.trace.logits.double().abs().amax(1)
    sets, count = len(design.keep), len(design.hidden)
    return [
        [
            Measured(
                full[row, place],
                values[row, :sets, place],
                values[row, sets + place * count : sets + (place + 1) * count, place],
                float(rounding[row]),
            )
            for row in range(len(logits))
        ]
        for place in range(len(contexts))
    ]


def _stability(context: EvalContext, spec: MethodSpec | None) -> tuple[list[float | None] | None, tuple[str, ...]]:
    """Return the rank correlation with the map of a noisy copy per image, or why it was not measured."""
    if spec is None:
        return None, ("check: stability was not measured, as the method of the maps is not known",)
    own = spec.own_cost(context.patches)
    if own.forwards + own.backwards:
        passes = f"{own.forwards + own.backwards:,} passes of its own per image"
        return None, (f"check: stability was not measured, as {spec.text} makes {passes}",)
    ((maps, _),) = explain_noisy_copies(context, 1, scaled_noise(context, "normal", NOISE))
    return _correlations(context.maps[0], maps[0]), ()


def _correlations(a: Tensor, b: Tensor) -> list[float | None]:
    """Return Spearman's rank correlation of maps [B, rows, cols]; None where one is constant."""
    return [None if math.isnan(value) else value for value in spearman(a.flatten(1), b.flatten(1)).tolist()]


def _other_maps(context: EvalContext, results: Mapping[str, list[Result]], place: int) -> dict[str, Tensor]:
    """Return method -> its maps of this target on the patches [B, rows, cols], of methods that fit the model."""
    return {
        text: pool_to_grid(planar_maps(maps.double(), context.trace), context.trace.layout.plane)
        for text, group in results.items()
        if (maps := group[place].maps) is not None
    }


def _agreement(context: EvalContext, others: Mapping[str, Tensor], family: str) -> list[dict[str, float | None]]:
    """Return for each image: method -> rank correlation with its map, of three methods of other families."""
    by_image: list[dict[str, float | None]] = [{} for _ in context.trace.pixels]
    compared = [text for text in others if resolve_method(text).method.family != family]
    for text in compared[:COMPARED]:
        for values, agreement in zip(by_image, _correlations(context.maps[0], others[text]), strict=True):
            values[text] = agreement
    return by_image


def _outliers(context: EvalContext) -> list[tuple[int, float] | None]:
    """Return for each image the number of outlier tokens and their share among the brightest patches."""
    outliers = outlier_patches(context.trace)
    if outliers is None:
        return [None] * len(context.trace.pixels)
    count = max(1, round(BRIGHTEST * context.patches))
    shares = outliers.gather(1, context.order[0][:, :count]).double().mean(1)
    return list(zip(outliers.sum(1).tolist(), shares.tolist(), strict=True))


# What follows from them


@dataclass(frozen=True)
class Evidence:
    """How well one map, and the yardsticks, predict what hiding parts does; None where that cannot be said."""

    prediction: float | None = None
    partial: float | None = None
    yardstick: float | None = None
    specific: float | None = None


def weigh(
    design: Design,
    measured: Measured,
    method_map: Tensor,
    order: Tensor,
    yardsticks: Sequence[Tensor],
    edges: Tensor,
    grid: tuple[int, ...],
) -> Evidence:
    """Return how well one map [patches] predicts what hiding parts did; `order` has its patches, the brightest first.

    `specific` takes what hiding the marked patches did, against the sets that hide as many, as further equations.
    """
    values, difference = (design.mixing @ measured.sets[:, column] for column in (1, 2))
    controls = design.equations @ torch.cat([middle_maps(grid), edges[:, None]], 1)

    def predicted(maps: Tensor, equations: Tensor = design.equations) -> Tensor:
        return equations @ (maps - maps.mean()) if bool(varies(maps)) else equations.new_zeros(len(equations))

    own = predicted(method_map)
    partials = [partial_correlation(predicted(maps), values, controls) for maps in yardsticks if maps.isfinite().all()]
    rows, gaps = design.removal_equations(measured, order, column=2)
    specific = correlation(torch.cat([own, predicted(method_map, rows)]), torch.cat([difference, gaps]))
    return Evidence(
        correlation(own, values),
        partial_correlation(own, values, controls),
        max(partials, default=None),
        None if math.isnan(specific) or difference.isnan().any() else specific,
    )


def removal_effects(top: Tensor, random: Sequence[Tensor], fractions: Sequence[float], rounding: float) -> list[float]:
    """Return e_f = (mean_k r_fk − t_f) / (σ √(f (1 − f)) √(1 + 1/K_f)) of evidence t [F] and r_f [K_f] for each f.

    The sum of f N values that are drawn from N without replacement has a variance in proportion to f (1 − f). So the
    draws of all fractions estimate one spread: σ² = mean_f s_f² / (f (1 − f)), with s_f² the sample variance of r_f.
    e_f is Student's t of the difference, with Σ (K_f − 1) degrees of freedom. A spread below `rounding` counts as that.
    """
    share = [fraction * (1 - fraction) for fraction in fractions]
    variances = [float(values.var()) / part for values, part in zip(random, share, strict=True)]
    variance = math.fsum(variances) / max(len(variances), 1)  # σ²
    effects = []
    for value, values, part in zip(top.tolist(), random, share, strict=True):
        gap, spread = float(values.mean()) - value, math.sqrt(variance * part * (1 + 1 / len(values)))
        effect = gap / max(spread, rounding) if gap else 0.0
        effects.append(min(max(effect, -LARGEST_EFFECT), LARGEST_EFFECT))
    return effects


def removals_of(design: Design, measured: Measured, patches: int) -> tuple[RemovalEffect, ...]:
    """Return what hiding the marked patches does against the sets that hide as many."""
    fractions = [count / patches for count in design.hidden]
    random = [measured.sets[design.sets_hiding(count)] for count in design.hidden]
    effects = removal_effects(measured.top[:, 1], [values[:, 1] for values in random], fractions, measured.rounding)
    return tuple(
        RemovalEffect(fraction, count, float(measured.top[place, 0]), tuple(random[place][:, 0].tolist()), effect)
        for place, (fraction, count, effect) in enumerate(zip(fractions, design.hidden, effects, strict=True))
    )


def _judged(
    check: MapCheck,
    row: int,
    context: EvalContext,
    measured: Measured,
    design: Design,
    doubts: Sequence[str],
    nothing: Sequence[str],
) -> MapCheck:
    """Return the check with its verdict, what is said of the answer, and remarks."""
    method_map = context.maps[0, row].flatten()
    if not bool(context.raw[0][row].isfinite().all()):
        return replace(check, remarks=("It has NaN or infinite values; expected finite numbers.",))
    if not measured.is_finite:
        return replace(check, remarks=("The model's score is NaN or infinite when patches are hidden.",))
    remarks: list[str] = []
    if not bool(varies(method_map)):
        remarks.append("The map is the same everywhere: it ranks no patch above another.")
    if context.patches == 1:
        remarks.append("The map has a single patch, so there is nothing to compare.")
    remarks += _ties_at_the_cut(method_map, design.hidden)
    remarks += _too_few_sets(check.yardstick, len(design.keep))
    if check.stability is not None and check.stability < UNSTABLE:
        remarks.append(f"A little noise changes the map (rank correlation {check.stability:.2f}).")
    if check.outlier_share is not None and check.outlier_share >= OUTLIERS_MATTER:
        remarks.append(
            f"{100 * check.outlier_share:.0f} % of its brightest patches are high-norm outlier tokens, which say "
            "little about their place."
        )
    answer = check_answer(_facts(check, row, context, measured, design), nothing, doubts)
    check = replace(check, answer=answer, remarks=tuple(remarks))
    if answer.status == "nothing to explain":
        return check
    is_clear = any(removal.is_clear(check.quantity) for removal in check.removals)
    return replace(check, verdict=judge(check.effect, check.partial or 0.0, check.yardstick, is_clear))


def _facts(check: MapCheck, row: int, context: EvalContext, measured: Measured, design: Design) -> AnswerFacts:
    """Return what the passes say about the answer itself."""
    logits, target = widened(context.trace.logits[row]), context.target
    p = probabilities(logits.double(), target.activation) if check.quantity == "probability" else None
    highest = int(logits.argmax())
    blocks = measured.sets[: len(measured.sets) // BLOCK * BLOCK, 0].reshape(-1, BLOCK).mean(1)
    return AnswerFacts(
        target=check.target,
        quantity=check.quantity,
        full=check.full,
        lowest=min([*blocks.tolist(), *(removal.top for removal in check.removals)]),
        moves=measured.moves,
        classes=len(logits),
        is_sigmoid=target.activation == "sigmoid",
        answer=None if p is None else (highest, float(p[highest])),
        is_answer=target.classes[row] == highest,
        is_image_similarity=check.target.startswith(SIMILAR_TO),
        labels=context.trace.recording.model.labels,
    )


def _too_few_sets(yardstick: float | None, sets: int) -> list[str]:
    """Return a remark where no map of the class predicts what the sets do, so that they hardly tell maps apart."""
    if yardstick is None or yardstick >= PREDICTS:
        return []
    return [f"No map of this class predicts what {sets} random sets do: more passes would tell more."]


def _ties_at_the_cut(values: Tensor, counts: Sequence[int]) -> list[str]:
    """Return a remark where it is drawn at random which of equally bright patches [patches] are among the brightest."""
    descending = values.sort(descending=True).values
    for count in counts:
        tied = values == descending[count - 1]
        drawn = count - int((values > descending[count - 1]).sum())  # of the tied ones, which are removed
        if drawn < int(tied.sum()) and drawn >= TIES_MATTER * count:
            among = f"{int(tied.sum())} that are equally bright"
            brightest = f"{drawn} of the {count} brightest patches are drawn from {among}"
            return [f"{brightest}, so that another seed may give other numbers."]
    return []
