"""Feature maps: the mean and the strongest channels of each stage of a CNN, or of some blocks of a ViT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.numerics import widened
from clairvit.option_types import Range, check_range
from clairvit.tracing.grid import on_grid
from clairvit.tracing.layer import Layer
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.recording import record
from clairvit.tracing.trace import Trace, one_target, run_backward

if TYPE_CHECKING:
    from clairvit.methods.features import PatchFeatures

By = Literal["activation", "relevance"]


@dataclass(frozen=True, eq=False)
class LayerChannels:
    """The feature maps of one layer for one image: the mean over channels, and the strongest ones, strongest first."""

    name: str  # "layer4", "block 11"
    width: int  # channels in all
    mean: Tensor  # [rows, cols]
    channels: tuple[tuple[int, Tensor], ...]  # (index, [rows, cols])


@dataclass(frozen=True, eq=False)
class ChannelFeatures:
    """The feature maps of one image, layer by layer."""

    name: str
    model: str
    pixels: Tensor  # [3, H, W] what the model saw, normalised
    preprocess: Preprocess
    by: By
    layers: tuple[LayerChannels, ...]


@own_grad_mode()
def channel_features(
    model: Model,
    images: Any,
    target: Any = None,
    *,
    by: By = "activation",
    count: Annotated[int, Range(ge=1, unit="channels per layer", example=8)] = 8,
    layers: Annotated[int, Range(ge=1, unit="blocks", example=6)] = 6,
    names: Sequence[str] | None = None,
) -> list[ChannelFeatures]:
    """Return the strongest channels of each stage (CNN) or of some block inputs (ViT), for each image.

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
        One `ChannelFeatures` per image.
    """
    check_range(channel_features, "count", count)
    check_range(channel_features, "layers", layers)
    batch = prepare(images, model)
    relevance = by == "relevance"
    recording = record(model, batch.pixels, differentiable=relevance)
    goal = one_target(recording, target, None, single=batch.single) if relevance else None
    trace = run_backward(recording, goal, "plain" if relevance else None, keep=False)
    layer_maps = [
        (layer, x, _on_grid(trace, layer, layer.dx) if relevance else None)
        for layer in trace.layers
        if layer.tokens is not None and (x := _on_grid(trace, layer, layer.tokens)) is not None
    ]  # x and dx, [B, rows, cols, d]
    if not layer_maps:
        raise NotApplicable(
            f"No layer of {model.name} lies on a grid, so it has no feature maps to show; expected a CNN or a Vision "
            "Transformer whose blocks are modules. Use saliency, which needs none."
        )
    if not trace.recording.structure.stages:
        layer_maps = [layer_maps[i] for i in spread(len(layer_maps), layers)]
    return [
        ChannelFeatures(
            name=name,
            model=model.name,
            pixels=batch.pixels[item],
            preprocess=model.preprocess,
            by=by,
            layers=tuple(
                strongest(
                    layer.name or f"block {layer.index}",
                    x[item],
                    x[item] if dx is None else x[item] * dx[item],
                    count,
                )
                for layer, x, dx in layer_maps
            ),
        )
        for item, name in enumerate(names or batch.names)
    ]


def channels_of(features: PatchFeatures, count: int) -> list[ChannelFeatures]:
    """Return the mean and the strongest channels of features that are there already, of all their layers, by image."""
    layers = features.layers or (features,)
    return [
        ChannelFeatures(
            name=name,
            model=features.model,
            pixels=features.pixels[item],
            preprocess=features.preprocess,
            by="activation",
            layers=tuple(
                strongest(layer.layer_name, layer.tokens[item], layer.tokens[item], count) for layer in layers
            ),
        )
        for item, name in enumerate(features.names)
    ]


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of `count` indices, evenly spaced, the first and the last among them."""
    if most == 1 or count == 1:
        return [count - 1]
    most = min(most, count)
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _on_grid(trace: Trace, layer: Layer, tokens: Tensor) -> Tensor | None:
    """Return tokens [B, N, d] of a layer on the image grid, [B, rows, cols, d]; None where they do not form one."""
    structure = trace.recording.structure
    return on_grid(widened(tokens), structure.layout, layer.grid, trace.pixels) if structure.in_order else None


def strongest(name: str, x: Tensor, scores: Tensor, count: int) -> LayerChannels:
    """Return the feature maps of one image: activations x [rows, cols, d], ranked by the mean of |scores|."""
    indices = scores.flatten(0, 1).abs().mean(0).topk(min(count, x.shape[-1])).indices.tolist()
    return LayerChannels(
        name=name,
        width=x.shape[-1],
        mean=x.mean(-1).detach(),
        channels=tuple((k, x[..., k].detach()) for k in indices),
    )
