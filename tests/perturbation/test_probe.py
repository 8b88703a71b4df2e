"""The probe: the same scores however they are batched, for any target, at the price it says, and a model left alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import BadInput
from clairvit.execution import ExecutionOptions
from clairvit.perturbation.attention_override import mask_tokens
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.token_dropping import drop_strategy, droppable_tokens
from clairvit.tracing.structure import forget_structures
from clairvit.tracing.trace import Trace
from helpers.linear_patch_model import effects, linear
from helpers.module_fingerprint import differences, fingerprint, surroundings
from helpers.rounding import DEFAULT_GROWTH, assert_same, growth
from helpers.tiny_models import ZOO, build, double, fresh, pixels, wrapped

KINDS = ["timm-vit", "timm-eva02", "timm-sam", "home-loop", "timm-siglip-map"]  # drop, cut, zero, paint, pool
B, V = 3, 10


def traced(
    name: str, dtype: torch.dtype = torch.float32, target: Any = 3, score: str = "logit", batch: int = B
) -> Trace:
    return cv.trace(wrapped(name, dtype), pixels(name, batch, dtype=dtype), target=target, score=score)


def some(name: str, images: int = B, variants: int = V) -> Tensor:
    patches = ZOO[name].grid[0] * ZOO[name].grid[1]
    return torch.rand(images, variants, patches, generator=torch.Generator().manual_seed(0)) < 0.5


def probed(
    trace: Trace,
    how: Callable[[Probe], Tensor],
    removal: str = "token",
    options: ExecutionOptions | None = None,
) -> Tensor:
    with probing(trace, removal, label="test", forwards=V, options=options) as probe:
        return how(probe)


def painted(probe: Probe) -> Tensor:
    masks = torch.rand(1, V, *probe.size, generator=torch.Generator().manual_seed(0))
    return probe.score_images(V, lambda ks: probe.blend(masks[:, ks.start : ks.stop]))


def rewritten(probe: Probe) -> Tensor:
    shown = torch.cat([torch.ones(V, probe.layout.prefix, dtype=torch.bool), some("timm-vit", 1)[0]], 1)
    shown[:, probe.layout.prefix] = True
    return probe.score_with_attention(V, lambda images, variants: mask_tokens(shown[variants]))


# The same scores


@pytest.mark.parametrize("how", ["keeping", "painting", "rewriting"])
@pytest.mark.parametrize("name", KINDS)
def test_the_batch_size_changes_nothing(name: str, how: str) -> None:
    ways = {"keeping": lambda probe: probe.score_kept(some(name)), "painting": painted, "rewriting": rewritten}
    # In float32: two blocks of eight reductions in a row, each over at most the 192 values of a patch.
    for dtype, roundings in ((torch.float64, DEFAULT_GROWTH), (torch.float32, growth(2 * 8, 192))):
        results = []
        for size in (1, 7, 64):
            removal = "mean" if how == "painting" else "token"
            results.append(probed(traced(name, dtype), ways[how], removal, ExecutionOptions(batch_size=size)))
        assert results[0].shape == (B, V)
        assert results[0].dtype == torch.float64  # differences between scores are small beside them
        for other in results[1:]:
            assert_same(other, results[0], growth=roundings, dtype=dtype)


@pytest.mark.parametrize("removal", ["token", "blur", "road"])
@pytest.mark.parametrize("name", KINDS)
def test_a_batch_is_its_images_one_by_one(name: str, removal: str) -> None:
    keep = some(name)
    together = probed(traced(name, torch.float64), lambda probe: probe.score_kept(keep), removal)
    model, images = wrapped(name, torch.float64), pixels(name, B, dtype=torch.float64)
    for b in range(B):
        alone = probed(cv.trace(model, images[b], target=3), lambda p, b=b: p.score_kept(keep[b : b + 1]), removal)
        assert_same(together[b], alone[0])
    shared = probed(traced(name, torch.float64), lambda probe: probe.score_kept(keep[:1]), removal)
    assert_same(shared[0], together[0])


def test_painted_patches_on_a_linear_model_are_known() -> None:
    model, image = linear((4, 4))
    keep = some("timm-vit", 1)
    probed_scores = probed(cv.trace(model, image, target=1), lambda probe: probe.score_kept(keep), "mean")
    expected = (effects(model, image, 1).flatten() * keep[0]).sum(1)
    assert_same(probed_scores[0], expected, magnitude=float(effects(model, image, 1).abs().sum()))


def test_everything_kept_is_the_original_score() -> None:
    for name in KINDS:
        trace = traced(name, torch.float64)
        keep = torch.ones(1, 1, ZOO[name].grid[0] * ZOO[name].grid[1], dtype=torch.bool)
        with probing(trace, "token", label="test", forwards=1) as probe:
            assert (probe.score_kept(keep)[:, 0] - probe.original).abs().max() < 1e-12
            assert torch.equal(probe.original, trace.logits[:, 3])


def test_bfloat16_models_give_wide_scores() -> None:
    for removal in ("token", "blur", "road"):
        exact = probed(traced("timm-vit"), lambda probe: probe.score_kept(some("timm-vit")), removal)
        rough = probed(traced("timm-vit", torch.bfloat16), lambda probe: probe.score_kept(some("timm-vit")), removal)
        assert rough.dtype == torch.float64
        assert (rough - exact).abs().max() < 0.1 * exact.abs().max()


def test_images_may_lie_in_memory_as_they_like() -> None:
    model, images = double("timm-vit", B)
    odd = torch.stack([images, images], -1)[..., 0].to(memory_format=torch.channels_last)
    assert not odd.is_contiguous()
    for removal in ("token", "noise", "road"):
        probed_scores = probed(
            cv.trace(model, odd, target=3), lambda probe: probe.score_kept(some("timm-vit")), removal
        )
        expected = probed(cv.trace(model, images, target=3), lambda probe: probe.score_kept(some("timm-vit")), removal)
        assert_same(probed_scores, expected)
    transposed = some("timm-vit").permute(2, 1, 0).contiguous().permute(2, 1, 0)
    probed_scores = probed(cv.trace(model, images, target=3), lambda probe: probe.score_kept(transposed))
    assert_same(
        probed_scores, probed(traced("timm-vit", torch.float64), lambda probe: probe.score_kept(some("timm-vit")))
    )


# Targets


def every_logit(name: str) -> Tensor:
    """[B, V, C], in float64."""
    return probed(
        traced(name, torch.float64), lambda probe: probe.score_kept(some(name), score=lambda logits, images: logits)
    )


@pytest.mark.parametrize("size", [2, 64])
def test_a_function_that_knows_images_by_their_place(size: int) -> None:
    def target_score(scores: Tensor) -> Tensor:
        assert len(scores) == B
        return scores[range(B), [1, 4, 2]] ** 2 - scores[:, 0]

    trace, logits = traced("timm-vit", torch.float64, target=target_score), every_logit("timm-vit")
    expected = logits[range(B), :, [1, 4, 2]] ** 2 - logits[..., 0]
    probed_scores = probed(
        trace, lambda probe: probe.score_kept(some("timm-vit")), options=ExecutionOptions(batch_size=size)
    )
    assert_same(probed_scores, expected)
    assert (probed(trace, painted, "mean").std(1) > 0).all()


def test_each_image_has_its_own_target() -> None:
    """A class, a contrast and a function, in one batch."""
    goals = [2, cv.Contrast(1, 5), lambda scores: scores[:, 6] * 2]
    logits = every_logit("timm-vit")
    expected = torch.stack([logits[0, :, 2], logits[1, :, 1] - logits[1, :, 5], logits[2, :, 6] * 2])
    probed_scores = probed(traced("timm-vit", torch.float64, goals), lambda probe: probe.score_kept(some("timm-vit")))
    assert_same(probed_scores, expected)


def test_probabilities_are_of_the_variants_own_logits() -> None:
    logits = every_logit("timm-vit")
    for score, expected in {"prob": logits.softmax(-1), "logprob": logits.log_softmax(-1)}.items():
        trace = traced("timm-vit", torch.float64, None, score)
        probed_scores = probed(trace, lambda probe: probe.score_kept(some("timm-vit")))
        best = trace.logits.argmax(-1)
        assert_same(probed_scores, expected[range(B), :, best])
        contrast = probed(
            traced("timm-vit", torch.float64, cv.Contrast(1, 5), score),
            lambda probe: probe.score_kept(some("timm-vit")),
        )
        assert_same(contrast, expected[..., 1] - expected[..., 5], magnitude=float(expected.abs().max()))


def test_an_embedding_is_compared_with_a_text() -> None:
    name = "hf-clip-projection-sdpa"
    text = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trace = traced(name, torch.float64, lambda out: torch.cosine_similarity(out, text[None]))
    expected = torch.cosine_similarity(every_logit_of_embedding(name), text[None, None], dim=-1)
    assert (probed(trace, lambda probe: probe.score_kept(some(name))) - expected).abs().max() < 1e-12


def every_logit_of_embedding(name: str) -> Tensor:
    trace = traced(name, torch.float64, 0)
    return probed(trace, lambda probe: probe.score_kept(some(name), score=lambda logits, images: logits))


def test_a_value_gets_the_images_that_it_sees() -> None:
    def value(logits: Tensor, images: list[int]) -> Tensor:
        return torch.stack([logits[:, 0], torch.tensor(images, dtype=logits.dtype)], 1)

    probed_scores = probed(
        traced("timm-vit", torch.float64),
        lambda probe: probe.score_kept(some("timm-vit"), value),
        options=ExecutionOptions(batch_size=4),
    )
    assert probed_scores.shape == (B, V, 2)
    assert torch.equal(probed_scores[..., 1], torch.arange(B, dtype=torch.float64)[:, None].expand(-1, V))
    assert (probed_scores[..., 0] - every_logit("timm-vit")[..., 0]).abs().max() < 1e-12


# What it costs and says


def test_the_cost_is_what_went_through_the_model() -> None:
    trace = traced("timm-vit")
    drop_strategy(trace.recording)  # found once for each model, and not counted
    passed: list[int] = []
    module = trace.recording.model.module
    module.blocks[0].register_forward_hook(lambda m, args, out: passed.append(len(out)))
    probed(trace, lambda probe: probe.score_kept(some("timm-vit")))
    assert sum(passed) == B * V
    assert trace.recording.forwards == 1 + V
    probed(trace, painted, "mean")
    probed(trace, rewritten)
    assert trace.recording.forwards == 1 + 3 * V
    assert sum(passed) == 3 * B * V


def test_an_interrupted_probe_has_cost_what_it_passed() -> None:
    trace = traced("timm-vit")

    def half(probe: Probe) -> Tensor:
        probe.score_kept(some("timm-vit", 1, 4))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probed(trace, half)
    assert trace.recording.forwards == 5


def test_it_says_what_was_done_instead_of_dropping() -> None:
    notes = {}
    for name in KINDS:
        with probing(traced(name), "token", label="test", forwards=V) as probe:
            notes[name] = " ".join(probe.notes)
    assert not notes["timm-vit"]
    assert not notes["timm-eva02"]
    assert not notes["timm-siglip-map"]
    assert "set to zero" in notes["timm-sam"]
    assert "removal=mean" in notes["home-loop"]


def test_images_whose_score_never_moves_are_reported() -> None:
    model = fresh("timm-vit")
    nn.init.zeros_(model.module.head.weight)
    for variants in (V, 1):
        keep = some("timm-vit", 1, variants)
        still = cv.trace(model, pixels("timm-vit", B), target=3)
        for trace, unmoved in ((still, True), (traced("timm-vit"), False)):
            with probing(trace, "token", label="test", forwards=variants) as probe:
                probe.score_kept(keep)
                assert probe.unmoved() == [unmoved] * B


def test_masks_must_be_booleans_of_the_right_shape() -> None:
    wrong = [some("timm-vit")[0], some("timm-vit")[..., :9], some("timm-vit")[:2], some("timm-vit").float()]
    for keep in wrong:
        with pytest.raises(BadInput, match=r"expected booleans of shape \[3 images or 1, variants, 16 patches\]"):
            probed(traced("timm-vit"), lambda probe, keep=keep: probe.score_kept(keep))
    assert probed(traced("timm-vit"), lambda probe: probe.score_kept(some("timm-vit")[:, :0])).shape == (B, 0)


# A guest


def interrupting(after: int) -> tuple[Callable[..., None], list[int]]:
    left = [after]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    return hook, left


@pytest.mark.parametrize("how", ["keeping", "rewriting"])
@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02", "timm-sam", "home-lucid", "home-in-place"])
def test_ctrl_c_inside_a_block_leaves_the_model_as_it_was(name: str, how: str) -> None:
    """In every pass that there is: while the way is found, and while variants are run."""
    ways = {"keeping": lambda probe: probe.score_kept(some(name)), "rewriting": rewritten}
    module = build(name).double().train()
    for number, p in enumerate(module.parameters()):
        p.requires_grad_(number % 3 != 0)
    expected = probed(traced(name, torch.float64), ways[how])
    interrupted = 0
    for after in (1, 2, 3, 5, 8, 13, 21):
        model = cv.wrap(module, name=name, size=ZOO[name].size)
        trace = cv.trace(model, pixels(name, B, dtype=torch.float64), target=3)
        trace.recording.structure.facts.pop("drop strategy", None)  # found anew
        block = trace.recording.structure.layers[-1].block
        assert block is not None
        hook, left = interrupting(after)
        handle = block.register_forward_pre_hook(hook)
        before, around = fingerprint(module), surroundings()
        options = ExecutionOptions(batch_size=4)
        if after <= 13:
            with pytest.raises(KeyboardInterrupt):
                probed(trace, ways[how], options=options)
            interrupted += 1
        else:
            left[0] = -1
            probed_scores = probed(trace, ways[how], options=options)
            assert_same(probed_scores, expected)
        assert differences(before, fingerprint(module)) == []
        assert differences(around, surroundings()) == []
        handle.remove()
    assert interrupted == 6


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, nullcontext])
@pytest.mark.parametrize("name", [*KINDS, "timm-beit-explicit", "home-lucid", "home-in-place"])
def test_callers_may_have_gradients_switched_off(name: str, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    expected = probed(traced(name, torch.float64), lambda probe: probe.score_kept(some(name)))
    keep_one = torch.zeros(1, 1, some(name).shape[2], dtype=torch.bool)
    keep_one[..., 3] = True
    alone = probed(traced(name, torch.float64), lambda probe: probe.score_kept(keep_one))
    model, images = double(name, B)
    maps = cv.explain(model, images, "leave-one-out", target=3).maps
    with mode():
        trace = cv.trace(model, images, target=3)
        probed_scores = probed(trace, lambda probe: probe.score_kept(some(name)))
        again = probed(trace, lambda probe: probe.score_kept(keep_one))
        assert_same(cv.explain(model, images, "leave-one-out", target=3).maps, maps, magnitude=1.0)
    assert_same(probed_scores, expected)
    assert_same(again, alone)
    assert not probed_scores.requires_grad


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("removal", ["token", "blur"])
@pytest.mark.parametrize("name", [*KINDS, "home-lucid"])
def test_nothing_is_kept_when_the_work_is_done(name: str, removal: str) -> None:
    """Without the garbage collector: nothing goes round in circles."""
    probed(traced(name), lambda probe: probe.score_kept(some(name)), removal)
    gc.collect()
    gc.disable()
    try:
        trace = traced(name)
        single = torch.zeros(1, 1, some(name).shape[2], dtype=torch.bool)
        single[..., 3] = True
        stream = droppable_tokens(trace.recording)
        with probing(trace, removal, label="test", forwards=1) as probe:
            probe.score_kept(some(name))
            probe.score_kept(single)
        watched = [
            weakref.ref(thing) for thing in (trace, trace.recording, trace.pixels, probe, stream) if thing is not None
        ]
        del trace, probe, stream
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_two_threads_on_one_model() -> None:
    model = fresh("timm-vit", torch.float64)
    model.module.train()
    before = fingerprint(model.module)
    images = pixels("timm-vit", 4, dtype=torch.float64)
    alone = [probed(cv.trace(model, x, target=3), lambda p: p.score_kept(some("timm-vit", 1))) for x in images]
    forget_structures(model.module)
    results: dict[int, Tensor] = {}

    def work(k: int) -> None:
        trace = cv.trace(model, images[k], target=3)
        results[k] = probed(trace, lambda p: p.score_kept(some("timm-vit", 1)))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert differences(before, fingerprint(model.module)) == []
    for k in range(4):
        assert_same(results[k], alone[k])
