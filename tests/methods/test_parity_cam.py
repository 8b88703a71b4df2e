"""The same numbers as pytorch-grad-cam and captum, on the same seeded models (tests/parity/make_grad_cam.py)."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import clairvit as cv
from helpers.rounding import assert_same, growth
from parity.peers_models import CAMS, STAGES, STEPS, TARGETS, resnet, vit

FIXTURES = Path(__file__).parent.parent / "fixtures"
pytestmark = pytest.mark.filterwarnings("ignore:.*its ReLU keeps what speaks for the target")
MODELS = {"vit": vit, "resnet": resnet}


@functools.cache
def stored(file: str) -> dict[str, Tensor]:
    with np.load(FIXTURES / file) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@functools.cache
def ready(kind: str) -> tuple[cv.Model, Tensor]:
    module, pixels = MODELS[kind]()
    return cv.wrap(module), pixels


def agree(actual: Tensor, theirs: Tensor) -> None:
    assert actual.shape == theirs.shape
    assert theirs.flatten(1).std(1).min() > 0
    assert_same(actual, theirs, dtype=torch.float32, growth=growth(depth=2, width=64))


def ours(kind: str, name: str, **options: object) -> Tensor:
    model, pixels = ready(kind)
    return cv.explain(model, pixels, name, target=TARGETS, **options).maps


@pytest.mark.parametrize("name", CAMS)
def test_cam_family_on_a_vit_is_that_of_pytorch_grad_cam(name: str) -> None:
    """At blocks[-1].norm1, patch tokens on their grid, before the ReLU."""
    theirs = stored("grad_cam.npz")[f"vit {name}"]
    if name != "gradcam-elementwise":  # whose ReLU comes before the sum
        agree(ours("vit", name, relu=False), theirs)
    agree(ours("vit", name).clamp(min=0), theirs.clamp(min=0))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CAMS)
def test_cam_family_on_a_resnet_is_that_of_pytorch_grad_cam(name: str, stage: str) -> None:
    theirs = stored("grad_cam.npz")[f"{stage} {name}"]
    options: dict[str, object] = {} if name == "gradcam-elementwise" else {"relu": False}
    agree(ours("resnet", name, layer=STAGES[stage], **options), theirs)


def thinned(kind: str, maps: Tensor) -> Tensor:
    """The ResNet's images are stored at every third pixel."""
    return maps[:, ::3, ::3] if kind == "resnet" else maps


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("saliency(level=pixel)", "saliency"),
        (f"integrated-gradients(steps={STEPS},rule=gauss,level=pixel)", "gauss"),
        (f"integrated-gradients(steps={STEPS},rule=right,level=pixel)", "right"),
        ("smoothgrad(n=1,sigma=0,base=ixg,level=pixel)", "ixg"),  # no noise: gradient × input, pixel by pixel
    ],
)
def test_pixel_maps_are_those_of_captum(kind: str, name: str, theirs: str) -> None:
    agree(thinned(kind, ours(kind, name)), stored("captum.npz")[f"{kind} {theirs}"])


def test_gradient_x_input_of_a_patch_is_the_sum_of_captums_pixels() -> None:
    pixels = stored("captum.npz")["vit ixg"]  # [B, 12, 20] on a 3 × 5 grid
    agree(ours("vit", "ixg(level=pixel)"), pixels.unflatten(1, (3, 4)).unflatten(3, (5, 4)).sum((2, 4)))
