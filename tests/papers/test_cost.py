"""What papers say of cost: passes are counted, ratios of times are geometric means; no test asserts a time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import clairvit as cv
from clairvit._cost import Cost
from clairvit.data.dataset import as_dataset
from clairvit.errors import BadInput
from clairvit.papers.cost import CostResult, check_costs, measure_costs, ratio_of_times
from clairvit.papers.paper import CostClaim, find_paper, list_papers
from helpers.tiny_models import pixels, wrapped

CLAIM = CostClaim("12 % slower", "section 4", "FocusViT", "Attention", 1.12)


def result(ratio: float, low: float, high: float, claim: CostClaim = CLAIM) -> CostResult:
    return CostResult(claim, Cost(1, 1), Cost(1, 0), ratio, (low, high), 15, "cpu")


@pytest.mark.parametrize("name", ["focusvit", "joita"])
def test_a_gradient_takes_one_backward_pass_more(name: str) -> None:
    """One forward and one backward against one forward: FocusViT and GMAR against rollout."""
    images = as_dataset(list(pixels("timm-vit")), wrapped("timm-vit"))
    (measured,), unmeasured = measure_costs(find_paper(name), "quick", wrapped("timm-vit"), images)
    assert (measured.method.forwards, measured.method.backwards) == (1, 1)
    assert (measured.baseline.forwards, measured.baseline.backwards) == (1, 0)
    assert measured.extra_passes == 1
    assert unmeasured == ()
    assert measured.interval[0] <= measured.ratio <= measured.interval[1]
    assert measured.method.seconds > 0


def test_the_ratio_is_the_geometric_mean_of_the_rounds() -> None:
    seconds = np.array([[2.0, 1.0], [8.0, 1.0]] * 8)
    ratio, (low, high) = ratio_of_times(seconds, 0)
    assert ratio == pytest.approx(4.0, abs=1e-12)
    assert 2.0 < low < 4.0 < high < 8.0
    swapped, interval = ratio_of_times(seconds[:, ::-1], 0)
    assert swapped == pytest.approx(0.25, abs=1e-12)
    assert interval[0] < 0.25 < interval[1]


def test_verdicts() -> None:
    assert result(1.1, 1.05, 1.2).verdict == "holds here"
    assert result(1.9, 1.8, 2.0).verdict == "slower than printed"
    assert result(1.0, 0.9, 1.1).verdict == "faster than printed"
    unprinted = replace(CLAIM, ratio=None)
    assert result(1.9, 1.8, 2.0, unprinted).verdict == "slower here"
    assert result(0.9, 0.8, 0.95, unprinted).verdict == "faster here"
    assert result(1.0, 0.9, 1.1, unprinted).verdict == "no difference here"


def test_how_much_other_work_would_make_the_printed_ratio_true() -> None:
    """(p + w + 1) / (p + w) = 1.12 with p = 1 pass of the baseline and w of other work."""
    needed = result(1.9, 1.8, 2.0).work_needed
    assert (1 + needed + 1) / (1 + needed) == pytest.approx(1.12, abs=1e-12)
    assert math.isnan(result(1.9, 1.8, 2.0, replace(CLAIM, ratio=None)).work_needed)


def test_papers_that_say_nothing_of_cost_are_refused() -> None:
    saying = {paper.name for paper in list_papers() if paper.costs}
    assert saying == {"focusvit", "joita"}
    with pytest.raises(BadInput, match="'cmi' says nothing about what its methods cost"):
        check_costs(find_paper("cmi"))


def test_a_method_that_does_not_fit_is_explained() -> None:
    layers = torch.nn
    module = layers.Sequential(
        layers.Conv2d(3, 4, 3, stride=8), layers.AdaptiveAvgPool2d(1), layers.Flatten(), layers.Linear(4, 3)
    )
    model = cv.wrap(module, name="cnn", size=32)
    images = as_dataset(list(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))), model)
    measured, unmeasured = measure_costs(find_paper("focusvit"), "quick", model, images)
    assert measured == ()
    assert len(unmeasured) == 1
    assert "was not measured" in unmeasured[0]


def test_images_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(b"no picture")
    unreadable = as_dataset(str(tmp_path / "torn.png"), wrapped("timm-vit"))
    with pytest.raises(BadInput, match="None of the 1 images can be read"):
        measure_costs(find_paper("joita"), "quick", wrapped("timm-vit"), unreadable)
