"""ResLRP: its residual rule in closed form, the whole sweep against a reference written out, and which sums have it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.tracing.recording import record
from clairvit.tracing.residual_sums import ResidualStream
from clairvit.tracing.rules import ATTNLRP, RuleTable, rule_table
from clairvit.tracing.rules.reslrp import residual_factors, residual_rule
from clairvit.tracing.trace import one_target, run_backward
from helpers.exact_models import (
    KINDS,
    TARGETS,
    EinsumAttention,
    HomeViT,
    both_ways,
    build,
    images_for,
    randomised,
    wrapped,
)
from helpers.reference_rules import attnlrp
from helpers.reference_vit import forward, written_out
from helpers.rounding import assert_same, growth

WAYS = [(kind, fused) for kind, fused in both_ways(*KINDS) if kind != "bool-mask"]  # -inf has no share, as in AttnLRP


def terms(count: int = 4096) -> tuple[Tensor, Tensor]:
    """Terms of all sizes and signs, many of them nearly cancelling."""
    noise = torch.Generator().manual_seed(0)
    z_in, z_up = torch.randn(2, count, generator=noise, dtype=torch.float64)
    distance = 10.0 ** -torch.randint(1, 14, (count // 2,), generator=noise).double()
    z_up[: count // 2] = -z_in[: count // 2] * (1 + distance)
    return z_in, z_up


@pytest.mark.parametrize("gamma", [0.1, 1.0, 7.0])
def test_relevance_is_conserved_and_its_growth_is_bounded(gamma: float) -> None:
    z_in, z_up = terms()
    R_out = z_in + z_up  # c_out = 1
    R_in, R_up = (z * factor for z, factor in zip((z_in, z_up), residual_factors((z_in, z_up), gamma), strict=True))
    assert_same(R_in + R_up, R_out, magnitude=float(torch.cat([z_in, z_up]).abs().max()), growth=growth(1, 8))
    amplification = (R_in.abs() + R_up.abs()) / R_out.abs()
    assert amplification.max() <= (1 + 2 / gamma) * (1 + 1e-12)
    assert amplification.max() > (1 + 2 / gamma) * (1 - 1e-6)  # reached where the terms cancel
    assert ((z_in.abs() + z_up.abs()) / R_out.abs()).max() > 1e6  # what the proportional share would be


def test_factors_in_closed_form() -> None:
    """3 - 1 = 2: the 3 counts twice, 6/5 and -1/5 of the sum; both positive: in proportion; zero sums pass nothing."""
    z_in, z_up = torch.tensor([[3, 1, 2, 0, -3], [-1, 4, -2, 0, 1]], dtype=torch.float64)
    first, second = residual_factors((z_in, z_up), 1.0)
    assert_same(first, [2 * 2 / 5, 1.0, 0.0, 1.0, 2 * 2 / 5])
    assert_same(second, [2 / 5, 1.0, 0.0, 1.0, 2 / 5])
    assert_same(z_in * first, torch.tensor([6 / 5 * 2, 1, 0, 0, 6 / 5 * -2], dtype=torch.float64))


def test_factors_are_continuous_where_the_sum_vanishes() -> None:
    at, near = (residual_factors((torch.tensor(1.0), torch.tensor(-1.0 + gap)), 1.0) for gap in (0.0, 1e-6))
    assert max(abs(float(a - b)) for a, b in zip(at, near, strict=True)) < 1e-5


@pytest.mark.parametrize("gamma", [1.0, 0.25])
@pytest.mark.parametrize(("kind", "fused"), WAYS)
def test_the_whole_sweep_is_the_reference(kind: str, fused: bool, gamma: float) -> None:
    """Channel by channel at every layer, on every kind of block."""
    module = build(kind, fused=fused)
    pixels, vit = images_for(module), written_out(module)
    with torch.no_grad():
        run = forward(vit, vit.embed(pixels))
    trace = cv.trace(wrapped(module), pixels, target=TARGETS, rules=f"reslrp(gamma={gamma})")
    relevance, proportional = (attnlrp(vit, run, TARGETS, g) for g in (gamma, 0.0))
    assert (relevance[0] - proportional[0]).abs().max() > 0.01
    for layer, direct in zip(trace.layers, relevance, strict=False):
        assert_same(layer.x * layer.dx, direct)


@pytest.mark.parametrize("kind", ["plain", "swiglu-norm", "rope-swiglu", "map", "torchvision"])
def test_gamma_zero_is_attnlrp_bit_by_bit(kind: str) -> None:
    """By its option, by its table, and by the rule itself at gamma 0: z_out / (z_in + z_up) is exactly 1."""
    module = build(kind)
    model, pixels = wrapped(module), images_for(module)
    for suffix in ("", "+plus", "+skipplus", "+from:1", "+layer:2"):
        maps = [
            cv.explain(model, pixels, name + suffix, target=TARGETS).maps for name in ("attnlrp", "reslrp(gamma=0)")
        ]
        assert torch.equal(*maps)
    zero_rule = RuleTable("zero", {**ATTNLRP.rules, "add": residual_rule(0.0)})
    exact = cv.trace(model, pixels, target=TARGETS, rules="attnlrp")
    for table in (zero_rule, rule_table("reslrp(gamma=0.0)")):
        trace = cv.trace(model, pixels, target=TARGETS, rules=table)
        for layer, expected in zip(trace.layers, exact.layers, strict=True):
            assert torch.equal(layer.dx, expected.dx)


def test_the_default_is_gamma_one_and_shares_its_table_name() -> None:
    module = build("plain")
    model, pixels = wrapped(module), images_for(module)
    maps = cv.compare(model, pixels, ["reslrp", "reslrp(gamma=2)", "attnlrp", "transatt"], target=TARGETS)
    trace = cv.trace(model, pixels, target=TARGETS, rules="reslrp(gamma=1.0)")
    by_hand = (trace.layers[0].x * trace.layers[0].dx).sum(-1)[:, 1:].unflatten(1, (3, 5))
    assert torch.equal(maps["reslrp"].maps, by_hand)
    assert (maps["reslrp"].maps - maps["reslrp(gamma=2)"].maps).abs().max() > 1e-3
    alone = cv.explain(
        model, pixels, "transatt", target=TARGETS
    )  # the same sums have Chefer's rule in another backward
    assert torch.equal(alone.maps, maps["transatt"].maps)


class SumsBlock(nn.Module):
    """A block of one head whose sums are written as `way` says; the values are the same for all ways of one group."""

    def __init__(self, way: str, width: int = 24) -> None:
        super().__init__()
        self.way = way
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj, self.fc = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        return self.proj(nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])

    def mlp(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.fc(self.norm2(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "plain":
            x = x + self.attention(x)
            return x + self.mlp(x)
        if self.way == "in-place":  # into the branch: what the norm has saved stays
            y = self.attention(x)
            y += x
            z = self.mlp(y)
            z.add_(y)
            return z
        if self.way == "reversed":
            x = torch.add(self.attention(x), x)
            return self.mlp(x) + x
        y = self.attention(x).flatten(0, 1) + x.flatten(0, 1)  # "flat"
        return (y.clone() + self.mlp(y)).unflatten(0, x.shape[:2])


def test_the_way_a_residual_sum_is_written_does_not_matter() -> None:
    maps = {}
    for way in ("plain", "in-place", "reversed", "flat"):
        module = HomeViT(EinsumAttention)
        module.blocks = nn.ModuleList(SumsBlock(way) for _ in range(3))
        module = randomised(module.double().eval(), 0)
        maps[way] = cv.explain(wrapped(module), images_for(module), "reslrp", target=TARGETS).maps
    for way in maps:
        assert_same(maps[way], maps["plain"], label=way)


def residual(write: Callable[[Tensor, ResidualStream], tuple[Tensor, Tensor]]) -> bool:
    x = torch.randn(2, 4, 6, requires_grad=True) * 2
    return ResidualStream().match(*write(x, ResidualStream())) is not None


def linear(x: Tensor, seed: int = 0) -> Tensor:
    return x @ torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))


def test_which_sums_are_residual() -> None:
    assert residual(lambda x, _: (x, linear(x)))
    assert residual(lambda x, _: (linear(x), x))
    assert residual(lambda x, _: (x, linear(linear(x).tanh()) * 0.5))
    assert residual(lambda x, _: (x.reshape(8, 6), linear(x).reshape(8, 6)))
    assert not residual(lambda x, _: (x, torch.ones(2, 4, 6)))  # a position embedding
    assert not residual(lambda x, _: (x, torch.ones(2, 4, 6, requires_grad=True) * 2))  # a trained one
    assert not residual(lambda x, _: (linear(x), linear(x, 1)))  # two branches
    assert not residual(lambda x, _: (x * 0.3, x.roll(1, -1) * 0.7))  # a rotary embedding
    assert not residual(lambda x, _: (x, 0.044715 * x**3))  # inside GELU's formula
    assert not residual(lambda x, _: (x, 0.044715 * x * x * x))
    assert not residual(lambda x, _: (x, x))
    assert residual(lambda x, _: (x, -0.5 * x))
    assert not residual(lambda x, _: (linear(x), linear(x, 1)[:, :1]))


def test_parallel_branches_join_the_stream_one_by_one() -> None:
    """x + a(x) + b(x): the second sum's branch reads an earlier stage of the stream; x + (a(x) + b(x)) has one sum."""
    stream, x = ResidualStream(), torch.randn(2, 4, 6, requires_grad=True) * 2
    a, b = linear(x), linear(x, 1)
    first = stream.match(x, a)
    assert first is not None
    total = x + a
    assert stream.match(total, b) is None
    stream.add(total, first)
    second = stream.match(total, b)
    assert second is not None
    assert second.z_in == 0
    assert stream.match(a, b) is None
    assert stream.match(x, a + b) is not None


def test_a_position_embedding_keeps_its_proportional_share() -> None:
    """Below the first block the tables agree: relevance at the patches is c of the tokens, nothing is re-weighted."""
    module = build("plain")
    model, pixels = wrapped(module), images_for(module)
    recording = record(model, pixels, rules=("reslrp",))
    trace = run_backward(recording, one_target(recording, TARGETS, "logit", single=False), "reslrp")
    c = trace.layers[0].dx[:, 1:].transpose(1, 2).unflatten(2, (3, 5))  # [B, d, 3, 5]
    by_hand = nn.functional.conv_transpose2d(c, module.patch_embed.proj.weight, stride=4)
    assert_same(trace.dpixels, by_hand)
