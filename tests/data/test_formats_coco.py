"""COCO in miniature, and its shapes: polygons against matplotlib's, run lengths against strings of pycocotools'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.path import Path as Outline

from clairvit.data.formats.shapes import decode_runs, decode_segmentation, fill_boxes, fill_polygon, parse_run_lengths
from clairvit.data.open import open_data
from clairvit.errors import BadInput
from helpers.small_datasets import block, called, identity_model, photo, read_sample, shows, written


def test_outlines_hold_the_pixels_whose_centres_they_hold() -> None:
    """Stars, also beyond the picture's edge, against matplotlib's point-in-polygon."""
    generator = np.random.default_rng(0)
    across, down = np.meshgrid(np.arange(30) + 0.5, np.arange(20) + 0.5)
    for _ in range(100):
        angles = np.sort(generator.random(generator.integers(3, 12))) * 2 * np.pi
        radius = generator.uniform(1, 18, len(angles))
        star = np.stack([15 + radius * np.cos(angles), 10 + radius * np.sin(angles)], axis=1)
        theirs = Outline(star).contains_points(np.stack([across.ravel(), down.ravel()], axis=1)).reshape(20, 30)
        assert (fill_polygon(star, (20, 30)) == theirs).all()
    square = np.array([[1, 1], [4, 1], [4, 3], [1, 3]])
    assert (fill_polygon(square, (6, 8)) == block(1, 3, 1, 4)).all()
    assert (fill_polygon(square[::-1], (6, 8)) == block(1, 3, 1, 4)).all(), "either way round"
    assert not fill_polygon(np.array([[1, 1], [4, 1]]), (6, 8)).any()


def test_run_lengths() -> None:
    """pycocotools writes '01<2G000`0N' for a block of rows 1..3 and columns 2..4 and two corners of 6 × 8 pixels."""
    expected = block(1, 4, 2, 5) | block(5, 6, 7, 8) | block(0, 1, 0, 1)
    assert parse_run_lengths("01<2G000`0N") == [0, 1, 12, 3, 3, 3, 3, 3, 19, 1]
    for counts in ("01<2G000`0N", [0, 1, 12, 3, 3, 3, 3, 3, 19, 1]):
        assert (decode_segmentation({"size": [6, 8], "counts": counts}, (6, 8)) == expected).all()
    large = np.zeros((300, 400), dtype=bool)
    large[10:200, 30:300] = True
    assert (decode_runs(parse_run_lengths("bi8n5^3" + "0" * (2 * 270 - 3) + "VYm0"), (300, 400)) == large).all()
    with pytest.raises(BadInput, match="add up to 47; expected 6 × 8 = 48 pixels"):
        decode_runs([40, 7], (6, 8))
    with pytest.raises(BadInput, match="expected 6 × 8 = 48 pixels"):
        decode_runs([50, -2], (6, 8))
    with pytest.raises(BadInput, match="hold the character '!'"):
        parse_run_lengths("0!")
    with pytest.raises(BadInput, match="end in the middle of a number"):
        parse_run_lengths("0`")
    with pytest.raises(BadInput, match=r"a mask of \(8, 6\) pixels in an image of \(6, 8\)"):
        decode_segmentation({"size": [8, 6], "counts": [48]}, (6, 8))


def test_boxes_do_not_hold_their_far_edges() -> None:
    assert (fill_boxes([(1, 2, 3, 4)], (6, 8)) == block(2, 4, 1, 3)).all()
    assert (fill_boxes([(-3, -2, 3, 99)], (6, 8)) == block(0, 6, 0, 3)).all(), "what lies outside is cut off"
    assert not fill_boxes([(-3, -2, -1, 99)], (6, 8)).any()
    assert not fill_boxes([], (6, 8)).any()


def drawn(image: int, kind: int, segmentation: Any, area: float, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": kind, "segmentation": segmentation, "area": area, **more}


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Dogs (ids with gaps) in two outlines and a crowd; a cat by run lengths; an image with nothing."""
    for number in (5, 7, 9):
        photo(tmp_path / "val2017" / f"{number:012d}.jpg", number)
    dog = [[0, 0, 3, 0, 3, 2, 0, 2], [5, 0, 8, 0, 8, 2, 5, 2]]
    crowd = {"size": [6, 8], "counts": [0, 6, 42]}  # the first column
    cat = {"size": [6, 8], "counts": "01<2G000`0N"}
    content = {
        "images": [{"id": n, "file_name": f"{n:012d}.jpg", "width": 8, "height": 6} for n in (7, 5, 9)],
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}, {"id": 90, "name": "toothbrush"}],
        "annotations": [
            drawn(5, 18, dog, 12.0, iscrowd=0),
            drawn(5, 17, cat, 11.0),
            drawn(5, 18, crowd, 6.0, iscrowd=1),
            drawn(7, 90, [[2, 2, 6, 2, 6, 3, 2, 3]], 4.0),
        ],
    }
    written(tmp_path / "annotations" / "instances_val2017.json", json.dumps(content))
    return tmp_path


def test_coco(coco: Path) -> None:
    data = open_data(f"coco:{coco}")
    assert data.split == "val2017"
    assert data.classes == ("cat", "dog", "toothbrush")
    assert data.dataset.names == tuple(f"val2017/{n:012d}.jpg" for n in (7, 5, 9))
    assert [called(data, row) for row in range(3)] == ["toothbrush", "dog", None]
    brush, two, nothing = (read_sample(data, row) for row in range(3))
    assert shows(brush, block(2, 3, 2, 6))
    assert brush.other is None
    assert shows(two, block(0, 2, 0, 3) | block(0, 2, 5, 8) | block(0, 6, 0, 1)), "outlines and crowd together"
    assert (two.label, two.other) == (1, 0)
    assert (nothing.mask, nothing.label, nothing.other) == (None, None, None)
    assert data.notes == ("1 of 3 images have no object: no mask and no true class.",)
    named = read_sample(data, 1, identity_model(["catamaran", "dog"]))
    assert (named.label, named.other) == (1, None), "a cat is no catamaran"


def test_coco_hashes_and_samples(coco: Path) -> None:
    listed = coco / "annotations" / "instances_val2017.json"
    before = [open_data(f"coco:{coco}").dataset.content_hash(row) for row in range(3)]
    assert len(set(before)) == 3
    content = json.loads(listed.read_text())
    content["annotations"][3]["segmentation"][0][0] = 1
    written(listed, json.dumps(content))
    after = [open_data(f"coco:{coco}").dataset.content_hash(row) for row in range(3)]
    assert [first == second for first, second in zip(before, after, strict=True)] == [False, True, True]
    content["images"] = [{"id": n, "file_name": f"{n}.jpg", "width": 8, "height": 6} for n in range(20)]
    # cats by number of objects, dogs by area, in half of the images
    content["annotations"] = [drawn(n, 17, [[0, 0, 1, 0, 1, 1]], 1.0) for n in range(20) for _ in range(2)]
    content["annotations"] += [drawn(n, 18, [[0, 0, 8, 0, 8, 6]], 24.0) for n in range(10)]
    written(listed, json.dumps(content))
    for seed in range(5):
        some = open_data(f"coco:{coco}", limit=4, seed=seed)
        assert sum(int(Path(name).stem) < 10 for name in some.dataset.names) == 2


def test_coco_names_what_is_wrong(coco: Path) -> None:
    listed = coco / "annotations" / "instances_val2017.json"
    content = json.loads(listed.read_text())
    for broken in (None, [[1, 2, 3]], {"size": [6, 8]}, "outline"):
        content["annotations"][3]["segmentation"] = broken
        written(listed, json.dumps(content))
        data = open_data(f"coco:{coco}")
        with pytest.raises(BadInput, match=r"An object of 'val2017/000000000007.jpg' has no outline that can be read"):
            read_sample(data, 0)
        assert called(data, 1) == "dog", "the rest goes on"
    written(listed, json.dumps({"images": []}))
    with pytest.raises(BadInput, match=r"\(KeyError: 'categories'\); expected COCO's JSON"):
        open_data(f"coco:{coco}")
    written(listed, "{")
    with pytest.raises(BadInput, match="JSONDecodeError"):
        open_data(f"coco:{coco}")
    listed.unlink()
    with pytest.raises(BadInput, match=r"'annotations/instances_val2017.json' is missing. Expected:"):
        open_data(f"coco:{coco}")
