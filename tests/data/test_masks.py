"""Masks: what counts as the object, and that a mask lies on its image after the model's preprocessing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from clairvit.data.masks import prepare_mask, read_mask
from clairvit.errors import BadInput, ClairWarning
from clairvit.models.image_files import ORIENTATION
from clairvit.models.images import prepare
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

HOWS = [
    Preprocess(size=(32, 32), interpolation="nearest", mean=(0, 0, 0), std=(1, 1, 1)),
    Preprocess(size=(32, 48), resize=40, interpolation="nearest", mean=(0, 0, 0), std=(1, 1, 1)),
    Preprocess(size=(24, 24), resize=(36, 30), interpolation="nearest", mean=(0, 0, 0), std=(1, 1, 1)),
    Preprocess(size=(32, 32), keep_ratio=False, interpolation="nearest", mean=(0, 0, 0), std=(1, 1, 1)),
]
OBJECT = np.zeros((60, 90), dtype=bool)
OBJECT[10:35, 20:71] = True
OBJECT[44, 3] = True


def stored(path: Path, picture: Image.Image) -> Image.Image:
    picture.save(path)
    return read_mask(path, (90, 60))


@pytest.mark.parametrize("how", HOWS)
def test_a_mask_is_resized_and_cropped_as_its_image(how: Preprocess) -> None:
    """An image that is white on the object and black elsewhere, brought to the model without blending, is its mask."""
    grey = (OBJECT * 255).astype(np.uint8)
    seen = prepare([np.stack([grey] * 3, -1)], Model(nn.Linear(1, 1), "tiny", how)).pixels[0]
    mask, void = prepare_mask(Image.fromarray(grey), how)
    assert not void.any()
    assert mask.dtype == torch.bool
    assert mask.shape == how.size
    assert mask.any()
    assert not mask.all()
    assert torch.equal(mask, seen[0] > 0.5)


def test_blended_images_have_their_edges_where_the_mask_has() -> None:
    how = Preprocess(size=(20, 30), mean=(0, 0, 0), std=(1, 1, 1))
    grey = np.zeros((60, 90), np.uint8)
    grey[12:36, 21:72] = 255  # edges on the coarse grid
    seen = prepare([np.stack([grey] * 3, -1)], Model(nn.Linear(1, 1), "tiny", how)).pixels[0, 0]
    assert torch.equal(prepare_mask(Image.fromarray(grey), how)[0], seen > 0.5)


def test_whatever_is_not_zero_is_the_object(tmp_path: Path) -> None:
    small = OBJECT.astype(np.uint8)
    palette = Image.fromarray(small * 15).convert("L").copy()
    palette.putpalette([255, 255, 255] * 256)  # the first colour is white, and background nevertheless
    red = np.zeros((60, 90, 4), np.uint8)
    red[..., 0], red[..., 3] = small * 3, 255
    pictures = {
        "ones": Image.fromarray(small),
        "bits": Image.fromarray(OBJECT),
        "palette": palette,
        "opaque": Image.fromarray(red),
        "deep": Image.fromarray(small.astype(np.uint16) * 256),
    }
    assert palette.mode == "P"
    for name, picture in pictures.items():
        mask = stored(tmp_path / f"{name}.png", picture)
        assert np.array_equal(np.asarray(mask), OBJECT * 255), name


def test_masks_are_set_upright_as_images_are(tmp_path: Path) -> None:
    turned = Image.fromarray((OBJECT * 255).astype(np.uint8)).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(np.asarray(read_mask(tmp_path / "turned.png", (90, 60))), OBJECT * 255)


def test_a_mask_may_have_another_size_but_not_another_ratio(tmp_path: Path) -> None:
    Image.fromarray(OBJECT).resize((45, 30)).save(tmp_path / "half.png")
    assert read_mask(tmp_path / "half.png", (90, 60)).size == (45, 30)
    Image.fromarray(OBJECT).resize((60, 60)).save(tmp_path / "square.png")
    with pytest.raises(BadInput, match=r"square.png' is 60 × 60 pixels and its image 90 × 60; expected a mask of the "):
        read_mask(tmp_path / "square.png", (90, 60))


def test_a_broken_mask_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_text("meow")
    with pytest.raises(BadInput, match=r"The mask '.*cat.png' cannot be read .*; expected a whole PNG"):
        read_mask(tmp_path / "cat.png", (90, 60))


def test_trimaps_and_voc_masks_have_a_void(tmp_path: Path) -> None:
    """Oxford-IIIT Pet: 1 animal, 2 background, 3 border. Pascal VOC: 0 background, 255 border, all else an object."""
    trimap = np.full((60, 90), 2, np.uint8)
    trimap[10:30, 20:60], trimap[30:34, 20:60] = 1, 3
    voc = np.zeros((60, 90), np.uint8)
    voc[10:30, 20:40], voc[10:30, 40:60], voc[30:34, 20:60] = 7, 15, 255
    how = Preprocess(size=(60, 90), keep_ratio=False, mean=(0, 0, 0), std=(1, 1, 1))
    for kind, values in (("trimap", trimap), ("voc", voc)):
        Image.fromarray(values).save(tmp_path / f"{kind}.png")
        for source in (tmp_path / f"{kind}.png", Image.fromarray(values), values):
            mask, void = prepare_mask(read_mask(source, (90, 60), kind), how)
            expected, border = torch.zeros(2, 60, 90, dtype=torch.bool)
            expected[10:30, 20:60], border[30:34, 20:60] = True, True
            assert torch.equal(mask, expected), kind
            assert torch.equal(void, border), kind
    with pytest.raises(BadInput, match=r"voc.png' has values 0, 7, 15, 255; expected a trimap of 1, 2 and 3"):
        read_mask(tmp_path / "voc.png", (90, 60), "trimap")
    with pytest.raises(BadInput, match="mask_kind='coco' was given; expected one of nonzero, trimap, voc"):
        read_mask(voc, (90, 60), "coco")
    with pytest.raises(BadInput, match=r"A mask is an array of shape \[60, 90, 3\]; expected \[rows, columns\]"):
        read_mask(np.zeros((60, 90, 3)), (90, 60))


# Trimaps that are read as if they were not ---------------------------------------------------------------------------


def three_valued(*values: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Background, object, border: [6, 9]."""
    mask = np.full((6, 9), values[0], np.uint8)
    mask[1:5, 2:7] = values[1]
    mask[1, 2:7] = values[2]
    return mask


@pytest.mark.parametrize("values", [(2, 1, 3), (2, 1, 1), (2, 3, 3)])
def test_a_trimap_read_as_a_plain_mask_raises(values: tuple[int, int, int]) -> None:
    """NEWCOMER: IoU and pointing game were 1 ± 0, because every pixel was object."""
    with pytest.raises(BadInput, match=r"and no 0: a trimap.*every pixel would count.*mask_kind='trimap'"):
        read_mask(three_valued(*values), (9, 6))
    kept = np.asarray(read_mask(three_valued(*values), (9, 6), "trimap"))  # the advice, followed
    assert kept[0, 0] == 0
    assert kept[3, 3] == {1: 255, 3: 128}[values[1]]


@pytest.mark.parametrize("values", [(0, 255, 128), (0, 255, 127), (0, 1, 2)])
def test_three_values_that_may_be_a_trimap_warn(values: tuple[int, int, int]) -> None:
    with pytest.warns(ClairWarning, match=r"three values 0, .*all but 0 count as object.*mask_kind='trimap'"):
        kept = np.asarray(read_mask(three_valued(*values), (9, 6)))
    assert set(kept[1:5, 2:7].flatten().tolist()) == {255}
    if 255 in values:  # the advice, followed
        kept = np.asarray(read_mask(three_valued(*values), (9, 6), "trimap"))
        assert (kept[0, 0], kept[3, 3], kept[1, 3]) == (0, 255, 128)


@pytest.mark.parametrize("values", [(0, 1, 1), (0, 255, 255), (0, 7, 7), (1, 1, 1), (0, 3, 9), (0, 2, 3)])
def test_other_masks_are_read_without_a_warning(values: tuple[int, int, int], recwarn: pytest.WarningsRecorder) -> None:
    kept = np.asarray(read_mask(three_valued(*values), (9, 6)))
    assert np.array_equal(kept == 255, three_valued(*values) != 0)
    assert not [warning for warning in recwarn if issubclass(warning.category, ClairWarning)]
