"""Feature maps as pictures: for each stage of a CNN, or some blocks of a ViT, the mean and the strongest channels.

features_figure(features(model, "cat.jpg")).savefig("features.png")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from matplotlib.figure import Figure
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.show.colour import Array, scale_of
from clairvit.show.look import Look
from clairvit.show.overlay import enlarge, numbers, photo_of
from clairvit.show.page import GAP, MARGIN, PALE, SMALL, TITLE, Page
from clairvit.show.tiles import FOOT, check_rows
from clairvit.trace.guest import own_grad_mode
from clairvit.trace.layer import Layer
from clairvit.trace.recording import record
from clairvit.trace.trace import Trace, follow, one_target

By = Literal["activation", "relevance"]
TILE = 0.95  # inches
LABEL = 0.17  # the number of a channel above its tile
COLOURS = "viridis"  # features have no sign that means for or against


@dataclass(frozen=True)
class LayerFeatures:
    """One layer of one image: the mean over its channels, and its strongest ones, first the strongest."""

    name: str  # "layer4", "block 11"
    width: int  # channels in all
    mean: Array  # [rows, cols]
    channels: tuple[tuple[int, Array], ...]  # (index, [rows, cols])


@dataclass(frozen=True)
class Features:
    """Of one image."""

    name: str
    model: str
    photo: Array  # [H, W, 3]
    by: By
    layers: tuple[LayerFeatures, ...]


@own_grad_mode()
def features(
    model: Model, images: Any, target: Any = None, *, by: By = "activation", count: int = 8, layers: int = 6
) -> list[Features]:
    """The `count` strongest channels of each stage (CNN), or of up to `layers` block inputs (ViT), image by image.

    by=activation ranks channels by the mean size of their activation (one forward, no target); by=relevance by that of
    gradient × activation for the target (one backward more).
    """
    if count < 1 or layers < 1:
        raise BadInput(f"count={count} and layers={layers} were given; expected 1 or more of each.")
    batch = prepare(images, model)
    ranked = by == "relevance"
    recording = record(model, batch.pixels, differentiable=ranked)
    goal = one_target(recording, target, "logit", single=batch.single) if ranked else None
    trace = follow(recording, goal, "plain" if ranked else None, keep=False)
    found = [(layer, cells) for layer in trace.layers if (cells := _cells(trace, layer)) is not None]
    if not found:
        raise NotApplicable(
            f"No layer of {model.name} lies on a grid, so it has no feature maps to show; expected a CNN or a Vision "
            "Transformer whose blocks are modules."
        )
    picked = found if trace.recording.anatomy.stages else [found[i] for i in spread(len(found), layers)]
    return [
        Features(
            name=name,
            model=model.name,
            photo=photo_of(batch.pixels[item], model.preprocess),
            by=by,
            layers=tuple(_of_layer(layer, cells, item, count, ranked) for layer, cells in picked),
        )
        for item, name in enumerate(batch.names)
    ]


def spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` of `count` places, evenly, both ends among them."""
    if wanted == 1 or count == 1:
        return [count - 1]
    wanted = min(wanted, count)
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def _cells(trace: Trace, layer: Layer) -> tuple[slice, tuple[int, int]] | None:
    """Which tokens of a layer are cells of its grid, and the grid; None where they do not form one."""
    if layer.tokens is None or not trace.recording.anatomy.in_order:
        return None
    tokens, layout = layer.tokens.shape[1], trace.recording.anatomy.layout
    if layout is not None and tokens == layout.tokens:
        return slice(layout.prefix, None), layout.grid
    if layer.grid is not None and layer.grid[0] * layer.grid[1] == tokens and len(layer.tokens) == len(trace.pixels):
        return slice(0, None), layer.grid
    return None


def _of_layer(layer: Layer, cells: tuple[slice, tuple[int, int]], item: int, count: int, ranked: bool) -> LayerFeatures:
    where, grid = cells
    x = layer.x[item, where].float()  # [n, d]
    said = x * layer.dx[item, where].float() if ranked else x
    best = said.abs().mean(0).topk(min(count, x.shape[1])).indices.tolist()

    def on_grid(column: Tensor) -> Array:
        return numbers(column.reshape(grid))

    return LayerFeatures(
        name=layer.name or f"block {layer.index}",
        width=x.shape[1],
        mean=on_grid(x.mean(1)),
        channels=tuple((k, on_grid(x[:, k])) for k in best),
    )


def features_figure(found: Sequence[Features], look: Look | None = None) -> Figure:
    """Image by image: the photo, then a row for each layer with the mean and the strongest channels."""
    if not found:
        raise BadInput("There are no features to draw; expected what features(model, images) gives.")
    look = look or Look(cmap=COLOURS, smooth=False)
    check_rows(sum(len(one.layers) for one in found))
    tall = TILE * found[0].photo.shape[0] / found[0].photo.shape[1]
    line = LABEL + LABEL + tall + 0.06
    columns = 2 + max(len(layer.channels) for one in found for layer in one.layers)
    lines = sum(len(one.layers) for one in found)
    page = Page(2 * MARGIN + columns * (TILE + GAP) - GAP, 2 * MARGIN + lines * line + (len(found) - 1) * GAP + FOOT)
    top = MARGIN
    for one in found:
        page.write(PurePath(one.name).name or one.name, MARGIN, top + LABEL + 0.02, TILE, SMALL, PALE)
        page.picture(one.photo, MARGIN, top + 2 * LABEL, TILE, tall)
        for layer in one.layers:
            _row(page, layer, top, (one.photo.shape[0], one.photo.shape[1]), tall, look)
            top += line
        top += GAP
    ranking = "mean |activation|" if found[0].by == "activation" else "mean |gradient × activation|"
    foot = f"feature maps · {found[0].model} · strongest channels by {ranking} · each on its own colour scale"
    page.write(foot, MARGIN, page.height - FOOT + 0.04, page.width - 2 * MARGIN, SMALL, PALE)
    return page.figure


def _row(page: Page, layer: LayerFeatures, top: float, size: tuple[int, int], tall: float, look: Look) -> None:
    left = MARGIN + TILE + GAP
    rows, cols = layer.mean.shape
    title = f"{layer.name} · {rows} × {cols} · {layer.width} channels"
    page.write(title, left, top + 0.02, page.width - left - MARGIN, TITLE, bold=True, align="left")
    for label, values in [("mean", layer.mean), *((f"channel {k}", values) for k, values in layer.channels)]:
        page.write(label, left, top + LABEL + 0.02, TILE, SMALL, PALE)
        scale = scale_of(values, signed=False, look=look)
        page.picture(scale.colours(enlarge(values, size, look.smooth)), left, top + 2 * LABEL, TILE, tall)
        left += TILE + GAP


def explained_features(model: Model, pixels: Tensor, names: Sequence[str], **options: Any) -> list[Features]:
    """Of pixels that are prepared already: [B, 3, H, W], as an Explanation keeps them."""
    found = features(model, pixels.detach(), **options)
    return [Features(name, one.model, one.photo, one.by, one.layers) for name, one in zip(names, found, strict=True)]
