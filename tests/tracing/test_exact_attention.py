"""A, S, G and the token gradients against autograd through an explicit softmax, whatever kernel the model runs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionVisionTransformer

import clairvit as cv
from helpers.exact_models import KINDS, TARGETS, HomeViT, both_ways, build, images_for, wrapped
from helpers.reference_vit import Gradients, ViT, brute_force, score, written_out
from helpers.rounding import assert_same

WAYS = both_ways(*KINDS)


@functools.cache
def proven(kind: str, fused: bool) -> tuple[cv.Model, Tensor, ViT, Gradients]:
    module = build(kind, fused=fused)
    pixels = images_for(module)
    vit = written_out(module)
    return wrapped(module), pixels, vit, brute_force(vit, pixels, TARGETS)


@pytest.mark.parametrize("rules", ["plain", "linear"])
@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_attention_and_scores(kind: str, fused: bool, rules: str) -> None:
    model, pixels, _, true = proven(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS, rules=rules)
    for layer, (run, _) in zip(trace.layers, true.run.blocks, strict=True):
        assert_same(layer.A, run.A.detach())
        assert_same(layer.S, run.S.detach())
        assert_same(layer.v, run.v.detach())
        assert_same(layer.x, run.x.detach())


@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_attention_gradient_is_autograd_through_the_softmax(kind: str, fused: bool) -> None:
    model, pixels, _, true = proven(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS)
    for layer, G, dO in zip(trace.layers, true.G, true.dO, strict=True):
        assert G.abs().max() > 1e-4
        assert_same(layer.G, G)
        assert_same(layer.dO, dO)


@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_token_gradients(kind: str, fused: bool) -> None:
    model, pixels, _, true = proven(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS)
    for layer, dx in zip(trace.layers, true.dx, strict=False):
        assert_same(layer.dx, dx)
    assert_same(trace.final_tokens, true.run.x[-1].detach())
    assert_same(trace.final_gradient, true.dx[-1])


@pytest.mark.parametrize(("kind", "fused"), both_ways("plain", "registers", "swiglu-norm", "grouped"))
def test_plain_backward_of_a_recording_made_for_other_rules(kind: str, fused: bool) -> None:
    """The swapped operations must give the ordinary gradient when no rule is on."""
    model, pixels, vit, true = proven(kind, fused)
    names = ["ixg", "decompx", "attnlrp"]
    maps = cv.compare(model, pixels, names, target=TARGETS)["ixg"].maps
    assert_same(maps, true.ixg[0][:, vit.prefix :].unflatten(1, vit.grid))


@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_pixel_gradient(kind: str, fused: bool) -> None:
    model, pixels, _, _ = proven(kind, fused)
    leaf = pixels.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(score(model.module(leaf), TARGETS), leaf)
    assert_same(cv.trace(model, pixels, target=TARGETS).dpixels, gradient)


@pytest.mark.parametrize("kind", ["torchvision", "weighed"])
def test_attention_is_what_need_weights_returns(kind: str) -> None:
    """torch's own multi-head attention, asked for its weights, on the block inputs the trace has seen."""
    model, pixels, _, _ = proven(kind, True)
    trace = cv.trace(model, pixels, target=TARGETS)
    for layer, (norm, attention) in zip(trace.layers, _attentions(model.module), strict=True):
        h = norm(layer.x)
        weights = nn.MultiheadAttention.forward(attention, h, h, h, need_weights=True, average_attn_weights=False)[1]
        assert_same(layer.A, weights.detach())


def _attentions(module: nn.Module) -> list[tuple[nn.Module, nn.MultiheadAttention]]:
    if isinstance(module, TorchvisionVisionTransformer):
        return [(block.ln_1, block.self_attention) for block in module.encoder.layers]
    assert isinstance(module, HomeViT)
    return [(block.norm1, block.attn) for block in module.blocks]


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("rules", ["plain", "linear", "attnlrp"])
@pytest.mark.parametrize("kind", ["plain", "registers", "torchvision", "grouped"])
def test_fused_attention_keeps_no_square_matrix(kind: str, rules: str) -> None:
    """Neither the trace's objects nor the graph behind them hold a [.., N, N] tensor; memory stays 4 N d a layer."""
    model, pixels, _, true = proven(kind, True)
    tokens = true.A[0].shape[-1]
    before = squares(tokens)
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trace = cv.trace(model, pixels, target=TARGETS, rules=rules)
    assert saved
    assert not [shape for shape in saved if tuple(shape[-2:]) == (tokens, tokens)]
    assert squares(tokens, but=before) == []
    assert trace.layers[0].A.shape[-2:] == (tokens, tokens)  # derived when asked for ...
    assert squares(tokens, but=before) == []  # ... and not kept


@pytest.mark.usefixtures("frozen_heap")
def test_the_search_finds_square_matrices_where_a_model_makes_them() -> None:
    model, pixels, _, true = proven("plain", False)
    tokens = true.A[0].shape[-1]
    before = squares(tokens)
    trace = cv.trace(model, pixels, target=TARGETS)
    assert len(trace.layers) == 3
    assert squares(tokens, but=before)


def squares(tokens: int, but: Sequence[Tensor] = ()) -> list[Tensor]:
    """All living tensors [.., N, N], without those that lived before (the references keep theirs)."""
    gc.collect()
    ignored = {id(tensor) for tensor in but}
    alive = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and id(o) not in ignored]
    return [t for t in alive if t.ndim >= 2 and tuple(t.shape[-2:]) == (tokens, tokens)]
