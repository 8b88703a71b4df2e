"""Relevance carried as R / a by swapped backwards, against relevance itself sent down by explicit rules."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clairvit as cv
import reference_lrp as ref
from exact_models import TARGETS, both_ways, build, images_for, wrapped
from references import Run, ViT, assert_same, forward, written_out

KINDS = [
    "plain",
    "layer-scale",
    "qk-norm",
    "avg",
    "avg-no-cls",
    "registers",
    "distilled",
    "tanh-gelu",
    "swiglu-packed",
    "sub-norm",
    "rms-norm",
    "map",
    "map-two",
    "relative-bias",
    "torchvision",
    "grouped",
    "weighed",
    "bool-mask",
    "einsum",
]
WAYS = both_ways(*KINDS)
SWEEPS: dict[str, Callable[[], ref.Sweep]] = {"chefer": ref.chefer, "lrp": ref.lrp, "deep-taylor": ref.deep_taylor}


@functools.cache
def written(kind: str, fused: bool) -> tuple[cv.Model, Tensor, ViT, Run]:
    module = build(kind, fused=fused)
    pixels = images_for(module)
    vit = written_out(module)
    with torch.no_grad():
        return wrapped(module), pixels, vit, forward(vit, vit.embed(pixels))


@functools.cache
def swept(kind: str, fused: bool, table: str) -> ref.Sweep:
    _, _, vit, run = written(kind, fused)
    with torch.no_grad():
        return SWEEPS[table]().down(vit, run, TARGETS)


# The sums that are divided by come near zero, and both ways divide by them in another order: what is left of
# float64's 1e-16 after the worst of them.
ROUND_OFF = 1e-8


@pytest.mark.parametrize("table", SWEEPS)
@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_rules_are_explicit_relevance(kind: str, fused: bool, table: str) -> None:
    """Channel by channel, at every layer, and of the attention itself."""
    model, pixels, _, _ = written(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS, rules=table)
    direct = swept(kind, fused, table)
    for layer, R in zip(trace.layers, direct.x, strict=False):
        assert R.abs().max() > 1e-3
        assert_same(layer.x * layer.dx, R, ROUND_OFF)
    assert_same(trace.final_tokens * trace.final_gradient, direct.x[-1], ROUND_OFF)
    for layer, R in zip(trace.layers, direct.A, strict=False):
        assert_same(layer.A * layer.G / 2, R, ROUND_OFF)
