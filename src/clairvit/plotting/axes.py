"""Draw explanations and scores on matplotlib axes, and as self-contained HTML for notebooks."""

from __future__ import annotations

import base64
import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from clairvit.errors import BadInput
from clairvit.methods.explanation import Comparison, Explanation
from clairvit.methods.recipe import Recipe
from clairvit.metrics.score import Score, Scores
from clairvit.plotting.canvas import INK, LINE, PALE
from clairvit.plotting.comparison import comparison_figure
from clairvit.plotting.figures import explanation_figure
from clairvit.plotting.intervals import draw_rows
from clairvit.plotting.labels import ARROWS, count_images
from clairvit.plotting.overlay import Scale
from clairvit.plotting.patch_outline import draw_outlines
from clairvit.plotting.save import NOTEBOOK_IMAGES, figure_bytes, write_result
from clairvit.plotting.series import COLOURS
from clairvit.plotting.strip import frame_strip
from clairvit.plotting.style import PlotStyle, plot_style
from clairvit.plotting.tiles import MOST_ROWS, item_scales, map_picture, target_label
from clairvit.selection.result import Selection

TILE = 2.4  # inches, width and height of one map in a new figure
RANKING_WIDTH, RANKING_PITCH, RANKING_EDGES = 4.6, 0.19, 0.85  # inches: a ranking, one of its rows, above and below
MOST_COLUMNS = 6
CHECK_LETTERS = 48  # in a line under a map
HTML_DPI = 80  # a notebook stores the picture inside the file
BASELINE = "random"

AxesArray = NDArray[np.object_]


def plot_explanation(explanation: Explanation, ax: Any = None, **display: Any) -> Axes | AxesArray:
    """Draw B maps on B axes and return them; a single map returns its axes itself."""
    style = plot_style(display)
    explanation = frame_strip(explanation, style)
    count = len(explanation)
    if count == 0:
        raise BadInput("The explanation has no maps; expected at least one to draw.")
    if ax is None:
        columns = min(count, MOST_COLUMNS)
        grid = _new_axes(math.ceil(count / columns), columns)
        for unused in grid.flat[count:]:
            unused.set_axis_off()
    else:
        grid = _as_array(ax)
    axes = grid.reshape(-1)
    if len(axes) < count:
        raise BadInput(f"{len(axes)} axes were given for {count} maps; expected one for each, or ax=None.")
    scales = item_scales(explanation, style)
    for item in range(count):
        _draw_map(axes[item], explanation, item, scales[item], style)
        axes[item].set_title(target_label(explanation, item), fontsize="small")
        if explanation.checked is not None:
            sentence = textwrap.fill(str(explanation.checked[item]).replace(" %", "\u00a0%"), CHECK_LETTERS)
            axes[item].set_xlabel(sentence, fontsize="xx-small")
        if explanation.certified is not None:
            lines = [axes[item].get_xlabel(), textwrap.fill(explanation.certified.sentences[item], CHECK_LETTERS)]
            axes[item].set_xlabel("\n".join(filter(None, lines)), fontsize="xx-small")
    return axes[0] if count == 1 else axes[:count]


def plot_comparison(comparison: Comparison, axes: Any = None, **display: Any) -> AxesArray:
    """Draw maps [rows] of methods [columns] and return the axes [maps, methods]."""
    style = plot_style(display)
    if not comparison:
        raise BadInput("The comparison holds no methods; expected at least one that fits the model.")
    maps = len(next(iter(comparison.values())))
    grid = _new_axes(maps, len(comparison)) if axes is None else _as_array(axes)
    if grid.size != maps * len(comparison):
        raise BadInput(
            f"{grid.size} axes were given for {maps} maps of {len(comparison)} methods; expected {maps} × "
            f"{len(comparison)}, or axes=None."
        )
    grid = grid.reshape(maps, len(comparison))
    for column, (method, explanation) in enumerate(comparison.items()):
        scales = item_scales(explanation, style)
        for item in range(maps):
            _draw_map(grid[item, column], explanation, item, scales[item], style)
        grid[0, column].set_title(method, fontsize="small")
    for item in range(maps):
        grid[item, 0].set_ylabel(target_label(next(iter(comparison.values())), item), fontsize="small")
    return grid


def plot_score(score: Score, ax: Any = None) -> Axes:
    """Draw the mean curve of a score with a band of one standard error, or its values per image with their mean."""
    axes: Axes = _new_axes(1, 1)[0, 0] if ax is None else ax
    if score.curve is not None:
        x, (mean, error) = score.curve.x.cpu().numpy(), score.mean_curve
        axes.plot(x, mean, color=COLOURS[0], label=score.method)
        if np.isfinite(error).any():
            axes.fill_between(x, mean - error, mean + error, color=COLOURS[0], alpha=0.2, linewidth=0)
        axes.set_xlabel(score.curve.across)
        axes.set_ylabel(score.curve.meaning)
    else:
        values = np.sort(score.valid)
        axes.plot(np.arange(len(values)), values, "o", color=COLOURS[0], markersize=3, label=score.method)
        axes.axhline(score.mean, color=COLOURS[0], linewidth=1)
        axes.set_xlabel("images, by their value")
        axes.set_ylabel(score.metric)
    axes.set_title(f"{score.metric} {ARROWS[score.better]}", fontsize="small")
    return axes


def plot_scores(scores: Scores, axes: Any = None) -> AxesArray:
    """Draw a bar per method with its 95 % interval, one axes per metric; the random baseline is a dashed line."""
    metrics = list(dict.fromkeys(metric for _, metric in scores))
    if not metrics:
        raise BadInput("There are no scores to draw; expected at least one method and metric.")
    grid = _new_axes(1, len(metrics), width=1.5 * TILE) if axes is None else _as_array(axes)
    panels = grid.reshape(-1)
    if len(panels) < len(metrics):
        raise BadInput(f"{len(panels)} axes were given for {len(metrics)} metrics; expected one for each.")
    for panel, metric in zip(panels, metrics, strict=False):
        rows = [score for (_, name), score in scores.items() if name == metric]
        means = np.array([score.mean for score in rows])
        intervals = np.array([score.interval for score in rows])
        errors = np.abs(np.nan_to_num(np.where(np.isnan(intervals), means[:, None], intervals) - means[:, None])).T
        panel.barh(range(len(rows)), np.nan_to_num(means), xerr=errors, color=COLOURS[0], ecolor="0.3")
        panel.set_yticks(range(len(rows)), [score.method for score in rows], fontsize="small")
        panel.invert_yaxis()
        baseline = rows[0].baselines.get(BASELINE)
        if baseline is not None and math.isfinite(baseline.mean):
            panel.axvline(baseline.mean, color="0.5", linestyle="--", linewidth=1)
        panel.set_title(f"{metric} {ARROWS[rows[0].better]}", fontsize="small")
    return panels[: len(metrics)]


def save_plot(result: Score | Scores | Selection, path: Path) -> Path:
    """Write what `plot` draws, the document or the table, as the suffix says."""

    def draw() -> Figure:
        from matplotlib import pyplot

        figure: Figure = np.ravel(np.asarray(result.plot(), dtype=object))[0].figure
        pyplot.close(figure)
        return figure

    return write_result(result, path, draw)


def plot_ranking(recipe: Recipe, ax: Any = None) -> Axes:
    """Draw the ranking of a recipe: means with 95 % intervals; the best and what does not differ from it in colour."""
    if not recipe.ranking:
        raise BadInput("The recipe has no ranking; expected one that was made by cv.choose.")
    means = {row["method"]: _as_float(row["mean"]) for row in recipe.ranking}
    if ax is None:
        ax = _new_axes(1, 1, width=RANKING_WIDTH, height=RANKING_PITCH * len(means) + RANKING_EDGES)[0, 0]
    colours = [PALE if row["differs_from_best"] else COLOURS[0] for row in recipe.ranking]
    intervals = [(_as_float(row["interval"][0]), _as_float(row["interval"][1])) for row in recipe.ranking]
    draw_rows(ax, list(zip(means.values(), intervals, colours, strict=True)), means.get(BASELINE))
    ax.set_yticks(range(len(means)), list(means), parse_math=False)
    for label, row in zip(ax.get_yticklabels(), recipe.ranking, strict=True):
        best = not row["differs_from_best"]
        label.set(color=INK, style="italic" if row["baseline"] else "normal", weight="bold" if best else "normal")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(LINE)
    ax.tick_params(labelsize="small")
    ax.set_title(f"{recipe.by} · {recipe.model} · {count_images(recipe.images)}", fontsize="small", loc="left")
    dashed = "; dashed: random patches" if BASELINE in means else ""
    ax.set_xlabel(f"mean and 95 % interval{dashed}", fontsize="small", color=PALE)
    return ax  # type: ignore[no-any-return]


def _as_float(value: float | None) -> float:
    """Return NaN for null, which a recipe's file has in its place."""
    return math.nan if value is None else value


def ranking_html(recipe: Recipe) -> str:
    """Return the ranking of a recipe as a picture, with the conclusion in sentences."""
    if not recipe.ranking:
        return _list_html([repr(recipe)])
    figure = Figure(figsize=(RANKING_WIDTH, RANKING_PITCH * len(recipe.ranking) + RANKING_EDGES), layout="constrained")
    plot_ranking(recipe, figure.add_subplot())
    return _figure_html(figure, f"{recipe.method}, chosen for {recipe.model}", recipe.answer)


def explanation_html(explanation: Explanation) -> str:
    """Return the picture and the notes of an explanation as HTML."""
    figure = explanation_figure(explanation[:MOST_ROWS], PlotStyle())
    checks = [] if explanation.checked is None else [str(check) for check in explanation.checked]
    certified = [] if explanation.certified is None else str(explanation.certified).splitlines()
    return _figure_html(figure, repr(explanation), [*checks, *certified, *explanation.notes])


def comparison_html(comparison: Comparison) -> str:
    """Return the picture of a comparison as HTML, with the methods that were skipped."""
    first = {method: explanation[:NOTEBOOK_IMAGES] for method, explanation in comparison.items()}
    skipped = [f"{method}: {reason}" for method, reason in comparison.skipped.items()]
    if not first:
        return _list_html([repr(comparison), *skipped])
    return _figure_html(comparison_figure(first, PlotStyle()), repr(comparison), skipped)


def scores_html(scores: Mapping[tuple[str, str], Score]) -> str:
    """Return a table as HTML: a row per method, a column per metric, the best mean of each in bold."""
    methods, metrics = (list(dict.fromkeys(key[position] for key in scores)) for position in (0, 1))
    best = {metric: _best([scores[key] for key in scores if key[1] == metric]) for metric in metrics}
    better = {metric: score.better for (_, metric), score in scores.items()}
    heading = "".join(f"<th>{html.escape(metric)} {ARROWS[better[metric]]}</th>" for metric in metrics)
    rows = []
    for method in methods:
        cells = [_cell(scores.get((method, metric)), best[metric]) for metric in metrics]
        rows.append(f"<tr><th style='text-align:left'>{html.escape(method)}</th>{''.join(cells)}</tr>")
    return f"<table><thead><tr><th></th>{heading}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _best(scores: Sequence[Score]) -> Score | None:
    defined = [score for score in scores if math.isfinite(score.mean)]
    if not defined:
        return None
    pick = max if defined[0].better == "higher" else min
    return pick(defined, key=lambda score: score.mean)


def _cell(score: Score | None, best: Score | None) -> str:
    if score is None:
        return "<td></td>"
    low, high = score.interval
    interval = "" if math.isnan(low) else f" <small>[{low:.3g}, {high:.3g}]</small>"
    mean = f"<b>{score.mean:.4g}</b>" if score is best else f"{score.mean:.4g}"
    return f"<td style='text-align:right'>{mean}{interval}</td>"


def _draw_map(axes: Axes, explanation: Explanation, item: int, scale: Scale, style: PlotStyle) -> None:
    picture = map_picture(explanation, item, scale, style)
    axes.imshow(picture)
    draw_outlines(axes, explanation, item, picture.shape[:2], TILE)
    axes.set_xticks([])
    axes.set_yticks([])


def _new_axes(rows: int, columns: int, width: float = TILE, height: float = TILE + 0.3) -> AxesArray:
    """Return axes [rows, columns] of a new pyplot figure, which a notebook or `plt.show()` displays."""
    from matplotlib import pyplot

    _, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    return np.asarray(axes)


def _as_array(axes: Any) -> AxesArray:
    return np.atleast_1d(np.asarray(axes, dtype=object))


def _figure_html(figure: Figure, caption: str, notes: Sequence[str]) -> str:
    content = base64.b64encode(figure_bytes(figure, ".png", PlotStyle(dpi=HTML_DPI))).decode()
    picture = f'<img src="data:image/png;base64,{content}" alt="{html.escape(caption)}">'
    text = f"<figcaption><small>{html.escape(caption)}</small></figcaption>"
    return f"<figure>{picture}{text}</figure>{_list_html(notes)}"


def _list_html(lines: Sequence[str]) -> str:
    items = "".join(f"<li><small>{html.escape(line)}</small></li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
