"""Heads that are modules or calls of their own are one layer: every method gives the map of the ViT with one qkv."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.methods.registry import find_method, list_methods
from clairvit.tracing.attention_call import AttentionCall, joined
from clairvit.tracing.recording import record
from clairvit.tracing.structure import model_structure
from helpers.head_forms import (
    DEPTH,
    FORMS,
    HEADS,
    Attention,
    Block,
    HeadModules,
    ViT,
    apart,
    images,
    is_fused,
    reference,
    single,
)
from helpers.rounding import assert_same, magnified

# What takes the residual sum of a block apart needs one, written as a step of its own
TAKES_THE_SUM_APART = ["attin", "attin-residual", "globenc", "alti"]
SHARES_OUT_IN_LINEAR_LAYERS = ["transatt", "partial-lrp", "lrp-rollout", "lrp", "deep-taylor"]
REFUSED = {
    "projected": SHARES_OUT_IN_LINEAR_LAYERS,
    "buffer": TAKES_THE_SUM_APART,
    "by-turns": ["reslrp", *SHARES_OUT_IN_LINEAR_LAYERS, *TAKES_THE_SUM_APART, "tokentm"],
}


def maps(model: nn.Module, method: str, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """Return the maps of two images, None where the method does not fit the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cv.ClairWarning)  # of maps that are zero
        try:
            return cv.explain(model, images().to(dtype), method, target=1).maps
        except cv.errors.NotApplicable:
            return None


@functools.cache
def expected_maps(method: str, *, fused: bool) -> tuple[Tensor | None, float | None]:
    """Return the maps of the ViT with one qkv, and the size of their terms where these cancel or are divided."""
    model = reference("fused-loop" if fused else "loop")
    expected = maps(model, method)
    if expected is not None and method == "vanilla":  # sums over channels behind a LayerNorm are zero
        gradients = maps(model, "vanilla-l2")
        return expected, None if gradients is None else float(gradients.max())
    if expected is None or not find_method(method).caveats.numerically_unstable:
        return expected, None
    rough = maps(model.float(), method, torch.float32)
    return expected, None if rough is None else magnified(rough, expected)


@pytest.mark.parametrize("form", list(FORMS))
def test_every_method_gives_the_map_of_one_qkv(form: str) -> None:
    split = apart(form)
    assert_same(split(images()), reference(form)(images()))
    refused = []
    for method in (method.name for method in list_methods()):
        expected, magnitude = expected_maps(method, fused=is_fused(form))
        if expected is None:
            continue
        actual = maps(split, method)
        if actual is None:
            refused.append(method)
            continue
        assert_same(actual, expected, magnitude=magnitude, label=method)
    assert sorted(refused) == sorted(REFUSED.get(form, []))


@pytest.mark.parametrize("form", list(FORMS))
def test_layers_blocks_and_heads_are_those_of_one_qkv(form: str) -> None:
    split = apart(form)
    structure = model_structure(cv.wrap(split), images())
    assert [site.kind for site in structure.sites] == ["tokens"] * DEPTH
    assert [site.block for site in structure.layers] == list(split.blocks)
    trace, expected = (cv.trace(model, images(), 1) for model in (split, reference(form)))
    for layer, whole in zip(trace.layers, expected.layers, strict=True):
        for name in ("x", "dx", "q", "k", "v", "dO", "A", "S", "G"):
            assert_same(getattr(layer, name), getattr(whole, name), label=name)


def test_doctor_counts_layers_and_heads() -> None:
    checks = {check.name: check.finding for check in cv.doctor(apart("modules").float(), images().float()).checks}
    assert f"{DEPTH} between all tokens, {HEADS} heads" in checks["attention"]


@pytest.mark.parametrize("form", ["modules", "two-calls", "norm-each"])
def test_heads_are_drawn_replaced_and_explained_one_by_one(form: str) -> None:
    split, whole = apart(form), reference(form)
    heads, expected = (cv.explain(model, images(), "genatt", target=1, by_head=True).heads for model in (split, whole))
    assert heads is not None
    assert expected is not None
    assert_same(heads.maps, expected.maps)
    neuron = cv.Neuron(1, 2, where="head", head=3)
    assert_same(*(cv.explain(model, images(), "ixg", target=neuron).maps for model in (split, whole)))
    for value in ("zero", "mean", "source"):
        source = images(seed=5) if value == "source" else None
        effects = [
            cv.intervene_sweep(model, images(), target=1, value=value, source=source) for model in (split, whole)
        ]
        assert_same(effects[0].effects, effects[1].effects, label=value)


@pytest.mark.parametrize("form", ["loop", "fused-modules"])
def test_a_capture_plan_sees_the_heads(form: str) -> None:
    """Later recordings run with the capture on in windows only."""
    model = cv.wrap(apart(form))
    first, second, third = (record(model, images()) for _ in range(3))
    for recording in (second, third):
        assert [call.heads(call.outputs).shape[1] for call in recording.calls] == [HEADS] * DEPTH
        assert_same(recording.calls[-1].A(), first.calls[-1].A())


class NormedQueries(HeadModules):
    """Each head norms its queries, keys and values by itself."""

    def __init__(self, whole: Attention) -> None:
        super().__init__(whole)
        for head in self.heads:
            head.attend = lambda q, k, v: nn.functional.scaled_dot_product_attention(*map(normed, (q, k, v)))


def normed(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


def with_attention(attention: type[nn.Module]) -> ViT:
    model = single()
    for block in model.blocks:
        block.attention = attention(block.attention)
    return model.double().eval()


def test_norms_of_a_heads_own_queries_do_not_make_it_a_layer() -> None:
    structure = model_structure(cv.wrap(with_attention(NormedQueries)), images())
    assert structure.heads_apart == (HEADS,) * DEPTH


class WindowsInALoop(nn.Module):
    """Four windows of four tokens, one after the other, with all heads in each call."""

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], *(self.whole(window) for window in x[:, 1:].split(4, 1))], 1)


def test_windows_in_a_loop_are_no_heads() -> None:
    """They read different tokens, though of the same tensor."""
    structure = model_structure(cv.wrap(with_attention(WindowsInALoop)), images())
    assert structure.heads_apart == (1,) * 4 * DEPTH


def test_heads_of_quantised_layers_are_one_layer() -> None:
    """Nobody sees their operations, and no gradient comes back through them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of quantisation
        model = torch.ao.quantization.quantize_dynamic(apart("modules").float(), {nn.Linear})
    assert model_structure(cv.wrap(model), images().float()).heads_apart == (HEADS,) * DEPTH


class ParallelBlock(nn.Module):
    """x + a₁(norm₁(x)) + a₂(norm₂(x)) + mlp(norm(x)), each attention with heads that are modules."""

    def __init__(self, block: Block, *, shared_norm: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([HeadModules(block.attention), HeadModules(Block().attention)])
        norm = nn.LayerNorm(block.norm1.normalized_shape)
        self.norms = nn.ModuleList([block.norm1, block.norm1 if shared_norm else norm])
        self.norm, self.mlp = block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.stack([part(norm(x)) for part, norm in zip(self.parts, self.norms, strict=True)]).sum(0)
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize(("shared_norm", "heads_apart"), [(False, (HEADS,) * 2 * DEPTH), (True, (2 * HEADS,) * DEPTH)])
def test_parallel_attention_with_norms_of_its_own_is_a_layer_of_its_own(
    shared_norm: bool, heads_apart: tuple[int, ...]
) -> None:
    model = single()
    model.blocks = nn.ModuleList([ParallelBlock(block, shared_norm=shared_norm) for block in model.blocks])
    structure = model_structure(cv.wrap(model.double().eval()), images())
    assert structure.heads_apart == heads_apart
    assert not structure.members


class PooledByHeads(nn.Module):
    """A learned query reads the tokens, head by head or in one call."""

    def __init__(self, *, by_heads: bool) -> None:
        super().__init__()
        self.vit, self.by_heads = single(), by_heads
        self.query = nn.Parameter(self.vit.cls.data.clone())

    def forward(self, image: Tensor) -> Tensor:
        x = self.vit.tokens(image)
        for block in self.vit.blocks:
            x = block(x)
        query, width = self.query.expand(len(x), -1, -1), x.shape[-1] // HEADS
        if self.by_heads:
            cut = (t.split(width, -1) for t in (query, x, x))
            pooled = torch.cat([self.vit.blocks[0].attention.attend(*part) for part in zip(*cut, strict=True)], -1)
        else:
            q, k, v = (t.unflatten(-1, (HEADS, width)).transpose(1, 2) for t in (query, x, x))
            pooled = self.vit.blocks[0].attention.attend(q, k, v).transpose(1, 2).flatten(2)
        return self.vit.head(self.vit.norm(pooled)[:, 0])


def test_heads_of_an_attention_pool_are_one_pool() -> None:
    split, whole = PooledByHeads(by_heads=True).eval(), PooledByHeads(by_heads=False).eval()
    assert_same(split(images()), whole(images()))
    assert [site.kind for site in model_structure(cv.wrap(split), images()).sites] == ["tokens"] * DEPTH + ["pool"]
    for method in ("rollout", "raw-attention", "legrad", "genatt"):
        assert_same(*(cv.explain(model, images(), method, target=1).maps for model in (split, whole)), label=method)


def test_joined_heads_may_differ_in_width_scale_and_mask() -> None:
    generator = torch.Generator().manual_seed(0)

    def call(heads: int, width: int, mask: Tensor | None) -> AttentionCall:
        q, k, v = (torch.randn(2, heads, 6, width, generator=generator, dtype=torch.float64) for _ in range(3))
        return AttentionCall(v=v, outputs=(v,), forms=(lambda out: out,), q=q, k=k, scale=1 / width, mask=mask)

    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    added = torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64)
    parts = [call(1, 4, None), call(2, 8, causal), call(1, 8, added)]
    together = joined(parts)
    gradients = [torch.randn(part.v.shape, generator=generator, dtype=torch.float64) for part in parts]
    assert_same(together.A(), torch.cat([part.A() for part in parts], 1))
    expected = [part.G(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    assert_same(together.G(together.heads(gradients)), torch.cat(expected, 1))
    assert [together.output_of_head(head) for head in range(4)] == [(0, 0), (1, 0), (1, 1), (2, 0)]
