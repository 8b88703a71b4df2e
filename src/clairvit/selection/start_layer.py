"""Tune: the best layer to start at, FocusViT's m*, for any method that sums layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clairvit.data.dataset import ImageDataset
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.aggregation import Total, first_layer
from clairvit.methods.ensembles import starts
from clairvit.methods.parsing import STARTS, parse_spec
from clairvit.methods.spec import resolve_method
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.registry import MetricSpec
from clairvit.metrics.score import Score
from clairvit.models.model import Model
from clairvit.selection.stats import LEVEL, Array, draws_for, holm, mean_p, paired_interval
from clairvit.tracing.trace import trace

FOLDS_FROM = 4  # images: with fewer, halves of them say nothing


@dataclass(frozen=True, eq=False)
class Tuned:
    """A method from every layer on, by one metric."""

    base: str  # "genatt": what a recipe knows it by
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
        """The method from its best layer on; where that is the half, by the name that says so."""
        return halved(self.base) if self.best == self.half else self.methods[self.best]

    @property
    def significant(self) -> bool:
        return self.p < LEVEL

    @property
    def sentence(self) -> str:
        low, high = self.intervals[self.best]
        said = f"{self.base} is best from layer {self.best} on: {self.metric} {self.means[self.best]:.4g}"
        said += f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) else ""
        if self.best == self.half:
            return f"{said}, which is SkipPLUS's ceil(L/2)."
        if math.isnan(self.gap):
            return f"{said}; it cannot start at SkipPLUS's ceil(L/2) = {self.half}."
        sure = f"by {self.gap:.2g}, corrected p = {self.p:.2g}"
        if self.significant:
            return f"{said}, significantly better than from SkipPLUS's ceil(L/2) = {self.half} ({sure})."
        return f"{said}, not significantly better than from SkipPLUS's ceil(L/2) = {self.half} ({sure})."

    def crossed(self) -> Array | None:
        """[n]: each image's value with the start that the other half of the images would have picked.

        The best of L starts flatters itself on the images that picked it; this does not. None: too few images.
        """
        n = self.values.shape[1]
        if n < FOLDS_FROM:
            return None
        mixed = np.random.default_rng(self.seed).permutation(n)
        found = np.empty(n)
        for own, other in ((mixed[: n // 2], mixed[n // 2 :]), (mixed[n // 2 :], mixed[: n // 2])):
            found[own] = self.values[best_of(self.values[:, other]), own]
        return found

    def as_document(self) -> dict[str, Any]:
        return {
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
                {"start": start, "method": method, "mean": mean, "interval": list(interval)}
                for start, (method, mean, interval) in enumerate(
                    zip(self.methods, self.means, self.intervals, strict=True)
                )
            ],
        }


def base_of(text: str) -> str:
    """ "genatt+plus" -> "genatt": the method without what says where it starts; refused if it starts nowhere."""
    written = parse_spec(text)
    if written.inner or written.combinator not in ("", "plus", "skipplus"):
        raise BadInput(f"'{text}' cannot be tuned; expected a method that says where it looks in each layer: genatt.")
    base = resolve_method(
        written.name, **{key: value for key, value in written.options.items() if key not in STARTS}
    ).text
    candidates(base, 1)
    return base


def candidates(base: str, count: int) -> list[str]:
    """The sums from each layer on. Rollouts and single layers are summed as PLUS does."""
    return starts(base if isinstance(resolve_method(base).aggregation, Total) else f"{base}+plus", count)


def halved(base: str) -> str:
    """The sum from ceil(L/2) on."""
    spec = resolve_method(base)
    if not isinstance(spec.aggregation, Total):
        return resolve_method(f"{base}+skipplus").text
    word = spec.method.option_overrides.words.get("start", "start")
    return resolve_method(base, **{word: "half"}).text


def best_of(values: Array) -> int:
    """[L, n] -> the row with the highest mean; the deeper one of equals, which reads less."""
    known = np.isfinite(values)
    sums, counts = np.where(known, values, 0.0).sum(1), known.sum(1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
    return int(len(means) - 1 - np.argmax(means[::-1]))


def tune(
    model: Model, dataset: ImageDataset, bases: Sequence[str], asked: MetricSpec, target: Any, pixels: Any, **how: Any
) -> dict[str, Tuned]:
    """The best start of each method: all starts of all methods from one recording of each image.

    `pixels` is one image, by which layers are counted; `how` are options of `evaluate`.
    """
    count = len(trace(model, pixels, 0 if model.classifier else target).layers)
    if not count:
        raise NotApplicable(
            f"{model.name} has no attention layers, so there is no layer to start at; expected a Vision Transformer "
            f"for tune_start=[{', '.join(map(repr, bases))}]."
        )
    lists = {base: candidates(base, count) for base in bases}
    everything = list(dict.fromkeys(text for own in lists.values() for text in own))
    scores = evaluate(model, dataset, everything, [asked.text], target=target, baselines=False, skip=True, **how)
    return {
        base: _tuned(base, asked, own, [scores.get((text, asked.text)) for text in own], scores.skipped, how["seed"])
        for base, own in lists.items()
    }


def _tuned(
    base: str,
    asked: MetricSpec,
    methods: Sequence[str],
    found: Sequence[Score | None],
    skipped: dict[str, str],
    seed: int,
) -> Tuned:
    there = [score for score in found if score is not None]
    if not there:
        raise NotApplicable(skipped.get(methods[0], f"No image could be read, so the start of {base} is not known."))
    n = len(there[0].values)
    natural = np.stack([np.full(n, np.nan) if one is None else one.values.double().numpy() for one in found])
    values = natural if asked.better == "higher" else -natural  # [L, n]
    best, half = best_of(values), first_layer("half", len(methods))
    others = [start for start in range(len(methods)) if start != half and np.isfinite(values[start]).any()]
    gaps = values[best] - values[half]
    known = np.isfinite(gaps).any()
    corrected = dict(
        zip(others, holm(mean_p(values[others] - values[half], seed, draws_for(len(others)))), strict=True)
    )
    return Tuned(
        base,
        asked.text,
        tuple(methods),
        tuple(float(row[np.isfinite(row)].mean()) if np.isfinite(row).any() else math.nan for row in natural),
        tuple(paired_interval(row, seed, asked.span) for row in natural),
        best,
        half,
        float(gaps[np.isfinite(gaps)].mean()) if known else math.nan,
        paired_interval(gaps, seed),
        float(corrected.get(best, 1.0)) if known else 1.0,
        values,
        seed,
    )
