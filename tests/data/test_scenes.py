"""Scenes: the same seed gives the same bytes everywhere, and masks are exact."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from clairvit.data.dataset import iter_batches
from clairvit.data.drawing import BODY_SHAPES, CLASS_PATTERNS, UNITS_PER_PIXEL, IntRng, disc, offsets
from clairvit.data.scenes import CLASSES, SIZE, Scene, ScenePlan, draw, plan, scene, scenes, with_class
from clairvit.errors import BadInput
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

PLAIN = Model(nn.Identity(), "plain", Preprocess((SIZE, SIZE), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
SEVERAL = range(24)


def pixels(drawn: Scene) -> NDArray[np.uint8]:
    return np.asarray(drawn.picture)


def changed(first: Scene, second: Scene) -> NDArray[np.bool_]:
    return (pixels(first) != pixels(second)).any(-1)


def without(planned: ScenePlan, index: int) -> ScenePlan:
    """Make one object empty; the others keep their index, and with it their grain."""
    objects = list(planned.objects)
    marker = objects[index].marker
    assert marker is not None
    objects[index] = replace(objects[index], shape="square", radius=-UNITS_PER_PIXEL, marker=replace(marker, x=-99999))
    return replace(planned, objects=tuple(objects))


def test_the_same_seed_draws_the_same_bytes_on_every_machine() -> None:
    content = b"".join(pixels(scene(0, number, objects)).tobytes() for number in range(8) for objects in (1, 2))
    assert hashlib.blake2b(content, digest_size=8).hexdigest() == "54aa926426c64545"


def test_a_scene_does_not_depend_on_those_drawn_before_it() -> None:
    alone = scene(3, 7)
    for number in range(7):
        scene(3, number)
    assert pixels(scene(3, 7)).tobytes() == pixels(alone).tobytes()


def test_other_seeds_numbers_and_counts_of_objects_are_other_scenes() -> None:
    drawn = {
        pixels(scene(*arguments)).tobytes()
        for arguments in ((0, 1), (1, 0), (0, 0), (1, 1), (0, 1, 2), (10, 1), (1, 10))
    }
    assert len(drawn) == 7


@pytest.mark.parametrize("number", SEVERAL)
def test_the_part_alone_determines_the_class(number: int) -> None:
    planned = plan(0, number)
    first = draw(planned)
    for name in CLASSES:
        other = draw(with_class(planned, name))
        assert other.class_name == name
        where = changed(first, other)
        assert where.any() == (name != first.class_name)
        assert not (where & ~first.part).any()
        assert np.array_equal(other.part, first.part)
        assert np.array_equal(other.mask, first.mask)


def test_nothing_but_the_part_depends_on_the_class() -> None:
    """A plan is the same for every assignment of classes, apart from the class."""
    for number in SEVERAL:
        planned = plan(0, number)
        assert with_class(planned, "dot") == with_class(with_class(planned, "ring"), "dot")
        (item,) = planned.objects
        assert item.marker is not None
        assert item.marker.class_name == draw(planned).class_name


@pytest.mark.parametrize("objects", [1, 2])
@pytest.mark.parametrize("number", SEVERAL)
def test_masks_are_exact(number: int, objects: int) -> None:
    """Without the object no pixel outside its mask changes, and almost every one inside does."""
    planned = plan(5, number, objects)
    whole = draw(planned)
    masks = [whole.mask, *([whole.other_mask] if whole.other_mask is not None else [])]
    assert len(masks) == objects
    for index, mask in enumerate(masks):
        bare = draw(without(planned, index))
        assert not (bare.mask if index == 0 else bare.other_mask).any()  # type: ignore[union-attr]
        where = changed(whole, bare)
        assert not (where & ~mask).any()
        assert where[mask].mean() > 0.95  # a pixel may have the colour of the background by chance


@pytest.mark.parametrize("number", SEVERAL)
def test_the_part_is_a_whole_disc_on_the_object(number: int) -> None:
    planned = plan(1, number)
    drawn = draw(planned)
    assert not (drawn.part & ~drawn.mask).any()
    marker = planned.objects[0].marker
    assert marker is not None
    assert np.array_equal(drawn.part, disc(*offsets(SIZE, marker.x, marker.y), marker.radius))
    assert 0.15 < drawn.part.sum() / drawn.mask.sum() < 0.5
    assert not drawn.mask[[0, -1]].any()
    assert not drawn.mask[:, [0, -1]].any()


def test_every_body_holds_the_disc_that_markers_are_placed_in() -> None:
    centre, radius = 48 * UNITS_PER_PIXEL, 20 * UNITS_PER_PIXEL
    for shape in BODY_SHAPES.values():
        body = shape(*offsets(SIZE, centre, centre), radius)
        assert not (disc(*offsets(SIZE, centre, centre), radius * 13 // 16) & ~body).any()


@pytest.mark.parametrize("objects", [1, 2])
def test_classes_are_balanced(objects: int) -> None:
    drawn = [scene(2, number, objects, size=48) for number in range(10 * len(CLASSES))]
    assert Counter(item.class_name for item in drawn) == dict.fromkeys(CLASSES, 10)
    if objects == 2:
        assert Counter(item.other_class_name for item in drawn) == dict.fromkeys(CLASSES, 10)


def test_distractors_never_have_a_pattern() -> None:
    blank = 0
    for number in range(400):
        for item in plan(0, number, 1 + number % 2).distractors:
            assert item.marker is None or item.marker.class_name is None
            blank += item.marker is not None
    assert blank > 100  # bodies with blank markers do occur


def test_only_bodies_overlap_blank_markers() -> None:
    """A small shape on a blank marker would look like ink."""
    for number in range(200):
        has_marker = [item.marker is not None for item in plan(0, number).distractors]
        assert has_marker == sorted(has_marker)


def test_a_scene_without_objects_has_no_class() -> None:
    empty = draw(replace(plan(0, 0), objects=()))
    assert empty.class_name == ""
    assert not empty.mask.any()
    assert not empty.part.any()


@pytest.mark.parametrize("number", SEVERAL)
def test_two_objects_are_of_two_classes_and_do_not_touch(number: int) -> None:
    drawn = scene(0, number, objects=2)
    assert drawn.other_mask is not None
    assert drawn.other_part is not None
    assert drawn.other_class_name in CLASSES
    assert drawn.other_class_name != drawn.class_name
    assert not (drawn.mask & drawn.other_mask).any()
    assert not (drawn.other_part & ~drawn.other_mask).any()
    planned = plan(0, number, 2)
    where = changed(drawn, draw(with_class(planned, drawn.class_name, index=1)))
    assert where.any()
    assert not (where & ~drawn.other_part).any()


def test_patterns_differ_on_the_smallest_marker_and_are_their_own_mirror_image() -> None:
    side = 6 * UNITS_PER_PIXEL
    grid = offsets(13, 13 * UNITS_PER_PIXEL // 2, 13 * UNITS_PER_PIXEL // 2)
    plate = disc(*grid, side)
    regions = {name: pattern(*grid, side) & plate for name, (pattern, _) in CLASS_PATTERNS.items()}
    for name, region in regions.items():
        assert np.array_equal(region, region[:, ::-1]), name
        assert 0.15 < region.sum() / plate.sum() < 0.75, name
    assert len({region.tobytes() for region in regions.values()}) == len(CLASS_PATTERNS)


def test_a_dataset_of_scenes_has_masks_and_classes() -> None:
    dataset = scenes(6, seed=4, objects=2)
    assert (len(dataset), dataset.has_masks, dataset.has_labels, dataset.has_others) == (6, True, True, True)
    (part,) = iter_batches(dataset, PLAIN, 6)
    assert part.masks is not None
    for row in range(6):
        drawn = scene(4, row, objects=2)
        assert np.array_equal(part.masks[row].numpy(), drawn.mask)
        assert torch.equal(
            (part.pixels[row] * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(pixels(drawn).copy())
        )
        assert part.labels is not None
        assert part.others is not None
        assert (part.labels[row], part.others[row]) == (drawn.class_name, drawn.other_class_name)


def test_the_mask_of_a_dataset_may_be_the_part_and_hashes_differ_between_scenes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = scenes(3, mask="part")
    sample = dataset.read(1, PLAIN)
    assert sample.mask is not None
    assert np.array_equal(sample.mask.numpy(), scene(0, 1).part)
    assert sample.other is None
    assert not dataset.has_others
    hashes = [
        dataset.content_hash(0),
        dataset.content_hash(1),
        scenes(3).content_hash(0),
        scenes(3, seed=1).content_hash(0),
        scenes(3, objects=2).content_hash(0),
    ]
    assert len(set(hashes)) == 5
    assert dataset.content_hash(0) == scenes(9, mask="part").content_hash(0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scene").write_text("a file of that name is nothing to a scene")
    assert dataset.content_hash(0) == hashes[0]


def test_scenes_of_another_size_have_the_same_proportions() -> None:
    shares = [scene(0, number, size=192).mask.mean() / scene(0, number, size=96).mask.mean() for number in range(40)]
    assert 0.8 < float(np.mean(shares)) < 1.25
    assert scene(0, 0, size=192).picture.size == (192, 192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objects": 3}, "expected 1 or 2"),
        ({"size": 20}, "at least 48"),
        ({"count": 0}, "at least one"),
        ({"mask": "head"}, "'object' or 'part'"),
    ],
)
def test_invalid_options_raise_bad_input(options: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        scenes(**{"count": 1, **options})  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="no class 'star'"):
        with_class(plan(0, 0), "star")


def test_random_integers_are_uniform_and_permutations_complete() -> None:
    rng = IntRng("test")
    assert sorted(rng.permutation(20)) == list(range(20))
    counts = Counter(rng.integer(-1, 2) for _ in range(4000))
    assert set(counts) == {-1, 0, 1, 2}
    assert all(900 < count < 1100 for count in counts.values())
    values = rng.bytes(100, 101)
    assert values.shape == (100, 101)
    assert (values.min(), values.max()) == (0, 255)
    assert abs(values.mean() - 127.5) < 3


def test_drawing_is_fast() -> None:
    start = time.process_time()
    for number in range(100):
        scene(9, number)
    assert time.process_time() - start < 1.0  # of one core: more than 100 a second even on a slow one


def test_a_picture_is_a_plain_rgb_image() -> None:
    drawn = scene(0, 0)
    assert isinstance(drawn.picture, Image.Image)
    assert (drawn.picture.mode, drawn.picture.size) == ("RGB", (SIZE, SIZE))
    assert drawn.mask.dtype == drawn.part.dtype == np.dtype(bool)
