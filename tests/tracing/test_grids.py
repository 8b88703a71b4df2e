"""A grid must fit the image: axes that are no rows and columns are not taken for them."""

from __future__ import annotations

import warnings

import pytest
import timm
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import ClairWarning, NotApplicable
from clairvit.tracing.grid import fits_image
from clairvit.tracing.stages import grid_of
from clairvit.tracing.structure import model_structure


@pytest.mark.parametrize(
    ("grid", "image", "fits"),
    [
        ((14, 14), (224, 224), True),
        ((7, 7), (224, 224), True),
        ((7, 8), (224, 224), True),
        ((1, 1), (224, 224), True),
        ((14, 20), (224, 320), True),
        ((4, 2), (100, 37), True),  # a stride of 32, rounded up
        ((3137, 19), (224, 224), False),  # CoaT: tokens × channels of a head
        ((50, 19), (224, 224), False),
        ((8, 197), (224, 224), False),  # heads × tokens
        ((14, 14), (224, 448), False),
        ((20, 14), (224, 320), False),
    ],
)
def test_a_grid_fits_an_image(grid: tuple[int, int], image: tuple[int, int], fits: bool) -> None:
    assert fits_image(*grid, image) == fits
    assert fits_image(grid[1], grid[0], (image[1], image[0])) == fits


def test_tokens_by_channels_are_no_feature_map() -> None:
    image = (224, 224)
    assert grid_of(torch.empty(1, 8, 3137, 19), image) is None
    assert grid_of(torch.empty(1, 64, 56, 56), image) == (56, 56)
    assert grid_of(torch.empty(1, 56, 56, 64), image) == (56, 56)


@pytest.mark.parametrize("name", ["coat_lite_tiny", "coat_tiny"])
def test_coat_is_refused_in_true_words(name: str) -> None:
    torch.manual_seed(0)
    model = cv.wrap(timm.create_model(name, num_classes=4).eval())
    pixels = torch.randn(1, 3, 224, 224)
    assert model_structure(model, pixels).stages == ()
    for method in ("ixg", "leave-one-out", "gradcam"):
        with pytest.raises(NotApplicable, match=r"factorised|No patch tokens"):
            cv.explain(model, pixels, method, target=1)
    assert cv.explain(model, pixels, "saliency", target=1).maps.shape == (1, 224, 224)


class HeadsFirst(nn.Module):
    """Attention of another form, whose tensors [B, heads, tokens, channels] look like feature maps."""

    class Mix(nn.Module):
        def forward(self, q: Tensor, v: Tensor) -> Tensor:
            return q @ (q.transpose(-2, -1) @ v) / q.shape[-2]  # [B, H, N, d]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 24, 4, 4), HeadsFirst.Mix(), nn.Linear(24, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.embed(pixels).flatten(2).transpose(1, 2)  # [B, N, 24]
        heads = tokens.unflatten(2, (3, 8)).transpose(1, 2)
        mixed = self.mix(heads, heads).transpose(1, 2).flatten(2)
        return self.head((tokens + mixed).mean(1))


def test_heads_tokens_channels_are_no_map() -> None:
    torch.manual_seed(0)
    model, pixels = cv.wrap(HeadsFirst().eval()), torch.randn(2, 3, 64, 64)
    for name in ("ixg", "gradcam", "rise(samples=8)"):
        shape = cv.explain(model, pixels, name, target=1).maps.shape[1:]
        assert fits_image(*shape, (64, 64)), name


# One small model of each family that makes tokens or maps in its own way
FAMILIES = (
    *("test_vit", "test_byobnet", "test_convnext", "test_efficientnet", "test_mambaout", "test_resnet"),
    *("edgenext_xx_small", "efficientformerv2_s0", "efficientvit_m0", "efficientvim_m1", "levit_128s", "mobilevit_xxs"),
    *(
        "pvt_v2_b0",
        "cpubone_nano",
        "xcit_nano_12_p16_224",
        "crossvit_tiny_240",
        "mixer_s32_224",
        "deit_tiny_patch16_224",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_map_fits_the_image(name: str) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, num_classes=4).eval()
    rows, cols = module.default_cfg["input_size"][1:]
    methods = ["rollout", "genatt", "ixg", "gradcam", "saliency", "rise(samples=2)"]
    pixels = torch.randn(1, 3, rows, cols, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClairWarning)  # random weights: a ReLU or a head of zeros may leave nothing
        comparison = cv.compare(cv.wrap(module), pixels, methods, target=1, skip=True)
    assert "saliency" in comparison
    for method, explanation in comparison.items():
        assert fits_image(*explanation.maps.shape[1:], (rows, cols)), method
    assert all("Use " in reason or "use " in reason for reason in comparison.skipped.values())
