"""Start layer: the best layer to start at, FocusViT's m*, for any method that sums over layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from clairvit._io import to_json
from clairvit._tables import TableRow, Tabular
from clairvit.data.dataset import ImageDataset
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.aggregation import Total, layer_index
from clairvit.methods.ensembles import starts
from clairvit.methods.parsing import STARTS, parse_spec
from clairvit.methods.spec import resolve_method
from clairvit.metrics.confidence_intervals import LEVEL, Array, mean_p, standard_deviation
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.registry import MetricSpec
from clairvit.metrics.score import Score
from clairvit.models.model import Model
from clairvit.selection.stats import draws_for, holm, paired_interval
from clairvit.tracing.trace import trace

MIN_IMAGES = 4  # for cross-fitting on halves of the images


@dataclass(frozen=True, eq=False)
class StartLayer(Tabular):
    """Scores of one method, summed from every layer on, by one metric; and the best start."""

    base: str  # the method without its start: "genatt"
    metric: str
    methods: tuple[str, ...]  # by start layer: "genatt+from:0" …
    means: tuple[float, ...]  # NaN where the method cannot start there
    intervals: tuple[tuple[float, float], ...]
    best: int
    half: int  # SkipPLUS's ceil(L/2)
    gap: float  # how much better the best start is than the half
    gap_interval: tuple[float, float]
    p: float  # of that gap, corrected by Holm for all starts that might have been the best
    values: Array = field(repr=False)  # [L, n], higher is better
    seed: int = 0

    @property
    def method(self) -> str:
        """Return the method from its best layer on; where that is ceil(L/2), by the name that says so."""
        return start_at(self.base, self.best, len(self.methods))

    @property
    def standard_errors(self) -> tuple[float, ...]:
        """Return the standard error of each start's mean; NaN with fewer than two values."""
        rows = [row[np.isfinite(row)] for row in self.values]
        return tuple(standard_deviation(row) / math.sqrt(len(row)) if len(row) > 1 else math.nan for row in rows)

    @property
    def significant(self) -> bool:
        return self.p < LEVEL

    @property
    def sentence(self) -> str:
        low, high = self.intervals[self.best]
        start = f"{self.base} is best from layer {self.best} on: {self.metric} {self.means[self.best]:.4g}"
        start += f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) else ""
        if self.best == self.half:
            return f"{start}, which is SkipPLUS's ceil(L/2)."
        if math.isnan(self.gap):
            return f"{start}; it cannot start at SkipPLUS's ceil(L/2) = {self.half}."
        gap = f"by {self.gap:.2g}, corrected p = {self.p:.2g}"
        if self.significant:
            return f"{start}, significantly better than from SkipPLUS's ceil(L/2) = {self.half} ({gap})."
        return f"{start}, not significantly better than from SkipPLUS's ceil(L/2) = {self.half} ({gap})."

    def cross_fitted(self) -> Array | None:
        """Return each image's value [n] with the start that is best on the other half of the images.

        The mean of the best of L starts is biased upward on the images that it was picked on; this is not. None: fewer
        than `MIN_IMAGES` images.
        """
        n = self.values.shape[1]
        if n < MIN_IMAGES:
            return None
        first, second = np.split(np.random.default_rng(self.seed).permutation(n), [n // 2])
        values = np.empty(n)
        for rows, other_rows in ((first, second), (second, first)):
            values[rows] = self.values[best_start(self.values[:, other_rows]), rows]
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return the scores of all starts, the best, and how much it gains, as plain values."""
        content = {
            "base": self.base,
            "metric": self.metric,
            "best": self.best,
            "method": self.method,
            "half": self.half,
            "gap": self.gap,
            "gap_interval": list(self.gap_interval),
            "p": self.p,
            "significant": self.significant,
            "curve": [
                {"start": start, "method": method, "mean": mean, "standard_error": error, "interval": list(interval)}
                for start, (method, mean, error, interval) in enumerate(
                    zip(self.methods, self.means, self.standard_errors, self.intervals, strict=True)
                )
            ],
        }
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per start."""
        return [
            {"metric": self.metric, "start": start, "method": method, "mean": mean, "low": low, "high": high}
            for start, (method, mean, (low, high)) in enumerate(
                zip(self.methods, self.means, self.intervals, strict=True)
            )
        ]


def base_method(text: str) -> str:
    """Return a method without its start, "genatt+plus" -> "genatt"; raise `BadInput` if it has no start layer."""
    spec = parse_spec(text)
    if spec.inner or spec.combinator not in ("", "plus", "skipplus"):
        raise BadInput(f"'{text}' cannot be tuned; expected a method that says where it looks in each layer: genatt.")
    options = {key: value for key, value in spec.options.items() if key not in STARTS}
    base = resolve_method(spec.name, **options).text
    candidates(base, 1)
    return base


def candidates(base: str, count: int) -> list[str]:
    """Return the sums from each layer on; rollouts and single layers are summed as PLUS does."""
    return starts(base if isinstance(resolve_method(base).aggregation, Total) else f"{base}+plus", count)


def from_half(base: str) -> str:
    """Return the sum from ceil(L/2) on."""
    spec = resolve_method(base)
    if not isinstance(spec.aggregation, Total):
        return resolve_method(f"{base}+skipplus").text
    option = spec.method.option_overrides.words.get("start", "start")
    return resolve_method(base, **{option: "half"}).text


def start_at(base: str, layer: int, count: int) -> str:
    """Return the sum from one of `count` layers on; from ceil(L/2) on, by the name that says so."""
    return from_half(base) if layer == layer_index("half", count) else candidates(base, count)[layer]


def best_start(values: Array) -> int:
    """Return the row of [L, n] with the highest mean; the deeper one of equals, which sums fewer layers."""
    finite = np.isfinite(values)
    sums, counts = np.where(finite, values, 0.0).sum(1), finite.sum(1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
    return int(len(means) - 1 - np.argmax(means[::-1]))


def tune_start_layers(
    model: Model,
    dataset: ImageDataset,
    bases: Sequence[str],
    metric: MetricSpec,
    target: Any,
    pixels: Tensor,
    **options: Any,
) -> dict[str, StartLayer]:
    """Find the best start per method: all starts of all methods from one trace per image.

    `pixels` [1, 3, H, W] is one image, by which layers are counted; `options` are those of `evaluate`.
    """
    traced = trace(model, pixels, 0 if model.classifier else target)
    traced.recording.structure.check_members(model.name, "tune_start=")
    count = len(traced.layers)
    if not count:
        raise NotApplicable(
            f"{model.name} has no attention layers, so there is no layer to start at; expected a Vision Transformer "
            f"for tune_start=[{', '.join(map(repr, bases))}]."
        )
    starts_of = {base: candidates(base, count) for base in bases}
    methods = list(dict.fromkeys(text for texts in starts_of.values() for text in texts))
    scores = evaluate(model, dataset, methods, [metric], target=target, baselines=False, skip=True, **options)
    return {
        base: start_layer(
            base, metric, texts, [scores.get((text, metric.text)) for text in texts], scores.skipped, options["seed"]
        )
        for base, texts in starts_of.items()
    }


def start_layer(
    base: str,
    metric: MetricSpec,
    methods: Sequence[str],
    scores: Sequence[Score | None],
    skipped: Mapping[str, str],
    seed: int,
) -> StartLayer:
    """Return the best start of a method by the scores that it has from each layer on.

    `methods` and `scores` are by layer; None where the method cannot start there, and `skipped` says why.
    """
    available = [score for score in scores if score is not None]
    if not available:
        raise NotApplicable(skipped.get(methods[0], f"No image could be read, so the start of {base} is not known."))
    n = len(available[0].values)
    values = np.stack([np.full(n, np.nan) if score is None else score.values.double().numpy() for score in scores])
    upward = values if metric.better == "higher" else -values  # [L, n]
    best, half = best_start(upward), layer_index("half", len(methods))
    tested = [start for start in range(len(methods)) if start != half and np.isfinite(upward[start]).any()]
    gaps = upward[best] - upward[half]
    has_gap = np.isfinite(gaps).any()
    p_values = holm(mean_p(upward[tested] - upward[half], seed, draws_for(len(tested))))
    p_of = dict(zip(tested, p_values, strict=True))
    return StartLayer(
        base,
        metric.text,
        tuple(methods),
        tuple(float(row[np.isfinite(row)].mean()) if np.isfinite(row).any() else math.nan for row in values),
        tuple(paired_interval(row, seed, available[0].span) for row in values),
        best,
        half,
        float(gaps[np.isfinite(gaps)].mean()) if has_gap else math.nan,
        paired_interval(gaps, seed),
        float(p_of.get(best, 1.0)) if has_gap else 1.0,
        upward,
        seed,
    )
