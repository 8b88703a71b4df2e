"""leave-one-out is the effect of each removal, by closed form and by hand; atman is what a hand-written forward with
suppressed scores says, what the authors' own code says, and the same whether attention is fused or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import clairvit as cv
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.leave_one_out import suppress_keys, suppression_factors
from clairvit.perturbation.probe import probing
from helpers.custom_vits import HomeMade, merge_heads, split_heads
from helpers.linear_patch_model import effects, linear
from helpers.reference_token_dropping import logits_without
from helpers.rounding import assert_same, growth, same
from helpers.tiny_models import STRANGE, ZOO, build, cnn, double, pixels, strange, wrapped
from parity.peers_models import TARGETS, vit

TARGET = 3
FIXTURES = Path(__file__).parent.parent / "fixtures"


# leave-one-out


@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_leaving_one_out_of_a_linear_model_is_its_effect(grid: tuple[int, int]) -> None:
    model, image = linear(grid)
    for target in range(3):
        explanation = cv.explain(model, image, "leave-one-out", target, score="logit", removal="mean")
        assert_same(
            explanation.maps[0], effects(model, image, target), magnitude=effects(model, image, target).abs().sum()
        )


DROPPED = ["timm-vit", "timm-vit-nonsquare", "timm-vit-avg", "timm-reg4-gap", "timm-dinov2-reg4"]
ROTARY = ["timm-eva02", "timm-dinov3", "timm-dinov3-explicit"]


@pytest.mark.parametrize("kind", [*DROPPED, *ROTARY])
def test_leaving_a_token_out_is_running_the_model_on_the_others(kind: str) -> None:
    """Class token and mean pooling, registers, non-square, rotary positions (whose angles must be dropped too)."""
    module, images = build(kind).double(), pixels(kind, dtype=torch.float64)
    patches = ZOO[kind].grid[0] * ZOO[kind].grid[1]
    explanation = cv.explain(cv.wrap(module, size=ZOO[kind].size), images, "leave-one-out", TARGET)
    assert explanation.score == "prob"
    assert not explanation.notes
    for image, heatmap in zip(images, explanation.maps, strict=True):
        chances = [
            logits_without(module, image[None], gone, patches).softmax(-1)[TARGET]
            for gone in ([], *([i] for i in range(patches)))
        ]
        expected = chances[0] - torch.stack(chances[1:])
        assert_same(heatmap.flatten(), expected, magnitude=float(chances[0]))  # differences of chances


@pytest.mark.parametrize("kind", DROPPED)
def test_painting_a_patch_over_is_running_the_model_on_that_image(kind: str) -> None:
    module, images = build(kind).double(), pixels(kind, dtype=torch.float64)
    rows, cols = ZOO[kind].grid
    model = cv.wrap(module, size=ZOO[kind].size)
    explanation = cv.explain(model, images, "leave-one-out", TARGET, score="logit", removal="mean")
    with torch.no_grad():
        for r in range(rows):
            for c in range(cols):
                painted = images.clone()
                painted[:, :, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8] = 0
                before, after = module(images)[:, TARGET], module(painted)[:, TARGET]
                assert_same(explanation.maps[:, r, c], before - after, magnitude=float(before.abs().max()))


# atman


def suppressed_scores(scores: Tensor, weights: Tensor, shift_min: bool) -> Tensor:
    """The authors' formula as printed, row by row."""
    low = scores.min(-1, keepdim=True).values if shift_min else torch.zeros(())
    return (scores - low) * weights


def by_hand(module: HomeMade, image: Tensor, weights: Tensor, shift_min: bool) -> Tensor:
    """Logits [C] of a home-made ViT whose scores are all suppressed by weights [tokens]."""
    x = module.tokens(image)
    for block in module.blocks:
        attention: Any = block.attention
        q, k, v = map(split_heads, attention.qkv(block.norm(x)).chunk(3, -1))
        scores = suppressed_scores(q @ k.mT * q.shape[-1] ** -0.5, weights, shift_min)
        x = x + attention.out(merge_heads(scores.softmax(-1) @ v))
        x = x + block.mlp(x)
    return module.head(module.norm(x)[:, 0])[0]


def weights_by_hand(tokens: Tensor, i: int, factor: float, threshold: float | None) -> Tensor:
    """[1 + patches], of tokens [1 + patches, d]; the class token counts as ever."""
    weights = torch.ones(len(tokens), dtype=tokens.dtype)
    for j in range(1, len(tokens)):
        cosine = float(cosine_similarity(tokens[1 + i], tokens[j], dim=0))
        if j == 1 + i:
            weights[j] = factor
        elif threshold is not None and cosine >= threshold:
            weights[j] = (1 - factor) * (1 - cosine) + factor
    return weights


@pytest.mark.parametrize("shift_min", [True, False])
@pytest.mark.parametrize(("factor", "threshold"), [(0.1, None), (0.1, 0.2), (0.0, 0.0), (0.6, 0.3)])
def test_atman_is_the_forward_with_suppressed_scores(shift_min: bool, factor: float, threshold: float | None) -> None:
    module, images = build("home-matmul").double(), pixels("home-matmul", dtype=torch.float64)
    options = {"factor": factor, "threshold": threshold, "shift_min": shift_min}
    explanation = cv.explain(cv.wrap(module), images, "atman", TARGET, **options)
    assert explanation.score == "logprob"
    near = 0
    with torch.no_grad():
        for image, heatmap in zip(images, explanation.maps, strict=True):
            before = module(image[None])[0].log_softmax(-1)[TARGET]
            for i in range(16):
                weights = weights_by_hand(module.tokens(image[None])[0], i, factor, threshold)
                near += int((weights != 1).sum()) - 1
                after = by_hand(module, image[None], weights, shift_min).log_softmax(-1)[TARGET]
                assert_same(heatmap.flatten()[i], before - after, magnitude=float(before.abs()))
    assert (near > 0) == (threshold is not None), "there are patches that look alike, or the test says nothing of them"


def test_the_variants_differ() -> None:
    model, image = double("home-matmul")
    texts = ["atman", "atman(shift_min=false)", "atman(threshold=none)", "atman(threshold=0.2)", "atman(factor=0.5)"]
    maps = [cv.explain(model, image, text, TARGET).maps for text in texts]
    for number, heatmap in enumerate(maps[1:], start=1):
        alike = texts[number] == "atman(threshold=none)"  # no tokens are so much alike here
        assert same(heatmap, maps[0]) == alike, texts[number]


@pytest.mark.parametrize("kind", ["timm-vit", "timm-eva02", "timm-relpos", "timm-siglip-map"])
def test_atman_is_the_same_on_fused_and_explicit_attention(kind: str) -> None:
    maps = []
    for fused in (True, False):
        module = build(kind).double()
        for part in module.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = fused
        image = pixels(kind, dtype=torch.float64)
        maps.append(cv.explain(cv.wrap(module), image, "atman", TARGET, threshold=0.2).maps)
    assert_same(maps[0], maps[1], magnitude=1)  # differences of log-probabilities of about 1


def test_atman_says_what_the_authors_code_says() -> None:
    """tests/parity/make_atman.py ran their suppression and their similarities on this model."""
    module, images = vit()
    kept = np.load(FIXTURES / "atman.npz")
    for name in kept.files:
        threshold = None if name == "none" else float(name)
        explanation = cv.explain(cv.wrap(module), images, "atman", TARGETS, threshold=threshold)
        # their similarities are float32: of 24 channels, and a float32 weight changes a score by as much
        bound = {"dtype": torch.float32, "growth": growth(depth=1, width=24), "magnitude": 1.0}
        assert_same(explanation.maps.flatten(1), kept[name], **bound, label=name)


def test_atman_explains_the_score_of_the_option() -> None:
    module, images = build("home-matmul").double(), pixels("home-matmul", dtype=torch.float64)
    explanation = cv.explain(cv.wrap(module), images, "atman", TARGET, score="logit")
    with torch.no_grad():
        weights = weights_by_hand(module.tokens(images[:1])[0], 5, 0.1, 0.6)
        expected = module(images[:1])[0] - by_hand(module, images[:1], weights, True)
        largest = float(module(images[:1]).abs().max())
    assert explanation.score == "logit"
    assert_same(explanation.maps[0].flatten()[5], expected[TARGET], magnitude=largest)


def test_a_factor_near_one_changes_nearly_nothing_also_where_a_class_token_joins_late() -> None:
    """Shifting part of a row would change the attention even without any suppression (CaiT's class attention)."""
    for kind in ("timm-cait", "timm-vit", "open_clip-coca"):
        usual, next_to_none = (
            cv.explain(wrapped(kind), pixels(kind), "atman", TARGET, score="logit", factor=f).maps.abs().max()
            for f in (0.1, 1 - 1e-7)
        )
        assert next_to_none <= 1e-4 * usual, kind


def test_what_a_mask_of_the_model_hides_stays_hidden() -> None:
    scores = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.tensor([[1.0, 0.1, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]], dtype=torch.float64)  # 0 · −inf is NaN
    for never in (float("-inf"), torch.finfo(torch.float64).min):
        masked = scores.clone()
        masked[..., 3] = never
        attention = suppress_keys(weights, shift_min=True)(masked).softmax(-1)
        expected = suppress_keys(weights[:, :3], shift_min=True)(scores[..., :3]).softmax(-1)
        assert (attention[..., 3] == 0).all()
        assert_same(attention[..., :3], expected, magnitude=1)


def test_patches_that_look_alike_are_turned_down_by_how_alike_they_are() -> None:
    directions = [[1.0, 0.0], [0.8, 0.6], [-1.0, 0.1], [2.0, 0.0]]  # cosines to the first: 0.8, < 0, 1
    tokens = torch.tensor([directions], dtype=torch.float64)
    assert_same(suppression_factors(tokens, 0.1, 0.6)[0, 0], [0.1, 0.9 * 0.2 + 0.1, 1.0, 0.1])
    assert_same(suppression_factors(tokens, 0.1, None)[0, 0], [0.1, 1, 1, 1])


@pytest.mark.parametrize("option", ["factor=1", "factor=-0.1", "threshold=1.2", "threshold=-0.5"])
def test_impossible_options_are_refused(option: str) -> None:
    with pytest.raises(BadInput, match=r"was given; expected .* such as"):
        cv.explain(wrapped("timm-vit"), pixels("timm-vit"), f"atman({option})", TARGET)


@pytest.mark.parametrize("kind", ["swin", "xcit", "maxvit"])
def test_attention_inside_windows_is_refused(kind: str) -> None:
    module, size = strange(STRANGE[kind].make), STRANGE[kind].size
    with pytest.raises(NotApplicable, match=r"attends .*Use a gradient method"):
        cv.explain(cv.wrap(module, size=size), torch.randn(1, 3, *size), "atman", TARGET)


def test_a_cnn_is_refused() -> None:
    with pytest.raises(NotApplicable, match=r"[Uu]se "):
        cv.explain(cv.wrap(strange(cnn), size=(32, 32)), torch.randn(1, 3, 32, 32), "atman", TARGET)


def test_the_engine_says_when_attention_was_not_changed() -> None:
    """Whoever asks it for rewritten scores must not get those of the unchanged model instead."""
    module, size = strange(STRANGE["swin"].make), STRANGE["swin"].size
    traced = cv.trace(cv.wrap(module, size=size), torch.randn(1, 3, *size), TARGET)
    with (
        pytest.raises(NotApplicable, match=r"Only 0 of the 4 attention calls of this model could be changed"),
        probing(traced, "mean", label="test", forwards=2) as probe,
    ):
        probe.score_with_attention(2, lambda images, ks: lambda scores: scores)
