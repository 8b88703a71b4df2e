"""Batches: the same pixels as timm and torchvision, from every kind of input, and folders of files."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import nn
from torchvision import models as zoo
from torchvision import transforms

from clairvit.errors import BadInput, ClairWarning
from clairvit.models.image_files import find_images, read_image
from clairvit.models.images import Batch, prepare, to_pixels
from clairvit.models.model import Model
from clairvit.models.preprocess import Preprocess
from clairvit.models.sources.timm import preprocess as timm_preprocess
from helpers.rounding import assert_same, growth


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return read_image("demo")


@pytest.fixture
def model() -> Model:
    return Model(nn.Linear(1, 1), "tiny", Preprocess(size=(32, 48), resize=None))


# preprocessing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"img_size": (64, 96)}),
        ("vit_tiny_patch16_224", {"img_size": (96, 64)}),
        ("vit_base_patch16_siglip_224", {}),
        ("eva02_tiny_patch14_336", {}),
        ("deit_tiny_patch16_224", {}),
    ],
)
@pytest.mark.parametrize("size", [(451, 300), (300, 451), (97, 97), (13, 40)])
def test_same_pixels_as_timm(photo: Image.Image, name: str, options: dict[str, object], size: tuple[int, int]) -> None:
    module = timm.create_model(name, **options).to("meta")  # older versions of timm cannot be made there
    config = resolve_model_data_config(module)
    config["input_size"] = (3, *options.get("img_size", config["input_size"][1:]))  # type: ignore[misc]
    image = photo.resize(size)
    assert torch.equal(to_pixels(image, timm_preprocess(module)), create_transform(**config, is_training=False)(image))


def test_squashing_like_timm(photo: Image.Image) -> None:
    how = Preprocess(size=(64, 64), resize=(71, 71), keep_ratio=False, interpolation="bicubic")
    theirs = create_transform((3, 64, 64), crop_pct=0.9, crop_mode="squash", interpolation="bicubic")
    assert torch.equal(to_pixels(photo, how), theirs(photo))


def test_same_pixels_as_torchvision(photo: Image.Image) -> None:
    from clairvit.models.sources.torchvision import preprocess

    weights = zoo.ViT_B_16_Weights.DEFAULT
    for size in ((451, 300), (300, 451), (100, 100)):
        image = photo.resize(size)
        # float32, three operations a value: / 255, − mean, / std
        assert_same(to_pixels(image, preprocess(weights, None)), weights.transforms()(image), growth=growth(3, 1))


def test_short_side_smaller_than_the_crop_is_padded_like_torchvision(photo: Image.Image) -> None:
    how = Preprocess(size=(96, 64), resize=48, interpolation="bilinear")
    theirs = transforms.Compose(
        [
            transforms.Resize(48),
            transforms.CenterCrop((96, 64)),
            transforms.ToTensor(),
            transforms.Normalize(how.mean, how.std),
        ]
    )
    assert torch.equal(to_pixels(photo, how), theirs(photo))


# batches ------------------------------------------------------------------------------------------------------------


def test_every_kind_of_image_gives_the_same_pixels(tmp_path: Path, photo: Image.Image, model: Model) -> None:
    path = tmp_path / "cat.png"
    photo.save(path)
    array = np.asarray(photo)
    expected = prepare(photo, model).pixels
    assert expected.shape == (1, 3, 32, 48)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    for image in (path, str(path), array, tensor, tensor[None], array[None], [array], (path,)):
        assert torch.equal(prepare(image, model).pixels, expected)
    assert torch.equal(prepare(expected, model).pixels, expected)
    assert torch.equal(prepare([expected[0], path], model).pixels, expected.repeat(2, 1, 1, 1))


def test_single_means_not_a_list(photo: Image.Image, model: Model) -> None:
    array = np.asarray(photo)
    pixels = torch.zeros(3, 32, 48)
    singles = (photo, array, array[..., 0], pixels, torch.zeros(3, 8, 8, dtype=torch.uint8), "demo")
    lists = ([photo], [array, "demo"], array[None], pixels[None], [pixels], torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert all(prepare(image, model).single for image in singles)
    assert not any(prepare(images, model).single for images in lists)


def test_names(tmp_path: Path, photo: Image.Image, model: Model) -> None:
    photo.save(tmp_path / "a.png")
    batch = prepare([tmp_path / "a.png", "demo", photo.copy(), np.asarray(photo)], model)
    assert batch.names == (str(tmp_path / "a.png"), "demo", "image 3", "image 4")
    assert prepare(torch.zeros(2, 3, 8, 8), model).names == ("image 1", "image 2")
    assert len(batch) == 4


def test_batch_passes_through_and_follows_the_model(photo: Image.Image, model: Model) -> None:
    batch = prepare([photo], model)
    assert prepare(batch, model).pixels is batch.pixels
    half = Model(nn.Linear(1, 1).double(), "wide")
    assert prepare(batch, half).pixels.dtype == torch.float64
    assert prepare(Batch(batch.pixels, ("x",), single=True), half).single


def test_prepared_pixels_have_no_graph(model: Model) -> None:
    assert not prepare(torch.zeros(1, 3, 8, 8, requires_grad=True), model).pixels.requires_grad


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(8, 8), r"shape \[8, 8\]; expected \[B, 3, H, W\]"),
        (torch.zeros(1, 1, 3, 8, 8), r"shape \[1, 1, 3, 8, 8\]"),
        (torch.zeros(4, 8, 8), r"shape \[4, 8, 8\]"),
        (torch.zeros(2, 1, 8, 8), r"shape \[2, 1, 8, 8\]"),
        (torch.zeros(8, 9, 3), r"shape \[8, 9, 3\].*\.permute\(2, 0, 1\)"),
        (torch.zeros(0, 3, 8, 8), r"shape \[0, 3, 8, 8\]"),
        (torch.zeros(3, 8, 8, dtype=torch.long), "dtype torch.int64; expected floats that are already normalised"),
        ([torch.zeros(8, 8)], r"\(image 1\) has shape \[8, 8\]"),
        ([torch.zeros(1, 8, 8, dtype=torch.uint8)], r"uint8 tensor \(image 1\) has shape \[1, 8, 8\]"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 9)], r"different sizes: \[\(8, 8\), \(8, 9\)\]"),
        ([], "No images were given"),
    ],
)
def test_wrong_tensors(tensor: object, message: str, model: Model) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(tensor, model)  # type: ignore[arg-type]


def test_nan_names_the_image(model: Model) -> None:
    pixels = torch.zeros(3, 3, 8, 8)
    pixels[1, 0, 0, 0] = float("nan")
    with pytest.raises(BadInput, match=r"NaN or infinite values \(image 2 of 3\)"):
        prepare(pixels, model)
    with pytest.raises(BadInput, match=r"NaN or infinite values \(image 2\)"):
        prepare(list(pixels), model)


def test_unnormalised_floats_warn(model: Model) -> None:
    with pytest.warns(ClairWarning, match="values up to 255, which do not look normalised"):
        prepare(torch.full((1, 3, 8, 8), 255.0), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(torch.randn(1, 3, 8, 8), model)


# folders ------------------------------------------------------------------------------------------------------------


def test_find_images(tmp_path: Path) -> None:
    for name in ("cat10.jpg", "cat2.JPG", "sub/dog.png", "note.txt", ".hidden.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    names = [p.relative_to(tmp_path).as_posix() for p in find_images([tmp_path])]
    assert names == ["cat2.JPG", "cat10.jpg", "sub/dog.png"]
    assert find_images([f"{tmp_path}/*.jpg"]) == [tmp_path / "cat10.jpg"]
    assert find_images(f"{tmp_path}/**/*.png") == [tmp_path / "sub/dog.png"]
    assert find_images([f"{tmp_path}/*"])[-1] == tmp_path / "sub/dog.png"
    twice = find_images([tmp_path / "cat2.JPG", tmp_path])
    assert len(twice) == 3
    assert twice[0] == tmp_path / "cat2.JPG"
    assert find_images(["demo", tmp_path / "gone.jpg"]) == [Path("demo"), tmp_path / "gone.jpg"]
    assert find_images([tmp_path / "note.txt"]) == [tmp_path / "note.txt"]


def test_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "cat[1].jpg"
    path.write_bytes(b"")
    assert find_images([path]) == [path]


def test_nothing_found(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("")
    with pytest.raises(BadInput, match=rf"no images in the folder '{re.escape(str(tmp_path))}'.*\.jpg, \.jpeg, \.png"):
        find_images([tmp_path])
    with pytest.raises(BadInput, match=r"No image matches '.*\*\.jpg'"):
        find_images([f"{tmp_path}/*.jpg"])
