"""Scenes: the same seed draws the same bytes everywhere, and what is said of the pixels is true of every pixel."""

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

from clairvit.data.dataset import parts
from clairvit.data.drawing import BODIES, FINE, INKS, IntRng, disc, plane
from clairvit.data.scenes import CLASSES, SIZE, Plan, Scene, draw, plan, scene, scenes, with_class
from clairvit.errors import BadInput
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

PLAIN = Model(nn.Identity(), "plain", Preprocess((SIZE, SIZE), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
SEVERAL = range(24)


def pixels(found: Scene) -> NDArray[np.uint8]:
    return np.asarray(found.picture)


def changed(one: Scene, other: Scene) -> NDArray[np.bool_]:
    return (pixels(one) != pixels(other)).any(-1)


def without(planned: Plan, place: int) -> Plan:
    """An object is made empty, so that the others keep their places, and with them their grain."""
    objects = list(planned.objects)
    badge = objects[place].badge
    assert badge is not None
    objects[place] = replace(objects[place], shape="square", radius=-FINE, badge=replace(badge, x=-99999))
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
    found = {pixels(scene(*which)).tobytes() for which in ((0, 1), (1, 0), (0, 0), (1, 1), (0, 1, 2), (10, 1), (1, 10))}
    assert len(found) == 7


@pytest.mark.parametrize("number", SEVERAL)
def test_the_part_alone_decides_the_class(number: int) -> None:
    planned = plan(0, number)
    first = draw(planned)
    for kind in CLASSES:
        other = draw(with_class(planned, kind))
        assert other.kind == kind
        where = changed(first, other)
        assert where.any() == (kind != first.kind)
        assert not (where & ~first.part).any()
        assert np.array_equal(other.part, first.part)
        assert np.array_equal(other.mask, first.mask)


def test_nothing_but_the_part_looks_at_the_class() -> None:
    """All that a plan says apart from the class is the same if classes are dealt out differently."""
    for number in SEVERAL:
        planned = plan(0, number)
        assert with_class(planned, "dot") == with_class(with_class(planned, "ring"), "dot")
        (thing,) = planned.objects
        assert thing.badge is not None
        assert thing.badge.kind == draw(planned).kind


@pytest.mark.parametrize("objects", [1, 2])
@pytest.mark.parametrize("number", SEVERAL)
def test_masks_are_exact(number: int, objects: int) -> None:
    """Without the object no pixel outside its mask changes, and almost every one inside does."""
    planned = plan(5, number, objects)
    whole = draw(planned)
    masks = [whole.mask, *([whole.other_mask] if whole.other_mask is not None else [])]
    assert len(masks) == objects
    for place, mask in enumerate(masks):
        bare = draw(without(planned, place))
        assert not (bare.mask if place == 0 else bare.other_mask).any()  # type: ignore[union-attr]
        where = changed(whole, bare)
        assert not (where & ~mask).any()
        assert where[mask].mean() > 0.95  # by chance a pixel may be of the colour that was behind it


@pytest.mark.parametrize("number", SEVERAL)
def test_the_part_is_a_whole_disc_on_the_object(number: int) -> None:
    planned = plan(1, number)
    found = draw(planned)
    assert not (found.part & ~found.mask).any()
    badge = planned.objects[0].badge
    assert badge is not None
    assert np.array_equal(found.part, disc(*plane(SIZE, badge.x, badge.y), badge.radius))
    assert 0.15 < found.part.sum() / found.mask.sum() < 0.5
    assert not found.mask[[0, -1]].any()
    assert not found.mask[:, [0, -1]].any()


def test_every_body_holds_the_disc_that_badges_are_placed_in() -> None:
    for shape in BODIES.values():
        body = shape(*plane(SIZE, 48 * FINE, 48 * FINE), 20 * FINE)
        assert not (disc(*plane(SIZE, 48 * FINE, 48 * FINE), 20 * FINE * 13 // 16) & ~body).any()


@pytest.mark.parametrize("objects", [1, 2])
def test_classes_are_balanced(objects: int) -> None:
    found = [scene(2, number, objects, size=48) for number in range(10 * len(CLASSES))]
    assert Counter(one.kind for one in found) == dict.fromkeys(CLASSES, 10)
    if objects == 2:
        assert Counter(one.other_kind for one in found) == dict.fromkeys(CLASSES, 10)


def test_strays_never_carry_a_deciding_part() -> None:
    blank = 0
    for number in range(400):
        for stray in plan(0, number, 1 + number % 2).strays:
            assert stray.badge is None or stray.badge.kind is None
            blank += stray.badge is not None
    assert blank > 100  # bodies with blank badges do stand about


def test_nothing_lies_on_a_blank_badge_but_bodies() -> None:
    """A small shape on a blank badge would look like ink."""
    for number in range(200):
        badged = [stray.badge is not None for stray in plan(0, number).strays]
        assert badged == sorted(badged)


def test_a_scene_without_objects_has_no_class() -> None:
    empty = draw(replace(plan(0, 0), objects=()))
    assert empty.kind == ""
    assert not empty.mask.any()
    assert not empty.part.any()


@pytest.mark.parametrize("number", SEVERAL)
def test_two_objects_are_of_two_classes_and_do_not_touch(number: int) -> None:
    found = scene(0, number, objects=2)
    assert found.other_mask is not None
    assert found.other_part is not None
    assert found.other_kind in CLASSES
    assert found.other_kind != found.kind
    assert not (found.mask & found.other_mask).any()
    assert not (found.other_part & ~found.other_mask).any()
    planned = plan(0, number, 2)
    where = changed(found, draw(with_class(planned, found.kind, place=1)))
    assert where.any()
    assert not (where & ~found.other_part).any()


def test_inks_can_be_told_apart_on_the_smallest_badge_and_are_their_own_mirror_image() -> None:
    side = 6 * FINE
    grid = plane(13, 13 * FINE // 2, 13 * FINE // 2)
    plate = disc(*grid, side)
    seen = {name: pattern(*grid, side) & plate for name, (pattern, _) in INKS.items()}
    for name, region in seen.items():
        assert np.array_equal(region, region[:, ::-1]), name
        assert 0.15 < region.sum() / plate.sum() < 0.75, name
    assert len({region.tobytes() for region in seen.values()}) == len(INKS)


def test_an_album_of_scenes_has_what_is_known_of_them() -> None:
    dataset = scenes(6, seed=4, objects=2)
    assert (len(dataset), dataset.has_masks, dataset.has_labels, dataset.has_others) == (6, True, True, True)
    (part,) = parts(dataset, PLAIN, 6)
    assert part.masks is not None
    for row in range(6):
        found = scene(4, row, objects=2)
        assert np.array_equal(part.masks[row].numpy(), found.mask)
        assert torch.equal(
            (part.pixels[row] * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(pixels(found).copy())
        )
        assert part.labels is not None
        assert part.others is not None
        assert (part.labels[row], part.others[row]) == (found.kind, found.other_kind)


def test_the_mask_of_an_album_may_be_the_part_and_marks_tell_scenes_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = scenes(3, mask="part")
    page = dataset.read(1, PLAIN)
    assert page.mask is not None
    assert np.array_equal(page.mask.numpy(), scene(0, 1).part)
    assert page.other is None
    assert not dataset.has_others
    marks = [
        dataset.mark(0),
        dataset.mark(1),
        scenes(3).mark(0),
        scenes(3, seed=1).mark(0),
        scenes(3, objects=2).mark(0),
    ]
    assert len(set(marks)) == 5
    assert dataset.mark(0) == scenes(9, mask="part").mark(0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scene").write_text("a file of that name is nothing to a scene")
    assert dataset.mark(0) == marks[0]


def test_scenes_of_another_size_have_the_same_proportions() -> None:
    shares = [scene(0, number, size=192).mask.mean() / scene(0, number, size=96).mask.mean() for number in range(40)]
    assert 0.8 < float(np.mean(shares)) < 1.25
    assert scene(0, 0, size=192).picture.size == (192, 192)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"objects": 3}, "expected 1 or 2"),
        ({"size": 20}, "at least 48"),
        ({"count": 0}, "at least one"),
        ({"mask": "head"}, "'object' or 'part'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(asked: dict[str, int], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        scenes(**{"count": 1, **asked})  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="no class 'star'"):
        with_class(plan(0, 0), "star")


def test_lots_are_even_and_orders_are_whole() -> None:
    lots = IntRng("test")
    assert sorted(lots.order(20)) == list(range(20))
    drawn = Counter(lots.number(-1, 2) for _ in range(4000))
    assert set(drawn) == {-1, 0, 1, 2}
    assert all(900 < count < 1100 for count in drawn.values())
    values = lots.bytes(100, 101)
    assert values.shape == (100, 101)
    assert (values.min(), values.max()) == (0, 255)
    assert abs(values.mean() - 127.5) < 3


def test_drawing_is_quick() -> None:
    begun = time.process_time()
    for number in range(100):
        scene(9, number)
    assert time.process_time() - begun < 1.0  # of one core: more than 100 a second even on a slow one


def test_a_picture_is_a_plain_rgb_image() -> None:
    found = scene(0, 0)
    assert isinstance(found.picture, Image.Image)
    assert (found.picture.mode, found.picture.size) == ("RGB", (SIZE, SIZE))
    assert found.mask.dtype == found.part.dtype == np.dtype(bool)
