"""preset=quantus against Quantus 0.6.0 itself (tests/parity/make_quantus_maps.py), on a tiny ViT and a small CNN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.metrics.registry import resolve_metric
from helpers.eval_contexts import case_of, values
from parity.peers_models import TARGETS, vit
from parity.small_cnn import small_cnn

FIXTURE = np.load(Path(__file__).parent.parent / "fixtures" / "quantus_maps.npz")
MAPS, MASKS = torch.from_numpy(FIXTURE["maps"]), torch.from_numpy(FIXTURE["masks"])
SEED = 42  # Quantus's own
SAMPLES = 12
METHOD = "ixg(level=pixel)"
KINDS = ["vit", "cnn"]

OF_MODELS = {
    "max-sensitivity": f"max-sensitivity(compat=quantus,samples={SAMPLES})",
    "avg-sensitivity": f"avg-sensitivity(compat=quantus,samples={SAMPLES})",
    "local-lipschitz": f"local-lipschitz(compat=quantus,samples={SAMPLES})",
    "local-lipschitz manhattan": f"local-lipschitz(compat=quantus,samples={SAMPLES},distance=manhattan)",
    "relative-stability input": f"relative-stability(compat=quantus,samples={SAMPLES})",
    "relative-stability output": f"relative-stability(compat=quantus,samples={SAMPLES},of=output)",
    "relative-stability input kept": f"relative-stability(compat=quantus,samples={SAMPLES},changed=keep)",
    "relative-stability output kept": f"relative-stability(compat=quantus,samples={SAMPLES},of=output,changed=keep)",
    "random-logit": "random-logit(compat=quantus)",
    "efficient-mprt": "efficient-mprt(compat=quantus)",
}
OF_MAPS = {
    "sparseness": "sparseness(compat=quantus)",
    "complexity": "complexity(compat=quantus)",
    "effective-complexity": "effective-complexity(compat=quantus)",
    "roc-auc": "roc-auc(compat=quantus)",
    "pointing-game": "pointing-game(compat=quantus)",
    "relevance-mass": "relevance-mass(compat=quantus)",
    "relevance-rank": "relevance-rank(compat=quantus)",
    "top-k": "top-k(compat=quantus,k=50)",
    "attribution-localisation": "relevance-mass(preset=quantus-attribution-localisation)",
    "energy-pointing-game": "energy-pointing-game",
}


def given(kind: str) -> tuple[cv.Model, Tensor]:
    module, images = vit() if kind == "vit" else small_cnn()
    return cv.wrap(module, name=kind, size=tuple(images.shape[-2:])), images


def scored(kind: str, text: str, rows: slice = slice(None), seed: int = SEED, **options: object) -> cv.Score:
    model, images = given(kind)
    score = cv.evaluate(model, images[rows], METHOD, text, target=TARGETS[rows], seed=seed, **options)
    assert isinstance(score, cv.Score)
    return score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OF_MODELS)
def test_metrics_that_ask_the_model(name: str, kind: str) -> None:
    score = scored(kind, OF_MODELS[name])
    assert score.values.tolist() == pytest.approx(FIXTURE[f"{kind} {name}"].tolist(), rel=1e-8, nan_ok=True)


def test_a_changed_prediction_is_nan_in_quantus() -> None:
    theirs = FIXTURE["cnn relative-stability input"]
    assert np.isnan(theirs).tolist() == [True, False]
    left = scored("cnn", f"relative-stability(compat=quantus,samples={SAMPLES},changed=leave)").values
    kept = FIXTURE["cnn relative-stability input kept"]
    assert float(left[1]) == pytest.approx(kept[1], rel=1e-8), "no copy of it changes"
    assert float(left[0]) <= kept[0] * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["bottom-up", "top-down"])
def test_smooth_mprt_step_by_step(order: str, kind: str) -> None:
    score = scored(kind, "smooth-mprt(compat=quantus,samples=4)", order=order)
    theirs = FIXTURE[f"{kind} smooth-mprt {order.replace('-', '_')}"]
    assert score.curve is not None
    assert score.curve.y.shape == theirs.shape
    assert np.abs(score.curve.y.numpy() - theirs).max() < 1e-9
    average = FIXTURE[f"{kind} smooth-mprt {order.replace('-', '_')} average"]
    assert score.values.tolist() == pytest.approx(average.tolist(), abs=1e-9)
    assert (theirs[:, 0] < 1 - 1e-6).all(), "new noise: the original does not resemble itself fully"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["top-down", "bottom-up", "independent"])
def test_mprt_step_by_step(order: str, kind: str) -> None:
    """The whole batch of the ViT is in test_parity_mprt; here image by image, and the CNN."""
    score = scored(kind, "mprt(compat=quantus)", order=order)
    theirs = FIXTURE[f"{kind} mprt {order.replace('-', '_')}"]
    assert score.curve is not None
    assert score.curve.y.shape == theirs.shape
    assert np.abs(score.curve.y.numpy() - theirs).max() < 1e-9
    assert score.values.tolist() == pytest.approx(theirs.mean(1).tolist(), abs=1e-9), "with the original"


def test_an_image_draws_the_same_in_any_batch() -> None:
    for name in ("max-sensitivity", "relative-stability output", "random-logit"):
        alone = scored("vit", OF_MODELS[name], slice(1, 2))
        assert float(alone.values) == pytest.approx(float(FIXTURE[f"vit {name}"][1]), rel=1e-8)
        other = scored("vit", OF_MODELS[name], seed=SEED + 1)
        assert not np.allclose(other.values.numpy(), FIXTURE[f"vit {name}"], rtol=1e-4), "the seed is used"


@pytest.mark.parametrize("name", OF_MAPS)
def test_metrics_of_maps_alone(name: str) -> None:
    context = case_of(MAPS, masks=MASKS, size=MAPS.shape[-1])
    (actual,) = values(OF_MAPS[name], context)
    # Quantus adds 1e-9 to the sum of maps over their largest value, in AttributionLocalisation only.
    assert actual.tolist() == pytest.approx(FIXTURE[name].tolist(), rel=1e-9)


def test_presets_differ_from_our_defaults_where_quantus_does() -> None:
    context = case_of(MAPS, masks=MASKS, size=MAPS.shape[-1])
    for name in ("sparseness", "complexity", "pointing-game", "relevance-mass"):
        assert not values(name, context).equal(values(OF_MAPS[name], context)), name
    assert FIXTURE["pointing-game of an empty mask"].tolist() == [1]
    empty = case_of(MAPS[:1], masks=torch.zeros_like(MASKS[:1]), size=MAPS.shape[-1])
    assert values("pointing-game(compat=quantus)", empty).tolist() == [[1]]
    assert values("pointing-game", empty).isnan().all()


def test_quantus_scales_a_batch_together_and_we_do_not() -> None:
    """Image 0 times 1e4 changes what Quantus says of the others; given one by one they are as ours."""
    large = MAPS * torch.tensor([1e4, 1, 1, 1])[:, None, None]
    (ours,) = values("effective-complexity(compat=quantus)", case_of(large, masks=MASKS, size=MAPS.shape[-1]))
    assert ours.tolist() == FIXTURE["effective-complexity"].tolist()
    theirs = FIXTURE["effective-complexity of the batch"]
    assert theirs[0] == ours[0]
    assert (theirs[1:] < ours[1:].numpy()).all()


def test_two_hundred_copies_are_quantus_default() -> None:
    for name in ("max-sensitivity", "avg-sensitivity", "local-lipschitz", "relative-stability"):
        assert dict(resolve_metric(f"{name}(compat=quantus)").options)["samples"] == 200
    assert dict(resolve_metric("smooth-mprt(compat=quantus)").options)["samples"] == 50
