"""Features are groups of patches or pixels: each patch in one cell, superpixels as seen by eye, shares by area."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.models.preprocess import Preprocess
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.segments import (
    Segmentation,
    grid_cells,
    relabel,
    score_features,
    segmentations,
    segments_on_patches,
    superpixels,
    superpixels_of,
)
from helpers.rounding import assert_same
from helpers.tiny_models import double, wrapped

PLAIN = Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def halved(height: int = 64, width: int = 64, edge: int = 20) -> Tensor:
    """Red to the left of the edge, blue to the right, [3, H, W]."""
    image = torch.zeros(3, height, width)
    image[0, :, :edge] = 1
    image[2, :, edge:] = 1
    return image


def test_cells() -> None:
    assert torch.equal(grid_cells((2, 3), None), torch.arange(6).reshape(2, 3))
    assert grid_cells((4, 6), 2).tolist() == [[0, 0, 0, 1, 1, 1]] * 2 + [[2, 2, 2, 3, 3, 3]] * 2
    assert grid_cells((3, 5), 2).tolist() == [[0, 0, 0, 1, 1]] * 2 + [[2, 2, 2, 3, 3]]
    assert torch.equal(grid_cells((2, 3), 7), torch.arange(6).reshape(2, 3))  # never finer than patches
    assert grid_cells((14, 14), 7).unique().numel() == 49
    with pytest.raises(BadInput, match=r"cells=0 was given; expected 1 or more cells in a row, such as cells=7"):
        grid_cells((4, 4), 0)


def test_shares_are_areas() -> None:
    segments = torch.zeros(8, 8, dtype=torch.long)
    segments[:, 3:] = 1
    segments[6:, 6:] = 2
    shares = Segmentation(segments, (2, 2), pixels=True).shares
    assert shares.tolist() == [[0.75, 0.25, 0], [0, 1, 0], [0.75, 0.25, 0], [0, 0.75, 0.25]]
    cells = Segmentation(grid_cells((2, 4), 2), (2, 4))
    assert torch.equal(cells.shares.argmax(1).reshape(2, 4), cells.labels)
    assert torch.equal(cells.shares.sum(1), torch.ones(8, dtype=torch.float64))


def test_a_patch_goes_to_who_has_most_of_it() -> None:
    segments = torch.zeros(8, 8, dtype=torch.long)
    segments[:, 3:] = 1
    segments[6:, 6:] = 2  # has most of no patch
    assert segments_on_patches(segments, (2, 2)).tolist() == [[0, 1], [0, 1]]
    segments[:, :3] = 5
    assert relabel(segments).unique().tolist() == [0, 1, 2]


def test_superpixels_follow_colours() -> None:
    segments = superpixels(halved(), PLAIN)
    assert segments.shape == (64, 64)
    assert segments.unique().tolist() == list(range(int(segments.max()) + 1))
    left, right = set(segments[:, :20].unique().tolist()), set(segments[:, 20:].unique().tolist())
    assert left
    assert right
    assert not left & right


def test_superpixels_see_the_image_before_normalisation_in_every_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 5, 5, generator=generator), (64, 64), mode="bicubic")[0]
    photo = (smooth.clamp(0, 1) * 255).round() / 255  # eight bits, as photos have: no rounding is a close call
    usual = Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1))
    mean, std = (torch.tensor(values)[:, None, None] for values in (usual.mean, usual.std))
    plain = superpixels(photo, PLAIN)
    assert plain.max() > 1
    assert torch.equal(superpixels((photo - mean) / std, usual), plain)
    assert torch.equal(superpixels(((photo - mean) / std).double(), usual), plain)


def test_superpixels_of_the_same_image_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import skimage.segmentation

    shapes, quickshift = [], skimage.segmentation.quickshift

    def counted(image: Any, **options: Any) -> Any:
        shapes.append(image.shape)
        return quickshift(image, **options)

    monkeypatch.setattr(skimage.segmentation, "quickshift", counted)
    images = torch.stack([halved(edge=21), halved(edge=37), halved(edge=21)])
    many, again = superpixels_of(images, PLAIN), superpixels_of(images.flip(0), PLAIN)
    assert 2 <= len(shapes) <= 3  # two threads may both begin with the first image
    assert all(map(torch.equal, many, reversed(again)))
    assert all(map(torch.equal, many, [superpixels(image, PLAIN) for image in images]))
    assert not torch.equal(many[0], many[1])
    many[0][:] = 7  # what a caller writes into its own
    assert not torch.equal(superpixels(images[0], PLAIN), many[0])


def probe_on(kind: str, removal: str, image: Tensor) -> Probe:
    with probing(cv.trace(wrapped(kind), image, target=3), removal, label="test", forwards=1) as probe:
        return probe


def two_kinds() -> Tensor:
    return 2 * torch.stack([halved(32, 32, 9), halved(32, 32, 32)]) - 1  # two colours and one, normalised by 0.5


def test_superpixels_are_pixels_where_paint_goes_and_patches_where_tokens_go() -> None:
    painted = segmentations(probe_on("timm-vit", "mean", two_kinds()), "superpixels", None)
    dropped = segmentations(probe_on("timm-vit", "token", two_kinds()), "superpixels", None)
    imputed = segmentations(probe_on("timm-vit", "road", two_kinds()), "superpixels", None)
    assert [segmentation.pixels for segmentation in (*painted, *dropped, *imputed)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert painted[0].labels.shape == (32, 32)
    assert dropped[0].labels.shape == imputed[0].labels.shape == (4, 4)
    with pytest.raises(BadInput, match=r"features=superpixels and cells=3 were given.*Leave one of them out"):
        segmentations(probe_on("timm-vit", "mean", two_kinds()), "superpixels", 3)


def test_scores_are_of_the_pixels_that_are_left() -> None:
    """Painted by hand; images of a batch may have different numbers of features and of variants."""
    image, model = two_kinds().double(), wrapped("timm-vit", torch.float64)
    segments = [relabel((image[0, 0] > 0).long()), torch.zeros(32, 32, dtype=torch.long)]
    kept = [torch.tensor([[True, False], [False, True], [False, False]]), torch.tensor([[False]])]
    with probing(cv.trace(model, image, target=3), "mean", label="test", forwards=3) as probe:
        groups = [Segmentation(segment, probe.grid, pixels=True) for segment in segments]
        first, second = score_features(probe, groups, kept)
    by_hand = torch.stack([image[0] * (image[0, 0] < 0), image[0] * (image[0, 0] > 0), torch.zeros_like(image[0])])
    with torch.no_grad():
        expected = model.logits(by_hand)[:, 3]
    assert first.shape == (1, 3)
    assert second.shape == (1, 1)
    assert_same(first[0], expected)
    assert_same(second[0], expected[2:])


def test_cells_are_patches_together() -> None:
    """A cell that goes is its patches that go."""
    (model, image), kept = double("timm-vit"), torch.tensor([[True, False, True, True]])
    with probing(cv.trace(model, image, target=3), "token", label="test", forwards=2) as probe:
        (score,) = score_features(probe, segmentations(probe, "patches", 2), [kept])
        by_hand = torch.ones(4, 4, dtype=torch.bool)
        by_hand[:2, 2:] = False
        expected = probe.score_kept(by_hand.reshape(1, 1, 16))
    assert_same(score, expected)
