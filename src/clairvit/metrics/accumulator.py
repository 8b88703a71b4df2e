"""ScoreAccumulator: collect the values of metrics batch by batch, and turn them into scores."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import BadInput
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.confidence_intervals import EVERYWHERE, outside
from clairvit.metrics.context import EvalContext
from clairvit.metrics.dataset_context import DatasetContext
from clairvit.metrics.registry import MetricOutput, MetricSpec
from clairvit.metrics.score import Curve, Prediction, Score, Scores
from clairvit.models.activation import Activation, probabilities

BASELINES = ("random", "center")


@dataclass(eq=False)
class _Series:
    """The values of one method and metric so far, batch by batch."""

    values: list[Tensor] = field(default_factory=list)
    degenerate: list[Tensor] = field(default_factory=list)
    curves: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    criterion: Tensor | None = None  # [2, S]: sum over the images where it is defined, and their number
    x: Tensor | None = None
    meaning: str = ""
    across: str = ""
    chooses: str = ""
    cost: Cost = field(default_factory=Cost)


@dataclass(eq=False)
class ScoreAccumulator:
    """Values by method and metric, of all batches so far."""

    model: str
    seed: int
    settings: Mapping[str, Any]
    names: list[str] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    unmasked: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)  # by metric
    used: dict[str, dict[str, str]] = field(default_factory=dict)  # by metric: values that replaced its options
    series: dict[tuple[str, str], _Series] = field(default_factory=dict)
    patches: int | None = None  # of the model's grid, after the first batch

    def add_predictions(
        self, names: Sequence[str], logits: Tensor, labels: Sequence[int | None], activation: Activation = "softmax"
    ) -> None:
        """Add the model's predictions for some images, logits [B, C]."""
        probability, classes = probabilities(logits.double(), activation), logits.argmax(1)
        certainty = (
            [None] * len(logits) if probability is None else probability.gather(1, classes[:, None])[:, 0].tolist()
        )
        self.names += names
        rows = zip(names, classes.tolist(), certainty, labels, strict=True)
        self.predictions += [Prediction(*row) for row in rows]

    def measure(self, context: EvalContext, spec: MetricSpec) -> None:
        """Add a metric of a batch; maps with NaN have no score, and the methods share what was spent."""
        if self.patches not in (None, context.patches):
            raise BadInput(
                f"Maps of {self.patches} patches and of {context.patches} were to be scored together; expected targets "
                "that are read off the same grid of patches. Score them one by one."
            )
        self.patches = context.patches
        recording, started = context.trace.recording, time.perf_counter()
        before = recording.forwards, recording.backwards
        result = spec(context)
        output = result if isinstance(result, MetricOutput) else MetricOutput(result)
        passes = recording.forwards - before[0], recording.backwards - before[1]
        values = output.values.masked_fill(context.invalid, math.nan)
        self._add(spec, context, replace(output, values=values), context.degenerate, passes, started)
        self.used.setdefault(spec.text, {}).update(context.settings)
        context.settings.clear()

    def measure_set(self, context: DatasetContext, spec: MetricSpec) -> None:
        """Add a metric of all images together."""
        started, before = time.perf_counter(), context.cost
        result = spec(context)
        output = result if isinstance(result, MetricOutput) else MetricOutput(result)
        degenerate = torch.zeros_like(output.values, dtype=torch.bool)
        passes = (
            math.ceil((context.cost.forwards - before.forwards) / len(context.rows)),
            math.ceil((context.cost.backwards - before.backwards) / len(context.rows)),
        )
        self._add(spec, context, output, degenerate, passes, started)

    def _add(
        self,
        metric: MetricSpec,
        context: EvalContext | DatasetContext,
        output: MetricOutput,
        degenerate: Tensor,
        passes: tuple[int, int],
        started: float,
    ) -> None:
        """Add the output [M, B, …] of a context to the series of each method, and take the notes out of the context."""
        count = len(context.specs)
        seconds = (time.perf_counter() - started) / count
        forwards, backwards = (math.ceil(part / count) for part in passes)
        for index, method in enumerate(context.specs):
            series = self.series.setdefault((method.text, metric.text), _Series())
            series.values.append(output.values[index].cpu())
            series.degenerate.append(degenerate[index].cpu())
            series.cost = Cost(forwards, backwards, series.cost.seconds + seconds)
            series.x, series.meaning, series.across = output.x, output.meaning, output.across
            series.chooses = output.chooses
            if output.y is not None:
                series.curves.append(output.y[index].cpu())
            if output.criterion is not None:
                finite = output.criterion[index].cpu()
                sums = torch.stack([finite.nansum(0), finite.isfinite().double().sum(0)])
                series.criterion = sums if series.criterion is None else series.criterion + sums
            if output.counts is not None:
                series.counts.append(output.counts[index].cpu())
        notes, new_notes = self.notes.setdefault(metric.text, []), context.notes_log.notes
        notes += [note for note in dict.fromkeys(new_notes) if note not in notes]
        new_notes.clear()

    def scores(
        self,
        specs: Sequence[MethodSpec],
        metrics: Sequence[MetricSpec],
        run: Sequence[MethodSpec],
        baselines: Sequence[str],
    ) -> Scores:
        """Return the scores of methods `specs`; `run` are the methods that were run, with the baselines."""
        scores = Scores()
        scores.skipped, scores.unmasked, scores.predictions = (
            self.skipped,
            tuple(self.unmasked),
            tuple(self.predictions),
        )
        for metric in metrics:
            by_method = {method.text: self._score(method, metric) for method in run}
            baseline_scores = {name: by_method[name] for name in baselines}
            for method in specs:
                if method.text in by_method:
                    scores[method.text, metric.text] = replace(by_method[method.text], baselines=baseline_scores)
        return scores

    def _score(self, method: MethodSpec, metric: MetricSpec) -> Score:
        series = self.series[method.text, metric.text]
        settings = {**self.settings, **dict(metric.options), **self.used.get(metric.text, {})}
        values = torch.cat(series.values)
        if series.criterion is not None and series.x is not None:
            step = int((series.criterion[0] / series.criterion[1]).nan_to_num(nan=-math.inf).argmax())
            values = torch.cat(series.curves)[:, step]
            settings[series.chooses] = float(series.x[step])
        curve = (
            Curve(series.x, torch.cat(series.curves), series.meaning, series.across) if series.x is not None else None
        )
        span, notes = metric.span_with(settings), self.notes[metric.text]
        beyond = outside(values.double().numpy(), span)
        if len(beyond):  # no bounds then
            note = (
                f"{metric.text}: {len(beyond)} of {len(values)} values lie outside {span[0]:g} … {span[1]:g}, which "
                f"the metric declares as its span, such as {float(beyond[0]):.4g}; intervals are not cut at it. "
                "Declare the true span."
            )
            span, notes = EVERYWHERE, [*notes, note]
        return Score(
            metric=metric.text,
            method=method.text,
            values=values,
            better=metric.better,
            span=span,
            degenerate=torch.cat(series.degenerate),
            names=tuple(self.names),
            model=self.model,
            settings=settings if self.patches is None else {"patches": self.patches, **settings},
            seed=self.seed,
            cost=series.cost,
            curve=curve,
            notes=tuple(notes),
            counts=torch.cat(series.counts) if series.counts else None,
        )
