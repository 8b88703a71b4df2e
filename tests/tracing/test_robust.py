"""What a reviewer broke: models that change, odd outputs, wrong arguments, attention that does not see the image."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, CaptureError
from helpers.rounding import assert_same
from helpers.tiny_models import build, pixels, wrapped

METHODS = ["rollout", "genatt", "ixg", "ixg+layer:1", "legrad"]


def maps(module: nn.Module, images: Tensor) -> dict[str, Tensor]:
    comparison = cv.compare(cv.wrap(module), images, METHODS, target=3)
    return {name: comparison[name].maps for name in METHODS}


@pytest.mark.parametrize("change", ["pooling", "block"])
def test_the_structure_of_a_changed_model_is_found_again(change: str) -> None:
    module, images = build("timm-vit").double(), pixels("timm-vit", dtype=torch.float64)
    maps(module, images)
    if change == "pooling":
        module.global_pool = "avg"
    else:
        module.blocks[1] = copy.deepcopy(module.blocks[0])
    for name, fresh in maps(copy.deepcopy(module), images).items():
        assert_same(maps(module, images)[name], fresh, label=name)


class Squeezed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).squeeze()


def test_scores_must_have_a_row_for_each_image() -> None:
    with pytest.raises(BadInput, match=r"for 1 images; expected one row for each image. Look for squeeze"):
        cv.explain(cv.wrap(Squeezed(build("timm-vit"))), pixels("timm-vit")[:1], "rollout")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"grid": 14}, r"expected \(rows, columns\)"),
        ({"grid": (0, 4)}, r"expected \(rows, columns\)"),
        ({"prefix": -1}, "number of tokens before the patches"),
        ({"pooling": "mean"}, "expected one of token, distilled, avg, max, map, mixed"),
        ({"read": ((500, 1.0),)}, "names a row outside the 17 tokens"),
    ],
)
def test_a_layout_is_checked(wrong: dict[str, Any], words: str) -> None:
    right: dict[str, Any] = {"grid": (4, 4), "prefix": 1, "pooling": "token", "read": ((0, 1.0),)}
    assert cv.Layout(**right).tokens == 17
    with pytest.raises(BadInput, match=words):
        cv.Layout(**(right | wrong))


def test_embeddings_are_known_as_such() -> None:
    headless = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    model = cv.wrap(headless)
    assert not model.classifier
    with pytest.raises(BadInput, match="embedding"):
        cv.explain(model, torch.randn(1, 3, 32, 32), "ixg")
    explanation = cv.explain(model, torch.randn(1, 3, 32, 32), "ixg", target=3)
    assert not explanation.classifier
    assert explanation.probabilities == (None,)
    assert cv.wrap(build("timm-vit")).classifier


@pytest.mark.parametrize("verb", [cv.explain, cv.trace])
def test_what_is_no_model_is_refused_by_its_type(verb: Any) -> None:
    for given in (42, None, ["pets"]):
        with pytest.raises(BadInput, match=r"expected a cv.Model, a torch.nn.Module or a name such as 'pets'"):
            verb(given, pixels("timm-vit"))
        with pytest.raises(TypeError):
            verb(given, pixels("timm-vit"))


def test_weights_of_inference_mode_are_refused_before_anything_changes() -> None:
    with torch.inference_mode():
        module = build("timm-vit").train()
    with pytest.raises(CaptureError, match="outside inference_mode"):
        cv.explain(cv.wrap(module), pixels("timm-vit"), "ixg")
    assert all(part.training for part in module.modules())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_scripted_modules_are_refused() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.randn(1, 3, 2, 2))
    with pytest.raises(BadInput, match="cannot be looked into"):
        cv.wrap(scripted)


@pytest.mark.parametrize("error", [TypeError, KeyError, IndexError, AttributeError])
def test_a_forward_that_raises_is_one_sentence(error: type[Exception]) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error("no such thing")

    with pytest.raises(BadInput, match=f"failed on an image of .*{error.__name__}"):
        cv.explain(cv.wrap(Broken()), pixels("timm-vit"), "ixg")


class NamedOperands(nn.Module):
    """torch.matmul(input=, other=), which hardly anybody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.block = Attend()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.block(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(tokens.mean(1))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        a = torch.matmul(input=q, other=k.transpose(-2, -1)).softmax(-1)
        return x + torch.matmul(input=a, other=v)[:, 0]


def test_operands_given_by_name() -> None:
    images = torch.randn(2, 3, 32, 32)
    comparison = cv.compare(cv.wrap(NamedOperands()), images, ["rollout", "genatt", "decompx"], target=1)
    assert comparison["genatt"].maps.shape == (2, 4, 4)


class WithText(nn.Module):
    """Class vectors from a small text tower that runs in every forward and never sees the image."""

    def __init__(self, vision: nn.Module, classes: int) -> None:
        super().__init__()
        self.vision = vision
        self.words = nn.Parameter(torch.randn(classes, 6, 16))
        self.text = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.up = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.vision(x) + 0.1 * self.up(self.text(self.words).mean((0, 1)))


def test_attention_that_does_not_see_the_image_stands_aside() -> None:
    torch.manual_seed(0)
    vision, images = build("timm-vit").double(), pixels("timm-vit", dtype=torch.float64)
    classes = vision(images).shape[1]
    with_text, alone = maps(WithText(vision, classes).double().eval(), images), maps(vision, images)
    for name in METHODS:
        assert_same(with_text[name], alone[name], label=name)
    assert cv.explain(cv.wrap(WithText(vision, classes).double()), images, "decompx", target=1).maps.any()


def test_more_labels_than_classes() -> None:
    names = [f"name {i}" for i in range(100)]
    with pytest.raises(BadInput, match="100 labels were given for a model with 7 classes; give exactly 7"):
        cv.wrap(build("timm-vit"), labels=names)
    model = dataclasses.replace(cv.wrap(build("timm-vit")), labels=tuple(names))
    with pytest.raises(BadInput, match="and 100 labels; expected a label for each class"):
        cv.explain(model, pixels("timm-vit"), "ixg", target="name 77")


@pytest.mark.parametrize("wrong", [{"labels": 3}, {"mean": (0.5, 0.5)}])
def test_wrap_checks_what_it_is_given(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="expected"):
        cv.wrap(build("timm-vit"), **wrong)


def test_a_comparison_is_found_by_what_was_typed() -> None:
    comparison = cv.compare(wrapped("timm-vit"), pixels("timm-vit"), ["gmar-l1(preset=joita)"], target=1)
    assert comparison["gmar-l1(preset=joita)"] is next(iter(comparison.values()))
    with pytest.raises(KeyError):
        comparison["rollout"]


def test_several_targets_of_one_image_are_targets_whatever_its_shape() -> None:
    model, image = wrapped("timm-vit"), pixels("timm-vit")[:1]
    for given in (image, image[0]):
        with pytest.raises(BadInput, match=r"For several targets per image pass targets=\[…\]"):
            cv.explain(model, given, "ixg", target=[1, 2])
        assert len(cv.explain(model, given, "ixg", targets=[1, 2])) == 2


def test_our_arithmetic_is_not_autocast() -> None:
    """The model's own rounding aside, A is as exact as q and k allow: its rows add up to 1 to float32's precision."""
    model, image = wrapped("timm-vit"), pixels("timm-vit")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        explanation = cv.explain(model, image, "rollout")
        row = cv.explain(model, image, "raw-attention").maps.flatten(1).sum(1)
    assert explanation.maps.dtype == torch.float32
    assert explanation.maps.to(torch.bfloat16).float().ne(explanation.maps).any()  # not rounded to 8 bits on the way
    assert (row < 1).all()


class LateRow(nn.Module):
    """A head that reads token 5: LeGrad must give it a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("timm-vit")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.head(self.inner.forward_features(x)[:, 5])


def test_legrad_gives_the_head_a_whole_sequence() -> None:
    explanation = cv.explain(cv.wrap(LateRow()), pixels("timm-vit"), "legrad", target=2)
    assert explanation.maps.isfinite().all()
