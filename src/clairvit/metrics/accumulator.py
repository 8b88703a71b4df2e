"""Table: what metrics said of methods, image by image, until it becomes scores."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clairvit.methods.explanation import Cost
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.context import EvalContext
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.registry import MetricOutput, MetricSpec
from clairvit.metrics.score import Curve, Prediction, Score, Scores
from clairvit.models.activation import Activation, probabilities

BASELINES = ("random", "center")


@dataclass(eq=False)
class _Row:
    """What is known of one method and metric so far."""

    values: list[Tensor] = field(default_factory=list)
    degenerate: list[Tensor] = field(default_factory=list)
    lines: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    x: Tensor | None = None
    meaning: str = ""
    across: str = ""
    cost: Cost = field(default_factory=Cost)


@dataclass(eq=False)
class ScoreAccumulator:
    """Rows by method and metric; grows with the images."""

    model: str
    seed: int
    settings: Mapping[str, Any]
    names: list[str] = field(default_factory=list)
    seen: list[Prediction] = field(default_factory=list)
    unmasked: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)  # by metric
    used: dict[str, dict[str, str]] = field(default_factory=dict)  # by metric: what took the place of its options
    rows: dict[tuple[str, str], _Row] = field(default_factory=dict)
    patches: int | None = None  # of the model's grid, as soon as a case was seen

    def see(
        self, names: Sequence[str], logits: Tensor, labels: Sequence[int | None], activation: Activation = "softmax"
    ) -> None:
        """Take down what the model says of some images, logits [B, C]."""
        chances, classes = probabilities(logits.double(), activation), logits.argmax(1)
        certainty = [None] * len(logits) if chances is None else chances.gather(1, classes[:, None])[:, 0].tolist()
        self.names += names
        self.seen += [Prediction(*one) for one in zip(names, classes.tolist(), certainty, labels, strict=True)]

    def measure(self, case: EvalContext, one: MetricSpec) -> None:
        """Ask a metric of a case; maps with NaN have no score, and what was spent is shared by the methods."""
        self.patches = case.patches
        recording, started = case.trace.recording, time.perf_counter()
        before = recording.forwards, recording.backwards
        said = one(case)
        measured = said if isinstance(said, MetricOutput) else MetricOutput(said)
        spent = recording.forwards - before[0], recording.backwards - before[1]
        values = measured.values.masked_fill(case.invalid, math.nan)
        self._keep(one, case.specs, replace(measured, values=values), case.degenerate, spent, started)
        self._note(one, case.aside.notes)
        self.used.setdefault(one.text, {}).update(case.settings)
        case.aside.notes.clear()
        case.settings.clear()

    def measure_set(self, shelf: DatasetContext, one: MetricSpec) -> None:
        """Ask a metric of all images together."""
        started, before = time.perf_counter(), (shelf.spent.forwards, shelf.spent.backwards)
        measured = one(shelf)
        flat = torch.zeros_like(measured.values, dtype=torch.bool)
        spent = tuple(
            math.ceil((now - then) / len(shelf.rows))
            for now, then in zip((shelf.spent.forwards, shelf.spent.backwards), before, strict=True)
        )
        self._keep(one, shelf.specs, measured, flat, (spent[0], spent[1]), started)
        self._note(one, shelf.aside.notes)
        shelf.aside.notes.clear()

    def _keep(
        self,
        one: MetricSpec,
        specs: Sequence[MethodSpec],
        measured: MetricOutput,
        degenerate: Tensor,
        spent: tuple[int, int],
        started: float,
    ) -> None:
        count = len(specs)
        seconds = (time.perf_counter() - started) / count
        for place, spec in enumerate(specs):
            row = self.rows.setdefault((spec.text, one.text), _Row())
            row.values.append(measured.values[place].cpu())
            row.degenerate.append(degenerate[place].cpu())
            forwards, backwards = (math.ceil(part / count) for part in spent)
            row.cost = Cost(forwards, backwards, row.cost.seconds + seconds)
            row.x, row.meaning, row.across = measured.x, measured.meaning, measured.across
            if measured.y is not None:
                row.lines.append(measured.y[place].cpu())
            if measured.counts is not None:
                row.counts.append(measured.counts[place].cpu())

    def _note(self, one: MetricSpec, notes: Sequence[str]) -> None:
        kept = self.notes.setdefault(one.text, [])
        kept += [note for note in dict.fromkeys(notes) if note not in kept]

    def scores(
        self,
        specs: Sequence[MethodSpec],
        asked: Sequence[MetricSpec],
        every: Sequence[MethodSpec],
        luck: Sequence[str],
    ) -> Scores:
        found = Scores()
        found.skipped, found.unmasked, found.seen = self.skipped, tuple(self.unmasked), tuple(self.seen)
        for one in asked:
            made = {spec.text: self._score(spec, one) for spec in every}
            baselines = {name: made[name] for name in luck}
            for spec in specs:
                if spec.text in made:
                    found[spec.text, one.text] = replace(made[spec.text], baselines=baselines)
        return found

    def _score(self, spec: MethodSpec, one: MetricSpec) -> Score:
        row = self.rows[spec.text, one.text]
        settings = {**self.settings, **dict(one.options), **self.used.get(one.text, {})}
        return Score(
            metric=one.text,
            method=spec.text,
            values=torch.cat(row.values),
            better=one.better,
            span=one.span_with(settings),
            degenerate=torch.cat(row.degenerate),
            names=tuple(self.names),
            model=self.model,
            settings=settings if self.patches is None else {"patches": self.patches, **settings},
            seed=self.seed,
            cost=row.cost,
            curve=None if row.x is None else Curve(row.x, torch.cat(row.lines), row.meaning, row.across),
            notes=tuple(self.notes[one.text]),
            counts=torch.cat(row.counts) if row.counts else None,
        )
