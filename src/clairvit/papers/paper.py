"""Paper: one paper's experiment with the numbers that it prints, read from a TOML file of this folder."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from clairvit._registry import Registry
from clairvit.errors import BadInput
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import resolve_metric
from clairvit.papers.dimensions import Dimension
from clairvit.papers.figure_spec import FigureSpec
from clairvit.papers.preparation import ImageSet, Preparation

Effort = Literal["quick", "usual", "paper"]
EFFORTS: tuple[str, ...] = get_args(Effort)
NAMES = ("focusvit", "cmi", "coporan", "skipplus", "joita")
ALL = "all"  # in place of a paper's name on the command line: each of them
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
    count: int | None = None  # of images, where the paper says it and prints no number for each

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
    general: str = ""  # the claim of which this is one reading: readings are one claim in a multiverse


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
    dimensions: tuple[Dimension, ...] = ()  # choices beyond the general ones that a multiverse varies
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
        from clairvit.papers.general_checks import check_tables

        return CHECKS.get(self.name, check_tables)(self)


def check_effort(effort: str) -> None:
    """Raise `BadInput` if an effort does not exist."""
    if effort not in EFFORTS:
        raise BadInput(f"effort='{effort}' was given; expected one of {', '.join(EFFORTS)}.")


_FILES = Registry("paper", {name: resources.files(__package__) / f"{name}.toml" for name in NAMES})


def find_paper(name: str) -> Paper:
    """Return a paper by its name, or by the path of its TOML file.

    Raises:
        UnknownName: If there is no such paper; the message suggests the nearest names.
        BadInput: If the file of a paper is not right: with the line of what is wrong.
    """
    if not name.endswith(".toml"):
        return _built_in(name)
    from clairvit.papers.paper_file import read_paper

    paper = read_paper(Path(name).expanduser())
    if paper.name in NAMES:
        raise BadInput(f"'{name}' is called '{paper.name}', as a built-in paper is; expected another name = … in it.")
    return paper


@functools.cache
def _built_in(name: str) -> Paper:
    from clairvit.papers.paper_file import read_paper

    with resources.as_file(_FILES.resolve(name)) as path:
        return read_paper(path)


def list_papers() -> tuple[Paper, ...]:
    """Return every paper that can be reproduced."""
    return tuple(find_paper(name) for name in NAMES)
