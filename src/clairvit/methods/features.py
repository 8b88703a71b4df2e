"""Feature maps: the mean and the strongest channels of each stage of a CNN, or of some blocks of a ViT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.numerics import widened
from clairvit.tracing.layer import Layer
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import record
from clairvit.tracing.trace import Trace, one_target, run_backward

By = Literal["activation", "relevance"]


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """The feature maps of one layer for one image: the mean over channels, and the strongest ones, strongest first."""

    name: str  # "layer4", "block 11"
    width: int  # channels in all
    mean: Tensor  # [rows, cols]
    channels: tuple[tuple[int, Tensor], ...]  # (index, [rows, cols])


@dataclass(frozen=True, eq=False)
class Features:
    """The feature maps of one image, layer by layer."""

    name: str
    model: str
    pixels: Tensor  # [3, H, W] what the model saw, normalised
    preprocess: Preprocess
    by: By
    layers: tuple[LayerFeatures, ...]


@own_grad_mode()
def features(
    model: Model,
    images: Any,
    target: Any = None,
    *,
    by: By = "activation",
    count: int = 8,
    layers: int = 6,
    names: Sequence[str] | None = None,
) -> list[Features]:
    """Return the strongest channels of each stage (CNN) or of some block inputs (ViT), one `Features` per image.

    Args:
        model: The model.
        images: As in `cv.explain`; all of them are one batch.
        target: What is differentiated for by="relevance", one per image.
        by: "activation" ranks channels by the mean absolute activation (one forward pass, no target), "relevance" by
            that of gradient × activation (one backward pass more).
        count: The number of channels per layer.
        layers: The number of blocks of a ViT, evenly spaced; a CNN shows all its stages.
        names: Names of images that are given as tensors.

    Returns:
        One `Features` per image.
    """
    if count < 1 or layers < 1:
        raise BadInput(f"count={count} and layers={layers} were given; expected 1 or more of each, such as count=8.")
    batch = prepare(images, model)
    relevance = by == "relevance"
    recording = record(model, batch.pixels, differentiable=relevance)
    goal = one_target(recording, target, "logit", single=batch.single) if relevance else None
    trace = run_backward(recording, goal, "plain" if relevance else None, keep=False)
    grid_layers = [(layer, tokens) for layer in trace.layers if (tokens := _grid_tokens(trace, layer)) is not None]
    if not grid_layers:
        raise NotApplicable(
            f"No layer of {model.name} lies on a grid, so it has no feature maps to show; expected a CNN or a Vision "
            "Transformer whose blocks are modules. Use saliency, which needs none."
        )
    if not trace.recording.structure.stages:
        grid_layers = [grid_layers[i] for i in spread(len(grid_layers), layers)]
    return [
        Features(
            name=name,
            model=model.name,
            pixels=batch.pixels[item],
            preprocess=model.preprocess,
            by=by,
            layers=tuple(_layer_features(layer, tokens, item, count, relevance) for layer, tokens in grid_layers),
        )
        for item, name in enumerate(names or batch.names)
    ]


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of `count` indices, evenly spaced, the first and the last among them."""
    if most == 1 or count == 1:
        return [count - 1]
    most = min(most, count)
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _grid_tokens(trace: Trace, layer: Layer) -> tuple[slice, tuple[int, int]] | None:
    """Return which tokens of a layer lie on a grid, and the grid; None where they do not form one."""
    if layer.tokens is None or not trace.recording.structure.in_order:
        return None
    tokens, layout = layer.tokens.shape[1], trace.recording.structure.layout
    if layout is not None and tokens == layout.tokens:
        return slice(layout.prefix, None), layout.grid
    if layer.grid is not None and layer.grid[0] * layer.grid[1] == tokens and len(layer.tokens) == len(trace.pixels):
        return slice(0, None), layer.grid
    return None


def _layer_features(
    layer: Layer, grid_tokens: tuple[slice, tuple[int, int]], item: int, count: int, relevance: bool
) -> LayerFeatures:
    tokens, grid = grid_tokens
    x = widened(layer.x[item, tokens])  # [n, d]
    scores = x * widened(layer.dx[item, tokens]) if relevance else x
    strongest = scores.abs().mean(0).topk(min(count, x.shape[1])).indices.tolist()

    def on_grid(column: Tensor) -> Tensor:
        return column.detach().reshape(grid)

    return LayerFeatures(
        name=layer.name or f"block {layer.index}",
        width=x.shape[1],
        mean=on_grid(x.mean(1)),
        channels=tuple((k, on_grid(x[:, k])) for k in strongest),
    )
