"""The verb `choose`: which method should I trust for my model, on my images?"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clairvit.data.dataset import Failed, ImageDataset, album_of, parts
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput, ClairWarning, did_you_mean
from clairvit.methods.explain import explain
from clairvit.methods.explanation import Cost
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.evaluate import LABEL, OnError, error_handler, evaluate
from clairvit.metrics.registry import MetricSpec, resolve_metric
from clairvit.metrics.score import Scores
from clairvit.models.coerce import ModelLike, as_images, as_model
from clairvit.models.model import Model
from clairvit.perturbation.rng import check_seed
from clairvit.selection.ranking import Measures, join, judge, sentences
from clairvit.selection.result import Selection
from clairvit.selection.start_layer import Tuned, base_of, tune
from clairvit.selection.stats import Array, mean_ranks, spearman

# Well known, of every family, and all of them arithmetic on the same trace.
PANEL = (
    *("raw-attention", "rollout", "grad-rollout", "genatt", "genatt+skipplus", "transatt", "legrad"),
    *("focusvit", "ixg+skipplus", "decompx+skipplus", "attnlrp", "gradcam"),
)
METRICS = ("insertion-deletion", "faithfulness-correlation")
WITH_MASKS = ("ap", "pointing-game")
FIRST, MEAN_RANK = "first", "mean-rank"
FRONT = ("faithfulness", "localisation")  # families of metrics that are weighed against each other, and against cost


def choose(
    model: ModelLike,
    images: Any,
    methods: Sequence[str | MethodSpec] | None = None,
    metrics: Sequence[str | MetricSpec] | None = None,
    *,
    masks: Any = None,
    mask_kind: str = "nonzero",
    labels: Sequence[int | str | None] | None = None,
    distractors: Sequence[int | str | None] | None = None,
    target: Any = None,
    normalize: str = "raw",
    by: str = FIRST,
    tune_start: Sequence[str | MethodSpec] = (),
    on_error: OnError = "raise",
    seed: int = 0,
    batch_size: int | None = None,
    autocast: str | None = None,
) -> Selection:
    """Rank methods by how faithful they are to this model on these images, with intervals and corrected tests.

    Args:
        model: A `cv.Model`, a name for `cv.load`, or any `nn.Module`.
        images: As in `cv.explain`; six or more, so that there are intervals.
        methods: Method strings or specs; None is a dozen well-known ones, those left out that do not fit the model.
            The baselines `random` and `center` are always added.
        metrics: Metric strings or specs; None is insertion − deletion and faithfulness correlation, with masks also
            average precision and the pointing game.
        masks: As in `cv.evaluate`.
        mask_kind: As in `cv.evaluate`.
        labels: As in `cv.evaluate`.
        distractors: As in `cv.evaluate`.
        target: As in `cv.evaluate`.
        normalize: As in `cv.evaluate`.
        by: What ranks: "first" (the first metric), the name of a metric, or "mean-rank" (the mean rank per image over
            all metrics of faithfulness).
        tune_start: Methods whose best start layer is searched, such as ["focusvit"] for FocusViT's m*.
        on_error: As in `cv.evaluate`.
        seed: The seed of everything random.
        batch_size: As in `cv.evaluate`.
        autocast: As in `cv.evaluate`.

    Returns:
        A `Selection`: `.best`, `.clear` (is it significantly better than all others?), `.ranking`, `.answer` (in
        words); `.save("recipe.json")` writes the recipe that `cv.explain(model, image, "recipe.json")` follows.

    Raises:
        BadInput: Images or options that cannot be used, or no method that fits the model.
        UnknownName: A method, metric or class that does not exist.

    Example:
        >>> import clairvit as cv
        >>> picked = cv.choose("pets", ["demo"] * 2, ["legrad", "rollout"], ["deletion(steps=3)"])
        >>> len(picked.ranking), picked.by
        (4, 'deletion(steps=3)')
    """
    images = as_images(images)
    model = as_model(model, images)
    failed = error_handler(on_error)
    _check_lists(methods=methods, metrics=metrics, tune_start=tune_start)
    seed = check_seed(seed)
    panel = [resolve_method(text).text for text in (PANEL if methods is None else methods)]
    if not tune_start and all(text in BASELINES for text in panel):
        raise BadInput("No method but the baselines was given; expected at least one, such as ['legrad', 'genatt'].")
    bases = list(dict.fromkeys(base_of(str(text)) for text in tune_start))
    dataset = album_of(images, model, masks=masks, mask_kind=mask_kind, labels=labels, others=distractors)
    asked = _asked(metrics, dataset)
    ranking = criterion(by, asked)
    pixels, first = _first(dataset, model, failed)
    how: dict[str, Any] = {"normalize": normalize, "seed": seed, "batch_size": batch_size, "autocast": autocast}
    quiet: Failed | None = None if failed is None else lambda name, error: None  # told once, by the panel
    tuned = tune(model, dataset, bases, ranking[0], target, pixels, on_error=quiet, **how) if bases else {}
    every = list(dict.fromkeys((*panel, *(own.method for own in tuned.values()), *BASELINES)))
    texts = [one.text for one in asked]
    scores = evaluate(
        model, dataset, every, texts, target=target, baselines=False, skip=methods is None, on_error=failed, **how
    )
    fitting = [text for text in every if text not in scores.skipped]
    if all(text in BASELINES for text in fitting):
        raise BadInput(
            f"None of the methods fits {model.name}; expected at least one. " + next(iter(scores.skipped.values()), "")
        )
    by_label = isinstance(target, str) and target == LABEL
    aim = None if by_label else target[first] if isinstance(target, list | tuple) else target
    costs = tuple(_cost(model, pixels, text, aim, batch_size) for text in fitting)
    measures = _measures(fitting, scores, asked, ranking, by, tuned, panel, costs, seed)
    settings = {
        "target": "predicted" if target is None else LABEL if by_label else "given",
        "maps": normalize,
        "activation": model.activation,
    }
    return _pick(model, scores, measures, asked, tuned, settings)


def _check_lists(**given: Sequence[object] | None) -> None:
    for name, value in given.items():
        if isinstance(value, str):
            raise BadInput(f"{name}={value!r} was given; expected a list, such as ['{value}'].")


def _pick(
    model: Model,
    scores: Scores,
    measures: Measures,
    asked: Sequence[MetricSpec],
    tuned: Mapping[str, Tuned],
    settings: Mapping[str, Any],
) -> Selection:
    """The verdict, and what may be said of it."""
    verdict = judge(measures)
    agreement = _agreement(measures, asked)
    answer = [
        *sentences(verdict, measures.by, agreement, tuple(measures.goals)),
        *_without_masks(scores, asked),
        *(own.sentence for own in tuned.values()),
    ]
    return Selection(
        best=verdict.best.method,
        ranking=verdict.rows,
        scores=scores,
        by=measures.by,
        better=measures.better,
        metrics=tuple(one.text for one in asked),
        clear=verdict.clear,
        tied=tuple(row.method for row in verdict.tied),
        groups=verdict.groups,
        agreement=agreement,
        tuned=tuned,
        answer=tuple(answer),
        model=model.name,
        weights=weights_hash(model),
        settings=settings,
        seed=measures.seed,
        skipped=dict(scores.skipped),
        model_record=scores.model_record,
    )


def _without_masks(scores: Scores, asked: Sequence[MetricSpec]) -> list[str]:
    """Images that count in some metrics only."""
    compared = [one.text for one in asked if "masks" in one.metric.needs]
    if not scores.unmasked or not compared:
        return []
    some = ", ".join(scores.unmasked[:3]) + (", …" if len(scores.unmasked) > 3 else "")
    return [f"{len(scores.unmasked)} of {len(scores.seen)} images have no mask, so no {join(compared)}: {some}."]


def _asked(metrics: Sequence[str | MetricSpec] | None, dataset: ImageDataset) -> list[MetricSpec]:
    usual = (*METRICS, *(WITH_MASKS if dataset.has_masks else ()))
    if metrics is not None and not metrics:
        raise BadInput("No metrics were given; expected names such as ['insertion-deletion'], or none for the usual.")
    return list({one.text: one for one in map(resolve_metric, usual if metrics is None else metrics)}.values())


def criterion(by: str, asked: Sequence[MetricSpec]) -> list[MetricSpec]:
    """The metrics that the ranking is by: one, or all of faithfulness."""
    texts = [one.text for one in asked]
    if by == FIRST:
        found = [asked[0]]
    elif by == MEAN_RANK:
        found = [one for one in asked if one.metric.family == "faithfulness"]
    else:
        found = [one for one in asked if one.text == by or one.metric.name == by]
    if not found and by == MEAN_RANK:
        raise BadInput(f"by=mean-rank ranks by metrics of faithfulness, and {', '.join(texts)} has none of them.")
    if not found:
        known = [FIRST, MEAN_RANK, *texts]
        raise BadInput(f"by={by} was given; expected one of {', '.join(known)}.{did_you_mean(by, known)}")
    whole = next((one.text for one in found if one.metric.scope == "set"), None)
    if whole is not None:
        raise BadInput(f"'{whole}' is one number for all images; expected a metric of each image to rank by, by=….")
    return found


def _first(dataset: ImageDataset, model: Model, failed: Failed | None) -> tuple[Any, int]:
    """The first image that can be read [1, 3, H, W], and which it is."""
    quiet: Failed | None = None if failed is None else lambda name, error: None
    part = next(parts(dataset, model, 1, quiet), None)
    if part is None:
        raise BadInput("None of the images could be read; expected at least one that can.")
    return part.pixels, part.rows[0]


def _cost(model: Model, pixels: Any, text: str, target: Any, batch_size: int | None) -> Cost:
    """Passes and seconds of one map, made alone; the model is warm by now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # of zero maps: the scores have said it
        return explain(model, pixels, text, target, batch_size=batch_size).cost


def _measures(
    methods: Sequence[str],
    scores: Scores,
    asked: Sequence[MetricSpec],
    ranking: Sequence[MetricSpec],
    by: str,
    tuned: Mapping[str, Tuned],
    panel: Sequence[str],
    costs: tuple[Cost, ...],
    seed: int,
) -> Measures:
    """Scores as arrays. A start that was picked on these images is scored by the starts that halves of them pick."""
    crossed = {
        (own.method, own.metric): values
        for own in tuned.values()
        if own.method not in panel and (values := own.crossed()) is not None
    }

    def upward(one: MetricSpec) -> Array:
        sign = 1.0 if one.better == "higher" else -1.0
        own = [crossed.get((text, one.text), sign * scores[text, one.text].values.double().numpy()) for text in methods]
        return np.stack(own)  # [K, n]

    for one in ranking:
        if scores[methods[0], one.text].counts is not None:
            raise BadInput(f"'{one.text}' is one number for all images; expected a metric of each image to rank by.")
    together = mean_ranks(np.stack([upward(one) for one in ranking])) if by == MEAN_RANK else upward(ranking[0])
    upright = by == MEAN_RANK or ranking[0].better == "higher"
    means = {one.text: np.array([scores[text, one.text].mean for text in methods]) for one in asked}
    for (text, metric), values in crossed.items():
        sign = 1.0 if resolve_metric(metric).better == "higher" else -1.0
        means[metric][list(methods).index(text)] = sign * float(np.nanmean(values))
    best_first = -together if by == MEAN_RANK else together
    own = np.array([float(np.nanmean(row)) if np.isfinite(row).any() else math.nan for row in best_first])
    return Measures(
        methods=tuple(methods),
        values=together if upright else -together,
        by="mean rank over " + ", ".join(one.text for one in ranking) if by == MEAN_RANK else ranking[0].text,
        better="lower" if by == MEAN_RANK else ranking[0].better,
        means=means,
        goals=_goals(ranking[0], own, asked, means),
        costs=costs,
        seed=seed,
        span=(1, len(methods)) if by == MEAN_RANK else ranking[0].span,
    )


def _goals(ranks: MetricSpec, own: Array, asked: Sequence[MetricSpec], means: Mapping[str, Array]) -> dict[str, Array]:
    """What the front weighs, higher is better: what ranks, and the first metric of each family that it is not of."""
    first = {family: next((one for one in asked if one.metric.family == family), None) for family in FRONT}
    found = {
        family: own if family == ranks.metric.family else means[one.text] * (1 if one.better == "higher" else -1)
        for family, one in first.items()
        if one is not None
    }
    return found if ranks.metric.family in FRONT else {ranks.text: own, **found}


def _agreement(measures: Measures, asked: Sequence[MetricSpec]) -> dict[tuple[str, str], float]:
    """Spearman's rho of the metrics' means over the methods that are no baselines, good being up."""
    own = [place for place, text in enumerate(measures.methods) if text not in BASELINES]
    up = {one.text: measures.means[one.text][own] * (1 if one.better == "higher" else -1) for one in asked}
    return {(one, other): spearman(up[one], up[other]) for one, other in itertools.combinations(up, 2)}
