"""Folders of the user, Indoor-67 and MURA: classes from folders, masks from other folders, notes on missing files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clairvit.data.dataset import iter_batches
from clairvit.data.open import open_data
from clairvit.errors import BadInput
from helpers.small_datasets import block, called, identity_model, painted, photo, read_sample, shows, written


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    for seed, name in enumerate(("cat/2.png", "cat/10.png", "dog/deep/a.jpg")):
        photo(root / name, seed)
    return root


def test_folders_are_classes(mine: Path) -> None:
    """In natural order; a model that has no names cannot know them by number."""
    data = open_data(f"folder:{mine}")
    assert data.dataset.names == ("cat/2.png", "cat/10.png", "dog/deep/a.jpg")
    assert data.classes == ("cat", "dog")
    assert (data.split, data.notes, data.dataset.has_masks, data.dataset.has_labels) == ("all", (), False, True)
    assert [read_sample(data, row, identity_model(["fox", "dog", "Cat"])).label for row in range(3)] == [2, 2, 1]
    assert read_sample(data, 0).label is None
    assert data.unknown_classes(identity_model(["catamaran", "dog"])) == ("cat",)
    assert data.unknown_classes(identity_model()) == ("cat", "dog")
    assert open_data(f"folder:{mine}", limit=2).total == 3


def test_folders_may_be_called_by_number(tmp_path: Path) -> None:
    for name in ("0", "12"):
        photo(tmp_path / name / "a.png")
    data = open_data(f"folder:{tmp_path}")
    assert [read_sample(data, row).label for row in (0, 1)] == [0, 12]
    assert [read_sample(data, row, identity_model(["12", "b"])).label for row in (0, 1)] == [0, 0], (
        "a name goes before a number"
    )


def test_irregular_folders_give_notes(mine: Path) -> None:
    (mine / "fox").mkdir()
    photo(mine / ".thumbs" / "t.png")
    data = open_data(f"folder:{mine}")
    assert len(data) == 3
    assert data.classes == ("cat", "dog", "fox")
    assert data.notes == ("No images are in the class folder 'fox'.",)
    photo(mine / "loose.png")
    data = open_data(f"folder:{mine}")
    assert len(data) == 4
    assert (data.classes, data.dataset.has_labels) == ((), False)
    assert read_sample(data, 0, identity_model(["cat"])).label is None
    assert "'loose.png' lie next to the folders" in data.notes[0]
    flat = open_data(f"folder:{mine}/cat")
    assert (flat.dataset.names, flat.classes, flat.notes) == (("2.png", "10.png"), (), ())
    with pytest.raises(BadInput, match="There are no images in the folder"):
        open_data(f"folder:{mine}/fox")
    with pytest.raises(BadInput, match="There is no folder"):
        open_data(f"folder:{mine}/nowhere")
    with pytest.raises(BadInput, match="is not a folder; expected one with images"):
        open_data(f"folder:{mine}/loose.png")


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_masks_are_in_another_folder(mine: Path, place: str) -> None:
    """In folders like the images' or in one; inside the images' folder they are no images and no class."""
    masks = (mine if place == "inside" else mine.parent) / "masks"
    painted(masks / "cat" / "2.png", np.where(block(1, 3, 1, 4), 9, 0))
    painted(masks / "a.png", np.where(block(0, 2, 5, 8), 255, 0))
    painted(masks / "other.png", np.zeros((6, 8)))
    data = open_data(f"folder:{mine}", masks=masks)
    assert data.dataset.names == ("cat/2.png", "cat/10.png", "dog/deep/a.jpg")
    assert data.classes == ("cat", "dog")
    assert shows(read_sample(data, 0), block(1, 3, 1, 4))
    assert read_sample(data, 1).mask is None
    assert shows(read_sample(data, 2), block(0, 2, 5, 8))
    assert data.notes == (
        f"1 of 3 images have no mask in '{masks}': 'cat/10.png'.",
        f"1 of 3 masks in '{masks}' belong to no image: 'other.png'.",
    )
    voc = open_data(f"folder:{mine}", masks=str(masks), mask_kind="voc")
    assert shows(read_sample(voc, 2), block(0, 0, 0, 0), block(0, 2, 5, 8)), "255 is void in VOC's masks"
    assert voc.dataset.content_hash(2) != data.dataset.content_hash(2)
    loose = photo(mine / "2b.png")
    assert shows(read_sample(open_data(f"folder:{mine}", masks=masks), 1), block(1, 3, 1, 4)), "masks without classes"
    loose.unlink()


def test_ambiguous_or_unmatched_masks_raise(mine: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    painted(masks / "2.png", np.ones((8, 6)))
    failures: list[tuple[str, str]] = []
    data = open_data(f"folder:{mine}", masks=masks)
    (part,) = iter_batches(data.dataset, identity_model(), 9, lambda name, error: failures.append((name, str(error))))
    assert part.rows == (1, 2)
    ((name, error),) = failures
    assert name == "cat/2.png"
    assert "is 6 × 8 pixels and its image 8 × 6" in error
    photo(mine / "dog" / "2.jpg")
    with pytest.raises(BadInput, match=r"2 images are called '2', and .*could be the mask of any of them"):
        open_data(f"folder:{mine}", masks=masks)
    painted(tmp_path / "strange" / "x.png", np.ones((6, 8)))
    with pytest.raises(
        BadInput, match=r"None of the 1 masks in .* is called like one of the 4 images; expected '2.png'"
    ):
        open_data(f"folder:{mine}", masks=tmp_path / "strange")
    with pytest.raises(BadInput, match=r"is not a folder; expected one with 'cat.png' for the image 'cat.jpg'"):
        open_data(f"folder:{mine}", masks=tmp_path / "nowhere")
    with pytest.raises(BadInput, match="expected masks in another folder"):
        open_data(f"folder:{mine}", masks=mine)
    with pytest.raises(BadInput, match="outside the folder of masks"):
        open_data(f"folder:{tmp_path}/strange", masks=tmp_path)


def test_hashes_depend_on_the_class_name(mine: Path) -> None:
    """A renamed folder is another class; one more class changes nothing for the others."""
    before = [open_data(f"folder:{mine}").dataset.content_hash(row) for row in range(3)]
    photo(mine / "ant" / "z.png")
    assert [open_data(f"folder:{mine}").dataset.content_hash(row) for row in (1, 2, 3)] == before
    (mine / "cat").rename(mine / "cow")
    after = [open_data(f"folder:{mine}").dataset.content_hash(row) for row in (1, 2, 3)]
    assert [first == second for first, second in zip(before, after, strict=True)] == [False, False, True]


def test_indoor67(tmp_path: Path) -> None:
    for seed, name in enumerate(("kitchen/int1.jpg", "bar/a.jpg", "bar/b.jpg")):
        photo(tmp_path / "Images" / name, seed)
    written(tmp_path / "TestImages.txt", "kitchen/int1.jpg\r\nbar/b.jpg\r\n")
    written(tmp_path / "TrainImages.txt", "bar/a.jpg\n")
    data = open_data(f"indoor67:{tmp_path}")
    assert data.classes == ("bar", "kitchen")
    assert data.dataset.names == ("Images/kitchen/int1.jpg", "Images/bar/b.jpg")
    assert [called(data, row) for row in (0, 1)] == ["kitchen", "bar"]
    assert (data.dataset.has_masks, read_sample(data, 0).mask) == (False, None)
    assert open_data(f"indoor67:{tmp_path}", split="train").dataset.names == ("Images/bar/a.jpg",)
    written(tmp_path / "TestImages.txt", "attic/a.jpg\n")
    with pytest.raises(BadInput, match=r"has the line 'attic/a.jpg', and there is no folder 'Images/attic'"):
        open_data(f"indoor67:{tmp_path}")
    (tmp_path / "TestImages.txt").unlink()
    with pytest.raises(BadInput, match=r"'TestImages.txt' is missing. Expected:"):
        open_data(f"indoor67:{tmp_path}")


def test_mura(tmp_path: Path) -> None:
    """Grey radiographs; the study's name is the finding."""
    root = tmp_path / "MURA-v1.1"
    for name in ("XR_ELBOW/patient1/study1_positive/image1", "XR_HAND/patient2/study1_negative/image2"):
        painted(root / "valid" / f"{name}.png", np.full((6, 8), 100))
    photo(root / "train" / "XR_HAND" / "patient9" / "study2_negative" / "image1.png")
    (root / "valid" / "XR_HAND" / "patient2" / "study1_negative" / "._image2.png").write_text("a Mac was here")
    data = open_data(f"mura:{tmp_path}")
    assert data.classes == ("negative", "positive")
    assert data.dataset.names == (
        "valid/XR_ELBOW/patient1/study1_positive/image1.png",
        "valid/XR_HAND/patient2/study1_negative/image2.png",
    )
    assert [called(data, row) for row in (0, 1)] == ["positive", "negative"]
    assert read_sample(data, 0).pixels.shape == (3, 6, 8)
    assert len(open_data(f"mura:{root}", split="train")) == 1
    Image.new("L", (8, 6)).save(photo(root / "valid" / "XR_HAND" / "patient2" / "study3" / "image1.png"))
    with pytest.raises(BadInput, match="is in the study 'study3'; expected its name to end in _positive or _negative"):
        open_data(f"mura:{root}")
