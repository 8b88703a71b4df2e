"""LibraGrad's named variants: the base under rules=libra, bit by bit, and against formulas on the balanced trace."""

from __future__ import annotations

import pytest
import torch

import clairvit as cv
from clairvit.errors import UnknownName
from clairvit.methods.libra import LIBRA_BASES
from clairvit.methods.registry import find_method
from helpers.exact_models import TARGETS, build, images_for, wrapped
from helpers.rounding import assert_same

KINDS = ("plain", "swiglu-packed", "avg-no-cls")  # libra differs from linear where an MLP is gated


@pytest.mark.filterwarnings("ignore:.*its ReLU keeps what speaks for the target")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", LIBRA_BASES)
def test_a_named_variant_is_its_base_under_libra_bit_by_bit(base: str, kind: str) -> None:
    module = build(kind)
    model, pixels = wrapped(module), images_for(module)
    for suffix in ("", "+plus", "+skipplus", "+layer:1"):
        names = [f"libra-{base}{suffix}", f"{base}(rules=libra){suffix}", f"{base}{suffix}"]
        maps = [cv.explain(model, pixels, name, target=TARGETS).maps for name in names]
        assert torch.equal(maps[0], maps[1])
        assert (maps[0] - maps[2]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_variants_in_closed_form_on_the_balanced_trace(kind: str) -> None:
    module = build(kind)
    model, pixels = wrapped(module), images_for(module)
    trace = cv.trace(model, pixels, target=TARGETS, rules="libra")
    layer, prefix, grid = trace.layers[1], trace.layout.prefix, trace.layout.grid

    def maps(name: str) -> torch.Tensor:
        return cv.explain(model, pixels, name, target=TARGETS).maps

    x, dx, A = layer.x, layer.dx, layer.A
    tokens = (x * dx).sum(-1)  # [B, N]
    assert_same(maps("libra-hirescam+layer:1"), tokens[:, prefix:].unflatten(1, grid))
    assert_same(maps("libra-attcat+layer:1"), (A.mean((1, 2)) * tokens)[:, prefix:].unflatten(1, grid))
    weights = (dx * x.abs()).sum(1) / (x.abs().sum(1) + 1e-7)  # [B, d]
    by_channels = torch.einsum("bnd,bd->bn", x, weights)
    assert_same(maps("libra-xgradcam-plus+layer:1"), by_channels[:, prefix:].unflatten(1, grid))
    row = torch.einsum("zn,bnm->bm", trace.readout_weights, (A * layer.G).clamp(min=0).mean(1))
    assert_same(maps("libra-genatt+layer:1"), row[:, prefix:].unflatten(1, grid))


@pytest.mark.parametrize("base", LIBRA_BASES)
def test_the_pinned_option_is_gone_and_the_others_stay(base: str) -> None:
    variant = find_method(f"libra-{base}")
    assert variant.tables == ("libra",)
    pinned = {"rules", "biases"} if base == "fullgrad-plus" else {"rules"}
    assert variant.options == {name: value for name, value in find_method(base).options.items() if name not in pinned}
    with pytest.raises(UnknownName, match="rules"):
        cv.parse_method(f"libra-{base}(rules=plain)")
