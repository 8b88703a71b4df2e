"""More methods against their formulas: AG-CAM, the CAM family, gradient lengths; full matrices, float64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

import clairvit as cv
from clairvit.errors import ClairWarning, NotApplicable
from helpers import reference_maps as ref
from helpers.exact_models import TARGETS, build, images_for, wrapped
from helpers.reference_cams import cam_by_hand
from helpers.reference_maps import Proof
from helpers.rounding import assert_same
from helpers.tiny_models import STRANGE, strange

DEPTH = 3
POOLINGS = ["plain", "registers", "distilled", "avg", "map"]
pytestmark = pytest.mark.filterwarnings("ignore:.*its ReLU keeps what speaks for the target")


@functools.cache
def proven(kind: str, fused: bool = True) -> tuple[cv.Model, Proof]:
    module = build(kind, fused=fused, depth=DEPTH)
    return wrapped(module), ref.prove(module, images_for(module), TARGETS)


def scores(p: Proof) -> list[Tensor]:
    """S before the softmax."""
    return [attention.S.detach() for attention, _ in p.true.run.blocks]


def ag_cam(p: Proof, guide: Callable[[Tensor, Tensor], Tensor] = lambda S, A: torch.sigmoid(S)) -> Tensor:
    layers = zip(p.G, scores(p), p.A, strict=True)
    return sum(p.read((G.clamp(min=0) * guide(S, A)).sum(1)) for G, S, A in layers)


FORMULAS: dict[str, Callable[[Proof], Tensor]] = {
    "ag-cam": ag_cam,
    "ag-cam(norm=softmax)": lambda p: ag_cam(p, lambda S, A: A),
    "ag-cam(norm=none)": lambda p: ag_cam(p, lambda S, A: S),
    "ag-cam(head_fusion=mean)": lambda p: ag_cam(p) / p.A[0].shape[1],
    "vanilla-l2": lambda p: p.true.dx[0].norm(dim=-1),
    "vanilla-l2+plus": lambda p: sum(dx.norm(dim=-1) for dx in p.true.dx[:-1]),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("fused", [True, False])
def test_formula(kind: str, name: str, fused: bool) -> None:
    model, p = proven(kind, fused)
    expected = p.on_grid(FORMULAS[name](p))
    assert expected.any()
    assert_same(cv.explain(model, p.pixels, name, target=TARGETS).maps, expected)


# The CAM family, by a hook on the module and loops over channels


FAMILY = ["gradcam", "gradcam-pp", "hirescam", "gradcam-elementwise", "layercam", "xgradcam", "xgradcam-plus"]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("kind", ["plain", "registers", "distilled"])
def test_cam_family_at_the_last_norm(kind: str, name: str) -> None:
    module = build(kind, fused=True, depth=DEPTH)
    model, pixels = wrapped(module), images_for(module)
    kept: list[Tensor] = []
    hook = module.blocks[-1].norm1.register_forward_hook(lambda m, i, o: kept.append(o))
    logits = module(pixels)
    hook.remove()
    (g,) = torch.autograd.grad(sum(logits[b, c] for b, c in enumerate(TARGETS)), kept[0])
    prefix = cv.trace(model, pixels, target=TARGETS).layout.prefix
    rows = [cam_by_hand(name, a[prefix:].detach(), gradient[prefix:]) for a, gradient in zip(kept[0], g, strict=True)]
    never_negative = name == "gradcam-elementwise"
    signed = cv.explain(model, pixels, name if never_negative else f"{name}(relu=false)", target=TARGETS).maps
    assert_same(signed.flatten(1), torch.stack(rows))
    assert_same(cv.explain(model, pixels, name, target=TARGETS).maps, signed.clamp(min=0))


@pytest.mark.parametrize("name", FAMILY)
def test_cam_family_under_plus_follows_skipplus(name: str) -> None:
    model, p = proven("registers")
    expected = torch.stack(
        [
            sum(cam_by_hand(name, x[b], dx[b]) for x, dx in zip(p.x[:-1], p.true.dx[:-1], strict=True))
            for b in range(len(p.pixels))
        ]
    )
    assert_same(cv.explain(model, p.pixels, f"{name}+plus", target=TARGETS).maps, p.on_grid(expected))


def test_cp_lrp_is_decompx() -> None:
    model, p = proven("plain")
    assert_same(
        cv.explain(model, p.pixels, "cp-lrp+skipplus", target=TARGETS).maps,
        cv.explain(model, p.pixels, "decompx+skipplus", target=TARGETS).maps,
    )


# CAM and the sum of a token's gradient


def head_of(module: torch.nn.Module, tokens: Tensor) -> Tensor:
    """The share of each token in the score, the spread of the final norm held fixed: written out for timm's ViTs."""
    prefix = module.num_prefix_tokens
    n = tokens.shape[1] - prefix
    w = module.head.weight[TARGETS]  # [B, d]
    norm = module.norm if isinstance(module.norm, torch.nn.LayerNorm) else module.fc_norm
    seen = tokens if norm is module.norm else tokens[:, prefix:].mean(1, keepdim=True)  # its own spread, or the mean's
    sigma = (seen.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    shares = (norm.weight * (tokens - tokens.mean(-1, keepdim=True)) / sigma * w[:, None]).sum(-1) / n
    shares[:, :prefix] = 0
    return shares.detach()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["avg", "avg-no-cls", "avg-token-norm"])
def test_cam_is_the_linearised_head(kind: str, fused: bool) -> None:
    """METHODS 3: (1/n) w·(gamma (x_i − mean)/sigma), sigma of the pooled token (fc_norm) or of its own (norm)."""
    model, p = proven(kind, fused)
    assert_same(
        cv.explain(model, p.pixels, "cam", target=TARGETS).maps, p.on_grid(head_of(model.module, p.x[-1].detach()))
    )


def test_cam_of_an_attention_pool_holds_its_attention_fixed() -> None:
    """MAP pooling: final tokens times the gradient with the pool's attention, norms and slopes frozen."""
    model, p = proven("map")
    tr = cv.trace(model, p.pixels, target=TARGETS, rules="linear")
    expected = (tr.final_tokens * tr.final_gradient).sum(-1)
    assert expected.any()
    assert_same(cv.explain(model, p.pixels, "cam", target=TARGETS).maps, p.on_grid(expected))


def test_cam_at_block_inputs_is_decompx() -> None:
    model, p = proven("avg")
    assert_same(
        cv.explain(model, p.pixels, "cam+plus", target=TARGETS).maps,
        cv.explain(model, p.pixels, "decompx+plus", target=TARGETS).maps,
    )


@pytest.mark.parametrize("name", ["gradcam", "hirescam"])
@pytest.mark.parametrize("kind", ["swin", "swin-nonsquare"])
def test_grad_cam_of_a_swin_is_the_share_of_each_cell_in_the_score(kind: str, name: str) -> None:
    """Behind the last norm cells are averaged: w·a(p) / n, cell by cell, and the cells add up to the score."""
    module = strange(STRANGE[kind].make).double()
    assert isinstance(module, SwinTransformer)
    images = torch.randn(2, 3, *STRANGE[kind].size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        a = module.forward_features(images)  # [B, rows, cols, d]
        head = module.get_classifier()
        shares = (a * head.weight[TARGETS][:, None, None]).sum(-1) / (a.shape[1] * a.shape[2])
        assert_same(shares.sum((1, 2)) + head.bias[TARGETS], module(images)[range(2), TARGETS])
    maps = cv.explain(cv.wrap(module), images, f"{name}(relu=false)", target=TARGETS).maps
    assert shares.std() > 0
    assert_same(maps, shares)


def test_cam_where_no_patch_is_read_is_refused() -> None:
    model, p = proven("plain")
    with pytest.raises(NotApplicable, match=r"avg or map or mixed pooling.*token pooling"):
        cv.explain(model, p.pixels, "cam", target=TARGETS)


@pytest.mark.parametrize("kind", ["plain", "registers", "distilled", "avg", "avg-no-cls", "layer-scale"])
@pytest.mark.parametrize("name", ["vanilla", "vanilla+layer:1", "vanilla+plus"])
def test_the_sum_of_a_gradient_behind_layer_norm_is_zero(kind: str, name: str) -> None:
    """And a note says so, whatever rounding leaves of it."""
    model, p = proven(kind)
    for dx in p.true.dx[:-1]:
        assert_same(dx.sum(-1), torch.zeros_like(dx[..., 0]), magnitude=float(dx.abs().sum(-1).max()))
    with pytest.warns(ClairWarning, match="zero everywhere: every way from a token goes through a LayerNorm"):
        assert not cv.explain(model, p.pixels, name, target=TARGETS).maps.any()


def test_the_sum_of_a_gradient_behind_other_norms_is_not() -> None:
    model, p = proven("rms-norm")
    assert_same(cv.explain(model, p.pixels, "vanilla", target=TARGETS).maps, p.on_grid(p.true.dx[0].sum(-1)))
    both = sum(dx.sum(-1) for dx in p.true.dx[:-1])
    assert_same(cv.explain(model, p.pixels, "vanilla+plus", target=TARGETS).maps, p.on_grid(both))


def test_hirescam_before_a_lone_norm_is_zero_but_for_its_eps() -> None:
    """x · dLN/dx = eps/sigma² of what it would be: LayerNorm does not see the length of a token."""
    model, p = proven("avg-token-norm")
    tr = cv.trace(model, p.pixels, target=TARGETS)
    before = (tr.final_tokens * tr.final_gradient).sum(-1)
    assert before.abs().max() < 1e-5 * (tr.final_tokens.norm(dim=-1) * tr.final_gradient.norm(dim=-1)).max()
    after = cv.explain(model, p.pixels, "hirescam(relu=false)", target=TARGETS).maps  # read behind the norm
    assert after.abs().max() > 1e-2
