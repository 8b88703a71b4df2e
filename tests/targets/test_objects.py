"""Objects of VOC and COCO as targets of a model of ImageNet."""

from __future__ import annotations

import pytest
import torch
from timm.data import ImageNetInfo
from torch import nn

import clairvit as cv
from clairvit.data.formats.voc import CLASSES as VOC
from clairvit.errors import UnknownName
from clairvit.targets.objects import OBJECTS, SPELLINGS, are_imagenet, object_classes

INFO = ImageNetInfo("imagenet-1k")
LABELS = [INFO.index_to_description(index) for index in range(1000)]


class Linear(nn.Module):
    """Scores that are the first pixel of each image, at the place of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(3 * 16, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.scores(image.flatten(1))


def model(labels: list[str] = LABELS) -> cv.Model:
    torch.manual_seed(0)
    return cv.wrap(Linear(), size=4, labels=labels)


def test_the_table_knows_every_object() -> None:
    names = {SPELLINGS.get(name, name) for name in VOC}
    assert names <= set(OBJECTS)
    assert len(OBJECTS) == 80
    of_voc = {name for name in names if not OBJECTS[name]}
    assert of_voc == {"person", "potted plant"}


def test_the_classes_are_what_their_names_say() -> None:
    """Each class of these objects has the object's name, or that of its kind, in its WordNet definition."""
    words = {
        "cat": ("cat",),
        "elephant": ("elephant",),
        "bear": ("bear",),
        "bottle": ("bottle",),
        "chair": ("chair",),
        "bus": ("bus", "trolley"),
        "clock": ("clock",),
        "sports ball": ("ball",),
    }
    for name in words:
        for index in OBJECTS[name]:
            text = INFO.index_to_description(index, detailed=True).lower()
            assert any(word in text for word in words[name]), (name, text)
    assert LABELS[OBJECTS["zebra"][0]] == "zebra"
    dogs = [LABELS[index] for index in OBJECTS["dog"]]
    assert (dogs[0], dogs[-1], len(dogs)) == ("Chihuahua", "Mexican hairless", 118)
    birds = [LABELS[index].partition(",")[0] for index in OBJECTS["bird"]]
    assert {birds[0], birds[17], birds[18], birds[38], birds[39], birds[-1]} == {
        *("cock", "great grey owl", "black grouse", "black swan", "white stork", "albatross"),
    }
    groups = [set(classes) for classes in OBJECTS.values()]
    assert sum(map(len, groups)) == len(set().union(*groups))  # no class is two objects


@pytest.mark.parametrize("name", ["cat", "Dog", "sports_ball", "tvmonitor", "elephant"])
def test_an_object_is_its_best_scoring_class(name: str) -> None:
    network, images = model(), torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    classes = list(object_classes(name, LABELS) or ())
    logits = network.module(images).detach()
    expected = [max(classes, key=lambda index: float(row[index])) for row in logits]
    assert len(set(expected)) > 1
    explanation = cv.explain(network, images, "saliency(level=pixel)", target=name)
    assert list(explanation.classes) == expected
    assert list(explanation.targets) == [LABELS[index] for index in expected]  # the class is named, not the object


def test_a_class_of_that_name_is_that_class() -> None:
    """ImageNet's kite is a bird, and its cup no mug: who types a label means it."""
    network, image = model(), torch.zeros(1, 3, 4, 4)
    for name, index in (("kite", 21), ("cup", 968), ("zebra", 340), ("mouse", 673)):
        assert cv.explain(network, image, "saliency(level=pixel)", target=name).classes == (index,)


def test_what_has_no_counterpart_is_said() -> None:
    with pytest.raises(UnknownName, match="ImageNet has no class of the object 'person'"):
        cv.explain(model(), torch.zeros(1, 3, 4, 4), "saliency(level=pixel)", target="person")


def test_other_models_know_nothing_of_it() -> None:
    shuffled = [LABELS[-1], *LABELS[:-1]]
    assert not are_imagenet(tuple(shuffled))
    assert are_imagenet(tuple(label.partition(",")[0] for label in LABELS))
    assert are_imagenet(tuple("crane bird" if index == 134 else label for index, label in enumerate(LABELS)))
    with pytest.raises(UnknownName, match="There is no class 'person'"):
        cv.explain(model(shuffled), torch.zeros(1, 3, 4, 4), "saliency(level=pixel)", target="person")
