"""Forward decompositions against N × N vectors made from explicit weights; float64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods import decomposition
from clairvit.tracing.decompx import shares
from clairvit.tracing.recorders.op_log import OpLog
from clairvit.tracing.recording import record
from helpers import reference_maps as ref
from helpers import reference_token_contributions as inside
from helpers.covering import some_models
from helpers.exact_models import TARGETS, build, images_for, wrapped
from helpers.reference_maps import Proof
from helpers.rounding import assert_same
from helpers.tiny_models import TINY, ZOO, pixels
from helpers.tiny_models import wrapped as tiny

DEPTH = 3
KINDS = ["plain", "registers", "layer-scale", "distilled", "avg", "map", "sub-norm", "rms-norm"]
OTHERS = ["torchvision", "grouped", "weighed", "bool-mask", "einsum", "relative-bias", "rope-swiglu"]


@functools.cache
def proven(kind: str, fused: bool = True) -> tuple[cv.Model, Proof]:
    module = build(kind, fused=fused, depth=DEPTH)
    return wrapped(module), ref.prove(module, images_for(module), TARGETS)


def parts(p: Proof):
    """(weights, what they did) of each attention."""
    return [(part, run) for (part, _), (run, _) in zip(p.vit.blocks, p.true.run.blocks, strict=True)]


def each_T(p: Proof, **options: object) -> list[Tensor]:
    return [inside.vectors(part, run, **options) for part, run in parts(p)]


def next_norm(p: Proof, T: Tensor, layer: int) -> Tensor:
    norm, x_mid = p.vit.blocks[layer][1].norm, p.true.run.blocks[layer][0].end.detach()
    return inside.linear_norm(norm, T, x_mid[:, :, None])


def lengths(vectors: list[Tensor]) -> list[Tensor]:
    return [T.norm(dim=-1) for T in vectors]


def alti(p: Proof, p_norm: int = 1, resultant: str = "attn", **options: object) -> list[Tensor]:
    ends = [run.end.detach() for _, run in parts(p)] if resultant == "attn" else p.x[1:]
    return [inside.closeness(T, y, p_norm) for T, y in zip(each_T(p, **options), ends, strict=True)]


def tokentm(p: Proof, mean_exp: bool = False, post: bool = False, lengths: bool = True) -> list[Tensor]:
    N = p.A[0].shape[-1]

    def W(E: Tensor, E2: Tensor) -> Tensor:
        cos = (E * E2).sum(-1) / E.norm(dim=-1) / E2.norm(dim=-1)
        necc = cos.exp() / cos.exp().sum(-1, keepdim=True) * (N if mean_exp else 1)
        return E2.norm(dim=-1) / E.norm(dim=-1) * necc

    transformations = []
    for layer, (_, run) in enumerate(parts(p)):
        x, mid, out = p.x[layer], run.end.detach(), p.x[layer + 1]
        A, G = p.A[layer], p.G[layer].clamp(min=0)
        looks = (A * G).mean(1) * W(x, mid)[:, None] if post else (A.mean(1) @ W(x, mid).diag_embed()) * G.mean(1)
        U = (p.identity + W(mid, out).diag_embed()) @ (p.identity + looks)
        transformations.append(U @ x.norm(dim=-1).diag_embed() if layer == 0 and lengths else U)
    return transformations


def total(p: Proof, matrices: list[Tensor], start: int = 0) -> Tensor:
    return sum(p.read(M) for M in matrices[start:])


FORMULAS: dict[str, Callable[[Proof], Tensor]] = {
    "attin": lambda p: p.read(lengths(each_T(p, residual=0.0))[-1]),
    "attin(preset=official)": lambda p: p.read(lengths(each_T(p, residual=0.0, value_bias=True))[-1]),
    "attin(heads=mean)": lambda p: p.read(inside.head_vectors(*parts(p)[-1]).norm(dim=-1).mean(1)),
    "attin+skipplus": lambda p: total(p, lengths(each_T(p, residual=0.0)), 2),
    "attin-residual": lambda p: p.read(ref.later_left([ref.row_normalised(M) for M in lengths(each_T(p))])),
    "attin-residual(ln=next)+plus": lambda p: total(
        p, lengths([next_norm(p, T, layer) for layer, T in enumerate(each_T(p))])
    ),
    "globenc": lambda p: p.read(ref.later_left(lengths(each_T(p)))),
    "globenc(strength=0.5)": lambda p: p.read(ref.later_left(lengths(each_T(p, residual=0.5)))),
    "globenc(preset=official)": lambda p: p.read(ref.later_left(lengths(each_T(p, value_bias=True)))),
    "globenc(normalise=first)+rollout": lambda p: ref.rollout_of_equation_2(p, lengths(each_T(p))),
    "attin(normalise=first)+rollout": lambda p: ref.rollout_of_equation_2(p, lengths(each_T(p, residual=0.0))),
    "alti(preset=skipplus,normalise=first)+rollout": lambda p: ref.rollout_of_equation_2(p, alti(p, resultant="block")),
    "globenc+plus": lambda p: total(p, lengths(each_T(p))),
    "alti": lambda p: p.read(ref.later_left(alti(p))),
    "alti(p=2)": lambda p: p.read(ref.later_left(alti(p, 2))),
    "alti(preset=official)": lambda p: p.read(ref.later_left(alti(p, value_bias=True))),
    "alti(preset=skipplus)+skipplus": lambda p: total(p, alti(p, resultant="block"), 2),
    "tokentm": lambda p: p.read(ref.later_left(tokentm(p))),
    "tokentm(necc=mean_exp)": lambda p: p.read(ref.later_left(tokentm(p, mean_exp=True))),
    "tokentm(head_stage=post)": lambda p: p.read(ref.later_left(tokentm(p, post=True))),
    "tokentm+plus": lambda p: total(p, tokentm(p, lengths=False)),
}


@functools.cache
def explained(kind: str, fused: bool = True) -> dict[str, Tensor]:
    model, p = proven(kind, fused)
    comparison = cv.compare(model, p.pixels, list(FORMULAS), target=TARGETS)
    return {name: explanation.maps for name, explanation in zip(FORMULAS, comparison.values(), strict=True)}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_formula(kind: str, fused: bool, name: str) -> None:
    _, p = proven(kind, fused)
    expected = p.on_grid(FORMULAS[name](p))
    assert expected.any()
    assert_same(explained(kind, fused)[name], expected)


@pytest.mark.parametrize("name", ["attin", "attin-residual", "globenc", "alti", "tokentm"])
@pytest.mark.parametrize("kind", OTHERS)
def test_formula_alone_on_other_models(kind: str, name: str) -> None:
    model, p = proven(kind)
    assert_same(cv.explain(model, p.pixels, name, target=TARGETS).maps, p.on_grid(FORMULAS[name](p)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_add_up_to_the_sum_after_attention(kind: str) -> None:
    """Of the reference itself: with the bias of the values, only b_o and the sub-norm's bias are missing."""
    _, p = proven(kind)
    for part, run in parts(p):
        rest = part.out(torch.zeros_like(run.x) if part.sub_norm is None else part.sub_norm.beta)
        assert_same(inside.vectors(part, run, value_bias=True).sum(2) + part.g1 * rest, run.end)


def test_alti_is_the_token_itself_where_nothing_comes_near() -> None:
    """A value far away in every direction: no vector comes nearer to it than nothing does."""
    near = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 3.0, 0.0]]])
    normalised = decomposition.normalised_rows(near, torch.tensor([2, 1]))
    assert normalised.tolist() == [[[0.0, 0.0, 1.0], [0.25, 0.75, 0.0]]]


def test_rows_in_pieces_are_the_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, p = proven("plain")
    whole = cv.explain(model, p.pixels, "alti").maps
    monkeypatch.setattr(decomposition, "NUMBERS_AT_ONCE", 2000)
    assert_same(cv.explain(model, p.pixels, "alti").maps, whole)


@pytest.mark.parametrize("name", ["attin", "attin-residual", "globenc", "alti", "tokentm"])
def test_blocks_without_a_residual_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(NotApplicable, match=r"does not add its attention to its own input .* Use a method"):
        cv.explain(tiny("timm-parallel"), pixels("timm-parallel"), name)


def test_a_norm_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotApplicable, match=r"ln=next asks for it\. Use ln=none"):
        cv.explain(tiny("timm-post-norm"), pixels("timm-post-norm"), "attin-residual(ln=next)")


# DecompX with its biases shared out


SHARING = ["absdot", "abssim", "norm", "equal", "cls"]


def all_shares(kind: str, sharing: str, fused: bool = True, layer: int = 0) -> tuple[Tensor, Tensor]:
    """[N, B, C] and the scores."""
    model, p = proven(kind, fused)
    recording = record(model, p.pixels, differentiable=False, recorders=(OpLog,))
    with torch.no_grad():
        return shares(recording, layer, sharing), recording.logits


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "tanh-gelu", "quick-gelu", "relu", "swiglu-packed", "swiglu-norm"])
def test_forwards_without_bias_is_the_linear_backward(kind: str, fused: bool) -> None:
    model, p = proven(kind, fused)
    for layer in range(DEPTH):
        added, _ = all_shares(kind, "none", fused, layer)
        expected = cv.explain(model, p.pixels, f"decompx+layer:{layer}", target=TARGETS).maps
        target_contributions = torch.stack([added[:, b, c] for b, c in enumerate(TARGETS)])
        assert_same(p.on_grid(target_contributions), expected)


@pytest.mark.parametrize("kind", OTHERS)
def test_forwards_without_bias_is_the_linear_backward_on_other_models(kind: str) -> None:
    model, p = proven(kind)
    added, _ = all_shares(kind, "none")
    target_contributions = torch.stack([added[:, b, c] for b, c in enumerate(TARGETS)])
    assert_same(p.on_grid(target_contributions), cv.explain(model, p.pixels, "decompx", target=TARGETS).maps)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS, "swiglu-packed"])
def test_tokens_and_their_shares_of_the_biases_add_up_to_the_scores(kind: str, sharing: str) -> None:
    for layer in range(DEPTH):
        added, logits = all_shares(kind, sharing, layer=layer)
        assert_same(added.sum(0), logits)


def shared(D: Tensor, b: Tensor, how: str) -> Tensor:
    """D [B, i, j, d] and the bias b [d] or [B, i, d]: vector by vector."""
    b = b.expand(D.shape[0], D.shape[1], D.shape[3])
    out = D.clone()
    for n in range(D.shape[0]):
        for i in range(D.shape[1]):
            vectors, bias = D[n, i], b[n, i]
            if how == "absdot":
                w = (vectors @ bias).abs()
            elif how == "abssim":
                w = (vectors @ bias).abs() / vectors.norm(dim=-1).clamp(min=1e-300)
            elif how == "norm":
                w = vectors.norm(dim=-1)
            elif how == "equal":
                w = vectors.any(-1).double()
            else:
                w = (torch.arange(len(vectors)) == 0).double()
            w = w / w.sum() if w.sum() > 0 else torch.full_like(w, 1 / len(w))
            out[n, i] += w[:, None] * bias
    return out


def decompx_by_hand(p: Proof, how: str, start: int) -> Tensor:
    """D [B, i, j, d] from layer `start` to the scores, [B, j, C]."""
    x = p.x[start]
    D = torch.einsum("ij,bjd->bijd", p.identity, x)
    for (att, mlp), (a, m) in list(zip(p.vit.blocks, p.true.run.blocks, strict=True))[start:]:
        h = shared(inside.linear_norm(att.norm, D, a.x[:, :, None]), att.norm.beta, how)
        v = (h @ att.v.W.T).unflatten(-1, (att.heads, -1))  # [B, k, j, H, dh]
        O = torch.einsum("bhik,bkjhv->bijhv", a.A, v).flatten(3)  # noqa: E741
        D = D + att.g1 * (O @ att.out.W.T)
        D = shared(D, att.g1 * (att.out.W @ att.v.b + att.out.b), how)  # rows of A add up to 1
        h = shared(inside.linear_norm(mlp.norm, D, m.x[:, :, None]), mlp.norm.beta, how)
        z = shared(h @ mlp.up.W.T, mlp.up.b, how)
        y = shared((m.a / m.z)[:, :, None] * z @ mlp.down.W.T, mlp.down.b, how)
        D = D + mlp.g2 * y
    norm = p.vit.norm
    D = shared(inside.linear_norm(norm, D, p.true.run.x[-1][:, :, None]), norm.beta, how)
    contributions = 0
    for reader in p.vit.readers:
        z = torch.einsum("i,bijd->bjd", reader.rows, D)[:, None]
        contributions = contributions + reader.share * shared(z @ reader.classifier.W.T, reader.classifier.b, how)
    return contributions[:, 0].detach()


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", ["plain", "registers", "layer-scale", "distilled"])
def test_biases_are_shared_by_the_rule(kind: str, sharing: str, start: int) -> None:
    model, p = proven(kind)
    expected = torch.stack([decompx_by_hand(p, sharing, start)[b, :, c] for b, c in enumerate(TARGETS)])
    explanation = cv.explain(model, p.pixels, f"decompx(bias={sharing})+layer:{start}", target=TARGETS)
    assert_same(explanation.maps, p.on_grid(expected))
    assert (explanation.cost.forwards, explanation.cost.backwards) == (1, 0)


def test_a_sum_over_start_layers() -> None:
    model, p = proven("plain")
    one_by_one = [
        cv.explain(model, p.pixels, f"decompx(bias=norm)+layer:{i}", target=TARGETS).maps for i in range(DEPTH)
    ]
    assert_same(cv.explain(model, p.pixels, "decompx(bias=norm)+plus", target=TARGETS).maps, sum(one_by_one))


def test_biases_belong_to_tokens() -> None:
    model, p = proven("plain")
    with pytest.raises(BadInput, match=r"level=pixel and bias=absdot .* Use level=token"):
        cv.explain(model, p.pixels, "decompx(bias=absdot,level=pixel)")
    with pytest.raises(NotApplicable, match=r"this model has none\. Use bias=absdot"):
        cv.explain(proven("map")[0], p.pixels, "decompx(bias=cls)")


@pytest.mark.parametrize("kind", some_models([*TINY], 30, seed="decompx"))
def test_every_kind_of_model_adds_up_or_says_why_not(kind: str) -> None:
    comparison = cv.compare(tiny(kind), pixels(kind), ["decompx(bias=absdot)", "decompx"], target=3, skip=True)
    if "residual" in ZOO[kind].lacks or kind == "home-loop":
        assert "decompx(bias=absdot)" in comparison.skipped
    else:
        assert comparison["decompx(bias=absdot)"].maps.isfinite().all()
