"""Write explanations as figures, JSON records or arrays, as the suffix of the file says."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clairvit import _tables
from clairvit._io import atomic_write
from clairvit._tables import SUFFIXES as TABLES
from clairvit._tables import Tabular, write_table
from clairvit.methods.explanation import Comparison, Explanation
from clairvit.methods.explanation_files import npz_bytes
from clairvit.plotting.style import PlotStyle, plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
RC_PARAMS = {"pdf.fonttype": 42, "svg.hashsalt": "clairvit", "text.hinting": "none"}
SUFFIXES = (*PICTURES, *TABLES, ".npz")
NOTEBOOK_IMAGES = 4  # of a comparison, in a notebook cell


def save(explanation: Explanation, path: Path | str, **display: Any) -> Path:
    """Write one explanation; `display` are the options of `PlotStyle`, e.g. cmap="viridis", robust=1, layers=True."""
    style = plot_style(display)

    def draw() -> Figure:
        from clairvit.plotting.figures import explanation_figure, layers_figure  # matplotlib only where it is needed
        from clairvit.plotting.heads import heads_figure

        kind = heads_figure if style.heads else layers_figure if style.layers else explanation_figure
        return kind(explanation, style)

    return write_result(explanation, path, draw, lambda: npz_bytes({"": explanation}), style)


def save_comparison(explanations: Mapping[str, Explanation], path: Path | str, **display: Any) -> Path:
    """Write several methods' explanations of the same images: the grid, the records by method, or all raw maps."""
    style = plot_style(display)
    comparison = explanations if isinstance(explanations, Comparison) else Comparison()
    comparison.update(explanations)

    def draw() -> Figure:
        from clairvit.plotting.comparison import comparison_figure

        return comparison_figure(comparison, style)

    return write_result(comparison, path, draw, lambda: npz_bytes(comparison), style)


def write_result(
    result: Tabular,
    path: Path | str,
    draw: Callable[[], Figure],
    npz: Callable[[], bytes] | None = None,
    style: PlotStyle | None = None,
) -> Path:
    """Write a result by the suffix of the file: its picture, its document (.json), table (.csv) or arrays (.npz)."""
    suffix = check_suffix(path, SUFFIXES if npz else (*PICTURES, *TABLES))
    if suffix in PICTURES:
        return write_figure(draw(), path, style)
    if suffix == ".npz" and npz is not None:
        return atomic_write(path, npz())
    return write_table(result, path)


def explanation_png(explanation: Explanation) -> bytes:
    """Return the picture of an explanation as PNG bytes, of its first maps where they are too many for one page."""
    from clairvit.plotting.figures import explanation_figure
    from clairvit.plotting.tiles import MOST_ROWS

    return figure_bytes(explanation_figure(explanation[:MOST_ROWS], PlotStyle()), ".png")


def comparison_png(explanations: Mapping[str, Explanation]) -> bytes:
    """Return the picture of a comparison as PNG bytes, of its first images where they are too many for one page."""
    from clairvit.plotting.comparison import comparison_figure

    first = {name: explanation[:NOTEBOOK_IMAGES] for name, explanation in explanations.items()}
    return figure_bytes(comparison_figure(first, PlotStyle()), ".png")


def write_figure(figure: Figure, path: Path | str, style: PlotStyle | None = None) -> Path:
    """Write a matplotlib figure to .png, .jpg, .pdf or .svg."""
    return atomic_write(path, figure_bytes(figure, check_suffix(path, PICTURES), style))


def figure_bytes(figure: Figure, suffix: str, style: PlotStyle | None = None) -> bytes:
    """Return a matplotlib figure as the content of a file with that suffix. The same map gives the same bytes."""
    import matplotlib

    buffer = io.BytesIO()
    # Type 42: real fonts, which journals ask for. No date and a fixed salt: the same map gives the same file.
    # No hinting: it sets small letters up to a fifth wider than `canvas.text_width` measures them.
    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with matplotlib.rc_context(RC_PARAMS):
        figure.savefig(
            buffer, format=suffix[1:], dpi=(style or PlotStyle()).dpi, facecolor="white", metadata=undated.get(suffix)
        )
    return buffer.getvalue()


def check_suffix(path: Path | str, suffixes: Sequence[str] = SUFFIXES) -> str:
    """Return the suffix in lower case; raise BadInput if it is none that can be written."""
    return _tables.check_suffix(path, suffixes)
