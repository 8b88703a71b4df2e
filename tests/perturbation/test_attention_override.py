"""Attention is changed before the softmax, in every layer of every tiny model, however its attention is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.perturbation.attention_override import AttentionOverride, ScoreTransform, mask_tokens
from clairvit.perturbation.probe import probing
from clairvit.perturbation.token_dropping import DropStrategy, droppable_tokens, run_tokens
from helpers.rounding import assert_same, rounding_bound
from helpers.tiny_models import TINY, ZOO, fresh, pixels, wrapped


def same(scores: Tensor) -> Tensor:
    return scores


@pytest.mark.parametrize("name", TINY)
def test_every_layer_is_seen_and_unchanged_scores_change_nothing(name: str) -> None:
    tiny, model, image = ZOO[name], wrapped(name, torch.float64), pixels(name, 3, dtype=torch.float64)
    shapes: list[torch.Size] = []

    def look(scores: Tensor) -> Tensor:
        shapes.append(scores.shape)
        return scores

    with torch.no_grad():
        plain = model.logits(image)
        with AttentionOverride(3, tiny.tokens, look) as override:
            logits = model.logits(image)
    assert_same(logits, plain)
    assert override.calls == len(shapes) == tiny.layers + tiny.pools
    assert all(shape[0] == 3 and shape[-1] == tiny.tokens for shape in shapes)
    assert all(shape[-2] == tiny.tokens for shape in shapes[: tiny.layers])


@pytest.mark.parametrize("name", [name for name in TINY if ZOO[name].sums_to_one])
def test_nobody_sees_a_hidden_token(name: str) -> None:
    """Other pixels in a hidden patch change nothing that is read, where the patch's own row is not read."""
    tiny, model, image = ZOO[name], wrapped(name, torch.float64), pixels(name, 2, dtype=torch.float64)
    if tiny.pooling not in ("token", "distilled", "map"):
        return _mean_of_the_others(name)
    shown = torch.ones(2, tiny.tokens, dtype=torch.bool)
    shown[0, tiny.prefix] = shown[1, tiny.prefix + 1] = False
    other = image.clone()
    other[0, :, :8, :8] += 1
    other[1, :, :8, 8:16] += 1
    with torch.no_grad():
        with AttentionOverride(2, tiny.tokens, mask_tokens(shown)):
            first, second = model.logits(image), model.logits(other)
        assert_same(first, second)
        assert (model.logits(image) - model.logits(other)).abs().max() > 1e-3
    return None


def _mean_of_the_others(name: str) -> None:
    """A mean reads the hidden token's own row, but the other rows do not look at it."""
    tiny, model, image = ZOO[name], fresh(name, torch.float64), pixels(name, 1, dtype=torch.float64)
    trace = cv.trace(model, image, target=3)
    block = trace.recording.structure.layers[-1].block
    if block is None:
        return
    seen: list[Tensor] = []
    block.register_forward_hook(lambda m, a, out: seen.append(out if isinstance(out, Tensor) else out[0]))
    shown = torch.ones(1, tiny.tokens, dtype=torch.bool)
    shown[0, tiny.prefix] = False
    other = image.clone()
    other[0, :, :8, :8] += 1
    with torch.no_grad(), AttentionOverride(1, tiny.tokens, mask_tokens(shown)):
        model.logits(image)
        model.logits(other)
    first, second = (trace.recording.as_tokens(out)[0] for out in seen)
    moved = (first - second).abs().amax(-1) > rounding_bound(float(first.abs().max()))
    assert moved.nonzero().flatten().tolist() == [tiny.prefix]


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02", "hf-vit-eager", "home-loop", "home-in-place", "timm-sam"])
def test_a_probe_changes_the_attention_of_each_variant_for_itself(name: str) -> None:
    """Variant v of image b hides patch v + b, in one pass or in many."""
    tiny = ZOO[name]
    model, image = wrapped(name, torch.float64), pixels(name, 2, dtype=torch.float64)
    trace = cv.trace(model, image, target=3)

    def transform(images: Tensor, variants: Tensor) -> ScoreTransform:
        shown = torch.ones(len(images), tiny.tokens, dtype=torch.bool)
        shown[torch.arange(len(images)), tiny.prefix + images + variants] = False
        return mask_tokens(shown)

    with probing(trace, "token", label="test", forwards=4) as probe:
        probed_scores = probe.score_with_attention(4, transform)
    assert trace.recording.forwards == 5
    assert probed_scores.shape == (2, 4)
    for b in range(2):
        for v in range(4):
            shown = torch.ones(1, tiny.tokens, dtype=torch.bool)
            shown[0, tiny.prefix + b + v] = False
            with torch.no_grad(), AttentionOverride(1, tiny.tokens, mask_tokens(shown)):
                alone = model.logits(image[b : b + 1])[0, 3]
            assert_same(probed_scores[b, v], alone)


def test_pools_get_the_class_token_that_joins_late_and_windows_are_left_alone() -> None:
    model, image = wrapped("timm-cait", torch.float64), pixels("timm-cait", 2, dtype=torch.float64)
    with torch.no_grad(), AttentionOverride(2, 16, same) as override:
        model.logits(image)
    assert override.calls == 4  # two layers of 16 × 16, two pools whose 17th key is the class token
    with torch.no_grad(), AttentionOverride(2, 9, lambda scores: scores * 0) as nothing:
        model.logits(image)
    assert nothing.calls == 0


def test_hidden_tokens_are_hidden_from_handed_tokens_too() -> None:
    trace = cv.trace(wrapped("timm-vit", torch.float64), pixels("timm-vit", 2, dtype=torch.float64), target=3)
    tokens = droppable_tokens(trace.recording)
    assert tokens is not None
    shown = torch.rand(2, 17, generator=torch.Generator().manual_seed(0)) < 0.5
    shown[:, 0] = True
    with torch.no_grad(), AttentionOverride(2, 17, mask_tokens(shown)):
        outputs = run_tokens(trace.recording, DropStrategy("drop"), tokens, None)
        expected = trace.recording.model.logits(trace.pixels)
    assert_same(outputs, expected)
