"""FullGrad and FullGrad+ against biases that are leaves of their own in a model written out by hand; float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.fullgrad import completeness_sums
from clairvit.tracing.recorders.bias_terms import BiasMaps, BiasTerms, ImplicitBiasTerms, LearnedBiasTerms
from clairvit.tracing.recording import record
from clairvit.tracing.trace import Trace, one_target, run_backward
from helpers.covering import covering_array, model_traits, some_models
from helpers.exact_models import TARGETS, both_ways, build, images_for, wrapped
from helpers.reference_vit import ACTIVATIONS, Attention, Linear, Mlp, Norm, ViT, score, written_out
from helpers.rounding import assert_same
from helpers.tiny_models import STRANGE, TINY, ZOO, cnn, pixels, strange
from helpers.tiny_models import wrapped as tiny_model
from parity.tiny_vit import seeded

DEPTH = 3
FIXTURES = Path(__file__).parent.parent / "fixtures"


# The model by hand: at each operation, what it leaves (b) and a leaf of zeros, whose gradient is that of the output.


@dataclass
class Book:
    """`bent`: all that J·in leaves. `frozen`: METHODS 0.4, the linearised backward."""

    bent: bool = False
    frozen: bool = False
    block: int = 0
    marks: list[tuple[int, str, Tensor, Tensor]] = field(default_factory=list)

    def mark(self, out: Tensor, b: Tensor, place: str) -> Tensor:
        leaf = torch.zeros_like(out).requires_grad_(True)
        self.marks.append((self.block, place, b.detach(), leaf))
        return out + leaf

    def linear(self, part: Linear, x: Tensor, place: str) -> Tensor:
        return self.mark(part(x), part.b, place)

    def norm(self, part: Norm | None, x: Tensor, place: str) -> Tensor:
        if part is None:
            return x
        sigma = part.sigma(x).detach() if self.frozen else part.sigma(x)
        out = part.gamma * part.centre(x) / sigma + part.beta
        # d/dt of (t x − t m) / sqrt(t² v + eps) at t = 1 is (x − m) eps / (v + eps)^(3/2)
        slope = part.gamma * part.centre(x) * part.eps / sigma**3
        return self.mark(out, out - slope if self.bent else part.beta, place)

    def left(self, out: Tensor, b: Tensor, place: str) -> Tensor:
        return self.mark(out, b, place) if self.bent else out

    def attend(self, part: Attention, x: Tensor) -> Tensor:
        h = self.norm(part.norm, x, "tokens")
        q, k, v = (part.split(self.linear(layer, h, "tokens")) for layer in (part.q, part.k, part.v))
        q, k = self.norm(part.q_norm, q, "heads"), self.norm(part.k_norm, k, "heads")
        q, k = (part.turn(t) if part.turn else t for t in (q, k))
        S = q @ k.transpose(-2, -1) / math.sqrt(part.size)
        S = self.left(S, -S, "heads")
        if part.bias is not None:
            S = self.left(S + part.bias, part.bias, "heads")
        return self.mix(S, v, "heads", part, x)

    def mix(self, S: Tensor, v: Tensor, place: str, part: Attention, x: Tensor) -> Tensor:
        A = S.softmax(-1)
        A = A.detach() if self.frozen else self.left(A, A - A * (S - (A * S).sum(-1, keepdim=True)), place)
        O = A @ v  # noqa: E741
        O = self.left(O, -O, place)  # noqa: E741
        joined = self.norm(part.sub_norm, O.transpose(1, 2).flatten(2), "tokens")
        return x + part.g1 * self.linear(part.out, joined, "tokens")

    def transform(self, part: Mlp, x: Tensor, place: str) -> Tensor:
        h = self.norm(part.norm, x, place)
        carried = self.linear(part.up, h, place)
        z = self.linear(part.gate, h, place) if part.gate else carried
        act = ACTIVATIONS[part.act]
        if self.frozen:
            a = act(z).detach() if part.gate else z * (act(z) / z).detach()
        else:
            at = z.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(act(at).sum(), at)
            a = self.left(act(z), act(at) - slope * at, place)
        if part.gate:
            a = self.left(a * carried, -a * carried, place)
        return x + part.g2 * self.linear(part.down, self.norm(part.sub_norm, a, place), place)

    def read(self, vit: ViT, x: Tensor) -> Tensor:
        tokens = self.norm(vit.norm, x, "tokens")
        if vit.pool is not None:
            pool, patch_tokens = vit.pool, tokens[:, vit.pool.first :]
            k, v = (pool.split(self.linear(layer, patch_tokens, "patches")) for layer in (pool.k, pool.v))
            S = pool.latent @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])  # the latent is a constant: linear in k
            A = S.softmax(-1)
            A = A.detach() if self.frozen else self.left(A, A - A * (S - (A * S).sum(-1, keepdim=True)), "apart")
            O = A @ v  # noqa: E741
            O = self.left(O, -O, "apart")  # noqa: E741
            tokens = self.transform(pool.mlp, self.linear(pool.out, O.transpose(1, 2).flatten(2), "apart"), "apart")
        pooled = [torch.einsum("n,bnd->bd", reader.rows, tokens) for reader in vit.readers]
        normed = [self.norm(reader.norm, z, "apart") for reader, z in zip(vit.readers, pooled, strict=True)]
        heads = [self.linear(reader.classifier, z, "apart") for reader, z in zip(vit.readers, normed, strict=True)]
        return sum(reader.share * logits for reader, logits in zip(vit.readers, heads, strict=True))


@dataclass
class Full:
    ixg: list[Tensor]  # [B, N] a layer
    tokens: list[Tensor]  # biases, [B, N] a layer
    apart: Tensor  # [B]
    y: Tensor  # [B]

    def fullgrad(self, start: int = 0) -> Tensor:
        return self.ixg[start] + sum(self.tokens[start:])

    def plus(self, start: int = 0) -> Tensor:
        return sum(self.ixg[start:]) + sum(self.tokens[start:])


def by_hand(vit: ViT, image: Tensor, book: Book) -> Full:
    x = [vit.embed(image).detach().requires_grad_(True)]
    for book.block, (attention, mlp) in enumerate(vit.blocks):
        x.append(book.transform(mlp, book.attend(attention, x[-1]), "tokens"))
    logits = book.read(vit, x[-1])
    leaves = [leaf for *_, leaf in book.marks]
    gradients = torch.autograd.grad(score(logits, TARGETS), [*x[:-1], *leaves], allow_unused=True)
    depth, (batch, count, _) = len(vit.blocks), x[0].shape
    tokens, apart = [torch.zeros(batch, count, dtype=torch.float64) for _ in range(depth)], torch.zeros(batch).double()
    for (block, place, b, _), gradient in zip(book.marks, gradients[depth:], strict=True):
        if gradient is None:
            continue
        bias_gradient = (b * gradient).sum(-1)
        if place == "tokens":
            tokens[block] += bias_gradient
        elif place == "heads":
            tokens[block] += bias_gradient.sum(1)
        elif place == "patches":
            tokens[block][:, -bias_gradient.shape[1] :] += bias_gradient
        else:
            apart += bias_gradient.reshape(batch, -1).sum(1)
    ixg = [(activation * dx).sum(-1).detach() for activation, dx in zip(x, gradients[:depth], strict=False)]
    return Full(ixg, tokens, apart, logits[torch.arange(batch), torch.tensor(TARGETS)].detach())


WAYS = {"": Book, "biases=implicit": lambda: Book(bent=True), "rules=linear": lambda: Book(frozen=True)}


@functools.cache
def proven(kind: str, fused: bool, way: str) -> tuple[cv.Model, Tensor, ViT, Full]:
    module = build(kind, fused=fused, depth=DEPTH)
    image, vit = images_for(module), written_out(module)
    return wrapped(module), image, vit, by_hand(vit, image, WAYS[way]())


def named(name: str, way: str, *more: str, combinator: str = "") -> str:
    return f"{name}({','.join(option for option in (way, *more) if option)}){combinator}"


MAIN = ["plain", "registers", "layer-scale", "distilled", "avg", "avg-no-cls", "map", "map-cls", "map-two"]
OTHERS = ["torchvision", "weighed", "einsum", "grouped", "relative-bias", "rope-swiglu", "sub-norm", "swiglu-packed"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "fused"), both_ways(*MAIN, *OTHERS))
def test_fullgrad_is_tokens_and_biases_by_hand(kind: str, fused: bool, way: str) -> None:
    model, image, vit, full = proven(kind, fused, way)

    rows = {
        named("fullgrad", way): full.fullgrad(),
        named("fullgrad", way, "layer=1"): full.fullgrad(1),
        named("fullgrad-plus", way): full.plus(),
    }
    for name in ("fullgrad", "fullgrad-plus"):
        rows[named(name, way, combinator="+skipplus")] = full.plus(2)
        rows[named(name, way, combinator="+from:1")] = full.plus(1)
        rows[named(name, way, combinator="+last")] = full.fullgrad(2)
    explanations = cv.compare(model, image, [*rows], target=TARGETS)
    for explanation, row in zip(explanations.values(), rows.values(), strict=True):
        assert_same(explanation.maps, row[:, vit.prefix :].unflatten(1, vit.grid))
    alone = cv.explain(model, image, named("fullgrad-plus", way), target=TARGETS)
    assert_same(alone.maps, full.plus()[:, vit.prefix :].unflatten(1, vit.grid))


@pytest.mark.parametrize("kind", MAIN)
def test_completeness_by_hand(kind: str) -> None:
    """METHODS 7.3: not with the plain gradient and true biases; with either cure, to round-off."""
    for way, complete in (("", False), ("biases=implicit", True), ("rules=linear", True)):
        *_, full = proven(kind, True, way)
        total = full.fullgrad().sum(1) + full.apart
        if complete:
            assert_same(total, full.y, magnitude=float(full.fullgrad().abs().sum()))
        else:
            assert (total - full.y).abs().max() > 1e-2


class Turned(nn.Module):
    """A ViT whose stream is [N, B, d] between its blocks, and [B, N, d] again for its head."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit
        for block in vit.blocks:
            block.attn.batch_first = False

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.vit.embed(pixels).transpose(0, 1)
        for block in self.vit.blocks:
            x = block(x)
        return self.vit.head(self.vit.norm(x.transpose(0, 1))[:, 0])


@pytest.mark.parametrize("way", WAYS)
def test_tokens_first_images_second(way: str) -> None:
    _, image, vit, full = proven("weighed", True, way)
    model = wrapped(Turned(build("weighed", depth=DEPTH)))
    maps = cv.explain(model, image, named("fullgrad", way), target=TARGETS).maps
    assert_same(maps, full.fullgrad()[:, vit.prefix :].unflatten(1, vit.grid))


@pytest.mark.parametrize("way", WAYS)
def test_as_many_images_as_tokens(way: str) -> None:
    """Shapes alone then do not say which axis is which."""
    for module in (Turned(build("weighed", depth=DEPTH)), build("weighed", depth=DEPTH), build("registers")):
        count = 20 if module.__class__.__name__ == "VisionTransformer" else 16
        image, name = images_for(module, count), named("fullgrad", way)
        together = cv.explain(wrapped(module), image, name, target=1).maps
        assert_same(cv.explain(wrapped(module), image[5:6], name, target=1).maps, together[5:6])


# Every kind of model: the sum is the score, from every layer on, whoever wrote the model.


RECORDERS: dict[str, type[BiasTerms]] = {"learned": LearnedBiasTerms, "implicit": ImplicitBiasTerms}


def traced(model: cv.Model, image: Tensor, biases: str, table: str) -> Trace:
    recording = record(model, image, rules=(table,), recorders=(RECORDERS[biases],))
    return run_backward(recording, one_target(recording, 3, "logit", single=False), table)


def float32_softmax(kind: str) -> bool:
    """transformers' eager attention casts its scores, so its softmax is exact to single precision only."""
    return kind.startswith("hf-") and kind.endswith("eager")


@pytest.mark.parametrize(
    ("kind", "biases", "table"),
    [
        (kind, *way)
        for kind, way in covering_array(
            some_models([kind for kind in TINY if kind != "home-loop"], 30, seed="fullgrad"),
            [("implicit", "plain"), ("learned", "linear")],
            model_traits,
        )
    ],
)
def test_every_model_adds_up(kind: str, biases: str, table: str) -> None:
    trace = traced(tiny_model(kind, torch.float64), pixels(kind, dtype=torch.float64), biases, table)
    exact = 1e-6 if float32_softmax(kind) and biases == "implicit" else 1e-12
    # Of two attentions side by side both read the same tokens, and the second has no claim to the first one's biases.
    for start in range(0, ZOO[kind].layers, 2 if kind == "timm-parallel" else 1):
        actual, expected = completeness_sums(trace, start, biases, table)
        assert (actual - expected).abs().max() < exact * max(1, float(expected.abs().max())), start


def test_notes_say_how_complete_it_is() -> None:
    model, image, _, full = proven("plain", True, "")
    (note,) = cv.explain(model, image, "fullgrad", target=TARGETS).notes
    scores, sums = (
        ", ".join(f"{v:.3g}" for v in row.tolist()) for row in (full.y, full.fullgrad().sum(1) + full.apart)
    )
    assert note.startswith(
        f"fullgrad: completeness: the score is {scores}, tokens and biases add up to {sums}; residual"
    )
    assert note.endswith("rules=linear or biases=implicit closes it")
    for way in ("biases=implicit", "rules=linear"):
        (note,) = cv.explain(model, image, f"fullgrad({way},layer=1)", target=TARGETS).notes
        assert note.endswith("completeness: tokens and biases add up to the score")
    assert cv.explain(model, image, "fullgrad-plus", target=TARGETS).notes == ()


def test_two_kinds_of_biases_and_two_tables_share_a_forward() -> None:
    model, image, vit, _ = proven("registers", True, "")
    names = ["fullgrad", "fullgrad(biases=implicit)", "fullgrad(rules=linear)", "ixg"]
    comparison = cv.compare(model, image, names, target=TARGETS)
    assert (comparison.cost.forwards, comparison.cost.backwards) == (1, 2)
    for name, way in zip(names, WAYS, strict=False):
        row = proven("registers", True, way)[3].fullgrad()
        assert_same(comparison[name].maps, row[:, vit.prefix :].unflatten(1, vit.grid))


def test_nothing_is_recorded_unless_a_method_needs_it() -> None:
    model, image, *_ = proven("plain", True, "")
    recording = record(model, image, rules=("plain",))
    assert recording.recorders == {}
    assert recording.logits._backward_hooks is None
    assert record(model, image, rules=("plain",), recorders=(LearnedBiasTerms,)).logits._backward_hooks


def test_implicit_biases_belong_to_the_true_slopes() -> None:
    model, image, *_ = proven("plain", True, "")
    with pytest.raises(BadInput, match=r"biases=implicit .* rules=linear; expected rules=plain"):
        cv.explain(model, image, "fullgrad(biases=implicit,rules=linear)", target=TARGETS)


@pytest.mark.parametrize("kind", ["swin", "maxvit"])
def test_windows_are_refused(kind: str) -> None:
    model = cv.wrap(strange(STRANGE[kind].make))
    with pytest.raises(NotApplicable, match=r"cannot be told apart by token.* Use fullgrad-pixel"):
        cv.explain(model, torch.randn(2, 3, *STRANGE[kind].size), "fullgrad", target=1)


# Pixels: FullGrad as its authors made it


@functools.cache
def convolutions() -> nn.Module:
    """ReLUs, BatchNorms with a past, pooling: piecewise linear from end to end."""
    module = cnn().double().eval()
    module.load_state_dict({**module.state_dict(), **seeded(parameter_shapes(module))})
    norm = module[1]
    noise = torch.Generator().manual_seed(3)
    norm.running_mean.copy_(torch.randn(8, generator=noise, dtype=torch.float64))
    norm.running_var.copy_(0.5 + torch.rand(8, generator=noise, dtype=torch.float64))
    return module


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def noise_images() -> Tensor:
    return torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def test_a_cnn_adds_up_exactly() -> None:
    model, image = cv.wrap(convolutions()), noise_images()
    recording = record(model, image, rules=("plain",), recorders=(BiasMaps,))
    trace = run_backward(recording, one_target(recording, TARGETS, "logit", single=False), "plain")
    total = trace[BiasMaps].total
    assert total is not None
    actual = (image * trace.dpixels).sum((1, 2, 3)) + total
    expected = trace.logits[torch.arange(2), torch.tensor(TARGETS)]
    assert_same(actual, expected, magnitude=float((image * trace.dpixels).abs().sum()))
    (note,) = cv.explain(model, image, "fullgrad-pixel", target=TARGETS).notes
    assert note == "fullgrad-pixel: completeness: pixels and biases add up to the score"


def test_fullgrad_of_its_authors_on_a_cnn() -> None:
    """idiap/fullgrad-saliency on the same network and images; see tests/parity/make_fullgrad.py."""
    with np.load(FIXTURES / "fullgrad.npz") as arrays:
        theirs = torch.from_numpy(arrays["fullgrad"])
    ours = cv.explain(cv.wrap(convolutions()), noise_images(), "fullgrad-pixel", target=TARGETS).maps
    assert_same(ours, theirs[:, 0])


def test_both_forms_share_a_trace() -> None:
    model, image, *_ = proven("plain", True, "")
    names = ["fullgrad", "fullgrad-pixel", "saliency"]
    together = cv.compare(model, image, names, target=TARGETS)
    assert (together.cost.forwards, together.cost.backwards) == (1, 1)
    for name in names:
        assert_same(together[name].maps, cv.explain(model, image, name, target=TARGETS).maps)
