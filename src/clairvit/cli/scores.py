"""Scores as a table for people, and as JSON and CSV for machines."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clairvit._version import __version__
from clairvit.cli.console import line, table
from clairvit.cli.image_job import Failure

if TYPE_CHECKING:
    from clairvit.metrics.score import Score

    Rows = Mapping[str, Mapping[str, Score]]  # metric -> method -> score, the baselines last

ABREAST = 5  # metrics in one table; more of them would not fit on paper
MEANT = {"center": "center (baseline)", "random": "random (baseline)"}


def by_metric(scores: Mapping[tuple[str, str], Score]) -> Rows:
    """Each metric's scores by method, then the baselines that were not asked for themselves."""
    found: dict[str, dict[str, Score]] = {}
    for (method, metric), score in scores.items():
        found.setdefault(metric, {})[method] = score
    for row in found.values():
        for name, luck in next(iter(row.values())).baselines.items():
            row.setdefault(name, luck)
    return found


def print_scores(rows: Rows, methods: Sequence[str]) -> None:
    """A row a method, a column a metric: mean ± standard error and, below, the interval."""
    from clairvit.plotting.measures import ARROWS

    metrics = list(rows)
    some = next(iter(next(iter(rows.values())).values()))
    count = max(len(score.values) for scores in rows.values() for score in scores.values())
    for start in range(0, len(metrics), ABREAST):
        part = metrics[start : start + ABREAST]
        named = list(dict.fromkeys(name for metric in part for name in rows[metric]))
        lines = [
            (
                name if name in methods else MEANT.get(name, name),
                *(_cell(rows[metric][name], count) if name in rows[metric] else "–" for metric in part),
                str(count),
            )
            for name in named
        ]
        columns = [f"{metric} {ARROWS[next(iter(rows[metric].values())).better]}" for metric in part]
        title = f"{count} image{'s' * (count != 1)}, {some.model}"
        table(title, ("method", *columns, "n"), lines, right=("n",))
    from clairvit.metrics.inference import FEWEST

    line("↑ higher is better, ↓ lower is better. Mean over images ± standard error, [95 % interval].")
    if any(score.n_valid < FEWEST for scores in rows.values() for score in scores.values()):
        line(f"No interval for fewer than {FEWEST} images: so few cannot say how sure the mean is.")


def _cell(score: Score, count: int) -> str:
    """'0.213 ± 0.012', below '[0.19, 0.24]' from 6 images on, and 'n = 7' where some images have no value."""
    if not score.n_valid:
        return "undefined\nn = 0"
    low, high = score.interval
    error = score.standard_error
    sure = [f"{score.mean:.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}")]
    sure += [] if math.isnan(low) else [f"[{low:.4g}, {high:.4g}]"]
    sure += [f"n = {score.n_valid}"] if score.n_valid < count else []
    return "\n".join(sure)


def document(
    rows: Rows, methods: Sequence[str], target: str | None, unmasked: Sequence[str], failures: Sequence[Failure]
) -> dict[str, Any]:
    """scores.json: everything that is known, with null for what is not defined."""
    from clairvit.methods.collect import versions

    some = next(iter(next(iter(rows.values())).values()))
    return {
        "clairvit": __version__,
        "command": "evaluate",
        "model": some.model,
        "target": target,
        "seed": some.seed,
        "images": list(some.names),
        "without_mask": list(unmasked),
        "versions": versions(),
        "scores": [
            _record(score, score.method not in methods) for scores in rows.values() for score in scores.values()
        ],
        "failed": [vars(failure) for failure in failures],
    }


def _record(score: Score, baseline: bool) -> dict[str, Any]:
    return {
        "method": score.method,
        "metric": score.metric,
        "baseline": baseline,
        "better": score.better,
        "span": [_number(edge) for edge in score.span],
        "mean": _number(score.mean),
        "standard_error": _number(score.standard_error),
        "interval": [_number(edge) for edge in score.interval],
        "n_valid": score.n_valid,
        "n_invalid": score.n_invalid,
        "n_degenerate": score.n_degenerate,
        "values": [_number(value) for value in score.values.tolist()],
        "settings": dict(score.settings),
        "cost": vars(score.cost),
        "curve": _curve(score),
        "notes": list(score.notes),
    }


def _curve(score: Score) -> dict[str, Any] | None:
    """The mean line and its standard error; the lines of single images are not kept."""
    from clairvit.plotting.curves import mean_line

    if score.curve is None:
        return None
    mean, error = mean_line(score)
    return {
        "meaning": score.curve.meaning,
        "across": score.curve.across,
        "x": score.curve.x.tolist(),
        "mean": [_number(value) for value in mean.tolist()],
        "standard_error": [_number(value) for value in error.tolist()],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def long_form(rows: Rows) -> str:
    """image, method, metric, value: a line each, the value empty where it is not defined."""
    paper = io.StringIO()
    writer = csv.writer(paper, lineterminator="\n")
    writer.writerow(("image", "method", "metric", "value"))
    for metric, scores in rows.items():
        for method, score in scores.items():
            for image, value in zip(score.names, score.values.tolist(), strict=True):
                writer.writerow((image, method, metric, value if math.isfinite(value) else ""))
    return paper.getvalue()
