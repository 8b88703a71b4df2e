"""Which channel values go, and in which order: counted on the images that the model gets to see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.compat.quantus import numpy_subsets
from clairvit.errors import BadInput
from clairvit.metrics.pixel_ranking import pixel_ranks, square_ranks, squares, value_ranks
from helpers.eval_contexts import case_of
from helpers.linear_patch_model import linear
from helpers.rounding import assert_same
from helpers.tiny_models import pixels, wrapped


def grey() -> tuple[cv.Model, Tensor, Tensor]:
    """A linear model, a grey image, and what each pixel's every channel value adds to the score: a map [1, H, W]."""
    model, image = linear((6, 6), 4)
    image = image[:, :1].expand(-1, 3, -1, -1).contiguous()
    weights = model.module.weights[1].detach().repeat_interleave(4, 0).repeat_interleave(4, 1)
    return model, image, (image[:, 0] * weights / 48)


def scored(maps: Tensor, metric: str, **more: Any) -> cv.Score:
    model, image, _ = grey()
    score = cv.evaluate(model, image, replace(cv.explain(model, image, "random", target=1), maps=maps), metric, **more)
    assert isinstance(score, cv.Score)
    return score


VALUES: dict[str, Any] = {"preset": "quantus", "removal": "mean"}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("faithfulness-correlation", {"subset": 50}),
        ("faithfulness-correlation", {"subset": 0.3}),
        ("faithfulness-estimate", {"at_once": 48}),
        ("faithfulness-estimate", {"at_once": 100}),
    ],
)
def test_the_effects_of_single_values_correlate_fully(name: str, more: dict[str, Any]) -> None:
    """Also where the last group has fewer values than the others."""
    *_, truth = grey()
    assert_same(scored(truth, name, **VALUES, **more).mean, 1)
    assert_same(scored(-3 * truth, name, **VALUES, **more).mean, -1)
    assert scored(torch.ones_like(truth), name, **VALUES, **more).n_valid == 0


def seen_by(model: cv.Model, images: Tensor, metric: str, **more: Any) -> Tensor:
    """Everything the model is shown while maps that are there already are scored, [n, 3, H, W]."""
    ex = cv.explain(model, images, "ixg", target=3)
    shown: list[Tensor] = []
    handle = model.module.patch_embed.register_forward_pre_hook(lambda module, args: shown.append(args[0].clone()))
    cv.evaluate(model, images, ex, metric, **more)
    handle.remove()
    return torch.cat(shown)


def test_so_many_values_of_each_image_become_its_minimum() -> None:
    model, images = wrapped("timm-vit"), pixels("timm-vit", 2)
    text = "faithfulness-correlation(preset=quantus,subset=7,runs=5)"
    sets: dict[int, list[frozenset[int]]] = {0: [], 1: []}
    for shown in seen_by(model, images, text):
        changed = [(shown != image).flatten() for image in images]
        image = 0 if int(changed[0].sum()) <= 7 else 1
        if not changed[image].any():
            continue  # the image itself
        assert set(shown.flatten()[changed[image]].tolist()) == {float(images[image].min())}
        sets[image].append(frozenset(changed[image].nonzero()[:, 0].tolist()))
    assert all(len(runs) == 5 and len(set(runs)) == 5 for runs in sets.values()), "five runs, no map asks for its own"
    assert all(len(places) in (6, 7) for runs in sets.values() for places in runs), "the minimum itself may be drawn"
    assert sets[0] == sets[1], "Quantus, alone with an image, draws the same for each"


def test_no_value_is_drawn_twice_and_all_can_be() -> None:
    drawn = numpy_subsets(0, 200, 48, 10)
    assert drawn.shape == (200, 10)
    assert all(len(set(run.tolist())) == 10 for run in drawn)
    assert set(drawn.flatten().tolist()) == set(range(48))
    assert not torch.equal(numpy_subsets(0, 3, 48, 10), numpy_subsets(1, 3, 48, 10))
    assert torch.equal(numpy_subsets(-1, 3, 48, 10), numpy_subsets(2**32 - 1, 3, 48, 10)), "numpy takes 32 bits"


def test_the_values_of_a_pixel_follow_one_another() -> None:
    maps = torch.rand(1, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    context = case_of(*maps, size=5)
    places, values = pixel_ranks(context, "nearest"), value_ranks(context, "nearest").reshape(1, 2, 3, 25)
    assert torch.equal(places[0].argsort(), maps[0].flatten(1).argsort(descending=True))
    assert torch.equal(values // 3, places[:, :, None].expand(-1, -1, 3, -1))
    assert sorted(values[0, 0].flatten().tolist()) == list(range(75))


def test_ties_are_broken_in_a_random_order_of_the_seed() -> None:
    orders = {
        tuple(pixel_ranks(case_of(torch.zeros(1, 2, 2), size=4, seed=k), "nearest")[0, 0].tolist()) for k in (0, 1)
    }
    assert len(orders) == 2
    ranks = {
        tuple(square_ranks(case_of(torch.zeros(1, 2, 2), size=4, seed=k), 2, "nearest")[0][0, 0].tolist())
        for k in range(9)
    }
    assert len(ranks) > 3


def test_squares_stick_out_at_both_ends() -> None:
    """Five pixels in squares of three: one is added, at the far end; in squares of four: three, one before."""
    context = case_of(torch.zeros(1, 5, 5), size=5)
    regions, count = squares(context, 3)
    assert (regions.reshape(5, 5)[0].tolist(), count) == ([0, 0, 0, 1, 1], 4)
    regions, count = squares(context, 4)
    assert (regions.reshape(5, 5)[:, 0].tolist(), count) == ([0, 0, 0, 2, 2], 4)
    maps = torch.zeros(1, 5, 5)
    maps[0, 4, 0], maps[0, 0, 0] = 2, 1
    rank, _ = square_ranks(case_of(maps, size=5), 3, "nearest")
    assert rank[0, 0, 2] == 0
    assert rank[0, 0, 0] == 1
    with pytest.raises(BadInput, match="Squares of 6 × 6 pixels were asked for; expected a side of 1 to 5"):
        squares(context, 6)


def test_methods_share_the_copies() -> None:
    model, image, _ = grey()
    methods = ["saliency", "random", "center", "ixg"]
    scores = cv.evaluate(model, image, methods, ["faithfulness-correlation(preset=quantus)"], target=1)
    assert sum(score.cost.forwards for score in scores.values()) <= 104, "100 passes for all of them"
