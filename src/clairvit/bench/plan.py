"""Plan: a study as units of work. A unit's key is a hash of its content, so that nothing is computed twice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from clairvit.bench.config import IMAGES_PER_UNIT
from clairvit.bench.config import DataConfig as DataConfig
from clairvit.bench.config import ModelConfig as ModelConfig
from clairvit.data.dataset import ImageDataset
from clairvit.data.hashing import digest
from clairvit.data.pipeline import decode_workers, read_ahead
from clairvit.errors import BadInput, ClairError
from clairvit.execution import precision_name
from clairvit.methods.registry import METHODS
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.own_code import Codes
from clairvit.metrics.registry import METRICS, MetricSpec, resolve_metric

_NO_CODES = Codes()
USUAL_PATCHES = 196  # of an image, by which costs are estimated
FORWARDS_PER_UNIT = 1000  # about, on a CPU: ten to twenty seconds of one core
MOST_REPEATED = 0.02  # of the passes, for the sake of smaller units
Item = TypeVar("Item")
MethodGroups = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # methods, and the metrics that all of them lack


class Specs:
    """Methods and metrics by their text: given, or parsed when they are first asked for.

    All of them are parsed anew after something was registered, as a name may have another function then.

    Args:
        methods: Those that are parsed already.
        metrics: Those that are parsed already.
    """

    def __init__(self, methods: Iterable[MethodSpec] = (), metrics: Iterable[MetricSpec] = ()) -> None:
        self._methods = {spec.text: spec for spec in methods}
        self._metrics = {spec.text: spec for spec in metrics}
        self._registered = METHODS.changes, METRICS.changes

    def method(self, text: str) -> MethodSpec:
        """Return the spec of a method; raise BadInput or UnknownName as `resolve_method` does."""
        self._forget_outdated()
        if text not in self._methods:
            self._methods[text] = resolve_method(text)
        return self._methods[text]

    def metric(self, text: str) -> MetricSpec:
        """Return the spec of a metric; raise BadInput or UnknownName as `resolve_metric` does."""
        self._forget_outdated()
        if text not in self._metrics:
            self._metrics[text] = resolve_metric(text)
        return self._metrics[text]

    def _forget_outdated(self) -> None:
        """Forget every spec if something was registered since."""
        registered = METHODS.changes, METRICS.changes
        if registered != self._registered:
            self._methods, self._metrics, self._registered = {}, {}, registered


@dataclass(frozen=True)
class Study:
    """Every method by every metric, for each model on each set of images.

    Attributes:
        models: What is explained.
        data: The images.
        methods: Method strings; the baselines random and center are added.
        metrics: Metric strings.
        seed: Of everything random.
        target: None for the predicted class, "label" for the true one.
        maps: The normalisation of each map before it is scored.
        at_once: Images in one unit of work at most; on a CPU a unit that costs much has fewer.
        autocast: The precision of perturbed passes; None for that of the weights.

    Example:
        >>> import clairvit as cv
        >>> from pathlib import Path
        >>> lines = ["data = 'scenes:2'", "models = 'scenes'", "methods = 'rollout'", "metrics = 'sparseness'"]
        >>> _ = Path("study.toml").write_text("\\n".join(lines))
        >>> study = cv.Study.from_toml("study.toml")
        >>> study.methods, study.metrics, study.seed
        (('rollout',), ('sparseness',), 0)
    """

    models: tuple[ModelConfig, ...]
    data: tuple[DataConfig, ...]
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    seed: int = 0
    target: str | None = None  # None: the predicted class; "label": the true class
    maps: str = "raw"
    at_once: int = IMAGES_PER_UNIT
    autocast: str | None = None  # precision of perturbed passes; None: that of the weights
    is_resolved: ClassVar[bool] = False  # of one that `resolved` made in this process: True

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Study:
        """Return the study in a TOML file, as `clairvit bench` reads it; files of own methods are imported.

        Args:
            path: The file; docs/studies.md has its keys.

        Raises:
            BadInput: If it cannot be read or has an unknown key, name or value: with the line of it.
        """
        from clairvit.bench.config import read_config
        from clairvit.bench.study_file import study_of
        from clairvit.plugins import import_code

        config = read_config(Path(path))
        import_code(config.imports, Path(path).parent)
        return study_of(config)

    def resolved(self) -> Study:
        """Return the study with canonical names and the baselines among its methods.

        Raises:
            BadInput: If a name is unknown, or the study makes no sense.
        """
        if self.is_resolved:
            return self
        if not (self.models and self.data and self.methods and self.metrics):
            raise BadInput("A study needs models, data, methods and metrics; expected at least one of each.")
        if self.target not in (None, "label"):
            raise BadInput(f"target={self.target!r} was given; expected 'label', or nothing for the prediction.")
        if self.at_once < 1:
            raise BadInput(f"at_once={self.at_once} was given; expected 1 or more images in a unit.")
        autocast = None if self.autocast is None else precision_name(self.autocast)
        methods = {spec.text: spec for spec in map(self.specs.method, (*self.methods, *BASELINES))}
        metrics = {spec.text: spec for spec in map(self.specs.metric, self.metrics)}
        study = replace(self, methods=tuple(methods), metrics=tuple(metrics), autocast=autocast)
        study.__dict__.update(specs=self.specs, method_specs=methods, metric_specs=metrics, is_resolved=True)
        return study

    def sharing(self, specs: Specs) -> Study:
        """Return the study with specs that somebody else parsed, or reads too."""
        study = replace(self)
        study.__dict__["specs"] = specs
        return study

    @cached_property
    def specs(self) -> Specs:
        """Its methods and metrics, each parsed once."""
        return Specs()

    @cached_property
    def method_specs(self) -> Mapping[str, MethodSpec]:
        """Its methods by their names."""
        return {text: self.specs.method(text) for text in self.methods}

    @cached_property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        """Its metrics by their names."""
        return {text: self.specs.metric(text) for text in self.metrics}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle names: another process resolves them once it has imported what registers them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def as_document(self) -> dict[str, Any]:
        """Return the study as JSON values; without autocast as versions that had none wrote it."""
        return {key: value for key, value in asdict(self).items() if key != "autocast" or value is not None}


class Cell(NamedTuple):  # there may be millions of them
    """One number of a study, identified by everything that it depends on."""

    model: str  # hash of the weights, the preprocessing and the activation
    image: str  # hash of the image and its annotation
    method: str
    metric: str
    settings: str  # seed, target, transformation of maps
    image_set: str = ""  # hash of all images, for a metric of a whole set


ImageKey = tuple[str, str, str, str]  # of a cell: model, image, settings, image_set
Pair = tuple[str, str]  # method and metric


class CellSet(Set[Cell]):
    """A set of cells, kept as the methods and metrics that each image has.

    Images of a study nearly all have the same ones, and equal sets are kept once: 20 million cells take the memory of
    their images.
    """

    def __init__(self, pairs: Mapping[ImageKey, frozenset[Pair]]) -> None:
        shared: dict[frozenset[Pair], frozenset[Pair]] = {}
        self._pairs = {key: shared.setdefault(of_image, of_image) for key, of_image in pairs.items()}

    @classmethod
    def of(cls, cells: Set[Cell]) -> CellSet:
        """Return any set of cells as a `CellSet`."""
        if isinstance(cells, CellSet):
            return cells
        pairs: dict[ImageKey, set[Pair]] = {}
        for cell in cells:
            key = (cell.model, cell.image, cell.settings, cell.image_set)
            pairs.setdefault(key, set()).add((cell.method, cell.metric))
        return cls({key: frozenset(of_image) for key, of_image in pairs.items()})

    def pairs(self, model: str, image: str, settings: str, image_set: str = "") -> frozenset[Pair]:
        """Return the methods and metrics that are computed for an image."""
        return self._pairs.get((model, image, settings, image_set), frozenset())

    @classmethod
    def _from_iterable(cls, cells: Iterable[Any]) -> frozenset[Any]:
        """Return the result of a set operation (&, |, -)."""
        return frozenset(cells)

    def __contains__(self, cell: object) -> bool:
        if not isinstance(cell, Cell):
            return False
        return (cell.method, cell.metric) in self.pairs(cell.model, cell.image, cell.settings, cell.image_set)

    def __iter__(self) -> Iterator[Cell]:
        for (model, image, settings, image_set), pairs in self._pairs.items():
            for method, metric in pairs:
                yield Cell(model, image, method, metric, settings, image_set)

    def __len__(self) -> int:
        return sum(map(len, self._pairs.values()))

    def __repr__(self) -> str:
        return f"CellSet({len(self)} cells of {len(self._pairs)} images)"


@dataclass(frozen=True)
class Unit:
    """Some images, methods and metrics of one model: computed together, stored together."""

    key: str  # a hash of all its cells
    weights: str  # hash of the model
    model: int  # index in the study
    data: int
    rows: tuple[int, ...]  # of the data set
    image_hashes: tuple[str, ...]
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    forwards: int  # estimated number of forward passes
    image_set: str = ""  # as in `Cell`
    codes: Codes = _NO_CODES  # of own methods and metrics

    @property
    def cells(self) -> int:
        return len(self.rows) * len(self.methods) * len(self.metrics)


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a study, from 0: units are shared out by their keys, whatever is done already."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that '3/64' names, the fourth of 64.

        Raises:
            BadInput: It is no such text, or the first number is not below the second.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        shard = None if match is None else cls(int(match[1]), int(match[2]))
        if shard is None or shard.index >= shard.count:
            raise BadInput(
                f"The shard '{text}' was given; expected INDEX/COUNT with an index from 0, such as 0/8 … 7/8."
            )
        return shard

    def holds(self, unit: Unit) -> bool:
        """Return whether a unit belongs to this shard."""
        return int(unit.key, 16) % self.count == self.index


@dataclass(frozen=True)
class Plan:
    """The units that are still to be computed, and how many cells the store has already."""

    units: tuple[Unit, ...]
    cells: int
    done: int
    hashes: tuple[str, ...] = ()  # of the models
    images: tuple[tuple[tuple[str, str], ...], ...] = ()  # of each data set: name and hash

    @property
    def forwards(self) -> int:
        return sum(unit.forwards for unit in self.units)


@dataclass(frozen=True)
class StoredPlan:
    """The plan of a study as the store keeps it: which weights, which images."""

    study: Study
    hashes: tuple[str, ...]  # of the models
    images: tuple[tuple[str, ...], ...]  # of each data set: the hashes of its images

    @classmethod
    def of(cls, study: Study, plan: Plan) -> StoredPlan:
        return cls(study, plan.hashes, tuple(tuple(hashed for _, hashed in images) for images in plan.images))

    @classmethod
    def from_document(cls, document: Mapping[str, Any], study: Study) -> StoredPlan:
        """Return a plan from what `as_document` wrote, with the study that was read from it."""
        return cls(study, tuple(document["models"]), tuple(tuple(images) for images in document["images"]))

    def as_document(self) -> dict[str, Any]:
        return {
            "study": self.study.as_document(),
            "models": list(self.hashes),
            "images": [list(images) for images in self.images],
        }


def settings_of(study: Study) -> str:
    """Return what every cell of a study depends on besides its model, image, method and metric."""
    settings = f"seed={study.seed},target={study.target or 'predicted'},maps={study.maps}"
    return settings if study.autocast is None else f"{settings},autocast={study.autocast}"


def make_plan(
    study: Study,
    hashes: Sequence[str],
    datasets: Sequence[ImageDataset],
    done: Set[Cell],
    codes: Codes = _NO_CODES,
    most_forwards: float = math.inf,
) -> Plan:
    """Return units for all cells of a resolved study that are not done.

    Args:
        study: The study.
        hashes: Of its models.
        datasets: Its images.
        done: The cells that are computed.
        codes: Of own methods and metrics.
        most_forwards: About as many passes of the model in one unit, where that is possible.
    """
    images = tuple(tuple(zip(dataset.names, image_hashes(dataset), strict=True)) for dataset in datasets)
    computed = CellSet.of(done)
    units = [
        unit
        for model, weights in enumerate(hashes)
        for data, names in enumerate(images)
        for unit in _units(study, model, data, weights, [hashed for _, hashed in names], computed, codes, most_forwards)
    ]
    cells = len(hashes) * sum(map(len, images)) * len(study.methods) * len(study.metrics)
    return Plan(tuple(units), cells, cells - sum(unit.cells for unit in units), tuple(hashes), images)


def image_hash(dataset: ImageDataset, row: int) -> str:
    """Return the hash of an image; of one that cannot be read, a hash of the error, so that it is tried again later."""
    try:
        return dataset.content_hash(row)
    except (ClairError, OSError) as error:
        return digest(repr(("unread", dataset.names[row], str(error))).encode())


def image_hashes(dataset: ImageDataset) -> list[str]:
    """Return `image_hash` of every image; several are read at a time where the data set allows it."""
    workers = decode_workers() if dataset.concurrent else 0
    with read_ahead(lambda row: image_hash(dataset, row), range(len(dataset)), workers=workers, ahead=64) as hashes:
        return [read() for read in hashes]


def image_set_hash(image_hashes: Sequence[str]) -> str:
    """Return the hash of a set of images in its order."""
    return digest(repr(tuple(image_hashes)).encode())


def _units(
    study: Study,
    model: int,
    data: int,
    weights: str,
    images: Sequence[str],
    done: CellSet,
    codes: Codes,
    most_forwards: float,
) -> Iterator[Unit]:
    """Yield units of at most `study.at_once` images that lack the same cells, then those of metrics of whole sets.

    A unit is what is lost when a run is killed: images, and then methods, are shared out over as many units as keep
    each at about `most_forwards`. Of a metric of a whole set, all images are one unit.
    """
    of_image = tuple(text for text, spec in study.metric_specs.items() if not spec.metric.needs_whole_set)
    of_set = tuple(text for text in study.metrics if text not in of_image)
    settings, every_row = settings_of(study), tuple(range(len(images)))

    def unit(rows: Sequence[int], methods: Sequence[str], metrics: Sequence[str], image_set: str) -> Unit:
        hashes = tuple(images[row] for row in rows)
        own = codes.among(methods, metrics)
        content = (weights, hashes, tuple(methods), tuple(metrics), settings, image_set)
        key = digest(repr((*content, *([tuple(own)] if any(own) else []))).encode())
        texts = tuple(methods), tuple(metrics)
        forwards = len(rows) * cost(*texts)
        return Unit(key, weights, model, data, tuple(rows), hashes, *texts, forwards, image_set, own)

    @cache  # images of a study nearly all lack the same
    def cost(methods: tuple[str, ...], metrics: tuple[str, ...]) -> int:
        return forwards_of(
            [study.method_specs[text] for text in methods], [study.metric_specs[text] for text in metrics]
        )

    @cache
    def method_parts(methods: tuple[str, ...], metrics: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        return _method_parts(methods, lambda part: cost(part, metrics), most_forwards)

    for start in range(0, len(images) if of_image else 0, study.at_once):
        rows_by_missing: dict[MethodGroups, list[int]] = {}
        for row in every_row[start : start + study.at_once]:
            missing = _lacking(study.methods, of_image, done.pairs(weights, images[row], settings))
            rows_by_missing.setdefault(missing, []).append(row)
        for missing, rows in rows_by_missing.items():
            for methods, metrics in missing:
                parts = _even_parts(rows, math.ceil(len(rows) * cost(methods, metrics) / most_forwards))
                yield from (unit(part, some, metrics, "") for part in parts for some in method_parts(methods, metrics))
    if of_set and images:
        image_set = image_set_hash(images)
        computed = frozenset.intersection(*(done.pairs(weights, image, settings, image_set) for image in images))
        for methods, metrics in _lacking(study.methods, of_set, computed):
            yield unit(every_row, methods, metrics, image_set)


def _even_parts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Return neighbours in `count` parts, as equal as they can be; no part is empty."""
    count = max(1, min(count, len(items)))
    edges = [round(len(items) * part / count) for part in range(count + 1)]
    return [items[low:high] for low, high in pairwise(edges)]


def _method_parts(
    methods: tuple[str, ...], cost: Callable[[tuple[str, ...]], int], most_forwards: float
) -> tuple[tuple[str, ...], ...]:
    """Return the methods of one image in parts of about `most_forwards`, if they cost hardly more than together.

    Methods share their passes, which each part makes anew: where a metric explains many noisy copies, that is dear.
    """
    together = cost(methods)
    count = min(math.ceil(together / most_forwards), len(methods))
    while count > 1:
        parts = _even_parts(methods, count)
        if sum(map(cost, map(tuple, parts))) <= (1 + MOST_REPEATED) * together:
            return tuple(map(tuple, parts))
        count -= 1
    return (methods,)


@lru_cache(maxsize=64)  # images of a study nearly all have the same pairs
def _lacking(methods: tuple[str, ...], metrics: tuple[str, ...], computed: frozenset[Pair]) -> MethodGroups:
    """Return methods that lack the same metrics, with those metrics: one unit each."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for method in methods:
        missing = tuple(metric for metric in metrics if (method, metric) not in computed)
        if missing:
            groups.setdefault(missing, []).append(method)
    return tuple((tuple(group), missing) for missing, group in groups.items())


def forwards_of(methods: Sequence[str | MethodSpec], metrics: Sequence[str | MetricSpec]) -> int:
    """Return about how many forward passes one image costs: the maps, then each metric for each map."""
    maps = 1 + sum(resolve_method(method).own_cost(USUAL_PATCHES).forwards for method in methods)
    scores = 0
    for metric in metrics:
        spec = resolve_metric(metric)
        if spec.metric.cost is not None:
            forwards = spec.metric.cost(patches=USUAL_PATCHES, **dict(spec.options)).forwards
            scores += forwards * maps if "methods" in spec.metric.needs else forwards * len(methods)
    return maps + scores
