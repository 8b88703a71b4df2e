"""Every method against its formula: full matrices, brute-force gradients, real modules; float64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.methods.registry import list_methods
from helpers import reference_maps as ref
from helpers.exact_models import CLASSES, KINDS, TARGETS, both_ways, build, images_for, wrapped
from helpers.reference_maps import Proof
from helpers.reference_vit import forward, score
from helpers.rounding import assert_same

DEPTH = 4
pytestmark = pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # a ReLU may leave an image nothing
POOLINGS = ["plain", "registers", "distilled", "avg", "avg-no-cls", "map", "map-cls", "map-two"]


@functools.cache
def proven(kind: str, fused: bool = True) -> tuple[cv.Model, Proof]:
    module = build(kind, fused=fused, depth=DEPTH)
    return wrapped(module), ref.prove(module, images_for(module), TARGETS)


@functools.cache
def explained(kind: str, fused: bool = True) -> dict[str, Tensor]:
    """All the methods below from one forward and one backward."""
    model, p = proven(kind, fused)
    comparison = cv.compare(model, p.pixels, list(FORMULAS), target=TARGETS)
    return {name: explanation.maps for name, explanation in zip(FORMULAS, comparison.values(), strict=True)}


def total(p: Proof, matrices: list[Tensor], start: int = 0) -> Tensor:
    return sum(p.read(M) for M in matrices[start:])


def mean_heads(p: Proof) -> list[Tensor]:
    return [A.mean(1) for A in p.A]


# What is typed -> the row [B, N] it must give.
FORMULAS: dict[str, Callable[[Proof], Tensor]] = {
    "raw-attention": lambda p: p.read(p.A[-1].mean(1)),
    "raw-attention(fusion=max)": lambda p: p.read(p.A[-1].max(1).values),
    "raw-attention(fusion=min)": lambda p: p.read(p.A[-1].min(1).values),
    "raw-attention(fusion=2)": lambda p: p.read(p.A[-1][:, 2]),
    "raw-attention(layer=1)": lambda p: p.read(p.A[1].mean(1)),
    "raw-attention+plus": lambda p: total(p, mean_heads(p)),
    "raw-attention+skipplus": lambda p: total(p, mean_heads(p), 2),
    "raw-attention(fusion=max)+rollout": lambda p: ref.rolled(
        p, [A.max(1).values for A in p.A], normalise=ref.row_normalised
    ),
    "rollout": lambda p: ref.rollout(p),
    "rollout(residual=0.25)": lambda p: ref.rollout(p, alpha=0.8),
    "rollout(fusion=max)": lambda p: ref.rollout(p, fuse=lambda A: A.max(1).values),
    "rollout(fusion=min)": lambda p: ref.rollout(p, fuse=lambda A: A.min(1).values),
    "rollout(fusion=1)": lambda p: ref.rollout(p, fuse=lambda A: A[:, 1]),
    "rollout(discard_ratio=0.6)": lambda p: ref.rollout_with_discard(p, 0.6, "none"),
    "rollout(preset=jacobgil,normalise=rows)": lambda p: ref.rollout_with_discard(p, 0.9, "cls_cell"),
    "rollout(preset=jacobgil,protect=cls_column,normalise=rows)": lambda p: ref.rollout_with_discard(
        p, 0.9, "cls_column"
    ),
    "rollout(preset=jacobgil)": ref.rollout_jacobgil,
    "rollout(preset=joita)": ref.rollout_forward,
    "rollout(preset=cmi)": lambda p: ref.rollout_cmi(p, lambda A: A.mean(1)),
    "rollout(preset=cmi,fusion=max)": lambda p: ref.rollout_cmi(p, lambda A: A.max(1).values),
    "rollout(preset=cmi,fusion=min)": lambda p: ref.rollout_cmi(p, lambda A: A.min(1).values),
    "rollout(preset=chefer)": lambda p: ref.rollout(p, start=1),
    "rollout(preset=skipplus)": lambda p: ref.rollout_of_equation_2(p, mean_heads(p)),
    "rollout(fusion=max,normalise=first)": lambda p: ref.rollout_of_equation_2(p, [A.max(1).values for A in p.A]),
    "rollout(preset=skipplus,fusion=min)": lambda p: ref.rollout_of_equation_2(p, [A.min(1).values for A in p.A]),
    "raw-attention(fusion=max,normalise=first)+rollout": lambda p: ref.rollout_of_equation_2(
        p, [A.max(1).values for A in p.A]
    ),
    "attention-gradient": lambda p: p.read(p.G[-1].mean(1)),
    "attention-gradient+plus": lambda p: total(p, [G.mean(1) for G in p.G]),
    "attention-gradient+skipplus": lambda p: total(p, [G.mean(1) for G in p.G], ref.half(p)),
    "genatt": ref.genatt,
    "genatt+plus": lambda p: total(p, ref.positive(p)),
    "genatt+skipplus": lambda p: total(p, ref.positive(p), ref.half(p)),
    "genatt+rollout": ref.grad_rollout,
    "grad-rollout": ref.grad_rollout,
    "grad-rollout(preset=jacobgil)": ref.grad_rollout_jacobgil,
    "grad-rollout(preset=cmi)": ref.grad_rollout_cmi,
    "grad-rollout(preset=cmi,fusion=max)": lambda p: ref.grad_rollout_cmi(p, lambda A: A.max(1).values),
    "grad-rollout(preset=cmi,fusion=min)": lambda p: ref.grad_rollout_cmi(p, lambda A: A.min(1).values),
    "gradsam": ref.gradsam,
    "gmar-l1": lambda p: ref.gmar(p, 1),
    "gmar-l2": lambda p: ref.gmar(p, 2),
    "gmar-l1(preset=joita)": lambda p: ref.gmar_joita(p, 1),
    "gmar-l2(preset=joita)": lambda p: ref.gmar_joita(p, 2),
    "gmar-l1(preset=joita-equation)": lambda p: ref.gmar_forward(p, 1),
    "gmar-l2(preset=joita-equation)": lambda p: ref.gmar_forward(p, 2),
    "gmar-l1(preset=paper_raw)": lambda p: ref.gmar_raw(p, 1),
    "gmar-l2(preset=paper_raw)": lambda p: ref.gmar_raw(p, 2),
    "gmar-l1+plus": lambda p: total(p, ref.head_weighted(p, 1)),
    "attcam": lambda p: p.read(ref.attention_cam(p, p.vit.prefix)[-1]).clamp(min=0),
    "attcam(relu=false)": lambda p: p.read(ref.attention_cam(p, p.vit.prefix)[-1]),
    "attcam(preset=coporan)": ref.cam_coporan,
    "ag-cam(preset=coporan)": ref.ag_cam_coporan,
    "attcam(keys=no-cls)+plus": lambda p: total(p, ref.attention_cam(p, min(1, p.vit.prefix))),
    "focusvit(m=1)": lambda p: ref.focusvit(p, 1),
    "focusvit": lambda p: ref.focusvit(p, ref.half(p)),
    "ixg": lambda p: p.ixg[0],
    "ixg+layer:2": lambda p: p.ixg[2],
    "ixg+layer:-2": lambda p: p.ixg[-3],
    "cat": lambda p: sum(p.ixg[:-1]),
    "attcat": lambda p: ref.attcat(p, "input"),
    "attcat(pair=output)": lambda p: ref.attcat(p, "output"),
    "gradcam+plus": ref.gradcam_plus,
}


# A ReLU may leave nothing: attcam(relu=false) is proved too, and the lowest gradient of the heads is seldom positive.
MAY_BE_ZERO = ("attcam", "attcam(preset=coporan)", "grad-rollout(preset=cmi,fusion=min)")


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("kind", POOLINGS)
def test_formula(kind: str, name: str) -> None:
    _, p = proven(kind)
    expected = p.on_grid(FORMULAS[name](p))
    assert expected.any() or name in MAY_BE_ZERO
    assert_same(explained(kind)[name], expected)


@pytest.mark.parametrize("fusion", ["mean", "max"])
@pytest.mark.parametrize("kind", ["plain", "registers"])
def test_the_gradient_rollout_of_the_cmi_report_is_the_last_layers_map(kind: str, fusion: str) -> None:
    """Behind a class token the last layer's other rows have no gradient, and in forward order it comes last."""
    model, p = proven(kind)
    options = f"preset=cmi,fusion={fusion}"
    texts = [f"grad-rollout({options})", f"grad-rollout({options},start_layer=-1)"]
    product, last = cv.compare(model, p.pixels, texts, target=TARGETS).values()
    assert last.maps.flatten(1).any(1).all()
    assert product.maps.any()
    for rolled, single in zip(product.maps, last.maps, strict=True):
        assert_same(rolled / rolled.max().clamp(min=1e-300), single / single.max() * float(rolled.any()))


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_with_explicit_attention(name: str) -> None:
    _, p = proven("registers", False)
    assert_same(explained("registers", False)[name], p.on_grid(FORMULAS[name](p)))


@pytest.mark.parametrize("name", ["rollout", "genatt", "gmar-l2", "attcat", "focusvit"])
@pytest.mark.parametrize("kind", ["torchvision", "grouped", "weighed", "relative-bias", "rope-swiglu"])
def test_formula_alone_on_other_models(kind: str, name: str) -> None:
    """One method at a time: nothing another method has made can help."""
    model, p = proven(kind)
    maps = cv.explain(model, p.pixels, name, target=TARGETS).maps
    assert_same(maps, p.on_grid(FORMULAS[name](p)))


# Names for the same map


SAME = [
    ("cat", "ixg+plus"),
    ("gradsam(rows=read,mean=false)", "genatt+plus"),
    ("gradsam(preset=skipplus)", "genatt+plus"),
    ("focusvit(head_weights=uniform,m=1)", "genatt+from:1"),
    ("focusvit(head_weights=uniform)", "genatt+skipplus"),
    ("focusvit+layer:3", "focusvit(m=3)"),
    ("raw-attention+rollout", "rollout"),
    ("ixg+last", "ixg+layer:-1"),
    ("decompx+from:2", "decompx+skipplus"),
]


@pytest.mark.parametrize(("alias_of", "other_name"), SAME)
@pytest.mark.parametrize("kind", ["plain", "distilled", "avg", "map"])
def test_two_names_for_one_map(kind: str, alias_of: str, other_name: str) -> None:
    model, p = proven(kind)
    first, second = (cv.explain(model, p.pixels, name, target=TARGETS).maps for name in (alias_of, other_name))
    assert first.abs().max() > 0
    assert_same(first, second)


# LeGrad


@pytest.mark.parametrize("pool", ["mean", "model"])
@pytest.mark.parametrize(("kind", "fused"), both_ways(*(kind for kind in KINDS if not kind.startswith("map"))))
def test_legrad_is_autograd_through_one_block(kind: str, fused: bool, pool: str) -> None:
    model, p = proven(kind, fused)
    explanation = cv.explain(model, p.pixels, "legrad", target=TARGETS, pool=pool, layers=True)
    expected = torch.stack([p.on_grid(layer) for layer in ref.legrad(p, pool)])
    assert expected.abs().amax((1, 2, 3)).min() > 1e-6
    assert_same(explanation.layers, expected)
    assert_same(explanation.maps, expected.mean(0))


@pytest.mark.parametrize("kind", ["plain", "avg"])
def test_legrad_presets(kind: str) -> None:
    model, p = proven(kind)
    official = cv.explain(model, p.pixels, "legrad", target=TARGETS, preset="official").maps
    assert_same(official, p.on_grid(sum(ref.legrad(p)[-2:])))
    joita = cv.explain(model, p.pixels, "legrad", target=TARGETS, preset="joita").maps
    assert_same(joita, ref.legrad_joita(p))


@pytest.mark.parametrize(("kind", "fused"), both_ways("map", "map-cls", "map-two"))
def test_legrad_of_an_attention_pool(kind: str, fused: bool) -> None:
    model, p = proven(kind, fused)
    layers = ref.legrad_at_pool(p)
    maps = cv.explain(model, p.pixels, "legrad", target=TARGETS).maps
    assert_same(maps, p.on_grid(sum(layers) / len(layers)))
    official = cv.explain(model, p.pixels, "legrad", target=TARGETS, preset="official").maps
    assert_same(official, p.on_grid(sum(layers[-2:])))
    through_blocks = cv.explain(model, p.pixels, "legrad", target=TARGETS, pool="model").maps
    assert_same(through_blocks, p.on_grid(sum(ref.legrad(p, "model")) / p.depth))


def test_legrad_with_cls_pooling_has_gradient_on_the_cls_row_only() -> None:
    """METHODS 2.7: with the model's own pooling the mean over queries is one row over N."""
    model, p = proven("plain")
    rows = cv.explain(model, p.pixels, "legrad+last", target=TARGETS, pool="model").maps
    last = p.G[-1].clamp(min=0)[:, :, 0].mean(1) / p.A[-1].shape[-1]  # of the last block it is the ordinary G
    assert_same(rows, p.on_grid(last))


# Class activation maps and pixels


@pytest.mark.parametrize(("kind", "fused"), both_ways("plain", "registers", "distilled", "map"))
def test_gradcam_at_the_last_norm1(kind: str, fused: bool) -> None:
    model, p = proven(kind, fused)
    signed = ref.gradcam(p, p.module.blocks[-1].norm1)
    assert_same(cv.explain(model, p.pixels, "gradcam", target=TARGETS, relu=False).maps, signed)
    assert_same(cv.explain(model, p.pixels, "gradcam", target=TARGETS).maps, signed.clamp(min=0))


@pytest.mark.parametrize(("kind", "fused"), both_ways("avg", "avg-no-cls", "avg-token-norm"))
def test_gradcam_of_a_mean_pooled_model_is_at_its_final_norm(kind: str, fused: bool) -> None:
    model, p = proven(kind, fused)
    signed = ref.gradcam(p, p.module.norm)
    assert_same(cv.explain(model, p.pixels, "gradcam", target=TARGETS, relu=False).maps, signed)
    assert_same(cv.explain(model, p.pixels, "gradcam", target=TARGETS).maps, signed.clamp(min=0))


def pixel_gradient(p: Proof) -> Tensor:
    leaf = p.pixels.clone().requires_grad_(True)
    return torch.autograd.grad(score(p.module(leaf), p.classes), leaf)[0]


def patches_of(p: Proof, image: Tensor) -> Tensor:
    """[B, H, W] -> [B, rows, cols, pixels of a patch]."""
    return image.unfold(1, 4, 4).unfold(2, 4, 4).flatten(3)


@pytest.mark.parametrize("kind", ["plain", "registers", "avg-no-cls", "map", "torchvision"])
def test_saliency(kind: str) -> None:
    model, p = proven(kind)
    image = pixel_gradient(p).abs().max(1).values
    pixel = cv.explain(model, p.pixels, "saliency", target=TARGETS, level="pixel").maps
    assert_same(pixel, image)
    patch = cv.explain(model, p.pixels, "saliency", target=TARGETS).maps
    assert_same(patch, patches_of(p, image).mean(-1))


@pytest.mark.parametrize("kind", ["plain", "registers", "avg-no-cls", "map", "torchvision"])
def test_pixel_ixg_keeps_every_pixel(kind: str) -> None:
    model, p = proven(kind)
    product = (p.pixels * pixel_gradient(p)).sum(1)
    maps = cv.explain(model, p.pixels, "ixg", target=TARGETS, level="pixel").maps
    assert_same(maps, patches_of(p, product).sum(-1))
    assert_same(maps.sum((1, 2)), product.sum((1, 2)))


# Targets and scores


class Passes:
    """Counts what really runs: forwards of the module, and gradients that start at its logits."""

    def __init__(self, module: nn.Module) -> None:
        self.forwards = self.backwards = 0
        self._hook = module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, args: object, out: Tensor) -> None:
        self.forwards += 1
        if out.requires_grad:
            out.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self.backwards += 1

    def reset(self) -> None:
        """Forget the passes so far: those that look at a module which has a new hook."""
        self.forwards = self.backwards = 0

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()


TARGET_METHODS = ["ixg", "genatt", "legrad", "decompx", "attnlrp", "gradcam", "saliency", "rollout"]


@pytest.mark.parametrize(("kind", "fused"), both_ways("plain", "map"))
def test_several_targets_share_one_forward(kind: str, fused: bool) -> None:
    model, p = proven(kind, fused)
    image, classes = p.pixels[0], [3, 0, 4]
    with Passes(p.module) as passes:
        cv.explain(model, image)  # the first call looks at how the model is built
        passes.reset()
        together = cv.compare(model, image, TARGET_METHODS, targets=classes)
    assert (passes.forwards, passes.backwards) == (1, 3 * len(classes))  # one for each target and rule table
    for name in TARGET_METHODS:
        specific = together[name].class_specific
        assert together[name].classes == (tuple(classes) if specific else (None,) * len(classes))
        alone = [cv.explain(model, image, name, target=c).maps for c in classes]
        assert_same(together[name].maps, torch.cat(alone))


def test_retarget_is_another_backward_only() -> None:
    model, p = proven("registers")
    with Passes(p.module) as passes:
        cv.explain(model, p.pixels)
        passes.reset()
        first = cv.trace(model, p.pixels, target=1)
        second = first.retarget(3)
    assert (passes.forwards, passes.backwards) == (1, 2)
    alone = cv.trace(model, p.pixels, target=3)
    for again, expected in zip(second.layers, alone.layers, strict=True):
        assert_same(again.G, expected.G)
        assert_same(again.dx, expected.dx)


@pytest.mark.parametrize("name", ["ixg", "decompx+plus", "attnlrp", "cat", "ixg(level=pixel)"])
def test_contrast_is_the_difference(name: str) -> None:
    model, p = proven("distilled")
    both, a, b = (cv.explain(model, p.pixels, name, target=t).maps for t in (cv.Contrast(3, 1), 3, 1))
    assert_same(both, a - b)


def test_contrast_of_nonlinear_methods_is_of_the_score() -> None:
    """relu is not linear, so a contrast is more than a difference of maps: G of y_a - y_b."""
    model, p = proven("plain")
    a, b = (ref.prove(p.module, p.pixels, [c] * 2) for c in (3, 1))
    G = [first - second for first, second in zip(a.G, b.G, strict=True)]
    expected = sum(p.read((A * g).clamp(min=0).mean(1)) for A, g in zip(p.A, G, strict=True))
    maps = cv.explain(model, p.pixels, "genatt+plus", target=cv.Contrast(3, 1)).maps
    assert_same(maps, p.on_grid(expected))


@pytest.mark.parametrize("name", ["ixg", "attcat", "attcam(relu=false)", "genatt+plus", "saliency", "legrad"])
def test_gradient_of_the_probability_is_p_times_that_of_its_logarithm(name: str) -> None:
    model, p = proven("plain")
    prob, logprob, loss = (
        cv.explain(model, p.pixels, name, target=2, score=kind).maps for kind in ("prob", "logprob", "neg_loss")
    )
    chance = p.module(p.pixels).softmax(-1)[:, 2].detach()
    if name != "legrad":  # each of its layers has a score, hence a probability, of its own
        assert_same(prob, chance[:, None, None] * logprob)
    assert not torch.allclose(prob, logprob, rtol=0.1)
    assert_same(loss, logprob)


@pytest.mark.parametrize("kind", ["prob", "logprob"])
def test_scores_by_brute_force(kind: str) -> None:
    model, p = proven("registers")
    run = forward(p.vit, p.vit.embed(p.pixels))
    values = {"prob": run.logits.softmax(-1), "logprob": run.logits.log_softmax(-1)}[kind]
    gradients = torch.autograd.grad(score(values, TARGETS), run.A)
    trace = cv.trace(model, p.pixels, target=TARGETS, score=kind)
    for layer, G in zip(trace.layers, gradients, strict=True):
        assert_same(layer.G, G)


def test_a_function_of_the_output_as_target() -> None:
    model, p = proven("plain")
    maps = cv.explain(model, p.pixels, "ixg", target=lambda logits: logits[:, 3] - logits[:, 1]).maps
    assert_same(maps, cv.explain(model, p.pixels, "ixg", target=cv.Contrast(3, 1)).maps)


# Counts


@pytest.mark.parametrize(("kind", "fused"), both_ways("plain", "registers", "avg", "map"))
def test_all_methods_cost_one_forward_and_a_backward_for_each_table(kind: str, fused: bool) -> None:
    """LeGrad adds gradients of single blocks (METHODS 0.4, T2), none of which starts at the logits."""
    model, p = proven(kind, fused)
    pooling = cv.trace(model, p.pixels, target=TARGETS).layout.pooling
    methods = [
        m
        for m in list_methods()
        if m.extra_cost.passes is None and (not m.requirements().poolings or pooling in m.requirements().poolings)
    ]
    names, tables = [m.name for m in methods], {table for m in methods for table in m.tables}
    assert {"rollout", "legrad", "decompx", "attnlrp", "transatt", "lrp"} <= set(names)
    assert tables == {"plain", "linear", "attnlrp", "reslrp", "libra", "chefer", "lrp", "deep-taylor"}
    with Passes(p.module) as passes:
        cv.explain(model, p.pixels)  # the first call looks at how the model is built
        passes.reset()
        comparison = cv.compare(model, p.pixels, names, target=TARGETS)
    assert len(comparison) == len(names)
    assert (passes.forwards, passes.backwards) == (1, len(tables))
    assert (comparison.cost.forwards, comparison.cost.backwards) == (1, len(tables))


def test_attention_methods_make_no_backward() -> None:
    model, p = proven("plain")
    with Passes(p.module) as passes:
        cv.explain(model, p.pixels)
        passes.reset()
        comparison = cv.compare(model, p.pixels, ["rollout", "raw-attention", "rollout(fusion=max)"])
    assert (passes.forwards, passes.backwards) == (1, 0)
    assert (comparison.cost.forwards, comparison.cost.backwards) == (1, 0)


@pytest.mark.parametrize("name", ["genatt", "gmar-l2", "gradcam", "ixg+plus", "decompx+skipplus"])
def test_one_method_costs_one_backward(name: str) -> None:
    model, p = proven("plain")
    with Passes(p.module) as passes:
        cv.explain(model, p.pixels)
        passes.reset()
        explanation = cv.explain(model, p.pixels, name, target=[0, CLASSES - 1])
    assert (passes.forwards, passes.backwards) == (1, 1)
    assert (explanation.cost.forwards, explanation.cost.backwards) == (1, 1)
