"""Points and mass by hand: the tolerance to the pixel, ties, void pixels, patches that are foreground in part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.localisation import dilate, patch_foreground
from clairvit.metrics.registry import resolve_metric
from helpers.eval_contexts import case_of, values

SIZE = 16


def noise(batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def square(top: int, left: int, side: int, batch: int = 3) -> Tensor:
    mask = torch.zeros(batch, SIZE, SIZE, dtype=torch.bool)
    mask[:, top : top + side, left : left + side] = True
    return mask


def peak_beside(distance: int, **options: object) -> float:
    """A peak at the corner of 32 × 32, one pixel of object so far away."""
    maps = torch.zeros(1, 32, 32)
    maps[0, 0, 0] = 1
    masks = torch.zeros(1, 32, 32, dtype=torch.bool)
    masks[0, 0, distance] = True
    inside = ",".join(f"{key}={value}" for key, value in options.items())
    return float(values(f"pointing-game({inside})" if inside else "pointing-game", case_of(maps, masks=masks, size=32)))


@pytest.mark.parametrize(("distance", "hit"), [(14, 1.0), (15, 0.0), (16, 0.0)])
def test_the_tolerance_is_strict(distance: int, hit: float) -> None:
    assert peak_beside(distance) == hit
    assert peak_beside(distance, preset="torchray") == hit
    assert peak_beside(distance, preset="coporan") == 0


def test_tolerance_is_a_circle_and_nothing_is_the_mask_itself() -> None:
    mask = torch.zeros(40, 40, dtype=torch.bool)
    mask[20, 20] = True
    near = dilate(mask, 15)
    rows, cols = torch.meshgrid(torch.arange(40), torch.arange(40), indexing="ij")
    assert near.equal((rows - 20) ** 2 + (cols - 20) ** 2 < 15**2)
    assert dilate(mask, 0).equal(mask)
    assert dilate(torch.zeros_like(mask), 15).any().item() is False
    assert (peak_beside(0, tolerance=0), peak_beside(1, tolerance=0)) == (1, 0), "0 hits on the mask, and only there"
    assert (peak_beside(0, tolerance=1), peak_beside(1, tolerance=1)) == (1, 0)
    with pytest.raises(BadInput, match=r"tolerance=-1 was given"):
        peak_beside(0, tolerance=-1)


TIES = {"share": "constant=luck", "any": "preset=quantus", "first": "preset=coporan", "first too": "preset=torchray"}


@pytest.mark.parametrize(
    ("ties", "expected"), [("share", [1 / 3, 2 / 3]), ("any", [1, 1]), ("first", [0, 1]), ("first too", [0, 1])]
)
def test_several_highest_points(ties: str, expected: list[float]) -> None:
    maps = torch.zeros(2, SIZE, SIZE)
    maps[:, [0, 5, 9], [3, 5, 9]] = 1
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    masks[0, 5, 5] = True
    masks[1, :6, :6] = True
    assert values(f"pointing-game({TIES[ties]},tolerance=0)", case_of(maps, masks=masks))[0].tolist() == pytest.approx(
        expected
    )


@pytest.mark.parametrize("ties", TIES)
def test_a_constant_map_scores_as_a_random_point(ties: str) -> None:
    context = case_of(torch.ones(3, 4, 4), masks=square(0, 0, 8))
    assert values(f"pointing-game({TIES[ties]},tolerance=0)", context)[0].tolist() == [0.25] * 3
    dilated = float(dilate(square(0, 0, 8)[0], 3).double().mean())
    assert values(f"pointing-game({TIES[ties]},tolerance=3)", context)[0].tolist() == pytest.approx([dilated] * 3)
    assert values("pointing-game(constant=nan)", context).isnan().all()
    assert values("pointing-game(constant=nan)", case_of(noise(), masks=square(0, 0, 8))).isfinite().all()


def test_quantus_calls_an_empty_mask_a_hit() -> None:
    masks = square(0, 0, 8)
    masks[1] = False
    context = case_of(noise(), masks=masks)
    assert values("pointing-game(compat=quantus)", context)[0, 1] == 1
    assert values("pointing-game", context)[0, 1].isnan()
    broken = noise()
    broken[1, 0, 0] = math.nan
    assert values("pointing-game(compat=quantus)", case_of(broken, masks=masks))[0, 1].isnan()


def test_uniform_maps_score_the_area() -> None:
    """The score of a random map: FAF and mass are the area."""
    context = case_of(torch.ones(3, 4, 4), masks=square(0, 0, 8))
    for name in ("faf", "faf(overlap=soft)", "faf(overlap=nearest)", "relevance-mass", "energy-pointing-game"):
        assert values(name, context).tolist() == [[pytest.approx(0.25)] * 3], name
    for name in ("relevance-rank", "top-k(k=10)", "ap"):
        assert values(name, context).tolist() == [[pytest.approx(0.25)] * 3], name
    assert values("roc-auc", context).tolist() == [[pytest.approx(0.5)] * 3]
    odd = case_of(torch.ones(3, 4, 4), masks=square(1, 2, 7))
    area = float(square(1, 2, 7)[0].double().mean())
    assert values("faf(overlap=soft)", odd)[0].tolist() == pytest.approx([area] * 3)
    void = square(7, 5, 9)
    with_void = case_of(torch.ones(3, 4, 4), masks=square(1, 2, 7), void=void)
    for overlap in ("area", "nearest", "soft"):
        for context in (odd, with_void):
            assert values(f"faf(lift=true,overlap={overlap})", context).tolist() == [[pytest.approx(1.0)] * 3]
    area = float((square(1, 2, 7) & ~void)[0].sum() / (~void)[0].sum())
    assert values("faf(overlap=soft)", with_void)[0].tolist() == pytest.approx([area] * 3)


def test_mass_by_hand() -> None:
    maps = torch.tensor([[[3.0, -1.0], [1.0, -2.0]]], dtype=torch.float64)
    masks = torch.tensor([[[True, True], [False, False]]])
    context = case_of(maps, masks=masks, size=2)
    assert float(values("relevance-mass", context)) == 3 / 4
    assert float(values("relevance-mass(compat=quantus)", context)) == 2 / 1
    assert float(values("relevance-mass(preset=quantus-attribution-localisation)", context)) == 4 / 7
    assert float(values("energy-pointing-game", context)) == 3 / 4
    corners = torch.tensor([[[True, False], [False, True]]])
    assert float(values("energy-pointing-game", case_of(maps, masks=corners, size=2))) == 3 / 4
    assert float(values("energy-pointing-game(box=true)", case_of(maps, masks=corners, size=2))) == 1


def test_no_positive_value_has_no_share() -> None:
    context = case_of(-noise().abs(), masks=square(2, 2, 6))
    for name in ("relevance-mass", "energy-pointing-game", "faf", "baf"):
        assert values(name, context).isnan().all(), name


def test_void_pixels_count_nowhere() -> None:
    """The map is highest on void pixels; with them left out all of it lies on the object."""
    maps = torch.zeros(1, SIZE, SIZE, dtype=torch.float64)
    maps[0, :8, :8], maps[0, 8:, 8:] = 1, 5
    masks, void = square(0, 0, 8, 1), square(8, 8, 8, 1)
    with_void, without = case_of(maps, masks=masks, void=void), case_of(maps, masks=masks)
    for name in (
        "pointing-game(tolerance=0)",
        "relevance-mass",
        "energy-pointing-game",
        "relevance-rank",
        "top-k(k=20)",
        "ap",
        "roc-auc",
        "faf",
        "faf(overlap=soft)",
        "faf(overlap=nearest)",
    ):
        assert float(values(name, with_void)) == pytest.approx(1), name
        assert float(values(name, without)) < 0.9, name
    assert float(values("baf", with_void)) == 0
    box = masks | square(12, 12, 1, 1)
    metric_values = values("energy-pointing-game(box=true)", case_of(maps, masks=box, void=void))
    assert float(metric_values) == 1, "the box is of the object that counts"


def test_a_void_object_is_no_object() -> None:
    masks = square(4, 4, 4)
    for name in ("pointing-game", "top-k", "relevance-rank", "energy-pointing-game", "faf", "baf", "iou", "ap"):
        assert values(name, case_of(noise().abs(), masks=masks, void=masks.clone())).isnan().all(), name


def test_when_a_patch_is_foreground() -> None:
    """One patch of 4 × 4 pixels a case: (object, void) pixels from the first on."""
    objects, counts = torch.zeros(1, 4, 20, dtype=torch.bool), torch.ones(1, 4, 20, dtype=torch.bool)
    for patch, (inside, void) in enumerate([(8, 0), (7, 0), (7, 2), (4, 8), (6, 9)]):
        cells = torch.arange(16).reshape(4, 4)
        objects[0, :, 4 * patch : 4 * patch + 4] = cells < inside
        counts[0, :, 4 * patch : 4 * patch + 4] = cells < 16 - void
    area, valid = patch_foreground(objects, counts, (1, 5), "area")
    assert area[0, 0].tolist() == [1, 0, 1, 1, 0]
    assert valid[0, 0].tolist() == [1, 1, 1, 1, 0], "more void than not: left out"
    soft, part = patch_foreground(objects, counts, (1, 5), "soft")
    assert soft[0, 0].tolist() == [8 / 16, 7 / 16, 7 / 16, 4 / 16, 6 / 16]
    assert part[0, 0].tolist() == [1, 1, 14 / 16, 8 / 16, 7 / 16]
    near, _ = patch_foreground(objects, counts, (1, 5), "nearest")
    middle = objects[0, 2, 2::4].double()
    assert near[0, 0].tolist() == middle.tolist()


def test_both_fractions_are_one() -> None:
    context = case_of(noise(), masks=square(1, 2, 9))
    for overlap in ("area", "nearest", "soft"):
        first, second = (values(f"{name}(overlap={overlap})", context) for name in ("faf", "baf"))
        assert torch.allclose(first + second, torch.ones(1, 3, dtype=torch.float64))
    assert resolve_metric("baf").better == "lower"
