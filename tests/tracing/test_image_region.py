"""A crop, padding or shift inside the model: no map is drawn in the wrong place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.tracing.structure import ModelStructure, model_structure
from helpers import tiny_models as tiny
from helpers.custom_vits import HomeMade, InPlaceBlock, Loop, MatmulAttention
from helpers.rounding import assert_same, same

SIZE = 32
Change = Callable[[Tensor], Tensor]


class Changed(nn.Module):
    """A module that changes the image before its inner module sees it."""

    def __init__(self, inner: nn.Module, change: Change) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, image: Tensor) -> Tensor:
        return self.inner(self.change(image))


def resized(image: Tensor) -> Tensor:
    return F.interpolate(image, size=SIZE, mode="bilinear")


def whitened(image: Tensor) -> Tensor:
    return (image - image.mean((2, 3), keepdim=True)) / image.std((2, 3), keepdim=True)


def noise(rows: int, columns: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def structure_of(change: Change, size: tuple[int, int], inner: nn.Module | None = None) -> ModelStructure:
    inner = tiny.build("timm-vit").double() if inner is None else inner
    return model_structure(cv.wrap(Changed(inner, change), size=size), noise(*size))


# What the change is, the size of the image, and the pixels that the patches lie on
CROPPED: dict[str, tuple[Change, tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]] = {
    "centre": (lambda x: resized(x[..., 8:24, 8:24]), (32, 32), ((8, 24), (8, 24))),
    "a small border": (lambda x: x[..., 4:36, 4:36], (40, 40), ((4, 36), (4, 36))),
    "left half": (lambda x: resized(x[..., :16]), (32, 32), ((0, 32), (0, 16))),
    "bottom right": (lambda x: resized(x[..., 8:, 8:]), (32, 32), ((8, 32), (8, 32))),
    "a quarter": (lambda x: resized(x[..., 12:20, 12:20]), (32, 32), ((12, 20), (12, 20))),
    "rows alone": (lambda x: resized(x[..., 8:24, :]), (32, 32), ((8, 24), (0, 32))),
}


@pytest.mark.parametrize("name", CROPPED)
def test_a_crop_is_named_to_the_pixel(name: str) -> None:
    change, size, (rows, columns) = CROPPED[name]
    structure = structure_of(change, size)
    assert not structure.in_order
    assert structure.region is not None
    assert (structure.region.rows, structure.region.columns, structure.region.image) == (rows, columns, size)


PADDED: dict[str, tuple[Change, tuple[int, int], tuple[int, int]]] = {
    "all around": (lambda x: F.pad(x, (8, 8, 8, 8)), (16, 16), (-8, 24)),
    "and resized": (lambda x: resized(F.pad(x, (16, 16, 16, 16))), (32, 32), (-16, 48)),
    "part of a patch": (lambda x: F.pad(x, (6, 6, 6, 6)), (20, 20), (-6, 26)),
    "and whitened": (lambda x: whitened(resized(x[..., 8:24, 8:24])), (32, 32), (8, 24)),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_found(name: str) -> None:
    """Where the patches lie outside the image their place is an estimate, to a quarter of a patch."""
    change, size, expected = PADDED[name]
    region = structure_of(change, size).region
    assert region is not None
    for ends in (region.rows, region.columns):
        assert all(abs(a - b) <= 2 for a, b in zip(ends, expected, strict=True)), region


OUT_OF_ORDER: dict[str, Change] = {
    "mirrored": lambda x: x.flip(-1),
    "upside down": lambda x: x.flip(-2),
    "turned": lambda x: x.rot90(1, (-2, -1)),
    "turned by 180 degrees": lambda x: x.rot90(2, (-2, -1)),
    "transposed": lambda x: x.transpose(-1, -2),
    "rolled by a patch": lambda x: x.roll(8, -1),
    "rolled by less": lambda x: x.roll(6, -1),
    "padded on one side": lambda x: F.pad(x[..., ::2, ::2], (0, 16, 0, 16)),
}


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_another_order_is_found(name: str) -> None:
    assert not structure_of(OUT_OF_ORDER[name], (32, 32)).in_order


IN_PLACE: dict[str, tuple[Change, tuple[int, int]]] = {
    "resized": (resized, (48, 48)),
    "stretched": (resized, (24, 40)),
    "every second pixel": (lambda x: x[..., ::2, ::2], (64, 64)),
    "nearest": (lambda x: F.interpolate(x, size=SIZE), (128, 128)),
    "antialiased": (lambda x: F.interpolate(x, size=SIZE, mode="bilinear", antialias=True), (112, 112)),
    "whitened": (whitened, (32, 32)),
    "padded to a multiple": (lambda x: F.pad(x, (0, 2, 0, 2)), (30, 30)),
    "scaled": (lambda x: 2 * x - 1, (32, 32)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_the_whole_image_is_no_crop(name: str) -> None:
    change, size = IN_PLACE[name]
    structure = structure_of(change, size)
    assert structure.in_order
    assert structure.region is None


STEMS = (
    *("levit_128s", "pit_ti_224", "pvt_v2_b0", "tiny_vit_5m_224", "xcit_nano_12_p16_224", "gcvit_xxtiny"),
    *("swin_tiny_patch4_window7_224", "maxvit_rmlp_pico_rw_256", "vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224"),
)


@pytest.mark.parametrize("name", STEMS)
def test_stems_that_look_further_than_a_patch_are_no_crop(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3).eval()
    structure = model_structure(cv.wrap(model), torch.randn(1, *model.pretrained_cfg["input_size"]))
    assert structure.in_order
    assert structure.region is None


def handwritten(kind: str) -> nn.Module:
    makers: dict[str, Callable[[], nn.Module]] = {
        "loop": Loop,
        "in place": lambda: HomeMade(lambda: InPlaceBlock(MatmulAttention)),
        "registers": lambda: tiny.build("timm-dinov2-reg4"),
    }
    torch.manual_seed(0)
    return tiny.shaken(makers[kind](), 0).double().eval()


@pytest.mark.parametrize("kind", ["loop", "in place", "registers"])
def test_blocks_that_are_no_modules_are_looked_at_too(kind: str) -> None:
    crop = CROPPED["centre"][0]
    assert structure_of(crop, (32, 32), handwritten(kind)).region is not None
    assert structure_of(lambda x: x, (32, 32), handwritten(kind)).in_order


def test_a_stated_layout_says_nothing_of_the_image() -> None:
    layout = cv.Layout(grid=(4, 4), prefix=1, pooling="token")
    module = Changed(tiny.build("timm-vit").double(), CROPPED["centre"][0])
    assert model_structure(cv.wrap(module, size=SIZE, layout=layout), noise(SIZE, SIZE)).region is not None


@functools.cache
def cropped() -> tuple[cv.Model, Tensor]:
    return cv.wrap(Changed(tiny.build("timm-vit").double(), CROPPED["centre"][0]), size=SIZE), noise(SIZE, SIZE, 2)


@pytest.mark.parametrize("method", ["attnlrp+plus", "ixg", "rollout", "raw-attention", "genatt", "gradcam", "scorecam"])
def test_methods_that_draw_patches_are_refused(method: str) -> None:
    model, images = cropped()
    expected = r"on about rows 8 to 24 and columns 8 to 24 of an image of 32 × 32 pixels.*size=…, resize=….*saliency"
    with pytest.raises(NotApplicable, match=expected):
        cv.explain(model, images, method, target=1)


def test_pixels_are_drawn_where_they_are() -> None:
    """Perturbation paints pixels, and pixel gradients lie on them: no cell outside the crop counts."""
    model, images = cropped()
    outside = torch.ones(4, 4, dtype=torch.bool)
    outside[1:3, 1:3] = False
    for method in ("leave-one-out", "saliency", "occlusion(window=1)"):
        maps = cv.explain(model, images, method, target=1).maps
        assert_same(maps[:, outside], torch.zeros_like(maps[:, outside]), magnitude=1.0)
        assert not same(maps[:, ~outside], torch.zeros_like(maps[:, ~outside]), magnitude=1.0), method
    by_default = cv.explain(model, images, target=1)
    assert by_default.method == "saliency"
    assert any("rows 8 to 24" in note for note in by_default.notes)


def test_leave_one_out_is_painting_by_hand() -> None:
    model, images = cropped()
    maps = cv.explain(model, images, "leave-one-out", target=1).maps
    painted = images.clone()
    painted[:, :, 8:16, 16:24] = 0
    with torch.no_grad():
        drop = model.logits(images).softmax(1)[:, 1] - model.logits(painted).softmax(1)[:, 1]
    assert_same(maps[:, 1, 2], drop)


def test_a_crop_before_a_cnn_is_found() -> None:
    torch.manual_seed(0)
    inner = timm.create_model("resnet10t", num_classes=3).eval()
    for change, whole in ((lambda x: x[..., 32:96, 32:96], False), (lambda x: F.interpolate(x, size=64), True)):
        structure = model_structure(cv.wrap(Changed(inner, change), size=128), torch.randn(1, 3, 128, 128))
        assert structure.stages
        assert (structure.region is None) is whole


def test_black_bars_are_no_crop() -> None:
    torch.manual_seed(0)
    model = cv.wrap(timm.create_model("resnet10t", num_classes=3).eval(), size=128)
    image = torch.zeros(1, 3, 128, 128)
    image[..., 40:90, :] = torch.randn(50, 128)
    assert model_structure(model, image).region is None


def test_the_doctor_names_the_crop() -> None:
    report = cv.doctor(cropped()[0])
    (finding,) = (check for check in report.checks if check.name == "layout")
    assert finding.status == "fail"
    assert "rows 8 to 24" in finding.finding
