"""Charts of a report: the drawings of `plotting` as inline SVG with captions, legends and text alternatives."""

from __future__ import annotations

import math
from collections.abc import Mapping

from clairvit.metrics.score import Score
from clairvit.plotting.canvas import SMALL, Canvas, fit
from clairvit.plotting.curves import describe_mean, draw_curves
from clairvit.plotting.intervals import intervals_figure, ranked
from clairvit.plotting.labels import ARROWS, format_number
from clairvit.plotting.radar import draw_radar
from clairvit.plotting.series import BASELINE, OTHER, RANDOM, LineStyle
from clairvit.reports.blocks import Chart, LegendEntry
from clairvit.reports.ranking import RadarData
from clairvit.reports.svg import inline_svg, stroke_style

Styles = Mapping[str, LineStyle]


def curves_chart(scores: Mapping[str, Score], styles: Styles) -> Chart | None:
    """Return mean curves with a band of a standard error; None where the metric has no curves."""
    drawn_scores = {
        method: score
        for method, score in scores.items()
        if score.curve is not None and score.n_valid and (method in styles or method == RANDOM)
    }
    if not drawn_scores:
        return None
    first = next(iter(drawn_scores.values()))
    canvas = Canvas(3.4, 2.1)
    draw_curves(canvas.axes(0.52, 0.08, 2.78, 1.6, ticks=True), list(drawn_scores.values()), styles)
    mean = describe_mean(list(drawn_scores.values()))
    caption = f"{first.metric} {ARROWS[first.better]} ({first.better} is better), {mean}."
    legend = _legend({method: format_number(score.mean, 3) for method, score in drawn_scores.items()}, styles)
    title = f"{first.metric}: mean curves of {len(drawn_scores)} methods"
    return Chart(caption, inline_svg(canvas.figure, title, _description(drawn_scores)), legend)


def intervals_chart(scores: Mapping[str, Score], styles: Styles) -> Chart | None:
    """Return means with their 95 % intervals, the best on top; None where no method has a mean."""
    drawn_scores = {method: score for method, score in scores.items() if score.n_valid}
    if not drawn_scores:
        return None
    first = next(iter(drawn_scores.values()))
    title = f"{first.metric}: means and 95 % intervals of {len(drawn_scores)} methods"
    ordered = {method: drawn_scores[method] for method in ranked(drawn_scores, styles)}
    svg = inline_svg(intervals_figure(drawn_scores, styles), title, _description(ordered))
    return Chart(f"{first.metric} {ARROWS[first.better]}", svg)


def radar_chart(radar: RadarData, arrows: Mapping[str, str], styles: Styles) -> Chart:
    """Return a polygon per method that has a colour, from the worst (centre) to the best (rim) of all on each axis."""
    rows = [index for index, method in enumerate(radar.methods) if styles.get(method, OTHER) is not OTHER]
    polygons = {radar.methods[index]: radar.r[index].tolist() for index in rows}
    canvas = Canvas(4.7, 2.55)  # labels are in the reader's font, which may be wider than the one they are fitted by
    labels = [_axis_label(metric, arrows[metric]) for metric in radar.axes]
    draw_radar(canvas.axes(1.45, 0.33, 1.8, 1.8, ticks=True, projection="polar"), labels, polygons, styles)
    areas = {radar.methods[index]: format_number(float(radar.areas[index]), 3) for index in rows}
    caption = (
        "Each axis goes from the worst (centre) to the best (rim) of the methods compared; numbers are areas (AUR)."
    )
    title = f"Radar chart of {len(rows)} methods on {len(radar.axes)} metrics"
    description = "; ".join(f"{method} {area}" for method, area in areas.items())
    return Chart(caption, inline_svg(canvas.figure, title, description), _legend(areas, styles))


def _axis_label(metric: str, arrow: str) -> str:
    """Return a metric with its direction, the options on a line of their own."""
    name, _, options = metric.partition("(")
    lines = [f"{name} {arrow}", *([f"({options}"] if options else [])]
    return "\n".join(fit(line, 1.15, SMALL / 0.75)[0] for line in lines)


def _legend(values: Mapping[str, str], styles: Styles) -> tuple[LegendEntry, ...]:
    """Return the coloured methods by name, the grey ones together, baselines last."""
    entries = [
        LegendEntry(stroke_style(styles[method]), method, value)
        for method, value in values.items()
        if styles.get(method, OTHER) is not OTHER
    ]
    grey = sum(styles.get(method) is OTHER for method in values)
    if grey:
        entries.append(LegendEntry(stroke_style(OTHER), f"{grey} other method{'s' * (grey != 1)}"))
    entries += [
        LegendEntry(stroke_style(BASELINE), f"{method} (baseline)", value)
        for method, value in values.items()
        if method not in styles
    ]
    return tuple(entries)


def _description(scores: Mapping[str, Score]) -> str:
    """Return 'legrad 0.235 (0.201 to 0.269); …'."""
    parts = []
    for method, score in scores.items():
        low, high = score.interval
        interval = "" if math.isnan(low) else f" ({format_number(low, 3)} to {format_number(high, 3)})"
        parts.append(f"{method} {format_number(score.mean, 3)}{interval}")
    return "; ".join(parts)
