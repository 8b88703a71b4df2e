"""Refined maps: the posterior of a linear model, its closed forms, and the passes that it is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.ensembles import refine
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.refine_further import refine_explanation
from clairvit.methods.refined import (
    LEAST_AGREEMENT,
    Posterior,
    log_odds,
    posterior,
    prior_covariance,
    refined_map,
    scaled_prior,
)
from clairvit.methods.spec import resolve_method
from clairvit.perturbation.random_sets import BLOCK, contrasts, keep_sets
from clairvit.targets.base import TargetBatch
from helpers.rounding import assert_same
from helpers.tiny_models import cnn, double

PATCHES, EQUATIONS = 12, 30


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def positive_definite(size: int, seed: int = 0) -> Tensor:
    root = drawn(size, size, seed=seed)
    return root @ root.mT + torch.eye(size, dtype=torch.float64)


# Which patches are kept


def test_a_larger_budget_adds_sets_at_the_end() -> None:
    sets = keep_sets(49, 40, seed=3)
    for passes in (0, 1, 7, 8, 21):
        assert torch.equal(keep_sets(49, passes, seed=3), sets[:passes])
    assert not torch.equal(keep_sets(49, 40, seed=4), sets)


def test_a_block_has_sets_of_one_size_and_sizes_spread_from_few_to_nearly_all() -> None:
    counts = keep_sets(196, 800, seed=0).sum(1).view(-1, BLOCK)
    assert (counts == counts[:, :1]).all()
    assert counts.min() == round(196 * 0.05)
    assert 196 * 0.94 < counts.max() <= round(196 * 0.95)
    assert abs(float(counts.double().mean()) - 98) < 2
    assert keep_sets(2, 16, seed=0).sum(1).tolist() == [1] * 16, "never none, never all"


@pytest.mark.parametrize("count", [2, 8, 9, 21])
def test_contrasts_are_orthonormal_and_drop_the_mean_of_each_block(count: int) -> None:
    mixing = contrasts(count)
    blocks = math.ceil(count / BLOCK)
    assert mixing.shape == (count - blocks, count)
    assert_same(mixing @ mixing.mT, torch.eye(count - blocks, dtype=torch.float64))
    effect_of_size = torch.arange(blocks, dtype=torch.float64).repeat_interleave(BLOCK)[:count]
    assert_same(mixing @ effect_of_size, torch.zeros(count - blocks, dtype=torch.float64), magnitude=float(blocks))


# The posterior


def test_without_correlation_and_prior_it_is_ridge() -> None:
    K, v, noise = drawn(EQUATIONS, PATCHES), drawn(EQUATIONS, seed=1), 3.0
    identity = torch.eye(PATCHES, dtype=torch.float64)
    actual = posterior(K, v, torch.zeros(PATCHES, dtype=torch.float64), identity, noise)
    penalty = noise * (K @ K.mT).diagonal().mean()
    assert_same(actual.mean, torch.linalg.solve(K.mT @ K + penalty * identity, K.mT @ v), magnitude=10.0)


def test_it_is_the_conditional_of_a_joint_normal() -> None:
    """Mean and covariance of φ given v, by the blocks of the joint covariance of (φ, v)."""
    K, v, m = drawn(EQUATIONS, PATCHES), drawn(EQUATIONS, seed=1), drawn(PATCHES, seed=2)
    C, noise = positive_definite(PATCHES), 4.0
    actual = posterior(K, v, m, C, noise)
    g = (K @ C @ K.mT).diagonal().mean()
    joint = K @ C @ K.mT + noise * g * torch.eye(EQUATIONS, dtype=torch.float64)  # over τ²
    gain = C @ K.mT @ joint.inverse()
    assert_same(actual.mean, m + gain @ (v - K @ m), magnitude=100.0)
    tau = actual.noise / float(g * noise)  # τ²
    assert_same(actual.covariance, tau * (C - gain @ K @ C), magnitude=100.0 * tau)


def test_an_estimate_with_more_shrinkage_has_the_errors_of_a_joint_normal() -> None:
    """With s ≠ λ: E[(φ − φ̂)(φ − φ̂)ᵀ] of a linear estimate φ̂ = m + B (v − K m), by the joint covariance of φ and v."""
    K, v, m = drawn(EQUATIONS, PATCHES), drawn(EQUATIONS, seed=1), drawn(PATCHES, seed=2)
    C, noise, shrinkage = positive_definite(PATCHES), 3.0, 40.0
    actual = posterior(K, v, m, C, noise, shrinkage)
    g = (K @ C @ K.mT).diagonal().mean()
    identity = torch.eye(EQUATIONS, dtype=torch.float64)
    B = C @ K.mT @ (K @ C @ K.mT + shrinkage * g * identity).inverse()
    assert_same(actual.mean, m + B @ (v - K @ m), magnitude=100.0)
    tau = actual.noise / float(g * noise)
    of_both = K @ C @ K.mT + noise * g * identity  # of v
    expected = C - B @ K @ C - C @ K.mT @ B.mT + B @ of_both @ B.mT
    assert_same(actual.covariance, tau * expected, magnitude=100.0 * tau)
    best = posterior(K, v, m, C, noise)
    assert_same(actual.noise, best.noise, magnitude=100.0)
    assert (actual.standard_error > best.standard_error).all(), "no estimate errs less than the posterior mean"


def test_standard_errors_of_few_passes_are_no_smaller_than_those_of_more() -> None:
    """The map moves little after few passes, but that does not make it sure: of additive values with noise."""
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).double()
    sets = keep_sets(16, 256, seed=0)
    scores = sets.double() @ drawn(16, seed=2) + 0.5 * drawn(256, seed=3)
    errors = [
        refined_map(drawn(16, seed=1), sets[:passes], scores[:passes], places, None).standard_error.mean()
        for passes in (16, 64, 256)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_tau_makes_left_out_residuals_as_large_as_their_variances() -> None:
    """Leave one equation out and predict it, by brute force: the mean of residual² / variance is 1."""
    K, v, m = drawn(10, PATCHES), drawn(10, seed=1), drawn(PATCHES, seed=2)
    C, noise = positive_definite(PATCHES), 4.0
    actual = posterior(K, v, m, C, noise)
    g = (K @ C @ K.mT).diagonal().mean()
    tau = actual.noise / float(g * noise)
    ratios = []
    for row in range(10):
        rest = [other for other in range(10) if other != row]
        joint = K[rest] @ C @ K[rest].mT + noise * g * torch.eye(9, dtype=torch.float64)
        gain = C @ K[rest].mT @ joint.inverse()
        predicted = K[row] @ (m + gain @ (v[rest] - K[rest] @ m))
        variance = tau * (K[row] @ (C - gain @ K[rest] @ C) @ K[row] + noise * g)
        ratios.append(float((v[row] - predicted) ** 2 / variance))
    assert sum(ratios) / 10 == pytest.approx(1.0, abs=1e-9)


def test_without_passes_it_is_the_prior() -> None:
    w = drawn(PATCHES)
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(4.0)).double()
    for passes in (0, 1):  # one pass compares nothing
        sets = keep_sets(PATCHES, passes, seed=0)
        actual = refined_map(w, sets, drawn(passes), places, None)
        assert torch.equal(actual.mean, w)
        assert actual.standard_error.isnan().all()


@pytest.mark.parametrize("broken", ["prior", "scores", "tokens"])
def test_what_is_not_finite_gives_no_map(broken: str) -> None:
    """NaN, which the explanation names, and no error of linear algebra."""
    values = {"prior": drawn(PATCHES), "scores": drawn(16, seed=1), "tokens": drawn(PATCHES, 5, seed=2)}
    values[broken].view(-1)[3] = math.nan
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(4.0)).double()
    sets = keep_sets(PATCHES, 16, seed=0)
    actual = refined_map(values["prior"], sets, values["scores"], places, values["tokens"])
    assert actual.mean.isnan().all()
    assert actual.standard_error.isnan().all()


def test_an_additive_model_is_recovered_up_to_a_constant() -> None:
    """v = Z φ + h(|S|): with many equations and little noise the posterior finds φ, whatever the prior and h are."""
    phi, K = drawn(PATCHES, seed=5), contrasts(400) @ keep_sets(PATCHES, 400, seed=0).double()
    v = contrasts(400) @ (keep_sets(PATCHES, 400, seed=0).double() @ phi + keep_sets(PATCHES, 400, seed=0).sum(1) ** 2)
    actual = posterior(K, v, drawn(PATCHES, seed=6), positive_definite(PATCHES), 1e-6).mean
    difference = actual - phi
    assert (difference - difference.mean()).abs().max() < 1e-5 * phi.abs().max()


def test_intervals_of_unseen_equations_hold_what_they_promise() -> None:
    """90 % of unseen equations inside their 90 % interval, where data are drawn as the model says; 400 × 20 of them."""
    generator = torch.Generator().manual_seed(0)
    C, noise, inside, total = positive_definite(PATCHES, seed=3), 3.0, 0, 0
    root = torch.linalg.cholesky(C)
    for trial in range(400):
        K = drawn(EQUATIONS + 20, PATCHES, seed=trial)
        scale = (K[:EQUATIONS] @ C @ K[:EQUATIONS].mT).diagonal().mean()
        phi = root @ torch.randn(PATCHES, dtype=torch.float64, generator=generator)
        error = (noise * scale).sqrt() * torch.randn(len(K), dtype=torch.float64, generator=generator)
        v = K @ phi + error
        fitted = posterior(K[:EQUATIONS], v[:EQUATIONS], torch.zeros(PATCHES, dtype=torch.float64), C, noise)
        gaps = (v[EQUATIONS:] - K[EQUATIONS:] @ fitted.mean).abs()
        inside += int((gaps < 1.6449 * fitted.predictive_error(K[EQUATIONS:])).sum())
        total += 20
    assert 0.87 < inside / total < 0.93


def test_the_scale_of_the_prior_is_never_negative_and_close_to_least_squares_with_many_equations() -> None:
    K, w = drawn(4000, PATCHES), drawn(PATCHES, seed=1)
    against = scaled_prior(w, K, -(K @ w))
    assert_same(against, w * LEAST_AGREEMENT)
    fitting = scaled_prior(w, K, 2 * (K @ w))
    assert ((fitting / w - 2).abs() < 2 * 8 / 4000).all()
    assert torch.equal(scaled_prior(torch.zeros_like(w), K, K @ w), torch.zeros_like(w))
    assert torch.equal(scaled_prior(w, K, torch.zeros(4000, dtype=torch.float64)), torch.zeros_like(w))


def test_the_prior_covariance_by_its_formula() -> None:
    w, tokens = drawn(6), drawn(6, 4, seed=1)
    places = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0)).double()
    actual = prior_covariance(w, places, tokens)
    for i in range(6):
        for j in range(6):
            cosine = float(tokens[i] @ tokens[j] / (tokens[i].norm() * tokens[j].norm()))
            distance = float((places[i] - places[j]).square().sum())
            scales = [0.3 + float(w[k].abs() / w.abs().mean()) for k in (i, j)]
            shared = 0.3 * (i == j) + 0.7 * math.exp((cosine - 1) / 0.15) * math.exp(-distance / (2 * 2.5**2))
            assert float(actual[i, j]) == pytest.approx(math.sqrt(scales[0] * scales[1]) * shared, rel=1e-9)
    assert torch.linalg.eigvalsh(prior_covariance(torch.zeros(6, dtype=torch.float64), places, None)).min() > 0


# The method


def test_the_passes_are_those_of_a_vit_without_the_other_tokens() -> None:
    """Prior, sets and log-odds by hand: patches' tokens left out of a timm ViT, class token and positions kept."""
    model, pixels = double("timm-vit", batch=2)
    spec = resolve_method("refine(saliency,passes=19)")
    explanation = cv.explain(model, pixels, spec, target=3, seed=5)
    prior = cv.explain(model, pixels, "saliency", target=3)
    module = model.module
    rows, cols = explanation.maps.shape[1:]
    keep = keep_sets(rows * cols, 19, seed=5)
    places = torch.cartesian_prod(torch.arange(float(rows)), torch.arange(float(cols))).double()
    with torch.no_grad():
        embedded = module.patch_embed(pixels)
        tokens = module._pos_embed(embedded)
        last = module.norm_pre(tokens)
        for block in module.blocks[:-1]:
            last = block(last)
        for image in range(2):
            odds = []
            for row in keep:
                kept = torch.cat([torch.ones(tokens.shape[1] - rows * cols, dtype=torch.bool), row])
                x = module.norm_pre(tokens[image : image + 1, kept])
                probability = module.forward_head(module.norm(module.blocks(x))).softmax(-1)[0, 3]
                odds.append(torch.log(probability / (1 - probability)))
            patch_tokens = last[image, tokens.shape[1] - rows * cols :]
            expected = refined_map(prior.maps[image].flatten().double(), keep, torch.stack(odds), places, patch_tokens)
            assert_same(explanation.maps[image].flatten().double(), expected.mean, growth=2**20)
            error = explanation.standard_error
            assert error is not None
            assert_same(error[image].flatten().double(), expected.standard_error, growth=2**20)
    assert explanation.cost.forwards == 1 + 1 + 19
    assert explanation.cost.backwards == 1
    assert any("log-odds of the class" in note for note in explanation.notes), "the unit of the map"


def test_passes_of_explain_refine_the_method_or_the_default() -> None:
    model, pixels = double("timm-vit", batch=1)
    assert cv.explain(model, pixels, "genatt", passes=9).method == "refine(genatt,passes=9)"
    by_default = cv.explain(model, pixels, passes=9)
    assert by_default.method == "refine(attnlrp+plus,passes=9)"
    assert by_default.standard_error is not None
    with pytest.raises(BadInput, match="passes=-1"):
        cv.explain(model, pixels, "genatt", passes=-1)


def test_other_models_and_targets() -> None:
    """A CNN's patches are painted, an embedding's cosine is taken as it is, a contrast too."""
    convolutional = cv.wrap(cnn(), size=32)
    explanation = cv.explain(convolutional, drawn(1, 3, 32, 32).float(), "refine(saliency,passes=9)")
    assert explanation.maps.isfinite().all()
    assert any(note.startswith("refine: this model has no token stream") for note in explanation.notes)
    model, pixels = double("timm-vit", batch=1)
    contrast = cv.explain(model, pixels, "refine(genatt,passes=9)", target=cv.Contrast(1, 2))
    assert contrast.maps.isfinite().all()
    nested = cv.explain(model, pixels, "refine(ensemble(genatt,legrad),passes=9)")
    assert nested.maps.isfinite().all()


def test_only_probabilities_of_a_class_become_log_odds() -> None:
    model, pixels = double("timm-vit", batch=1)
    target = cv.trace(model, pixels, target=1).target
    assert target is not None
    scores = torch.tensor([0.25, 1.0], dtype=torch.float64)
    scores = scores[None]  # of one image
    odds = log_odds(scores, replace(target, score="prob"))[0]
    assert float(odds[0]) == pytest.approx(math.log(1 / 3))
    assert odds.isfinite().all(), "a probability of 1 in float64 is no infinity"
    assert torch.equal(log_odds(scores, replace(target, score="logit")), scores)
    contrast = cv.trace(model, pixels, target=cv.Contrast(1, 2)).target
    assert contrast is not None
    assert torch.equal(log_odds(scores, replace(contrast, score="prob")), scores)
    mixed = TargetBatch.concat([replace(target, score="prob"), replace(contrast, score="prob")])
    of_both = log_odds(scores.expand(2, -1), mixed)
    assert torch.equal(of_both[0], odds), "the class of one image"
    assert torch.equal(of_both[1], scores[0]), "and the contrast of the other"


def test_mistakes_are_refused() -> None:
    with pytest.raises(NotApplicable, match=r"starts from a map of one trace\. Use refine\(attnlrp\+plus\), or leave"):
        resolve_method("refine(lime)")
    with pytest.raises(BadInput, match="2 methods; expected one"):
        resolve_method("refine(genatt,rollout)")
    with pytest.raises(NotApplicable):
        resolve_method("refine(genatt)+plus")
    assert refine("genatt", passes=64) == "refine(genatt,passes=64)"


# Further passes


def test_the_steps_in_which_passes_are_bought_do_not_matter() -> None:
    """10 of them, then 24: the maps, errors and scores of all at once, and only the missing passes are run."""
    model, pixels = double("timm-vit")
    targets = [1, cv.Contrast(1, 2)]
    at_once = cv.explain(model, pixels, "genatt", targets=targets, passes=24, seed=3)
    first = cv.explain(model, pixels, "genatt", targets=targets, seed=3).refine(10)
    further = first.refine(24)
    assert further.method == at_once.method == "refine(genatt,passes=24)"
    assert further.targets == at_once.targets
    assert_same(further.maps, at_once.maps, growth=2**20)
    assert further.standard_error is not None
    assert at_once.standard_error is not None
    assert_same(further.standard_error, at_once.standard_error, growth=2**20)
    assert further.refinement is not None
    assert at_once.refinement is not None
    assert_same(further.refinement.scores, at_once.refinement.scores, growth=2**20)
    assert further.cost.forwards - first.cost.forwards == (24 - 10) + 2, "the new passes, and the one-pass map again"
    fewer = further.refine(10)
    assert fewer.cost.forwards - further.cost.forwards == 2
    assert_same(fewer.maps, first.maps, growth=2**20)


def test_images_of_several_batches_keep_their_order() -> None:
    """Nine images are two batches on a CPU; each map is that of its image alone."""
    model, pixels = double("timm-vit", batch=9)
    refined = cv.explain(model, pixels, "genatt", target=1).refine(9).refine(16)
    for image in (0, 7, 8):
        alone = cv.explain(model, pixels[image : image + 1], "genatt", target=1, passes=16)
        assert_same(refined.maps[image], alone.maps[0], growth=2**20)


def test_a_time_buys_as_many_passes_as_fit() -> None:
    """A clock that is read three times a step: 16 passes take 1 s, 128 take 7 s, 32 take 1.9 s, and 0.1 s is left."""
    model, pixels = double("timm-vit", batch=1)
    readings = iter([0.0, 0.0, 1.0, 1.0, 8.0, 8.0, 9.9])
    explanation = cv.explain(model, pixels, "genatt")
    within = refine_explanation(explanation, seconds=10, clock=lambda: next(readings))
    assert within.method == "refine(genatt,passes=176)"
    assert next(readings, None) is None
    late = iter([0.0, 0.0, 20.0])
    assert refine_explanation(explanation, seconds=10, clock=lambda: next(late)).method == "refine(genatt,passes=16)"


def test_seconds_of_explain_hold_for_the_first_map_and_give_all_as_many_passes() -> None:
    model, pixels = double("timm-vit")
    explanation = cv.explain(model, pixels, "genatt", seconds=1e-9)
    assert explanation.method == "refine(genatt,passes=16)", "what shows how long a pass takes is always run"
    assert len(explanation) == 2
    assert_same(explanation.maps, cv.explain(model, pixels, "genatt", passes=16).maps, growth=2**20)


def test_refinements_are_stored_and_read(tmp_path: Path) -> None:
    model, pixels = double("timm-vit")
    explanation = cv.explain(model, pixels, "genatt", passes=16)
    stored = cv.Explanation.load(explanation.save(tmp_path / "maps.npz"))
    assert explanation.refinement is not None
    assert stored.refinement is not None
    assert torch.equal(stored.refinement.scores, explanation.refinement.scores)
    assert torch.equal(stored.refinement.in_top, explanation.refinement.in_top)
    assert explanation.to_dict()["refinement"] == [explanation.refinement.sentence(row) for row in range(2)]
    with pytest.raises(BadInput, match="holds no model"):
        stored.refine(32)


def test_further_passes_that_cannot_be_run_are_refused() -> None:
    model, pixels = double("timm-vit", batch=1)
    explanation = cv.explain(model, pixels, "genatt")
    with pytest.raises(BadInput, match="neither was given"):
        explanation.refine()
    with pytest.raises(BadInput, match="both were given"):
        explanation.refine(8, seconds=1)
    for seconds in (0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match=f"seconds={seconds}"):
            explanation.refine(seconds=seconds)
    with pytest.raises(BadInput, match="expected one of them"):
        cv.explain(model, pixels, passes=8, seconds=1)
    with pytest.raises(NotApplicable, match="many passes itself"):
        cv.explain(model, pixels, "leave-one-out").refine(8)
    with torch.no_grad():
        model.module.head.weight.mul_(2)
    with pytest.raises(BadInput, match="weights of the model are not those"):
        explanation.refine(8)


def test_probabilities_of_the_brightest_patches_are_those_of_the_posterior() -> None:
    """Of ten patches one is the brightest 10 %: two of equal means share it, and one that is far above takes it."""
    covariance = torch.eye(10, dtype=torch.float64)
    mean = torch.full((10,), -100.0, dtype=torch.float64)
    mean[:2] = 0.0
    shares = Posterior(mean, covariance, 1.0).in_top(torch.Generator().manual_seed(0))
    assert float(shares.sum()) == pytest.approx(1.0)
    assert abs(float(shares[0]) - 0.5) < 4 * 0.5 / math.sqrt(1000)  # four standard deviations of 1,000 draws
    mean[1] = 0.5 * math.sqrt(2)  # P(φ_1 > φ_0) = Φ(0.5), the difference having the variance 2
    shares = Posterior(mean, covariance, 1.0).in_top(torch.Generator().manual_seed(0))
    expected = 0.5 * (1 + math.erf(0.5 / math.sqrt(2)))
    assert abs(float(shares[1]) - expected) < 4 * math.sqrt(expected * (1 - expected) / 1000)
    together = torch.full((10, 10), 1.0, dtype=torch.float64)  # all move as one: the larger mean is always larger
    shares = Posterior(mean, together, 1.0).in_top(torch.Generator().manual_seed(0))
    assert float(shares[1]) == 1.0
