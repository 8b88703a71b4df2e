"""More methods against their formulas: AG-CAM, the CAM family, gradient lengths; full matrices, float64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clairvit as cv
import reference_maps as ref
from exact_models import TARGETS, build, images_for, wrapped
from reference_maps import Proof
from references import assert_same

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


def cam_by_hand(name: str, a: Tensor, g: Tensor) -> Tensor:
    """One image, patches only: a, g [n, d] -> [n], before the ReLU."""
    n, d = a.shape
    out = torch.zeros(n, dtype=a.dtype)
    for k in range(d):
        ak, gk = a[:, k], g[:, k]
        if name == "gradcam":
            out += gk.mean() * ak
        elif name == "gradcam-pp":
            alpha = torch.tensor(
                [0.0 if x == 0 else float(x**2 / (2 * x**2 + ak.sum() * x**3 + 1e-6)) for x in gk], dtype=a.dtype
            )
            out += (alpha * gk.clamp(min=0)).sum() * ak
        elif name == "gradcam-elementwise":
            out += (gk * ak).clamp(min=0)
        elif name == "layercam":
            out += gk.clamp(min=0) * ak
        elif name == "xgradcam-plus":
            out += (gk * ak.abs()).sum() / (ak.abs().sum() + 1e-7) * ak
    return out


FAMILY = ["gradcam", "gradcam-pp", "gradcam-elementwise", "layercam", "xgradcam-plus"]


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
    rows = [cam_by_hand(name, a[prefix:].detach(), one[prefix:]) for a, one in zip(kept[0], g, strict=True)]
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
