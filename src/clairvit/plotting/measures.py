"""What is written of metrics: in lists, in the docs, beside scores."""

from __future__ import annotations

import math

from clairvit.methods.registry import USUAL_PATCHES
from clairvit.metrics.registry import FAMILIES, Metric, list_metrics

ARROWS = {"higher": "↑", "lower": "↓"}
_NEEDS = {"methods": "explains again"}


def in_order() -> list[Metric]:
    """Every metric, family by family; families that are not ours come last."""
    listed = list_metrics()
    known = (*FAMILIES, *dict.fromkeys(one.family for one in listed if one.family not in FAMILIES))
    return sorted(listed, key=lambda one: known.index(one.family))


def span(metric: Metric) -> str:
    """'0 … 1', '0 … ∞'"""
    return " … ".join(_edge(edge) for edge in metric.span)


def _edge(edge: float) -> str:
    return f"{edge:g}".replace("-", "−") if math.isfinite(edge) else "−∞" if edge < 0 else "∞"


def needs(metric: Metric) -> list[str]:
    """In words."""
    return [_NEEDS.get(one, one) for one in metric.needs]


def forwards(metric: Metric) -> int:
    """Of one map with the default options; none where no cost is declared, for the map is all such a metric sees."""
    return 0 if metric.cost is None else metric.cost(patches=USUAL_PATCHES, **metric.options).forwards
