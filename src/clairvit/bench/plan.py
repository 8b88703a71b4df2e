"""Plan: a study as units of work. What a unit is follows from its content alone, so that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from clairvit.data.dataset import ImageDataset, void_as_object
from clairvit.data.hashing import digest
from clairvit.errors import BadInput, ClairError
from clairvit.methods.spec import resolve_method
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import resolve_metric
from clairvit.models.model import Model

AT_ONCE = 8  # images in a unit: what is lost when a run is killed
USUAL_PATCHES = 196
Lacking = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # methods and the metrics that they lack


@dataclass(frozen=True)
class ModelConfig:
    """A model as `cv.load` takes it."""

    spec: str
    arch: str | None = None
    labels: str | tuple[str, ...] | None = None
    pretrained: bool = True
    activation: str | None = None  # None: what the model states
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    interpolation: str | None = None

    def load(self, device: str | None = None) -> Model:
        from clairvit.models.load import load

        labels = list(self.labels) if isinstance(self.labels, tuple) else self.labels
        return load(
            self.spec,
            arch=self.arch,
            labels=labels,
            pretrained=self.pretrained,
            device=device,
            activation=self.activation,
            mean=self.mean,
            std=self.std,
            resize=self.resize,
            size=self.crop,
            interpolation=self.interpolation,
        )


@dataclass(frozen=True)
class DataConfig:
    """Images as `open_data` takes them."""

    spec: str
    split: str | None = None
    limit: int | None = None
    masks: str | None = None
    mask_kind: str = "nonzero"
    void: Literal["nowhere", "object"] = "nowhere"  # where pixels count of which the masks say nothing

    def open(self, seed: int) -> ImageDataset:
        from clairvit.data.open import open_data

        dataset = open_data(
            self.spec, split=self.split, limit=self.limit, seed=seed, masks=self.masks, mask_kind=self.mask_kind
        ).dataset
        return void_as_object(dataset) if self.void == "object" else dataset


@dataclass(frozen=True)
class Study:
    """What is to be known: every method by every metric, for each model on each set of images."""

    models: tuple[ModelConfig, ...]
    data: tuple[DataConfig, ...]
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    seed: int = 0
    target: str | None = None  # None: what is predicted; "label": the true class
    maps: str = "raw"
    at_once: int = AT_ONCE

    def settled(self) -> Study:
        """Names in their canonical form, the baselines among the methods; misspelt ones are refused."""
        if not (self.models and self.data and self.methods and self.metrics):
            raise BadInput("A study needs models, data, methods and metrics; expected at least one of each.")
        if self.target not in (None, "label"):
            raise BadInput(f"target={self.target!r} was given; expected 'label', or nothing for the prediction.")
        if self.at_once < 1:
            raise BadInput(f"at_once={self.at_once} was given; expected 1 or more images in a unit.")
        methods = dict.fromkeys((*(resolve_method(text).text for text in self.methods), *BASELINES))
        metrics = dict.fromkeys(resolve_metric(text).text for text in self.metrics)
        return replace(self, methods=tuple(methods), metrics=tuple(metrics))

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


class Cell(NamedTuple):  # there may be millions of them
    """One number of a study: what it depends on, and nothing else."""

    model: str  # hash of the weights, the preprocessing and the activation
    image: str  # hash of the image and what is known of it
    method: str
    metric: str
    settings: str  # seed, target, what is done to maps
    among: str = ""  # hash of all images, for a metric of a whole set


@dataclass(frozen=True)
class Unit:
    """Some images, methods and metrics of one model: computed together, stored together."""

    key: str  # a hash of all its cells
    weights: str  # hash of the model
    model: int  # places in the study
    data: int
    rows: tuple[int, ...]  # in the album
    marks: tuple[str, ...]  # of the images
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    forwards: int  # about
    among: str = ""  # as a cell has it

    @property
    def cells(self) -> int:
        return len(self.rows) * len(self.methods) * len(self.metrics)


@dataclass(frozen=True)
class Plan:
    """The units that are still to be computed, and how many cells are there already."""

    units: tuple[Unit, ...]
    cells: int
    done: int
    hashes: tuple[str, ...] = field(default=())  # of the models
    images: tuple[tuple[tuple[str, str], ...], ...] = field(default=())  # of each data: name and mark

    @property
    def forwards(self) -> int:
        return sum(unit.forwards for unit in self.units)


def settings_of(study: Study) -> str:
    """What every cell of a study depends on beside its method and metric."""
    return f"seed={study.seed},target={study.target or 'predicted'},maps={study.maps}"


def make_plan(study: Study, hashes: Sequence[str], albums: Sequence[ImageDataset], done: frozenset[Cell]) -> Plan:
    """Units for all cells of a settled study that are not done."""
    images = tuple(tuple((name, mark_of(dataset, row)) for row, name in enumerate(dataset.names)) for dataset in albums)
    units = [
        unit
        for model, weights in enumerate(hashes)
        for data, own in enumerate(images)
        for unit in _units(study, model, data, weights, [mark for _, mark in own], done)
    ]
    cells = len(hashes) * sum(map(len, images)) * len(study.methods) * len(study.metrics)
    return Plan(tuple(units), cells, cells - sum(unit.cells for unit in units), tuple(hashes), images)


def mark_of(dataset: ImageDataset, row: int) -> str:
    """An image that is not there, or may not be read, costs only itself: once it can be, its mark is another one."""
    try:
        return dataset.content_hash(row)
    except (ClairError, OSError) as error:
        return digest(repr(("unread", dataset.names[row], str(error))).encode())


def among_of(marks: Sequence[str]) -> str:
    """A hash of a set of images, in its order."""
    return digest(repr(tuple(marks)).encode())


def _units(
    study: Study, model: int, data: int, weights: str, marks: Sequence[str], done: frozenset[Cell]
) -> Iterator[Unit]:
    """Images that lack the same, a few at a time; what is there of an image is not computed again."""
    single = tuple(text for text in study.metrics if resolve_metric(text).metric.scope == "image")
    whole = tuple(text for text in study.metrics if text not in single)
    settings, everything = settings_of(study), tuple(range(len(marks)))

    def unit(rows: Sequence[int], methods: Sequence[str], metrics: Sequence[str], among: str) -> Unit:
        own = tuple(marks[row] for row in rows)
        key = digest(repr((weights, own, tuple(methods), tuple(metrics), settings, among)).encode())
        forwards = len(rows) * forwards_of(methods, metrics)
        return Unit(key, weights, model, data, tuple(rows), own, tuple(methods), tuple(metrics), forwards, among)

    for start in range(0, len(marks) if single else 0, study.at_once):
        alike: dict[Lacking, list[int]] = {}
        for row in everything[start : start + study.at_once]:
            alike.setdefault(_lacking(study, weights, marks[row : row + 1], single, "", done), []).append(row)
        for lacking, rows in alike.items():
            yield from (unit(rows, methods, metrics, "") for methods, metrics in lacking)
    if whole:
        among = among_of(marks)
        for methods, metrics in _lacking(study, weights, marks, whole, among, done):
            yield unit(everything, methods, metrics, among)


def _lacking(
    study: Study, weights: str, marks: Sequence[str], metrics: Sequence[str], among: str, done: frozenset[Cell]
) -> Lacking:
    """Methods that lack the same metrics, with those metrics: what one unit can do together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    settings = settings_of(study)
    for method in study.methods:
        left = tuple(
            metric
            for metric in metrics
            if any(Cell(weights, mark, method, metric, settings, among) not in done for mark in marks)
        )
        if left:
            groups.setdefault(left, []).append(method)
    return tuple((tuple(methods), left) for left, methods in groups.items())


def forwards_of(methods: Sequence[str], metrics: Sequence[str]) -> int:
    """About how many forwards one image costs: the maps, then each metric for each map."""
    maps = 1 + sum(resolve_method(text).own_cost(USUAL_PATCHES).forwards for text in methods)
    again = 0
    for text in metrics:
        asked = resolve_metric(text)
        if asked.metric.cost is not None:
            once = asked.metric.cost(patches=USUAL_PATCHES, **dict(asked.options)).forwards
            again += once * maps if "methods" in asked.metric.needs else once * len(methods)
    return maps + again
