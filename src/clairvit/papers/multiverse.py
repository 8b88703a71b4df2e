"""Multiverse: each claim of a paper under every protocol that is in use, and in how many of them it holds.

A universe is one measure of a claim with every choice made: how pictures get to the model's size, how fine masks are
compared, which options the metric has, which of several methods a name stands for. Each set of images and model is a
study in the store of the reproduction, so that a run that was stopped goes on.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clairvit.bench.plan import Plan, Study, settings_of
from clairvit.bench.results import read_scores
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.data.dataset import ImageDataset, masks_on_patches, void_as_object
from clairvit.errors import BadInput, ClairError
from clairvit.methods.spec import resolve_method
from clairvit.metrics.confidence_intervals import LEVEL, rounding_level
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.registry import resolve_metric
from clairvit.metrics.score import Score, Scores, leads
from clairvit.models.model import Model
from clairvit.papers.dimensions import Alternative, Dimension, Fit, Resolution, general_dimensions
from clairvit.papers.paper import Claim, Measure, Paper
from clairvit.papers.preparation import patch_grid
from clairvit.papers.setup import ReproductionConfig
from clairvit.selection import stats

Verdict = Literal["surely holds", "holds", "in part", "turns around", "surely turns around", "cannot be said"]
VERDICTS: tuple[Verdict, ...] = (
    *("surely holds", "holds", "in part", "turns around", "surely turns around", "cannot be said"),
)
MEASURE = "measure"  # the name of the choice between the claim's measures
ModelLoader = Callable[[Fit], Model]  # the model with pictures cropped or squashed


class Setup(NamedTuple):
    """What images and masks are like: a study of its own."""

    fit: Fit
    resolution: Resolution


@dataclass(frozen=True)
class Universe:
    """A claim by one measure, with every choice made.

    Attributes:
        claim: The claim; `pairs` are the paper's names.
        choices: Dimension -> the name of its alternative, the measure first.
        setup: How images and masks are prepared.
        measure: The measure.
        metric: Our metric.
        methods: The paper's names of the claim's methods -> our methods.
    """

    claim: Claim
    choices: Mapping[str, str]
    setup: Setup
    measure: Measure
    metric: str
    methods: Mapping[str, str]

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what is computed: universes that compute the same are one."""
        return self.setup, self.measure.name, self.metric, tuple(self.methods.items())


@dataclass(frozen=True)
class UniverseResult:
    """What comes out in a universe."""

    universe: Universe
    effect: float  # the smallest of the pairs' paired effect sizes, mean lead / standard deviation; above 0 it holds
    lead: float  # the lead of that pair, in the unit of the paper
    comparisons: int
    true: int  # of the comparisons
    surely: int
    surely_not: int
    images: int

    @property
    def verdict(self) -> Verdict:
        """Return how the claim comes out: surely, if each comparison is significant (Holm's correction for them)."""
        if not self.comparisons:
            return "cannot be said"
        if self.true == self.comparisons:
            return "surely holds" if self.surely == self.comparisons else "holds"
        if self.true:
            return "in part"
        return "surely turns around" if self.surely_not == self.comparisons else "turns around"


@dataclass(frozen=True, eq=False)
class ClaimMultiverse:
    """One claim in all its universes."""

    claim: Claim
    results: tuple[UniverseResult, ...]

    @cached_property
    def counts(self) -> Mapping[Verdict, int]:
        """How many universes come out in which way."""
        counted = Counter(result.verdict for result in self.results)
        return {verdict: counted[verdict] for verdict in VERDICTS}

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Return the names of the choices that any of its universes has."""
        return tuple(dict.fromkeys(name for result in self.results for name in result.universe.choices))

    def alternatives(self, dimension: str) -> tuple[str, ...]:
        """Return the names of the alternatives of a choice."""
        chosen = (result.universe.choices.get(dimension) for result in self.results)
        return tuple(dict.fromkeys(name for name in chosen if name is not None))

    def where(self, dimension: str, alternative: str) -> ClaimMultiverse:
        """Return the universes that chose so."""
        chosen = (result for result in self.results if result.universe.choices.get(dimension) == alternative)
        return ClaimMultiverse(self.claim, tuple(chosen))


@dataclass(frozen=True, eq=False)
class Multiverse:
    """Every claim in its universes, and what could not be computed."""

    claims: tuple[ClaimMultiverse, ...]
    left_out: tuple[str, ...] = ()  # protocols that this model or data do not allow, with the reason
    failed: tuple[str, ...] = ()


def dimensions_of(paper: Paper) -> tuple[Dimension, ...]:
    """Return the paper's own dimensions, then the general ones that it does not replace by its own."""
    names = {dimension.name for dimension in paper.dimensions}
    return (*paper.dimensions, *(entry for entry in general_dimensions() if entry.name not in names))


def claims_of(paper: Paper) -> list[Claim]:
    """Return the claims, of several readings of one claim the first: the dimensions have the others."""
    return list({claim.general or claim.statement: claim for claim in reversed(paper.claims)}.values())[::-1]


def universes_of(paper: Paper, claim: Claim, effort: str, own_fit: Fit, masks: bool) -> list[Universe]:
    """Return the universes of a claim, that of the paper first for each measure; none twice.

    Args:
        paper: The paper.
        claim: One of its claims.
        effort: How many samples are drawn.
        own_fit: How pictures get to the model's size where the paper does not say.
        masks: Whether there are masks.
    """
    methods = {entry.name: paper.at_effort(effort, entry.method) for entry in paper.methods_and_baselines}
    named = list(dict.fromkeys(name for pair in claim.pairs for name in pair))
    base = Setup(paper.preparation.fit or own_fit, paper.preparation.resolution)
    universes: dict[tuple[object, ...], Universe] = {}
    for measure in (measure for measure in paper.measures if measure.name in claim.measures):
        if measure.needs_masks and not masks:
            continue
        metric = paper.at_effort(effort, measure.metric)
        choices = _choices(paper, named, metric, measure, base)
        for chosen in itertools.product(*choices.values()):
            universe = _universe(claim, measure, metric, {name: methods[name] for name in named}, base, choices, chosen)
            universes.setdefault(universe.identity, universe)
    return list(universes.values())


def _choices(
    paper: Paper, named: Sequence[str], metric: str, measure: Measure, base: Setup
) -> dict[str, tuple[Alternative, ...]]:
    """Return the dimensions that matter to these methods and this measure, with the paper's choice first."""
    choices = {}
    for dimension in dimensions_of(paper):
        if dimension.is_of_methods and not any(set(entry.methods) & set(named) for entry in dimension.alternatives):
            continue
        if dimension.is_of_masks and not measure.needs_masks:
            continue
        alternatives = dimension.of_metric(metric)
        if len(alternatives) > 1:
            choices[dimension.name] = tuple(
                sorted(alternatives, key=lambda entry: (entry.fit or base.fit, entry.resolution or base[1]) != base)
            )
    return choices


def _universe(
    claim: Claim,
    measure: Measure,
    metric: str,
    methods: Mapping[str, str],
    base: Setup,
    choices: Mapping[str, tuple[Alternative, ...]],
    chosen: Sequence[Alternative],
) -> Universe:
    replaced, setup = dict(methods), base
    options: dict[str, Any] = {}
    for alternative in chosen:
        replaced |= {name: text for name, text in alternative.methods.items() if name in methods}
        options |= alternative.metric
        setup = Setup(alternative.fit or setup.fit, alternative.resolution or setup.resolution)
    return Universe(
        claim,
        {MEASURE: measure.name, **{name: entry.name for name, entry in zip(choices, chosen, strict=True)}},
        setup,
        measure,
        resolve_metric(metric, **options).text,
        {name: resolve_method(text).text for name, text in replaced.items()},
    )


def run_multiverse(
    config: ReproductionConfig,
    store: Store,
    dataset: ImageDataset,
    load_model: ModelLoader,
    model: Model,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> Multiverse:
    """Compute what the store lacks, and test each claim in each of its universes.

    Args:
        config: The experiment.
        store: Where scores are kept.
        dataset: The images, with masks as fine as the image.
        load_model: Returns the model with pictures cropped or squashed.
        model: The model as the reproduction has it.
        device: Where the models run.
        batch_size: Images per forward pass; None chooses.
        on_plan: Called with the plan of each study.
    """
    paper = config.paper
    own_fit: Fit = "crop" if model.preprocess.keep_ratio else "squash"
    universes = [
        universe
        for claim in claims_of(paper)
        for universe in universes_of(paper, claim, config.effort, own_fit, dataset.has_masks)
    ]
    usable, left_out = _usable_metrics(universes, dataset, model, config)
    scores: dict[Setup, Scores] = {}
    failed: list[str] = []
    models: dict[Fit, Model] = {own_fit: model}
    for setup in dict.fromkeys(universe.setup for universe in universes):
        loaded = models.setdefault(setup.fit, load_model(setup.fit)) if setup.fit not in models else models[setup.fit]
        chosen = [universe for universe in universes if universe.setup == setup and universe.metric in usable]
        if chosen:
            scores[setup], errors = _scores(config, store, dataset, loaded, chosen, setup, device, batch_size, on_plan)
            failed += errors
    results = [_result(universe, scores.get(universe.setup)) for universe in universes if universe.metric in usable]
    return Multiverse(
        tuple(
            ClaimMultiverse(claim, tuple(result for result in results if result.universe.claim is claim))
            for claim in claims_of(paper)
        ),
        tuple(left_out),
        tuple(dict.fromkeys(failed)),
    )


def _usable_metrics(
    universes: Sequence[Universe], dataset: ImageDataset, model: Model, config: ReproductionConfig
) -> tuple[set[str], list[str]]:
    """Return the metrics that this model and data allow, tried on one image, and why others are left out."""
    image = next((row for row in range(len(dataset)) if _is_readable(dataset, row, model)), None)
    if image is None:
        raise BadInput(f"None of the {len(dataset)} images can be read; expected at least one.")
    usable, left_out = set(), []
    for metric in dict.fromkeys(universe.metric for universe in universes):
        try:
            evaluate(model, dataset.take([image]), "random", metric, target=config.study_target, seed=config.seed)
        except ClairError as error:
            left_out.append(f"{metric}: {error}")
        else:
            usable.add(metric)
    return usable, left_out


def _is_readable(dataset: ImageDataset, row: int, model: Model) -> bool:
    try:
        return dataset.read(row, model) is not None
    except ClairError:
        return False


def _scores(
    config: ReproductionConfig,
    store: Store,
    dataset: ImageDataset,
    model: Model,
    universes: Sequence[Universe],
    setup: Setup,
    device: str | None,
    batch_size: int | None,
    on_plan: Callable[[Plan], None],
) -> tuple[Scores, list[str]]:
    """Return the scores of the universes of one setup, and why some are missing."""
    grid = patch_grid(model, dataset) if setup.resolution == "patch" and dataset.has_masks else None
    dataset = dataset if grid is None else masks_on_patches(dataset, grid)
    dataset = void_as_object(dataset) if config.paper.void == "object" else dataset
    study = Study(
        models=(replace(config.model, fit=setup.fit),),
        data=(replace(config.data, void=config.paper.void, mask_grid=grid),),
        methods=tuple(dict.fromkeys(text for universe in universes for text in universe.methods.values())),
        metrics=tuple(dict.fromkeys(universe.metric for universe in universes)),
        seed=config.seed,
        target=config.study_target,
    )
    worker = Worker(study, device, batch_size, models={0: model}, datasets={0: dataset})
    outcome = run_study(study, store, worker=worker, on_plan=on_plan)
    images = outcome.plan.images[0]
    scores = read_scores(store, worker.model_hash(0), study.data[0].spec, settings_of(study), images, study.specs)
    return scores, [error for _, error in outcome.failed]


def _result(universe: Universe, scores: Scores | None) -> UniverseResult:
    """Test a claim in one universe by the paired differences of its pairs."""
    differences = list(_differences(universe, scores)) if scores is not None else []
    if not differences:
        return UniverseResult(universe, math.nan, math.nan, 0, 0, 0, 0, 0)
    seed = next(iter(scores.values())).seed if scores else 0
    p_values = stats.corrected(differences, seed)
    means = [float(values.mean()) for values in differences]
    effects = [_effect(values) for values in differences]
    weakest = int(np.argmin(effects))
    significant = [mean > 0 for mean, p in zip(means, p_values, strict=True) if p < LEVEL]
    return UniverseResult(
        universe,
        effects[weakest],
        abs(universe.measure.factor) * means[weakest],
        len(differences),
        sum(mean > 0 for mean in means),
        sum(significant),
        len(significant) - sum(significant),
        max(map(len, differences)),
    )


def _differences(universe: Universe, scores: Scores) -> Iterator[NDArray[np.float64]]:
    """Yield by how much the winner of each pair leads on each image; as the paper prints it, more is better."""
    confidence = {prediction.image: prediction.probability or 0.0 for prediction in scores.predictions}
    least = universe.measure.min_confidence

    def score(name: str) -> Score | None:
        every = scores.get((universe.methods[name], universe.metric))
        if every is None or least is None:
            return every
        return every.take([row for row, image in enumerate(every.names) if confidence[image] > least])

    for winner, loser in universe.claim.pairs:
        first, second = score(winner), score(loser)
        if first is not None and second is not None:
            values = leads(first, second)
            if len(values):
                yield values


def _effect(values: NDArray[np.float64]) -> float:
    """Return mean / standard deviation of paired differences; of equal ones ± infinity, or 0."""
    mean = float(values.mean())
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    if spread <= float(rounding_level(values[None])[0]):
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / spread
