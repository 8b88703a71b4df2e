"""Grid pointing game and class contrast on a model that knows colours, where a map of one class is wholly its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.grid_pointing import cell_masks, share_inside, side_by_side
from helpers.rounding import assert_same
from helpers.tiny_models import double

SHARP = 40.0


class Colours(nn.Module):
    """f_c = how much of each of four colours there is: red, green, blue, and the three together."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 4, 4, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.cat([torch.eye(3), torch.full((1, 3), 0.4)])[:, :, None, None] / 16 * SHARP)

    def forward(self, image: Tensor) -> Tensor:
        return self.embed(image).flatten(2).mean(-1)


class Undecided(nn.Module):
    """A ViT without a favourite class among these images, so that there are grids."""

    def __init__(self, vit: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.vit = vit
        self.register_buffer("usual", vit(images).mean(0).detach())

    def forward(self, image: Tensor) -> Tensor:
        return self.vit(image) - self.usual


MODEL = cv.wrap(  # it takes shades as they are, in 0..1
    Colours().double().eval(), name="colours", mean=0, std=1, size=(24, 24), layout=cv.Layout((6, 6), 0, "avg")
)
RED, GREEN, BLUE, ALL = range(4)
SHADES = {RED: (1.0, 0, 0), GREEN: (0, 0.9, 0), BLUE: (0, 0, 0.8), ALL: (0.7, 0.7, 0.7)}


def plain(*colours: int) -> Tensor:
    """Images of one shade and nothing else: [B, 3, 24, 24]. The model is most sure of red, then green, blue, grey."""
    shades = torch.tensor([SHADES[c] for c in colours], dtype=torch.float64)
    return shades[:, :, None, None].expand(-1, 3, 24, 24)


def game(images: Any, method: str = "ixg", model: cv.Model = MODEL, **options: Any) -> cv.Score:
    labels = options.pop("labels", None)
    score = cv.evaluate(model, images, method, "grid-pointing-game", labels=labels, **options)
    assert isinstance(score, cv.Score)
    return score


def test_images_side_by_side() -> None:
    values = torch.arange(9.0, dtype=torch.float64)[:, None, None, None].expand(9, 3, 20, 14)
    for n, pictures in ((2, values[:4]), (3, values)):
        grid, cells = side_by_side(pictures, n), cell_masks((20, 14), n)
        assert grid.shape == (3, 20, 14)
        assert torch.equal(cells.sum(0), torch.ones(20, 14, dtype=torch.long)), "every pixel is in one cell"
        assert grid.dtype == torch.float64
        for place, cell in enumerate(cells):
            assert_same(grid[:, cell], torch.full((3, int(cell.sum())), float(place)), label="row by row")
    corner = cell_masks((20, 14), 2)[1]
    assert corner[:10, 7:].all()
    assert int(corner.sum()) == 70


def test_a_method_that_knows_the_class_finds_its_cell() -> None:
    """Red is in the red cell (1.0) and in the grey one (0.7): the red class has 1 / 1.7 of its map where it should."""
    score = game(plain(GREEN, RED, ALL, BLUE))
    assert_same(score.values, [0.9 / 1.6, 1 / 1.7, 2.1 / 4.8, 0.8 / 1.5])
    assert (score.metric, score.better, score.n_valid) == ("grid-pointing-game", "higher", 4)
    (note,) = score.notes
    assert "1 grid of 4 images; 4 of the 4 classes are among the first 4 that the model sees in their grid" in note
    assert score.cost.backwards == 1


def test_who_is_in_a_grid() -> None:
    """Two reds cannot share a grid, and who is left without one has no score; nor has one the model is wrong about."""
    score = game(plain(RED, RED, GREEN, BLUE, ALL))
    assert score.values.isnan().tolist() == [False, True, False, False, False]
    assert (score.n_valid, score.n_invalid) == (4, 1)
    wrong = game(plain(RED, RED, GREEN, BLUE, ALL), labels=[GREEN, RED, GREEN, BLUE, ALL])
    assert wrong.values.isnan().tolist() == [True, False, False, False, False]
    twice = game(plain(*(RED, GREEN, BLUE, ALL) * 2))
    assert twice.n_valid == 8
    assert game(plain(*(RED, GREEN, BLUE, ALL) * 2), grids=1).n_valid == 4
    with pytest.raises(BadInput, match=r"No grid of 2 × 2 images of different classes can be made of these 3 images"):
        game(plain(RED, GREEN, BLUE))
    with pytest.raises(BadInput, match=r"probability above 0.999999"):
        game(plain(RED, GREEN, BLUE, ALL), sure=0.999999)
    with pytest.raises(BadInput, match="n=1 was given; expected 2 or more images in a row, such as n=2"):
        game(plain(RED, GREEN, BLUE, ALL), n=1)


def test_methods_that_ignore_the_class_score_as_a_random_map() -> None:
    """One map for all cells: its shares add up to 1."""
    score = game(plain(RED, GREEN, BLUE, ALL), "center")
    assert_same(score.values, [0.25] * 4)
    assert_same(score.baselines["random"].mean, 0.25)
    assert float(score.baselines["random"].values.std()) > 0
    vit, images = double("timm-vit", 12)
    model = cv.wrap(Undecided(vit.module, images), name="undecided", size=(32, 32))
    assert_same(game(images, "rollout", model, sure=0.0).mean, 0.25)
    assert game(images, "legrad", model, sure=0.0).mean != pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("n", [2, 3])
def test_a_constant_map_gets_the_cells_area(n: int) -> None:
    inside = cell_masks((24, 24), n)
    assert share_inside(torch.ones(n * n, 6, 6), inside).tolist() == pytest.approx([1 / n**2] * n**2, abs=1e-12)


def test_shares_by_hand() -> None:
    maps = torch.tensor([[[3.0, 1.0], [-5.0, 0.0]]] * 3)
    maps[1] = -1
    maps[2, 0, 0] = math.nan
    inside = torch.zeros(3, 4, 4, dtype=torch.bool)
    inside[:, :, :2] = True
    shares = share_inside(maps, inside).tolist()
    assert shares[0] == 0.75, "negative relevance counts nowhere"
    assert math.isnan(shares[1]), "nothing positive"
    assert math.isnan(shares[2]), "a broken map"
    void = torch.zeros_like(inside)
    void[:, :2, :2] = True
    assert share_inside(maps, inside, void=void)[0] == 0, "what lies on the void counts nowhere"
    heatmap = torch.zeros(1, 4, 4)
    heatmap[0, 1, 1] = 9
    smooth = share_inside(heatmap, inside[:1], smooth=3).tolist()
    assert smooth == pytest.approx([2 / 3]), "the point is spread over three columns, two of them inside"


def contrast(images: Tensor, classes: list[int], others: list[int | None], masks: Tensor) -> cv.Score:
    score = cv.evaluate(
        MODEL, images, "ixg", "class-contrast", labels=classes, distractors=others, target="label", masks=masks
    )
    assert isinstance(score, cv.Score)
    return score


def test_contrast_of_two_objects() -> None:
    image = torch.zeros(2, 3, 24, 24, dtype=torch.float64)
    image[:, RED, :, :12] = 1
    image[:, GREEN, :, 12:] = 1
    masks = torch.zeros(2, 24, 24, dtype=torch.bool)
    masks[:, :, :12] = True  # the red object
    assert_same(contrast(image, [RED, GREEN], [GREEN, RED], masks).values, [1, -1])
    half = contrast(image, [RED, RED], [ALL, RED], masks)
    assert_same(half.values, [0.5, 0])
    assert half.baselines["random"].values.tolist() == [0, 0], "a random map does not depend on the class"
    alone = contrast(image, [RED, RED], [GREEN, None], masks)
    assert alone.values.isnan().tolist() == [False, True], "one object, no contrast"
    masks[1] = False
    assert contrast(image, [RED, RED], [GREEN, GREEN], masks).values.isnan().tolist() == [False, True]
    with pytest.raises(BadInput, match=r"the other classes were not given; expected distractors=\[…\]"):
        cv.evaluate(MODEL, image, "ixg", "class-contrast", masks=masks)
