"""Swapped backwards against the long way round: DecompX carried forward, AttnLRP sent back, from every layer."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import clairvit as cv
from helpers.exact_models import KINDS, TARGETS, both_ways, build, images_for, wrapped
from helpers.reference_rules import attnlrp, decomposed
from helpers.reference_vit import Run, ViT, forward, written_out
from helpers.rounding import assert_same

WAYS = both_ways(*KINDS)
RELEVANCE_WAYS = [(kind, fused) for kind, fused in WAYS if kind != "bool-mask"]  # a score of -inf has no eps → 0 rule


@functools.cache
def written(kind: str, fused: bool) -> tuple[cv.Model, Tensor, ViT, Run]:
    module = build(kind, fused=fused)
    pixels = images_for(module)
    vit = written_out(module)
    with torch.no_grad():
        return wrapped(module), pixels, vit, forward(vit, vit.embed(pixels))


def target_logits(run: Run) -> Tensor:
    return torch.stack([run.logits[b, c] for b, c in enumerate(TARGETS)])


def gradient_x_input(layer: cv.trace.trace.Layer) -> Tensor:
    return layer.x * layer.dx  # [B, N, d]


@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_reference_is_the_model(kind: str, fused: bool) -> None:
    model, pixels, _, run = written(kind, fused)
    assert_same(run.logits, model.module(pixels).detach())


@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_linear_rules_are_decompx_from_every_layer(kind: str, fused: bool) -> None:
    model, pixels, vit, run = written(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS, rules="linear")
    assert len(trace.layers) == len(vit.blocks)
    for start, layer in enumerate(trace.layers):
        direct = decomposed(vit, run, start, TARGETS)[:, :-1]
        assert direct.abs().max() > 0.01
        assert_same(gradient_x_input(layer).sum(-1), direct)


@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_tokens_and_biases_add_up_to_the_logit(kind: str, fused: bool) -> None:
    model, pixels, vit, run = written(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS, rules="linear")
    for start, layer in enumerate(trace.layers):
        biases = decomposed(vit, run, start, TARGETS)[:, -1]
        assert biases.abs().min() > 1e-4
        assert_same(gradient_x_input(layer).sum((1, 2)) + biases, target_logits(run))


@pytest.mark.parametrize(("kind", "fused"), RELEVANCE_WAYS)
def test_attnlrp_rules_are_explicit_relevance(kind: str, fused: bool) -> None:
    """Channel by channel, not only token by token."""
    model, pixels, vit, run = written(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS, rules="attnlrp")
    relevance = attnlrp(vit, run, TARGETS)
    for layer, direct in zip(trace.layers, relevance, strict=False):
        assert direct.abs().max() > 0.01
        assert_same(gradient_x_input(layer), direct)
    assert_same(trace.final_tokens * trace.final_gradient, relevance[-1])


@pytest.mark.parametrize(("kind", "fused"), both_ways("registers", "distilled", "swiglu-norm", "map"))
def test_one_graph_serves_all_tables(kind: str, fused: bool) -> None:
    """decompx and attnlrp asked for together, after the plain rules have used the same graph."""
    model, pixels, vit, run = written(kind, fused)
    layers = range(len(vit.blocks))
    names = [f"{name}+layer:{index}" for name in ("ixg", "legrad", "decompx", "attnlrp") for index in layers]
    comparison = cv.compare(model, pixels, names, target=TARGETS)
    relevance = attnlrp(vit, run, TARGETS)
    for index in layers:
        direct = decomposed(vit, run, index, TARGETS)[:, vit.prefix : -1].unflatten(1, vit.grid)
        assert_same(comparison[f"decompx+layer:{index}"].maps, direct)
        direct = relevance[index].sum(-1)[:, vit.prefix :].unflatten(1, vit.grid)
        assert_same(comparison[f"attnlrp+layer:{index}"].maps, direct)


@pytest.mark.parametrize("kind", ["plain", "registers", "avg-no-cls"])
def test_decompx_plus_is_the_sum_over_start_layers(kind: str) -> None:
    model, pixels, vit, run = written(kind, True)
    every = [decomposed(vit, run, start, TARGETS)[:, vit.prefix : -1] for start in range(len(vit.blocks))]
    for name, parts in (("decompx+plus", every), ("decompx+skipplus", every[2:]), ("decompx", every[:1])):
        maps = cv.explain(model, pixels, name, target=TARGETS).maps
        assert_same(maps, sum(parts).unflatten(1, vit.grid))


def test_biases_are_what_the_tokens_leave_over() -> None:
    """From the last block's output on, only the head's norm and classifier have biases: a closed form by hand."""
    model, pixels, vit, run = written("plain", True)
    trace = cv.trace(model, pixels, target=TARGETS, rules="linear")
    tokens = (trace.final_tokens * trace.final_gradient).sum((1, 2))
    classifier = vit.readers[0].classifier
    by_hand = torch.stack([classifier.W[c] @ vit.norm.beta + classifier.b[c] for c in TARGETS])
    assert_same(target_logits(run) - tokens, by_hand)
