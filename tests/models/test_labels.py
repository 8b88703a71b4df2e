"""Class names as lists, dicts and files: each class gets its own name, and their number is the number of outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput

NAMES = ("ant", "bee", "cat", "dog")


@pytest.fixture(scope="module")
def four() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32, depth=2).eval()


class Plain(nn.Module):
    """A classifier that says nowhere how many outputs it has."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inside = timm.create_model("vit_tiny_patch16_224", num_classes=outputs, img_size=32, depth=2)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.inside(pixels)


@pytest.mark.parametrize(
    "labels",
    [
        list(NAMES),
        {0: "ant", 1: "bee", 2: "cat", 3: "dog"},
        {3: "dog", 1: "bee", 0: "ant", 2: "cat"},
        {"0": "ant", "1": "bee", "2": "cat", "3": "dog"},
        {"dog": 3, "ant": 0, "cat": 2, "bee": 1},
        {"dog": "3", "ant": "0", "cat": "2", "bee": "1"},
    ],
)
def test_every_form_names_the_same_classes(four: nn.Module, tmp_path: Path, labels: Any) -> None:
    model = cv.wrap(four, labels=labels)
    assert model.labels == NAMES
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    assert cv.explain(model, image, "ixg", target="dog").classes == (3,)
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    assert cv.wrap(four, labels=tmp_path / "labels.json").labels == NAMES
    loaded = cv.load("timm:vit_tiny_patch16_224", pretrained=False, size=32, labels=None)
    assert loaded.labels[0] == "tench"  # a source's own names stay where none are given


def test_load_takes_dicts() -> None:
    backwards = {f"kind {number}": number for number in reversed(range(37))}
    assert cv.load("pets", labels=backwards).labels == tuple(f"kind {number}" for number in range(37))


def test_names_that_are_numbers(four: nn.Module) -> None:
    assert cv.wrap(four, labels={"7": 0, "1": 1, "3": 2, "0": 3}).labels == ("7", "1", "3", "0")
    assert cv.wrap(four, labels={0: "7", 1: "1", 2: "3", 3: "0"}).labels == ("7", "1", "3", "0")
    with pytest.raises(BadInput, match="both keys and values are numbers, so the ids are not clear"):
        cv.wrap(four, labels={"0": "7", "1": "1", "2": "3", "3": "0"})


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"ant", "bee", "cat", "dog"}, "labels is a set, which has no order; expected a list in class order"),
        (
            {0: "ant", 1: "bee", 2: "cat", 4: "dog"},
            r"ids are not 0 to 3, each once \(wrong, missing or repeated: 3, 4\)",
        ),
        ({1: "ant", 2: "bee", 3: "cat", 4: "dog"}, "ids are not 0 to 3"),
        ({"ant": 0, "bee": 1, "cat": 1, "dog": 2}, "wrong, missing or repeated: 3"),
        ({0: "ant", "0": "bee", 1: "cat", 2: "dog"}, "keys such as 0 and values such as 'ant'"),
        ({"ant": "a", "bee": "b"}, "neither keys nor values are numbers"),
        ({0: 1, 1: 0}, "keys such as 0 and values such as 1; expected {0:"),
        ({"ant": True, "bee": False}, "values such as True"),
        ({}, "empty dict"),
        (["ant", "bee"], "2 labels were given for a model with 4 classes; give exactly 4"),
        ({0: "ant", 1: "bee"}, "2 labels were given for a model with 4 classes"),
        ([*NAMES, "eel", "fox"], "6 labels were given for a model with 4 classes"),
        (7, "labels=7 was given; expected a list of class names"),
    ],
)
def test_ambiguous_labels_raise(four: nn.Module, labels: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        cv.wrap(four, labels=labels)


def test_a_file_of_a_dict_with_gaps_raises(tmp_path: Path) -> None:
    (tmp_path / "gaps.json").write_text('{"0": "ant", "2": "bee"}')
    with pytest.raises(BadInput, match=r"gaps\.json' cannot be used \(labels is a dict of 2 names whose ids"):
        cv.load("pets", labels=tmp_path / "gaps.json")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_labels_are_counted_at_the_first_forward_where_the_module_does_not_say(count: int) -> None:
    model = cv.wrap(Plain(4).eval(), size=32, labels=[f"class {number}" for number in range(count)])
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    for verb in (lambda: cv.explain(model, image, "ixg"), lambda: cv.evaluate(model, image, "ixg", "sparseness")):
        with pytest.raises(BadInput, match=rf"The model has 4 classes and {count} labels; expected a label for each"):
            verb()
    right = cv.wrap(Plain(4).eval(), size=32, labels=NAMES)
    assert cv.explain(right, image, "ixg", target="cat").classes == (2,)


def test_a_replaced_head_counts_and_not_what_the_module_was_built_with() -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    module.head = nn.Linear(192, 2)
    assert module.num_classes == 1000
    assert cv.wrap(module, labels=["cat", "dog"]).labels == ("cat", "dog")
    with pytest.raises(BadInput, match="3 labels were given for a model with 2 classes"):
        cv.wrap(module, labels=["cat", "dog", "eel"])


# transformers ---------------------------------------------------------------------------------------------------------


def hf_vit(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=32, patch_size=16, **small, **options)
    return transformers.ViTForImageClassification(config).eval()


def test_wrap_reads_the_names_of_a_transformers_configuration() -> None:
    names = {0: "cat", 1: "dog", 2: "newt"}
    module = hf_vit(num_labels=3, id2label=names, label2id={name: number for number, name in names.items()})
    assert cv.wrap(module).labels == ("cat", "dog", "newt")
    assert cv.wrap(module, labels=["x", "y", "z"]).labels == ("x", "y", "z")
    with pytest.raises(BadInput, match="2 labels were given for a model with 3 classes"):
        cv.wrap(module, labels=["x", "y"])


def test_placeholders_of_transformers_are_no_names() -> None:
    module = hf_vit(num_labels=3)
    assert module.config.id2label[0] == "LABEL_0"
    assert cv.wrap(module).labels == ()
