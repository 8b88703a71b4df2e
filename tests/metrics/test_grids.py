"""Grid pointing game and class contrast on a model that knows colours, where a map of one class is wholly its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.metrics.grids import cell_masks, class_contrast, grid_pointing_game, share_inside, side_by_side
from tiny import pixels, wrapped


class Colours(nn.Module):
    """f_c = how much of each of four colours there is: red, green, blue, and the three together."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 4, 4, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.cat([torch.eye(3), torch.full((1, 3), 0.1)])[:, :, None, None] / 16)

    def forward(self, image: Tensor) -> Tensor:
        return self.embed(image).flatten(2).mean(-1)


MODEL = cv.wrap(Colours().eval(), name="colours", size=(24, 24), layout=cv.Layout((6, 6), 0, "avg"))
RED, GREEN, BLUE, ALL = range(4)


def plain(*colours: int, size: int = 24) -> Tensor:
    """Images of one colour and nothing else: [B, 3, size, size]."""
    found = torch.zeros(len(colours), 3, size, size)
    for image, colour in zip(found, colours, strict=True):
        image[colour] = 1
    return found


def test_images_side_by_side() -> None:
    values = torch.arange(9.0)[:, None, None, None].expand(9, 3, 20, 14)
    for n, pictures in ((2, values[:4]), (3, values)):
        grid, cells = side_by_side(pictures, n), cell_masks((20, 14), n)
        assert grid.shape == (3, 20, 14)
        assert torch.equal(cells.sum(0), torch.ones(20, 14, dtype=torch.long)), "every pixel is in one cell"
        for place, cell in enumerate(cells):
            assert torch.allclose(grid[:, cell], torch.tensor(float(place)), atol=1e-5), "row by row"
    corner = cell_masks((20, 14), 2)[1]
    assert corner[:10, 7:].all()
    assert int(corner.sum()) == 70


def test_a_method_that_knows_the_class_finds_its_cell() -> None:
    """Red, green and blue images, each in its cell; the fourth holds blue as class ALL, which sees all four cells."""
    score = grid_pointing_game(MODEL, plain(RED, GREEN, BLUE, BLUE), [RED, GREEN, BLUE, ALL], "ixg")
    assert score.values.tolist() == pytest.approx([1, 1, 0.5, 0.25], abs=1e-6)
    assert score.metric == "grid-pointing-game"
    assert score.better == "higher"
    swapped = grid_pointing_game(MODEL, plain(RED, GREEN, BLUE, BLUE), [GREEN, RED, BLUE, ALL], "ixg")
    assert swapped.values.tolist() == pytest.approx([0, 0, 0.5, 0.25], abs=1e-6)
    assert score.notes == ("4 of the 4 classes are among the first 4 that the model sees in their grid",)


def test_methods_that_ignore_the_class_score_what_luck_does() -> None:
    """One map for all cells: its shares add up to 1."""
    model, images = wrapped("timm-vit"), pixels("timm-vit", 8)
    score = grid_pointing_game(model, images, [0, 1, 2, 3, 3, 2, 1, 0], "rollout")
    assert len(score.values) == 8
    for grid in (score.values[:4], score.values[4:]):
        assert float(grid.mean()) == pytest.approx(0.25, abs=1e-9)
        assert float(grid.std()) > 0
    assert score.baselines["random"].mean == pytest.approx(0.25, abs=1e-9)
    assert score.baselines["center"].values.tolist() == pytest.approx([0.25] * 8, abs=1e-6)
    knows = grid_pointing_game(model, images, [0, 1, 2, 3, 3, 2, 1, 0], "legrad")
    assert float(knows.values[:4].sum()) != pytest.approx(1, abs=1e-4)


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
    found = share_inside(maps, inside).tolist()
    assert found[0] == 0.75, "negative relevance counts nowhere"
    assert math.isnan(found[1]), "nothing positive"
    assert math.isnan(found[2]), "a broken map"


def test_contrast_of_two_objects() -> None:
    image = torch.zeros(2, 3, 24, 24)
    image[:, RED, :, :12] = 1
    image[:, GREEN, :, 12:] = 1
    masks = torch.zeros(2, 24, 24, dtype=torch.bool)
    masks[:, :, :12] = True  # the red object
    assert class_contrast(MODEL, image, [RED, GREEN], [GREEN, RED], masks, "ixg").values.tolist() == [1, -1]
    half = class_contrast(MODEL, image, [RED, RED], [ALL, RED], masks, "ixg")
    assert half.values.tolist() == pytest.approx([0.5, 0], abs=1e-6)
    assert half.baselines["random"].values.tolist() == [0, 0], "luck does not look at the class"
    one = class_contrast(MODEL, image[:1], [RED], [GREEN], masks[:1], "ixg")
    assert one.values.tolist() == [1]
    masks[1] = False
    empty = class_contrast(MODEL, image, [RED, RED], [GREEN, GREEN], masks, "ixg")
    assert empty.values.isnan().tolist() == [False, True], "no object, no contrast"


def test_what_makes_no_grid_is_refused() -> None:
    four = plain(RED, GREEN, BLUE, BLUE)
    with pytest.raises(BadInput, match=r"3 images and 3 classes were given for n=2; expected a multiple of 4"):
        grid_pointing_game(MODEL, four[:3], [0, 1, 2], "ixg")
    with pytest.raises(BadInput, match="expected 4 different ones"):
        grid_pointing_game(MODEL, four, [0, 1, 2, 2], "ixg")
    with pytest.raises(BadInput, match="n=1 was given; expected 2 or more"):
        grid_pointing_game(MODEL, four, [0, 1, 2, 3], "ixg", n=1)
    with pytest.raises(BadInput, match=r"expected masks of shape \[4, 24, 24\]"):
        class_contrast(MODEL, four, [0] * 4, [1] * 4, torch.ones(4, 6, 6, dtype=torch.bool), "ixg")
