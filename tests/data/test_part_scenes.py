"""Part scenes: the same bytes everywhere, disjoint masks, removal that changes a component's own pixels alone."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from clairvit.data.dataset import iter_batches
from clairvit.data.open import open_data
from clairvit.data.part_scenes import (
    CLASSES,
    MAX_DISTRACTORS,
    PARTS,
    SIZE,
    TABLE,
    VARIANTS,
    PartScenePlan,
    compose,
    draw,
    part_scene,
    part_scenes,
    plan,
)
from clairvit.data.parts import PartTable
from clairvit.errors import BadInput, UnknownName
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess

PLAIN = Model(nn.Identity(), "plain", Preprocess((SIZE, SIZE), (0.0,) * 3, (1.0,) * 3), CLASSES)
SEVERAL = range(16)


def without(planned: PartScenePlan, removed: tuple[int, ...]) -> PartScenePlan:
    """The plan without some components, numbered as in the masks; the others stay where they are."""
    parts = tuple(part for index, part in enumerate(planned.parts) if index not in removed)
    distractors = tuple(blob for k, blob in enumerate(planned.distractors) if k + len(PARTS) not in removed)
    return replace(planned, parts=parts, distractors=distractors)


def test_the_same_seed_draws_the_same_bytes_on_every_machine() -> None:
    content = b"".join(
        layer.tobytes()
        for number in range(4)
        for layer in vars(part_scene(0, number)).values()
        if not isinstance(layer, str)
    )
    assert hashlib.blake2b(content, digest_size=8).hexdigest() == "7e8a845d886632f2"


def test_a_scene_depends_on_its_seed_number_and_size_alone() -> None:
    alone = part_scene(3, 7)
    part_scene(3, 6)
    assert part_scene(3, 7).full.tobytes() == alone.full.tobytes()
    drawn = {part_scene(*arguments).full.tobytes() for arguments in ((0, 1), (1, 0), (0, 0), (1, 1), (0, 0, 96))}
    assert len(drawn) == 5


@pytest.mark.parametrize("number", SEVERAL)
def test_masks_are_disjoint_and_none_is_empty(number: int) -> None:
    planned = plan(0, number)
    drawn = draw(planned)
    masks = drawn.masks()
    assert len(masks) == drawn.count == len(PARTS) + len(planned.distractors)
    assert masks.sum(0).max() == 1
    assert masks.any((1, 2)).all()
    for index in range(drawn.count):  # drawn alone, a component has the same pixels: no other covers any of them
        alone = draw(without(planned, tuple(k for k in range(drawn.count) if k != index)))
        assert np.array_equal(alone.components > 0, masks[index])


@pytest.mark.parametrize("number", SEVERAL)
def test_removal_is_the_same_scene_drawn_without_the_component(number: int) -> None:
    planned = plan(0, number)
    drawn = draw(planned)
    masks = drawn.masks()
    groups = [(index,) for index in range(drawn.count)] + [(0, 3), tuple(range(len(PARTS))), tuple(range(drawn.count))]
    for removed in groups:
        keep: NDArray[np.bool_] = ~np.isin(np.arange(drawn.count), removed)
        again = draw(without(planned, removed)).full
        assert np.array_equal(compose(drawn, keep), again)
        changed = (again != drawn.full).any(-1)
        assert changed.any()
        assert not (changed & ~masks[list(removed)].any(0)).any()


def test_the_variants_alone_determine_the_class() -> None:
    """Another class in the same plan changes the pixels of the parts in which the two differ, and no others."""
    planned = plan(0, 5)
    drawn = draw(planned)
    first = CLASSES.index(drawn.class_name)
    for second, variants in enumerate(TABLE.variants):
        parts = tuple(replace(part, variant=v) for part, v in zip(planned.parts, variants, strict=True))
        other = draw(replace(planned, class_name=CLASSES[second], parts=parts))
        assert np.array_equal(other.components, drawn.components)
        changed = set(drawn.components[(other.full != drawn.full).any(-1)].tolist())
        assert changed == {1 + part for part in TABLE.separating(first, second)}


def test_classes_are_balanced_and_have_distractors() -> None:
    plans = [plan(1, number) for number in range(2 * len(CLASSES))]
    assert sorted(planned.class_name for planned in plans) == sorted(CLASSES * 2)
    counts = [len(planned.distractors) for planned in plans]
    assert min(counts) >= 1
    assert max(counts) == MAX_DISTRACTORS


def test_classes_differ_in_known_parts() -> None:
    assert TABLE.classes == tuple(sorted(set(CLASSES)))
    for first, second in itertools.combinations(range(len(CLASSES)), 2):
        assert len(TABLE.separating(first, second)) >= 2
        assert TABLE.shared(first, second) == TABLE.shared(second, first)
    for part, variant in itertools.product(range(len(PARTS)), range(len(VARIANTS))):
        assert sum(variants[part] == variant for variants in TABLE.variants) >= 3
    for c in range(len(CLASSES)):
        pair = TABLE.contrast_classes(c)
        assert pair is not None
        near_parts, far_parts = (set(TABLE.shared(c, near)) for near in pair)
        assert (len(near_parts), len(far_parts), near_parts & far_parts) == (2, 2, set())


def test_sufficient_sets_by_brute_force() -> None:
    def determines(c: int, members: tuple[int, ...]) -> bool:
        letters = [CLASSES[c][part] for part in members]
        return sum([name[part] for part in members] == letters for name in CLASSES) == 1

    every = [m for size in range(len(PARTS) + 1) for m in itertools.combinations(range(len(PARTS)), size)]
    for c in range(len(CLASSES)):
        sufficient = [set(members) for members in every if determines(c, members)]
        minimal = [members for members in sufficient if not any(other < members for other in sufficient)]
        assert [set(members) for members in TABLE.sufficient_sets(c)] == minimal
        in_all = set.intersection(*minimal)
        assert set(TABLE.necessary_parts(c)) == in_all
        for part in range(len(PARTS)):  # without a necessary part another class has all the parts left
            left = tuple(k for k in range(len(PARTS)) if k != part)
            assert (len(TABLE.compatible(c, left)) > 1) == (part in in_all)


def test_a_table_by_hand() -> None:
    table = PartTable(("roof", "wheel"), ("car", "van", "cart"), ((0, 0), (1, 0), (1, 1)))
    assert table.sufficient_sets(0) == ((0,),)
    assert table.sufficient_sets(1) == ((0, 1),)
    assert table.sufficient_sets(2) == ((1,),)
    assert table.necessary_parts(1) == (0, 1)
    assert table.separating(0, 2) == (0, 1)
    assert table.compatible(1, [0]) == (1, 2)
    assert table.contrast_classes(0) is None


def test_the_dataset_renders_what_is_drawn() -> None:
    (batch,) = iter_batches(part_scenes(2, seed=4), PLAIN, 2)
    assert batch.parts is not None
    assert batch.masks is not None
    for number, parts in enumerate(batch.parts):
        drawn = part_scene(4, number)
        assert torch.equal(parts.masks, torch.from_numpy(drawn.masks()))
        keep = torch.ones(3, parts.count, dtype=torch.bool)
        keep[1, 2] = keep[2, [0, parts.count - 1]] = False
        assert torch.equal(parts.render(keep)[0], batch.pixels[number])
        for row, variant in zip(keep, parts.render(keep), strict=True):
            expected = torch.from_numpy(compose(drawn, row.numpy())).permute(2, 0, 1) / 255
            assert torch.equal(variant, expected)
        whole = drawn.body | drawn.masks()[: len(PARTS)].any(0)
        assert np.array_equal(batch.masks[number].numpy(), whole)
        assert batch.labels is not None
        assert batch.labels[number] == drawn.class_name


def test_open_data_and_what_it_refuses() -> None:
    data = open_data("parts:40", limit=8, seed=3)
    assert (len(data), data.total, data.split, data.classes) == (8, 40, "all", CLASSES)
    assert data.dataset.read(5, PLAIN).label == part_scene(3, 5).class_name
    assert data.dataset.content_hash(0) != open_data("parts:40", seed=4).dataset.content_hash(0)
    with pytest.raises(BadInput, match=r"'parts:many' was given; expected parts, or parts:COUNT"):
        open_data("parts:many")
    with pytest.raises(UnknownName, match=r"Parts have no split 'two'"):
        open_data("parts", split="two")
    with pytest.raises(BadInput, match=r"0 part scenes were asked for"):
        part_scenes(0)
    with pytest.raises(BadInput, match=r"size=20 was given; expected part scenes of at least 64 pixels"):
        part_scenes(2, size=20)
    parts = part_scenes(1).read(0, PLAIN).parts
    assert parts is not None
    with pytest.raises(BadInput, match=r"keep has shape \[1, 3\]"):
        parts.render(torch.ones(1, 3, dtype=torch.bool))
