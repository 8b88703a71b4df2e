"""NAOPC: bounds in closed form for an additive model, by all orders for a ViT; its passes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.metrics.normalised_aopc import passes
from clairvit.metrics.registry import resolve_metric
from helpers.linear_patch_model import effects, linear
from helpers.reference_token_dropping import logits_left
from helpers.rounding import assert_same
from helpers.tiny_models import double

ADDITIVE = {"removal": "mean", "score": "logit"}


def area(drops: list[float]) -> float:
    """The sum of what is missing after 1, …, n − 1 parts are gone, one by one."""
    return math.fsum(itertools.accumulate(drops[:-1]))


@pytest.mark.parametrize("order", ["morf", "lerf"])
@pytest.mark.parametrize("beam", [1, 5])
def test_bounds_of_an_additive_model_are_its_effects_in_order(beam: int, order: str) -> None:
    model, image = linear((4, 4))
    parts = effects(model, image, 1)
    ex = cv.explain(model, image, "random", target=1)
    listed = parts.flatten().tolist()
    high, low = area(sorted(listed, reverse=True)), area(sorted(listed))
    ranked = ex.maps.flatten().argsort(descending=order == "morf").tolist()
    score = cv.evaluate(model, image, ex, "naopc", cells=None, beam=beam, order=order, **ADDITIVE)
    assert_same(score.values[0], (area([listed[k] for k in ranked]) - low) / (high - low), magnitude=2.0)
    assert 0.05 < float(score.values[0]) < 0.95, "a case that says something"
    for maps, value in ((parts, 1.0), (-parts, 0.0)):
        best = cv.evaluate(model, image, replace(ex, maps=maps[None]), "naopc", cells=None, beam=beam, **ADDITIVE)
        assert_same(best.values[0], value, magnitude=1.0)


def test_cells_are_removed_whole_and_ordered_by_their_sum() -> None:
    model, image = linear((4, 4))
    of_cells = effects(model, image, 2).reshape(2, 2, 2, 2).sum((1, 3)).flatten().tolist()
    ex = cv.explain(model, image, "random", target=2)
    sums = ex.maps[0].double().reshape(2, 2, 2, 2).sum((1, 3)).flatten()
    high, low = area(sorted(of_cells, reverse=True)), area(sorted(of_cells))
    expected = (area([of_cells[k] for k in sums.argsort(descending=True).tolist()]) - low) / (high - low)
    score = cv.evaluate(model, image, ex, "naopc", cells=2, **ADDITIVE)
    assert_same(score.values[0], expected, magnitude=2.0)


Drops = dict[frozenset[int], float]


def drops_by_hand(model: cv.Model, image: Tensor, target: int) -> Drops:
    """What is missing of the probability without each set of 2 × 2 cells, tokens left out by hand."""
    cells = [[4 * (2 * r + i) + 2 * c + j for i in range(2) for j in range(2)] for r in range(2) for c in range(2)]

    def probability(gone: tuple[int, ...]) -> float:
        kept = sorted(patch for k in range(4) if k not in gone for patch in cells[k])
        return float(logits_left(model.module, image, torch.tensor([kept])).softmax(-1)[0, target])

    whole = probability(())
    sets = [gone for count in range(1, 4) for gone in itertools.combinations(range(4), count)]
    return {frozenset(gone): whole - probability(gone) for gone in sets}


def area_of(order: tuple[int, ...], drops: Drops) -> float:
    return math.fsum(drops[frozenset(order[:k])] for k in range(1, 4))


def test_bounds_of_a_vit_are_those_of_all_orders() -> None:
    model, images = double("timm-vit", 2)
    ex = cv.explain(model, images, "ixg", target=3)
    score = cv.evaluate(model, images, ex, "naopc", cells=2, beam=24, baselines=False)
    for row in range(2):
        drops = drops_by_hand(model, images[row : row + 1], 3)
        areas = [area_of(order, drops) for order in itertools.permutations(range(4))]
        sums = ex.maps[row].reshape(2, 2, 2, 2).sum((1, 3)).flatten()
        chosen = area_of(tuple(sums.argsort(descending=True).tolist()), drops)
        low, high = min(areas), max(areas)
        assert_same(score.values[row], (chosen - low) / (high - low), magnitude=1 / (high - low))
    assert score.cost.forwards == 3 + 2**4 - 2, "the map's own curve, and every set but none and all, once"
    assert score.cost.forwards <= passes(16, 2, 24).forwards


def test_a_map_that_does_better_than_the_search_is_the_bound() -> None:
    """A beam of one is greedy, which is not always best."""
    model, images = double("timm-vit", 60)
    beaten = 0
    for image in images.split(1):
        drops = drops_by_hand(model, image, 3)
        best = max(itertools.permutations(range(4)), key=lambda order: area_of(order, drops))
        greedy: tuple[int, ...] = ()
        while len(greedy) < 3:
            left = [k for k in range(4) if k not in greedy]
            greedy = (*greedy, max(left, key=lambda k: drops[frozenset((*greedy, k))]))
        if area_of(greedy, drops) > area_of(best, drops) - 1e-9 or beaten == 2:
            continue
        beaten += 1
        ranks = torch.tensor([4.0 - best.index(k) for k in range(4)], dtype=torch.float64).reshape(2, 2)
        maps = ranks.repeat_interleave(2, 0).repeat_interleave(2, 1)[None]
        ex = replace(cv.explain(model, image, "random", target=3), maps=maps)
        score = cv.evaluate(model, image, ex, "naopc", cells=2, beam=1, baselines=False)
        assert float(score.values[0]) == 1
        wider = cv.evaluate(model, image, ex, "naopc", cells=2, beam=24, baselines=False)
        assert_same(wider.values[0], 1.0, magnitude=1.0)
    assert beaten


def test_undefined_where_all_orders_cost_the_same() -> None:
    model, image = linear((4, 4))
    flat = torch.ones_like(image)
    with torch.no_grad():
        model.module.weights.fill_(1.0)  # type: ignore[union-attr, operator]
    score = cv.evaluate(model, flat, "random", "naopc", target=1, cells=2, baselines=False, **ADDITIVE)
    assert score.values.isnan().all()
    assert resolve_metric("naopc(order=lerf)").better == "lower"
