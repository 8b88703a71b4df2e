"""preset=quantus against Quantus 0.6.0 itself (tests/parity/make_quantus_faithfulness.py), on a CNN and a ViT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.registry import find_metric
from parity.faithfulness_cases import MODELS, RUNS, SEED, SQUARES, STEP, TARGETS, dyadic, maps_of, photos

FIXTURE = np.load(Path(__file__).parent.parent / "fixtures" / "quantus_faithfulness.npz")
CLOSE = 1e-9


def scored(name: str, metric: str, only: int | None = None, maps: Tensor | None = None, **more: Any) -> cv.Score:
    """Both images at once, or `only` one of them."""
    module, images = photos(name)
    rows = slice(None) if only is None else slice(only, only + 1)
    model = cv.wrap(module, name=name, size=(int(images.shape[-2]), int(images.shape[-1])))
    ex = cv.explain(model, images[rows], "random", target=TARGETS[rows])
    ex = replace(ex, maps=(maps_of(images) if maps is None else maps)[rows])
    score = cv.evaluate(model, images[rows], ex, metric, seed=SEED, **more)
    assert isinstance(score, cv.Score)
    return score


@pytest.mark.parametrize("name", MODELS)
def test_faithfulness_correlation_with_quantus_draws(name: str) -> None:
    ours = scored(name, "faithfulness-correlation(compat=quantus)")
    assert ours.values.numpy() == pytest.approx(FIXTURE[f"{name} correlation"], abs=CLOSE)
    assert ours.cost.forwards == 50, "100 passes, shared with the centre map"
    fewer = scored(name, "faithfulness-correlation(preset=quantus)", runs=RUNS, subset=100)
    assert fewer.values.numpy() == pytest.approx(FIXTURE[f"{name} correlation of 30"], abs=CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_an_image_has_the_same_draws_in_any_batch(name: str) -> None:
    alone = scored(name, "faithfulness-correlation(preset=quantus)", only=1)
    assert alone.values.numpy() == pytest.approx(FIXTURE[f"{name} correlation"][1:], abs=CLOSE)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("what", "score"), [("flipping", "prob"), ("flipping logits", "logit")])
def test_pixel_flipping(name: str, what: str, score: str) -> None:
    """Quantus' own default is the probability, and its curve has no point for the whole image."""
    options = {} if score == "prob" else {"score": score}
    ours = scored(name, "deletion(preset=quantus)", at_once=STEP[name], **options)
    theirs = FIXTURE[f"{name} {what}"]
    assert ours.curve is not None
    assert ours.curve.y.shape == theirs.shape
    assert np.abs(ours.curve.y.numpy() - theirs).max() < CLOSE
    area = theirs.sum(1) - (theirs[:, 0] + theirs[:, -1]) / 2  # what np.trapz with dx = 1 says
    assert ours.values.numpy() == pytest.approx(area, abs=1e-7)
    assert ours.better == "lower"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", ["morf", "lerf", "random"])
def test_region_perturbation(name: str, order: str) -> None:
    """Squares that fit and squares that stick out; the drop after each, and the area under them."""
    for what, options in ((order, {"region": SQUARES[name]}), (f"{order} of 5", {"region": 4, "regions": 5})):
        ours = scored(name, "aopc(preset=quantus)", order=order, **options)
        theirs = FIXTURE[f"{name} {what}"]
        assert ours.curve is not None
        assert ours.curve.y.shape == theirs.shape
        assert np.abs(ours.curve.y.numpy() - theirs).max() < CLOSE
        assert ours.values.numpy() == pytest.approx(theirs.sum(1) - (theirs[:, 0] + theirs[:, -1]) / 2, abs=CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_faithfulness_estimate(name: str) -> None:
    ours = scored(name, "faithfulness-estimate(preset=quantus)", at_once=STEP[name])
    assert ours.values.numpy() == pytest.approx(FIXTURE[f"{name} estimate"], abs=CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_infidelity(name: str) -> None:
    ours = scored(name, "infidelity(preset=quantus)")
    assert ours.values.numpy() == pytest.approx(FIXTURE[f"{name} infidelity"], rel=CLOSE)
    assert np.array_equal(FIXTURE[f"{name} infidelity"], FIXTURE[f"{name} infidelity of one"]), "its repeats are alike"
    with pytest.raises(BadInput, match="region=7 was given for images"):
        scored(name, "infidelity(preset=quantus)", region=7)


@pytest.mark.parametrize("name", MODELS)
def test_completeness_is_next_to_never_exact(name: str) -> None:
    ours = scored(name, "completeness(preset=quantus)")
    assert ours.values.tolist() == FIXTURE[f"{name} complete"].tolist() == [0, 0]
    assert ours.better == "higher"


def test_completeness_empties_the_first_channel_only() -> None:
    """The map adds up to what the first channel gives; the second gives more, and ours says so."""
    module, image, maps = dyadic()
    layout = cv.Layout((2, 2), 0, "avg")
    model = cv.wrap(module, name="sums", size=(8, 8), layout=layout, mean=(0, 0, 0), std=(1, 1, 1))
    ex = replace(cv.explain(model, image, "random", target=0), maps=maps)
    assert cv.evaluate(model, image, ex, "completeness(preset=quantus)").mean == FIXTURE["dyadic complete"][0] == 1
    scaled = replace(ex, maps=maps * 4)
    assert cv.evaluate(model, image, scaled, "completeness(preset=quantus)").mean == 1, "divided by the largest"
    other = replace(ex, maps=maps + 2**-10)
    assert cv.evaluate(model, image, other, "completeness(preset=quantus)").mean == 0
    patches = replace(ex, maps=torch.full((1, 2, 2), 4.0))
    assert cv.evaluate(model, image, patches, "completeness").mean == pytest.approx(8 / 24)


@pytest.mark.parametrize("name", MODELS)
def test_quantus_calls_every_map_monotone(name: str) -> None:
    """The reason why there is no such preset: a map and its opposite cannot both rise at every step."""
    assert FIXTURE[f"{name} monotone 1"].all()
    assert FIXTURE[f"{name} monotone -1"].all()
    assert not find_metric("monotonicity").presets
    shares = [scored(name, "monotonicity", maps=sign * maps_of(photos(name)[1])).values for sign in (1, -1)]
    assert all((share < 1).all() for share in shares)
