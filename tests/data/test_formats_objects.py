"""Flowers-102, Caltech-101, VOC and Stanford Dogs in miniature: file formats, classes, and masks pixel for pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image
from scipy.io import savemat

from clairvit.data.formats.voc import CLASSES
from clairvit.data.open import open_data
from clairvit.errors import BadInput, UnknownName
from helpers.small_datasets import block, called, identity_model, painted, photo, read_sample, shows, written

BIG = identity_model(size=(48, 64))  # JPEG smears over 16 pixels


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    root = tmp_path / "flowers-102"
    for number in (1, 2, 3, 4):
        photo(root / "jpg" / f"image_{number:05d}.jpg", number, (48, 64))
    savemat(root / "imagelabels.mat", {"labels": np.array([[77, 1, 102, 77]], np.uint8)})
    savemat(root / "setid.mat", {"trnid": [[1]], "valid": [[2]], "tstid": [[4, 3]]})
    return root


def test_flowers(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes and order as torchvision has them; what is not blue is the flower, to a pixel or two at its edge."""
    for number, flower in ((3, (200, 40, 160)), (4, (30, 30, 200))):
        cut = np.full((48, 64, 3), (0, 0, 254), np.uint8)
        cut[16:32, 16:48] = flower
        (flowers / "segmim").mkdir(exist_ok=True)
        Image.fromarray(cut).save(flowers / "segmim" / f"segmim_{number:05d}.jpg", quality=95, subsampling=0)
    data = open_data(f"flowers:{flowers}")
    assert data.dataset.names == ("jpg/image_00004.jpg", "jpg/image_00003.jpg")
    assert [called(data, row) for row in (0, 1)] == ["passion flower", "blackberry lily"]
    assert data.classes == tuple(torchvision.datasets.Flowers102.classes)
    assert len(data.classes) == 102
    monkeypatch.setattr(torchvision.datasets.Flowers102, "_check_integrity", lambda _: True)  # checksums of the whole
    theirs = torchvision.datasets.Flowers102(flowers.parent, split="test")
    assert [read_sample(data, row).label for row in (0, 1)] == [theirs[row][1] for row in (0, 1)] == [76, 101]
    assert data.notes == ()
    seen = read_sample(data, 1, BIG)
    assert seen.mask is not None
    expected = np.zeros((48, 64), dtype=bool)
    expected[16:32, 16:48] = True
    assert (seen.mask.numpy() == expected).all()
    assert not seen.void.any()
    assert not read_sample(data, 0, BIG).mask.any(), "a flower of nearly the background's blue cannot be told from it"
    for split, name, kind in (("train", "00001", "passion flower"), ("val", "00002", "pink primrose")):
        other = open_data(f"flowers:{flowers.parent}", split=split)
        assert other.dataset.names == (f"jpg/image_{name}.jpg",)
        assert called(other, 0) == kind
        assert read_sample(other, 0).mask is None


def test_flowers_without_segmentations_have_no_masks(flowers: Path) -> None:
    data = open_data(f"flowers:{flowers}")
    assert not data.dataset.has_masks
    assert read_sample(data, 0).mask is None
    assert "102segmentations.tgz" in data.notes[0]
    savemat(flowers / "setid.mat", {"tstid": [[9]]})
    with pytest.raises(BadInput, match=r"names image 9, and imagelabels.mat has 4 classes"):
        open_data(f"flowers:{flowers}")
    with pytest.raises(BadInput, match=r"setid.mat' holds tstid; expected 'valid' in it"):
        open_data(f"flowers:{flowers}", split="val")
    (flowers / "setid.mat").write_text("no matlab")
    with pytest.raises(BadInput, match="expected a MATLAB file, as the data set has it"):
        open_data(f"flowers:{flowers}")
    (flowers / "setid.mat").unlink()
    with pytest.raises(BadInput, match=r"'setid.mat' is missing. Expected:"):
        open_data(f"flowers:{flowers}")


def test_caltech101(tmp_path: Path) -> None:
    """Classes as torchvision lists them; outlines start at their box's corner and MATLAB counts from 1."""
    root = tmp_path / "caltech101"
    for kind, count in (("BACKGROUND_Google", 1), ("accordion", 2), ("airplanes", 1)):
        for number in range(1, count + 1):
            photo(root / "101_ObjectCategories" / kind / f"image_{number:04d}.jpg", number)
    # a square that holds the centres of columns 3..5 and rows 2..4, counted from 1, and no others
    outline = np.array([[-0.4, 2.4, 2.4, -0.4], [-0.4, -0.4, 2.4, 2.4]])
    for kind, box in (("accordion", [2, 4, 3, 5]), ("Airplanes_Side_2", [3, 5, 6, 8])):
        (root / "Annotations" / kind).mkdir(parents=True)
        savemat(
            root / "Annotations" / kind / "annotation_0001.mat",
            {"box_coord": np.array([box], np.uint16), "obj_contour": outline},
        )
    data = open_data(f"caltech101:{root}")
    theirs = torchvision.datasets.Caltech101(tmp_path)
    assert list(data.classes) == theirs.categories == ["accordion", "airplanes"]
    assert len(data) == len(theirs) == 3
    assert [called(data, row) for row in range(3)] == ["accordion", "accordion", "airplanes"]
    assert [read_sample(data, row).label for row in range(3)] == theirs.y
    assert shows(read_sample(data, 0), block(1, 4, 2, 5))
    assert read_sample(data, 1).mask is None, "nobody drew this one"
    assert shows(read_sample(data, 2), block(2, 5, 5, 8)), "outlines of airplanes have a folder of another name"
    savemat(root / "Annotations" / "accordion" / "annotation_0002.mat", {"box_coord": [1, 2], "obj_contour": [1, 2]})
    with pytest.raises(BadInput, match=r"box_coord of shape \[2\] and obj_contour of shape \[2\]; expected \[4\]"):
        read_sample(data, 1)
    with pytest.raises(UnknownName, match=r"Caltech-101 has no split 'test'. Choose one of: all"):
        open_data(f"caltech101:{root}", split="test")


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """A cat that is larger than its sofa; two dogs; void only."""
    root = tmp_path / "VOCdevkit" / "VOC2012"
    maps = {"a": np.zeros((6, 8)), "b": np.zeros((6, 8)), "c": np.zeros((6, 8))}
    maps["a"][0:3], maps["a"][3:5, 0:4], maps["a"][5] = 8, 18, 255
    maps["b"][0, 0], maps["b"][5, 7] = 12, 12
    maps["c"][0] = 255
    palette = [number for grey in range(256) for number in (grey, 0, 255 - grey)]
    for seed, (name, values) in enumerate(maps.items()):
        photo(root / "JPEGImages" / f"{name}.jpg", seed)
        (root / "SegmentationClass").mkdir(exist_ok=True)
        picture = Image.fromarray(values.astype(np.uint8)).convert("P")
        picture.putdata(values.astype(np.uint8).flatten().tolist())
        picture.putpalette(palette)
        picture.save(root / "SegmentationClass" / f"{name}.png")
    written(root / "ImageSets" / "Segmentation" / "val.txt", "a\nb\nc\n")
    written(root / "ImageSets" / "Segmentation" / "train.txt", "b\n")
    return root


def test_voc(voc: Path) -> None:
    """All objects are the mask in `voc`, those of the largest class in `voc-class`, which names the second one."""
    assert len(CLASSES) == 20
    assert (CLASSES[0], CLASSES[7], CLASSES[11], CLASSES[17], CLASSES[19]) == (
        *("aeroplane", "cat", "dog", "sofa", "tvmonitor"),
    )
    theirs = torchvision.datasets.VOCSegmentation(voc.parent.parent, image_set="val")
    for name in ("voc", "voc-class"):
        data = open_data(f"{name}:{voc.parent.parent}")
        assert data.split == "val"
        assert len(data) == len(theirs) == 3
        assert [called(data, row) for row in range(3)] == ["cat", "dog", None]
        assert data.dataset.has_others == (name == "voc-class")
        for row in range(3):
            values = np.asarray(theirs[row][1])
            mask_value = {0: 8, 1: 12, 2: 99}[row]
            objects = (values > 0) & (values < 255) if name == "voc" else values == mask_value
            assert shows(read_sample(data, row), objects, values == 255)
    first, second = read_sample(data, 0), read_sample(data, 1)
    assert shows(first, block(0, 3, 0, 8), block(5, 6, 0, 8))
    assert (first.label, first.other) == (7, 17)
    assert (second.label, second.other) == (11, None)
    named = read_sample(data, 0, identity_model(["sofa", "tabby, cat"]))
    assert (named.label, named.other) == (1, 0)
    assert open_data(f"voc:{voc}", split="train").dataset.names == ("JPEGImages/b.jpg",)


def test_the_true_class_is_the_largest_in_the_crop(voc: Path) -> None:
    """A crop may cut away the larger object; the mask goes with the class."""
    values = np.zeros((6, 8))
    values[:, 0], values[:, 7], values[2:4, 3:5] = 3, 3, 20
    painted(voc / "SegmentationClass" / "b.png", values)
    data = open_data(f"voc-class:{voc}")
    assert called(data, 1) == "bird"
    seen = read_sample(data, 1, identity_model(size=(6, 6)))  # columns 1..6
    assert data.classes[seen.label] == "tvmonitor"
    assert seen.other is None
    assert (seen.mask.numpy() == block(2, 4, 2, 4)[:, :6]).all()
    painted(voc / "SegmentationClass" / "b.png", np.where(block(0, 6, 0, 1), 3, 0))
    seen = read_sample(data, 1, identity_model(size=(6, 6)))
    assert data.classes[seen.label] == "bird", "if nothing is left in the crop, the picture's own"
    assert not seen.mask.any()


def test_voc_samples_are_stratified_and_broken_masks_raise(voc: Path) -> None:
    for name in "defghi":
        photo(voc / "JPEGImages" / f"{name}.jpg")
        values = block(0, 1, 0, 1) + 2 * (name in "def") * block(2, 5, 0, 8)  # a bicycle behind a small aeroplane
        painted(voc / "SegmentationClass" / f"{name}.png", values)
    (voc / "SegmentationClass" / "i.png").write_text("woof")
    written(voc / "ImageSets" / "Segmentation" / "val.txt", "d\ne\nf\ng\nh\ni\n")
    for seed in range(6):
        names = open_data(f"voc:{voc}", limit=2, seed=seed).dataset.names
        assert sum(name[-5] in "def" for name in names) == 1
    data = open_data(f"voc:{voc}")
    with pytest.raises(BadInput, match=r"i.png' cannot be read .*; expected a whole PNG"):
        read_sample(data, 5)
    painted(voc / "SegmentationClass" / "i.png", np.full((6, 8), 21))
    with pytest.raises(BadInput, match="values up to 21; expected a palette of 0 to 20 and 255"):
        read_sample(data, 5)
    painted(voc / "SegmentationClass" / "i.png", np.zeros((8, 6)))
    with pytest.raises(BadInput, match="A mask is 6 × 8 pixels and its image 8 × 6"):
        read_sample(data, 5)
    (voc / "SegmentationClass" / "i.png").unlink()
    assert read_sample(data, 5).mask is None


@pytest.mark.parametrize("name", ["voc", "voc-class"])
def test_voc_mask_too_large_to_decode_raises_bad_input(voc: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's DecompressionBombError is no OSError and no ValueError."""
    painted(voc / "SegmentationClass" / "a.png", np.zeros((60, 80)))
    data = open_data(f"{name}:{voc}")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadInput, match=r"a.png' cannot be read .*; expected a whole PNG"):
        read_sample(data, 0)


DOG = """<annotation><size><width>{width}</width><height>6</height><depth>3</depth></size>{objects}</annotation>"""
BOX = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


@pytest.fixture
def dogs(tmp_path: Path) -> Path:
    files = [
        "n02085620-Chihuahua/n02085620_7.jpg",
        "n02085782-Japanese_spaniel/n02085782_1.jpg",
        "n02085782-Japanese_spaniel/n02085782_2.jpg",
    ]
    for seed, file in enumerate(files):
        photo(tmp_path / "Images" / file, seed)
    photo(tmp_path / "Images" / "n02085936-Maltese_dog" / "n02085936_1.jpg")
    two = BOX.format("Chihuahua", 1, 2, 4, 5) + BOX.format("Chihuahua", 6, 0, 8, 1)
    written(tmp_path / "Annotation" / files[0][:-4], DOG.format(width=8, objects=two))
    written(tmp_path / "Annotation" / files[1][:-4], DOG.format(width=8, objects=BOX.format("x", 0, 0, 8, 6)))
    cells = np.array(files, dtype=object)[:, None]
    savemat(tmp_path / "test_list.mat", {"file_list": cells, "labels": np.array([[1], [2], [2]], np.uint8)})
    (tmp_path / "lists").mkdir()
    savemat(tmp_path / "lists" / "train_list.mat", {"file_list": cells[1:2], "labels": [[2]]})
    return tmp_path


def test_dogs(dogs: Path) -> None:
    data = open_data(f"dogs:{dogs}")
    assert data.classes == ("Chihuahua", "Japanese spaniel", "Maltese dog")
    assert [called(data, row) for row in range(3)] == ["Chihuahua", "Japanese spaniel", "Japanese spaniel"]
    assert data.dataset.names[0] == "Images/n02085620-Chihuahua/n02085620_7.jpg"
    assert shows(read_sample(data, 0), block(2, 5, 1, 4) | block(0, 1, 6, 8)), "both boxes"
    assert shows(read_sample(data, 1), block(0, 6, 0, 8))
    assert read_sample(data, 2).mask is None
    assert open_data(f"dogs:{dogs}", split="train").dataset.names == (data.dataset.names[1],), "lists/ will do"
    boxes = dogs / "Annotation" / "n02085782-Japanese_spaniel" / "n02085782_2"
    before = data.dataset.content_hash(2)
    for text in ("<annotation>", DOG.format(width="wide", objects="")):
        written(boxes, text)
        with pytest.raises(BadInput, match=r"n02085782_2' cannot be read .*; expected XML with size and object/bndbox"):
            read_sample(data, 2)
    assert data.dataset.content_hash(2) != before
    (dogs / "test_list.mat").unlink()
    with pytest.raises(BadInput, match=r"'test_list.mat' or 'lists/test_list.mat' is missing"):
        open_data(f"dogs:{dogs}")
    savemat(dogs / "test_list.mat", {"file_list": np.array(["a/b.jpg"], dtype=object), "labels": [1, 2]})
    with pytest.raises(BadInput, match="lists 1 files and 2 labels"):
        open_data(f"dogs:{dogs}")
