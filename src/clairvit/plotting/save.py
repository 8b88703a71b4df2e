"""Write explanations as figures, JSON records or arrays, as the suffix of the file says."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clairvit._io import atomic_write, dumps_json, to_json, write_json
from clairvit.data.hashing import plain_preprocess
from clairvit.errors import BadInput
from clairvit.methods.explanation import FUSIONS, Explanation, Heads
from clairvit.plotting.labels import map_statistics, top_classes
from clairvit.plotting.overlay import to_numpy
from clairvit.plotting.style import PlotStyle, plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
RC_PARAMS = {"pdf.fonttype": 42, "svg.hashsalt": "clairvit", "text.hinting": "none"}
SUFFIXES = (*PICTURES, ".json", ".npz")
NOTEBOOK_IMAGES = 4  # of a comparison, in a notebook cell


def save(explanation: Explanation, path: Path | str, **display: Any) -> Path:
    """Write one explanation; `display` are the options of `PlotStyle`, e.g. cmap="viridis", robust=1, layers=True."""
    style = plot_style(display)
    if check_suffix(path) in PICTURES:
        from clairvit.plotting.figures import explanation_figure, layers_figure  # matplotlib only where it is needed
        from clairvit.plotting.heads import heads_figure

        draw = heads_figure if style.heads else layers_figure if style.layers else explanation_figure
        return write_figure(draw(explanation, style), path, style)
    if check_suffix(path) == ".json":
        return write_json(explanation_record(explanation), path)
    return atomic_write(path, npz_bytes({"": explanation}))


def save_comparison(explanations: Mapping[str, Explanation], path: Path | str, **display: Any) -> Path:
    """Write several methods' explanations of the same images: the grid, the records by method, or all raw maps."""
    style = plot_style(display)
    if check_suffix(path) in PICTURES:
        from clairvit.plotting.comparison import comparison_figure

        return write_figure(comparison_figure(explanations, style), path, style)
    if check_suffix(path) == ".json":
        return write_json({name: explanation_record(explanation) for name, explanation in explanations.items()}, path)
    return atomic_write(path, npz_bytes(explanations))


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


def explanation_record(explanation: Explanation, values: bool = True) -> dict[str, Any]:
    """Return an explanation as JSON values under the names of `Explanation`; lists have one entry per map."""
    items = range(len(explanation))
    content = {
        "method": explanation.method,
        "family": explanation.family,
        "signed": explanation.signed,
        "class_specific": explanation.class_specific,
        "model": explanation.model,
        "activation": explanation.activation,
        "weights_hash": explanation.weights_hash,
        "preprocess": plain_preprocess(explanation.preprocess),
        "score": explanation.score,
        "seed": explanation.seed,
        "cost": vars(explanation.cost),
        "notes": list(explanation.notes),
        "versions": dict(explanation.versions),
        "grid": list(explanation.maps.shape[-2:]),
        "layers": None if explanation.layers is None else len(explanation.layers),
        "names": list(explanation.names),
        "targets": list(explanation.targets),
        "classes": list(explanation.classes),
        "probabilities": list(explanation.probabilities),
        "class_scores": list(explanation.class_scores),
        "target_scores": list(explanation.target_scores),
        "top": [[vars(guess) for guess in top_classes(explanation, item)] for item in items],
        "statistics": [map_statistics(explanation.maps[item]) for item in items],
        "standard_error": None
        if explanation.standard_error is None
        else [map_statistics(explanation.standard_error[item]) for item in items],
        "chosen": None
        if explanation.chosen is None
        else [patches.nonzero().tolist() for patches in explanation.chosen],  # (row, column) of each
        "layer_statistics": None
        if explanation.layers is None
        else [[map_statistics(layer[item]) for item in items] for layer in explanation.layers],
        "heads": None if explanation.heads is None else _describe_heads(explanation.heads),
        "text_relevance": [
            {"tokens": list(text.tokens), "values": text.values.tolist()} for text in explanation.text_relevance
        ]
        or None,
        "check": None if explanation.checked is None else explanation.checked.to_dict(),
    }
    if values:
        content["maps"] = to_numpy(explanation.maps).tolist()
        if explanation.standard_error is not None:
            content["standard_error_maps"] = to_numpy(explanation.standard_error).tolist()
        if explanation.layers is not None:
            content["layer_maps"] = to_numpy(explanation.layers).tolist()
    return dict(to_json(content))


def _describe_heads(heads: Heads) -> dict[str, Any]:
    """Describe the arrays of a .npz: `heads` [layers, heads, …], `fused` [layers, fusions, …], `fused_whole`."""
    return {
        "method": heads.method,
        "layers": heads.maps.shape[0],
        "heads": heads.maps.shape[1],
        "fusions": list(FUSIONS),
        "whole": heads.whole is not None,
    }


def write_figure(figure: Figure, path: Path | str, style: PlotStyle | None = None) -> Path:
    """Write a matplotlib figure to .png, .jpg, .pdf or .svg."""
    return atomic_write(path, figure_bytes(figure, check_suffix(path), style))


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


def npz_bytes(explanations: Mapping[str, Explanation]) -> bytes:
    """Return arrays `maps`, `layers`, `heads`, `logits`, `about` (JSON), …; of a comparison as 'METHOD/maps'."""
    arrays: dict[str, Any] = {}
    for name, explanation in explanations.items():
        start = f"{name}/" if name else ""
        arrays[f"{start}maps"] = to_numpy(explanation.maps).astype(np.float32)
        arrays[f"{start}logits"] = to_numpy(explanation.logits).astype(np.float32)
        if explanation.standard_error is not None:
            arrays[f"{start}standard_error"] = to_numpy(explanation.standard_error).astype(np.float32)
        if explanation.chosen is not None:
            arrays[f"{start}chosen"] = explanation.chosen.cpu().numpy()
        if explanation.regions is not None:
            arrays[f"{start}regions"] = explanation.regions.cpu().numpy()
        if explanation.layers is not None:
            arrays[f"{start}layers"] = to_numpy(explanation.layers).astype(np.float32)
        if explanation.heads is not None:
            arrays[f"{start}heads"] = to_numpy(explanation.heads.maps).astype(np.float32)
            arrays[f"{start}fused"] = to_numpy(explanation.heads.fused).astype(np.float32)
            if explanation.heads.whole is not None:
                arrays[f"{start}fused_whole"] = to_numpy(explanation.heads.whole).astype(np.float32)
        arrays[f"{start}about"] = np.array(dumps_json(explanation_record(explanation, values=False)))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def check_suffix(path: Path | str) -> str:
    """Return the suffix in lower case; raise BadInput if it is none that can be written."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        problem = f"ends in '{suffix}'" if suffix else "has no suffix"
        raise BadInput(f"'{path}' {problem}; write to a name that ends in {', '.join(SUFFIXES)}.")
    return suffix
