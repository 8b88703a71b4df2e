"""shift(…): the mean over shifted images, maps shifted back: by hand, and exact where a model moves with its image."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.methods.ensembles import shift_offsets
from helpers.rounding import assert_same, same
from helpers.tiny_models import double

TARGET, KIND = 3, "timm-vit"  # 32 × 32 pixels in 4 × 4 patches
SIDE, PATCH = 32, 8


def maps_of(text: str, seed: int = 0) -> Tensor:
    model, image = double(KIND)
    return cv.explain(model, image, text, target=TARGET, seed=seed).maps


class CircularNet(nn.Module):
    """Circular convolutions and a mean over all positions: shifting the image in a circle changes no score."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular", dtype=torch.float64)
        self.second = nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular", dtype=torch.float64)

    def forward(self, image: Tensor) -> Tensor:
        return self.second(F.softplus(self.first(image))).square().mean((2, 3))


@pytest.mark.parametrize("shifts", ["grid", "random"])
def test_a_model_that_moves_with_its_image_has_the_same_map(shifts: str) -> None:
    model = cv.wrap(CircularNet().eval(), size=(12, 16))
    image = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = cv.explain(model, image, "saliency(level=pixel)", target=TARGET).maps
    maps = cv.explain(model, image, f"shift(saliency(level=pixel),border=wrap,shifts={shifts})", target=TARGET).maps
    assert plain.std() > 0
    assert_same(maps, plain)
    cut = cv.explain(model, image, "shift(saliency(level=pixel))", target=TARGET).maps
    assert not same(cut, plain)  # at the edge the image is another one


@pytest.mark.parametrize("name", ["genatt", "ixg", "attnlrp+plus", "saliency", "gradcam(relu=false)"])
def test_one_copy_is_the_method(name: str) -> None:
    plain = maps_of(name)
    assert_same(maps_of(f"shift({name},n=1)"), plain)
    assert_same(maps_of(f"shift({name},n=1,pixels=0)"), plain)
    enlarged = plain.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    assert_same(maps_of(f"shift({name},n=1,level=pixel)"), enlarged)


def copy_by_hand(image: Tensor, dy: int, dx: int, wrap: bool) -> Tensor:
    if wrap:
        return image.roll((dy, dx), (2, 3))
    padded = F.pad(image, (5, 5, 5, 5), mode="replicate")
    return padded[:, :, 5 - dy : 5 - dy + SIDE, 5 - dx : 5 - dx + SIDE]


@pytest.mark.parametrize("border", ["edge", "wrap"])
@pytest.mark.parametrize("name", ["genatt", "ixg"])
def test_the_mean_over_shifted_copies_by_hand(name: str, border: str) -> None:
    """Pixel by pixel: where a pixel of the image went in each copy, and the value of the patch there."""
    model, image = double(KIND)
    total, count = torch.zeros(2, SIDE, SIDE, dtype=torch.float64), torch.zeros(SIDE, SIDE)
    for dy in (-5, 0, 5):
        for dx in (-5, 0, 5):
            maps = cv.explain(model, copy_by_hand(image, dy, dx, border == "wrap"), name, target=TARGET).maps
            for i in range(SIDE):
                for j in range(SIDE):
                    row, col = i + dy, j + dx
                    if border == "wrap":
                        row, col = row % SIDE, col % SIDE
                    if 0 <= row < SIDE and 0 <= col < SIDE:
                        total[:, i, j] += maps[:, row // PATCH, col // PATCH]
                        count[i, j] += 1
    expected = total / count
    assert_same(maps_of(f"shift({name},pixels=5,border={border},level=pixel)"), expected)
    cells = expected.unflatten(1, (4, PATCH)).unflatten(3, (4, PATCH)).mean((2, 4))
    assert_same(maps_of(f"shift({name},pixels=5,border={border})"), cells)


def test_offsets_are_distinct_and_bounded_and_begin_with_none() -> None:
    for n in range(1, 50):
        offsets = shift_offsets(n, 6, "grid", 0)
        assert len(set(offsets)) == len(offsets) == n
        assert offsets[0] == (0, 0)
        assert max(abs(by) for offset in offsets for by in offset) <= 6
    assert set(shift_offsets(9, 4, "grid", 0)) == {(dy, dx) for dy in (-4, 0, 4) for dx in (-4, 0, 4)}
    drawn = shift_offsets(200, 2, "random", 0)
    assert drawn[0] == (0, 0)
    assert set(drawn) == {(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)}


def test_random_shifts_follow_the_seed() -> None:
    name = "shift(ixg,n=3,shifts=random)"
    assert torch.equal(maps_of(name), maps_of(name))
    assert not same(maps_of(name), maps_of(name, seed=1))
    assert torch.equal(maps_of("shift(ixg,n=3)"), maps_of("shift(ixg,n=3)", seed=1))


def test_its_cost_and_name_are_declared() -> None:
    model, image = double(KIND)
    explanation = cv.explain(model, image, cv.ensembles.shift("ixg", n=4), target=TARGET)
    assert (explanation.method, explanation.cost.forwards, explanation.cost.backwards) == ("shift(ixg,n=4)", 1 + 4, 4)
    assert explanation.signed
    assert cv.explain(model, image, "ensemble(shift(ixg,n=2),rollout)", target=TARGET).maps.isfinite().all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shift()", r"was given 0 methods; expected one: shift\(genatt"),
        ("shift(genatt,n=10,pixels=1)", r"pixels=1, which has 3 × 3 different shifts"),
        ("shift(genatt,pixels=32)", r"pixels=32 was given for images of 32 × 32"),
        ("shift(genatt,pixels=-1)", r"pixels=-1 was given; expected 0 or more pixels"),
        ("shift(genatt,sigma=1)", r"'shift' has no option 'sigma'; it has n, pixels, shifts, border, level"),
        ("shift(smoothgrad)", r"makes many passes itself, and shift"),
        ("shift(genatt)+plus", r"Put it inside: shift\(genatt\+plus"),
    ],
)
def test_mistakes_are_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises((BadInput, NotApplicable, UnknownName), match=message):
        maps_of(text)
