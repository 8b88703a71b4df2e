"""Set-up of a reproduction: its configuration, its images, and how it differs from the paper."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from clairvit.bench.plan import DataConfig, ModelConfig
from clairvit.data.dataset import ImageDataset, SampleBatch, iter_batches
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.methods.spec import resolve_method
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.confidence_intervals import FEWEST
from clairvit.metrics.score import Scores
from clairvit.models.model import Model
from clairvit.papers.paper import Measure, Paper, Table, Tuning
from clairvit.papers.preparation import remarks
from clairvit.papers.split import Portion

TARGETS = ("predicted", "label")
FEW_IMAGES = 30  # below this, a note says so


@dataclass(frozen=True)
class ReproductionConfig:
    """Which paper is reproduced, on which model and data."""

    paper: Paper
    model: ModelConfig
    data: DataConfig
    effort: str = "usual"
    target: str | None = None  # None: the paper's; "predicted" or "label"
    seed: int = 0
    validation: Portion | None = None  # images that choose what `paper.tune` names; None: the paper's share, 0: none

    @property
    def study_target(self) -> str | None:
        """Return the target as `Study` takes it: None for the predicted class."""
        target = self.check_target()
        return None if target == "predicted" else target

    def check_target(self) -> str:
        """Return the target, by default the paper's; raise `BadInput` for an unknown one."""
        target = self.target or self.paper.target or "predicted"
        if target not in TARGETS:
            raise BadInput(f"target='{target}' was given; expected one of {', '.join(TARGETS)}.")
        return target


def replace_methods(paper: Paper, assignments: Sequence[str]) -> Paper:
    """Return a paper with other methods of ours under its names: "FocusViT=focusvit(m=8)"."""
    entries = {entry.name: entry for entry in paper.methods}
    for text in assignments:
        name, equals, method = text.partition("=")
        if not equals or name not in entries:
            raise UnknownName(
                f"'{text}' names no method of '{paper.name}'.{did_you_mean(name, entries)} Type NAME=METHOD, "
                f"such as '{paper.methods[-1].name}={paper.methods[-1].method}'."
            )
        entries[name] = replace(entries[name], method=resolve_method(method).text)
    replaced = {text.partition("=")[0] for text in assignments}
    return replace(paper, methods=tuple(entries.values()), tune=_tuning_of_others(paper.tune, replaced))


def _tuning_of_others(tuning: Tuning | None, replaced: Collection[str]) -> Tuning | None:
    """Return what is left to tune once some methods are given: a method that is named states its start layer."""
    if tuning is None or tuning.method in replaced:
        return None
    return replace(tuning, together=tuple(name for name in tuning.together if name not in replaced))


@dataclass(frozen=True, eq=False)
class LoadedData:
    """The images of a reproduction, with a description and notes for the user."""

    dataset: ImageDataset
    description: str  # which images, how many of how many
    masks: str = ""  # where masks come from, where that is not the data set itself
    notes: tuple[str, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()  # topic and sentence, of what was done with the images before
    unknown_classes: tuple[str, ...] = ()  # classes of the data that the model does not have
    classes: tuple[int | None, ...] = ()  # of each image, where they are known without reading it

    @property
    def strata(self) -> tuple[int | None, ...]:
        """Return the class of each image, None where it is not known: parts have their share of each."""
        return self.classes or (None,) * len(self.dataset)

    def part(self, rows: Sequence[int]) -> LoadedData:
        """Return some of the images."""
        return replace(self, dataset=self.dataset.take(rows), classes=tuple(self.strata[row] for row in rows))


Notes = Iterator[tuple[str, str]]  # topic and sentence


def first_readable(model: Model, dataset: ImageDataset) -> SampleBatch:
    """Return the first image of a data set that can be read; the study reports those that cannot.

    Raises:
        BadInput: None of them can be read.
    """
    batch = next(iter_batches(dataset, model, 1, on_error=lambda image, error: None), None)
    if batch is None:
        raise BadInput(f"None of the {len(dataset)} images can be read; expected at least one.")
    return batch


def differences(
    config: ReproductionConfig,
    model: Model,
    data: LoadedData,
    scores: Scores,
    measures: Sequence[Measure],
    table: Table | None,
) -> Notes:
    """Yield what differs from the paper, by topic."""
    yield from _model_and_data(config, model, data, len(scores.predictions), table)
    names = tuple(prediction.image for prediction in scores.predictions)
    yield from remarks(config, model, names, config.data.mask_grid)
    yield from _protocol(config, data, measures)
    yield from _left_out(scores, measures)
    yield from data.remarks
    for note in data.notes:
        yield "data", note
    for note in dict.fromkeys(note for score in scores.values() for note in score.notes):
        yield "note", note
    for gap in config.paper.gaps:
        yield "protocol", gap


def _model_and_data(
    config: ReproductionConfig, model: Model, data: LoadedData, count: int, table: Table | None
) -> Notes:
    paper = config.paper
    size = sum(p.numel() for p in model.module.parameters()) / 1e6
    yield "model", f"Here {model.name} ({size:.1f} million parameters); in the paper {paper.models}."
    yield "data", f"Here {data.description}; in the paper {paper.data}; how many images: {paper.images}."
    if table is not None:
        same = paper.table_of_dataset.get(config.data.spec.partition(":")[0]) == table.data
        if paper.image_set is not None:
            same = config.data.names == paper.image_set.names
        match = "the paper has them for this data" if same else "the paper has none for this data"
        yield "numbers", f"The paper's numbers next to ours are those on {table.data} ({table.source}): {match}."
    if count < FEW_IMAGES:
        advice = (
            f"an interval, and any claim, takes {FEWEST}"
            if count < FEWEST
            else "look at the intervals before the ranks"
        )
        yield "images", f"{count} images say little: {advice}."


def _protocol(config: ReproductionConfig, data: LoadedData, measures: Sequence[Measure]) -> Notes:
    paper = config.paper
    yield "protocol", f"In the paper: {paper.protocol}."
    yield "target", f"Maps and scores are of the {'true' if config.study_target == 'label' else 'predicted'} class."
    texts = [*(entry.method for entry in paper.methods), *(measure.metric for measure in measures)]
    reduced = [text for text in texts if paper.at_effort(config.effort, text) != text]
    if reduced:
        listed = ", ".join(paper.at_effort(config.effort, text) for text in reduced)
        fewer = f"fewer samples than the protocol's ({listed})"
        yield "effort", f"effort '{config.effort}': {fewer}; effort 'paper' takes all."
    if data.masks:
        yield "masks", f"Masks are from {data.masks}."
    if paper.void == "object":
        yield "masks", "Void pixels (borders of trimaps, 255 in VOC) count as object, as in the paper's code."
    for measure in paper.measures:
        if measure not in measures:
            yield "measures", f"{measure.name} is left out: the data has no masks."


def _left_out(scores: Scores, measures: Sequence[Measure]) -> Notes:
    """Yield images, methods and values without a number, or with a meaningless one."""
    for limit in sorted({measure.min_confidence for measure in measures if measure.min_confidence is not None}):
        confident = sum(
            prediction.probability is not None and prediction.probability > limit for prediction in scores.predictions
        )
        names = ", ".join(measure.name for measure in measures if measure.min_confidence == limit)
        total = len(scores.predictions)
        yield "images", f"{confident} of {total} are predicted with more than {limit:.0%}: {names} are of these."
    for method, reason in scores.skipped.items():
        yield "methods", f"{method} is left out. {reason}"
    for (method, metric), score in scores.items():
        if score.n_invalid:
            yield "undefined", f"{metric} of {method} is undefined on {score.n_invalid} of {len(score.values)} images."
    constant = {
        method: score for (method, _), score in scores.items() if score.n_degenerate and method not in BASELINES
    }
    for method, score in constant.items():
        share = f"{score.n_degenerate} of {len(score.values)}"
        yield "constant", f"Maps of {method} are constant on {share} images: the order of their patches is arbitrary."
