"""Forward decompositions beside the authors' own code (tests/parity/make_forward.py), on a post-norm ViT like BERT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from helpers.custom_vits import WIDTH
from helpers.post_norm_model import picture, post_norm
from helpers.rounding import assert_same

REFERENCE = np.load(Path(__file__).parent.parent / "fixtures" / "forward.npz")
OURS = {
    "attin": "attin(preset=official)",
    "attin_residual": "attin-residual(value_bias=true)",
    "attin_residual_ln": "attin-residual(preset=official)",
    "globenc": "globenc(preset=official)",
    "alti": "alti(preset=official)",
}


def assert_parity(name: str, actual: Tensor, expected: Tensor) -> None:
    """Assert equality up to rounding: the authors' code was run in float64.

    ALTI's code measures with torch.nn.functional.pairwise_distance, which adds 1e-6 to each of the channels.
    """
    if name == "alti":
        assert float((actual.flatten() - expected).abs().max()) <= 1e-6 * WIDTH
    else:
        assert_same(actual.flatten(), expected)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("layer", [0, 1])
def test_each_layer(name: str, layer: int) -> None:
    maps = cv.explain(cv.wrap(post_norm()), picture(), f"{OURS[name]}+layer:{layer}").maps
    assert_parity(name, maps, torch.from_numpy(REFERENCE[name])[layer, 1:])


@pytest.mark.parametrize("name", ["globenc", "alti"])
def test_product_of_layers(name: str) -> None:
    maps = cv.explain(cv.wrap(post_norm()), picture(), OURS[name]).maps
    assert_parity(name, maps, torch.from_numpy(REFERENCE[f"{name}_product"])[1:])


@pytest.mark.parametrize("sharing", ["absdot", "abssim", "norm", "equal", "cls"])
@pytest.mark.parametrize("target", [0, 4])
def test_decompx_with_biases(sharing: str, target: int) -> None:
    """Without a value bias in the first layer: their code leaves that one with the key, ours shares it like any."""
    model = cv.wrap(post_norm(first_value_bias=False))
    maps = cv.explain(model, picture(), f"decompx(bias={sharing})", target=target).maps
    assert_parity("decompx", maps, torch.from_numpy(REFERENCE[f"decompx_{sharing}"])[1:, target])
