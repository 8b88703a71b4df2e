"""Feature maps: for each stage of a CNN, or some blocks of a ViT, the mean and the strongest channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.tracing.attention import widened
from clairvit.tracing.layer import Layer
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import record
from clairvit.tracing.trace import Trace, one_target, run_backward

By = Literal["activation", "relevance"]


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """One layer of one image: the mean over its channels, and its strongest ones, first the strongest."""

    name: str  # "layer4", "block 11"
    width: int  # channels in all
    mean: Tensor  # [rows, cols]
    channels: tuple[tuple[int, Tensor], ...]  # (index, [rows, cols])


@dataclass(frozen=True, eq=False)
class Features:
    """Of one image."""

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
    """The `count` strongest channels of each stage (CNN), or of up to `layers` block inputs (ViT), image by image.

    by=activation ranks channels by the mean size of their activation (one forward, no target); by=relevance by that of
    gradient × activation for the target (one backward more). `names` are those of images given as tensors.
    """
    if count < 1 or layers < 1:
        raise BadInput(f"count={count} and layers={layers} were given; expected 1 or more of each, such as count=8.")
    batch = prepare(images, model)
    ranked = by == "relevance"
    recording = record(model, batch.pixels, differentiable=ranked)
    goal = one_target(recording, target, "logit", single=batch.single) if ranked else None
    trace = run_backward(recording, goal, "plain" if ranked else None, keep=False)
    found = [(layer, cells) for layer in trace.layers if (cells := _cells(trace, layer)) is not None]
    if not found:
        raise NotApplicable(
            f"No layer of {model.name} lies on a grid, so it has no feature maps to show; expected a CNN or a Vision "
            "Transformer whose blocks are modules. Use saliency, which needs none."
        )
    picked = found if trace.recording.structure.stages else [found[i] for i in spread(len(found), layers)]
    return [
        Features(
            name=name,
            model=model.name,
            pixels=batch.pixels[item],
            preprocess=model.preprocess,
            by=by,
            layers=tuple(_of_layer(layer, cells, item, count, ranked) for layer, cells in picked),
        )
        for item, name in enumerate(names or batch.names)
    ]


def spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` of `count` places, evenly, both ends among them."""
    if wanted == 1 or count == 1:
        return [count - 1]
    wanted = min(wanted, count)
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def _cells(trace: Trace, layer: Layer) -> tuple[slice, tuple[int, int]] | None:
    """Which tokens of a layer are cells of its grid, and the grid; None where they do not form one."""
    if layer.tokens is None or not trace.recording.structure.in_order:
        return None
    tokens, layout = layer.tokens.shape[1], trace.recording.structure.layout
    if layout is not None and tokens == layout.tokens:
        return slice(layout.prefix, None), layout.grid
    if layer.grid is not None and layer.grid[0] * layer.grid[1] == tokens and len(layer.tokens) == len(trace.pixels):
        return slice(0, None), layer.grid
    return None


def _of_layer(layer: Layer, cells: tuple[slice, tuple[int, int]], item: int, count: int, ranked: bool) -> LayerFeatures:
    where, grid = cells
    x = widened(layer.x[item, where])  # [n, d]
    said = x * widened(layer.dx[item, where]) if ranked else x
    best = said.abs().mean(0).topk(min(count, x.shape[1])).indices.tolist()

    def on_grid(column: Tensor) -> Tensor:
        return column.detach().reshape(grid)

    return LayerFeatures(
        name=layer.name or f"block {layer.index}",
        width=x.shape[1],
        mean=on_grid(x.mean(1)),
        channels=tuple((k, on_grid(x[:, k])) for k in best),
    )
