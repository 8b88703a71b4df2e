"""Models by name and as bare modules, images from data sets and DataLoaders."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import clairvit as cv
from clairvit.errors import BadInput, ClairWarning, WrongType
from clairvit.models.coerce import LabelledImages, as_images, as_model
from helpers.rounding import assert_same
from helpers.tiny_models import build, pixels, wrapped

KIND = "timm-vit"
ATTENTIVE = ["rollout", "ixg"]


class Photos(Dataset[Any]):
    """Images with labels, read when asked for."""

    def __init__(self, images: Any, labels: Any = None) -> None:
        self.images, self.labels, self.reads = images, labels, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.images[index] if self.labels is None else (self.images[index], self.labels[index])


class Stream(IterableDataset[Any]):
    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.images)


class Plain(nn.Module):
    """A module that states nothing of its preprocessing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(KIND)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# Models


def test_a_name_is_loaded() -> None:
    model = as_model("pets")
    assert (model.name, len(model.labels)) == ("pets", 37)
    assert cv.explain("pets", "demo", "rollout").model == "pets"
    assert as_model(model) is model


def test_a_bare_module_gives_the_maps_of_a_wrapped_one() -> None:
    module, images = build(KIND), pixels(KIND)
    bare, wrapped_maps = (cv.compare(model, images, ATTENTIVE, target=3) for model in (module, cv.wrap(module)))
    for text in ATTENTIVE:
        assert torch.equal(bare[text].maps, wrapped_maps[text].maps)
    score = cv.evaluate(module, images, "rollout", "sparseness")
    assert score.n_valid == len(images)
    assert len(cv.trace(module, images).layers) == len(cv.trace(cv.wrap(module), images).layers)
    assert cv.choose(module, images, ["rollout"], ["deletion(steps=2)"]).model == type(module).__name__


@pytest.mark.parametrize("verb", [cv.explain, cv.compare, cv.trace])
def test_a_bare_module_is_not_changed(verb: Any) -> None:
    module = build(KIND).train()
    module.blocks[0].eval()
    before = {name: part.training for name, part in module.named_modules()}
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    verb(module, pixels(KIND), target=1)
    with pytest.raises(BadInput):
        verb(module, torch.randn(1, 4, 8, 8))
    assert {name: part.training for name, part in module.named_modules()} == before
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())


def test_a_timm_module_states_its_preprocessing() -> None:
    module = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    explanation = cv.explain(module, "demo", "rollout")
    assert explanation.preprocess.mean == (0.5, 0.5, 0.5)
    assert not any("assumed" in note for note in explanation.notes)


def test_assumed_preprocessing_is_a_warning_and_a_note() -> None:
    module = Plain()
    picture = Image.fromarray(np.zeros((40, 40, 3), np.uint8))
    with pytest.warns(ClairWarning, match=r"assumed: ImageNet's, because the module does not say") as caught:
        model = as_model(module, picture)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert model.preprocess.mean == (0.485, 0.456, 0.406)
    assert model.assumptions
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_model(module, pixels(KIND)).assumptions, "tensors are preprocessed already: no warning"


def test_the_warning_of_a_verb_names_the_users_line() -> None:
    small = Image.fromarray(np.full((32, 32, 3), 200, np.uint8))

    class Sized(Plain):
        image_size = 32

    with pytest.warns(ClairWarning, match="ImageNet's") as caught:
        explanation = cv.explain(Sized(), small, "rollout")
    assert caught[0].filename == __file__
    assert any("ImageNet's" in note for note in explanation.notes)


@pytest.mark.parametrize("given", [42, None, ["pets"], object])
def test_other_objects_are_no_models(given: Any) -> None:
    with pytest.raises(WrongType, match=r"expected a cv\.Model, a torch\.nn\.Module or a name such as 'pets'"):
        as_model(given)


# Images


def test_a_data_set_is_explained_in_chunks_as_its_images_are() -> None:
    model, images = wrapped(KIND), pixels(KIND, 11)
    together = cv.explain(model, images, "ixg", target=3)
    explanation = cv.explain(model, Photos(images, [1] * 11), "ixg", target=3)
    assert explanation.names == tuple(f"image {row + 1}" for row in range(11))
    assert_same(explanation.maps, together.maps)


def test_targets_of_a_data_set_are_those_of_its_images() -> None:
    model, images = wrapped(KIND, torch.float64), pixels(KIND, 10, dtype=torch.float64)
    classes = [row % 7 for row in range(10)]
    one_each = cv.explain(model, Photos(images), "ixg", target=classes)
    assert one_each.classes == tuple(classes)
    assert_same(one_each.maps, cv.explain(model, images, "ixg", target=classes).maps)
    several = cv.explain(model, Photos(images), "ixg", targets=[2, 5])
    assert several.classes == (2,) * 10 + (5,) * 10, "by target, then by image"
    assert_same(several.maps, cv.explain(model, images, "ixg", targets=[2, 5]).maps)
    assert several.names == (*one_each.names, *one_each.names)
    with pytest.raises(BadInput, match="3 targets were given for 10 images"):
        cv.explain(model, Photos(images), "ixg", target=[1, 2, 3])


@pytest.mark.parametrize("labelled", [False, True])
def test_a_data_loader_is_its_images(labelled: bool) -> None:
    model, images = wrapped(KIND), pixels(KIND, 5)
    data = TensorDataset(images, torch.arange(5)) if labelled else Stream(images)
    loader = DataLoader(data, batch_size=2)
    assert_same(cv.explain(model, loader, "rollout").maps, cv.explain(model, images, "rollout").maps)
    assert as_images(loader).labelled == labelled
    compared = cv.compare(model, loader, ATTENTIVE, target=2)
    assert all(len(explanation) == 5 for explanation in compared.values())


@pytest.mark.parametrize("key", ["image", "pixel_values"])
def test_dicts_of_hugging_face_data_sets(key: str) -> None:
    images = pixels(KIND, 3)
    rows = [{key: image, "label": place} for place, image in enumerate(images)]
    for given in (rows, DataLoader(rows, batch_size=2)):  # type: ignore[arg-type]
        read = as_images(given)
        assert [read.label(place) for place in range(3)] == [0, 1, 2]
        assert torch.equal(torch.stack(read[:]), images)
    with pytest.raises(BadInput, match=r"a dict with photo, label; expected one of image"):
        as_images([{"photo": 1, "label": 2}])[0]


def test_pairs_of_paths_and_labels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / f"{name}.png")
    pairs = [(tmp_path / "a.png", "cat"), (tmp_path / "b.png", "dog")]
    read = as_images(pairs)
    assert [read.label(place) for place in range(2)] == ["cat", "dog"]
    explanation = cv.explain(wrapped(KIND), pairs, "rollout")
    assert explanation.names == (str(tmp_path / "a.png"), str(tmp_path / "b.png"))


def test_labels_of_a_data_set_are_the_true_classes() -> None:
    model, images = wrapped(KIND), pixels(KIND, 3)
    photos = Photos(images, [np.int64(1), torch.tensor(4), 6])
    score = cv.evaluate(model, photos, "ixg", "deletion(steps=2)", target="label")
    scores = cv.evaluate(model, images, "ixg", "deletion(steps=2)", target=[1, 4, 6])
    assert_same(score.values, scores.values)
    with pytest.raises(BadInput, match="target='label' was given without labels"):
        cv.evaluate(model, Photos(images), "ixg", "deletion(steps=2)", target="label")


def test_a_data_set_is_read_lazily() -> None:
    photos = Photos(pixels(KIND, 4), [0, 1, 2, 3])
    read = as_images(photos)
    assert photos.reads == 0
    image, label = read[2], read.label(2)
    assert (photos.reads, label) == (1, 2), "image and label are of the same reading"
    assert torch.equal(image, photos.images[2])
    assert len(read) == 4
    with pytest.raises(IndexError):
        read[4]


def test_annotations_that_are_no_class_are_no_labels() -> None:
    for other in ({"boxes": []}, torch.zeros(3), 1.5, True):
        assert as_images([(pixels(KIND)[0], other)]).labels is None


@pytest.mark.parametrize("given", ["demo", Path("a.png"), pixels(KIND), [pixels(KIND)[0]], np.zeros((3, 3)), None, 5])
def test_other_images_stay_as_they_are(given: Any) -> None:
    assert as_images(given) is given


def test_generators_are_read_once() -> None:
    images = pixels(KIND, 3)
    explanation = cv.explain(wrapped(KIND), (image for image in images), "rollout")
    assert_same(explanation.maps, cv.explain(wrapped(KIND), images, "rollout").maps)


def test_an_empty_data_set_is_refused() -> None:
    assert isinstance(as_images(Photos([])), LabelledImages)
    with pytest.raises(BadInput, match="expected at least one"):
        cv.explain(wrapped(KIND), Photos([]), "rollout")


def test_the_doctor_takes_a_data_set() -> None:
    diagnosis = cv.doctor(wrapped(KIND), Photos(pixels(KIND, 2), [1, 2]))
    assert len(diagnosis.images) == 2


def test_labels_can_be_sliced() -> None:
    labels = as_images(Photos(pixels(KIND, 3), [4, 5, 6])).labels
    assert labels is not None
    assert (list(labels), labels[-1], labels[1:], labels[::-2]) == ([4, 5, 6], 6, [5, 6], [6, 4])
