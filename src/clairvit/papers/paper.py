"""Paper: one paper's experiment with the numbers that it prints, read from a TOML file of this folder."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal, get_args

from clairvit._registry import Registry
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import resolve_metric
from clairvit.papers.figure_spec import FigureSpec, figure_problems
from clairvit.papers.preparation import ImageSet, Preparation
from clairvit.selection.start_layer import base_method

Effort = Literal["quick", "usual", "paper"]
EFFORTS: tuple[str, ...] = get_args(Effort)
NAMES = ("focusvit", "cmi", "coporan", "skipplus", "joita")
ALL = "all"  # in place of a paper's name on the command line: each of them
OTHERS = "others"  # as the losers of a claim: all methods of the paper that are no winners
_STRICT: Any = {"extra": "forbid"}  # pydantic: an unknown key is an error


@dataclass(frozen=True)
class MethodEntry:
    """A method under the paper's name and ours. `extra`: the paper has no number for it, it is shown for comparison."""

    __pydantic_config__ = _STRICT

    name: str
    method: str
    extra: bool = False


@dataclass(frozen=True)
class Measure:
    """A metric under the paper's name and ours, and how the paper prints its values."""

    __pydantic_config__ = _STRICT

    name: str
    metric: str
    factor: float = 1.0  # 100: the paper prints per cent
    complement: bool = False  # the paper prints factor · (1 − x), so that higher is better
    min_confidence: float | None = None  # only images whose predicted class is more probable than this
    optional: bool = False  # left out, with a note, where the data has no masks

    @property
    def better(self) -> str:
        """Return "higher" or "lower", of the printed values."""
        better = resolve_metric(self.metric).better
        return {"higher": "lower", "lower": "higher"}[better] if self.complement else better

    @property
    def needs_masks(self) -> bool:
        return "masks" in resolve_metric(self.metric).metric.needs

    def as_printed(self, value: float) -> float:
        """Return a value of our metric in the unit of the paper."""
        return self.factor * (1 - value) if self.complement else self.factor * value


@dataclass(frozen=True)
class Table:
    """Published numbers on one set of images: measure -> one value for each name in `methods`."""

    __pydantic_config__ = _STRICT

    data: str  # as the paper calls it
    source: str  # table and page or section
    methods: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    images: tuple[str, ...] = ()  # where the paper prints a number for each image
    per_image: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)  # measure, method -> values

    def value(self, measure: str, method: str) -> float:
        """Return one number, NaN where the paper has none."""
        if measure not in self.values or method not in self.methods:
            return math.nan
        return self.values[measure][self.methods.index(method)]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that says which method is better: (winner, loser) by some measures."""

    __pydantic_config__ = _STRICT

    statement: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    measures: tuple[str, ...]


@dataclass(frozen=True)
class CostClaim:
    """A sentence of the paper about how long its method takes, compared with another one."""

    __pydantic_config__ = _STRICT

    statement: str
    source: str
    method: str  # the paper's names of both
    baseline: str
    ratio: float | None = None  # of the times, where the paper prints one: 1.12 for "12 % slower"


@dataclass(frozen=True)
class Tuning:
    """Which method's start layer is chosen on images that are not scored, and by what."""

    __pydantic_config__ = _STRICT

    method: str  # the paper's name of it
    metric: str
    source: str
    share: float = 0.2  # of the images
    together: tuple[str, ...] = ()  # other methods that start at the layer that is chosen


@dataclass(frozen=True)
class Finding:
    """A printed statement, whether it holds when it is computed again, and the numbers."""

    statement: str
    source: str
    holds: bool
    numbers: str

    def as_document(self) -> dict[str, str | bool]:
        """Return the finding as JSON values."""
        return {"what": self.statement, "source": self.source, "holds": self.holds, "seen": self.numbers}


@dataclass(frozen=True)
class Paper:
    """One paper's experiment."""

    __pydantic_config__ = _STRICT

    name: str
    title: str
    citation: str
    models: str  # of the paper, in words
    data: str
    images: str  # how many
    protocol: str
    methods: tuple[MethodEntry, ...]
    measures: tuple[Measure, ...]
    tables: tuple[Table, ...] = ()
    gaps: tuple[str, ...] = ()  # where the protocol had to be guessed or differs, whatever model and data are used
    claims: tuple[Claim, ...] = ()
    costs: tuple[CostClaim, ...] = ()
    model: str | None = None  # the model's name, as `cv.load` takes it
    image_set: ImageSet | None = None  # which images, where they are known
    preparation: Preparation = field(default_factory=Preparation)
    target: str | None = None  # None: the predicted class; "label": the true class
    void: Literal["nowhere", "object"] = "nowhere"  # where pixels count that the masks leave undefined
    sweep: tuple[str, ...] = ()  # methods that are started at each layer
    sweep_measures: tuple[str, ...] = ()
    tune: Tuning | None = None
    figures: tuple[FigureSpec, ...] = ()
    recipe: str = "default"  # by which a model is fine-tuned for it
    remark: str = ""  # what the paper says about how its measures correlate
    area: str | None = None  # the name of the area under the radar, where the paper has one
    table_of_dataset: Mapping[str, str] = field(default_factory=dict)  # our name of a data set -> the paper's
    # effort -> our method or metric -> the same with fewer samples
    efforts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # key -> table, section and page
    printed: Mapping[str, Any] = field(default_factory=dict)  # numbers of the text that `checks` computes again

    @property
    def methods_and_baselines(self) -> tuple[MethodEntry, ...]:
        """Return the methods and the baselines, which a study adds to every set of methods."""
        names = {entry.name for entry in self.methods}
        return (*self.methods, *(MethodEntry(name, name, extra=True) for name in BASELINES if name not in names))

    def at_effort(self, effort: str, text: str) -> str:
        """Return a method or metric with the number of samples of an effort."""
        return self.efforts.get(effort, {}).get(text, text)

    def table_for(self, data: str) -> Table | None:
        """Return the published numbers on the same data, else the first table, else None."""
        name = self.table_of_dataset.get(data.partition(":")[0])
        matching = [table for table in self.tables if table.data == name]
        return next(iter(matching or self.tables), None)

    def check(self) -> list[Finding]:
        """Compute again what the paper prints."""
        from clairvit.papers.checks import CHECKS

        return CHECKS[self.name](self) if self.name in CHECKS else []


def check_effort(effort: str) -> None:
    """Raise `BadInput` if an effort does not exist."""
    if effort not in EFFORTS:
        raise BadInput(f"effort='{effort}' was given; expected one of {', '.join(EFFORTS)}.")


_FILES = Registry("paper", {name: resources.files(__package__) / f"{name}.toml" for name in NAMES})


@functools.cache
def find_paper(name: str) -> Paper:
    """Return a paper by its name.

    Raises:
        UnknownName: If there is no such paper; the message suggests the nearest names.
    """
    return read_paper(_FILES.resolve(name))


def list_papers() -> tuple[Paper, ...]:
    """Return every paper that can be reproduced."""
    return tuple(find_paper(name) for name in NAMES)


def read_paper(path: Traversable) -> Paper:
    """Return the paper in a TOML file whose keys are the fields of `Paper`.

    A claim has `pairs`, or `winners` and `losers`, of which all pairs are meant; losers = "others" are all methods of
    the paper that are no winners. A table has `values`, or `per_image`, whose means are its values.

    Raises:
        BadInput: If a key is unknown or missing, a value has the wrong type, or a name refers to nothing.
    """
    from pydantic import TypeAdapter, ValidationError

    document = tomllib.loads(path.read_text(encoding="utf-8"))
    names = [str(entry.get("name")) for entry in document.get("methods", ()) if not entry.get("extra")]
    document["claims"] = [_with_pairs(claim, names) for claim in document.get("claims", ())]
    try:
        paper = TypeAdapter(Paper).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadInput(f"'{path}' is not a paper: {place} is {first['input']!r}; {first['msg']}.") from error
    paper = replace(paper, tables=tuple(map(_with_means, paper.tables)))
    for problem in _problems(paper):
        raise BadInput(f"'{path}' is not a paper: {problem}.")
    return paper


def _with_pairs(claim: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Replace winners and losers of a claim by all (winner, loser) pairs."""
    fields = {key: value for key, value in claim.items() if key not in ("winners", "losers")}
    if "winners" not in claim:
        return fields
    winners, losers = claim["winners"], claim.get("losers", OTHERS)
    if losers == OTHERS:
        losers = [name for name in names if name not in winners]
    return {"pairs": tuple(itertools.product(winners, losers)), **fields}


def _with_means(table: Table) -> Table:
    """Return a table with the means over images as values, where it has numbers for each image."""
    means = {measure: tuple(map(statistics.fmean, rows.values())) for measure, rows in table.per_image.items()}
    return replace(table, values={**means, **table.values})


def _problems(paper: Paper) -> Iterator[str]:
    """Yield what does not fit together in a paper whose types are right."""
    methods = {entry.name for entry in paper.methods_and_baselines}
    measures = {measure.name for measure in paper.measures} | {paper.area}
    if paper.name == ALL:
        yield f"its name is '{ALL}', which stands for every paper"
    for table in paper.tables:
        unknown = [*(set(table.methods) - methods), *(set(table.values) - measures)]
        yield from (f"the table on {table.data} names '{name}', which the paper does not have" for name in unknown)
        for measure, rows in table.per_image.items():
            if tuple(rows) != table.methods or any(len(row) != len(table.images) for row in rows.values()):
                yield f"{measure} on {table.data} is not given for each of {', '.join(table.methods)} on each image"
        for measure, row in table.values.items():
            if len(row) != len(table.methods):
                yield f"{measure} on {table.data} has {len(row)} numbers for {len(table.methods)} methods"
    for claim in paper.claims:
        unknown = [*({name for pair in claim.pairs for name in pair} - methods), *(set(claim.measures) - measures)]
        yield from (f"'{claim.statement}' names '{name}', which the paper does not have" for name in unknown)
    for cost in paper.costs:
        unknown = [*({cost.method, cost.baseline} - {entry.name for entry in paper.methods})]
        yield from (f"'{cost.statement}' names '{name}', which the paper does not have" for name in unknown)
    yield from _tuning_problems(paper)
    yield from figure_problems(paper.figures, methods, [measure.name for measure in paper.measures])
    texts = {entry.method for entry in paper.methods} | {measure.metric for measure in paper.measures}
    for effort, replaced in paper.efforts.items():
        if effort not in EFFORTS:
            yield f"'{effort}' is no effort, expected one of {', '.join(EFFORTS)}"
        yield from (f"effort '{effort}' replaces '{text}', which is not used" for text in set(replaced) - texts)


def _tuning_problems(paper: Paper) -> Iterator[str]:
    """Yield what is wrong with the start layer that a paper chooses."""
    if paper.tune is None:
        return
    entries = {entry.name: entry for entry in paper.methods}
    for name in (paper.tune.method, *paper.tune.together):
        if name not in entries:
            yield f"[tune] names '{name}', which the paper does not have"
            continue
        try:
            base_method(entries[name].method)
        except (BadInput, NotApplicable) as error:
            yield f"[tune] names '{name}': {str(error).rstrip('.')}"
    try:
        resolve_metric(paper.tune.metric)
    except (BadInput, UnknownName) as error:
        yield f"[tune] names a metric that does not exist: {str(error).rstrip('.')}"
    if not 0 < paper.tune.share < 1:
        yield f"[tune] takes a share of {paper.tune.share:g} of the images, expected one between 0 and 1"
