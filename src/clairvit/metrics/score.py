"""Score and Scores: the values of metrics per image, with the interval of their mean and the baselines' values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clairvit._cost import Cost
from clairvit._io import to_json
from clairvit._rows import Rows, first, joined, per_row, same, union
from clairvit._tables import TableRow, Tabular, import_pandas
from clairvit.metrics.confidence_intervals import mean_interval, standard_deviation

Counts = NDArray[np.float64]  # [n, K, 2]


class Curve(Rows, Tabular):
    """The curves that a score was computed from, one per image.

    Args:
        x: [S], e.g. the part of the image that was removed (or shown).
        y: [B, S].
        meaning: What y is, e.g. "prob".
        across: What x is.

    Example:
        >>> import clairvit as cv
        >>> cv.evaluate("pets", "demo", "legrad", "deletion(steps=4)").curve.x.tolist()
        [0.0, 0.2, 0.4, 0.6, 0.8]
    """

    x: Tensor = same()
    y: Tensor = per_row()
    meaning: str = same()
    across: str = same(default="part of the image")

    def to_dict(self) -> dict[str, Any]:
        """Return x, the curve of each image, and what they are, as JSON values."""
        content = {"x": self.x.tolist(), "y": self.y.tolist(), "meaning": self.meaning, "across": self.across}
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per image, by its number, and point of its curve."""
        return [
            {"image": image, "across": self.across, "x": x, "meaning": self.meaning, "y": y}
            for image, curve in enumerate(self.y.tolist())
            for x, y in zip(self.x.tolist(), curve, strict=True)
        ]


@dataclass(frozen=True)
class Prediction:
    """The model's prediction for one image, and the true class."""

    image: str
    predicted: int
    probability: float | None  # of the predicted class; None where the scores are raw
    label: int | None


def _widest(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the span that holds all spans."""
    return min(low for low, _ in spans), max(high for _, high in spans)


class Score(Rows, Tabular):
    """One metric of one method on a set of images. Undefined values are NaN and are counted, never replaced.

    `score.take([0, 3])` is the score of some of the images, `Score.concat` joins those of several sets.

    Args:
        metric: The canonical metric string, e.g. "deletion(removal=black)".
        method: The canonical method string.
        values: [B], float64.
        better: "higher" or "lower".
        span: The lowest and the highest value that the metric can have.
        degenerate: bool [B]: the map was constant, so that the order of its patches is arbitrary.
        names: B names of images.
        model: The name of the model.
        settings: Every choice that the number depends on.
        seed: The seed of everything random.
        cost: Passes and seconds.
        curve: The curves that the values were computed from, if the metric has any.
        baselines: The scores of a random and a centred map on the same images.
        notes: Fallbacks and the like.
        counts: [B, K, 2], numerators and denominators, for a score of the set that is no mean over images.

    Example:
        >>> import clairvit as cv
        >>> score = cv.evaluate("pets", "demo", "legrad", "sparseness")
        >>> score.values.shape, score.better, score.n_valid
        (torch.Size([1]), 'higher', 1)
    """

    metric: str = same()
    method: str = same()
    values: Tensor = per_row()
    better: str = same()
    span: tuple[float, float] = joined(_widest)
    degenerate: Tensor = per_row()
    names: tuple[str, ...] = per_row()
    model: str = same()
    settings: Mapping[str, Any] = first(default_factory=dict)
    seed: int = first(default=0)
    cost: Cost = joined(Cost.of_batches, default_factory=Cost)
    curve: Curve | None = per_row(default=None)
    baselines: Mapping[str, Score] = per_row(default_factory=dict)
    notes: tuple[str, ...] = union(default=())
    counts: Tensor | None = per_row(default=None)

    @property
    def valid(self) -> NDArray[np.float64]:
        """Return the finite values."""
        values = self.values.double().cpu().numpy()
        return np.asarray(values[np.isfinite(values)])

    @property
    def n_valid(self) -> int:
        """Return the number of finite values."""
        return len(self.valid)

    @property
    def n_invalid(self) -> int:
        """Return the number of images for which the metric is not defined."""
        return len(self.values) - self.n_valid

    @property
    def n_degenerate(self) -> int:
        """Return the number of constant maps."""
        return int(self.degenerate.sum())

    @property
    def mean(self) -> float:
        """Return the mean over images; where `counts` are given, the ratio of their sums."""
        return float(pooled(self._counted.sum(0))) if self.n_valid else math.nan

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean, linearised for `counts`; 0 if values differ by rounding alone."""
        return standard_deviation(self._spread) / math.sqrt(self.n_valid) if self.n_valid >= 2 else math.nan

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the mean (`confidence_intervals.mean_interval`); NaN for fewer than 6 images."""
        low, high = mean_interval(self._spread, self.seed, self.span)
        return min(low, self.mean), max(high, self.mean)  # equal values: the mean may differ in the last bit

    @property
    def _spread(self) -> NDArray[np.float64]:
        """Return [n_valid], whose mean is the score."""
        return self.valid if self.counts is None else contributions(self._counted)

    @property
    def parts(self) -> Counts:
        """Return numerators and denominators [B, K, 2], NaN where an image has no score; a plain value is over 1."""
        values = self.values.double().cpu().numpy()
        if self.counts is None:
            return np.stack([values, np.ones_like(values)], -1)[:, None]  # their pooled score is the mean
        counts = self.counts.double().cpu().numpy().copy()
        counts[~np.isfinite(values)] = np.nan
        return np.asarray(counts)

    @property
    def _counted(self) -> Counts:
        """Return the `parts` of the valid images."""
        return np.asarray(self.parts[np.isfinite(self.values.double().cpu().numpy())])

    @property
    def mean_curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean over images that have a score [S], and its standard error [S] (NaN for one image)."""
        assert self.curve is not None
        lines = self.curve.y.detach().double().cpu().numpy()
        lines = lines[np.isfinite(self.values.double().cpu().numpy())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no line is NaN
            mean = lines.mean(0)
            error = lines.std(0, ddof=1) / math.sqrt(len(lines)) if len(lines) > 1 else np.full(lines.shape[1], np.nan)
        return mean, error

    def to_dict(self) -> dict[str, Any]:
        """Return the score as JSON values: mean, interval, the value of each image, settings, the mean curve.

        Returns:
            An entry of `scores.json`.

        Example:
            >>> import clairvit as cv
            >>> cv.evaluate("pets", "demo", "legrad", "sparseness").to_dict()["n_valid"]
            1
        """
        content: dict[str, Any] = {
            "method": self.method,
            "metric": self.metric,
            "better": self.better,
            "span": self.span,
            "mean": self.mean,
            "standard_error": self.standard_error,
            "interval": self.interval,
            "n_valid": self.n_valid,
            "n_invalid": self.n_invalid,
            "n_degenerate": self.n_degenerate,
            "values": self.values.tolist(),
            "settings": self.settings,
            "cost": vars(self.cost),
            "curve": None,
            "notes": self.notes,
        }
        if self.curve is not None:  # the curves of single images are not kept
            mean, error = self.mean_curve
            content["curve"] = {
                "meaning": self.curve.meaning,
                "across": self.curve.across,
                "x": self.curve.x.tolist(),
                "mean": mean.tolist(),
                "standard_error": error.tolist(),
            }
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per image."""
        about = {"method": self.method, "metric": self.metric}
        values = zip(self.names, self.values.tolist(), strict=True)
        return [about | {"image": name, "value": value, "better": self.better} for name, value in values]

    def __repr__(self) -> str:
        """Return one line: metric, method, mean, interval, the mean of random maps and number of images."""
        low, high = self.interval
        interval = "" if math.isnan(low) else f" [{low:.4g}, {high:.4g}]"
        random = self.baselines.get("random")
        baseline = "" if random is None or math.isnan(random.mean) else f"; random {random.mean:.4g}"
        return f"Score({self.metric} of {self.method}: {self.mean:.4g}{interval}{baseline}, n = {self.n_valid})"

    def plot(self, ax: Any = None) -> Any:
        """Draw the mean curve with its standard error, or the values per image where the metric has no curve.

        Args:
            ax: matplotlib axes; None makes a figure.

        Returns:
            The axes.

        Example:
            >>> import clairvit as cv
            >>> cv.evaluate("pets", "demo", "legrad", "sparseness").plot().get_title()
            'sparseness ↑'
        """
        from clairvit.plotting.axes import plot_score  # drawing comes after metrics

        return plot_score(self, ax)

    def to_pandas(self) -> Any:
        """Return the values as a `pandas.Series` over the names of the images.

        Raises:
            ClairError: pandas is not installed.
        """
        pandas = import_pandas()
        return pandas.Series(self.values.cpu().numpy(), index=list(self.names), name=f"{self.method} {self.metric}")

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a file by its suffix: a picture as `plot` draws it, .json (`to_dict`), .csv (a row per image).

        Args:
            path: The file to write; readers never see a partial file.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix.
        """
        from clairvit.plotting.axes import save_plot

        return save_plot(self, Path(path))

    def _repr_html_(self) -> str:
        """Return the score as a table of one cell."""
        from clairvit.plotting.axes import scores_html

        return scores_html({(self.method, self.metric): self})


class Scores(dict[tuple[str, str], Score], Tabular):
    """A mapping from (method, metric), both canonical, to scores; what `cv.evaluate` returns for lists.

    A notebook cell that ends with scores shows a table of their means.

    Attributes:
        skipped: Method -> why it does not fit this model.
        unmasked: Names of images that had no mask where others had.
        predictions: The model's prediction for each image.
        model_record: Preprocessing, hash of the weights, and assumptions.

    Example:
        >>> import clairvit as cv
        >>> scores = cv.evaluate("pets", "demo", ["legrad", "rollout"], ["sparseness", "complexity"])
        >>> scores
        Scores(2 methods × 2 metrics, 1 image)
        >>> scores["legrad", "sparseness"].better
        'higher'
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[str, str] = {}
        self.unmasked: tuple[str, ...] = ()
        self.predictions: tuple[Prediction, ...] = ()
        self.model_record: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Return one line: how many methods, metrics and images."""
        methods, metrics = (len({key[side] for key in self}) for side in (0, 1))
        images = max((len(score.values) for score in self.values()), default=0)
        parts = ((methods, "method"), (metrics, "metric"), (images, "image"))
        first, second, third = (f"{count} {noun}{'s' * (count != 1)}" for count, noun in parts)
        return f"Scores({first} × {second}, {third})"

    def plot(self, axes: Any = None) -> Any:
        """Draw a bar per method with its 95 % interval, one axes per metric.

        Args:
            axes: One matplotlib axes per metric; None makes a figure.

        Returns:
            An array of axes, one per metric.

        Example:
            >>> import clairvit as cv
            >>> cv.evaluate("pets", "demo", ["legrad", "rollout"], ["sparseness"]).plot().shape
            (1,)
        """
        from clairvit.plotting.axes import plot_scores

        return plot_scores(self, axes)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`, one row per method, metric and image.

        Returns:
            A frame with the columns method, metric, image, value and better.

        Raises:
            ClairError: pandas is not installed.
        """
        return super().to_pandas()

    def to_dict(self) -> dict[str, Any]:
        """Return all scores as JSON values, and what is known about their model and images.

        Returns:
            `scores`, a list of `Score.to_dict`; `images`, `without_mask`, `skipped` and the model's record.
        """
        score = next(iter(self.values()), None)
        content = {
            "model": None if score is None else score.model,
            "images": () if score is None else score.names,
            "without_mask": self.unmasked,
            "skipped": self.skipped,
            **self.model_record,
            "scores": [score.to_dict() for score in self.values()],
        }
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per method, metric and image."""
        return [row for score in self.values() for row in score._table()]

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a file by its suffix: a picture as `plot` draws it, .json (`to_dict`), .csv (a row per image).

        Args:
            path: The file to write; readers never see a partial file.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix.
        """
        from clairvit.plotting.axes import save_plot

        return save_plot(self, Path(path))

    def _repr_html_(self) -> str:
        """Return the means as a table: a row per method, a column per metric."""
        from clairvit.plotting.axes import scores_html

        return scores_html(self)


def pooled(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of K shares, […], of sums of parts and wholes […, K, 2]; NaN where a whole is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[..., 0] / sums[..., 1]).mean(-1))


def contributions(counts: Counts) -> NDArray[np.float64]:
    """Return what each image adds to the pooled score, [n], of parts and wholes [n, K, 2]; the score is their mean.

    score + mean_k (part_k − share_k · whole_k) / mean(whole_k): the pooled score linearised at the observed shares.
    """
    sums = counts.sum(0)  # [K, 2]
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = sums[:, 0] / sums[:, 1]
        moved = (counts[..., 0] - shares * counts[..., 1]) / (sums[:, 1] / len(counts))  # [n, K]
    return np.asarray(pooled(sums) + moved.mean(-1))


def differences(score: Score, other: Score) -> NDArray[np.float64]:
    """Return score − other [n] on each image where both are defined; of pooled counts, of their `contributions`.

    What is hard for both does not count as noise.
    """
    rows = {name: row for row, name in enumerate(other.names)}
    pairs = [(row, rows[name]) for row, name in enumerate(score.names) if name in rows]
    if score.names == other.names:  # also where two images have the same name
        pairs = [(row, row) for row in range(len(score.names))]
    ours, theirs = (scored.parts[[pair[side] for pair in pairs]] for side, scored in enumerate((score, other)))
    both = np.isfinite(ours).all((1, 2)) & np.isfinite(theirs).all((1, 2))
    if not both.any():
        return np.empty(0)
    if score.counts is None and other.counts is None:
        return np.asarray(ours[both, 0, 0] - theirs[both, 0, 0])
    return contributions(ours[both]) - contributions(theirs[both])


def leads(score: Score, other: Score) -> NDArray[np.float64]:
    """Return by how much a score is better than another on each image, [n]: `differences`, more is better."""
    return differences(score, other) * (1.0 if score.better == "higher" else -1.0)


def paired(score: Score, other: Score) -> tuple[float, tuple[float, float]]:
    """Return the mean difference on the images where both are defined, and its 95 % interval."""
    gaps = differences(score, other)
    return (float(gaps.mean()) if len(gaps) else math.nan), mean_interval(gaps, score.seed)


def lead(score: Score, other: Score) -> tuple[float, tuple[float, float]]:
    """Return by how much a score is better than another, and the interval: `paired`, more is better."""
    gap, (low, high) = paired(score, other)
    return (gap, (low, high)) if score.better == "higher" else (-gap, (-high, -low))
