"""Relevance methods: against explicit sweeps, against the authors' own numbers, and what each promises."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.tracing.recorders.patch_embedding import PatchEmbedding
from clairvit.tracing.rules import rule_table
from helpers import reference_lrp as ref
from helpers import reference_maps
from helpers.exact_models import TARGETS, both_ways, build, images_for, wrapped
from helpers.reference_maps import Proof, rolled
from helpers.reference_rules import _norm_rule, _softmax_rule, _ungrouped, decomposed
from helpers.reference_vit import (
    ACTIVATIONS,
    Attention,
    AttentionRun,
    Linear,
    Mlp,
    MlpRun,
    Run,
    ViT,
    forward,
    written_out,
)
from helpers.rounding import assert_same, same
from helpers.tiny_models import pixels as tiny_pixels
from helpers.tiny_models import wrapped as tiny

FIXTURES = Path(__file__).parent.parent / "fixtures"
KINDS = ["plain", "registers", "distilled", "avg", "map", "layer-scale"]


@functools.cache
def proven(kind: str, fused: bool = True) -> tuple[cv.Model, Proof]:
    module = build(kind, fused=fused)
    return wrapped(module), reference_maps.prove(module, images_for(module), TARGETS)


@functools.cache
def written(kind: str, fused: bool = True) -> tuple[cv.Model, Tensor, ViT, Run]:
    module = build(kind, fused=fused)
    pixels = images_for(module)
    vit = written_out(module)
    with torch.no_grad():
        return wrapped(module), pixels, vit, forward(vit, vit.embed(pixels))


@functools.cache
def attention_relevance(kind: str, fused: bool, table: str) -> list[Tensor]:
    _, _, vit, run = written(kind, fused)
    with torch.no_grad():
        return {"chefer": ref.chefer, "lrp": ref.lrp}[table]().down(vit, run, TARGETS).A


def rollout(p: Proof, matrices: list[Tensor]) -> Tensor:
    return rolled(p, matrices)


def weighted(p: Proof, R: list[Tensor]) -> list[Tensor]:
    return [(G * R_A).clamp(min=0).mean(1) for G, R_A in zip(p.G, R, strict=True)]


def positive(R: list[Tensor]) -> list[Tensor]:
    return [R_A.clamp(min=0).mean(1) for R_A in R]


FORMULAS: dict[str, tuple[str, Callable[[Proof, list[Tensor]], Tensor]]] = {
    "transatt": ("chefer", lambda p, R: rollout(p, weighted(p, R))),
    "transatt(preset=evaluation)": ("chefer", lambda p, R: rollout(p, weighted(p, R)[1:])),
    "transatt(rules=lrp)": ("lrp", lambda p, R: rollout(p, weighted(p, R))),
    "transatt+plus": ("chefer", lambda p, R: sum(p.read(M) for M in weighted(p, R))),
    "partial-lrp": ("lrp", lambda p, R: p.read(positive(R)[-1])),
    "partial-lrp(rules=chefer)": ("chefer", lambda p, R: p.read(positive(R)[-1])),
    "partial-lrp(gradient=true)": ("lrp", lambda p, R: p.read(weighted(p, R)[-1])),
    "lrp-rollout": ("lrp", lambda p, R: rollout(p, positive(R))),
    "lrp-rollout(rules=chefer,start_layer=1)": ("chefer", lambda p, R: rollout(p, positive(R)[1:])),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("kind", "fused"), both_ways(*KINDS))
def test_formula(kind: str, fused: bool, name: str) -> None:
    model, p = proven(kind, fused)
    rules, formula = FORMULAS[name]
    expected = p.on_grid(formula(p, attention_relevance(kind, fused, rules)))
    assert_same(cv.explain(model, p.pixels, name, target=TARGETS).maps, expected)


# From the first block's input to the patches and the pixels


@pytest.mark.parametrize("name", ["lrp", "lrp(rules=chefer)", "deep-taylor"])
@pytest.mark.parametrize("kind", ["plain", "torchvision", "einsum"])
def test_down_to_the_patches_and_the_pixels(kind: str, name: str) -> None:
    model, pixels, vit, run = written(kind)
    module = model.module
    rules = {"lrp": ref.lrp, "lrp(rules=chefer)": ref.chefer, "deep-taylor": ref.deep_taylor}[name]()
    conv = next(part for part in module.modules() if isinstance(part, torch.nn.Conv2d))
    with torch.no_grad():
        R = rules.down(vit, run, TARGETS).x[0]
        embedded = conv(pixels)  # [B, d, h, w]
        positions = vit.embed(pixels) - F.pad(embedded.flatten(2).transpose(1, 2), (0, 0, 1, 0))
        positions[:, 0] = _position_of_class(module)
        tokens = run.x[0] - positions
        R = rules.add(tokens, positions, R)[0][:, 1:].transpose(1, 2).unflatten(2, embedded.shape[2:])
    expected = R.sum(1)
    by_hand = z_box(pixels, conv.weight.detach(), R)
    if name == "deep-taylor":
        assert expected.min() > 0
        assert by_hand.min() >= 0
    assert_same(cv.explain(model, pixels, name, target=TARGETS).maps, expected)
    maps = cv.explain(model, pixels, name, level="pixel", target=TARGETS).maps
    assert_same(maps, by_hand)
    assert_same(maps.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).sum((2, 4)), expected)


def _position_of_class(module: torch.nn.Module) -> Tensor:
    names = {name: p for name, p in module.named_parameters() if "pos" in name and p.ndim == 3}
    (position,) = names.values()
    return position.detach()[0, 0]


def z_box(pixels: Tensor, weight: Tensor, R: Tensor) -> Tensor:
    """R_p = sum_i (x_p w_pi - l w⁺_pi - h w⁻_pi) / Z_i · R_i, patch by patch, summed over colours."""
    size = weight.shape[-1]
    relevance = torch.zeros(len(pixels), *pixels.shape[2:], dtype=torch.float64)
    w = weight.flatten(1)  # [d, p]
    for b, image in enumerate(pixels):
        for row in range(R.shape[2]):
            for col in range(R.shape[3]):
                area = (slice(row * size, (row + 1) * size), slice(col * size, (col + 1) * size))
                x = image[(slice(None), *area)].flatten()
                terms = x * w - image.min() * w.clamp(min=0) - image.max() * w.clamp(max=0)  # [d, p]
                shares = terms * (R[b, :, row, col] / terms.sum(1))[:, None]
                relevance[(b, *area)] = shares.sum(0).view(-1, size, size).sum(0)
    return relevance


def test_patches_cut_by_hand_are_read_at_the_first_block() -> None:
    model, image = tiny("home-lucid", torch.float64), tiny_pixels("home-lucid", dtype=torch.float64)
    trace = cv.trace(model, image, target=3, rules="lrp", recorders=(PatchEmbedding,))
    tokens = (trace.layers[0].x * trace.layers[0].dx).sum(-1)
    prefix, grid = trace.layout.prefix, trace.layout.grid
    assert trace[PatchEmbedding].output is not None
    assert trace[PatchEmbedding].input is None
    assert_same(cv.explain(model, image, "lrp", target=3).maps, tokens[:, prefix:].unflatten(1, grid))
    with pytest.raises(NotApplicable, match=r"cuts its patches by hand.*Use level=patch"):
        cv.explain(model, image, "lrp(level=pixel)", target=3)


def test_relevance_is_conserved_and_images_are_apart() -> None:
    """TransAtt's rules hand the 1 of the class down whole, for each image of a batch by itself."""
    model, pixels, _, _ = written("plain")
    trace = cv.trace(model, pixels, target=TARGETS, rules="chefer")
    for layer in trace.layers:
        assert_same((layer.x * layer.dx).sum((1, 2)), torch.ones(2, dtype=torch.float64))
    for name in ("transatt", "lrp(rules=chefer)"):
        together = cv.explain(model, pixels, name, target=TARGETS).maps
        for b, target in enumerate(TARGETS):
            alone = cv.explain(model, pixels[b : b + 1], name, target=target).maps
            assert_same(together[b : b + 1], alone)


# The authors' own numbers

_CHEFER = np.load(FIXTURES / "chefer.npz")
_LXT = np.load(FIXTURES / "lxt.npz")


def assert_within(actual: Tensor, theirs: Tensor, part: float) -> None:
    """Assert that two float64 maps differ by at most `part` of the largest number: an eps of theirs, not rounding."""
    assert actual.shape == theirs.shape
    assert actual.dtype == theirs.dtype == torch.float64
    assert float((actual - theirs).abs().max()) <= part * float(theirs.abs().max())


@pytest.mark.parametrize("name", _CHEFER.files)
def test_numbers_of_transformer_explainability(name: str) -> None:
    """Their code adds 1e-9 to what it divides by, sums of down to 1e-4; that is the difference that stays."""
    module = build("plain")
    module.norm.eps = 1e-5
    maps = cv.explain(wrapped(module), images_for(module), name, target=TARGETS).maps
    theirs = torch.from_numpy(_CHEFER[name])
    assert_within(maps.flatten(1), theirs.flatten(1), 1e-5)


@pytest.mark.parametrize("gammas", ["gamma_lin=0,gamma_conv=0", "gamma_lin=0.05,gamma_conv=0.25"])
def test_numbers_of_lxt(gammas: str) -> None:
    """zennit's gamma, which adds 1e-6 to what it divides by and does not see inside torch's attention."""
    module = build("torchvision")
    model, pixels = wrapped(module), images_for(module)
    assert_same(module(pixels), torch.from_numpy(_LXT["logits"]))
    maps = cv.explain(model, pixels, f"cp-lrp({gammas},eps=1e-6,inside=false,level=pixel)", target=TARGETS).maps
    assert_within(maps, torch.from_numpy(_LXT[gammas]), 1e-6)


def test_the_lxt_preset_is_that_one() -> None:
    model, pixels, _, _ = written("torchvision")
    maps = cv.explain(model, pixels, "cp-lrp(preset=lxt,level=pixel)", target=TARGETS).maps
    assert_within(maps, torch.from_numpy(_LXT["gamma_lin=0.05,gamma_conv=0.25"]), 1e-6)


# Gamma and eps


def gamma_linear(part: Linear, x: Tensor, R: Tensor, gamma: float, eps: float) -> Tensor:
    """Output by output: terms that agree in sign with z count 1 + gamma times, the bias as an input of 1."""
    terms = torch.cat([ref.contributions(part, x), part.b.expand(*x.shape[:-1], -1).unsqueeze(-1)], -1)
    z = terms.sum(-1, keepdim=True)
    terms = torch.where(terms * z.sign() > 0, (1 + gamma) * terms, terms)
    Z = terms.sum(-1)
    return (terms[..., :-1] * (R / (Z + eps * Z.sign())).unsqueeze(-1)).sum(-2)


def gamma_sweep(vit: ViT, run: Run, *, gamma: float, eps: float, attnlrp: bool) -> list[Tensor]:
    """R of x^0 … x^L for plain pre-norm ViTs with a class token."""

    def linear(part: Linear, x: Tensor, R: Tensor) -> Tensor:
        return gamma_linear(part, x, R, gamma, eps)

    def matmul(a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        Z = a @ b
        share = R / (2 * Z + eps * Z.sign())
        return a * (share @ b.transpose(-2, -1)), b * (a.transpose(-2, -1) @ share)

    def through_attention(part: Attention, at: AttentionRun, R: Tensor) -> Tensor:
        RO = part.split(linear(part.out, at.inner, R * (at.end - at.x) / at.end))
        if attnlrp:
            RA, Rv = matmul(at.A, at.v, RO)
            Rq, Rk = matmul(at.q, at.k.transpose(-2, -1) / math.sqrt(part.size), _softmax_rule(at.S, at.A, RA))
            branches = [(part.q, Rq), (part.k, Rk.transpose(-2, -1)), (part.v, Rv)]
        else:
            branches = [(part.v, at.v * (at.A.transpose(-2, -1) @ (RO / at.O)))]
        Rh = sum(linear(layer, at.h, _ungrouped(part, layer, branch)) for layer, branch in branches)
        return R * at.x / at.end + _norm_rule(part.norm, at.x, Rh)

    def through_mlp(part: Mlp, at: MlpRun, R: Tensor) -> Tensor:
        Rh = linear(part.up, at.h, linear(part.down, at.inner, R * (at.end - at.x) / at.end))
        return R * at.x / at.end + _norm_rule(part.norm, at.x, Rh)

    one_hot = F.one_hot(torch.tensor(TARGETS), run.logits.shape[-1]).double()
    Rz = linear(vit.readers[0].classifier, run.pooled[0], one_hot * run.logits)
    R = _norm_rule(vit.norm, run.x[-1], vit.readers[0].rows[:, None] * Rz.unsqueeze(1))
    relevances = [R]
    for (attention, mlp), (first, second) in reversed(list(zip(vit.blocks, run.blocks, strict=True))):
        relevances.insert(0, through_attention(attention, first, through_mlp(mlp, second, relevances[0])))
    return relevances


@pytest.mark.parametrize("name", ["cp-lrp", "attnlrp"])
@pytest.mark.parametrize(("gamma", "eps"), [(0.05, 0.0), (0.3, 0.01), (0.0, 0.1)])
@pytest.mark.parametrize(("kind", "fused"), both_ways("plain", "torchvision", "einsum", "weighed"))
def test_gamma_and_eps_are_explicit_relevance(kind: str, fused: bool, gamma: float, eps: float, name: str) -> None:
    model, pixels, vit, run = written(kind, fused)
    with torch.no_grad():
        direct = gamma_sweep(vit, run, gamma=gamma, eps=eps, attnlrp=name == "attnlrp")
    trace = cv.trace(model, pixels, target=TARGETS, rules=f"{name}(gamma_lin={gamma},eps={eps})")
    for layer, R in zip(trace.layers, direct, strict=False):
        assert_same(layer.x * layer.dx, R)
    maps = cv.explain(model, pixels, f"{name}(gamma_lin={gamma},eps={eps})", target=TARGETS).maps
    assert_same(maps, direct[0].sum(-1)[:, vit.prefix :].unflatten(1, vit.grid))


@pytest.mark.parametrize("gamma", [0.25, 0.0])
def test_gamma_at_the_patch_embedding(gamma: float) -> None:
    """From x^0 to the pixels: the position embedding takes its share, the convolution follows the gamma rule."""
    model, pixels, _vit, _run = written("plain")
    conv = model.module.patch_embed.proj
    trace = cv.trace(model, pixels, target=TARGETS, rules="linear")
    c = trace.layers[0].dx[:, 1:]  # what the sum with the positions hands on
    patches = pixels.unflatten(2, (-1, 4)).unflatten(4, (-1, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    part = Linear(conv.weight.detach().flatten(1), conv.bias.detach())
    expected = gamma_linear(part, patches, part(patches) * c, gamma, 0.0).sum(-1)
    maps = cv.explain(model, pixels, f"cp-lrp(gamma_conv={gamma},level=pixel)", target=TARGETS).maps
    assert_same(maps.flatten(1), expected)


def test_without_numbers_nothing_more_is_swapped_and_the_trace_is_shared() -> None:
    model, pixels, _, _ = written("plain")
    comparison = cv.compare(
        model, pixels, ["decompx", "cp-lrp", "cp-lrp(gamma_lin=0,eps=0.0)", "cp-lrp+skipplus"], target=TARGETS
    )
    assert torch.equal(comparison["cp-lrp"].maps, comparison["decompx"].maps)  # one trace
    assert (comparison.cost.forwards, comparison.cost.backwards) == (1, 1)
    for name in ("linear", "attnlrp", "libra"):
        assert not {"linear", "conv", "add"} & set(rule_table(name).rules)
    assert set(rule_table("cp-lrp(gamma_conv=0.25)").rules) - set(rule_table("linear").rules) == {"conv"}
    with pytest.raises(BadInput, match=r"gamma_lin=-1 was given; expected 0 or more"):
        cv.explain(model, pixels, "cp-lrp(gamma_lin=-1)", target=TARGETS)


# Balanced gradients


@pytest.mark.parametrize(("kind", "fused"), both_ways("plain", "registers", "avg", "map", "distilled", "torchvision"))
def test_libra_without_gates_is_decompx(kind: str, fused: bool) -> None:
    model, pixels, _, _ = written(kind, fused)
    for ours, theirs in (("ixg(rules=libra)", "decompx"), ("cat(rules=libra)", "decompx+plus")):
        expected = cv.explain(model, pixels, theirs, target=TARGETS).maps
        assert_same(cv.explain(model, pixels, ours, target=TARGETS).maps, expected)


def gated_decomposition(vit: ViT, run: Run, start: int) -> Tensor:
    """[B]: what the biases after x^start give to the target's logit, where a gate and what it multiplies share.

    The model run forward with attention, spreads and slopes held fixed, and each gated product as the mean of its two
    one-sided forms (one factor held fixed, then the other): linear in the tokens, so the run without biases is theirs.
    """
    biases = []

    def frozen_norm(norm, x: Tensor, true: Tensor, bias: float) -> Tensor:
        return x if norm is None else norm.gamma * norm.centre(x) / norm.sigma(true) + bias * norm.beta

    def affine(part: Linear, x: Tensor, bias: float) -> Tensor:
        return x @ part.W.T + bias * part.b

    for bias in (0.0, 1.0):
        x = run.x[start]
        for (attention, mlp), (first, second) in list(zip(vit.blocks, run.blocks, strict=True))[start:]:
            v = attention.split(affine(attention.v, frozen_norm(attention.norm, x, first.x, bias), bias))
            joined = frozen_norm(attention.sub_norm, (first.A @ v).transpose(1, 2).flatten(2), first.joined, bias)
            x = x + attention.g1 * affine(attention.out, joined, bias)
            h = frozen_norm(mlp.norm, x, second.x, bias)
            slope = ACTIVATIONS[mlp.act](second.z) / second.z
            gate, carried = slope * affine(mlp.gate, h, bias), affine(mlp.up, h, bias)
            a = (gate * second.carried + slope * second.z * carried) / 2
            x = x + mlp.g2 * affine(mlp.down, frozen_norm(mlp.sub_norm, a, second.a, bias), bias)
        x = frozen_norm(vit.norm, x, run.x[-1], bias)
        (reader,) = vit.readers
        pooled = frozen_norm(reader.norm, torch.einsum("n,bnd->bd", reader.rows, x), run.pooled[0], bias)
        biases.append(affine(reader.classifier, pooled, bias))
    at = torch.arange(len(TARGETS)), torch.tensor(TARGETS)
    assert_same(biases[1][at], run.logits[at])  # the frozen way with its biases is the model
    return (biases[1] - biases[0])[at]


@pytest.mark.parametrize(("kind", "fused"), both_ways("swiglu-packed", "swiglu-norm", "rope-swiglu"))
def test_libra_is_complete_with_gates(kind: str, fused: bool) -> None:
    model, pixels, vit, run = written(kind, fused)
    trace = cv.trace(model, pixels, target=TARGETS, rules="libra")
    at = torch.arange(len(TARGETS)), torch.tensor(TARGETS)
    differs = False
    for start, layer in enumerate(trace.layers):
        with torch.no_grad():
            biases = gated_decomposition(vit, run, start)
        tokens = (layer.x * layer.dx).sum((1, 2))
        assert_same(tokens + biases, run.logits[at])
        differs |= not same(tokens, decomposed(vit, run, start, TARGETS)[:, :-1].sum(1))
    assert differs  # the gate's share: here LibraGrad is not DecompX


@pytest.mark.parametrize("kind", ["plain", "swiglu-packed"])
def test_attcat_under_libra(kind: str) -> None:
    model, pixels, vit, _run = written(kind)
    trace = cv.trace(model, pixels, target=TARGETS, rules="libra")
    expected = sum(layer.A.mean((1, 2)) * (layer.x * layer.dx).sum(-1) for layer in trace.layers)
    maps = cv.explain(model, pixels, "attcat(rules=libra)", target=TARGETS).maps
    assert_same(maps, expected[:, vit.prefix :].unflatten(1, vit.grid))
