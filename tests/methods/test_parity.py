"""The authors' own code, run once on a tiny seeded model (tests/parity), against ours: the same numbers.

Where a preset reproduces a mistake or a habit of public code, the fixture is what proves that it does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import open_clip.transformer
import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import clairvit as cv
from helpers.rounding import assert_same
from parity.tiny_vit import CLASSES, DEPTH, HEADS, PATCH, SIDE, TARGET, WIDTH, image, seeded, weights

FIXTURES = Path(__file__).parent.parent / "fixtures"


@functools.cache
def tiny() -> cv.Model:
    module = VisionTransformer(SIDE, PATCH, 3, CLASSES, "token", WIDTH, DEPTH, HEADS, 2.0).double().eval()
    module.load_state_dict(weights(module))
    return cv.wrap(module, size=(SIDE, SIDE))


@functools.cache
def fixture(name: str) -> Mapping[str, Tensor]:
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(value).double() for key, value in arrays.items()}


def assert_parity(ours: Tensor, theirs: Tensor, **bound: Any) -> None:
    """Assert that both codes, run in float64, give the same numbers up to rounding."""
    assert_same(ours.flatten(), theirs.flatten(), **bound)


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.flatten() - theirs.flatten()).abs().max() / theirs.abs().max())


def mapped(method: str) -> Tensor:
    return cv.explain(tiny(), image(), method, target=TARGET).maps


def test_the_tiny_model_is_the_one_they_ran() -> None:
    assert_parity(tiny().module(image()).detach(), fixture("tam_genatt")["logits"])


@pytest.mark.parametrize("ratio", [0.0, 0.9])
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_rollout_of_vit_explain(fusion: str, ratio: float) -> None:
    ours = mapped(f"rollout(preset=jacobgil,fusion={fusion},discard_ratio={ratio})")
    assert_parity(ours / ours.max(), fixture("vit_explain")[f"rollout-{fusion}-{ratio}"])


@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_gradient_rollout_of_vit_explain(ratio: float) -> None:
    """Its gradients come from the other end of the network and from before the softmax; right ones give another map."""
    theirs = fixture("vit_explain")[f"grad-rollout-{ratio}"]
    ours = mapped(f"grad-rollout(preset=jacobgil,discard_ratio={ratio})")
    assert_parity(ours / ours.max(), theirs)
    for mended in ("gradient=attention", "reversed_gradients=false"):
        ours = mapped(f"grad-rollout(preset=jacobgil,discard_ratio={ratio},{mended})")
        assert apart(ours / ours.max(), theirs) > 1e-2


TAM_GENATT = {
    "tam": "tam",
    "tam-from-0": "tam(start_layer=0,steps=5)",
    "tam-no-integral": "tam(with_integral=false)",
    "tam-first-state": "tam(first_state=true)",
    "genatt": "genatt",
}


@pytest.mark.parametrize("key", TAM_GENATT)
def test_tam_and_genatt_of_their_authors(key: str) -> None:
    assert_parity(mapped(TAM_GENATT[key]), fixture("tam_genatt")[key])


def test_ag_cam_of_its_authors() -> None:
    """Their ViT detaches the input of every attention; the gradient of the whole network is another map."""
    theirs = fixture("ag_cam")
    assert_parity(mapped("ag-cam(preset=official)"), theirs["ag-cam"])
    assert_parity(mapped("ag-cam(preset=official,head_fusion=mean)"), theirs["ag-cam-mean-heads"])
    assert apart(mapped("ag-cam"), theirs["ag-cam"]) > 1e-2


@pytest.mark.parametrize("fused", [True, False])
def test_ag_cam_official_is_the_same_for_fused_and_explicit_attention(fused: bool) -> None:
    module = tiny().module
    for block in module.blocks:
        block.attn.fused_attn = fused
    assert_parity(mapped("ag-cam(preset=official)"), fixture("ag_cam")["ag-cam"])


@pytest.mark.parametrize(("key", "method"), [("legrad-2", "legrad(preset=official)"), ("legrad0", "legrad")])
def test_legrad_of_its_authors(key: str, method: str) -> None:
    """On an open_clip tower, for a text: from the last but one layer on (their default), and from the first."""
    module = open_clip.transformer.VisionTransformer(SIDE, PATCH, WIDTH, DEPTH, HEADS, 2.0, output_dim=10)
    module = module.double().eval()
    module.load_state_dict(weights(module))
    prompt = F.normalize(seeded({"prompt": (1, 10)}, seed=2)["prompt"], dim=-1)
    model = cv.wrap(module, size=(SIDE, SIDE), classifier=False)
    ours = cv.explain(model, image(), method, target=lambda out: (F.normalize(out, dim=-1) * prompt).sum(-1)).maps
    shown = F.interpolate(ours[None], scale_factor=PATCH, mode="bilinear")
    shown = (shown - shown.min()) / (shown.max() - shown.min())
    assert_parity(
        shown, fixture("legrad")[key], dtype=torch.float32, growth=2
    )  # computed in float64, stored in float32
