"""Ranked maps by their definition, one threshold at a time, and cut maps by closed form (METRICS 3.3, 6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext
from clairvit.metrics.registry import find_metric, resolve_metric
from helpers.eval_contexts import case_of, values
from helpers.rounding import assert_same

SIZE = 16


def noise(batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = torch.zeros(3, SIZE, SIZE, dtype=torch.bool)
MASK[:, 2:9, 3:10] = True
VOID = torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(4)) < 0.3


def slowly(maps: np.ndarray, mask: np.ndarray, name: str) -> float:
    """The definitions, one threshold at a time."""
    if name == "roc-auc":
        on, off = maps[mask], maps[~mask]
        return float(((on[:, None] > off).sum() + 0.5 * (on[:, None] == off).sum()) / (len(on) * len(off)))
    total, last = 0.0, 0.0
    for edge in sorted(set(maps.ravel()), reverse=True):
        chosen = maps >= edge
        recall, precision = (chosen & mask).sum() / mask.sum(), (chosen & mask).sum() / chosen.sum()
        total += (recall - last) * precision
        last = recall
    return float(total)


@pytest.mark.parametrize("void", [None, VOID])
@pytest.mark.parametrize("name", ["ap", "roc-auc"])
def test_ranked_metrics_are_their_definition(name: str, void: Tensor | None) -> None:
    context = case_of(noise(), noise(seed=1), masks=MASK, void=void)
    metric_values = values(name, context)
    for method, maps in enumerate(context.pixel_maps("nearest")):
        for image in range(3):
            keep = torch.ones_like(MASK[0]) if void is None else ~void[image]
            expected = slowly(maps[image][keep].numpy(), MASK[image][keep].numpy(), name)
            assert float(metric_values[method, image]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("threshold", ["half", "mean", "otsu"])
def test_the_ap_of_a_cut_map_has_one_threshold(threshold: str) -> None:
    """Recall · precision, and what is left of the recall at the precision of taking all."""
    from clairvit.metrics.localisation import binarise

    context = case_of(noise(), masks=MASK)
    (maps,) = context.pixel_maps("nearest")
    binary = binarise(maps, threshold)[0]
    expected = []
    for cut, mask in zip(binary, MASK, strict=True):
        both = int((cut & mask).sum())
        recall, precision = both / int(mask.sum()), both / int(cut.sum())
        expected.append(recall * precision + (1 - recall) * float(mask.double().mean()))
    assert values(f"ap(on=binary,threshold={threshold})", context)[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert not torch.allclose(values("ap", context), values(f"ap(on=binary,threshold={threshold})", context), atol=1e-3)
    both = values(f"ap(preset=chefer,on=binary,threshold={threshold},upsampling=nearest)", context)[0]
    for cut, mask, score in zip(binary, MASK, both, strict=True):
        pooled = slowly(torch.cat([~cut, cut]).double().numpy(), torch.cat([~mask, mask]).numpy(), "ap")
        assert float(score) == pytest.approx(pooled, abs=1e-12)


def test_skipplus_ranks_patches_as_squares() -> None:
    context = case_of(noise(), masks=MASK)
    assert values("ap(preset=skipplus)", context).equal(values("ap(upsampling=nearest)", context))
    assert not torch.allclose(
        values("ap(preset=skipplus)", context), values("ap(upsampling=bicubic)", context), atol=1e-3
    )
    assert torch.allclose(values("ap", context), values("ap", case_of(5 + 3 * noise(), masks=MASK)), atol=1e-12)
    assert "mAP" in str(find_metric("ap").function.__doc__)


@pytest.mark.parametrize("void", [None, VOID])
@pytest.mark.parametrize("k", [1, 40, 10**6])
def test_the_highest_pixels_by_sorting(k: int, void: Tensor | None) -> None:
    maps = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    context = case_of(maps, masks=MASK, void=void)
    for image in range(3):
        keep = torch.ones_like(MASK[0]) if void is None else ~void[image]
        hit = MASK[image][keep][maps[image][keep].argsort(descending=True)]
        area = int((MASK[image] & keep).sum())
        assert float(values(f"top-k(k={k})", context)[0, image]) == pytest.approx(float(hit[:k].double().mean()))
        assert float(values("relevance-rank", context)[0, image]) == pytest.approx(float(hit[:area].double().mean()))


def test_ties_for_the_last_place_count_in_part() -> None:
    maps = torch.zeros(1, 4, 4, dtype=torch.float64)
    maps[0, 0, 0] = 1
    masks = torch.zeros(1, 4, 4, dtype=torch.bool)
    masks[0, 0] = True
    context = case_of(maps, masks=masks, size=4)
    assert float(values("relevance-rank", context)) == pytest.approx((1 + 3 * 3 / 15) / 4)
    assert float(values("top-k(k=2)", context)) == pytest.approx((1 + 3 / 15) / 2)


def test_no_pixels_at_all_are_refused() -> None:
    with pytest.raises(BadInput, match=r"k=0 was given"):
        resolve_metric("top-k(k=0)")(case_of(noise(), masks=MASK))


@pytest.mark.parametrize("name", ["ap", "roc-auc", "relevance-rank", "top-k(k=20)", "pointing-game(tolerance=0)"])
def test_round_off_of_upsampling_breaks_no_ties(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bilinear weights need not add up to exactly 1; a plateau that they make is one value all the same.

    Whether there is round-off depends on the machine, so that one unit in the last place is added here.
    """
    masks = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    masks[0, 1:6, 2:9] = True
    maps = torch.full((1, 3, 3), 0.1, dtype=torch.float64)
    maps[0, 2] = 0.3 - 0.1  # two plateaus, of which the lower third has the second
    context = case_of(maps, masks=masks)
    (fine,) = context.pixel_maps("bilinear")
    ulps = torch.arange(SIZE * SIZE, dtype=torch.float64).reshape(1, SIZE, SIZE) % 3 - 1  # −1, 0, 1
    rough = fine * (1 + torch.finfo(torch.float64).eps * ulps)
    assert not torch.equal(rough, fine)
    text = f"{name[:-1]},upsampling=bilinear)" if name.endswith(")") else f"{name}(upsampling=bilinear)"
    expected = values(text, case_of(fine.round(decimals=6), masks=masks))
    monkeypatch.setattr(EvalContext, "pixel_maps", lambda context, upsampling: iter([rough]))
    assert_same(values(text, context), expected)


@pytest.mark.parametrize("name", ["ap", "roc-auc", "relevance-rank(upsampling=nearest)"])
def test_small_differences_count_where_nothing_was_computed(name: str) -> None:
    """A heavy tail: most values differ by less than a billionth of the range."""
    tail = 1e-12 * torch.arange(16.0, dtype=torch.float64).reshape(1, 4, 4)
    spread = torch.arange(16.0, dtype=torch.float64).reshape(1, 4, 4)
    tail[0, 0, 0] = spread[0, 0, 0] = 100
    first, second = (values(name, case_of(maps, masks=MASK[:1])) for maps in (tail, spread))
    assert torch.equal(first, second)
