"""mprt(preset=quantus) against Quantus 0.6.0 itself (tests/parity/make_quantus_mprt.py), step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import clairvit as cv
from clairvit.metrics.randomisation import can_reset
from parity.peers_models import TARGETS, vit

FIXTURE = np.load(Path(__file__).parent.parent / "fixtures" / "quantus_mprt.npz")
SEED = 42  # Quantus's own
METHOD = "ixg(level=pixel)"
ORDERS = ["top-down", "bottom-up", "independent"]


@pytest.mark.parametrize("order", ORDERS)
def test_every_step_and_the_average_are_quantus(order: str) -> None:
    module, images = vit()
    model = cv.wrap(module, name="tiny", size=tuple(images.shape[-2:]))
    score = cv.evaluate(model, images, METHOD, "mprt(preset=quantus)", target=TARGETS, seed=SEED, order=order)
    theirs = order.replace("-", "_")
    assert score.curve.y.shape == FIXTURE[theirs].shape
    assert np.abs(score.curve.y.numpy() - FIXTURE[theirs]).max() < 1e-9
    assert score.values.numpy() == pytest.approx(FIXTURE[f"{theirs} average"], abs=1e-9)


def test_the_average_counts_the_original_and_ours_does_not() -> None:
    curve = FIXTURE["top_down"]
    assert curve[:, 0] == pytest.approx(1, abs=1e-12)
    assert FIXTURE["top_down average"] == pytest.approx(curve.mean(1))
    module, images = vit()
    model = cv.wrap(module, name="tiny", size=tuple(images.shape[-2:]))
    score = cv.evaluate(model, images, METHOD, "mprt(preset=quantus,original=false)", target=TARGETS, seed=SEED)
    assert score.values.numpy() == pytest.approx(curve[:, 1:].mean(1), abs=1e-9)
    assert score.curve.x[0] > 0


def test_quantus_names_the_modules_we_reset() -> None:
    module, _ = vit()
    names = [name for name, part in module.named_modules() if can_reset(part)]
    assert ["original", *names] == list(FIXTURE["bottom_up names"])
    assert not {"", "patch_embed"} & set(names), "cls_token and pos_embed are nobody's who can reset"


def test_another_seed_is_another_model() -> None:
    module, images = vit()
    model = cv.wrap(module, name="tiny", size=tuple(images.shape[-2:]))
    score = cv.evaluate(model, images, METHOD, "mprt(preset=quantus)", target=TARGETS, seed=SEED + 1)
    assert not torch.allclose(score.values, torch.as_tensor(FIXTURE["top_down average"]), atol=1e-3)
