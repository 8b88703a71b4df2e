"""What a paper states of its images: which ones, how they get to the model's size, how fine masks are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clairvit as cv
from clairvit.bench.plan import DataConfig, ModelConfig, Plan
from clairvit.bench.store import Store
from clairvit.data.dataset import ImageDataset, as_dataset, masks_on_patches
from clairvit.data.masks import prepare_mask
from clairvit.data.open import open_data
from clairvit.errors import BadInput
from clairvit.models.preprocess import Preprocess, preprocess_options
from clairvit.papers.paper import Paper, find_paper
from clairvit.papers.preparation import ImageSet, Preparation, default_model, patch_grid, prepared
from clairvit.papers.reproduce import Reproduction, load_data, reproduce
from clairvit.papers.setup import ReproductionConfig
from clairvit.reports.study_results import read_store
from helpers.tiny_models import wrapped

MODEL = wrapped("timm-vit", torch.float64)
NAMES = ("2007_000243", "2007_000720")
GRID = (14, 14)


def blob(rows: int, columns: int, seed: int) -> np.ndarray:
    """An object with an oblique outline, in 0 and 255."""
    down, across = np.mgrid[:rows, :columns]
    centre = np.random.default_rng(seed).uniform(0.3, 0.7, 2) * (rows, columns)
    inside = np.hypot((down - centre[0]) * 1.3, across - centre[1] + 0.2 * down) < 0.3 * rows
    return np.where(inside, 255, 0).astype(np.uint8)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The two photos of a paper, and two others, with masks."""
    for place in ("photos", "masks"):
        (tmp_path / place).mkdir()
    for seed, name in enumerate((*NAMES, "other", "2007_0002430")):
        pixels = np.random.default_rng(seed).integers(0, 255, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{name}.png")
        Image.fromarray(blob(48, 64, seed)).save(tmp_path / "masks" / f"{name}.png")
    return tmp_path


def paper(**changes: object) -> Paper:
    return replace(find_paper("joita"), image_set=ImageSet(NAMES, "trainval"), **changes)  # type: ignore[arg-type]


def config(folder: Path, **data: object) -> ReproductionConfig:
    chosen = DataConfig(f"folder:{folder}/photos", masks=f"{folder}/masks", **data)  # type: ignore[arg-type]
    return ReproductionConfig(paper(), ModelConfig("tiny"), chosen)


def ran(setup: ReproductionConfig, folder: Path) -> Reproduction:
    return reproduce(setup, Store.open(folder / "store"), model=MODEL)


def remarks(result: Reproduction, topic: str) -> list[str]:
    return [sentence for about, sentence in result.differences if about == topic]


# Masks on the patches


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rows", "columns"), [(333, 500), (500, 375), (315, 275)])
def test_a_squashed_mask_is_the_one_of_joitas_code(rows: int, columns: int, seed: int) -> None:
    """Image.open(mask).convert("L").resize((14, 14)) > 127, and each pixel has the value of its patch."""
    mask = Image.fromarray(blob(rows, columns, seed))
    expected = np.asarray(mask.resize(GRID)) > 127
    preprocess = Preprocess(resize=(224, 224), keep_ratio=False, mask_grid=GRID)
    objects, void = prepare_mask(mask, preprocess)
    assert 0 < expected.sum() < expected.size
    assert np.array_equal(objects.numpy(), np.kron(expected, np.ones((16, 16), dtype=bool)))
    assert not void.any()


def test_a_cropped_mask_is_of_what_the_model_sees() -> None:
    """Whole patches of object at the edges of the crop, which no other way of resizing could move."""
    whole = np.zeros((248, 496), dtype=np.uint8)
    whole[12 : 12 + 112, 136 : 136 + 64] = 255  # the crop is of rows 12 … 235 and columns 136 … 359
    objects, _ = prepare_mask(Image.fromarray(whole), Preprocess(resize=248, mask_grid=GRID))
    expected = torch.zeros(GRID, dtype=torch.bool)
    expected[:7, :4] = True
    assert torch.equal(objects[8::16, 8::16], expected)


@pytest.mark.parametrize(
    ("objects", "void", "expected"),
    [(5, 0, "object"), (3, 5, "void"), (3, 3, "object"), (2, 3, ""), (0, 8, "void"), (3, 1, "")],
)
def test_a_patch_is_void_by_half_of_it_and_object_by_half_of_the_rest(objects: int, void: int, expected: str) -> None:
    """Shares of eight columns, mixed finely: object, void, background; 3 of 5 are object, 3 of 7 are not."""
    columns = np.repeat([255, 128, 0], [objects, void, 8 - objects - void]).astype(np.uint8)
    mask = Image.fromarray(np.tile(columns, (64, 8)))
    preprocess = Preprocess(size=(64, 64), resize=(64, 64), keep_ratio=False, mask_grid=(1, 1))
    is_object, is_void = (bool(pixels[0, 0]) for pixels in prepare_mask(mask, preprocess))
    assert (is_object, is_void) == (expected == "object", expected == "void")


def test_nearest_scores_on_them_are_those_of_the_grid() -> None:
    """By the naive formulas on 4 × 4 numbers, as Joita's metrics.py has them."""
    model = replace(MODEL, preprocess=replace(MODEL.preprocess, resize=(32, 32), keep_ratio=False))
    masks = [blob(32, 40, seed) for seed in range(3)]
    pictures = [Image.fromarray(np.stack([mask] * 3, -1)) for mask in masks]
    images = masks_on_patches(as_dataset(pictures, model, masks=masks), (4, 4))
    methods, metrics = ["ixg"], ["pixel-accuracy(upsampling=nearest)", "iou(upsampling=nearest)", "ap"]
    accuracy, overlap, precision = cv.evaluate(model, images, methods, metrics).values()
    maps = cv.explain(model, pictures, "ixg").maps
    for row, (values, mask) in enumerate(zip(maps, masks, strict=True)):
        flat = values.flatten().double()
        scaled = (flat - flat.min()) / (flat.max() - flat.min())
        positive = torch.from_numpy(np.asarray(Image.fromarray(mask).resize((4, 4))) > 127).flatten()
        cut = scaled > 0.5
        assert accuracy.values[row] == (cut == positive).double().mean()
        assert overlap.values[row] == (cut & positive).sum().double() / (cut | positive).sum()
        hits = positive[flat.argsort(descending=True)].double()
        ranked = (hits * hits.cumsum(0) / torch.arange(1, 17)).sum() / hits.sum()
        assert precision.values[row].item() == pytest.approx(ranked.item(), abs=1e-12)


def test_the_grid_is_the_models(photos: Path) -> None:
    assert patch_grid(MODEL, load_data(config(photos), MODEL).dataset) == (4, 4)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
    flat = cv.wrap(net, mean=0.5, std=0.5, size=8)
    assert patch_grid(flat, load_data(config(photos), flat).dataset) is None


# Which images


def test_the_papers_images_are_picked_by_their_names(photos: Path) -> None:
    setup = prepared(config(photos))
    assert setup.data.names == NAMES
    assert prepared(setup) == setup
    assert load_data(setup, MODEL).dataset.names == ("2007_000243.png", "2007_000720.png")
    result = ran(config(photos), photos)
    assert result.images == 2
    assert "These are the paper's 2 images, by their names (2007_000243 … 2007_000720)." in remarks(result, "images")
    assert remarks(result, "numbers")[0].endswith("the paper has them for this data.")


def test_a_limit_takes_a_sample_in_their_place(photos: Path) -> None:
    result = ran(config(photos, limit=3), photos)
    assert result.images == 3
    (sentence,) = [text for text in remarks(result, "images") if "limit" in text]
    assert sentence.startswith("The paper has its numbers for 2 images (2007_000243 … 2007_000720); here")
    assert remarks(result, "numbers")[0].endswith("the paper has none for this data.")


def test_without_all_of_them_the_data_is_taken_as_it_is(photos: Path) -> None:
    (photos / "photos" / f"{NAMES[0]}.png").unlink()
    result = ran(config(photos), photos)
    assert result.images == 3
    expected = (
        "The paper has its numbers for 2 images (2007_000243 … 2007_000720); here 3 images, 1 of them among these."
    )
    assert expected in remarks(result, "images")


def test_voc_is_read_from_the_split_that_holds_them(tmp_path: Path) -> None:
    for place in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / place).mkdir(parents=True)
    for seed, name in enumerate((*NAMES, "2008_000001")):
        Image.fromarray(np.stack([blob(32, 32, seed)] * 3, -1)).save(tmp_path / "JPEGImages" / f"{name}.jpg")
        Image.fromarray(blob(32, 32, seed) // 255 * 12).save(tmp_path / "SegmentationClass" / f"{name}.png")
    for split, names in {"train": NAMES[:1], "val": ("2008_000001", NAMES[1])}.items():
        (tmp_path / "ImageSets/Segmentation" / f"{split}.txt").write_text("\n".join(names))
    both = "\n".join((*NAMES, "2008_000001"))
    (tmp_path / "ImageSets/Segmentation/trainval.txt").write_text(both)
    setup = replace(config(tmp_path), data=DataConfig(f"voc:{tmp_path}"))
    assert load_data(prepared(setup), MODEL).dataset.names == tuple(
        name
        for name in load_data(replace(setup, data=DataConfig(f"voc:{tmp_path}", "trainval")), MODEL).dataset.names
        if "2007" in name
    )
    only_val = replace(setup, data=DataConfig(f"voc:{tmp_path}", "val"))
    assert prepared(only_val).data == only_val.data, "a split that was asked for is not changed"


def test_a_study_names_images_and_says_which_are_not_there(photos: Path) -> None:
    opened = open_data(f"folder:{photos}/photos", names=["other", "2007_000243.png"])
    assert opened.dataset.names == ("2007_000243.png", "other.png")
    assert len(open_data(f"folder:{photos}/photos", limit=1, names=NAMES)) == 1
    with pytest.raises(BadInput, match=r"^1 of the 2 images that were named are not in .* \(nowhere\); expected names"):
        open_data(f"folder:{photos}/photos", names=["other", "nowhere"])


def test_a_stored_study_opens_the_same_images_and_masks(photos: Path) -> None:
    plans: list[Plan] = []
    store = Store.open(photos / "store")
    reproduce(config(photos), store, model=MODEL, on_plan=plans.append)
    (study,) = read_store(store).studies
    assert study.data[0].mask_grid == (4, 4)
    opened: ImageDataset = study.data[0].open(study.seed)
    assert tuple(map(opened.content_hash, range(2))) == plans[0].units[0].image_hashes


# Geometry and model


def test_squash_and_crop() -> None:
    cropped = Preprocess(resize=248)
    squashed = preprocess_options(fit="squash").applied_to(cropped)
    assert (squashed.resize, squashed.keep_ratio) == ((224, 224), False)
    assert preprocess_options(fit="crop").applied_to(squashed).keep_ratio
    boxed = preprocess_options(resize=256, fit="squash").applied_to(cropped)
    assert (boxed.resize, boxed.keep_ratio) == ((256, 256), False)
    assert "resize" not in preprocess_options(fit="squash").missing()
    with pytest.raises(BadInput, match=r"^fit='stretch' is unknown\. Expected one of crop, squash\.$"):
        cv.load("scenes", fit="stretch")
    model = cv.load("scenes", fit="squash")
    wide = Image.new("RGB", (960, 96))
    wide.paste((255, 255, 255), (0, 0, 480, 96))
    left_half = model.preprocess.size[1] // 2
    pixels = open_pixels(wide, model)
    assert (pixels[..., : left_half - 2] > 0).all(), "nothing is cut off"
    assert (pixels[..., left_half + 2 :] < 0).all()


def open_pixels(picture: Image.Image, model: cv.Model) -> torch.Tensor:
    return as_dataset([picture], model).read(0, model).pixels


def test_what_is_stated_of_the_model_wins(photos: Path) -> None:
    setup = config(photos)
    assert prepared(setup).model == ModelConfig("tiny", fit="squash", interpolation="bilinear")
    for stated in (ModelConfig("tiny", fit="crop"), ModelConfig("tiny", resize=40), ModelConfig("tiny", crop=40)):
        assert prepared(replace(setup, model=stated)).model == stated
    plain = replace(setup, paper=replace(setup.paper, preparation=Preparation(), image_set=None))
    assert prepared(plain) == plain


def test_other_preparations_are_reported(photos: Path) -> None:
    result = ran(config(photos), photos)
    fit, resolution = remarks(result, "preparation")
    assert fit == "Images are resized and cropped to 32 × 32; in the paper squashed to 224 × 224."
    assert resolution.startswith("Masks are reduced to the 4 × 4 patches (14 × 14 in the paper)")
    squashed = replace(MODEL, preprocess=replace(MODEL.preprocess, resize=(32, 32), keep_ratio=False))
    same = replace(config(photos), paper=paper(preparation=Preparation(fit="squash", size=32)))
    result = reproduce(same, Store.open(photos / "other"), model=squashed)
    assert remarks(result, "preparation") == ["Images are squashed to 32 × 32, as in the paper."]


def test_the_papers_model_is_the_default() -> None:
    assert default_model("hf:google/vit-base-patch16-224", "voc:/data") == "hf:google/vit-base-patch16-224"
    assert default_model("hf:google/vit-base-patch16-224", "scenes:8") == "pets"
    assert default_model(None, "voc:/data") == "pets"
    assert len(find_paper("joita").image_set.names) == 14  # type: ignore[union-attr]
