"""AOPC, comprehensiveness and sufficiency on linear models, where every drop can be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same
from helpers.tiny_models import double, pixels, wrapped

MODEL, IMAGE = linear((6, 6), 4)
ORACLE = effects(MODEL, IMAGE, 1)
TOTAL = float(ORACLE.abs().sum())  # the size of what the sums below add up
RANDOM = cv.explain(MODEL, IMAGE, "random", target=1).maps[0]


def of_map(maps: Tensor, metric: str, **more: Any) -> cv.Score:
    ex = replace(cv.explain(MODEL, IMAGE, "random", target=1), maps=maps[None])
    score = cv.evaluate(MODEL, IMAGE, ex, metric, **({"score": "logit", "removal": "mean"} | more))
    assert isinstance(score, cv.Score)
    return score


def test_aopc_by_hand() -> None:
    falls = ORACLE.flatten().sort(descending=True).values.cumsum(0)[:20]
    expected = falls.sum() / 21
    score = of_map(ORACLE, "aopc(regions=20)")
    assert_same(score.mean, expected, magnitude=TOTAL)
    assert score.cost.forwards == 20
    least = ORACLE.flatten().sort().values.cumsum(0)[:20]
    assert_same(of_map(ORACLE, "aopc(regions=20,order=lerf)").mean, least.sum() / 21, magnitude=TOTAL)
    anyhow = [of_map(maps, "aopc(order=random)").mean for maps in (ORACLE, RANDOM)]
    assert_same(anyhow[0], anyhow[1], magnitude=TOTAL, label="any order is no map's own")


def test_comprehensiveness_and_sufficiency_by_hand() -> None:
    falling = ORACLE.flatten().sort(descending=True).values
    counts = [max(1, round(q * 36)) for q in (0.01, 0.05, 0.1, 0.2, 0.5)]
    gone = torch.stack([falling[:k].sum() for k in counts])
    assert_same(of_map(ORACLE, "comprehensiveness").mean, gone.mean(), magnitude=TOTAL)
    assert_same(of_map(ORACLE, "sufficiency").mean, (falling.sum() - gone).mean(), magnitude=TOTAL)


def test_squares_of_pixels_are_patches_where_they_have_their_size() -> None:
    """Squares of four pixels are this model's patches; the last one may go too, and the area is under the drops."""
    falls = ORACLE.flatten().sort(descending=True).values.cumsum(0)
    score = of_map(ORACLE, "aopc(region=4,upsampling=nearest)")
    assert score.curve is not None
    assert_same(score.curve.y[0], [0, *falls.tolist()], magnitude=TOTAL)
    assert score.curve.x.tolist() == pytest.approx([k / 36 for k in range(37)])
    under = of_map(ORACLE, "aopc(preset=quantus,region=4,upsampling=nearest)")
    assert_same(under.mean, falls.sum() - (falls[0] + falls[-1]) / 2, magnitude=36 * TOTAL)
    half = of_map(ORACLE, "aopc(preset=quantus,region=12,regions=1,upsampling=nearest)")
    quarters = ORACLE.reshape(2, 3, 2, 3).sum((1, 3))
    assert half.curve is not None
    assert_same(half.curve.y.flatten(), quarters.max()[None], magnitude=TOTAL)


def test_a_random_order_is_nobody_s_and_of_the_seed() -> None:
    for options in ("", ",region=8", ",preset=quantus"):
        first, again = (of_map(maps, f"aopc(order=random{options})").mean for maps in (ORACLE, RANDOM))
        assert_same(first, again, magnitude=TOTAL)
        assert of_map(ORACLE, f"aopc(order=random{options})", seed=1).mean != pytest.approx(first, abs=1e-6)


def test_quantus_regions_are_the_same_in_any_batch() -> None:
    model, images = double("timm-vit", 3)
    for order in ("morf", "lerf", "random"):
        text = f"aopc(preset=quantus,order={order})"
        together = cv.evaluate(model, images, "ixg", text, target=3)
        for row in range(3):
            alone = cv.evaluate(model, images[row : row + 1], "ixg", text, target=3)
            assert_same(together.values[row], alone.values[0], magnitude=float(together.curve.y.abs().sum()))


def test_regions_that_make_no_sense_are_refused() -> None:
    for text, message in [
        ("aopc(region=25)", "Squares of 25 × 25 pixels were asked for; expected a side of 1 to 24"),
        ("aopc(regions=0)", "regions=0 was given; expected 1 or more"),
    ]:
        with pytest.raises(BadInput, match=message):
            of_map(ORACLE, text)
    model, images = wrapped("timm-vit"), pixels("timm-vit", 1)
    with pytest.raises(BadInput, match="removal=token, which takes whole patches"):
        cv.evaluate(model, images, "ixg", "aopc(region=8)", target=3)
