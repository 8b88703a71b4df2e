"""Faithfulness on linear models, where the best map is known and every number can be added up by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.faithfulness import pearson
from clairvit.metrics.metric import metrics
from linear import effects, linear
from tiny import pixels, wrapped

LINEAR: dict[str, Any] = {"score": "logit", "removal": "mean"}
FAMILY = [metric for metric in metrics() if metric.family == "faithfulness"]
NAMES = [metric.name for metric in FAMILY]


def of_map(maps: Tensor, metric: str, grid: tuple[int, int] = (6, 6), **more: Any) -> cv.Score:
    model, image = linear(grid, 4)
    ex = replace(cv.explain(model, image, "random", target=1), maps=maps[None])
    found = cv.evaluate(model, image, ex, metric, **(LINEAR | more))
    assert isinstance(found, cv.Score)
    return found


ORACLE = effects(*linear((6, 6), 4), 1)
LUCK = cv.explain(*linear((6, 6), 4), "random", target=1).maps[0]
CORRELATIONS = ["faithfulness-correlation", "sensitivity-n", "faithfulness-estimate"]


@pytest.mark.parametrize("name", CORRELATIONS)
def test_effects_correlate_fully_and_their_opposite_the_other_way(name: str) -> None:
    assert of_map(ORACLE, name).mean == pytest.approx(1, abs=1e-6)
    assert of_map(3 * ORACLE, name).mean == pytest.approx(1, abs=1e-6), "whatever the scale"
    assert of_map(-ORACLE, name).mean == pytest.approx(-1, abs=1e-6)
    assert abs(of_map(LUCK, name).mean) < 0.6
    assert math.isnan(of_map(torch.ones(6, 6), name).mean), "a constant map says nothing"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("monotonicity", "completeness", "irof")])
def test_the_best_map_beats_luck_beats_the_worst(name: str) -> None:
    best, luck, worst = (of_map(maps, name).mean for maps in (ORACLE, LUCK, -ORACLE))
    lower = next(metric for metric in FAMILY if metric.name == name).better == "lower"
    assert (best < luck < worst) if lower else (best > luck > worst)


def test_a_map_that_adds_up_is_complete() -> None:
    assert of_map(ORACLE, "completeness").mean == pytest.approx(0, abs=1e-5)
    assert of_map(2 * ORACLE, "completeness").mean == pytest.approx(1, abs=1e-5)
    assert of_map(torch.zeros(6, 6), "completeness").mean == pytest.approx(1, abs=1e-5)


def test_monotonicity_counts_the_steps_that_rise() -> None:
    """Groups that add something raise the score, groups that take away do not: added up by hand."""
    ascending = ORACLE.flatten().sort().values
    sums = torch.stack([ascending[: round(k * 36 / 10)].sum() for k in range(1, 11)])
    expected = (sums[1:] >= sums[:-1]).double().mean()
    assert of_map(ORACLE, "monotonicity").mean == pytest.approx(float(expected))
    assert 0 < float(expected) < 1


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


def test_insertion_minus_deletion_is_just_that() -> None:
    parts = [of_map(LUCK, name).mean for name in ("insertion", "deletion")]
    assert of_map(LUCK, "insertion-deletion").mean == pytest.approx(parts[0] - parts[1], abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_its_images_one_by_one_whatever_the_batch_size(name: str) -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 3)
    together = cv.evaluate(model, images, "genatt", name, target=3)
    small = cv.evaluate(model, images, "genatt", name, target=3, batch_size=5)
    assert torch.allclose(together.values, small.values, atol=1e-4, equal_nan=True)
    for row in range(3):
        alone = cv.evaluate(model, images[row : row + 1], "genatt", name, target=3)
        assert float(together.values[row]) == pytest.approx(float(alone.values), abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("name", ["faithfulness-correlation", "sensitivity-n"])
def test_methods_share_the_passes_that_do_not_depend_on_the_map(name: str) -> None:
    model, image = linear((6, 6), 4)
    alone = cv.evaluate(model, image, "saliency", name, target=1, **LINEAR)
    beside = cv.evaluate(
        model, image, ["saliency", "random", "center", "occlusion(window=2)"], [name], target=1, **LINEAR
    )
    assert len(beside) == 4
    assert sum(score.cost.forwards for score in beside.values()) <= alone.cost.forwards * 3 + 4, "100 for all of them"
    assert beside["saliency", alone.metric].values.tolist() == pytest.approx(alone.values.tolist(), abs=1e-9)


def test_pearson_is_numpys() -> None:
    a, b = torch.randn(2, 5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row in range(5):
        assert float(pearson(a[row], b[row])) == pytest.approx(
            float(torch.corrcoef(torch.stack([a[row], b[row]]))[0, 1])
        )


def test_options_that_make_no_sense_are_refused() -> None:
    for text, said in [
        ("faithfulness-correlation(subset=1.5)", "subset=1.5 was given; expected a part"),
        ("faithfulness-correlation(runs=1)", "runs=1 was given; expected 3 or more"),
        ("monotonicity(steps=1)", "steps=1 was given; expected 2 or more"),
    ]:
        with pytest.raises(BadInput, match=said):
            of_map(ORACLE, text)
