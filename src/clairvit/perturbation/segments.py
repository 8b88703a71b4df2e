"""Groups: the features of a surrogate model. Patches, coarser cells of patches, or superpixels of each image.

groups = groups_of(probe, "patches", cells=7)           # one for all images, or one for each
scores = scores_keeping(probe, groups, [kept])          # bool [V, features] -> [[B, V]]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.models.preprocess import Preprocess
from clairvit.perturbation.probe import Probe
from clairvit.perturbation.removal import on_pixels
from clairvit.tracing.attention import widened

Features = Literal["patches", "superpixels"]
QUICKSHIFT: dict[str, Any] = {"kernel_size": 4, "max_dist": 200, "ratio": 0.2}  # what lime segments images with


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Which feature each patch, or each pixel, belongs to."""

    of: Tensor  # whole numbers 0 … count - 1, [rows, cols] for patches or [H, W] for pixels
    grid: tuple[int, int]
    pixels: bool = False  # `of` tells it of pixels

    @property
    def count(self) -> int:
        return int(self.of.max()) + 1

    def shown(self, kept: Tensor) -> Tensor:
        """bool [V, features] -> bool [V, rows, cols] or [V, H, W]: what is left to see."""
        return kept[:, self.of]

    @property
    def shares(self) -> Tensor:
        """[patches, features]: how much of each patch is each feature's. Rows add up to 1."""
        patches = self.grid[0] * self.grid[1]
        patch = torch.arange(patches, dtype=torch.float64).reshape(1, *self.grid)
        if self.pixels:
            patch = on_pixels(patch, (int(self.of.shape[0]), int(self.of.shape[1])))
        places = patch.flatten().long() * self.count + self.of.flatten()
        found = torch.bincount(places, minlength=patches * self.count).reshape(patches, self.count).double()
        return found / found.sum(1, keepdim=True)


def groups_of(probe: Probe, features: str, cells: int | None) -> list[Segmentation]:
    """One for all images where features are patches or cells, one for each where they are its superpixels.

    Superpixels are exact to the pixel where the removal paints. A token is there or not: for token dropping, and for
    road, whose imputation looks at neighbouring patches, they are rounded to patches.
    """
    if features == "patches":
        return [Segmentation(cells_of(probe.grid, cells), probe.grid)]
    if cells is not None:
        raise BadInput(
            f"features=superpixels and cells={cells} were given; cells are groups of patches, superpixels come from "
            "the image. Leave one of them out."
        )
    segments = superpixels_of(probe.pixels, probe.trace.recording.model.preprocess)
    if probe.paints:
        return [Segmentation(own, probe.grid, pixels=True) for own in segments]
    return [Segmentation(on_patches(own, probe.grid), probe.grid) for own in segments]


def cells_of(grid: tuple[int, int], cells: int | None) -> Tensor:
    """[rows, cols] -> a coarser grid of cells × cells, never finer than the patches; None: one a patch."""
    if cells is not None and cells < 1:
        raise BadInput(f"cells={cells} was given; expected 1 or more cells in a row, such as cells=7.")
    rows, cols = grid if cells is None else (min(cells, grid[0]), min(cells, grid[1]))
    row = torch.arange(grid[0]) * rows // grid[0]
    col = torch.arange(grid[1]) * cols // grid[1]
    return row[:, None] * cols + col


def superpixels_of(images: Iterable[Tensor], preprocess: Preprocess) -> list[Tensor]:
    """Those of each image: a third of a second each on one core, so that all the cores torch may use share them."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(partial(superpixels, preprocess=preprocess), images))


def superpixels(image: Tensor, preprocess: Preprocess) -> Tensor:
    """Quickshift on the image [3, H, W] as a person sees it, with lime's own settings: [H, W], 0 … count - 1."""
    colours = widened(image).cpu().double()
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (preprocess.mean, preprocess.std)
    )
    seen = ((colours * std + mean).clamp(0, 1) * 255).round().byte()  # eight bits: the same in every precision
    return in_order(torch.from_numpy(_segments(seen.permute(1, 2, 0).numpy().tobytes(), seen.shape[1:])).long())


@lru_cache(maxsize=32)  # a study asks for the same images again for each model it randomises; 7 MB at 224 pixels
def _segments(colours: bytes, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    from skimage.segmentation import quickshift

    found: np.ndarray[Any, Any] = quickshift(
        np.frombuffer(colours, np.uint8).reshape(*shape, 3) / 255, rng=0, **QUICKSHIFT
    )
    return found.astype(np.min_scalar_type(found.max()))


def on_patches(segments: Tensor, grid: tuple[int, int]) -> Tensor:
    """Each patch goes to the superpixel that has most of it, [H, W] -> [rows, cols]; some may be left with none."""
    shares = Segmentation(segments, grid, pixels=True).shares
    return in_order(shares.argmax(1).reshape(grid))


def in_order(labels: Tensor) -> Tensor:
    """The same groups, numbered 0 … count - 1."""
    numbers = np.unique(labels.numpy(), return_inverse=True)[1]
    return torch.from_numpy(numbers).reshape(labels.shape)


def scores_keeping(probe: Probe, groups: Sequence[Segmentation], kept: Sequence[Tensor]) -> list[Tensor]:
    """Scores when only the features of `kept`, bool [V, features] for each of the groups, are left.

    One [B, V] where one group is all images', else a [1, V] for each image; each image may have its own V.
    """
    counts = [len(own) for own in kept]
    shown = [_padded(own.shown(keep), max(counts)) for own, keep in zip(groups, kept, strict=True)]
    masks = torch.stack(shown)  # [1 or B, V, …]
    if groups[0].pixels:
        masks = masks.to(probe.pixels.device)
        found = probe.score_images(max(counts), lambda ks: probe.blend(masks[:, ks.start : ks.stop]))
    else:
        found = probe.score_kept(masks.flatten(2))
    if len(groups) == 1:
        return [found]
    return [row[None, :count] for row, count in zip(found, counts, strict=True)]


def _padded(shown: Tensor, count: int) -> Tensor:
    """An image with fewer variants than its neighbours in the batch is looked at whole in the others' time."""
    return F.pad(shown, (0, 0, 0, 0, 0, count - len(shown)), value=True)
