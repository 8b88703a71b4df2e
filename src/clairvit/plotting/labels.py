"""Text of numbers, metrics and explanations, as figures, reports and the command line print it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from clairvit._cost import Cost
from clairvit.methods.explanation import Explanation
from clairvit.methods.registry import USUAL_PATCHES
from clairvit.metrics.registry import FAMILIES, Metric, list_metrics
from clairvit.numerics import percent

UNDEFINED = "–"  # printed for a number that is not defined
MOST_DECIMALS = 6  # smaller numbers are written with a power of ten
ARROWS = {"higher": "↑", "lower": "↓"}
SIGNED = "±"
CLASS_AGNOSTIC = "∀"  # one map for all classes
_NEEDS = {"methods": "explains again", "parts": "removable parts"}


# Numbers


def decimals_for(values: Iterable[float], digits: int = 3) -> int:
    """Return the decimals of a column: `digits` below 10, fewer above, more where all values are tiny."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0:
        return digits
    magnitude = math.floor(math.log10(largest))  # 0 from 1 to 10, -1 from 0.1 to 1
    return min(MOST_DECIMALS, max(0, digits - magnitude if magnitude > 0 else digits - min(magnitude + 1, 0)))


def format_number(value: float | None, decimals: int | None = None) -> str:
    """Return 0.2134 as '0.213', -1.5 as '−1.500', 1e9 as '1.00e+09', NaN as '–'."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    if value and not 1e-5 <= abs(value) < 1e6:
        text = f"{value:.2e}" if abs(value) >= 1e6 or decimals is None else f"{value:.{decimals}f}"
    else:
        text = f"{value:.{decimals_for([value]) if decimals is None else decimals}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def format_interval(low: float, high: float, decimals: int) -> tuple[str, str]:
    """Return the edges of an interval with as many decimals as show whether 0 is inside, at least `decimals`.

    (0.0004, 0.16) with 2 decimals -> ('0.0004', '0.1600'): 0.00 may be on either side of 0.
    An edge within rounding of 0 (eps · the larger edge) is 0.
    """
    negligible = sys.float_info.epsilon * max(abs(low), abs(high))
    low, high = (0.0 if abs(edge) <= negligible else edge for edge in (low, high))
    nonzero = [abs(edge) for edge in (low, high) if edge and math.isfinite(edge)]
    needed = -math.floor(math.log10(min(nonzero))) if nonzero else decimals
    if needed > MOST_DECIMALS:
        low_text, high_text = (f"{edge:.1e}".replace("-", "−") if edge else "0" for edge in (low, high))
        return low_text, high_text
    return format_number(low, max(decimals, needed)), format_number(high, max(decimals, needed))


def format_seconds(seconds: float) -> str:
    """Return '0.42 s', '3 min 20 s' or '2 h 05 min'."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def count_images(count: int) -> str:
    """Return '1 image' or '12 images'."""
    return f"{count} image{'s' * (count != 1)}"


# Metrics


def metrics_by_family() -> list[Metric]:
    """Return every metric, family by family; families of registered extensions come last."""
    metrics = list_metrics()
    families = (*FAMILIES, *dict.fromkeys(metric.family for metric in metrics if metric.family not in FAMILIES))
    return sorted(metrics, key=lambda metric: families.index(metric.family))


def value_range_label(metric: Metric) -> str:
    """Return the range of a metric's values: '0 … 1', '0 … ∞'."""
    return " … ".join(_edge(edge) for edge in metric.span)


def _edge(edge: float) -> str:
    return f"{edge:g}".replace("-", "−") if math.isfinite(edge) else "−∞" if edge < 0 else "∞"


def needs_label(metric: Metric) -> list[str]:
    """Return what a metric needs apart from the map, in words."""
    return [_NEEDS.get(need, need) for need in metric.needs]


def default_forwards(metric: Metric) -> int:
    """Return the forward passes per map with the default options; 0 where the metric declares no cost."""
    return 0 if metric.cost is None else metric.cost(patches=USUAL_PATCHES, **metric.options).forwards


# Explanations


def score_text(score: float) -> str:
    """Return 37.0 as 'score 37.0': a score that is no probability."""
    return f"score {score:#.3g}" if abs(score) < 1000 else f"score {score:.4g}"


def class_label(name: str, probability: float | None, score: float | None = None) -> str:
    """Return 'Egyptian Mau 92%'; where there is no probability 'age (score 37.0)', or the name alone."""
    if probability is None and score is not None:
        return f"{name} ({score_text(score)})"
    return f"{name} {percent(probability)}".rstrip()


def cost_label(cost: Cost) -> str:
    """Return '1 forward + 2 backward'."""
    passes = [f"{count} {word}" for count, word in ((cost.forwards, "forward"), (cost.backwards, "backward")) if count]
    return " + ".join(passes) or "no pass"


def map_marks(explanation: Explanation) -> list[str]:
    """Return the marks of a signed and of a class-agnostic map, which a reader must know before comparing maps."""
    return [SIGNED] * explanation.signed + [CLASS_AGNOSTIC] * (not explanation.class_specific)
