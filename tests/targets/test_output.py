"""Targets of whatever a module returns: exact against autograd, and accepted by every verb."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.models.state_hash import state_hash
from clairvit.targets.resolve import readout_model
from helpers.rounding import assert_same
from helpers.tiny_models import build


@dataclass
class Prediction:
    """What a user's module may return."""

    scores: Tensor
    cells: Tensor


class Structured(nn.Module):
    """A ViT that returns its scores in a container, next to a second output; `bias` is a further input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.vit = build("timm-vit")
        self.kind = kind

    def forward(self, pixel_values: Tensor, bias: Tensor | None = None) -> Any:
        scores = self.vit(pixel_values)
        scores = scores if bias is None else scores + bias
        cells = scores[:, :, None, None] * torch.arange(1, 7, dtype=scores.dtype).reshape(2, 3)  # [B, C, 2, 3]
        return {
            "tensor": cells,
            "tuple": (cells, "text"),
            "mapping": {"cells": cells, "count": 3},
            "dataclass": Prediction(scores, cells),
        }[self.kind]


READERS = {
    "tensor": lambda output: output[:, 1, 0, 2],
    "tuple": lambda output: output[0][:, 1, 0, 2],
    "mapping": lambda output: output["cells"][:, 1, 0, 2],
    "dataclass": lambda output: output.cells[:, 1, 0, 2],
}


def structured(kind: str) -> cv.Model:
    torch.manual_seed(0)
    return cv.wrap(Structured(kind).double().eval(), size=32, mean=0.5, std=0.5)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind", READERS)
def test_gradients_are_those_of_the_scalar_that_is_read(kind: str) -> None:
    model, pixels = structured(kind), images().requires_grad_()
    target = cv.Output(READERS[kind], name="one cell")
    READERS[kind](model.module(pixels)).sum().backward()
    trace = cv.trace(model, images(), target=target)
    assert pixels.grad is not None
    assert_same(trace.dpixels, pixels.grad)
    assert trace.target is not None
    assert trace.target.names == ("one cell", "one cell")


@pytest.mark.parametrize("method", ["ixg", "gradsam", "attnlrp+plus", "leave-one-out", "rise(samples=8)", "alti"])
def test_maps_are_three_times_those_of_the_class(method: str) -> None:
    """The cell is 3 · score of class 1, so that every map that is linear in the score is three times its map."""
    model = structured("mapping")
    plain = cv.wrap(model.module.vit, size=32, mean=0.5, std=0.5, activation="raw")
    expected = cv.explain(plain, images(), method, target=1).maps
    explained = cv.explain(model, images(), method, target=cv.Output(READERS["mapping"]))
    assert_same(explained.maps, expected if method == "alti" else 3 * expected)
    assert explained.probabilities == (None, None)
    assert explained.score == ("none" if method == "alti" else "custom")


def test_every_verb_takes_it() -> None:
    model, target = structured("tuple"), cv.Output(READERS["tuple"], name="cell")
    explanation = cv.explain(model, images(), target=target)
    assert explanation.targets == ("cell", "cell")
    assert explanation.check().checks[0].removals
    assert list(cv.compare(model, images(), ["ixg", "rollout"], target)) == ["ixg", "rollout"]
    scores = cv.evaluate(model, images(), "ixg", "deletion(steps=3)", target=target)
    assert scores.n_valid == 2
    assert cv.choose(model, images(), ["ixg"], ["deletion(steps=2)"], target=target).ranking
    assert cv.intervene_sweep(model, images(), kind="mlp", target=target).target == ("cell", "cell")
    recipe = cv.calibrate(model, images(8), sets=2, metrics=["deletion(steps=2)"], target=target)
    assert cv.explain(model, images(), recipe, target=target).maps.isfinite().all()


def test_targets_of_single_images_may_read_different_outputs() -> None:
    model = structured("tensor")
    readers = [cv.Output(lambda output: output[:, 0, 1, 1], name="a"), cv.Output(READERS["tensor"], name="b")]
    per_image = cv.explain(model, images(), "ixg", target=readers)
    per_target = cv.explain(model, images(), "ixg", targets=readers)
    assert per_image.targets == ("a", "b")
    assert per_target.targets == ("a", "a", "b", "b")
    assert_same(per_image.maps, per_target.maps[[0, 3]])


def test_images_are_scored_by_the_output_that_their_target_reads() -> None:
    """A list of targets with different readouts: every image scores as if it were alone."""
    model, pixels = structured("tensor"), images(3)
    first, second = cv.Output(lambda output: output[:, 0, 1, 1], name="a"), cv.Output(READERS["tensor"], name="b")
    mixed, metrics = [second, first, second], ["deletion(steps=3)", "sparseness"]
    scores = cv.evaluate(model, pixels, ["ixg", "genatt"], metrics, target=mixed)
    for row, target in enumerate(mixed):
        alone = cv.evaluate(model, pixels[row : row + 1], ["ixg", "genatt"], metrics, target=target)
        for key, score in alone.items():
            assert_same(scores[key].values[row], score.values[0])
    maps = cv.explain(model, pixels, "ixg", target=mixed).maps
    checks = cv.check_maps(model, pixels, maps, mixed)
    for row, target in enumerate(mixed):
        alone = cv.check_maps(model, pixels[row : row + 1], maps[row : row + 1], target)
        removals = zip(checks[row].removals, alone[0].removals, strict=True)
        assert all(ours.top == pytest.approx(other.top, rel=1e-9) for ours, other in removals)
    assert cv.choose(model, pixels, ["ixg"], ["deletion(steps=2)"], target=mixed).ranking
    with pytest.raises(BadInput, match=r"grid-pointing-game.* of all images together.*read different outputs"):
        cv.evaluate(model, pixels, "ixg", "grid-pointing-game", target=mixed)
    with pytest.raises(BadInput, match="read different outputs"):
        cv.choose(model, pixels, ["ixg"], ["deletion(steps=2)"], target=mixed, tune_start=["focusvit"])
    with pytest.raises(BadInput, match="2 targets were given for 3 images"):
        cv.evaluate(model, pixels, "ixg", "deletion", target=mixed[:2])


def test_further_inputs_are_bound() -> None:
    model, target = structured("mapping"), cv.Output(lambda output: output["cells"][:, 1, 0, 0] ** 2)
    bias = torch.tensor([[0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    pixels = images().requires_grad_()
    model.module(pixels, bias=bias)["cells"][:, 1, 0, 0].square().sum().backward()
    assert pixels.grad is not None
    for given in (
        cv.trace(model, images(), target=target, inputs={"bias": bias}),
        cv.trace(model, {"pixel_values": images(), "bias": bias}, target=target),
        cv.trace(model.with_inputs(bias=bias), images(), target=target),
    ):
        assert_same(given.dpixels, pixels.grad)
    with pytest.raises(BadInput, match=r"no input 'colour'; expected one of pixel_values, bias"):
        cv.explain(model, images(), target=target, inputs={"colour": bias})
    with pytest.raises(BadInput, match=r"shape \[3, 7\], and there are 2 images; expected one row"):
        cv.explain(model, images(), target=target, inputs={"bias": bias.expand(3, -1)})


def test_equal_readouts_are_one_model() -> None:
    model, target = structured("tensor"), cv.Output(READERS["tensor"])
    readout = readout_model(model, target)
    assert readout is readout_model(model, target)
    assert readout is readout_model(readout, target), "a readout starts from the model itself"
    assert state_hash(readout.module) == state_hash(model.module)


def test_a_readout_does_not_keep_the_model_alive() -> None:
    model = structured("tensor")
    readout_model(model, cv.Output(READERS["tensor"]))
    module = weakref.ref(model.module)
    del model
    gc.collect()
    assert module() is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda output: output["nothing"], r"failed on what the model returned, a tensor \[1, 7, 2, 3\]"),
        (lambda output: output.mean((2, 3))[:, :, None], r"returned shape \[1, 7, 1\] for 1 image"),
        (lambda output: 3.0, "returned a float for 1 image"),
    ],
)
def test_functions_that_do_not_fit_are_refused(function: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cv.explain(structured("tensor"), images(1), "ixg", target=cv.Output(function))


def test_without_a_target_the_error_names_output() -> None:
    with pytest.raises(BadInput, match=r"shape \(1, 7, 2, 3\); expected \[B, classes\].*target=cv\.Output"):
        cv.explain(structured("tensor"), images(), "ixg")


def test_contrasts_of_targets_are_differences() -> None:
    model = cv.wrap(structured("tensor").module.vit, size=32, mean=0.5, std=0.5)

    @dataclass(frozen=True)
    class Doubled(cv.targets.Target):
        index: int

        def resolve(self, context: Any) -> cv.targets.TargetBatch:
            count = len(context)
            return context.target(["doubled"] * count, [None] * count, [((self.index, 2.0),)] * count)

    both = cv.explain(model, images(), "ixg", target=cv.Contrast(Doubled(1), 3))
    first, second = (cv.explain(model, images(), "ixg", target=t).maps for t in (1, 3))
    assert_same(both.maps, 2 * first - second)
    assert both.targets[0].startswith("doubled − ")
    removed = cv.explain(model, images(), "leave-one-out", target=cv.Contrast(Doubled(1), 3), score="logit").maps
    parts = [cv.explain(model, images(), "leave-one-out", target=t, score="logit").maps for t in (1, 3)]
    assert_same(removed, 2 * parts[0] - parts[1])
    with pytest.raises(BadInput, match="with itself"):
        cv.explain(model, images(), "ixg", target=cv.Contrast(Doubled(1), Doubled(1)))
