"""Feature maps: the strongest channels of each layer.

channel_features_figure(channel_features(model, "cat.jpg")).savefig("features.png")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from matplotlib.figure import Figure

from clairvit.errors import BadInput
from clairvit.methods.channel_features import ChannelFeatures, LayerChannels
from clairvit.plotting.canvas import GAP, MARGIN, PALE, SMALL, TITLE, Canvas
from clairvit.plotting.overlay import denormalised_photo, enlarge, scale_of, to_numpy
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import FOOT, check_rows

TILE = 0.95  # inches
LABEL = 0.17  # the number of a channel above its tile
COLOURS = "viridis"  # features have no sign that means for or against


def channel_features_figure(images: Sequence[ChannelFeatures], style: PlotStyle | None = None) -> Figure:
    """Return a figure with the photo and, per layer, the mean and the strongest channels, image by image."""
    if not images:
        raise BadInput("There are no features to draw; expected what features(model, images) gives.")
    style = style or PlotStyle(cmap=COLOURS, smooth=False)
    check_rows(sum(len(image.layers) for image in images))
    size = (int(images[0].pixels.shape[-2]), int(images[0].pixels.shape[-1]))
    tile_height = TILE * size[0] / size[1]
    line_height = LABEL + LABEL + tile_height + 0.06
    columns = 2 + max(len(layer.channels) for image in images for layer in image.layers)
    lines = sum(len(image.layers) for image in images)
    canvas = Canvas(
        2 * MARGIN + columns * (TILE + GAP) - GAP, 2 * MARGIN + lines * line_height + (len(images) - 1) * GAP + FOOT
    )
    top = MARGIN
    for image in images:
        canvas.write(PurePath(image.name).name or image.name, MARGIN, top + LABEL + 0.02, TILE, SMALL, PALE)
        canvas.image(denormalised_photo(image.pixels, image.preprocess), MARGIN, top + 2 * LABEL, TILE, tile_height)
        for layer in image.layers:
            _row(canvas, layer, top, size, tile_height, style)
            top += line_height
        top += GAP
    ranking = "mean |activation|" if images[0].by == "activation" else "mean |gradient × activation|"
    foot = f"feature maps · {images[0].model} · strongest channels by {ranking} · each on its own colour scale"
    canvas.write(foot, MARGIN, canvas.height - FOOT + 0.04, canvas.width - 2 * MARGIN, SMALL, PALE)
    return canvas.figure


def _row(
    canvas: Canvas, layer: LayerChannels, top: float, size: tuple[int, int], tile_height: float, style: PlotStyle
) -> None:
    left = MARGIN + TILE + GAP
    rows, cols = layer.mean.shape
    title = f"{layer.name} · {rows} × {cols} · {layer.width} channels"
    canvas.write(title, left, top + 0.02, canvas.width - left - MARGIN, TITLE, bold=True, align="left")
    for label, tile in [("mean", layer.mean), *((f"channel {k}", channel) for k, channel in layer.channels)]:
        values = to_numpy(tile)
        canvas.write(label, left, top + LABEL + 0.02, TILE, SMALL, PALE)
        scale = scale_of(values, signed=False, style=style)
        canvas.image(scale.colours(enlarge(values, size, style.smooth)), left, top + 2 * LABEL, TILE, tile_height)
        left += TILE + GAP
