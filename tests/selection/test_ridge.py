"""Ridge towards a prior against brute force, planted weights, and cross-fitting that leaks nothing."""

from __future__ import annotations

import numpy as np
import pytest

from clairvit.metrics.confidence_intervals import Array
from clairvit.selection.ridge import (
    STRENGTHS,
    Candidate,
    Indices,
    Moments,
    centred,
    cross_fit,
    fit,
    folds,
    held_out_correlation,
    log_odds,
    ridge_path,
    scaled_prior,
    without,
)

IMAGES, SETS, FEATURES = 12, 18, 6
GROUPS = np.repeat(np.arange(6), 3)
EPS = float(np.finfo(np.float64).eps)
DIRECTION = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
EVERY = Candidate(np.ones(FEATURES, dtype=bool), DIRECTION)


def drawn(seed: int, planted: Array | None = None, noise: float = 1.0) -> tuple[list[Array], list[Array]]:
    """Sums of features over token sets and scores, image by image; with planted weights, scores follow them."""
    generator = np.random.default_rng(seed)
    sums = [generator.normal(size=(SETS, FEATURES)) for _ in range(IMAGES)]
    signal = [features @ (np.zeros(FEATURES) if planted is None else planted) for features in sums]
    return sums, [values + noise * generator.normal(size=SETS) for values in signal]


def moments(sums: list[Array], scores: list[Array]) -> Moments:
    return Moments.of(sums, scores, [GROUPS] * len(sums))


def stacked(sums: list[Array], scores: list[Array]) -> tuple[Array, Array]:
    """The rows of the regression, made by hand."""
    designs, observed = [], []
    for features, values in zip(sums, scores, strict=True):
        rows, targets = features.copy(), values.copy()
        for group in range(6):
            members = [place for place in range(SETS) if GROUPS[place] == group]
            rows[members] -= sum(features[place] for place in members) / len(members)
            targets[members] -= sum(values[place] for place in members) / len(members)
        designs.append(rows)
        observed.append(targets / np.sqrt((targets**2).mean()))
    return np.concatenate(designs), np.concatenate(observed)


def test_ridge_is_the_solution_of_the_augmented_least_squares_problem() -> None:
    """Rows sqrt(λ) (w − w₀) below the data: an ordinary least-squares problem, solved by another algorithm."""
    sums, scores = drawn(0, np.array([1.0, 0.5, -0.3, 0.0, 2.0, 0.1]))
    design, observed = stacked(sums, scores)
    path = ridge_path(moments(sums, scores), EVERY)
    along = design @ DIRECTION
    prior = DIRECTION * max(0.0, float(along @ observed) / float(along @ along))
    for strength, weights in zip(STRENGTHS, path, strict=True):
        if np.isinf(strength):
            np.testing.assert_array_equal(weights, scaled_prior(*_sums(sums, scores), DIRECTION))
            continue
        penalty = strength * float((design**2).sum()) / FEATURES
        rows = np.concatenate([design, np.sqrt(penalty) * np.eye(FEATURES)])
        expected = np.linalg.lstsq(rows, np.concatenate([observed, np.sqrt(penalty) * prior]), rcond=None)[0]
        bound = EPS * len(rows) * float(np.linalg.cond(rows)) ** 2 * float(np.abs(expected).max())
        np.testing.assert_allclose(weights, expected, rtol=0, atol=bound)


def _sums(sums: list[Array], scores: list[Array]) -> tuple[Array, Array]:
    both = moments(sums, scores)
    return both.gram.sum(0), both.cross.sum(0)


def test_features_outside_the_candidate_have_no_weight_and_do_not_matter() -> None:
    sums, scores = drawn(1, np.arange(6.0))
    candidate = Candidate(np.array([True, True, True, True, False, False]), DIRECTION)
    path = ridge_path(moments(sums, scores), candidate)
    assert not path[:, 4:].any()
    small = Candidate(np.ones(4, dtype=bool), DIRECTION[:4])
    alone = ridge_path(moments([features[:, :4] for features in sums], scores), small)
    bound = EPS * IMAGES * SETS * FEATURES * float(np.abs(alone).max()) / STRENGTHS[0]
    np.testing.assert_allclose(path[:, :4], alone, rtol=0, atol=bound)


def test_planted_weights_are_recovered() -> None:
    """Without noise ‖w − w*‖ ≤ λ / (σ + λ) ‖w₀ − w*‖, σ the least eigenvalue: the bias of ridge, and nothing else."""
    planted = np.array([0.2, 1.0, 0.0, -0.5, 0.7, 0.3])
    generator = np.random.default_rng(2)
    sums = [generator.normal(size=(SETS, FEATURES)) for _ in range(IMAGES)]
    # one scale for all images, so that the same weights fit all of them
    designs = [centred(features, GROUPS) for features in sums]
    scores = [features @ planted for features in sums]
    both = moments(sums, scores)
    spreads = [float((design @ planted).std()) for design in designs]
    scaled = Moments(both.gram, np.stack([c * s for c, s in zip(both.cross, spreads, strict=True)]), both.power)
    scaled = Moments(scaled.gram, scaled.cross, np.array([p * s**2 for p, s in zip(both.power, spreads, strict=True)]))
    result = fit(scaled, [EVERY], seed=0)
    assert result.strength == STRENGTHS[0], "without noise nothing speaks for shrinking"
    gram = scaled.gram.sum(0)
    penalty = result.strength * float(np.trace(gram)) / FEATURES
    prior = scaled_prior(gram, scaled.cross.sum(0), DIRECTION)
    least = float(np.linalg.eigvalsh(gram)[0])
    bias = penalty / (least + penalty) * float(np.linalg.norm(prior - planted))
    assert float(np.linalg.norm(result.weights - planted)) <= bias * (1 + 1e-6)


def test_where_the_prior_explains_the_scores_the_weights_are_the_prior() -> None:
    """All images alike, so that one scale fits all: the residual is zero, whatever the strength."""
    sums = drawn(3)[0][:1] * IMAGES
    both = moments(sums, [features @ DIRECTION for features in sums])
    prior = scaled_prior(both.gram.sum(0), both.cross.sum(0), DIRECTION)
    bound = EPS * IMAGES * SETS * FEATURES * float(prior.max()) / STRENGTHS[0]
    np.testing.assert_allclose(fit(both, [EVERY], seed=0).weights, prior, rtol=0, atol=bound)


def test_losses_are_the_squared_residuals() -> None:
    sums, scores = drawn(4)
    design, observed = stacked(sums, scores)
    weights = np.linspace(-1, 1, FEATURES)
    expected = ((observed - design @ weights) ** 2).reshape(IMAGES, SETS).sum(1)
    bound = EPS * SETS * FEATURES**2 * float((design**2).sum())
    np.testing.assert_allclose(moments(sums, scores).losses(weights), expected, rtol=0, atol=bound)


def test_an_image_whose_score_never_changes_counts_for_nothing() -> None:
    sums, scores = drawn(5, np.arange(6.0))
    flat = moments([*sums, np.ones((SETS, FEATURES)) * np.arange(SETS)[:, None]], [*scores, np.full(SETS, 0.1)])
    np.testing.assert_array_equal(flat.gram[-1], 0)
    np.testing.assert_array_equal(flat.cross[-1], 0)
    np.testing.assert_array_equal(ridge_path(flat, EVERY), ridge_path(moments(sums, scores), EVERY))


def test_log_odds() -> None:
    odds = np.array([0.25, 1.0, 3.0, 1e30])
    expected = np.log([0.25, 1.0, 3.0, 1e12])  # at most 1 − 1e-12
    np.testing.assert_allclose(log_odds(odds / (1 + odds)), expected, rtol=1e-4)  # 1 − 1e-12 has four digits
    np.testing.assert_allclose(log_odds(1 - odds / (1 + odds)), -expected, rtol=1e-4)


def test_folds_are_a_partition() -> None:
    parts = folds(13, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(13))
    assert {len(part) for part in parts} == {2, 3}
    assert without(5, np.array([1, 3])).tolist() == [0, 2, 4]


@pytest.mark.parametrize("changed", range(0, IMAGES, 5))
def test_data_of_an_image_do_not_change_its_cross_fitted_weights(changed: int) -> None:
    """Neither by the weights nor by the strength or the candidate that are chosen for it."""
    sums, scores = drawn(6, np.array([1.0, 0.5, -0.3, 0.0, 2.0, 0.1]))
    candidates = [EVERY, Candidate(np.array([True, True, True, False, False, False]), DIRECTION)]
    before = cross_fit(moments(sums, scores), candidates, seed=1)
    sums[changed], scores[changed] = 100 * sums[changed][::-1], scores[changed][::-1] * np.arange(SETS)
    after = cross_fit(moments(sums, scores), candidates, seed=1)
    for (rows, first), (same_rows, second) in zip(before, after, strict=True):
        np.testing.assert_array_equal(rows, same_rows)
        same = bool((first.weights == second.weights).all())
        assert same == (changed in rows), "and it does change the weights of the others"
        if changed in rows:
            assert (first.strength, first.candidate) == (second.strength, second.candidate)


def test_the_better_candidate_is_chosen() -> None:
    sums, scores = drawn(7, np.array([0.0, 0.0, 0.0, 0.0, 0.0, 3.0]), noise=0.1)
    candidates = [Candidate(np.arange(FEATURES) == kept, np.eye(FEATURES)[kept]) for kept in range(FEATURES)]
    assert fit(moments(sums, scores), candidates, seed=0).candidate == 5


def test_correlation_is_pearsons_within_groups() -> None:
    sums, scores = drawn(8)
    groups: Indices = np.zeros(SETS, dtype=np.int64)
    weights = np.arange(6.0)
    expected = np.corrcoef(sums[0] @ weights, scores[0])[0, 1]
    assert abs(held_out_correlation(sums[0], scores[0], groups, weights) - expected) <= EPS * SETS * FEATURES
    assert np.isnan(held_out_correlation(sums[0], np.ones(SETS), groups, weights))
