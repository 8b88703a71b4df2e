"""SmoothGrad, Integrated Gradients and TAM against loops written out here: plain autograd, one pass at a time, float64.

The noise of SmoothGrad is read off what the module is given, so that the proof does not share the way it was drawn.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit._rng import image_seeds
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods import multi_pass
from clairvit.methods.spec import resolve_method
from clairvit.tracing.trace import Trace
from helpers import reference_maps as ref
from helpers import tiny_models as tiny
from helpers.custom_vits import HomeMade
from helpers.exact_models import TARGETS, build, images_for, wrapped
from helpers.reference_maps import Proof
from helpers.reference_vit import ViT, forward, score, written_out
from helpers.rounding import DEFAULT_GROWTH, assert_same, same

KINDS = ["plain", "registers", "distilled", "avg", "avg-no-cls", "map", "map-cls", "torchvision"]
NEAR_ZERO = 1e3 * DEFAULT_GROWTH  # a path from tokens of zero: there LayerNorm divides by sqrt(eps) = 1e-3


@functools.cache
def proven(kind: str, depth: int = 3) -> tuple[cv.Model, Proof]:
    module = build(kind, depth=depth)
    return wrapped(module), ref.prove(module, images_for(module), TARGETS)


def pixel_gradient(module: nn.Module, pixels: Tensor, classes: list[int]) -> Tensor:
    leaf = pixels.detach().clone().requires_grad_(True)
    return torch.autograd.grad(score(module(leaf), classes), leaf)[0]


def target_scores(logits: Tensor, classes: list[int]) -> Tensor:
    return logits.detach()[torch.arange(len(classes)), torch.tensor(classes)]


def patches_of(image: Tensor) -> Tensor:
    """[B, H, W] -> [B, rows, cols, pixels of a patch], patches of 4 × 4."""
    return image.unfold(1, 4, 4).unfold(2, 4, 4).flatten(3)


class Seen:
    """What a module was given, in images, and how many images went back through its scores."""

    def __init__(self, module: nn.Module) -> None:
        self.pixels: list[Tensor] = []
        self.back = 0
        self._hooks = [
            module.register_forward_pre_hook(lambda _, args: self.pixels.append(args[0].detach())),
            module.register_forward_hook(self._forward),
        ]

    def _forward(self, module: nn.Module, args: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self.back += len(gradient)

    @property
    def forth(self) -> int:
        return sum(map(len, self.pixels))

    def reset(self) -> None:
        """Forget the passes so far: those that look at a module which has a new hook."""
        self.pixels.clear()
        self.back = 0

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


# SmoothGrad


def smoothed(kind: str, text: str, **options: Any) -> tuple[Tensor, Tensor, Proof]:
    """The maps, and the noisy images [n, B, 3, H, W] that the module was given."""
    model, p = proven(kind)
    with Seen(p.module) as seen:
        cv.explain(model, p.pixels)
        seen.reset()
        maps = cv.explain(model, p.pixels, text, target=TARGETS, **options).maps
    return maps, torch.cat(seen.pixels[1:]).unflatten(0, (-1, 2)), p


# What is typed -> what one noisy image says, and how its mean over noise becomes patches.
SMOOTH: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "smoothgrad(n=7)": (lambda x, g: g, lambda m: patches_of(m.abs().max(1).values).mean(-1)),
    "smoothgrad(n=7,each=abs)": (lambda x, g: g.abs(), lambda m: patches_of(m.max(1).values).mean(-1)),
    "smoothgrad(n=7,each=square)": (lambda x, g: g**2, lambda m: patches_of(m.max(1).values).mean(-1)),
    "smoothgrad(n=7,base=ixg)": (lambda x, g: x * g, lambda m: patches_of(m.sum(1)).sum(-1)),
    "smoothgrad(n=7,base=ixg,each=abs)": (lambda x, g: (x * g).abs(), lambda m: patches_of(m.sum(1)).sum(-1)),
    "smoothgrad(n=7,base=ixg,each=square)": (lambda x, g: (x * g) ** 2, lambda m: patches_of(m.sum(1)).sum(-1)),
    "smoothgrad(n=7,level=pixel)": (lambda x, g: g, lambda m: m.abs().max(1).values),
    "smoothgrad(n=7,base=ixg,level=pixel)": (lambda x, g: x * g, lambda m: m.sum(1)),
}


@pytest.mark.parametrize("text", SMOOTH)
@pytest.mark.parametrize("kind", ["plain", "map"])
def test_smoothgrad_is_the_mean_over_noisy_images(kind: str, text: str) -> None:
    maps, noisy, p = smoothed(kind, text)
    assert len(noisy) == 7
    says, pooled = SMOOTH[text]
    total = sum(says(x, pixel_gradient(p.module, x, TARGETS)) for x in noisy)
    assert_same(maps, pooled(total / 7))


def test_noise_has_the_stated_width_and_is_always_new() -> None:
    """std sigma·(max − min) of each image; draws do not repeat and do not lean to a side."""
    module = build("plain")
    pixels = images_for(module) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    with Seen(module) as seen:
        cv.explain(wrapped(module), pixels, "smoothgrad", target=TARGETS, sigma=0.2)
    noise = torch.cat(seen.pixels[-1:]).unflatten(0, (-1, 2)) - pixels  # [50, 2, 3, H, W], all in one call
    assert len(noise) == 50
    for i in range(2):
        spread = 0.2 * (pixels[i].max() - pixels[i].min())
        assert float(noise[:, i].std() / spread) == pytest.approx(1, abs=0.02)
        assert abs(float(noise[:, i].mean() / spread)) < 0.02
    flat = noise.flatten(2) / noise.flatten(2).std(-1, keepdim=True)
    alike = torch.einsum("kid,mjd->kimj", flat, flat) / flat.shape[-1]
    alike.view(100, 100).fill_diagonal_(0)
    assert alike.abs().max() < 0.25  # 720 numbers: one in 10¹⁰ pairs would reach it


def test_no_noise_is_saliency() -> None:
    model, p = proven("registers")
    still, plain = (
        cv.explain(model, p.pixels, m, target=TARGETS).maps for m in ("smoothgrad(sigma=0,n=3)", "saliency")
    )
    assert_same(still, plain)


def test_an_image_has_the_same_noise_in_any_batch() -> None:
    module = build("plain")
    model, pixels = wrapped(module), images_for(module, count=3)
    together = cv.explain(model, pixels, "smoothgrad", target=[1, 2, 0], n=9).maps
    turned = cv.explain(model, pixels[[2, 0, 1]], "smoothgrad", target=[0, 1, 2], n=9).maps
    assert_same(turned, together[[2, 0, 1]])
    for i, target in enumerate([1, 2, 0]):
        assert_same(cv.explain(model, pixels[i], "smoothgrad", target=target, n=9).maps[0], together[i])


def test_noise_follows_the_seed() -> None:
    model, p = proven("plain")
    first, again, second = (
        cv.explain(model, p.pixels, "smoothgrad", target=TARGETS, n=4, seed=seed) for seed in (5, 5, -6)
    )
    assert torch.equal(first.maps, again.maps)
    assert not same(first.maps, second.maps)
    assert (first.seed, second.seed) == (5, -6)


def test_more_noise_starts_with_the_same_noise() -> None:
    """n=4 are the first four of n=9, so that results converge and do not jump."""
    few, many = (smoothed("plain", f"smoothgrad(n={n})")[1] for n in (4, 9))
    assert torch.equal(many[:4], few)


def test_noise_is_the_same_in_every_precision() -> None:
    image = images_for(build("plain"))[0]
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    assert len({tuple(image_seeds(image[None].to(dtype), 3)) for dtype in dtypes}) == 1
    assert image_seeds(image[None], 3) != image_seeds(image[None], 4)
    assert image_seeds(image[None], 3) != image_seeds(image[None] + 0.1, 3)
    assert image_seeds(image[None], 3) != image_seeds(image[None].flip(-1), 3)
    assert image_seeds(torch.stack([image, image + 0.1]), 3)[1:] == image_seeds(image[None] + 0.1, 3)


# Integrated Gradients


def points(rule: str, n: int) -> list[tuple[float, float]]:
    """(alpha, weight), written out."""
    if rule == "midpoint":
        return [((k + 0.5) / n, 1 / n) for k in range(n)]
    if rule == "right":
        return [((k + 1) / n, 1 / n) for k in range(n)]
    if rule == "trapezoid":
        return [(k / (n - 1), (0.5 if k in (0, n - 1) else 1) / (n - 1)) for k in range(n)]
    if rule == "crowded":
        return [(((k + 0.5) / n) ** 4, ((k + 1) / n) ** 4 - (k / n) ** 4) for k in range(n)]
    nodes, weights = np.polynomial.legendre.leggauss(n)
    return [(float(a + 1) / 2, float(w) / 2) for a, w in zip(nodes, weights, strict=True)]


RULES = ["midpoint", "right", "trapezoid", "crowded", "gauss"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["plain", "registers", "avg-no-cls", "map", "torchvision"])
def test_integrated_gradients_of_pixels(kind: str, rule: str) -> None:
    model, p = proven(kind)
    slope = sum(w * pixel_gradient(p.module, a * p.pixels, TARGETS) for a, w in points(rule, 6))
    expected = (p.pixels * slope).sum(1)
    options: dict[str, Any] = {"steps": 6, "rule": rule}
    assert_same(
        cv.explain(model, p.pixels, "integrated-gradients", target=TARGETS, **options).maps,
        patches_of(expected).sum(-1),
    )
    fine = cv.explain(model, p.pixels, "integrated-gradients", target=TARGETS, level="pixel", **options).maps
    assert_same(fine, expected)


@pytest.mark.parametrize(("baseline", "level"), [("black", 0.0), ("white", 1.0)])
def test_integrated_gradients_from_another_colour(baseline: str, level: float) -> None:
    model, p = proven("plain")
    start = torch.full_like(p.pixels, (level - 0.5) / 0.5)  # the model's mean and std are 0.5
    slope = sum(w * pixel_gradient(p.module, start + a * (p.pixels - start), TARGETS) for a, w in points("midpoint", 6))
    maps = cv.explain(model, p.pixels, "integrated-gradients", target=TARGETS, steps=6, baseline=baseline).maps
    assert_same(maps, patches_of(((p.pixels - start) * slope).sum(1)).sum(-1))


def token_shares(vit: ViT, x0: Tensor, rule: str, n: int) -> Tensor:
    """[B, N]: the path from zeros at the patches, prefix kept, through the model written out by hand."""
    start = x0.clone()
    start[:, vit.prefix :] = 0
    slope = torch.zeros_like(x0)
    for a, w in points(rule, n):
        leaf = (start + a * (x0 - start)).requires_grad_(True)
        slope += w * torch.autograd.grad(score(forward(vit, leaf).logits, TARGETS), leaf)[0]
    return ((x0 - start) * slope).sum(-1)


@pytest.mark.parametrize("rule", ["midpoint", "crowded"])
@pytest.mark.parametrize("kind", KINDS)
def test_integrated_gradients_of_tokens(kind: str, rule: str) -> None:
    model, p = proven(kind)
    options: dict[str, Any] = {"steps": 6, "rule": rule, "path": "token"}
    maps = cv.explain(model, p.pixels, "integrated-gradients", target=TARGETS, **options).maps
    assert_same(maps, p.on_grid(token_shares(p.vit, p.x[0], rule, 6)), growth=NEAR_ZERO)


@pytest.mark.parametrize("kind", ["home-matmul", "home-lucid", "home-sequence-first", "home-encoder-post-norm"])
def test_tokens_are_replaced_for_everybody_who_reads_them(kind: str) -> None:
    """Where a block is no module of its own the residual runs beside it; it must start from the same tokens."""
    module = tiny.build(kind).double()
    assert isinstance(module, HomeMade)
    pixels = tiny.pixels(kind, dtype=torch.float64)
    x0 = module.tokens(pixels).detach()
    start = torch.cat([x0[:, :1], torch.zeros_like(x0[:, 1:])], 1)
    slope = torch.zeros_like(x0)
    for a, w in points("crowded", 5):
        leaf = (start + a * (x0 - start)).requires_grad_(True)
        logits = module.head(module.norm(module.through(leaf * 1))[:, 0])
        slope += w * torch.autograd.grad(score(logits, TARGETS), leaf)[0]
    expected = ((x0 - start) * slope).sum(-1)[:, 1:].reshape(2, *tiny.ZOO[kind].grid)
    text = "integrated-gradients(path=token,rule=crowded,steps=5)"
    assert_same(cv.explain(cv.wrap(module), pixels, text, target=TARGETS).maps, expected, growth=NEAR_ZERO)


@pytest.mark.parametrize(
    ("rule", "order"), [("midpoint", 2), ("right", 1), ("trapezoid", 2), ("crowded", 2), ("gauss", 9)]
)
def test_completeness_is_reached_at_the_order_of_the_rule(rule: str, order: int) -> None:
    """The map adds up to y(x) − y(0); twice the steps leave 1/2^order of the gap."""
    model, p = proven("plain")
    rise = target_scores(p.module(p.pixels) - p.module(0 * p.pixels), TARGETS)
    gaps = []
    for n in (40, 80, 160):
        maps = cv.explain(model, p.pixels, "integrated-gradients", target=TARGETS, steps=n, rule=rule).maps
        gaps.append((maps.sum((1, 2)) - rise).abs().max())
    if order < 9:
        assert float(torch.log2(gaps[1] / gaps[2])) == pytest.approx(order, abs=0.3)
        assert gaps[2] < 0.02 * rise.abs().max()
    else:
        assert gaps[2] < 1e-6 * rise.abs().max()


def test_completeness_of_the_token_path() -> None:
    model, p = proven("registers")
    start = p.x[0].clone()
    start[:, p.vit.prefix :] = 0
    rise = target_scores(p.true.run.logits - forward(p.vit, start).logits, TARGETS)
    gaps = []
    for n in (50, 400):
        text = f"integrated-gradients(path=token,rule=crowded,steps={n})"
        gaps.append((cv.explain(model, p.pixels, text, target=TARGETS).maps.sum((1, 2)) - rise).abs().max())
    assert gaps[0] < 0.05 * rise.abs().max()
    assert gaps[1] < 1e-3 * rise.abs().max()


def test_the_residual_is_noted() -> None:
    model, p = proven("plain")
    explanation = cv.explain(model, p.pixels, "integrated-gradients", target=TARGETS, steps=3)
    rise = target_scores(p.module(p.pixels) - p.module(0 * p.pixels), TARGETS)
    (note,) = explanation.notes
    numbers = re.fullmatch(
        r"integrated-gradients: completeness: the score rises by (\S+), (\S+) from the baseline and the map adds up to "
        r"(\S+), (\S+); residual (\S+) \((\S+)%\), (\S+) \((\S+)%\)(?:; more steps should make it smaller)?",
        note,
    )
    assert numbers is not None, note
    printed_numbers = [float(n) for n in numbers.groups()]
    gap = explanation.maps.sum((1, 2)) - rise
    assert printed_numbers[:2] == pytest.approx(rise.tolist(), rel=0.01)
    assert printed_numbers[2:4] == pytest.approx(explanation.maps.sum((1, 2)).tolist(), rel=0.01)
    assert [printed_numbers[4], printed_numbers[6]] == pytest.approx(gap.tolist(), rel=0.06)
    assert [printed_numbers[5], printed_numbers[7]] == pytest.approx(
        (100 * gap / rise).abs().tolist(), rel=0.02, abs=0.06
    )
    assert ("more steps" in note) == bool(((gap / rise).abs() > 0.05).any())
    explanation = cv.explain(model, p.pixels, "integrated-gradients(path=token,steps=3)", target=TARGETS)
    assert explanation.notes[0].endswith("%); rule=crowded or more steps should make it smaller")


# Linear models: everything is known


class Linear(nn.Module):
    """One weight for each value of each pixel; no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 5).double()

    def forward(self, image: Tensor) -> Tensor:
        return self.head(image.flatten(1))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "trapezoid"])
def test_integrated_gradients_of_a_linear_model_is_exact_in_one_step(rule: str) -> None:
    torch.manual_seed(0)
    module, pixels = Linear(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    weight = module.head.weight[TARGETS].detach().view(2, 3, 8, 8)
    explanation = cv.explain(cv.wrap(module), pixels, "integrated-gradients", target=TARGETS, steps=1, rule=rule)
    assert_same(explanation.maps, (weight * pixels).sum(1))
    assert explanation.notes[0].count("(0.0%)") == 2


def test_smoothgrad_of_a_linear_model_does_not_see_the_noise() -> None:
    torch.manual_seed(0)
    module, pixels = Linear(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    weight = module.head.weight[TARGETS].detach().view(2, 3, 8, 8)
    assert_same(cv.explain(cv.wrap(module), pixels, "smoothgrad", target=TARGETS, n=3).maps, weight.abs().amax(1))
    squares = cv.explain(cv.wrap(module), pixels, "smoothgrad", target=TARGETS, n=3, each="square").maps
    assert_same(squares, weight.square().amax(1))


@pytest.mark.parametrize("text", ["tam", "integrated-gradients(path=token)"])
def test_a_model_without_tokens_is_refused(text: str) -> None:
    with pytest.raises(NotApplicable, match=r"No patch tokens were found .* Use a method of pixel gradients: saliency"):
        cv.explain(cv.wrap(Linear()), torch.randn(2, 3, 8, 8, dtype=torch.float64), text, target=1)


# TAM


def transition(p: Proof, alphas: list[float], start: int, first_state: bool = False) -> Tensor:
    """METHODS 1.4, step by step: whole matrices, one image brightness after the other."""
    G = torch.zeros_like(p.A[-1])
    for alpha in alphas:
        run = forward(p.vit, p.vit.embed(alpha * p.pixels))
        G += torch.autograd.grad(score(run.logits, TARGETS), run.A[-1])[0]
    w = p.read((G / len(alphas)).clamp(min=0).mean(1))
    s = p.read(p.A[-1].mean(1))
    for layer in range(p.depth - 2, start - 1, -1):
        if not first_state:
            s = torch.einsum("bi,bij->bj", s, p.A[layer].mean(1) + p.identity)
    return p.on_grid(s * w)


@pytest.mark.parametrize("kind", KINDS)
def test_tam_is_twenty_gradients_and_a_chain(kind: str) -> None:
    model, p = proven(kind, depth=7)
    alphas = torch.linspace(0, 1, 20, dtype=torch.float64).tolist()
    expected = transition(p, alphas, start=4)
    assert expected.abs().max() > 0
    explanation = cv.explain(model, p.pixels, "tam", target=TARGETS)
    assert_same(explanation.maps, expected)
    assert explanation.notes == ()


@pytest.mark.parametrize(
    ("text", "alphas", "options"),
    [
        ("tam(steps=4)", [0, 1 / 3, 2 / 3, 1], {"start": 4}),
        ("tam(with_integral=false)", [1], {"start": 4}),
        ("tam(steps=1)", [1], {"start": 4}),
        ("tam(steps=3,start_layer=0)", [0, 0.5, 1], {"start": 0}),
        ("tam(steps=3,start_layer=-3)", [0, 0.5, 1], {"start": 4}),
        ("tam(steps=3,start_layer=5)", [0, 0.5, 1], {"start": 5}),
        ("tam(steps=3,first_state=true)", [0, 0.5, 1], {"start": 4, "first_state": True}),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "avg"])
def test_tam_options(kind: str, text: str, alphas: list[float], options: dict[str, Any]) -> None:
    model, p = proven(kind, depth=7)
    assert_same(cv.explain(model, p.pixels, text, target=TARGETS).maps, transition(p, alphas, **options))


@pytest.mark.parametrize(("depth", "layer"), [(1, 0), (2, 0), (3, 1), (5, 3)])
def test_tam_of_a_shallow_model_says_where_its_chain_ends(depth: int, layer: int) -> None:
    model, p = proven("plain", depth=depth)
    explanation = cv.explain(model, p.pixels, "tam(steps=2)", target=TARGETS)
    assert explanation.notes == (
        f"tam: start_layer=4 leaves no chain in {depth} layers; it was taken down to layer {layer}",
    )
    assert_same(explanation.maps, transition(p, [0, 1], start=layer))
    assert cv.explain(model, p.pixels, "tam(steps=2,first_state=true)", target=TARGETS).notes == ()


def test_tam_by_layer_is_the_chain_that_ends_there() -> None:
    model, p = proven("plain")
    explanation = cv.explain(model, p.pixels, "tam(steps=2,start_layer=1)", target=TARGETS, layers=True)
    assert explanation.layers is not None
    assert len(explanation.layers) == p.depth
    assert torch.equal(explanation.layers[1], explanation.maps)
    for layer in range(p.depth - 1):
        chain = cv.explain(model, p.pixels, f"tam(steps=2,start_layer={layer})", target=TARGETS)
        assert_same(explanation.layers[layer], chain.maps)
        assert chain.layers is None, "not asked for"
    attention = cv.explain(model, p.pixels, "tam(steps=2,first_state=true)", target=TARGETS)
    assert_same(explanation.layers[-1], attention.maps)


def test_tam_of_windowed_attention_is_refused() -> None:
    strange = tiny.STRANGE["swin"]
    model = cv.wrap(tiny.strange(strange.make), size=strange.size)
    with pytest.raises(NotApplicable, match=r"not between all image tokens.* Use a gradient method"):
        cv.explain(model, torch.randn(1, 3, *strange.size), "tam", target=0)


# Passes


PASSES = {
    "smoothgrad": (51, 50),  # the image itself, for its scores
    "smoothgrad(n=3)": (4, 3),
    "integrated-gradients": (52, 50),  # the image and the baseline, for the residual
    "integrated-gradients(steps=4,path=token)": (6, 4),
    "tam": (20, 20),
    "tam(steps=5)": (5, 5),
    "tam(with_integral=false)": (1, 1),
    "tam(with_integral=false,steps=5)": (1, 1),
}


@pytest.mark.parametrize("text", PASSES)
def test_cost_is_what_the_module_sees(text: str) -> None:
    model, p = proven("plain")
    with Seen(p.module) as seen:
        cv.explain(model, p.pixels)
        seen.reset()
        explanation = cv.explain(model, p.pixels, text, target=TARGETS)
    forwards, backwards = PASSES[text]
    assert (resolve_method(text).cost.forwards, resolve_method(text).cost.backwards) == (forwards, backwards)
    assert (explanation.cost.forwards, explanation.cost.backwards) == (forwards, backwards)
    assert (seen.forth / 2, seen.back / 2) == (forwards, backwards)


def test_costs_of_a_comparison_add_up() -> None:
    model, p = proven("plain")
    names = ["smoothgrad(n=3)", "genatt", "integrated-gradients(steps=4)", "decompx", "tam(steps=5)", "rollout"]
    with Seen(p.module) as seen:
        cv.explain(model, p.pixels)
        seen.reset()
        comparison = cv.compare(model, p.pixels, names, target=TARGETS)
    assert (comparison.cost.forwards, comparison.cost.backwards) == (1 + 3 + 5 + 4, 2 + 3 + 4 + 4)
    assert (seen.forth / 2, seen.back / 2) == (comparison.cost.forwards, comparison.cost.backwards)
    assert (comparison["genatt"].cost.forwards, comparison["genatt"].cost.backwards) == (1, 1)
    assert (comparison["tam(steps=5)"].cost.forwards, comparison["tam(steps=5)"].cost.backwards) == (5, 5)
    for name in names:
        assert_same(comparison[name].maps, cv.explain(model, p.pixels, name, target=TARGETS).maps)


def test_variants_go_through_the_model_together() -> None:
    """50 noisy versions of two small images are one call; of large ones, as many as fit."""
    model, p = proven("plain")
    with Seen(p.module) as seen:
        cv.explain(model, p.pixels)
        seen.reset()
        cv.explain(model, p.pixels, "smoothgrad", target=TARGETS)
    assert [len(pixels) for pixels in seen.pixels] == [2, 100]


TEXTS = ["smoothgrad(n=5)", "integrated-gradients(steps=5)", "integrated-gradients(path=token,steps=5)", "tam(steps=5)"]


@pytest.mark.parametrize("text", TEXTS)
def test_how_many_go_together_changes_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, p = proven("registers")
    usual = cv.explain(model, p.pixels, text, target=TARGETS)
    for at_once in (1, 4 * 12 * 20):
        monkeypatch.setattr(multi_pass, "PIXELS_AT_ONCE", at_once)
        explanation = cv.explain(model, p.pixels, text, target=TARGETS)
        assert_same(explanation.maps, usual.maps)
        assert (explanation.cost.forwards, explanation.cost.backwards) == (usual.cost.forwards, usual.cost.backwards)


@pytest.mark.parametrize("text", TEXTS)
def test_fewer_go_together_where_memory_ends(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, p = proven("plain")
    usual = cv.explain(model, p.pixels, text, target=TARGETS).maps
    again, sizes = Trace.rerun, []

    def small(self: Trace, other: Tensor, *args: Any, **options: Any) -> Trace:
        sizes.append(len(other))
        if len(other) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return again(self, other, *args, **options)

    monkeypatch.setattr(Trace, "rerun", small)
    assert_same(cv.explain(model, p.pixels, text, target=TARGETS).maps, usual)
    assert max(sizes) > 4
    with monkeypatch.context() as tight:
        tight.setattr(Trace, "rerun", lambda self, other, *_, **__: small(self, torch.cat([other] * 9)))
        with pytest.raises(torch.OutOfMemoryError):
            cv.explain(model, p.pixels, text, target=TARGETS)


@pytest.mark.parametrize("text", TEXTS)
def test_a_target_function_sees_the_batch_it_was_made_for(text: str) -> None:
    """It may know the images by their place, so it is never given several variants at once."""
    model, p = proven("plain")

    def target_score(logits: Tensor) -> Tensor:
        assert len(logits) == 2
        return logits[torch.arange(2), torch.tensor(TARGETS)]

    expected = cv.explain(model, p.pixels, text, target=TARGETS).maps
    assert_same(cv.explain(model, p.pixels, text, target=target_score).maps, expected)


@pytest.mark.parametrize("text", TEXTS)
def test_other_rules_beside_them_change_nothing(text: str) -> None:
    """Only the trace of the other table is there; their own passes are plain all the same."""
    model, p = proven("plain")
    alone = cv.explain(model, p.pixels, text, target=TARGETS).maps
    for other in ("attnlrp", "decompx", "legrad", "rollout"):
        assert_same(cv.compare(model, p.pixels, [other, text], target=TARGETS)[text].maps, alone)


@pytest.mark.parametrize("text", TEXTS)
def test_a_score_other_than_the_logit(text: str) -> None:
    """dp = p d(log p) at every point of the way, so maps differ, and add up to another rise."""
    model, p = proven("plain")
    prob, logit = (cv.explain(model, p.pixels, text, target=TARGETS, score=s) for s in ("prob", "logit"))
    assert not same(prob.maps, logit.maps)
    assert prob.maps.isfinite().all()


def test_a_trace_runs_again() -> None:
    """The tool that methods are given: the same as a new trace, and counted."""
    model, p = proven("registers")
    tr = cv.trace(model, p.pixels, target=TARGETS)
    other = torch.cat([0.5 * p.pixels, -p.pixels])
    again, new = tr.rerun(other), cv.trace(model, other, target=TARGETS * 2)
    assert_same(again.dpixels, new.dpixels)
    for a, b in zip(again.layers, new.layers, strict=True):
        assert_same(a.G, b.G)
        assert_same(a.dx, b.dx)
    assert again.target.classes == tuple(TARGETS * 2)
    assert (tr.recording.forwards, tr.recording.backwards) == (3, 3)
    assert_same(tr.rerun(other, None).logits, new.logits)
    assert (tr.recording.forwards, tr.recording.backwards) == (5, 3)
    assert not any(call.requires_grad for call in again.recording.calls)  # the graph is gone


# Refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smoothgrad(n=0)", r"n=0 was given; expected 1 or more passes, such as n=50"),
        (
            "smoothgrad(sigma=-1)",
            r"sigma=-1 was given; expected 0 or more parts of the image's range, such as sigma=0.1",
        ),
        ("smoothgrad(base=gradd)", r"base=gradd was given; expected 'grad' or 'ixg'.*'grad'"),
        ("integrated-gradients(steps=0)", r"steps=0 was given; expected 1 or more passes, such as steps=50"),
        ("integrated-gradients(rule=trapezoid,steps=1)", r"steps=1 was given with rule=trapezoid.* expected 2 or more"),
        ("integrated-gradients(path=token,level=pixel)", r"path=token was given with baseline=zero and level=pixel;.*"),
        ("integrated-gradients(path=token,baseline=black)", r"Leave both out, or use path=pixel"),
        ("tam(steps=-2)", r"steps=-2 was given; expected 1 or more passes"),
        ("tam(start_layer=-9)", r"Layer -9 was asked of a model with 3 layers; expected -3…2"),
    ],
)
def test_options_that_make_no_sense(text: str, message: str) -> None:
    model, p = proven("plain")
    with pytest.raises(BadInput, match=message):
        cv.explain(model, p.pixels, text, target=TARGETS)


def test_blocks_that_are_no_modules_have_no_token_path() -> None:
    model = tiny.wrapped("home-loop")
    with pytest.raises(NotApplicable, match=r"Layer 0 is not a module of its own.* Use a method"):
        cv.explain(model, tiny.pixels("home-loop"), "integrated-gradients(path=token)", target=1)


def test_written_out_is_the_module() -> None:
    """What the proofs above stand on."""
    for kind in KINDS:
        _, p = proven(kind)
        assert_same(forward(written_out(p.module), p.vit.embed(p.pixels)).logits, p.module(p.pixels))
