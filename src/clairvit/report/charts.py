"""Charts: SVG written by hand. Colours are classes of the style sheet, so that they follow light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np
from matplotlib.ticker import MaxNLocator

from clairvit.metrics.score import Score
from clairvit.plotting.curves import LUCK, Array, mean_line
from clairvit.plotting.measures import ARROWS
from clairvit.report.blocks import Figure, Key
from clairvit.report.numbers import short, ticks
from clairvit.report.ranking import RadarData

COLOURED = 6  # methods with a colour of their own; the others are thin and grey
MOST_POINTS = 80  # of a line
_UPRIGHT = ("prob", "probability")


def strokes(methods: Sequence[str]) -> dict[str, str]:
    """Method -> class of the style sheet, the same in all charts of a section; the best methods come first."""
    return {method: f"s{place}" if place < COLOURED else "other" for place, method in enumerate(methods)}


def curves_chart(scores: Mapping[str, Score], classes: Mapping[str, str]) -> Figure | None:
    """Mean lines with a band of a standard error; None where the metric has no curves."""
    drawn = {name: one for name, one in scores.items() if one.curve is not None and one.n_valid}
    lines = {name: one for name, one in drawn.items() if name in classes or name == LUCK}
    if not lines:
        return None
    first = next(iter(lines.values()))
    assert first.curve is not None
    x = first.curve.x.double().cpu().numpy()
    means = {name: mean_line(one) for name, one in lines.items()}
    edges = np.concatenate([m + s * np.nan_to_num(e) for m, e in means.values() for s in (-1, 1)])
    frame = _Frame(x, edges[np.isfinite(edges)])
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).round().astype(int))
    paths = []
    for name in reversed(lines):  # the best on top
        mean, error = means[name]
        kind = classes.get(name, "luck")
        if np.isfinite(error).any() and kind != "other":
            paths.append(frame.band(x[keep], (mean - error)[keep], (mean + error)[keep], kind))
        paths.append(frame.line(x[keep], mean[keep], kind))
    meaning = first.curve.meaning
    drawing = frame.svg(
        f"{first.metric}: mean curves of {len(lines)} methods",
        first.curve.across,
        "probability" if meaning in _UPRIGHT else meaning,
        paths,
    )
    fewest, most = (pick(one.n_valid for one in lines.values()) for pick in (min, max))
    count = images(most) if fewest == most else f"{fewest} to {images(most)}"
    band = "; bands are ± 1 standard error" if most > 1 else ""
    caption = f"{first.metric} {ARROWS[first.better]} ({first.better} is better). Mean of {count}{band}."
    return Figure(caption, drawing, _keys(lines, classes, lambda one: short(one.mean, 3)))


def _keys(lines: Mapping[str, Score], classes: Mapping[str, str], said: Callable[[Score], str]) -> tuple[Key, ...]:
    """The coloured ones by name, the grey ones together."""
    own = [Key(classes[name], name, said(one)) for name, one in lines.items() if classes.get(name, "other") != "other"]
    others = sum(classes.get(name) == "other" for name in lines)
    grey = [Key("other", f"{others} other method{'s' * (others != 1)}")] if others else []
    luck = [Key("luck", f"{name} (baseline)", said(one)) for name, one in lines.items() if name not in classes]
    return (*own, *grey, *luck)


class _Frame:
    """Axes of 380 × 230 with room for numbers and names."""

    left, top, wide, high = 46.0, 10.0, 316.0, 180.0
    width, height = 380, 230

    def __init__(self, x: Array, y: Array) -> None:
        self.x0, self.x1 = _spread(float(x.min()), float(x.max()))
        ticks = MaxNLocator(4).tick_values(*_spread(float(y.min()), float(y.max())))
        self.ticks = [float(tick) for tick in ticks]
        self.y0, self.y1 = self.ticks[0], self.ticks[-1]

    def at(self, x: float, y: float) -> str:
        across = self.left + self.wide * (x - self.x0) / (self.x1 - self.x0)
        down = self.top + self.high * (1 - (y - self.y0) / (self.y1 - self.y0))
        return f"{across:.1f} {down:.1f}"

    def line(self, x: Array, y: Array, kind: str) -> str:
        points = [self.at(*point) for point in zip(x, y, strict=True) if math.isfinite(point[1])]
        return f'<path class="line {kind}" d="M{"L".join(points)}"/>'

    def band(self, x: Array, low: Array, high: Array, kind: str) -> str:
        there = np.isfinite(low)
        x, low, high = x[there], low[there], high[there]
        points = [self.at(*point) for point in [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)]]
        return f'<path class="band {kind}" d="M{"L".join(points)}Z"/>'

    def svg(self, title: str, across: str, up: str, paths: Sequence[str]) -> str:
        right, bottom = self.left + self.wide, self.top + self.high
        parts = []
        for tick, said in zip(self.ticks, ticks(self.ticks), strict=True):
            y = self.at(0, tick).split()[1]
            parts.append(f'<path class="grid" d="M{self.left} {y}H{right}"/>')
            parts.append(_text(self.left - 6, float(y) + 3.5, said, "end"))
        for tick, said in _ticks_within(self.x0, self.x1, 4):
            parts.append(_text(float(self.at(tick, 0).split()[0]), bottom + 14, said, "middle"))
        parts.append(f'<path class="axis" d="M{self.left} {bottom}H{right}"/>')
        parts.append(_text(self.left + self.wide / 2, bottom + 32, across, "middle", "name"))
        middle = self.top + self.high / 2
        turn = f' transform="rotate(-90 10 {middle})"'
        parts.append(_text(10, middle, up, "middle", "name", turn))
        return svg(self.width, self.height, title, [*parts, *paths])


def _ticks_within(low: float, high: float, count: int) -> list[tuple[float, str]]:
    found = [float(tick) for tick in MaxNLocator(count).tick_values(low, high)]
    slack = 1e-9 * (high - low)
    found = [tick for tick in found if low - slack <= tick <= high + slack]
    return list(zip(found, ticks(found), strict=True))


def _spread(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def intervals_chart(scores: Mapping[str, Score], classes: Mapping[str, str]) -> Figure | None:
    """Means with their 95 % intervals, the best on top; a dashed line where random is."""
    there = {name: one for name, one in scores.items() if one.n_valid}
    if not there:
        return None
    first = next(iter(there.values()))
    sign = 1 if first.better == "lower" else -1
    order = sorted(there, key=lambda name: (name not in classes, sign * there[name].mean))
    sure = {name: there[name].interval for name in order}
    edges = np.array([edge for name in order for edge in (*sure[name], there[name].mean)])
    edges = edges[np.isfinite(edges)]
    low, high = _spread(float(edges.min()), float(edges.max()))
    names_wide = min(210.0, 10 + 6.9 * max(len(_cut(name)) for name in order))
    left, wide, pitch, top = names_wide, 340 - names_wide, 18.0, 6.0
    height = top + pitch * len(order) + 26

    def across(value: float) -> float:
        return left + 8 + (wide - 16) * (value - low) / (high - low)

    parts = []
    for tick, said in _ticks_within(low, high, 4):
        parts.append(f'<path class="grid" d="M{across(tick):.1f} {top}V{height - 22}"/>')
        parts.append(_text(across(tick), height - 8, said, "middle"))
    if LUCK in there:
        parts.append(f'<path class="line luck" d="M{across(there[LUCK].mean):.1f} {top}V{height - 22}"/>')
    for place, name in enumerate(order):
        y, (a, b) = top + pitch * (place + 0.5), sure[name]
        kind = classes.get(name, "luck")
        parts.append(_text(left - 4, y + 3.5, _cut(name), "end", "row" if name in classes else "row pale"))
        if math.isfinite(a):
            parts.append(f'<path class="whisker {kind}" d="M{across(a):.1f} {y:.1f}H{across(b):.1f}"/>')
        parts.append(f'<circle class="dot {kind}" cx="{across(there[name].mean):.1f}" cy="{y:.1f}" r="3.2"/>')
    drawing = svg(348, height, f"{first.metric}: means and 95 % intervals of {len(order)} methods", parts)
    return Figure(f"{first.metric} {ARROWS[first.better]}", drawing)


def _cut(name: str, most: int = 28) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def radar_chart(found: RadarData, arrows: Mapping[str, str], classes: Mapping[str, str]) -> Figure:
    """A polygon for each coloured method, from the worst (centre) to the best (rim) of all on each axis."""
    middle, radius = (230.0, 140.0), 100.0

    def at(axis: int, r: float) -> tuple[float, float]:
        turn = 2 * math.pi * axis / len(found.axes) - math.pi / 2
        return middle[0] + radius * r * math.cos(turn), middle[1] + radius * r * math.sin(turn)

    def ring(rs: Sequence[float]) -> str:
        return "L".join("{:.1f} {:.1f}".format(*at(axis, r)) for axis, r in enumerate(rs))

    parts = [f'<path class="grid" d="M{ring([r] * len(found.axes))}Z"/>' for r in (0.25, 0.5, 0.75, 1.0)]
    for axis, metric in enumerate(found.axes):
        x, y = at(axis, 1.0)
        parts.append(f'<path class="grid" d="M{middle[0]:.1f} {middle[1]:.1f}L{x:.1f} {y:.1f}"/>')
        x, y = at(axis, 1.1)
        anchor = "middle" if abs(x - middle[0]) < 20 else "start" if x > middle[0] else "end"
        name, _, options = metric.partition("(")
        down = y + (8 if y > middle[1] + 20 else -12 if options and y < middle[1] - 20 else 0)  # clear of the rim
        parts.append(_text(x, down, f"{_cut(name, 40 if anchor == 'middle' else 16)} {arrows[metric]}", anchor, "name"))
        if options:
            parts.append(_text(x, down + 12, _cut(f"({options}", 40 if anchor == "middle" else 16), anchor))
    order = [place for place, method in enumerate(found.methods) if classes.get(method, "other") != "other"]
    for place in reversed(order):
        kind = classes[found.methods[place]]
        parts.append(f'<path class="polygon {kind}" d="M{ring(found.r[place].tolist())}Z"/>')
    keys = tuple(
        Key(classes[found.methods[place]], found.methods[place], short(float(found.areas[place]), 3)) for place in order
    )
    caption = (
        "Each axis goes from the worst (centre) to the best (rim) of the methods compared; numbers are areas (AUR)."
    )
    title = f"Radar chart of {len(order)} methods on {len(found.axes)} metrics"
    return Figure(caption, svg(460, 280, title, parts, "radar"), keys)


def svg(width: float, height: float, title: str, parts: Sequence[str], kind: str = "plot") -> str:
    """Text stays text; the title is what a screen reader says."""
    inside = "".join(parts)
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(title)}">{inside}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick", more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def images(count: int) -> str:
    """'1 image', '12 images'"""
    return f"{count} image{'s' * (count != 1)}"
