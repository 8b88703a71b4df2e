"""HSIC.

Proved: the score is the definition with explicit kernels and centring matrices, and as double sums; it is 0 for an
output that does not depend on a cell, and in closed form for one that is the cell; each output comes from the
image that the mask says; cells find their patches. On linear models it ranks the weights. xplique needs TensorFlow, so
its numbers are checked by its formula.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from scipy.stats import qmc, spearmanr
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.methods.hsic import binary_design, cell_of_patch, dependence, kernel_widths
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import REMOVALS
from helpers.linear_patch_model import effects, linear
from helpers.rounding import assert_same, same
from helpers.tiny_models import cnn, double, pixels, wrapped

DESIGNS = ["sobol", "lhs", "random"]


def by_definition(shown: Tensor, outputs: Tensor, width: float) -> Tensor:
    """xplique's formula with every matrix written out: K and L, then H on both sides of each."""
    n = len(outputs)
    H = torch.eye(n, dtype=torch.float64) - 1 / n
    L = torch.exp(-((outputs[:, None] - outputs) ** 2) / (2 * width**2))
    statistics = []
    for z in shown.double().T:
        K = 1 + (0.5 - (z[:, None] - z) ** 2)
        statistics.append(((H @ K @ H) * (H @ L @ H).T).sum() / n)
    return torch.stack(statistics)


def by_double_sums(z: list[float], y: list[float], width: float) -> float:
    """n times the biased estimate: mean of K L, plus the product of their means, minus twice the mean of row means."""
    n = len(z)
    K = [[1.5 - (a - b) ** 2 for b in z] for a in z]
    L = [[math.exp(-((a - b) ** 2) / (2 * width**2)) for b in y] for a in y]
    pairs = list(itertools.product(range(n), range(n)))
    both = sum(K[i][j] * L[i][j] for i, j in pairs) / n**2
    apart = sum(K[i][j] for i, j in pairs) * sum(L[i][j] for i, j in pairs) / n**4
    across = sum(sum(K[i]) * sum(L[i]) for i in range(n)) / n**3
    return n * (both + apart - 2 * across)


def drawn(n: int = 40, cells: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shown = torch.rand(n, cells, generator=generator) < 0.4
    outputs = shown.double() @ torch.randn(cells, generator=generator, dtype=torch.float64) + 1
    return shown, outputs**2


@pytest.mark.parametrize("width", [0.3, 2.0, -1.5, 40.0])
def test_dependence_is_the_definition(width: float) -> None:
    """A median below zero is as wide as one above."""
    shown, outputs = drawn()
    dependences = dependence(shown, outputs, torch.tensor(width, dtype=torch.float64))
    pairs = float(len(outputs))  # sums over n² kernels of at most 1.5, over n
    assert_same(dependences, by_definition(shown, outputs, width), magnitude=pairs)
    for cell in range(3):
        expected = by_double_sums(shown[:, cell].double().tolist(), outputs.tolist(), width)
        assert_same(dependences[cell], expected, magnitude=pairs)


def test_every_mask_once_gives_the_closed_form() -> None:
    """All 2^k masks: the output is one cell, z or 1 − z, or the parity of two, which depends on neither alone.

    For z itself: centred z is ±1/2, so 2/n · sum ±± L / 4 = n/4 · (1 − exp(−1/2w²)).
    """
    shown = torch.tensor(list(itertools.product([False, True], repeat=4)))
    w = torch.tensor(0.7, dtype=torch.float64)
    whole = 16 / 4 * (1 - math.exp(-1 / (2 * 0.7**2)))
    for outputs in (shown[:, 2], ~shown[:, 2]):
        expected = torch.tensor([0, 0, whole, 0], dtype=torch.float64)
        assert_same(dependence(shown, outputs.double(), w), expected, magnitude=16)
    parity = (shown[:, 0] ^ shown[:, 1]).double()
    assert_same(dependence(shown, parity, w), torch.zeros(4, dtype=torch.float64), magnitude=16)


def test_dependence_sees_what_a_covariance_does_not() -> None:
    """An output that is only spread wider when the cell is shown."""
    z = torch.tensor([False, False, True, True])[:, None]
    outputs = torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float64)
    assert float((outputs * (z[:, 0].double() - 0.5)).sum()) == 0
    assert float(dependence(z, outputs, torch.tensor(1.0, dtype=torch.float64))) > 0.05


def test_no_width_is_the_limit_of_small_widths() -> None:
    shown, outputs = drawn()
    outputs = outputs.round()  # so that some are the same
    small, none = (dependence(shown, outputs, torch.tensor(w, dtype=torch.float64)) for w in (1e-3, 0.0))
    assert_same(small, none, magnitude=float(len(outputs)))
    assert none.max() > 0
    flat = torch.full_like(outputs, 3.0)
    for width in (0.0, 1e-200, 3.0):
        assert not dependence(shown, flat, torch.tensor(width, dtype=torch.float64)).any()


def test_widths_are_medians() -> None:
    outputs = torch.tensor([[1.0, 2.0, 4.0, 9.0], [-5.0, -5.0, 0.0, 7.0]], dtype=torch.float64)
    assert kernel_widths(outputs, "outputs").tolist() == [3.0, -2.5]  # between the two middle ones, as in xplique
    assert kernel_widths(outputs[:, :3], "distances").tolist() == [2.0, 5.0]  # 1 3 2, and 0 5 5


# Designs


@pytest.mark.parametrize("design", DESIGNS)
def test_designs_show_half_and_come_from_the_seed(design: Any) -> None:
    design_matrix, again, other = (binary_design(design, 500, 64, seed) for seed in (3, 3, 4))
    assert design_matrix.shape == (500, 64)
    assert torch.equal(design_matrix, again)
    assert not torch.equal(design_matrix, other)
    assert (design_matrix.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(500)
    centred = design_matrix.double() - design_matrix.double().mean(0)
    together = torch.corrcoef(centred.T).fill_diagonal_(0).abs().max()
    assert together < (0.03 if design == "sobol" else 0.25)  # Sobol points keep 64 cells apart


def test_latin_hypercubes_are_balanced() -> None:
    assert (binary_design("lhs", 500, 20, 0).sum(0) == 250).all()
    odd = binary_design("lhs", 7, 200, 0).sum(0)
    assert set(odd.tolist()) == {3, 4}


@pytest.mark.parametrize("seed", [0, 1])
def test_sobol_points_are_scipys_up_to_turning_and_dealing_out(seed: int) -> None:
    """And scrambling them as scipy does is nothing else: it turns the first bit over, or does not."""
    points = binary_design("sobol", 64, 12, seed)
    plain = torch.from_numpy(qmc.Sobol(12, scramble=False).random_base2(6) >= 0.5)
    scrambled = torch.from_numpy(qmc.Sobol(12, scramble=True).random_base2(6) >= 0.5)

    def columns(design: Tensor) -> set[tuple[bool, ...]]:
        return {tuple(column) for column in (design ^ design[:1]).T.tolist()}

    assert columns(points) == columns(plain) == columns(scrambled)
    assert len(columns(plain)) == 12


def test_too_few_masks_are_noted() -> None:
    model, image = linear()
    few = cv.explain(model, image, "hsic", 1, score="logit", samples=24)
    assert any("24 masks tell 16 of 64 cells apart" in note for note in few.notes)
    enough = cv.explain(model, image, "hsic", 1, score="logit", samples=24, cells=3)
    assert not any("apart" in note for note in enough.notes)


# Cells and patches


def test_patches_go_with_the_cell_of_their_middle() -> None:
    rows = cell_of_patch((8, 1), (14, 1)).tolist()
    assert rows == [int((i + 0.5) * 8 / 14) for i in range(14)] == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 7]
    assert torch.equal(cell_of_patch((4, 6), (4, 6)), torch.arange(24))
    assert cell_of_patch((2, 2), (2, 4)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def given(model: cv.Model, image: Tensor, masks: Tensor, target: int) -> Tensor:
    """Logits of the image, painted over with the mean colour where masks [n, H, W] hide it."""
    with torch.no_grad():
        return torch.cat([model.logits(image * m)[:, target] for m in masks.to(image.dtype)])


@pytest.mark.parametrize(("cells", "width"), [(4, "outputs"), (8, "distances"), (3, "outputs")])
def test_hsic_on_a_vit_by_hand(cells: int, width: Any) -> None:
    """Masks on pixels, one image after the other, the definition, and means over the pixels of each patch.

    3 cells do not fit 32 pixels: 11, 10 and 11 of them, as the nearest cell says.
    """
    model, image = double("timm-vit", batch=1)
    explanation = cv.explain(model, image, "hsic", 3, samples=50, cells=cells, width=width, seed=4)
    shown = binary_design("sobol", 50, cells * cells, 4)
    place = ((torch.arange(32) + 0.5) * cells / 32).long()
    masks = shown.reshape(50, cells, cells)[:, place][:, :, place]
    outputs = given(model, image, masks, 3).double()
    wide = float(kernel_widths(outputs[None], width))
    scores = by_definition(shown, outputs, wide).reshape(cells, cells)[place][:, place]
    expected = scores.reshape(4, 8, 4, 8).mean((1, 3))
    assert explanation.score == "logit"
    assert explanation.standard_error is None
    assert_same(explanation.maps[0], expected, magnitude=50)


@pytest.mark.parametrize(("kind", "cells", "sides"), [("timm-vit", 8, (4, 4)), ("open_clip-nonsquare", 4, (3, 4))])
def test_dropped_patches_go_by_cells(kind: str, cells: int, sides: tuple[int, int]) -> None:
    """No more cells than patches; patches of one cell have one score."""
    model, image = double(kind, batch=1)
    explanation = cv.explain(model, image, "hsic", 3, samples=40, cells=cells, removal="token", seed=1)
    shown = binary_design("sobol", 40, sides[0] * sides[1], 1)
    trace = cv.trace(model, image, target=3)
    cell_of = cell_of_patch(sides, trace.layout.grid)
    with probing(trace, "token", label="test", forwards=40) as probe:
        outputs = torch.cat([probe.score_kept(mask[cell_of][None, None]) for mask in shown], 1)[0].double()
    expected = by_definition(shown, outputs, float(outputs.quantile(0.5)))[cell_of].reshape(trace.layout.grid)
    assert_same(explanation.maps[0], expected, magnitude=40)


# What it is for


def speaking_for(grid: tuple[int, int], seed: int) -> tuple[cv.Model, Tensor, Tensor]:
    """A linear model most of whose patches speak for class 1, as they do for a class that is predicted."""
    model, image = linear(grid, seed=seed)
    weights = torch.randn(grid, generator=torch.Generator().manual_seed(seed))
    model.module.weights.data[1] = (weights - weights.mean()) / weights.std() + 1
    return model, image, effects(model, image, 1).abs()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hsic_ranks_the_weights_of_a_linear_model(seed: int) -> None:
    """With its default samples, on as many patches as it has cells. It knows no sign: |effects|."""
    model, image, weights = speaking_for((8, 8), seed)
    explanation = cv.explain(model, image, "hsic", 1, score="logit")
    assert explanation.cost.forwards == 501
    assert not explanation.notes
    assert spearmanr(explanation.maps[0].flatten(), weights.flatten()).statistic > 0.95


class Shifted(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, by: float) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, image: Tensor) -> Tensor:
        return self.inner(image) + self.by


def test_a_median_near_zero_is_noted_and_distances_are_better() -> None:
    """A constant taken off all logits changes no prediction, and with width=outputs it can leave noise of the map."""
    model, image, weights = speaking_for((8, 8), 0)
    half = float(effects(model, image, 1).sum()) / 2  # what an image of half of its cells has
    other = cv.wrap(Shifted(model.module, -0.99 * half), size=(64, 64), layout=cv.Layout((8, 8), 0, "avg"))
    narrow = cv.explain(other, image, "hsic", 1, score="logit")
    right = cv.explain(other, image, "hsic", 1, score="logit", width="distances")
    ranked = [
        float(spearmanr(explanation.maps[0].flatten(), weights.flatten()).statistic) for explanation in (narrow, right)
    ]
    assert ranked[0] + 0.2 < 0.85 < ranked[1]
    assert any("width=distances" in note for note in narrow.notes)
    assert not right.notes


def test_distances_do_not_care_for_a_constant() -> None:
    model, image, _ = speaking_for((4, 4), 0)
    other = cv.wrap(Shifted(model.module, 5.0), size=(32, 32), layout=cv.Layout((4, 4), 0, "avg"))
    maps = {
        width: [
            cv.explain(candidate, image, "hsic", 1, score="logit", width=width).maps for candidate in (model, other)
        ]
        for width in ("distances", "outputs")
    }
    assert_same(*maps["distances"], magnitude=500)  # as many masks
    assert not same(*maps["outputs"], magnitude=500)


@pytest.mark.parametrize("removal", ["mean", "token"])
def test_the_same_map_for_any_batch_size(removal: str) -> None:
    model, image = double("timm-vit")
    maps = [cv.explain(model, image, "hsic(samples=70)", 3, batch_size=n, removal=removal).maps for n in (1, 7, 64)]
    for other in maps[1:]:
        assert_same(other, maps[0], magnitude=70)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("removal", REMOVALS)
def test_every_removal_and_design_works(removal: str, design: str) -> None:
    explanation = cv.explain(
        wrapped("timm-vit"), pixels("timm-vit"), "hsic", 3, samples=12, removal=removal, design=design
    )
    assert explanation.maps.shape == (2, 4, 4)
    assert explanation.maps.min() >= 0
    assert explanation.maps.flatten(1).std(1).min() > 0


def test_networks_without_tokens_are_explained_too() -> None:
    explanation = cv.explain(cv.wrap(cnn()), pixels("timm-vit"), "hsic", 3, samples=20, removal="token")
    assert explanation.maps.flatten(1).std(1).min() > 0
    assert any("no token stream" in note for note in explanation.notes)


@pytest.mark.parametrize(
    ("method", "seen"), [("hsic(samples=1)", "samples=1 .*2 or more masks"), ("hsic(cells=1)", "cells=1 .*2 or more")]
)
def test_bad_options_are_refused(method: str, seen: str) -> None:
    with pytest.raises(BadInput, match=seen):
        cv.explain(*linear(), method, 1)
