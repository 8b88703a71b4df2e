"""Outlines on an image: of chosen patches, which are also removed from the photo, and of what a target is about."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from matplotlib.collections import LineCollection
from numpy.typing import NDArray

from clairvit.methods.explanation import Explanation
from clairvit.plotting.overlay import Array

Patches: TypeAlias = NDArray[np.bool_]  # [rows, cols]
Segment: TypeAlias = tuple[tuple[float, float], tuple[float, float]]  # (x, y) to (x, y), in pixels

UNDER, OVER = ("black", 2.4), ("white", 1.1)  # points on a tile 2.1 inches wide: dark next to light shows on any photo
USUAL_TILE = 2.1
SMALLEST = 1 / 24  # of an image's side: smaller regions are shown by a ring
RING = 9.0  # points, its diameter
NARROWEST = 0.5  # of those widths, on small tiles
PAPER, STRIPE = 0.93, 0.68  # grey of removed patches, and of the stripes across them
STRIPES = 24  # along the longer side of the image


def chosen_patches(explanation: Explanation, item: int) -> Patches | None:
    """Return the patches that were chosen for one map; None if its method chooses none."""
    if explanation.chosen is None:
        return None
    return np.asarray(explanation.chosen[item].detach().cpu().numpy(), dtype=np.bool_)


def certified_patches(explanation: Explanation, item: int) -> Patches | None:
    """Return the patches that a certificate names on one map; None without one."""
    if explanation.certified is None:
        return None
    return np.asarray(explanation.certified.patches[item].numpy(), dtype=np.bool_)


def marked_patches(explanation: Explanation, item: int) -> Patches | None:
    """Return the patches whose removal the check of one map speaks of; None where they are not outlined.

    That is without a check, for clips, and where chosen or certified patches are outlined.
    """
    if explanation.checked is None or explanation.chosen is not None or explanation.certified is not None:
        return None
    check = explanation.checked[item]
    if len(check.grid) != 2 or not check.marked:
        return None
    marked = np.zeros(check.grid, dtype=np.bool_)
    marked.flat[list(check.marked)] = True
    return marked


def boundary_segments(chosen: Patches, size: tuple[int, ...]) -> list[Segment]:
    """Return the sides of chosen patches without a chosen neighbour, on an image of `size` (H, W) pixels."""
    rows, cols = chosen.shape
    patch_height, patch_width = size[0] / rows, size[1] / cols
    padded = np.pad(chosen, 1)
    # A pixel's centre has whole coordinates, so the image begins half a pixel before 0.
    horizontal = [
        ((c * patch_width - 0.5, r * patch_height - 0.5), ((c + 1) * patch_width - 0.5, r * patch_height - 0.5))
        for r, c in np.argwhere(padded[:-1, 1:-1] != padded[1:, 1:-1]).tolist()
    ]
    vertical = [
        ((c * patch_width - 0.5, r * patch_height - 0.5), (c * patch_width - 0.5, (r + 1) * patch_height - 0.5))
        for r, c in np.argwhere(padded[1:-1, :-1] != padded[1:-1, 1:]).tolist()
    ]
    return horizontal + vertical


def draw_outlines(axes: Any, explanation: Explanation, item: int, size: tuple[int, ...], tile: float) -> None:
    """Draw what belongs to one map: chosen, certified or hidden patches, and the region or box of its target."""
    for outlined in (chosen_patches, certified_patches, marked_patches):
        draw_outline(axes, outlined(explanation, item), size, tile)
    if explanation.regions is not None and not bool(explanation.regions[item].all()):  # the whole image needs no line
        draw_outline(axes, np.asarray(explanation.regions[item].cpu().numpy(), dtype=np.bool_), size, tile)


def draw_outline(axes: Any, chosen: Patches | None, size: tuple[int, ...], tile: float) -> None:
    """Draw a white line with black edges around the chosen cells, thinner on small tiles; a ring around a point."""
    if chosen is None or not chosen.any():
        return
    scale = max(NARROWEST, min(1.0, tile / USUAL_TILE))
    extent = [np.ptp(places) + 1 for places in chosen.nonzero()]
    if max(extent[0] / chosen.shape[0], extent[1] / chosen.shape[1]) < SMALLEST:
        _draw_ring(axes, chosen, size, scale)
        return
    for colour, width in (UNDER, OVER):
        lines = LineCollection(
            boundary_segments(chosen, size), colors=colour, linewidths=width * scale, capstyle="projecting"
        )
        lines.set_clip_on(False)  # at the border of the photo the line would be half as wide
        axes.add_collection(lines, autolim=False)


def _draw_ring(axes: Any, chosen: Patches, size: tuple[int, ...], scale: float) -> None:
    """Draw a ring around a region that is too small for an outline, such as one pixel."""
    row, column = ((places.mean() + 0.5) / count for places, count in zip(chosen.nonzero(), chosen.shape, strict=True))
    for colour, width in (UNDER, OVER):
        centre = {
            "marker": "o",
            "markersize": RING * scale,
            "markerfacecolor": "none",
            "scalex": False,
            "scaley": False,
        }
        x, y = column * size[1] - 0.5, row * size[0] - 0.5
        axes.plot([x], [y], color=colour, markeredgewidth=width * scale, clip_on=False, **centre)


def photo_without(photo: Array, chosen: Patches) -> Array:
    """Return a photo [H, W, 3] with grey stripes where the chosen patches were."""
    height, width = photo.shape[:2]
    y, x = np.mgrid[:height, :width]
    removed = chosen[y * chosen.shape[0] // height, x * chosen.shape[1] // width]
    stripe_width = max(1, round(max(height, width) / (2 * STRIPES)))
    stripes = np.where((x + y) // stripe_width % 2 == 0, PAPER, STRIPE)[..., None]
    return np.where(removed[..., None], stripes, photo)


def removal_labels(explanation: Explanation, item: int, chosen: Patches) -> tuple[str, str]:
    """Return title and subtitle of the photo without the chosen patches."""
    count, target = int(chosen.sum()), explanation.targets[item]
    if not count:
        return "no patch taken out", "no set was found, or none was needed"
    title = f"without {count} of {chosen.size} patches"
    return title, f"no longer {target}" if explanation.classes[item] is not None else f"{target} is no longer above 0"
