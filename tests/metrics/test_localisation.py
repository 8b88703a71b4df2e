"""Localisation by hand, by scikit-learn's definitions written out, and at the edges (METRICS 0, 8)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from clairvit.metrics.localisation import within
from clairvit.metrics.metric import ask, metrics
from clairvit.metrics.threshold import otsu
from metric_cases import case_of

SIZE = 16
ALL = [metric.name for metric in metrics() if metric.family == "localisation"]


def noise(batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def square(top: int, left: int, side: int, batch: int = 3) -> Tensor:
    mask = torch.zeros(batch, SIZE, SIZE, dtype=torch.bool)
    mask[:, top : top + side, left : left + side] = True
    return mask


MASK = square(2, 3, 7)


def slowly(values: np.ndarray, mask: np.ndarray, name: str) -> float:
    """The definitions, one threshold at a time."""
    if name == "roc-auc":
        on, off = values[mask], values[~mask]
        return float(((on[:, None] > off).sum() + 0.5 * (on[:, None] == off).sum()) / (len(on) * len(off)))
    total, last = 0.0, 0.0
    for edge in sorted(set(values.ravel()), reverse=True):
        chosen = values >= edge
        recall, precision = (chosen & mask).sum() / mask.sum(), (chosen & mask).sum() / chosen.sum()
        total += (recall - last) * precision
        last = recall
    return float(total)


@pytest.mark.parametrize("name", ["ap", "roc-auc"])
def test_ranked_metrics_are_their_definition(name: str) -> None:
    case = case_of(noise(), noise(seed=1), masks=MASK)
    found = ask(name)(case)
    for method, maps in enumerate(case.fine("nearest")):
        for image in range(3):
            expected = slowly(maps[image].numpy(), MASK[image].numpy(), name)
            assert float(found[method, image]) == pytest.approx(expected, abs=1e-12)


def test_thresholded_metrics_by_hand() -> None:
    """A map that is 1 on the upper half, an object in the left half of 16 × 16."""
    maps = torch.zeros(1, 4, 4, dtype=torch.float64)
    maps[:, :2] = 1
    masks = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    masks[:, :, :8] = True
    case = case_of(maps, masks=masks)
    near = "upsampling=nearest"
    assert float(ask(f"pixel-accuracy({near})")(case)) == 0.5
    assert float(ask(f"iou({near})")(case)) == pytest.approx(1 / 3)
    assert float(ask(f"iou({near},classes=two)")(case)) == pytest.approx(1 / 3)
    assert float(ask(f"f1({near})")(case)) == 0.5
    assert float(ask(f"relevance-mass({near})")(case)) == 0.5
    assert float(ask("faf")(case)) == 0.5
    assert float(ask("baf")(case)) == 0.5
    void = torch.zeros_like(masks)
    void[:, 8:] = True
    assert float(ask(f"iou({near})")(case_of(maps, masks=masks, void=void))) == 0.5


def test_uniform_maps_score_the_area() -> None:
    """What luck gets: FAF and mass are the area, and a constant map points nowhere in particular."""
    masks = square(0, 0, 8)
    case = case_of(torch.ones(3, 4, 4), masks=masks)
    for name in ("faf", "faf(overlap=soft)", "relevance-mass", "energy-pointing-game", "relevance-rank", "top-k(k=10)"):
        assert ask(name)(case).tolist() == [[pytest.approx(0.25)] * 3], name
    assert ask("faf(lift=true)")(case).tolist() == [[pytest.approx(1.0)] * 3]
    assert ask("pointing-game(tolerance=0)")(case).tolist() == [[pytest.approx(0.25)] * 3]
    assert ask("roc-auc")(case).tolist() == [[pytest.approx(0.5)] * 3]
    assert ask("ap")(case).tolist() == [[pytest.approx(0.25)] * 3]


@pytest.mark.parametrize(("distance", "hit"), [(14, 1.0), (15, 0.0), (16, 0.0)])
def test_the_tolerance_is_strict(distance: int, hit: float) -> None:
    maps = torch.zeros(1, 32, 32)
    maps[0, 0, 0] = 1
    masks = torch.zeros(1, 32, 32, dtype=torch.bool)
    masks[0, 0, distance] = True
    assert float(ask("pointing-game")(case_of(maps, masks=masks, size=32))) == hit
    assert within(masks[0], 0).equal(masks[0])


@pytest.mark.parametrize("name", ALL)
def test_an_empty_mask_is_undefined_and_a_full_one_is_not_an_error(name: str) -> None:
    masks = MASK.clone()
    masks[1] = False
    found = ask(name)(case_of(noise().abs(), masks=masks))
    assert math.isnan(found[0, 1])
    assert found[0, [0, 2]].isfinite().all()
    full = ask(name)(case_of(noise().abs(), masks=torch.ones_like(MASK)))
    assert full.isnan().all() if name == "roc-auc" else full.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_batch_of_three_equals_three_of_one(name: str) -> None:
    together = ask(name)(case_of(noise(), masks=MASK))
    for image in range(3):
        alone = ask(name)(case_of(noise()[image : image + 1], masks=MASK[image : image + 1]))
        assert float(together[0, image]) == pytest.approx(float(alone), abs=1e-12)


def test_otsu_splits_two_heaps() -> None:
    dice = torch.Generator().manual_seed(0)
    heaps = torch.cat([0.2 + 0.03 * torch.randn(500, generator=dice), 0.8 + 0.03 * torch.randn(300, generator=dice)])
    assert 0.3 < float(otsu(heaps.clamp(0, 1))) < 0.7
