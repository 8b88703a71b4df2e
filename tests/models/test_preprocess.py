"""Preprocessing: what a user states is used, what is stated nowhere is assumed and noted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import clairvit as cv
from clairvit.errors import BadInput, ModelUnavailable
from clairvit.models.image_files import read_image
from clairvit.models.images import prepare, to_pixels
from clairvit.models.preprocess import Preprocess, for_size, preprocess_options

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
ARCH = "timm:vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32).eval()


@pytest.fixture
def plain_file(small: nn.Module, tmp_path: Path) -> str:
    save_file(small.state_dict(), tmp_path / "plain.safetensors")
    return f"file:{tmp_path / 'plain.safetensors'}"


# what is given --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pets", "timm:vit_tiny_patch16_224", "torchvision:vit_b_32"])
def test_load_takes_preprocessing_for_every_source(name: str) -> None:
    given: dict[str, Any] = {"mean": (0.1, 0.2, 0.3), "std": 0.25, "resize": 300, "interpolation": "bilinear"}
    seen = cv.load(name, pretrained=name == "pets", **given).preprocess
    assert seen == Preprocess((224, 224), (0.1, 0.2, 0.3), (0.25, 0.25, 0.25), 300, "bilinear")


def test_given_preprocessing_is_applied() -> None:
    model = cv.load("pets", mean=0.5, std=0.5, resize=300)
    photo = read_image("demo").resize((451, 300))  # the short side is 300 already
    rows, columns = (300 - 224) // 2, round((451 - 224) / 2)
    cut = np.asarray(photo)[rows : rows + 224, columns : columns + 224].astype(np.float32) / 255
    expected = (torch.from_numpy(cut).permute(2, 0, 1) - 0.5) / 0.5
    assert torch.equal(prepare("demo", model).pixels[0], expected)


def test_wrap_takes_the_same() -> None:
    module = nn.Linear(1, 1)
    model = cv.wrap(module, **IMAGENET, size=64, resize=(70, 80), interpolation="nearest")
    assert model.preprocess == Preprocess((64, 64), **IMAGENET, resize=(70, 80), interpolation="nearest")
    assert model.assumptions == ()


@pytest.mark.parametrize("kind", ["load", "wrap"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"std": (0, 1, 1)}, r"std=\(0, 1, 1\); expected one positive number for each"),
        ({"mean": (0.5, 0.5)}, "has 2 numbers, and the model takes 3 channels; expected one number for each"),
        ({"mean": (-0.1, 0.5, 0.5)}, "expected one number for each"),
        ({"mean": (float("nan"), 0.5, 0.5)}, "expected one number for each"),
        ({"mean": "abc"}, "expected one number for each"),
        ({"mean": True}, "expected one number for each"),
        ({"mean": 300}, r"mean=\(300,\) is for pixels in 0..255"),
        ({"resize": 0}, "resize=0 is not a size"),
        ({"resize": 2.5}, "resize=2.5 is not a size"),
        ({"resize": (1, 2, 3)}, r"resize=\(1, 2, 3\) is not a size; give the short side \(resize=256\) or"),
        ({"resize": True}, "resize=True is not a size"),
        ({"resize": 100}, "resize=100 is smaller than the 224 pixels .* black borders; expected at least 224"),
        ({"interpolation": "bicubik"}, "interpolation='bicubik' is unknown. Did you mean 'bicubic'"),
    ],
)
def test_invalid_preprocessing_raises(kind: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        cv.load("pets", **given) if kind == "load" else cv.wrap(nn.Linear(1, 1), **given)


def test_the_smallest_resize_named_in_the_message_works() -> None:
    with pytest.raises(BadInput, match="black borders") as caught:
        cv.load("pets", resize=100)
    advice = re.search(r"at least (\d+)", str(caught.value))
    assert advice is not None
    assert cv.load("pets", resize=int(advice[1])).preprocess.resize == 224


def test_numbers_for_pixels_up_to_255_come_with_those_to_give() -> None:
    wrong = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
    for name, values in wrong.items():
        with pytest.raises(BadInput, match="divide by 255") as caught:
            cv.load("pets", **{name: values})
        advice = re.search(rf"{name}=(\([^)]*\))\.$", str(caught.value))
        assert advice is not None
        followed = cv.load("pets", **{name: eval(advice[1])})
        assert getattr(followed.preprocess, name) == IMAGENET[name]


def test_resize_is_scaled_with_another_size() -> None:
    assert for_size(Preprocess(resize=256), (112, 112)).resize == 128
    assert for_size(Preprocess(resize=(256, 512)), (112, 224)).resize == (128, 512)
    assert for_size(Preprocess(resize=256), (224, 112)).resize == (256, 128)
    assert for_size(Preprocess(), (96, 96)) == Preprocess((96, 96))


# what is assumed ------------------------------------------------------------------------------------------------------


def test_a_file_that_does_not_say_takes_the_architectures_numbers_and_a_note(plain_file: str) -> None:
    model = cv.load(plain_file, arch=ARCH)
    (note,) = model.assumptions
    assert note == (
        "mean, std, resize and interpolation were assumed: timm's for vit_tiny_patch16_224, because "
        "'plain.safetensors' does not say (mean 0.5, 0.5, 0.5; std 0.5, 0.5, 0.5; resize 35; bicubic). If the model "
        "was trained otherwise, give mean=, std=, resize= or interpolation=."
    )
    assert cv.explain(model, "demo", "ixg").notes[0] == note
    some = cv.load(plain_file, arch=ARCH, **IMAGENET)
    assert some.assumptions[0].startswith("resize and interpolation were assumed")
    every = cv.load(plain_file, arch=ARCH, **IMAGENET, resize=40, interpolation="bilinear")
    assert every.assumptions == ()
    assert every.preprocess == Preprocess((32, 32), **IMAGENET, resize=40, interpolation="bilinear")
    assert cv.load(plain_file, arch=ARCH, pretrained=False).assumptions == ()  # of random weights nothing is known


def test_no_note_where_nothing_was_preprocessed(plain_file: str) -> None:
    model = cv.load(plain_file, arch=ARCH)
    pixels = prepare("demo", model).pixels
    assert cv.explain(model, pixels, "ixg").notes == ()
    assert len(cv.explain(model, [read_image("demo"), pixels[0]], "ixg").notes) == 1


def test_models_whose_preprocessing_is_known_have_no_note() -> None:
    for model in (*map(cv.load, ("pets", "scenes", "parts")), cv.wrap(timm.create_model("vit_tiny_patch16_224"))):
        assert model.assumptions == ()
    assert cv.explain(cv.load("pets"), "demo").notes == ()


def test_wrap_notes_what_it_assumes() -> None:
    other_head = cv.wrap(timm.create_model("vit_tiny_patch16_224", num_classes=4))
    assert "were assumed: timm's for vit_tiny_patch16_224 (mean 0.5, 0.5, 0.5" in other_head.assumptions[0]
    (note,) = cv.wrap(nn.Linear(1, 1)).assumptions
    assert "assumed: ImageNet's, because the module does not say (mean 0.485, 0.456, 0.406" in note
    assert cv.wrap(nn.Linear(1, 1), mean=0.5, std=0.5, resize=224, interpolation="bicubic").assumptions == ()


def test_the_note_names_what_to_give(plain_file: str) -> None:
    """Following the advice ends the note."""
    advice = re.search(r"give (.*)\.$", cv.load(plain_file, arch=ARCH).assumptions[0])
    assert advice is not None
    names = re.findall(r"(\w+)=", advice[1])
    values = {**IMAGENET, "resize": 40, "interpolation": "bicubic"}
    assert cv.load(plain_file, arch=ARCH, **{name: values[name] for name in names}).assumptions == ()


# transformers ---------------------------------------------------------------------------------------------------------


def saved_vit(folder: Path, processor: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=32, patch_size=16, num_labels=2, **small)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    if processor:
        transformers.ViTImageProcessor(
            size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]
        ).save_pretrained(folder)
    return transformers.ViTForImageClassification.from_pretrained(folder).eval()


def test_wrap_reads_the_processor_saved_with_a_transformers_model(tmp_path: Path) -> None:
    model = cv.wrap(saved_vit(tmp_path, processor=True))
    assert model.preprocess.mean == pytest.approx((0.1, 0.2, 0.3))
    assert model.preprocess.std == pytest.approx((0.4, 0.5, 0.6))
    assert not model.preprocess.keep_ratio
    assert model.assumptions == ()
    assert model.preprocess == cv.load(f"hf:{tmp_path}").preprocess


def test_wrap_without_a_processor_says_so(tmp_path: Path) -> None:
    model = cv.wrap(saved_vit(tmp_path, processor=False))
    assert model.preprocess == Preprocess((32, 32))
    assert "assumed: ImageNet's" in model.assumptions[0]


def test_a_folder_without_a_processor_loads_once_mean_and_std_are_given(tmp_path: Path) -> None:
    saved_vit(tmp_path, processor=False)
    with pytest.raises(ModelUnavailable, match="load it with mean= and std= "):
        cv.load(f"hf:{tmp_path}")
    model = cv.load(f"hf:{tmp_path}", mean=0.5, std=0.5)
    assert model.preprocess == Preprocess((32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert model.assumptions[0].startswith("resize and interpolation were assumed")


# the header of a weights file -----------------------------------------------------------------------------------------


def test_single_entries_of_a_header_are_read(small: nn.Module, tmp_path: Path) -> None:
    header = {
        "architecture": ARCH,
        "mean": "0.485, 0.456, 0.406",
        "std": "[0.229, 0.224, 0.225]",
        "resize": "40",
        "interpolation": "bilinear",
        "size": "32",
        "labels": json.dumps({"dog": 1, "ant": 0, "eel": 2}),
    }
    save_file(small.state_dict(), tmp_path / "stated.safetensors", header)
    model = cv.load(f"file:{tmp_path}/stated.safetensors")
    assert model.preprocess == Preprocess((32, 32), **IMAGENET, resize=40, interpolation="bilinear")
    assert model.labels == ("ant", "dog", "eel")
    assert model.assumptions == ()
    assert cv.load(f"file:{tmp_path}/stated.safetensors", mean=0.5).preprocess.mean == (0.5, 0.5, 0.5)
    save_file(small.state_dict(), tmp_path / "half.safetensors", {"arch": ARCH, "mean": "0.5", "std": "0.5"})
    half = cv.load(f"file:{tmp_path}/half.safetensors")
    assert half.assumptions[0].startswith("resize and interpolation were assumed: timm's")


@pytest.mark.parametrize(
    ("entry", "text", "words"),
    [
        ("mean", "123.675, 116.28, 103.53", "divide by 255"),
        ("std", "0, 0, 0", "one positive number for each"),
        ("size", "big", "is not an image size"),
        ("resize", "[1, 2, 3]", "is not a size"),
        ("interpolation", "cubic", "is unknown"),
    ],
)
def test_a_header_is_checked(small: nn.Module, tmp_path: Path, entry: str, text: str, words: str) -> None:
    save_file(small.state_dict(), tmp_path / "odd.safetensors", {"arch": ARCH, entry: text})
    with pytest.raises(ModelUnavailable, match=words) as caught:
        cv.load(f"file:{tmp_path}/odd.safetensors")
    assert f"The entry '{entry}' in the header of 'file:{tmp_path}/odd.safetensors'" in str(caught.value)


def test_a_files_mean_is_kept_at_another_size(tmp_path: Path) -> None:
    """It used to be forgotten without a word."""
    module = timm.create_model("resnet10t", num_classes=2)
    seen = {"size": [64, 64], "mean": [0.1] * 3, "std": [0.2] * 3, "resize": 72, "interpolation": "bilinear"}
    header = {"arch": "timm:resnet10t", "preprocess": json.dumps({**seen, "keep_ratio": True})}
    save_file(module.state_dict(), tmp_path / "cnn.safetensors", header)
    model = cv.load(f"file:{tmp_path}/cnn.safetensors", size=128)
    assert model.preprocess == Preprocess((128, 128), (0.1,) * 3, (0.2,) * 3, 144, "bilinear")


# a device without numbers ---------------------------------------------------------------------------------------------


def test_a_model_on_the_meta_device_raises() -> None:
    module = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32).to("meta")
    with pytest.raises(BadInput, match=r"is on the meta device \('.*' has a shape and no numbers") as caught:
        cv.wrap(module)
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    with pytest.raises(BadInput, match="m is on the meta device"):
        cv.explain(cv.Model(module, "m"), image)
    weights = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32).state_dict()
    for step in re.findall(r"module\.[a-z_]+\([^)]*\)", str(caught.value)):
        eval(step, {"module": module, "weights": weights})
    assert cv.explain(cv.wrap(module.eval()), image, "ixg").maps.shape == (1, 2, 2)


def test_options_are_plain_numbers() -> None:
    given = preprocess_options(np.float32(0.5), torch.tensor([0.25, 0.5, 0.75]), [300, 400])
    assert given == preprocess_options(0.5, (0.25, 0.5, 0.75), (300, 400))
    assert repr(given.mean) == "(0.5,)"
    assert repr(preprocess_options(resize=np.int64(256)).resize) == "256"


def test_pixels_are_those_of_the_formula() -> None:
    image = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    how = preprocess_options((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 32).applied_to(Preprocess((32, 32)))
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    expected = (values - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[:, None, None]
    assert torch.equal(to_pixels(image, how), expected)
