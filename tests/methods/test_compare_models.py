"""`compare` with several models: preprocessing and classes of their own; what does not fit one is left out there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable, UnknownName
from clairvit.plotting.model_comparison import model_comparison_figure
from clairvit.plotting.style import PlotStyle
from helpers.tiny_models import cnn, strange, wrapped

METHODS = ["gradcam", "rollout", "saliency"]
pytestmark = pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # a ReLU may leave nothing
LABELS = ("cat", "dog", "fish")


def models() -> list[cv.Model]:
    """A ViT of 32 pixels and a CNN of 40, with other means and other orders of the classes."""
    vit = wrapped("timm-vit")
    size, classes = vit.preprocess.size, len(vit.labels) or 7
    names = tuple(f"class {index}" for index in range(3, classes))
    first = cv.wrap(vit.module, name="vit", size=size, mean=0.5, std=0.5, labels=(*LABELS, *names))
    module = strange(cnn)
    count = int(module(torch.zeros(1, 3, 64, 64)).shape[-1])
    others = tuple(f"class {index}" for index in range(3, count))
    second = cv.wrap(module, name="cnn", size=64, mean=0.4, std=0.2, labels=(*LABELS[::-1], *others))
    return [first, second]


@pytest.fixture(scope="module")
def both() -> list[cv.Model]:
    return models()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(data.chelsea()).save(tmp_path / "cat.png")
    return tmp_path / "cat.png"


def test_each_model_is_compared_as_alone(both: list[cv.Model], photo: Path) -> None:
    many = cv.compare(both, photo, METHODS, "cat")
    assert list(many) == ["vit", "cnn"]
    assert many.methods == ("gradcam", "rollout", "saliency")
    for model in both:
        alone = cv.compare(model, photo, METHODS, "cat", skip=True)
        assert list(many[model.name]) == list(alone)
        for method, explanation in alone.items():
            assert torch.equal(many[model.name][method].maps, explanation.maps)
    vit, other = (many[name]["gradcam"] for name in many)
    assert (vit.targets, other.targets) == (("cat",), ("cat",))
    assert (vit.classes, other.classes) == ((0,), (2,)), "a class is found by its name in each model"
    assert vit.preprocess != other.preprocess
    assert vit.pixels.shape != other.pixels.shape


def test_a_method_that_does_not_fit_a_model_is_left_out_there(both: list[cv.Model], photo: Path) -> None:
    many = cv.compare(both, photo, METHODS)
    assert "no attention" in many.skipped["cnn"]["rollout"]
    assert many.skipped["vit"] == {}
    with pytest.raises(NotApplicable, match=r"'rollout' fits none of the models. cnn: .*no attention.*; cnn \(2\): "):
        cv.compare([both[1], both[1]], photo, METHODS)
    skipped = cv.compare([both[1], both[1]], photo, METHODS, skip=True)
    assert skipped.methods == ("gradcam", "saliency")
    with pytest.raises(NotApplicable, match="fits none of the models"):
        cv.compare([both[1], both[1]], photo, ["rollout"], skip=True)


def test_models_of_one_name_are_told_apart(both: list[cv.Model], photo: Path) -> None:
    many = cv.compare([both[0], both[0]], photo, ["rollout"])
    assert list(many) == ["vit", "vit (2)"]
    assert [explanation["rollout"].model for explanation in many.values()] == ["vit", "vit (2)"]
    assert many.to_pandas()["model"].tolist() == ["vit", "vit (2)"]


def test_what_means_different_things_is_refused(both: list[cv.Model], photo: Path) -> None:
    for number in (0, "0"):
        with pytest.raises(BadInput, match=r"Class 0 is cat in vit, fish in cnn; expected the name"):
            cv.compare(both, photo, METHODS, number)
    assert cv.compare(both, photo, ["gradcam"], 1).methods == ("gradcam",), "dog in both"
    with pytest.raises(UnknownName, match=r"vit: There is no class 'bird'"):
        cv.compare(both, photo, METHODS, "bird")
    with pytest.raises(BadInput, match=r"preprocessed tensors, and vit and cnn preprocess images in different ways"):
        cv.compare(both, torch.zeros(1, 3, 64, 64), METHODS)
    with pytest.raises(BadInput, match="No models were given"):
        cv.compare([], photo, METHODS)


def test_photos_of_an_iterator_reach_every_model(both: list[cv.Model], photo: Path) -> None:
    images = iter([Image.open(photo), Image.open(photo)])
    many = cv.compare(both, images, ["saliency"])
    assert [len(methods["saliency"]) for methods in many.values()] == [2, 2]
    assert len(many.take([1])["cnn"]["saliency"]) == 1


def test_files(both: list[cv.Model], photo: Path, tmp_path: Path) -> None:
    many = cv.compare(both, photo, METHODS)
    content = json.loads(many.save(tmp_path / "all.json").read_text(encoding="utf-8"))
    assert list(content) == ["vit", "cnn"]
    assert list(content["cnn"]["methods"]) == ["gradcam", "saliency"]
    assert "rollout" in content["cnn"]["skipped"]
    with np.load(many.save(tmp_path / "all.npz")) as arrays:
        assert arrays["cnn/saliency/maps"].shape == tuple(many["cnn"]["saliency"].maps.shape)
    assert many.save(tmp_path / "all.csv").read_text(encoding="utf-8").count("\n") == 6
    assert many._repr_png_().startswith(b"\x89PNG")
    assert repr(many) == "ModelComparison(2 models: vit, cnn; 3 methods; 1 skipped)"


def test_the_picture_has_a_row_per_model_and_says_what_is_left_out(both: list[cv.Model], photo: Path) -> None:
    figure = model_comparison_figure(cv.compare(both, photo, METHODS, targets=["cat", "dog"]), PlotStyle())
    texts = [text.get_text() for text in figure.texts]
    assert texts.count("vit") == texts.count("cnn") == 2, "a block per target"
    assert {"cat.png · cat", "cat.png · dog"} < set(texts)
    assert texts.count("left out") == 2
    assert any(text.startswith("This model has no") for text in texts)
    with pytest.raises(BadInput, match="no explanation to compare"):
        model_comparison_figure(cv.results.ModelComparison())
