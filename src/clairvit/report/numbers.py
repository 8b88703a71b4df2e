"""Numbers as they are printed: as many decimals in a whole column, a true minus, a dash for what is not defined."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

NOTHING = "–"
MOST_PLACES = 6  # decimals; smaller numbers are written with a power of ten


def places_for(values: Iterable[float], digits: int = 3) -> int:
    """Decimals of a whole column: as many as `digits` below 10, fewer above, more where all values are tiny."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest == 0:
        return digits
    magnitude = math.floor(math.log10(largest))  # 0 from 1 to 10, -1 from 0.1 to 1
    return min(6, max(0, digits - magnitude if magnitude > 0 else digits - min(magnitude + 1, 0)))


def short(value: float | None, places: int | None = None) -> str:
    """0.2134 -> '0.213', -1.5 -> '−1.500', 1e9 -> '1.00e+09'"""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value and not 1e-5 <= abs(value) < 1e6:
        text = f"{value:.2e}" if abs(value) >= 1e6 or places is None else f"{value:.{places}f}"
    else:
        text = f"{value:.{places_for([value]) if places is None else places}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def edges(low: float, high: float, places: int) -> tuple[str, str]:
    """Return the edges of an interval with as many decimals as tell whether 0 is inside, at least `places`.

    (0.0004, 0.16) with 2 places -> ('0.0004', '0.1600'): two decimals would print 0.00, which may be either side of 0.
    An edge within rounding of 0 (eps · the larger edge) is 0.
    """
    negligible = sys.float_info.epsilon * max(abs(low), abs(high))
    low, high = (0.0 if abs(edge) <= negligible else edge for edge in (low, high))
    nonzero = [abs(edge) for edge in (low, high) if edge and math.isfinite(edge)]
    needed = -math.floor(math.log10(min(nonzero))) if nonzero else places
    if needed > MOST_PLACES:
        return tuple(f"{edge:.1e}".replace("-", "−") if edge else "0" for edge in (low, high))  # type: ignore[return-value]
    most = max(places, needed)
    return short(low, most), short(high, most)


def ticks(values: Sequence[float]) -> list[str]:
    """Round numbers with as many decimals as the one that has most."""
    places = max((len(f"{value:.6g}".partition(".")[2]) for value in values if "e" not in f"{value:.6g}"), default=0)
    return [short(value, places) for value in values]


def plain(value: float) -> float | None:
    """For records: null where it is not defined."""
    return value if math.isfinite(value) else None


def seconds(value: float) -> str:
    """'0.42 s', '3 min 20 s', '2 h 05 min'"""
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
