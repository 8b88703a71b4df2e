"""AOPC, comprehensiveness and sufficiency on linear models, where every drop can be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from linear import effects, linear
from tiny import pixels, wrapped

MODEL, IMAGE = linear((6, 6), 4)
ORACLE = effects(MODEL, IMAGE, 1)
LUCK = cv.explain(MODEL, IMAGE, "random", target=1).maps[0]


def of_map(maps: Tensor, metric: str, **more: Any) -> cv.Score:
    ex = replace(cv.explain(MODEL, IMAGE, "random", target=1), maps=maps[None])
    found = cv.evaluate(MODEL, IMAGE, ex, metric, **({"score": "logit", "removal": "mean"} | more))
    assert isinstance(found, cv.Score)
    return found


def test_aopc_by_hand() -> None:
    falls = ORACLE.flatten().sort(descending=True).values.cumsum(0)[:20]
    expected = torch.cat([torch.zeros(1), falls]).mean()
    score = of_map(ORACLE, "aopc(regions=20)")
    assert score.mean == pytest.approx(float(expected), abs=1e-5)
    assert score.cost.forwards == 20
    least = ORACLE.flatten().sort().values.cumsum(0)[:20]
    assert of_map(ORACLE, "aopc(regions=20,order=lerf)").mean == pytest.approx(float(least.sum() / 21), abs=1e-5)
    anyhow = [of_map(maps, "aopc(order=random)").mean for maps in (ORACLE, LUCK)]
    assert anyhow[0] == pytest.approx(anyhow[1]), "any order is no map's own"


def test_comprehensiveness_and_sufficiency_by_hand() -> None:
    falling = ORACLE.flatten().sort(descending=True).values
    counts = [max(1, round(q * 36)) for q in (0.01, 0.05, 0.1, 0.2, 0.5)]
    gone = torch.stack([falling[:k].sum() for k in counts])
    assert of_map(ORACLE, "comprehensiveness").mean == pytest.approx(float(gone.mean()), abs=1e-5)
    assert of_map(ORACLE, "sufficiency").mean == pytest.approx(float((falling.sum() - gone).mean()), abs=1e-5)


def test_squares_of_pixels_are_patches_where_they_have_their_size() -> None:
    """Squares of four pixels are this model's patches; the last one may go too, and the area is under the drops."""
    falls = ORACLE.flatten().sort(descending=True).values.cumsum(0).double()
    score = of_map(ORACLE, "aopc(region=4,upsampling=nearest)")
    assert score.curve is not None
    assert score.curve.y[0].tolist() == pytest.approx([0, *falls.tolist()], abs=1e-5)
    assert score.curve.x.tolist() == pytest.approx([k / 36 for k in range(37)])
    under = of_map(ORACLE, "aopc(region=4,upsampling=nearest,area=trapezoid)")
    assert under.mean == pytest.approx(float(falls.sum() - (falls[0] + falls[-1]) / 2), abs=1e-4)
    half = of_map(ORACLE, "aopc(region=12,regions=1,upsampling=nearest,area=trapezoid)")
    quarters = ORACLE.reshape(2, 3, 2, 3).sum((1, 3))
    assert half.curve is not None
    assert float(half.curve.y) == pytest.approx(float(quarters.max()), abs=1e-5)


def test_a_random_order_is_nobody_s_and_of_the_seed() -> None:
    for own in ("", ",region=8", ",region=8,draws=quantus"):
        first, again = (of_map(maps, f"aopc(order=random{own})").mean for maps in (ORACLE, LUCK))
        assert first == pytest.approx(again)
        assert of_map(ORACLE, f"aopc(order=random{own})", seed=1).mean != pytest.approx(first, abs=1e-6)


def test_quantus_regions_are_the_same_in_any_batch() -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 3)
    for order in ("morf", "lerf", "random"):
        text = f"aopc(preset=quantus,order={order})"
        together = cv.evaluate(model, images, "ixg", text, target=3)
        for row in range(3):
            alone = cv.evaluate(model, images[row : row + 1], "ixg", text, target=3)
            assert float(together.values[row]) == pytest.approx(float(alone.values), abs=1e-5)


def test_regions_that_make_no_sense_are_refused() -> None:
    for text, said in [
        ("aopc(region=25)", "Squares of 25 × 25 pixels were asked for; expected a side of 1 to 24"),
        ("aopc(regions=0)", "regions=0 was given; expected 1 or more"),
    ]:
        with pytest.raises(BadInput, match=said):
            of_map(ORACLE, text)
    model, images = wrapped("timm-vit"), pixels("timm-vit", 1)
    with pytest.raises(BadInput, match="removal=token, which takes whole patches"):
        cv.evaluate(model, images, "ixg", "aopc(region=8)", target=3)
