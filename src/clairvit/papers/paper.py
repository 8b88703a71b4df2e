"""Preset: a paper's experiment as data, with the numbers that the paper prints; and the list of them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.metrics.accumulator import BASELINES
from clairvit.metrics.registry import resolve_metric

Effort = Literal["quick", "usual", "paper"]
EFFORTS: tuple[str, ...] = get_args(Effort)
NAMES = ("focusvit", "cmi", "coporan", "skipplus", "joita")  # a module each


@dataclass(frozen=True)
class MethodEntry:
    """A method under the paper's name and ours. `extra`: the paper has no number for it, it is shown for comparison."""

    name: str
    method: str
    extra: bool = False


@dataclass(frozen=True)
class Measure:
    """A metric under the paper's name and ours, and how the paper writes its values."""

    name: str
    metric: str
    factor: float = 1.0  # 100: the paper writes per cent
    turned: bool = False  # the paper prints 100 − x, so that higher is always better
    above: float | None = None  # only images whose predicted class is more probable than this
    optional: bool = False  # left out, and said so, where the data has no masks

    @property
    def better(self) -> str:
        own = resolve_metric(self.metric).better
        return {"higher": "lower", "lower": "higher"}[own] if self.turned else own

    @property
    def needs_masks(self) -> bool:
        return "masks" in resolve_metric(self.metric).metric.needs

    def written(self, value: float) -> float:
        """A value of ours as the paper writes it."""
        return self.factor * (1 - value) if self.turned else self.factor * value


@dataclass(frozen=True)
class Table:
    """Published numbers on one set of images: measure -> one value for each name in `entrants`."""

    data: str  # as the paper calls it
    source: str  # table and page or section
    entrants: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]

    def of(self, measure: str, entrant: str) -> float:
        """NaN where the paper has no number."""
        if measure not in self.values or entrant not in self.entrants:
            return math.nan
        return self.values[measure][self.entrants.index(entrant)]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that says who is better: (winner, loser) under some measures."""

    words: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """Something printed, and what comes out when it is computed again."""

    what: str
    source: str
    holds: bool
    seen: str  # the numbers


@dataclass(frozen=True)
class Paper:
    """One paper's experiment."""

    name: str
    title: str
    paper: str
    models: str  # of the paper, in words
    data: str
    images: str  # how many
    protocol: str
    entrants: tuple[MethodEntry, ...]
    measures: tuple[Measure, ...]
    tables: tuple[Table, ...]
    gaps: tuple[str, ...]  # where the protocol had to be guessed or differs, whatever model and data are used
    check: Callable[[], list[Finding]]
    claims: tuple[Claim, ...] = ()
    target: str | None = None  # None: what is predicted; "label": the true class
    void: Literal["nowhere", "object"] = "nowhere"  # where pixels count of which the masks say nothing
    sweep: tuple[str, ...] = ()  # methods that are started at each layer
    sweep_measures: tuple[str, ...] = ()
    remark: str = ""  # what the paper says of how its measures go together
    area: str | None = None  # the name of the area under the radar, where the paper has one
    tables_of: Mapping[str, str] = field(default_factory=dict)  # our name of a data set -> the paper's
    # effort -> our method or metric -> what is computed instead, and what is said of it
    efforts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def everyone(self) -> tuple[MethodEntry, ...]:
        """With the baselines, which a study adds to every set of methods."""
        named = {one.name for one in self.entrants}
        return (*self.entrants, *(MethodEntry(name, name, extra=True) for name in BASELINES if name not in named))

    def at(self, effort: str, text: str) -> str:
        """A method or metric with the samples of an effort."""
        return self.efforts.get(effort, {}).get(text, text)

    def table_for(self, data: str) -> Table | None:
        """The published numbers on the same data, else the first ones, else nothing."""
        wanted = self.tables_of.get(data.partition(":")[0])
        same = [table for table in self.tables if table.data == wanted]
        return next(iter(same or self.tables), None)


def check_effort(effort: str) -> None:
    if effort not in EFFORTS:
        raise BadInput(f"effort='{effort}' was given; expected one of {', '.join(EFFORTS)}.")


def find_paper(name: str) -> Paper:
    if name not in NAMES:
        raise UnknownName(
            f"There is no paper '{name}' to reproduce.{did_you_mean(name, NAMES)} Choose one of: {', '.join(NAMES)}."
        )
    found: Paper = importlib.import_module(f"clairvit.papers.{name}").PRESET
    return found


def list_papers() -> tuple[Paper, ...]:
    return tuple(find_paper(name) for name in NAMES)
