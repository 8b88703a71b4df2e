"""Complexity metrics by closed form (METRICS 10.3)."""

from __future__ import annotations

import math

import pytest
import torch

import clairvit as cv
from clairvit.metrics.registry import resolve_metric
from helpers.eval_contexts import case_of

N = 16


def maps(values: torch.Tensor) -> torch.Tensor:
    return values.double().reshape(1, 4, 4)


ONE = torch.zeros(N).index_fill(0, torch.tensor([5]), 3.0)
RAMP = torch.arange(1.0, N + 1)


@pytest.mark.parametrize(
    ("values", "expected"), [(torch.ones(N), 0), (ONE, 1 - 1 / N), (RAMP, (N - 1) / (3 * N)), (torch.zeros(N), 0)]
)
def test_gini(values: torch.Tensor, expected: float) -> None:
    for sign in (1, -1):
        assert float(resolve_metric("sparseness")(case_of(maps(sign * values)))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"), [(torch.ones(N), math.log(N)), (ONE, 0), (torch.zeros(N), math.log(N))]
)
def test_entropy(values: torch.Tensor, expected: float) -> None:
    assert float(resolve_metric("complexity")(case_of(maps(values)))) == pytest.approx(expected, abs=1e-12)


def test_effective_complexity_is_each_maps_own() -> None:
    """A neighbour that is ten thousand times as large changes nothing."""
    alone = resolve_metric("effective-complexity")(case_of(maps(RAMP)))
    beside = resolve_metric("effective-complexity")(case_of(torch.cat([maps(RAMP), maps(1e4 * RAMP)])))
    assert alone.tolist() == [[16.0]]
    assert beside.tolist() == [[16.0, 16.0]]
    assert resolve_metric("effective-complexity")(case_of(maps(ONE))).tolist() == [[1.0]]


def test_nearest_upsampling_keeps_the_gini_index() -> None:
    context = case_of(maps(RAMP))
    fine = resolve_metric("sparseness(resolution=pixel,upsampling=nearest)")(context)
    assert float(fine) == pytest.approx(float(resolve_metric("sparseness")(context)), abs=1e-12)
    assert float(resolve_metric("sparseness(resolution=pixel)")(context)) != pytest.approx(float(fine), abs=1e-3)


def test_focusvit_reads_it_the_other_way_round() -> None:
    model = cv.load("pets")
    score = cv.evaluate(model, "demo", "raw-attention", "sparseness(preset=focusvit)")
    assert isinstance(score, cv.Score)
    assert score.better == "lower"
    plain = cv.evaluate(model, "demo", "raw-attention", "sparseness")
    assert isinstance(plain, cv.Score)
    assert (plain.better, plain.mean) == ("higher", score.mean)


def test_positive_over_negative_mass() -> None:
    values = torch.tensor([3.0, -1.0, 0.0, 2.5, -0.75, *[0.0] * 11])
    assert float(resolve_metric("pnr")(case_of(maps(values)))) == pytest.approx(5.5 / 1.75, abs=1e-12)
    assert float(resolve_metric("pnr")(case_of(maps(-values)))) == pytest.approx(1.75 / 5.5, abs=1e-12)
    assert float(resolve_metric("pnr")(case_of(maps(-RAMP)))) == 0
    assert math.isnan(float(resolve_metric("pnr")(case_of(maps(RAMP)))))
