"""Coporan's thesis: a deletion curve of 99 equal steps, and a pointing game that takes the first of several peaks."""

from __future__ import annotations

from torch import Tensor

from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.curves import CurveScore, RemovalSchedule, Steps, area_under_curve, deletion_curve
from clairvit.metrics.localisation import Tolerance, highest_points
from clairvit.metrics.registry import MetricOutput, preset
from clairvit.perturbation.removal import Removal


@preset("deletion", "coporan", moved=("counting",))
def deletion(
    context: EvalContext,
    steps: Steps = 99,
    removal: Removal = "black",
    score: CurveScore = "prob",
    upsampling: Upsampling = "bilinear",
) -> MetricOutput:
    """Return the area under p(target) while pixels are removed in equal steps, so that a few are never removed."""
    schedule = RemovalSchedule(steps, granularity="pixel", counting="equal", ends=True, upsampling=upsampling)
    x, y = deletion_curve(context, schedule, removal, score, "deletion")
    return MetricOutput(area_under_curve(x, y), x, y, context.meaning(score))


@preset("pointing-game", "coporan", moved=("ties",))
def pointing_game(context: EvalContext, tolerance: Tolerance = 0, upsampling: Upsampling = "bilinear") -> Tensor:
    """Return 1 if the first of the map's highest points lies on the object, 0 if not."""
    return highest_points(context, tolerance, "first", upsampling)
