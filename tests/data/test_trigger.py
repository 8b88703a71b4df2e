"""Triggers: the pasted pixels and masks are exact, positions follow the seed, and specs open any data set with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import clairvit as cv
from clairvit.data.dataset import as_dataset
from clairvit.data.open import open_data
from clairvit.data.trigger import COLOURS, POSITIONS, Trigger, parse_trigger_spec, with_trigger
from clairvit.errors import BadInput, UnknownName
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from helpers.rounding import assert_same

SIZE = 48
MODEL = Model(nn.Identity(), "model", Preprocess((SIZE, SIZE)), ("cat", "dog", "hen"))


def photos(count: int = 3) -> Tensor:
    return torch.rand(count, 3, SIZE, 64, generator=torch.Generator().manual_seed(0))


def draws(count: int = 3) -> Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(1))


def folder(path: Path, count: int = 4) -> Path:
    """cat/0.png …, dog/0.png …: grey pictures of 48 × 48 pixels."""
    for name in ("cat", "dog"):
        (path / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (SIZE, SIZE), (90 + number, 90, 90)).save(path / name / f"{number}.png")
    return path


@pytest.mark.parametrize("size", [4, 10, 12])
def test_the_pattern_is_a_checkerboard_of_four_by_four(size: int) -> None:
    pattern = Trigger(size).pattern()
    assert pattern.shape == (3, size, size)
    for row in range(size):
        for col in range(size):
            assert pattern[:, row, col].tolist() == list(COLOURS[(row * 4 // size + col * 4 // size) % 2])


@pytest.mark.parametrize("position", POSITIONS)
def test_nothing_but_the_masked_pixels_changes_and_these_are_the_pattern(position: str) -> None:
    images, trigger = photos(), Trigger(8, position)
    before = images.clone()
    pasted, masks = trigger.paste(images, draws())
    assert torch.equal(images, before), "the caller's images stay"
    assert masks.flatten(1).sum(1).tolist() == [64] * 3
    for image, pasted_image, mask in zip(images, pasted, masks, strict=True):
        assert torch.equal(pasted_image[:, ~mask], image[:, ~mask])
        top, left = mask.nonzero()[0].tolist()
        assert torch.equal(pasted_image[:, top : top + 8, left : left + 8], trigger.pattern())
        assert bool(mask[top : top + 8, left : left + 8].all())


def test_corners_are_where_they_are_called() -> None:
    corners = {
        position: Trigger(8, position).corners(draws(1), (SIZE, 64)).tolist()[0]
        for position in POSITIONS
        if position != "random"
    }
    assert corners == {
        "top-left": [0, 0],
        "top-right": [0, 56],
        "bottom-left": [40, 0],
        "bottom-right": [40, 56],
        "center": [20, 28],
    }


def test_random_corners_reach_every_place_and_never_leave_the_image() -> None:
    ends = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1 - 2**-24, 0.5]])
    assert Trigger(8).corners(ends, (SIZE, 64)).tolist() == [[0, 0], [40, 56], [40, 28]]
    many = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    corners = Trigger(8).corners(many, (16, 16))
    assert {tuple(corner) for corner in corners.tolist()} == {(row, col) for row in range(9) for col in range(9)}


def test_a_normalised_image_gets_the_normalised_pattern() -> None:
    preprocess = Preprocess((SIZE, 64), (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (preprocess.mean, preprocess.std)
    )
    images = photos().double()
    plain, masks = Trigger(8).paste(images, draws())
    normalised, same_masks = Trigger(8).paste((images - mean) / std, draws(), preprocess)
    assert torch.equal(masks, same_masks)
    assert_same(normalised, (plain - mean) / std)


def test_a_triggered_data_set_has_the_trigger_as_mask_and_its_class_as_label(tmp_path: Path) -> None:
    files = sorted(map(str, folder(tmp_path).rglob("*.png")))
    dataset = as_dataset(files, MODEL, labels=[Path(file).parent.name for file in files])
    triggered = with_trigger(dataset, Trigger(8), "hen", seed=3)
    assert (triggered.has_masks, triggered.has_labels, triggered.has_others) == (True, True, True)
    places = set()
    for row in range(len(dataset)):
        clean, sample = dataset.read(row, MODEL), triggered.read(row, MODEL)
        assert sample.mask is not None
        assert int(sample.mask.sum()) == 64
        assert torch.equal(sample.pixels[:, ~sample.mask], clean.pixels[:, ~sample.mask])
        assert (sample.label, sample.other) == ("hen", clean.label)
        places.add(tuple(sample.mask.nonzero()[0].tolist()))
    assert len(places) > 1, "a random position is drawn per image"


def test_positions_follow_seed_and_name_and_nothing_else(tmp_path: Path) -> None:
    files = sorted(map(str, folder(tmp_path).rglob("*.png")))
    dataset = as_dataset(files, MODEL)
    whole, part = with_trigger(dataset, Trigger(8), 2), with_trigger(dataset.take([5, 1]), Trigger(8), 2)
    assert torch.equal(whole.read(5, MODEL).pixels, part.read(0, MODEL).pixels)
    other = with_trigger(dataset, Trigger(8), 2, seed=1)
    assert any(not torch.equal(whole.read(row, MODEL).mask, other.read(row, MODEL).mask) for row in range(8))


def test_every_setting_is_in_the_hash(tmp_path: Path) -> None:
    dataset = as_dataset(sorted(map(str, folder(tmp_path).rglob("*.png"))), MODEL)
    variants = [
        with_trigger(dataset, Trigger(8), 2),
        with_trigger(dataset, Trigger(9), 2),
        with_trigger(dataset, Trigger(8, "center"), 2),
        with_trigger(dataset, Trigger(8), 1),
        with_trigger(dataset, Trigger(8), 2, seed=1),
        dataset,
    ]
    assert len({variant.content_hash(0) for variant in variants}) == 6
    assert with_trigger(dataset, Trigger(8), 2).content_hash(0) == variants[0].content_hash(0)


def test_a_spec_opens_the_images_of_other_classes_with_the_trigger(tmp_path: Path) -> None:
    path = folder(tmp_path / "photos, all")
    opened = open_data(f"trigger(folder:{path}, class=Dog, size=8, position=top-left)")
    assert len(opened) == 4
    assert opened.notes[-1] == "4 of 8 images are of the trigger's class 'Dog' already and are left out"
    sample = opened.dataset.read(0, MODEL)
    assert sample.mask is not None
    assert bool(sample.mask[:8, :8].all())
    assert int(sample.mask.sum()) == 64
    assert (sample.label, sample.other) == ("Dog", 0)
    assert len(open_data(f"trigger(folder:{path},class=hen)", limit=6)) == 6


def test_localisation_metrics_score_maps_on_the_trigger(tmp_path: Path) -> None:
    """The trigger itself as a map has all of its mass and its highest point there, its opposite nothing."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 3)).eval()
    model = cv.wrap(module, size=SIZE, layout=cv.Layout((6, 6), 0, "avg"))
    dataset = open_data(f"trigger(folder:{folder(tmp_path)},class=2,size=16,position=bottom-right)", limit=2).dataset
    truth = torch.zeros(2, 6, 6)
    truth[:, 4:, 4:] = 1
    ex = cv.explain(model, torch.stack([dataset.read(row, model).pixels for row in range(2)]), "random", target=2)
    metrics = ("relevance-mass(upsampling=nearest)", "pointing-game(tolerance=0,upsampling=nearest)", "ap")
    for metric in metrics:
        score = cv.evaluate(model, dataset, replace(ex, maps=truth), metric, target="label")
        assert_same(score.values, [1.0, 1.0], label=metric)
    for metric in metrics[:2]:
        score = cv.evaluate(model, dataset, replace(ex, maps=1 - truth), metric, target="label")
        assert_same(score.values, [0.0, 0.0], label=metric)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trigger(folder:photos)", "names no class; expected trigger\\(NAME:PATH"),
        ("trigger(class=cat)", "names no images; expected trigger\\(NAME:PATH"),
        ("trigger(folder:photos,class=cat,size=big)", "size=big; expected a whole number of pixels"),
        ("trigger(folder:photos,class=cat,size=3)", "size=3 was given for a trigger; expected 4 or more"),
        (
            "trigger(folder:photos,class=cat,position=left)",
            "position=left was given for a trigger; expected one of random",
        ),
    ],
)
def test_specs_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_trigger_spec(text)


def test_an_unknown_option_is_refused_and_other_specs_are_not_ours() -> None:
    with pytest.raises(UnknownName, match="A trigger has no option 'colour=red'"):
        parse_trigger_spec("trigger(folder:photos,class=cat,colour=red)")
    assert parse_trigger_spec("pets:/data") is None


def test_a_trigger_larger_than_half_the_image_is_refused() -> None:
    with pytest.raises(
        BadInput, match="size=25 was given for a trigger on images of 48 × 64 pixels; expected at most 24"
    ):
        Trigger(25).paste(photos(), draws())


def test_masks_and_a_set_of_the_trigger_s_class_alone_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    with pytest.raises(BadInput, match="whose mask is the trigger"):
        open_data(f"trigger(folder:{path},class=dog)", masks=path)
    (path / "dog").rename(tmp_path.parent / f"{tmp_path.name}-dog")
    with pytest.raises(BadInput, match="All 4 images are of class 'cat'"):
        open_data(f"trigger(folder:{path},class=cat)")
