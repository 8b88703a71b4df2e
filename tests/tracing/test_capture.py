"""The trace sees every attention of every kind of ViT, changes no number, and finds grid, prefix and pooling by itself.

A, G, x and dx are compared with references that know nothing of ClairViT: transformers' eager attentions,
nn.MultiheadAttention's need_weights, hooks on the explicit attention of timm and of home-made models; then autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.models.scores import extract_scores
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.trace import Trace, one_target, run_backward
from helpers.rounding import assert_same, growth, same
from helpers.tiny_models import TINY, ZOO, build, double, fresh, fresh_double, pixels, wrapped

TARGET = 3
FULL_SIZE = [name for name in ZOO if name not in TINY]


def assert_close(actual: Tensor, expected: Tensor, **bound: Any) -> None:
    """Assert equality up to rounding; a reference of zeros proves nothing."""
    assert expected.any()
    assert_same(actual, expected, **bound)


@functools.cache  # tests of one model are far apart: each function goes through all models
def traced(name: str, dtype: torch.dtype) -> Trace:
    tr = cv.trace(wrapped(name, dtype), pixels(name, dtype=dtype), target=TARGET)
    assert len(tr.layers) == ZOO[name].layers  # a loop over no layers would prove everything
    return tr


@functools.cache
def recorded_for_every_table(name: str) -> Recording:
    return record(*double(name), rules=("plain", "linear", "attnlrp"))


@pytest.fixture(scope="module", autouse=True)
def _forget_traces() -> Iterator[None]:
    """Free the traces, with their graphs, after the last test."""
    yield
    traced.cache_clear()
    recorded_for_every_table.cache_clear()


def bound_of(name: str) -> dict[str, Any]:
    """Return the bound of a model's numbers in float64.

    transformers' eager attention takes its softmax, a sum over all tokens, in float32, whatever the model's dtype.
    """
    if ZOO[name].reference != "hf":
        return {}
    return {"dtype": torch.float32, "growth": growth(depth=ZOO[name].layers, width=ZOO[name].tokens)}


# Which models are traced, by where they come from. A model that disappears from the sweep must be seen.
SOURCES = {
    "timm": (
        "beit beit-explicit beitv2 cait clip clip-quickgelu deep deep-avg deit deit-distilled deit-distilled-explicit "
        "deit3 deit3-explicit dinov2-reg4 dinov2-reg4-explicit dinov3 dinov3-explicit eva02 eva02-explicit parallel "
        "post-norm reg4-gap relpos relpos-explicit sam sam-explicit siglip-gap siglip-map siglip-map-explicit swiglu "
        "vit vit-avg vit-avg-explicit vit-explicit vit-nonsquare vit-nonsquare-explicit vit-qk-norm "
        "vit-qk-norm-explicit"
    ),
    "hf": (
        "clip-eager clip-projection-eager clip-projection-sdpa clip-sdpa deit-eager deit-sdpa deit-teacher-eager "
        "deit-teacher-sdpa dinov2-eager dinov2-registers-eager dinov2-registers-sdpa dinov2-sdpa dinov2-swiglu-eager "
        "dinov2-swiglu-sdpa siglip-eager siglip-sdpa siglip-vision-eager siglip-vision-sdpa vit-eager "
        "vit-nonsquare-eager vit-nonsquare-sdpa vit-sdpa"
    ),
    "torchvision": "vit vit_b_16 vit_l_32",
    "open_clip": "avg coca custom-block ln-after-pool model nonsquare tower",
    "home": (
        "batchnorm-stem bmm einsum einsum-transposed einsum-values-first encoder-post-norm encoder-pre-norm fused "
        "grouped-query in-place loop lucid mask-by-position matmul mean-pool sequence-first torch-encoder"
    ),
}
WITHOUT_REFERENCE = {
    "home-batchnorm-stem",
    "home-fused",
    "home-grouped-query",
    "home-mask-by-position",
    "open_clip-custom-block",
}


def test_every_configuration_is_in_the_sweep() -> None:
    listed = [f"{source}-{kind}" for source, kinds in SOURCES.items() for kind in kinds.split()]
    assert sorted(ZOO) == sorted(listed)
    assert {name for name, tiny in ZOO.items() if tiny.reference is None} == WITHOUT_REFERENCE


@pytest.mark.parametrize("name", TINY)
def test_logits_under_trace_are_the_plain_logits(name: str) -> None:
    with torch.no_grad():
        plain = extract_scores(build(name).double()(pixels(name, dtype=torch.float64)))
    assert_close(traced(name, torch.float64).logits, plain, **bound_of(name))


@pytest.mark.parametrize("name", TINY)
def test_logits_stay_under_every_rule_table_at_once(name: str) -> None:
    with torch.no_grad():
        plain = extract_scores(build(name).double()(pixels(name, dtype=torch.float64)))
    assert_close(recorded_for_every_table(name).logits, plain, **bound_of(name))


@pytest.mark.parametrize("name", TINY)
def test_layout_is_inferred(name: str) -> None:
    tiny, tr = ZOO[name], traced(name, torch.float32)
    assert tr.layout.grid == tiny.grid
    assert tr.layout.prefix == tiny.prefix
    assert tr.layout.pooling == tiny.pooling
    read = dict(tr.layout.read)
    assert sorted(read) == sorted(tiny.read)
    assert_same([read[row] for row in tiny.read], list(tiny.read.values()))
    assert len(tr.layers) == tiny.layers
    assert len(tr.recording.pools) == tiny.pools


@pytest.mark.parametrize("name", [name for name in TINY if name != "home-loop"])
def test_tokens_lie_where_their_patches_are(name: str) -> None:
    """Before the first attention a patch token knows its own pixels only, so grid, order and prefix can be checked."""
    tiny, recording = ZOO[name], record(fresh(name), pixels(name))
    tokens = recording.as_tokens(recording.inputs[0])
    assert tokens.shape[:2] == (2, tiny.tokens)
    for row, column in ((0, 0), (1, tiny.grid[1] - 1), (tiny.grid[0] - 1, 1)):
        token = tokens[1, tiny.prefix + row * tiny.grid[1] + column]
        gradient = torch.autograd.grad(token.square().sum(), recording.pixels, retain_graph=True)[0].abs().sum(1)
        patches = gradient.unflatten(1, (tiny.grid[0], -1)).unflatten(3, (tiny.grid[1], -1)).sum((2, 4))
        assert patches.nonzero().tolist() == [[1, row, column]]


@pytest.mark.parametrize("name", TINY)
def test_what_the_head_reads_adds_up(name: str) -> None:
    """[B, N] weights of the tokens; an attention pool's own row for `map`."""
    tiny, tr = ZOO[name], traced(name, torch.float64)
    assert tr.readout_weights.shape[1] == tiny.tokens
    if tiny.pooling == "map":
        assert len(tr.readout_weights) == 2
        assert tr.readout_weights.std(1).min() > 0  # a pool that looks everywhere alike would be no test
    if tiny.sums_to_one:
        assert_same(
            tr.readout_weights.sum(1), torch.ones(len(tr.readout_weights), dtype=torch.float64), **bound_of(name)
        )


@pytest.mark.parametrize("name", TINY)
def test_attention_is_between_all_tokens_and_rows_sum_to_one(name: str) -> None:
    tiny, tr = ZOO[name], traced(name, torch.float64)
    for layer in tr.layers:
        assert layer.A.shape == layer.G.shape == (2, 3, tiny.tokens, tiny.tokens)
        assert layer.A.std(-1).min() > 0
        if tiny.sums_to_one:
            assert layer.A.min() >= 0
            assert_same(layer.A.sum(-1), torch.ones(2, 3, tiny.tokens, dtype=torch.float64), **bound_of(name))


@pytest.mark.parametrize("name", [name for name in TINY if ZOO[name].reference])
def test_attention_and_its_gradient_equal_the_reference(name: str) -> None:
    tr = traced(name, torch.float64)
    attentions = reference(name, pixels(name, dtype=torch.float64))
    assert len(attentions) >= len(tr.layers)
    for layer, (A, G) in zip(tr.layers, attentions, strict=False):
        assert_close(layer.A, A, **bound_of(name))
        assert_close(layer.G, G, **bound_of(name))
    for pool, (A, _) in zip(tr.recording.pools, attentions[len(tr.layers) :], strict=False):
        assert_close(pool.A(), A, **bound_of(name))


@pytest.mark.parametrize("name", [name for name in TINY if ZOO[name].reference])
def test_scores_before_the_softmax(name: str) -> None:
    """softmax(S) is A, also where the model keeps S to itself; talking heads mix the rows in between."""
    if not ZOO[name].sums_to_one:
        return
    for layer in traced(name, torch.float64).layers:
        assert_close(layer.S.softmax(-1), layer.A, **bound_of(name))


@pytest.mark.parametrize("name", TINY)
def test_queries_and_keys_make_the_scores(name: str) -> None:
    """q·k differs from S by a scale and, in some models, a bias."""
    for layer in traced(name, torch.float64).layers:
        assert layer.q.shape == layer.k.shape == layer.v.shape == layer.dO.shape
        if any(word in name for word in ("relpos", "beit", "mask", "post-norm", "cait", "sam")):
            continue  # a bias is added, or heads are mixed
        product = layer.q @ layer.k.transpose(-2, -1)
        largest = product.abs().argmax()
        scale = layer.S.flatten()[largest] / product.flatten()[largest]
        assert_close(layer.S, scale * product)


@pytest.mark.parametrize("name", [name for name in TINY if ZOO[name].blocks])
def test_block_inputs_and_their_gradients_equal_hooks(name: str) -> None:
    tr = traced(name, torch.float64)
    blocks = reference_blocks(name, pixels(name, dtype=torch.float64))
    for layer, (x, dx) in zip(tr.layers, blocks, strict=True):
        assert_close(layer.x, as_tokens(x), **bound_of(name))
        assert_close(layer.dx, as_tokens(dx), **bound_of(name))


@pytest.mark.parametrize("name", TINY)
def test_pixel_gradient_equals_autograd(name: str) -> None:
    image = pixels(name, dtype=torch.float64).requires_grad_()
    score = extract_scores(build(name).double().requires_grad_(False)(image))[:, TARGET].sum()
    assert_close(traced(name, torch.float64).dpixels, torch.autograd.grad(score, image)[0], **bound_of(name))


@pytest.mark.parametrize("name", TINY)
def test_plain_gradients_do_not_depend_on_other_rule_tables(name: str) -> None:
    """One graph serves all tables, so the plain one must not notice the swapped backward."""
    recording = record(wrapped(name, torch.float64), pixels(name, dtype=torch.float64), rules=("plain", "attnlrp"))
    alone = traced(name, torch.float64)
    shared = run_backward(recording, one_target(recording, TARGET, "logit", single=False), "plain")
    for a, b in zip(alone.layers, shared.layers, strict=True):
        assert_close(b.A, a.A, **bound_of(name))
        assert_close(b.G, a.G, **bound_of(name))
    assert_close(shared.dpixels, alone.dpixels, **bound_of(name))


@pytest.mark.parametrize("name", TINY)
def test_rule_tables_differ(name: str) -> None:
    """A table that no operation of the model asks would be a table that does nothing."""
    recording = recorded_for_every_table(name)
    target = one_target(recording, TARGET, "logit", single=False)
    plain, linear, attnlrp = (
        run_backward(recording, target, table).dpixels for table in ("plain", "linear", "attnlrp")
    )
    assert not same(linear, plain, **bound_of(name))
    assert not same(attnlrp, plain, **bound_of(name))
    assert not same(attnlrp, linear, **bound_of(name))


@pytest.mark.parametrize("rules", ["plain", "linear", "attnlrp"])
@pytest.mark.parametrize("name", [name for name in TINY if f"{name}-explicit" in TINY])
def test_fused_and_explicit_attention_are_one_model(name: str, rules: str) -> None:
    """The same weights, the switch of the library turned: same A, G and gradients under every rule table."""
    explicit_one = build(name).double()
    for part in explicit_one.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
    fused, plain = (
        cv.trace(cv.wrap(module), pixels(name, dtype=torch.float64), target=TARGET, rules=rules)
        for module in (build(name).double(), explicit_one)
    )
    assert_close(plain.dpixels, fused.dpixels)
    for a, b in zip(fused.layers, plain.layers, strict=True):
        assert_close(b.A, a.A)
        assert_close(b.G, a.G)
        assert_close(b.S.softmax(-1), a.A)
        assert_close(b.dx, a.dx)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_real_constructors(name: str) -> None:
    """torchvision's own sizes: all blocks are seen, and the first two, in float64, against need_weights."""
    tiny, image = ZOO[name], pixels(name, batch=1)
    module = build(name)
    tr = cv.trace(cv.wrap(module), image, target=TARGET)
    assert (tr.layout.grid, tr.layout.prefix, tr.layout.pooling) == (tiny.grid, tiny.prefix, tiny.pooling)
    assert len(tr.layers) == tiny.layers
    module.encoder.layers = module.encoder.layers[:2]
    module, image = module.double(), image.double()
    tr = cv.trace(cv.wrap(module), image, target=TARGET)
    with torch.no_grad():
        assert_close(tr.logits, module(image))
    for layer, (A, G) in zip(tr.layers, explicit(module, image), strict=True):
        assert_close(layer.A, A)
        assert_close(layer.G, G)


def test_retarget_needs_no_other_forward() -> None:
    model, image = fresh_double("timm-vit")
    runs: list[int] = []
    model.module.register_forward_hook(lambda *_: runs.append(1))
    first = cv.trace(model, image, target=2)
    forwards = len(runs)
    other = first.retarget(5)
    assert len(runs) == forwards
    fresh = cv.trace(model, image, target=5)
    for a, b in zip(other.layers, fresh.layers, strict=True):
        assert_close(a.G, b.G)
        assert_close(a.dx, b.dx)
    assert not same(other.layers[0].G, first.layers[0].G)


def test_scores_of_probability_kind_change_the_gradient() -> None:
    model, image = double("hf-vit-sdpa")
    logprob, prob = (cv.trace(model, image, target=2, score=kind) for kind in ("logprob", "prob"))
    chance = logprob.logits.softmax(-1)[:, 2, None, None]
    assert_close(prob.layers[0].dx, logprob.layers[0].dx * chance)


def test_causal_attention() -> None:
    """is_causal is a mask that is not passed: A must still be lower triangular."""

    class Causal(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    from clairvit.tracing.capture import Capture

    q = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with Capture(2) as capture:
        out = Causal()(q)
    (call,) = capture.calls
    assert call.A().triu(1).abs().max() == 0
    assert_same(call.A() @ q, out)


def test_bool_mask() -> None:
    from clairvit.tracing.capture import Capture

    q = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keep = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    keep[0, ..., 4] = False
    with Capture(2) as capture:
        out = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=keep)
    (call,) = capture.calls
    assert call.A()[0, ..., 4].abs().max() == 0
    assert call.A()[1, ..., 4].min() > 0
    assert_same(call.A() @ q, out)
    some = torch.tensor([0, 3])
    assert_same(call.A(some), call.A()[..., some, :])


# References


def reference(name: str, image: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(A, G) of each attention call, in order."""
    return explicit(build(name).double(), image)


def explicit(module: nn.Module, image: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The module's own library, made to show its attention; G by autograd on it."""
    module.requires_grad_(False)
    image = image.clone().requires_grad_()
    if hasattr(module, "set_attn_implementation"):
        module.set_attn_implementation("eager")
        out = module(image, output_attentions=True)
        attentions = list(out.attentions)
    else:
        with showing(module) as attentions:
            out = module(image)
    gradients = torch.autograd.grad(extract_scores(out)[:, TARGET].sum(), attentions, allow_unused=True)
    batch = len(image)
    return [
        (as_heads(A.detach(), batch), as_heads(torch.zeros_like(A) if G is None else G, batch))
        for A, G in zip(attentions, gradients, strict=True)
    ]


def as_heads(A: Tensor, batch: int) -> Tensor:
    return A if A.ndim == 4 else A.unflatten(0, (batch, -1))


def as_tokens(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.flatten(1, 2)  # [B, h, w, d]


@contextmanager
def showing(module: nn.Module) -> Iterator[list[Tensor]]:
    """Every attention matrix of timm, nn.MultiheadAttention and home-made modules, as it meets the values."""
    seen: list[Tensor] = []

    def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"need_weights": True, "average_attn_weights": False}

    def note_weights(_: nn.Module, args: Any, out: Any) -> None:
        seen.append(out[1]._base)  # the weights are returned as a view that the output does not depend on

    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            part.register_forward_pre_hook(ask, with_kwargs=True)
            part.register_forward_hook(note_weights)
        elif hasattr(part, "attn_drop"):
            if hasattr(part, "fused_attn"):
                part.fused_attn = False
            part.attn_drop.register_forward_hook(lambda _, args, out: seen.append(out))
    yield seen


def reference_blocks(name: str, image: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(x, dx) of each block, by a hook on it that hands a copy of its input on."""
    module = build(name).double().requires_grad_(False)
    seen: list[Tensor] = []

    def note(_: nn.Module, args: Any) -> Any:
        seen.append(args[0])
        return (args[0].clone(), *args[1:])

    for block in module.get_submodule(ZOO[name].blocks).children():
        block.register_forward_pre_hook(note)
    score = extract_scores(module(image.requires_grad_()))[:, TARGET].sum()
    return list(zip(seen, torch.autograd.grad(score, seen), strict=True))


def test_the_comparison_sees_a_wrong_reference() -> None:
    """The comparison above can fail: another class, another layer and other weights are all seen."""
    name = "timm-vit"
    tr, (first, second) = traced(name, torch.float64), reference(name, pixels(name, dtype=torch.float64))
    assert not same(tr.layers[0].A, second[0])
    assert not same(tr.layers[0].G, second[1])
    assert not same(tr.retarget(TARGET + 1).layers[0].G, first[1])


def test_recording_refuses_a_table_it_was_not_made_for() -> None:
    recording: Recording = record(wrapped("timm-vit"), pixels("timm-vit"))
    target = one_target(recording, TARGET, "logit", single=False)
    with pytest.raises(cv.ClairError, match=r"for plain; 'attnlrp' was asked of it.*rules='attnlrp'"):
        run_backward(recording, target, "attnlrp")
