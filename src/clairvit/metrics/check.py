"""Check maps: does the score fall when the brightest patches go, and does it fall further than for random patches?

About 12 forwards per map: one of the image (with the backwards of methods of other families), one of a noisy copy (the
method again), two without the brightest 10 % and 30 % of the patches, three without as many random patches each, and
two with 10 % of the patches alone. Removed tokens are dropped, so that most of these passes are shorter than a forward.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import BadInput, ClairWarning, UnknownName
from clairvit.execution import ExecutionOptions, check_seed
from clairvit.methods.collect import varies
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Explanation
from clairvit.methods.planner import run_all, spent_on
from clairvit.methods.runs import Question, Run, TargetList, chunk_size, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.check_result import (
    LARGEST_EFFECT,
    OUTLIERS_MATTER,
    SMALL_FALL,
    UNSTABLE,
    CheckResult,
    MapCheck,
    Quantity,
    RemovalEffect,
    Verdict,
    judge,
    percent_in_words,
)
from clairvit.metrics.context import EvalContext, planar_maps
from clairvit.metrics.robustness import explain_noisy_copies, scaled_noise
from clairvit.metrics.similarity import spearman
from clairvit.models.activation import probabilities
from clairvit.models.coerce import ModelLike, as_model
from clairvit.models.images import Batch, to_device
from clairvit.models.model import Model
from clairvit.models.readout import bound_inputs
from clairvit.models.state_hash import state_hash
from clairvit.numerics import pool_to_grid, widened
from clairvit.targets.base import TargetBatch, class_name
from clairvit.targets.resolve import readouts_by_image, readouts_of
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.outlier_tokens import outlier_patches
from clairvit.tracing.trace import run_backward

FRACTIONS = (0.1, 0.3)  # of the patches that are removed
KEPT = 0.1  # of the patches that are left alone
DRAWS = 3  # random removals of each size
NOISE = 0.1  # standard deviation in normalised pixels: about 6 of 255 grey levels
# One well-known method per family; the first three of other families than the map's that fit the model are compared.
FAMILY_METHODS = ("attnlrp+plus", "genatt", "rollout", "ixg", "gradcam")
COMPARED = 3
TIES_MATTER = 0.1  # of the removed patches: drawn from equally bright ones
PROBABILITY_SCORES = ("logit", "prob", "logprob", "neg_loss")  # kinds of score that grow with the probability
NEAR_CHANCE = 2.0  # times 1 / classes: a probability below is close to guessing


def check_explanation(
    explanation: Explanation,
    model: ModelLike | None = None,
    *,
    target: Any = None,
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
    execution = ExecutionOptions.from_caller(batch_size, autocast)
    spec = _spec_of(explanation.method)
    return _check_groups(groups, batch, explanation.maps, spec, seed, execution, explanation.class_specific)


def check_maps(
    model: ModelLike,
    images: Any,
    maps: Any,
    target: Any = None,
    *,
    method: str | MethodSpec | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> CheckResult:
    """Check how far maps of any origin can be trusted, at about 12 forwards per map.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; all of them are one batch.
        maps: [B, rows, cols], on the patches or finer, one per image; larger values are brighter.
        target: What they explain, as in `cv.explain`: one target per image.
        method: The method that made them, which then explains a noisy copy for the stability; None: not measured.
        seed: The seed of random patches and noise.
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
    groups = _resolve_groups(question)
    result = _check_groups(groups, batch, tensor, spec, question.seed, question.execution, class_specific)
    return replace(result, cost=result.cost + Cost(forwards=1))  # the scores that the target is resolved by


Group = tuple[list[int], Model, TargetBatch]  # rows of the maps that one model made, the model, and their target


@own_grad_mode()
def _check_groups(
    groups: Sequence[Group],
    batch: Batch,
    maps: Tensor,
    spec: MethodSpec | None,
    seed: int,
    execution: ExecutionOptions,
    class_specific: bool,
) -> CheckResult:
    """Check the maps [B, rows, cols] of a batch model by model, a few at a time, and return them in their order."""
    results: list[CheckResult] = []
    for rows, model, target in groups:
        started = time.perf_counter()
        images = Batch(batch.pixels[rows].to(model.device), tuple(batch.names[row] for row in rows))
        question = Question(model, images, TargetList((target,)), ((model,),), None, seed, execution)
        panel = _other_families(spec, target)
        parts: list[CheckResult] = []
        with closing(iter_runs(question, panel, size=chunk_size(model), label="check")) as runs:
            for run in runs:
                of_run = maps[rows][list(run.rows)]
                parts.append(_check_run(run, of_run, panel, spec, seed, class_specific))
        result = parts[0].joined(parts[1:])
        results.append(replace(result, cost=replace(result.cost, seconds=time.perf_counter() - started)))
    order = [row for rows, _, _ in groups for row in rows]
    joined = results[0].joined(results[1:]) if len(results) > 1 else results[0]
    return joined if order == sorted(order) else joined.take([order.index(row) for row in range(len(order))])


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
    run: Run, maps: Tensor, panel: Sequence[MethodSpec], spec: MethodSpec | None, seed: int, class_specific: bool
) -> CheckResult:
    """Check a few maps: one recording, one probe for all removals, one noisy copy."""
    recording, target = run.recording, run.targets[0]
    results = run_all(panel, recording, [target], seed=seed) if panel else {}
    trace = run_backward(recording, target, None)
    context = EvalContext(
        trace=trace,
        specs=() if spec is None else (spec,),
        raw=(planar_maps(maps.to(recording.logits.device), trace),),
        seed=seed,
    )
    quantities = [quantity_of(target, row, class_specific) for row in range(len(maps))]
    measured = _measure_removals(context, quantities)
    stability, reason = _stability(context, spec)
    agreement = _agreement(context, results)
    outliers = _outliers(context)
    cost = spent_on(recording, panel)
    checks = tuple(
        _map_check(
            row,
            run.batch.names[row],
            "" if spec is None else spec.text,
            quantities[row],
            context,
            measured,
            None if stability is None else stability[row],
            agreement[row],
            outliers[row],
        )
        for row in range(len(maps))
    )
    return CheckResult(checks, cost, seed, (*context.notes_log.notes, *reason))


def _other_families(spec: MethodSpec | None, target: TargetBatch) -> list[MethodSpec]:
    """Return one method per family other than the map's; without a score those that need none."""
    family = "" if spec is None else spec.method.family
    return [
        other
        for other in map(resolve_method, FAMILY_METHODS)
        if other.method.family != family and not (target.class_agnostic and other.method.class_specific)
    ]


# The value of a target: what the sentence speaks of, and the evidence that the effect is computed from.


def quantity_of(target: TargetBatch, row: int, class_specific: bool = True) -> Quantity:
    """Return what is measured of a target: the probability of a class, another score, or a similarity.

    Maps that are the same for every class, contrasts, functions and raw scores have no probability of their own.
    """
    if target.class_agnostic:
        return "similarity"
    is_class = target.classes[row] is not None and isinstance(target.rows[row], tuple)
    grows = target.score in PROBABILITY_SCORES and target.activation != "raw"
    return "probability" if is_class and grows and class_specific else "score"


def log_odds(logits: Tensor, index: int, activation: str) -> Tensor:
    """Return log p / (1 − p) of a class, [n], of logits [n, C] in float64, exactly also where p is nearly 1.

    softmax: z_c − log Σ_{j ≠ c} exp z_j; sigmoid: z_c.
    """
    scores = logits.double()
    if activation == "sigmoid":
        return scores[:, index]
    others = scores.index_fill(1, torch.tensor([index], device=scores.device), -math.inf)
    return scores[:, index] - others.logsumexp(1)


def _values_of(target: TargetBatch, quantity: Quantity, original: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of logits [n, C] to values and evidence, [n, 2], in float64, of one map's target.

    `original` are the scores [1, C] of the image itself.
    """
    index = target.classes[0]

    def values(logits: Tensor) -> Tensor:
        if quantity == "similarity":
            value = torch.cosine_similarity(logits.double(), original.double(), dim=1)
            return torch.stack([value, value], 1)
        if quantity == "probability" and index is not None:
            p = probabilities(logits.double(), target.activation)
            assert p is not None
            return torch.stack([p[:, index], log_odds(logits, index, target.activation)], 1)
        scores = target.take([0] * len(logits))(widened(logits)).double()
        return torch.stack([scores, scores], 1)

    return values


@dataclass(frozen=True, eq=False)
class _Measured:
    """Values and evidence [B, …, 2] of the images, of removals and of patches left alone."""

    full: Tensor  # [B, 2]
    top: Tensor  # [B, fractions, 2]
    random: Tensor  # [B, fractions, draws, 2]
    kept: Tensor  # [B, 2: the brightest, random ones, 2]
    counts: tuple[int, ...]  # patches that are removed
    patches: int
    rounding: Tensor  # [B] what may be round-off of the model's scores


def _measure_removals(context: EvalContext, quantities: Sequence[Quantity]) -> _Measured:
    """Score all variants of the images in one call of the probe."""
    patches, logits = context.patches, context.trace.logits
    counts = tuple(max(1, round(fraction * patches)) for fraction in FRACTIONS)
    kept = max(1, round(KEPT * patches))
    place = context.rank[0]  # [B, patches], 0 for the brightest
    draws = iter(_random_places(context, len(counts) * DRAWS + 1))
    keep = [place >= count for count in counts]
    keep += [next(draws) >= count for count in counts for _ in range(DRAWS)]
    keep += [place < kept, next(draws) < kept]
    of_row = [
        _values_of(context.target.take([row]), quantity, logits[row : row + 1])
        for row, quantity in enumerate(quantities)
    ]

    def score(variant_logits: Tensor, images: list[int]) -> Tensor:
        rows = [of_row[image](variant_logits[i : i + 1]) for i, image in enumerate(images)]
        return torch.cat(rows)

    with context.probe("token", "check", len(keep)) as probe:
        values = probe.score_kept(torch.stack(keep, 1), score)  # [B, V, 2]
    n = len(counts)
    return _Measured(
        full=score(widened(logits), list(range(len(logits)))),
        top=values[:, :n],
        random=values[:, n : n + n * DRAWS].reshape(len(values), n, DRAWS, 2),
        kept=values[:, -2:],
        counts=counts,
        patches=patches,
        rounding=64 * torch.finfo(logits.dtype).eps * logits.double().abs().amax(1),
    )


def _random_places(context: EvalContext, count: int) -> list[Tensor]:
    """Return `count` random places 0 … patches − 1 of the patches per image, [B, patches] each."""
    return [context.tie_order(context.patches, "check/random places", k) for k in range(count)]


def removal_effects(top: Tensor, random: Tensor, fractions: Sequence[float], rounding: float = 0.0) -> list[float]:
    """Return e_f = (mean_k r_fk − t_f) / (σ √(f (1 − f)) √(1 + 1/K)) of evidence t [F] and r [F, K].

    The sum of f N values that are drawn from N without replacement has a variance in proportion to f (1 − f). So the
    draws of all fractions estimate one spread: σ² = mean_f s_f² / (f (1 − f)), with s_f² the sample variance of r_f.
    e_f is Student's t of the difference, with F (K − 1) degrees of freedom. A spread below `rounding` counts as that;
    0 where all patches are removed.
    """
    share = torch.tensor([fraction * (1 - fraction) for fraction in fractions], dtype=torch.float64)
    if not bool((share > 0).all()):
        return [0.0] * len(fractions)
    top, random = top.double().cpu(), random.double().cpu()
    spread = ((random.var(1) / share).mean() * share * (1 + 1 / random.shape[1])).sqrt().clamp(min=rounding)
    gap = random.mean(1) - top
    effects = torch.where(gap == 0, 0.0, gap / spread)
    return [float(effect) for effect in effects.clamp(-LARGEST_EFFECT, LARGEST_EFFECT)]


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


def _agreement(context: EvalContext, results: dict[str, list[Result]]) -> list[dict[str, float | None]]:
    """Return for each image: method -> rank correlation with its map, of the first three that fit the model."""
    by_image: list[dict[str, float | None]] = [{} for _ in context.trace.pixels]
    fitting = [(text, group[0].maps) for text, group in results.items() if group[0].maps is not None]
    for text, maps in fitting[:COMPARED]:
        assert maps is not None
        pooled = pool_to_grid(planar_maps(maps.double(), context.trace), context.trace.layout.plane)
        for values, correlation in zip(by_image, _correlations(context.maps[0], pooled), strict=True):
            values[text] = correlation
    return by_image


def _outliers(context: EvalContext) -> list[tuple[int, float] | None]:
    """Return for each image the number of outlier tokens and their share among the brightest patches."""
    outliers = outlier_patches(context.trace)
    if outliers is None:
        return [None] * len(context.trace.pixels)
    count = max(1, round(FRACTIONS[0] * context.patches))
    shares = outliers.gather(1, context.order[0][:, :count]).double().mean(1)
    return list(zip(outliers.sum(1).tolist(), shares.tolist(), strict=True))


def _map_check(
    row: int,
    name: str,
    method: str,
    quantity: Quantity,
    context: EvalContext,
    measured: _Measured,
    stability: float | None,
    agreement: dict[str, float | None],
    outliers: tuple[int, float] | None,
) -> MapCheck:
    """Return the check of one map: effects, verdict and remarks."""
    fractions = [count / measured.patches for count in measured.counts]
    evidence_top, evidence_random = measured.top[row, :, 1], measured.random[row, :, :, 1]
    effects = removal_effects(evidence_top, evidence_random, fractions, float(measured.rounding[row]))
    removals = tuple(
        RemovalEffect(fraction, count, top, tuple(draws), effect)
        for fraction, count, top, draws, effect in zip(
            FRACTIONS,
            measured.counts,
            measured.top[row, :, 0].tolist(),
            measured.random[row, :, :, 0].tolist(),
            effects,
            strict=True,
        )
    )
    check = MapCheck(
        name=name,
        target=context.target.names[row],
        method=method,
        quantity=quantity,
        full=float(measured.full[row, 0]),
        removals=removals,
        kept=float(measured.kept[row, 0, 0]),
        kept_random=float(measured.kept[row, 1, 0]),
        stability=stability,
        agreement=agreement,
        outliers=None if outliers is None else outliers[0],
        outlier_share=None if outliers is None else outliers[1],
        verdict=None,
    )
    return _judged(check, row, context, measured)


def _judged(check: MapCheck, row: int, context: EvalContext, measured: _Measured) -> MapCheck:
    """Return the check with its verdict and remarks."""
    variants = torch.cat([measured.top[row].flatten(0, -2), measured.random[row].flatten(0, -2), measured.kept[row]])
    maps = context.raw[0][row].flatten()
    if not bool(maps.isfinite().all()):
        return replace(check, remarks=("It has NaN or infinite values; expected finite numbers.",))
    if not bool(variants.isfinite().all()) or not bool(measured.full[row].isfinite().all()):
        return replace(check, remarks=("The model's score is NaN or infinite when patches are removed.",))
    verdict: Verdict = judge([removal.effect for removal in check.removals])
    remarks: list[str] = []
    if not bool(varies(maps)):
        verdict = "not better than chance"
        remarks.append("The map is the same everywhere: it ranks no patch above another.")
    if float((variants[:, 1] - measured.full[row, 1]).abs().max()) <= float(measured.rounding[row]):
        verdict = "not better than chance"
        remarks.append("The score is the same whatever is removed.")
    if measured.patches == 1:
        remarks.append("The map has a single patch, so there is nothing to compare.")
    remarks += _low_confidence(check, row, context)
    remarks += _ties_at_the_cut(context.maps[0, row].flatten(), measured.counts)
    shown = check.reported_removal
    hardly_falls = check.quantity == "probability" and shown.random_mean - shown.top < SMALL_FALL
    if hardly_falls and verdict != "not better than chance":
        remarks.append("The fall is clear in the log-odds, and too small to matter for the confidence.")
    if check.stability is not None and check.stability < UNSTABLE:
        remarks.append(f"A little noise changes the map (rank correlation {check.stability:.2f}).")
    if check.outlier_share is not None and check.outlier_share >= OUTLIERS_MATTER:
        remarks.append(
            f"{100 * check.outlier_share:.0f} % of its brightest patches are high-norm outlier tokens, which say "
            "little about their place."
        )
    return replace(check, verdict=verdict, remarks=tuple(remarks))


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


def _low_confidence(check: MapCheck, row: int, context: EvalContext) -> list[str]:
    """Return a remark where the model hardly believes in the class: there is little that could fall.

    The model itself may be sure, of another class.
    """
    classes = context.trace.logits.shape[-1]
    sigmoid = context.target.activation == "sigmoid"
    chance = 0.5 if sigmoid else 1 / classes
    if check.quantity != "probability" or check.full >= (chance if sigmoid else NEAR_CHANCE * chance):
        return []
    confidence, guess = percent_in_words(check.full), percent_in_words(chance)
    if sigmoid:
        return [f"The model does not see {check.target} (confidence {confidence}), so there is little that could fall."]
    logits = context.trace.logits[row]
    other = int(logits.argmax())
    highest = float(widened(logits).softmax(-1)[other])
    if highest >= NEAR_CHANCE * chance:
        answer = f"{class_name(context.trace.recording.model.labels, other)} ({percent_in_words(highest)})"
        unlikely = f"The model's answer is {answer}; its confidence in {check.target} is {confidence}"
        return [f"{unlikely}, and guessing gives {guess}, so there is little that could fall."]
    unsure = f"The model is unsure: its confidence in {check.target} is {confidence}, and guessing gives {guess}"
    return [f"{unsure}, so there is little that could fall."]
