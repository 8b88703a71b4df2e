"""Which tensor of a module's output holds the scores: chosen by stated evidence, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.models.scores import extract_scores
from helpers.custom_vits import WIDTH, Block, FusedAttention, HomeMade

COUNT = 5  # classes
FEATURES, LOGITS, MAP = torch.randn(2, 8), torch.randn(2, COUNT), torch.randn(2, 3, 4, 4)


class Pair(NamedTuple):
    features: Tensor
    scores: Tensor


@dataclasses.dataclass
class Record:
    features: Tensor
    scores: Tensor


Container = Callable[[Tensor, Tensor], Any]
CONTAINERS: dict[str, Container] = {
    "tuple": lambda features, scores: (features, scores),
    "list": lambda features, scores: [features, scores],
    "scores first": lambda features, scores: (scores, features),
    "nested": lambda features, scores: (features, (scores, MAP)),
    "dict": lambda features, scores: {"features": features, "scores": scores},
    "named tuple": Pair,
    "dataclass": Record,
    "with a map": lambda features, scores: (MAP, features, scores),
    "with class numbers": lambda features, scores: (features, scores, torch.tensor([1, 2])),
}


class Head(nn.Module):
    """A layer called head, or by another name, whose input is returned too."""

    def __init__(self, name: str = "head") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(8, COUNT))


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_labels_or_the_head_choose_among_several_tensors(container: Container) -> None:
    output = container(FEATURES, LOGITS)
    assert extract_scores(output, labels=COUNT) is LOGITS
    assert extract_scores(output, Head()) is LOGITS
    assert extract_scores(output, Head("answer")) is LOGITS  # it computes 5 numbers of the other 8


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_several_tensors_without_evidence_are_refused_by_name(container: Container) -> None:
    for module, labels in ((None, 0), (nn.Linear(3, 4), 0), (Head(), 7)):
        with pytest.raises(
            BadInput, match=r"2 tensors that could be scores \(.*\[2, 8\].*nothing says which.*cv\.Output"
        ):
            extract_scores(container(FEATURES, FEATURES.clone()), module, labels)


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_the_only_tensor_that_can_be_scores_is_taken(container: Container) -> None:
    assert extract_scores(container(MAP, LOGITS)) is LOGITS
    assert extract_scores(container(LOGITS, LOGITS)) is LOGITS  # the same one twice


def test_a_field_named_logits_counts_before_all_others() -> None:
    assert extract_scores({"features": FEATURES, "logits": LOGITS}, labels=8) is LOGITS
    assert extract_scores(ImageClassifierOutput(logits=LOGITS, hidden_states=(MAP, FEATURES))) is LOGITS
    output = BaseModelOutputWithPooling(last_hidden_state=torch.randn(2, 3, 8), pooler_output=FEATURES)
    assert torch.equal(extract_scores(output), FEATURES)


def test_one_number_per_image_is_a_column() -> None:
    assert extract_scores((LOGITS[:, 0],)).shape == (2, 1)
    assert extract_scores((FEATURES, LOGITS[:, 0]), labels=1).shape == (2, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_scores_that_are_no_real_numbers_are_refused(dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    model = cv.wrap(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5), Cast(dtype)), size=32)
    for scores in (lambda: extract_scores(LOGITS.to(dtype)), lambda: cv.explain(model, torch.randn(1, 3, 32, 32))):
        with pytest.raises(BadInput, match=f"returned scores of type {kind}; expected floating-point numbers"):
            scores()


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, scores: Tensor) -> Tensor:
        return scores.to(self.dtype)


class WithFeatures(HomeMade):
    """A ViT that returns its features before its scores."""

    def forward(self, image: Tensor) -> Any:
        tokens = self.tokens(image)
        for block in self.blocks:
            tokens = block(tokens)
        features = self.norm(tokens)[:, 0]
        return features, self.head(features)


class ScoresAlone(WithFeatures):
    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image)[1]


def alike() -> tuple[nn.Module, nn.Module]:
    """Return a ViT that returns features and scores, and the same one that returns scores alone."""
    torch.manual_seed(0)
    module = WithFeatures(lambda: Block(FusedAttention)).eval().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    plain = ScoresAlone(lambda: Block(FusedAttention)).eval().double()
    plain.load_state_dict(module.state_dict())
    return module, plain


def test_maps_and_scores_are_those_of_the_class_scores() -> None:
    module, plain = alike()
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for method in ("attnlrp+plus", "genatt", "rollout", "gradcam", "leave-one-out"):
        ours, reference = (cv.explain(cv.wrap(part, size=32), pixels, method) for part in (module, plain))
        assert ours.targets == reference.targets
        assert torch.equal(ours.logits, reference.logits)
        torch.testing.assert_close(ours.maps, reference.maps, rtol=1e-10, atol=1e-12)
    scores = [cv.evaluate(cv.wrap(part, size=32), pixels, "genatt", "deletion(steps=3)") for part in (module, plain)]
    torch.testing.assert_close(scores[0].values, scores[1].values, rtol=1e-10, atol=1e-12)


def test_a_module_that_gives_no_evidence_is_refused_by_every_verb() -> None:
    module, _ = alike()
    module.head = nn.Linear(WIDTH, WIDTH).double()
    model, pixels = cv.wrap(module, size=32), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    for verb in (
        lambda: cv.explain(model, pixels),
        lambda: cv.evaluate(model, pixels, "genatt"),
        lambda: cv.compare(model, pixels, ["genatt"]),
        lambda: cv.check_maps(model, pixels, torch.ones(1, 4, 4)),
    ):
        with pytest.raises(BadInput, match=r"2 tensors that could be scores \(0 \[1, 24\], 1 \[1, 24\]\)"):
            verb()
    assert "2 tensors" in cv.doctor(model, pixels)["forward"].finding
    reader = cv.Output(lambda output: output[1][:, 2])  # what the message advises
    assert cv.explain(model, pixels, target=reader).maps.abs().max() > 0
