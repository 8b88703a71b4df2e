"""Features of surrogate models and coalitions of them: patches, coarser cells of patches, or superpixels per image.

groups = groups_of(probe, "patches", cells=7)           # one for all images, or one per image
scores = scores_keeping(probe, groups, [subsets])    # bool [V, features] -> [[B, V]]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._rng import make_generator
from clairvit.errors import BadInput, NotApplicable, importing
from clairvit.models.images import displayed
from clairvit.models.preprocess import Preprocess
from clairvit.option_types import Doc, Range, check_range
from clairvit.perturbation.probe import Probe
from clairvit.perturbation.removal import patches_to_pixels

Features = Annotated[
    Literal["patches", "superpixels"], Doc("what is switched on and off: patches, or superpixels of the image")
]
Cells = Annotated[
    int,
    Range(ge=1, unit="cells in a row", example=7),
    Doc("a coarser grid of so many cells along each side; None: every patch is a feature"),
]
QUICKSHIFT: dict[str, Any] = {"kernel_size": 4, "max_dist": 200, "ratio": 0.2}  # what lime segments images with


@dataclass(frozen=True, eq=False)
class Segmentation:
    """The feature that each patch, or each pixel, belongs to."""

    labels: Tensor  # whole numbers 0 … count - 1, [rows, cols] for patches or [H, W] for pixels; frames first for clips
    grid: tuple[int, ...]
    pixels: bool = False  # `labels` are of pixels

    @property
    def count(self) -> int:
        return int(self.labels.max()) + 1

    def visible(self, kept: Tensor) -> Tensor:
        """Return bool [V, rows, cols] or [V, H, W] of kept features, bool [V, features]."""
        return kept[:, self.labels]

    @property
    def shares(self) -> Tensor:
        """The share of each patch that each feature covers, [patches, features]. Rows sum to 1."""
        patches = math.prod(self.grid)
        patch = torch.arange(patches, dtype=torch.float64).reshape(1, *self.grid)
        if self.pixels:
            patch = patches_to_pixels(patch, (int(self.labels.shape[0]), int(self.labels.shape[1])))
        pairs = patch.flatten().long() * self.count + self.labels.flatten()
        areas = torch.bincount(pairs, minlength=patches * self.count).reshape(patches, self.count).double()
        return areas / areas.sum(1, keepdim=True)


def segmentations(probe: Probe, features: str, cells: Cells | None) -> list[Segmentation]:
    """Return one segmentation for all images where features are patches or cells; of superpixels one per image.

    Superpixels are exact to the pixel where the removal paints. For token dropping, and for road, whose imputation
    reads neighbouring patches, they are rounded to patches.
    """
    if features == "patches":
        return [Segmentation(grid_cells(probe.grid, cells), probe.grid)]
    if cells is not None:
        raise BadInput(
            f"features=superpixels and cells={cells} were given; cells are groups of patches, superpixels come from "
            "the image. Leave one of them out."
        )
    segments = superpixels_of(probe.pixels, probe.trace.recording.model.preprocess)
    if probe.paints:
        return [Segmentation(labels, probe.grid, pixels=True) for labels in segments]
    return [Segmentation(segments_on_patches(labels, probe.layout.plane), probe.grid) for labels in segments]


def grid_cells(grid: tuple[int, ...], cells: Cells | None) -> Tensor:
    """Return labels of a grid of cells × cells, never finer than the patches; None: one per patch.

    They are [rows, cols], or [frames, rows, cols] for clips, every frame with cells of its own.
    """
    check_range(grid_cells, "cells", cells)
    *frames, grid_rows, grid_cols = grid
    rows, cols = (grid_rows, grid_cols) if cells is None else (min(cells, grid_rows), min(cells, grid_cols))
    row = torch.arange(grid_rows) * rows // grid_rows
    col = torch.arange(grid_cols) * cols // grid_cols
    labels = row[:, None] * cols + col
    return torch.arange(frames[0])[:, None, None] * (rows * cols) + labels if frames else labels


def superpixels_of(images: Iterable[Tensor], preprocess: Preprocess) -> list[Tensor]:
    """Return the superpixels of each image, on all the threads torch may use: an image takes a third of a second."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(partial(superpixels, preprocess=preprocess), images))


def superpixels(image: Tensor, preprocess: Preprocess) -> Tensor:
    """Return labels [H, W] by quickshift, with lime's settings, of the image [C, H, W] in display colours."""
    if image.ndim == 4:
        raise NotApplicable("Superpixels are those of an image, and clips have frames too; expected patches.")
    image8 = (displayed(image, preprocess) * 255).round().byte()  # eight bits: the same in every precision
    return relabel(torch.from_numpy(_quickshift(image8.permute(1, 2, 0).numpy().tobytes(), image8.shape[1:])).long())


@lru_cache(maxsize=32)  # the same images come again for each randomised model; 7 MB at 224 pixels
def _quickshift(colours: bytes, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    with importing("The segmentation into superpixels", extra="superpixels"):
        from skimage.segmentation import quickshift

    image = np.frombuffer(colours, np.uint8).reshape(*shape, 3) / 255
    labels: np.ndarray[Any, Any] = quickshift(image, rng=0, **QUICKSHIFT)
    return labels.astype(np.min_scalar_type(labels.max()))


def segments_on_patches(segments: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return labels [rows, cols] of segments [H, W]: each patch gets the superpixel that covers most of it."""
    shares = Segmentation(segments, grid, pixels=True).shares
    return relabel(shares.argmax(1).reshape(grid))


def relabel(labels: Tensor) -> Tensor:
    """Return the same segments, numbered 0 … count - 1."""
    numbers = np.unique(labels.numpy(), return_inverse=True)[1]
    return torch.from_numpy(numbers).reshape(labels.shape)


def score_features(probe: Probe, groups: Sequence[Segmentation], kept: Sequence[Tensor]) -> list[Tensor]:
    """Return scores when only the features of `kept`, bool [V, features] per segmentation, are left.

    One [B, V] if one segmentation is for all images, else one [1, V] per image; each image may have its own V.
    """
    counts = [len(subsets) for subsets in kept]
    masks = torch.stack(
        [_padded(group.visible(subsets), max(counts)) for group, subsets in zip(groups, kept, strict=True)]
    )  # [1 or B, V, …]
    if groups[0].pixels:
        masks = masks.to(probe.pixels.device)
        scores = probe.score_images(max(counts), lambda ks: probe.blend(masks[:, ks.start : ks.stop]))
    else:
        scores = probe.score_kept(masks.flatten(2))
    if len(groups) == 1:
        return [scores]
    return [row[None, :count] for row, count in zip(scores, counts, strict=True)]


def _padded(visible: Tensor, count: int) -> Tensor:
    """Return [count, …]: an image with fewer variants than others in the batch is run whole in the remaining ones."""
    return F.pad(visible, (0, 0, 0, 0, 0, count - len(visible)), value=True)


# Coalitions: which features are kept. They are drawn from the seed alone, so that all images share them.


def random_halves(count: int, features: int, seed: int) -> Tensor:
    """Return random coalitions, bool [count, features], each feature with probability 1/2 (LIME)."""
    return (
        torch.rand(
            count, features, generator=make_generator(seed, "lime/coalitions"), dtype=torch.float32, device="cpu"
        )
        < 0.5
    )


@dataclass(frozen=True, eq=False)
class Coalitions:
    """Sets of features; each stands for itself and its complement (KernelSHAP)."""

    sets: Tensor  # bool [n, M]
    weights: Tensor  # [n] of the Shapley kernel
    unseen: Tensor  # [n] the share of all sets of its size that was not taken; 0: all were, without randomness


def shapley_coalitions(features: int, pairs: int, seed: int) -> Coalitions:
    """Return all pairs of the smallest sizes while the samples cover them, then random ones of the other sizes.

    A size k (with M − k) weighs W_k = (M − 1)/(k(M − k)), once for each side. Enumerated pairs have the weight W_k over
    their number. Of the sizes that remain, each gets as many pairs as its share of W, none twice, with equal weights:
    the kernel is already in how often they are drawn.
    """
    sizes = range(1, features // 2 + 1)
    weight = {k: (features - 1) / (k * (features - k)) * (1 if 2 * k == features else 2) for k in sizes}
    number = {k: math.comb(features, k) // (2 if 2 * k == features else 1) for k in sizes}
    sets: list[Tensor] = []
    weights: list[float] = []
    unseen: list[float] = []
    left = list(sizes)
    while left and (pairs - len(sets)) * weight[left[0]] >= number[left[0]] * sum(weight[k] for k in left) * (1 - 1e-9):
        k = left.pop(0)
        sets += _all_of_size(features, k)
        weights += [weight[k] / number[k]] * number[k]
        unseen += [0.0] * number[k]
    random_pairs = pairs - len(sets) if left else 0
    if random_pairs:
        total = sum(weight[k] for k in left)
        generator = make_generator(seed, "kernelshap/coalitions")
        ends = torch.tensor([weight[k] for k in left], dtype=torch.float64).cumsum(0) * (random_pairs / total)
        ends[-1] = random_pairs
        positions = torch.arange(random_pairs) + torch.rand((), generator=generator, dtype=torch.float64, device="cpu")
        counts = torch.bincount(torch.searchsorted(ends, positions, right=True), minlength=len(left))
        for k, count in zip(left, counts.tolist(), strict=True):
            sets += _random_of_size(features, k, count, generator)
            unseen += [1 - count / number[k]] * count
        weights += [total / random_pairs] * random_pairs
    stacked = torch.stack(sets) if sets else torch.zeros(0, features, dtype=torch.bool)
    return Coalitions(stacked, *(torch.tensor(values, dtype=torch.float64) for values in (weights, unseen)))


def _all_of_size(features: int, size: int) -> list[Tensor]:
    """Return every set of this size, bool [M]; of two complements only the one with the first feature."""
    members = torch.combinations(torch.arange(features), size)
    if 2 * size == features:
        members = members[members[:, 0] == 0]
    return list(torch.zeros(len(members), features, dtype=torch.bool).scatter_(1, members, True))


def _random_of_size(features: int, size: int, count: int, generator: torch.Generator) -> list[Tensor]:
    """Return so many different random sets of this size, bool [M]."""
    subsets: dict[bytes, Tensor] = {}
    while len(subsets) < count:
        subset = torch.zeros(features, dtype=torch.bool)
        subset[torch.randperm(features, generator=generator, device="cpu")[:size]] = True
        if 2 * size == features and not subset[0]:
            subset = ~subset
        subsets.setdefault(subset.numpy().tobytes(), subset)
    return list(subsets.values())
