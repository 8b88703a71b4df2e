"""Patch tokens as pictures: principal components as colours, norms, similarities; also as JSON and arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from clairvit._io import dumps_json, printable, write_json
from clairvit.errors import BadInput
from clairvit.methods.channel_features import channels_of
from clairvit.methods.explanation_files import arrays_as_bytes
from clairvit.methods.features import PatchFeatures
from clairvit.plotting.canvas import GAP, HEADING, MARGIN, PALE, SMALL, Canvas
from clairvit.plotting.channel_features import channel_features_figure
from clairvit.plotting.overlay import Array, denormalised_photo, enlarge, scale_of, to_numpy
from clairvit.plotting.patch_outline import Patches, draw_outline
from clairvit.plotting.save import figure_bytes, write_result
from clairvit.plotting.style import PlotStyle, plot_style
from clairvit.plotting.tiles import FOOT, MOST_ROWS, check_rows

TILE = 1.9  # inches
LAYER_TILE = 1.1
LAYERS_PER_LINE = 6
COLOURS = "viridis"
MOST_COLUMNS = 6  # of `plot`
Patch = tuple[int, int]


def component_colours(features: PatchFeatures, item: int) -> Array:
    """Return the components of one image as RGB, [rows, cols, 3] from 0 to 1; black outside the foreground.

    Each component runs from its 1st to its 99th percentile over all images of the call; one without variance is grey.
    """
    low, high = to_numpy(features.limits)
    extent = np.where(high > low, high - low, 1.0)
    values = np.where(high > low, (to_numpy(features.pca[item]) - low) / extent, 0.5)
    colours: Array = np.clip(values, 0.0, 1.0)
    if features.foreground is not None:
        colours = colours * features.foreground[item].numpy()[..., None]
    return colours


def features_figure(features: PatchFeatures, patch: Patch | None = None, style: PlotStyle | None = None) -> Figure:
    """Return a figure with a row per image: photo, components, norms and, with `patch`, the similarity to it."""
    if len(features) == 0:
        raise BadInput("The features are of no image; expected at least one to draw.")
    style = style or PlotStyle(smooth=False)
    check_rows(len(features))
    similarity = None if patch is None else to_numpy(features.similarity(*patch))
    size, tile_height = _photo_size(features, TILE)
    columns = 3 + (patch is not None)
    line_height = HEADING + tile_height + GAP
    canvas = Canvas(2 * MARGIN + columns * (TILE + GAP) - GAP, 2 * MARGIN + len(features) * line_height + FOOT)
    for item, name in enumerate(features.names):
        top = MARGIN + item * line_height
        photo = denormalised_photo(features.pixels[item], features.preprocess)
        colours = _enlarged_colours(component_colours(features, item), size, style.smooth)
        norms, outliers = to_numpy(features.norms[item]), _outliers(features, item)
        tiles: list[tuple[str, str, Array, Patches | None]] = [
            (PurePath(name).name or name, f"{size[1]} × {size[0]} pixels", photo, None),
            ("components 1, 2, 3", _variance_label(features), colours, None),
            ("norms", _norms_label(norms, outliers), _coloured(norms, size, style), outliers),
        ]
        if similarity is not None and patch is not None:
            title = f"cosine to row {patch[0]}, column {patch[1]}"
            values = similarity[item]
            picture = _coloured(values, size, style)
            tiles.append((title, f"{values.min():.2f} to {values.max():.2f}", picture, _one_patch(features, patch)))
        for column, (title, subtitle, picture, outlined) in enumerate(tiles):
            left = MARGIN + column * (TILE + GAP)
            canvas.heading(title, subtitle, left, top, TILE)
            axes = canvas.image(picture, left, top + HEADING, TILE, tile_height)
            draw_outline(axes, outlined, size, TILE)
    _write_foot(canvas, features)
    return canvas.figure


def feature_layers_figure(features: PatchFeatures, style: PlotStyle | None = None) -> Figure:
    """Return a figure with the components of every layer, image by image, each layer in a basis of its own."""
    if not features.layers:
        raise BadInput("The features are those of one layer; expected cv.features(…, layer='all') to draw all layers.")
    style = style or PlotStyle(smooth=False)
    lines = math.ceil(len(features.layers) / LAYERS_PER_LINE)
    check_rows(lines * len(features))
    size, tile_height = _photo_size(features, LAYER_TILE)
    columns = 1 + min(LAYERS_PER_LINE, len(features.layers))
    line_height = HEADING + tile_height + GAP
    canvas = Canvas(
        2 * MARGIN + columns * (LAYER_TILE + GAP) - GAP, 2 * MARGIN + lines * len(features) * line_height + FOOT
    )
    for item, name in enumerate(features.names):
        first = MARGIN + item * lines * line_height
        canvas.heading(PurePath(name).name or name, "", MARGIN, first, LAYER_TILE)
        photo = denormalised_photo(features.pixels[item], features.preprocess)
        canvas.image(photo, MARGIN, first + HEADING, LAYER_TILE, tile_height)
        for number, layer in enumerate(features.layers):
            line, column = divmod(number, LAYERS_PER_LINE)
            left, top = MARGIN + (1 + column) * (LAYER_TILE + GAP), first + line * line_height
            canvas.heading(layer.layer_name, _variance_label(layer), left, top, LAYER_TILE)
            colours = _enlarged_colours(component_colours(layer, item), size, style.smooth)
            canvas.image(colours, left, top + HEADING, LAYER_TILE, tile_height)
    _write_foot(canvas, features, all_layers=True)
    return canvas.figure


def plot_features(features: PatchFeatures, ax: Any = None, **display: Any) -> Axes | NDArray[np.object_]:
    """Draw the components of B images on B axes and return them; a single image returns its axes itself."""
    style = plot_style({"smooth": False, **display})
    count = len(features)
    if count == 0:
        raise BadInput("The features are of no image; expected at least one to draw.")
    if ax is None:
        from matplotlib import pyplot

        columns = min(count, MOST_COLUMNS)
        lines = math.ceil(count / columns)
        shape = (TILE * columns, (TILE + 0.3) * lines)
        ax = pyplot.subplots(lines, columns, figsize=shape, squeeze=False, layout="constrained")[1]
        for unused in ax.flat[count:]:
            unused.set_axis_off()
    axes = np.atleast_1d(np.asarray(ax, dtype=object)).reshape(-1)
    if len(axes) < count:
        raise BadInput(f"{len(axes)} axes were given for {count} images; expected one for each, or ax=None.")
    size, _ = _photo_size(features, TILE)
    for item, name in enumerate(features.names):
        axes[item].imshow(_enlarged_colours(component_colours(features, item), size, style.smooth))
        axes[item].set_title(printable(PurePath(name).name or name), fontsize="small")
        axes[item].set_xticks([])
        axes[item].set_yticks([])
    return axes[0] if count == 1 else axes[:count]


def save_features(
    features: PatchFeatures, path: Path, *, patch: Patch | None = None, channels: int | None = None, **display: Any
) -> Path:
    """Write the picture, the JSON record or the arrays, as the suffix says."""
    style = plot_style({"smooth": False, **display})

    def draw() -> Figure:
        if channels is not None:
            return channel_features_figure(channels_of(features, channels), replace(style, cmap=style.cmap or COLOURS))
        return feature_layers_figure(features, style) if style.layers else features_figure(features, patch, style)

    if Path(path).suffix.lower() == ".json":
        return write_json(features.to_dict(patch=patch, channels=channels), path)
    return write_result(features, path, draw, lambda: _npz_bytes(features, patch), style)


def features_png(features: PatchFeatures) -> bytes:
    """Return the picture as PNG bytes, of the first images where they are too many for one page."""
    return figure_bytes(features_figure(features[:MOST_ROWS]), ".png")


def _npz_bytes(features: PatchFeatures, patch: Patch | None) -> bytes:
    """Return arrays `tokens`, `pca`, `components`, …, `about` (JSON); of all layers as 'block 3/pca'."""
    arrays: dict[str, Any] = {"tokens": to_numpy(features.tokens).astype(np.float32)}
    for start, layer in [("", features), *((f"{layer.layer_name}/", layer) for layer in features.layers)]:
        arrays[f"{start}pca"] = to_numpy(layer.pca)
        arrays[f"{start}components"] = to_numpy(layer.components)
        arrays[f"{start}mean"] = to_numpy(layer.mean)
        arrays[f"{start}explained_variance"] = to_numpy(layer.explained_variance)
        arrays[f"{start}norms"] = to_numpy(layer.norms).astype(np.float32)
        if layer.outliers is not None:
            arrays[f"{start}outliers"] = layer.outliers.numpy()
        if layer.foreground is not None:
            arrays[f"{start}foreground"] = layer.foreground.numpy()
    if patch is not None:
        arrays["similarity"] = to_numpy(features.similarity(*patch))
    arrays["about"] = np.array(dumps_json(features.to_dict(values=False, patch=patch)))
    return arrays_as_bytes(arrays)


def _photo_size(features: PatchFeatures, width: float) -> tuple[tuple[int, int], float]:
    """Return (H, W) of the photos in pixels, and the height in inches of tiles of that width."""
    size = (int(features.pixels.shape[-2]), int(features.pixels.shape[-1]))
    return size, width * size[0] / size[1]


def _enlarged_colours(colours: Array, size: tuple[int, int], smooth: bool) -> Array:
    return np.stack([enlarge(colours[..., channel], size, smooth) for channel in range(colours.shape[-1])], axis=-1)


def _coloured(values: Array, size: tuple[int, int], style: PlotStyle) -> Array:
    scale = scale_of(values, signed=False, style=PlotStyle(cmap=style.cmap or COLOURS, robust=0))
    return scale.colours(enlarge(values, size, style.smooth))


def _outliers(features: PatchFeatures, item: int) -> Patches | None:
    return None if features.outliers is None else np.asarray(features.outliers[item].numpy(), dtype=np.bool_)


def _one_patch(features: PatchFeatures, patch: Patch) -> Patches:
    chosen: Patches = np.zeros(features.grid, dtype=np.bool_)
    chosen[patch] = True
    return chosen


def _variance_label(features: PatchFeatures) -> str:
    shares = ", ".join(f"{100 * share:.0f}" for share in features.explained_variance_ratio.tolist())
    return f"{shares} % of the variance"


def _norms_label(norms: Array, outliers: Patches | None) -> str:
    count = "" if outliers is None else f" · {int(outliers.sum())} outlier{'s' * (int(outliers.sum()) != 1)}"
    return f"{norms.min():.3g} to {norms.max():.3g}{count}"


def _write_foot(canvas: Canvas, features: PatchFeatures, all_layers: bool = False) -> None:
    rows, cols = features.grid
    place = "outputs of all layers" if all_layers else f"output of {features.layer_name} · {rows} × {cols} patches"
    basis = "a basis per layer" if all_layers else "one basis"
    foot = f"patch tokens · {features.model} · {place} · {basis} for all images"
    canvas.write(foot, MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN, SMALL, PALE)
