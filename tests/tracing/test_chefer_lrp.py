"""Relevance carried as R / a by swapped backwards, against relevance itself sent down by explicit rules."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.tracing.trace import Trace
from helpers import reference_lrp as ref
from helpers.exact_models import TARGETS, both_ways, build, images_for, wrapped
from helpers.reference_vit import Run, ViT, forward, written_out
from helpers.rounding import assert_same, magnified

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


def relevance(trace: Trace) -> tuple[list[Tensor], list[Tensor]]:
    """Return R of x^0 … x^L [B, N, d] and R of each attention [B, H, N, N]."""
    tokens = [layer.x * layer.dx for layer in trace.layers]
    return [*tokens, trace.final_tokens * trace.final_gradient], [layer.A * layer.G / 2 for layer in trace.layers]


@pytest.mark.parametrize("table", SWEEPS)
@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_rules_are_explicit_relevance(kind: str, fused: bool, table: str) -> None:
    """Channel by channel, at every layer, and of the attention itself.

    The sums that are divided by come near zero: float32 shows how far that magnifies rounding.
    """
    model, pixels, _, _ = written(kind, fused)
    direct = swept(kind, fused, table)
    relevances = relevance(cv.trace(model, pixels, target=TARGETS, rules=table))
    rough = cv.wrap(build(kind, fused=fused).float(), size=model.preprocess.size)
    single = relevance(cv.trace(rough, pixels.float(), target=TARGETS, rules=table))
    for actual, expected, rounded in zip(relevances, (direct.x, direct.A), single, strict=True):
        for R, expected_value, other in zip(actual, expected, rounded, strict=False):
            assert expected_value.abs().max() > 1e-3
            assert_same(R, expected_value, magnitude=magnified(other, expected_value), dtype=torch.float64)
