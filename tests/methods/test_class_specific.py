"""Two objects, two classes: who explains a class moves from one object to the other when the class changes.

The model is written by hand. In each layer one head looks for red and carries it to the red class, another does the
same for blue, so what the truth is need not be argued about. The sweep reads the registry.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import clairvit as cv
from clairvit.methods.explanation import Comparison
from helpers.method_conditions import METHODS, home_of

pytestmark = pytest.mark.slow  # all methods on four images, at once
RED, BLUE = 0, 1  # classes, and the places of the two objects: red is on the left in every other image
SIZE, PATCH, GRID, WIDTH, HEADS = 48, 8, 6, 32, 2
IMAGES = 4
# Axes of the token stream. Each is a pair (+, −), so that LayerNorm's mean stays zero.
SEES = {RED: 0, BLUE: 2}  # how red, how blue a patch is
DETECTS = {RED: 4, BLUE: 6}  # how much red, how much blue a layer has found
SAME = 8  # the same for all tokens: LayerNorm does not blow up the noise of an empty patch
# The least that maps must move on average, of 2. On this model relevance by positive contributions, plain gradients and
# GMAR (which only weighs heads anew) move by about 0.1, most others by more than 1.5.
LEAST = 0.05

CLASS_SPECIFIC = [name for name, method in METHODS.items() if method.class_specific]
CLASS_AGNOSTIC = [name for name in METHODS if name not in CLASS_SPECIFIC]


def two_objects() -> tuple[Tensor, Tensor]:
    """Images with a red and a blue square of 2 × 2 patches on grey noise, and which patches they cover."""
    generator = torch.Generator().manual_seed(0)
    images = 0.2 * torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator)
    covered = torch.zeros(IMAGES, 2, GRID, GRID, dtype=torch.bool)
    for image in range(IMAGES):
        for colour in (RED, BLUE):
            right = (colour == RED) == bool(image % 2)
            row, column = (int(torch.randint(0, most, (), generator=generator)) for most in (GRID - 1, GRID // 2 - 1))
            column += GRID // 2 if right else 0
            covered[image, colour, row : row + 2, column : column + 2] = True
            top, left = PATCH * row, PATCH * column
            images[image, 2 * colour, top : top + 2 * PATCH, left : left + 2 * PATCH] += 2
    return images, covered


def pair(weight: Tensor, axis: int, column: int, value: float) -> None:
    weight[axis, column], weight[axis + 1, column] = value, -value


@functools.cache
def finder(pooling: str) -> cv.Model:
    """Head 0 finds red and tells class 0, head 1 finds blue and tells class 1; all else is small noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = VisionTransformer(
            img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=3, num_heads=HEADS, num_classes=4,
            global_pool=pooling, class_token=pooling == "token", mlp_ratio=1,
        )  # fmt: skip
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if "norm" not in name:
                    weight.normal_(std=0.02)
            write_weights(module)
    return cv.wrap(module.eval(), size=SIZE, labels=["red", "blue", "third", "fourth"])


def write_weights(module: VisionTransformer) -> None:
    wide = WIDTH // HEADS
    for colour in (RED, BLUE):
        sees, detected = SEES[colour], DETECTS[colour]
        module.patch_embed.proj.weight[sees, 2 * colour] += 1 / PATCH**2
        module.patch_embed.proj.weight[sees + 1, 2 * colour] -= 1 / PATCH**2
        pair(module.head.weight.T, detected, colour, 1.0)
        pair(module.head.weight.T, sees, colour, 0.5)  # a head that reads the patches sees their colour itself
        for block in module.blocks:
            query, key, value = (part * WIDTH + colour * wide for part in range(3))
            block.attn.qkv.bias[query] = 2.0  # whoever asks, the head looks for its colour
            pair(block.attn.qkv.weight.T, sees, key, 0.75)
            pair(block.attn.qkv.weight.T, sees, value, 0.5)
            pair(block.attn.proj.weight, detected, colour * wide, 0.5)
    module.pos_embed[..., SAME] += 1
    module.pos_embed[..., SAME + 1] -= 1


@functools.cache
def explained(pooling: str, colour: int) -> Comparison:
    names = [name for name in METHODS if at_home(name) == pooling]
    images, _ = two_objects()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*zero everywhere")
        return cv.compare(finder(pooling), images, names, target=[colour] * IMAGES)


def at_home(name: str) -> str:
    """The pooling of the model on which a method is looked at."""
    return {"timm-vit": "token", "timm-vit-avg": "avg"}[home_of(name)]


def map_of(name: str, colour: int) -> Tensor:
    return explained(at_home(name), colour)[name].maps


def lean(maps: Tensor) -> Tensor:
    """[images], −1 … 1: how far the positive mass on the two objects lies on the red one; 0 where there is none."""
    _, covered = two_objects()
    red, blue = ((maps.clamp(min=0) * covered[:, colour]).sum((1, 2)) for colour in (RED, BLUE))
    return (red - blue) / (red + blue).clamp(min=torch.finfo(maps.dtype).tiny)


@pytest.mark.parametrize("pooling", ["token", "avg"])
def test_the_model_sees_both_objects_and_nothing_else(pooling: str) -> None:
    images, covered = two_objects()
    pixels = covered.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)  # [images, 2, H, W]
    module = finder(pooling).module
    with torch.no_grad():
        whole = module(images)
        without = {colour: module(images.masked_fill(pixels[:, colour, None], 0)) for colour in (RED, BLUE)}
    for colour, other in ((RED, BLUE), (BLUE, RED)):
        class_drop = whole[:, colour] - without[colour][:, colour]
        others = whole[:, colour] - without[other][:, colour]
        assert (class_drop > 1).all(), "without its object a class loses its score"
        assert (others < class_drop / 4).all(), "and without the other one it does not"


@pytest.mark.parametrize("name", CLASS_AGNOSTIC)
def test_class_agnostic_maps_do_not_change_at_all(name: str) -> None:
    assert torch.equal(map_of(name, RED), map_of(name, BLUE))


@pytest.mark.parametrize("name", CLASS_SPECIFIC)
def test_class_specific_maps_move_to_the_object_of_the_class(name: str) -> None:
    maps = [map_of(name, colour) for colour in (RED, BLUE)]
    if name == "vanilla":  # behind LayerNorm there is nothing to move; it says so and draws no noise
        assert METHODS[name].caveats.zero_reason
        assert not any(heatmap.any() for heatmap in maps)
        return
    red, blue = map(lean, maps)
    moved = red - blue
    assert (moved > 0).all(), f"in every image: {red.tolist()} for red, {blue.tolist()} for blue"
    assert moved.mean() > LEAST
