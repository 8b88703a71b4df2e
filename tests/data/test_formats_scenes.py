"""open_data("scenes"): the right number, the right masks, and nothing on disk."""

from __future__ import annotations

import pytest

import clairvit as cv
from clairvit.data.open import open_data
from clairvit.data.scenes import CLASSES, scene
from clairvit.errors import BadInput, UnknownName


def test_scenes_need_no_path() -> None:
    model = cv.load("scenes")
    assert len(open_data("scenes")) == 200
    assert len(open_data("scenes", limit=30)) == 30
    data = open_data("scenes:40", limit=8, seed=3)
    assert (len(data), data.total, data.split, data.classes) == (8, 40, "one", CLASSES)
    assert data.unknown_classes(model) == ()
    sample = data.dataset.read(5, model)
    assert sample.label == scene(3, 5).class_name
    assert sample.other is None
    part, both = (open_data("scenes:8", split=split, seed=3).dataset.read(5, model) for split in ("part", "two"))
    assert sample.mask is not None
    assert part.mask is not None
    assert 0 < int(part.mask.sum()) < int(sample.mask.sum())
    assert both.other not in (None, both.label)


def test_invalid_scenes_raise() -> None:
    with pytest.raises(BadInput, match=r"'scenes:many' was given; expected scenes, or scenes:COUNT"):
        open_data("scenes:many")
    with pytest.raises(BadInput, match=r"limit=0 was given; expected the number of images to take, 1 or more"):
        open_data("scenes", limit=0)
    with pytest.raises(BadInput, match=r"masks=there was given with scenes, which has its own"):
        open_data("scenes", masks="there")
    with pytest.raises(UnknownName, match=r"Scenes have no split 'three'. Choose one of: one, two, part"):
        open_data("scenes", split="three")
