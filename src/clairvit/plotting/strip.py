"""Clips in figures: the frames of a clip side by side, as one picture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.methods.explanation import Explanation
from clairvit.plotting.style import PlotStyle

FRAMES_IN_LINE = 4  # at most; more frames go on below


def frame_strip(explanation: Explanation, style: PlotStyle) -> Explanation:
    """Return an explanation of clips as one of pictures: frames side by side, each with its own part of the map.

    A map of fewer frames than the clip (tubelets) is drawn over the middle frame of each group. Maps are enlarged frame
    by frame, so that nothing is blended across the border of two frames. Explanations of images stay as they are.
    """
    if explanation.pixels.ndim == 4:
        return explanation
    total, count = explanation.pixels.shape[2], explanation.maps.shape[1]
    shown = ((torch.arange(count) + 0.5) * total / count).long()
    pixels = explanation.pixels[:, :, shown]  # [B, C, frames, H, W]
    size = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    heads = explanation.heads
    return replace(
        explanation,
        pixels=side_by_side(pixels),
        maps=_enlarged_strip(explanation.maps, size, style.smooth),
        standard_error=None if explanation.standard_error is None else side_by_side(explanation.standard_error),
        chosen=None if explanation.chosen is None else side_by_side(explanation.chosen),
        certified=None
        if explanation.certified is None
        else replace(explanation.certified, patches=side_by_side(explanation.certified.patches)),
        layers=None if explanation.layers is None else _enlarged_strip(explanation.layers, size, style.smooth),
        heads=None
        if heads is None
        else replace(
            heads,
            maps=side_by_side(heads.maps),
            fused=side_by_side(heads.fused),
            whole=None if heads.whole is None else side_by_side(heads.whole),
        ),
    )


def side_by_side(frames: Tensor) -> Tensor:
    """Return frames […, frames, rows, cols] as one picture […, lines · rows, frames of a line · cols]."""
    count = frames.shape[-3]
    across = max(k for k in range(1, FRAMES_IN_LINE + 1) if count % k == 0)
    rows, cols = frames.shape[-2:]
    lines = frames.reshape(*frames.shape[:-3], count // across, across, rows, cols).movedim(-3, -2)
    return lines.reshape(*frames.shape[:-3], count // across * rows, across * cols)


def _enlarged_strip(maps: Tensor, size: tuple[int, int], smooth: bool) -> Tensor:
    """Return maps […, frames, rows, cols] enlarged to frames of `size` and put side by side."""
    flat = maps.reshape(-1, 1, *maps.shape[-2:]).double()
    options: dict[str, Any] = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest"}
    enlarged = F.interpolate(flat, size, **options)
    return side_by_side(enlarged.reshape(*maps.shape[:-2], *size))
