"""Perturbation methods through all three activations: closed forms on a model that is linear before its activation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.lime_shap import lime_kernel
from clairvit.methods.occlusion import multi_scale_boxes
from clairvit.methods.registry import list_methods
from clairvit.methods.rise import random_masks
from clairvit.perturbation.segments import random_halves
from helpers.linear_patch_model import LinearPatches, effects
from helpers.rounding import assert_same
from helpers.tiny_models import ZOO, build, pixels

GRID, PATCH, TARGET = (2, 3), 4, 1
PATCHES = GRID[0] * GRID[1]
ACTIVATIONS = ("softmax", "sigmoid", "raw")
ACTIVATED: dict[str, tuple[nn.Module, nn.Module]] = {  # the probability, and its logarithm
    "softmax": (nn.Softmax(-1), nn.LogSoftmax(-1)),
    "sigmoid": (nn.Sigmoid(), nn.LogSigmoid()),
    "raw": (nn.Identity(), nn.Identity()),
}
Value = Callable[[Tensor], float]  # bool [patches] that are left -> the score


def applied(logits: Tensor, activation: str) -> Tensor:
    """Return what the activation makes of logits [..., C], written out."""
    if activation == "softmax":
        return logits.exp() / logits.exp().sum(-1, keepdim=True)
    return 1 / (1 + (-logits).exp()) if activation == "sigmoid" else logits


def linear_model(activation: str, seed: int = 3) -> tuple[cv.Model, Tensor, Value]:
    """Return a model whose logits are sums over patches, an image, and the exact score of any set of patches left."""
    size = (GRID[0] * PATCH, GRID[1] * PATCH)
    module = LinearPatches(GRID, PATCH, smooth=False, seed=seed).double().eval()
    model = cv.wrap(module, name="linear", size=size, layout=cv.Layout(GRID, 0, "avg"), activation=activation)
    draws = torch.Generator().manual_seed(seed + 1)
    image = 1 + 0.3 * torch.randn(1, 3, *size, generator=draws, dtype=torch.float64)
    by_class = torch.stack([effects(model, image, c).flatten() for c in range(3)])  # [C, patches]

    def value(left: Tensor) -> float:
        return float(applied(by_class @ left.double(), activation)[TARGET])

    return model, image, value


def explained(activation: str, method: str, **options: Any) -> tuple[Tensor, Tensor, Value]:
    """Return the map [rows, cols], the image and the exact score of any set of patches."""
    model, image, value = linear_model(activation)
    explanation = cv.explain(model, image, method, TARGET, removal="mean", **options)
    assert explanation.score == ("logit" if activation == "raw" else "prob")
    assert explanation.activation == activation
    return explanation.maps[0], image, value


ALL = torch.ones(PATCHES, dtype=torch.bool)
EYE = torch.eye(PATCHES, dtype=torch.bool)


def subsets(places: list[int]) -> list[tuple[int, ...]]:
    return [chosen for count in range(len(places) + 1) for chosen in itertools.combinations(places, count)]


def left(chosen: tuple[int, ...]) -> Tensor:
    keep = torch.zeros(PATCHES, dtype=torch.bool)
    keep[list(chosen)] = True
    return keep


@pytest.mark.parametrize("activation", ACTIVATIONS)
class TestClosedForms:
    def test_leave_one_out(self, activation: str) -> None:
        maps, _, value = explained(activation, "leave-one-out")
        assert_same(maps.flatten(), [value(ALL) - value(ALL & ~EYE[p]) for p in range(PATCHES)])

    def test_occlusion(self, activation: str) -> None:
        """Windows of one row and two columns' width, the loss of each shared by its patches."""
        maps, _, value = explained(activation, "occlusion", window=2)
        total, count = torch.zeros(GRID, dtype=torch.float64), torch.zeros(GRID, dtype=torch.float64)
        for top, first in itertools.product(range(2), range(2)):  # the window is cut to 1 × 2: something must be left
            window = torch.zeros(GRID, dtype=torch.bool)
            window[top, first : first + 2] = True
            lost = (value(ALL) - value(~window.flatten())) / 2
            total[window] += lost
            count[window] += 1
        assert_same(maps, total / count)

    def test_pami(self, activation: str) -> None:
        maps, _, value = explained(activation, "pami", scales=2)
        total, count = torch.zeros(GRID, dtype=torch.float64), torch.zeros(GRID, dtype=torch.float64)
        for top, first, height, width in multi_scale_boxes(GRID, 2):
            part = torch.zeros(GRID, dtype=torch.bool)
            part[top : top + height, first : first + width] = True
            total[part] += value(part.flatten())
            count[part] += 1
        assert_same(maps, total / count)

    def test_kernelshap(self, activation: str) -> None:
        """All coalitions: the Shapley values by their definition."""
        maps, _, value = explained(activation, "kernelshap")
        shapley = []
        for p in range(PATCHES):
            others = [q for q in range(PATCHES) if q != p]
            weights = [
                math.factorial(len(s)) * math.factorial(PATCHES - len(s) - 1) / math.factorial(PATCHES)
                for s in subsets(others)
            ]
            gains = [value(left((*s, p))) - value(left(s)) for s in subsets(others)]
            shapley.append(sum(w * gain for w, gain in zip(weights, gains, strict=True)))
        assert_same(maps.flatten(), shapley)

    def test_lime(self, activation: str) -> None:
        """The weighted ridge regression, solved by numpy as one least-squares problem."""
        maps, _, value = explained(activation, "lime", samples=40, alpha=0.5, seed=2)
        kept = torch.cat([torch.ones(1, PATCHES), random_halves(39, PATCHES, 2)]).double()
        scores = np.array([value(row.bool()) for row in kept])
        weights = lime_kernel(kept, 0.25).numpy()
        rows = np.concatenate([np.ones((40, 1)), kept.numpy()], 1) * np.sqrt(weights)[:, None]
        ridge = np.concatenate([np.zeros((PATCHES, 1)), np.sqrt(0.5) * np.eye(PATCHES)], 1)
        targets = np.concatenate([scores * np.sqrt(weights), np.zeros(PATCHES)])
        expected = np.linalg.lstsq(np.concatenate([rows, ridge]), targets, rcond=None)[0]
        assert_same(maps.flatten(), expected[1:])

    def test_rise(self, activation: str) -> None:
        """f is linear in the mask before its activation: logits of the masked image, one sum over all masks."""
        maps, image, _ = explained(activation, "rise", samples=30, cells=2, p=0.4)
        model, _, _ = linear_model(activation)
        masks = random_masks(30, 2, 0.4, (image.shape[-2], image.shape[-1]), 0)
        shown = masks(range(30)).to(image)  # [N, H, W]
        with torch.no_grad():
            scores = applied(model.module(image * shown[:, None]), activation)[:, TARGET]
        on_patches = masks.pooled(GRID)(range(30)).to(image)
        expected = torch.einsum("n,nrc->rc", scores, on_patches) / (30 * 0.4)
        assert_same(maps, expected, dtype=torch.float64)


# Every method that prefers a probability explains what an activated twin of the model says


def twin_models(activation: str, kind: str, log: bool) -> tuple[cv.Model, cv.Model]:
    """Return a ViT with this activation, and the same one that applies it itself, whose scores are raw."""
    module = build(kind).double()
    last = ACTIVATED[activation][int(log)]
    model = cv.wrap(module, size=ZOO[kind].size, activation=activation)
    twin = cv.wrap(nn.Sequential(build(kind).double(), last), size=ZOO[kind].size, activation="raw")
    return model, twin


QUICK: dict[str, dict[str, Any]] = {
    "leave-one-out": {},
    "occlusion": {"window": 2},
    "pami": {"scales": 2},
    "rise": {"samples": 12},
    "lime": {"samples": 24},
    "kernelshap": {"samples": 40},
    "hsic": {"samples": 24, "cells": 3},
    "scorecam": {"top_k": 5},
    "vit-cx": {"samples": 4},
    "atman": {},
    "caap": {},
}


def test_every_method_that_prefers_a_probability_is_swept() -> None:
    prefers = {method.name for method in list_methods() if method.score != "logit"}
    perturbs = {method.name for method in list_methods() if method.family == "perturbation"}
    assert (prefers | perturbs) - {"counterfactual"} <= set(QUICK)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("method", QUICK)
def test_a_probability_is_explained_as_the_score_of_a_model_that_applies_its_activation(
    method: str, activation: str
) -> None:
    preferred = next(registered.score for registered in list_methods() if registered.name == method)
    model, twin = twin_models(activation, "timm-vit", log=preferred == "logprob")
    image = pixels("timm-vit", 1, dtype=torch.float64)
    explicit = {"score": "prob"} if preferred == "logit" and activation != "raw" else {}
    ours = cv.explain(model, image, method, 3, **QUICK[method], **explicit)
    theirs = cv.explain(twin, image, method, 3, **QUICK[method])
    assert theirs.score == "logit"
    assert theirs.probabilities == (None,)
    assert float(ours.maps.abs().max()) > 0
    # the scores, of size 1 to 10, are what is subtracted and summed; maps are small differences of them
    largest = max(1.0, float(theirs.logits.abs().max()))
    assert_same(ours.maps, theirs.maps, magnitude=largest)


# Heads that were read wrongly


def regression(score: float) -> tuple[cv.Model, Tensor]:
    """Return a ViT with a single output that says `score` for the image."""
    module: Any = build("timm-vit").double()
    image = pixels("timm-vit", 1, dtype=torch.float64)
    module.head = nn.Linear(module.head.in_features, 1).double()
    module.num_classes = 1
    with torch.no_grad():
        module.head.weight.copy_(
            0.5 * torch.randn(1, module.head.in_features, generator=torch.Generator().manual_seed(0))
        )
        module.head.bias.zero_()
        module.head.bias.copy_(score - module(image)[0])
    return cv.wrap(module, name="age", size=32, labels=["age"]), image


def test_a_regression_head_has_a_score_and_no_probability() -> None:
    model, image = regression(37.0)
    assert model.activation == "raw"
    explanation = cv.explain(model, image, "leave-one-out(removal=mean)")
    assert explanation.probabilities == (None,)
    assert explanation.activation == "raw"
    assert_same(explanation.class_scores[0], 37.0)
    gone = []
    for p in range(16):
        painted = image.clone()
        row, col = divmod(p, 4)
        painted[:, :, 8 * row : 8 * row + 8, 8 * col : 8 * col + 8] = 0
        with torch.no_grad():
            gone.append(37.0 - float(model.logits(painted)))
    assert max(map(abs, gone)) > 1e-3, "it was 0 everywhere, through a sigmoid that says 1 to 37"
    assert_same(explanation.maps[0].flatten(), gone, magnitude=37.0)


def test_a_multi_label_head_is_read_through_a_sigmoid() -> None:
    """Two classes at 0.95 each share a softmax, which says about a half."""
    module: Any = build("timm-vit").double()
    image = pixels("timm-vit", 1, dtype=torch.float64)
    wanted_logits = torch.full((module.head.out_features,), -6.0, dtype=torch.float64)
    wanted_logits[:2] = math.log(0.95 / 0.05)
    wanted_logits[0] += 0.12
    with torch.no_grad():
        module.head.bias.copy_(module.head.bias + wanted_logits - module(image)[0])
    soft = cv.explain(cv.wrap(module, size=32), image, "legrad", 0)
    assert soft.probabilities[0] == pytest.approx(0.53, abs=0.01)
    explanation = cv.explain(cv.wrap(module, size=32, activation="sigmoid"), image, "legrad", 0)
    assert_same(explanation.probabilities[0], 1 / (1 + math.exp(-(math.log(0.95 / 0.05) + 0.12))))
    assert explanation.classes == cv.explain(cv.wrap(module, size=32, activation="sigmoid"), image).classes


def test_an_explicit_probability_of_a_raw_score_is_refused() -> None:
    model, image = regression(37.0)
    for verb in (cv.explain, cv.trace):
        with pytest.raises(BadInput, match="score 'prob' is made of a probability, and this model's scores are raw"):
            verb(model, image, score="prob")
    with pytest.raises(BadInput, match="score 'logprob'"):
        cv.compare(model, image, ["legrad"], score="logprob")


def test_a_module_that_applies_its_sigmoid_is_noted() -> None:
    twin = cv.wrap(nn.Sequential(build("timm-vit"), nn.Sigmoid()), name="tags", size=32)
    explanation = cv.explain(twin, pixels("timm-vit", 1), "legrad", 0)
    assert "tags: the module ends in nn.Sigmoid, so its outputs are taken as they are" in explanation.notes
    assert explanation.probabilities == (None,)


# The counterfactual


def test_a_counterfactual_of_a_sigmoid_flips_yes_to_no() -> None:
    """The answer of a class that stands for itself is yes where its logit is above 0, whatever the others say."""
    model, image, _ = linear_model("sigmoid", seed=5)
    by_class = {c: effects(model, image, c).flatten() for c in range(3)}
    target = next(c for c in range(3) if float(by_class[c].sum()) > 0)
    explanation = cv.explain(model, image, "counterfactual(removal=mean)", target)
    assert explanation.chosen is not None
    chosen = explanation.chosen[0].flatten()
    assert chosen.any()
    margin = float(by_class[target][~chosen].sum())
    assert margin <= 0
    for p in chosen.nonzero()[:, 0].tolist():
        back = float(by_class[target][~chosen | EYE[p]].sum())
        assert back > 0
        assert_same(explanation.maps[0].flatten()[p], back - margin)
    assert any("turns" in note and f"into 'not class {target}'" in note for note in explanation.notes)


def test_a_counterfactual_needs_an_answer_to_flip() -> None:
    model, image = regression(37.0)
    with pytest.raises(NotApplicable, match="a model with a single raw score gives none"):
        cv.explain(model, image, "counterfactual")
    model, image = regression(0.02)
    yes_or_no = cv.wrap(model.module, size=32, activation="sigmoid")
    explanation = cv.explain(yes_or_no, image, "counterfactual")
    assert explanation.chosen is not None
    assert explanation.chosen.any()
