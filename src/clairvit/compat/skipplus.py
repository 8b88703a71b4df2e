"""SkipPLUS (Jalwana et al.): the areas of its removal curves, which are not divided by the width of the curve."""

from __future__ import annotations

from typing import Any

from clairvit.metrics.context import EvalContext
from clairvit.metrics.curves import (
    CurveScore,
    RemovalSchedule,
    Steps,
    area_under_curve,
    deletion_curve,
    insertion_curve,
)
from clairvit.metrics.registry import MetricOutput, add_presets, preset
from clairvit.perturbation.removal import Removal


@preset("deletion", "skipplus", moved=("auc",))
def deletion(
    context: EvalContext, steps: Steps = 9, removal: Removal = "token", score: CurveScore = "accuracy"
) -> MetricOutput:
    """Return the area under the score over 0 to 90 % of the patches removed, so that a constant 1 gives 0.9."""
    x, y = deletion_curve(context, RemovalSchedule(steps), removal, score, "deletion")
    return MetricOutput(area_under_curve(x, y, "none"), x, y, context.meaning(score))


@preset("insertion", "skipplus", moved=("auc",))
def insertion(
    context: EvalContext, steps: Steps = 9, removal: Removal = "token", score: CurveScore = "accuracy"
) -> MetricOutput:
    """Return the area under the score over 10 to 100 % of the patches shown, so that a constant 1 gives 0.9."""
    x, y = insertion_curve(context, RemovalSchedule(steps), removal, score, "insertion")
    return MetricOutput(area_under_curve(x, y, "none"), x, y, context.meaning(score))


_SCORES: dict[str, dict[str, Any]] = {
    "skipplus-aopc": {"preset": "skipplus", "score": "drop"},
    "skipplus-log-odds": {"preset": "skipplus", "score": "log-odds"},
}
add_presets("deletion", **_SCORES)
add_presets("insertion", **_SCORES)
