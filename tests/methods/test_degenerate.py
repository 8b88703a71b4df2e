"""Every registered method where there is little to see: no NaN, finite maps, and a zero map comes with its reason."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import ClairWarning
from clairvit.methods.explanation import Comparison
from helpers.exact_models import CLASSES, randomised
from helpers.method_conditions import METHODS, short
from helpers.tiny_models import cnn, strange

TARGET = 2
POOLINGS = {"token": True, "avg": False}  # and whether there is a class token
EVERY = [short(name) for name in METHODS]
SIGNED_FORM = [f"{name}(relu=false)" if method.relu else short(name) for name, method in METHODS.items()]


def vit_of(pooling: str, *, depth: int = 3, grid: tuple[int, int] = (3, 2), zero_head: bool = False) -> nn.Module:
    module = VisionTransformer(
        img_size=(4 * grid[0], 4 * grid[1]),
        patch_size=4,
        embed_dim=24,
        num_heads=3,
        mlp_ratio=2,
        depth=depth,
        num_classes=CLASSES,
        global_pool=pooling,
        class_token=POOLINGS[pooling],
    )
    module = randomised(module.eval(), seed=7)
    if zero_head:
        nn.init.zeros_(module.head.weight)
        nn.init.zeros_(module.head.bias)
    return module


def noise(module: nn.Module) -> Tensor:
    size = module.patch_embed.img_size
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(next(module.parameters()).dtype)


@dataclass(frozen=True)
class Case:
    """A model, images for it, whether its score has a gradient at all, and whether masks change the images."""

    make: Callable[[str], nn.Module]
    images: Callable[[nn.Module], Tensor] = field(default=noise)
    speaks: bool = True
    shows: bool = True


CASES = {
    "constant image": Case(vit_of, lambda module: torch.full_like(noise(module), 0.4)),
    "black image": Case(vit_of, lambda module: torch.zeros_like(noise(module)), shows=False),
    "zero head": Case(functools.partial(vit_of, zero_head=True), speaks=False),
    "one token": Case(functools.partial(vit_of, grid=(1, 1))),
    "one token of a constant image": Case(
        functools.partial(vit_of, grid=(1, 1)), lambda module: torch.full_like(noise(module), -1.0)
    ),
    "one row": Case(functools.partial(vit_of, grid=(1, 5))),
    "one layer": Case(functools.partial(vit_of, depth=1)),
    "one layer, one token": Case(functools.partial(vit_of, depth=1, grid=(1, 1))),
    "two layers": Case(functools.partial(vit_of, depth=2)),
    "five layers": Case(functools.partial(vit_of, depth=5)),
    "bfloat16": Case(lambda pooling: vit_of(pooling).bfloat16()),
    "bfloat16, zero head, constant image": Case(
        lambda pooling: vit_of(pooling, zero_head=True).bfloat16(),
        lambda module: torch.full_like(noise(module), 0.4),
        speaks=False,
    ),
}


@functools.cache
def swept(case: str, pooling: str) -> tuple[Comparison, tuple[str, ...], tuple[int, int]]:
    module = CASES[case].make(pooling)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [*EVERY, *SIGNED_FORM]
        comparison = cv.compare(cv.wrap(module), CASES[case].images(module), names, target=TARGET, skip=True)
    warned = tuple(str(w.message) for w in caught if issubclass(w.category, ClairWarning))
    return comparison, warned, module.patch_embed.grid_size


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("case", CASES)
def test_maps_are_finite_and_on_the_grid(case: str, pooling: str) -> None:
    comparison, _, grid = swept(case, pooling)
    undefined = {
        name
        for name, method in METHODS.items()
        if method.requirements().poolings and pooling not in method.requirements().poolings
    }
    assert {name.partition("(")[0] for name in comparison.skipped} == undefined
    for name, explanation in comparison.items():
        assert explanation.maps.shape == (2, *grid), name
        assert explanation.maps.dtype == torch.float32, name
        assert explanation.maps.isfinite().all(), name


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("case", CASES)
def test_a_zero_map_comes_with_its_reason(case: str, pooling: str) -> None:
    """In a warning and in the notes, which are stored with the map; no other map is warned about."""
    comparison, warned, grid = swept(case, pooling)
    for name, explanation in comparison.items():
        reasons = [
            note
            for note in explanation.notes
            if "is zero everywhere: " in note or "does not depend on the target" in note
        ]
        method = METHODS[name.partition("(")[0]]
        if not explanation.maps.flatten(1).any(1).all() and not (
            method.passes == "none" and CASES[case].speaks is False
        ):
            assert reasons, name
        assert set(reasons) <= set(warned), name
        if CASES[case].speaks and explanation.maps.flatten(1).any(1).all():
            masks_nothing = not CASES[case].shows and method.options.get("removal") == "mean"
            # A part that is all there is, or blurring what has one colour, may change nothing either.
            may_change_nothing = "removal" in method.options and (not CASES[case].shows or grid == (1, 1))
            assert bool(reasons) == masks_nothing or may_change_nothing, name


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_head_of_zeros_is_named(pooling: str) -> None:
    """What reads gradients says that they do not depend on the target; what does not has nothing to say about it."""
    comparison, _, _ = swept("zero head", pooling)
    for name, explanation in comparison.items():
        method = METHODS[name.partition("(")[0]]
        if method.class_specific and method.passes == "backward":
            assert any("a head of zeros?" in note for note in explanation.notes), name
        if not method.class_specific:
            assert explanation.maps.any(), name
            assert not any("a head of zeros?" in note for note in explanation.notes), name


def test_a_cnn_with_a_head_of_zeros_says_so() -> None:
    module = strange(cnn)
    nn.init.zeros_(module[-1].weight)
    with pytest.warns(ClairWarning, match="a head of zeros"):
        maps = cv.explain(cv.wrap(module), torch.randn(2, 3, 32, 32), "gradcam", target=TARGET).maps
    assert not maps.any()


@pytest.mark.parametrize("size", [(32, 32), (8, 8), (4, 4)])
@pytest.mark.parametrize("name", ["cam", "gradcam", "hirescam", "layercam", "ixg", "vanilla", "saliency"])
def test_a_cnn_on_few_pixels(name: str, size: tuple[int, int]) -> None:
    """Down to a last map of one cell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)
        explanation = cv.explain(cv.wrap(strange(cnn)), torch.full((2, 3, *size), 0.3), name, target=TARGET)
    assert explanation.maps.isfinite().all()
