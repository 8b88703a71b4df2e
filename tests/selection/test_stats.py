"""The statistics of a choice: each against a closed form, brute force or scipy, and their errors counted on noise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from clairvit.metrics.confidence_intervals import EXACT, LEVEL, mean_interval, sign_flips, skewed_t, smallest_p
from clairvit.selection.stats import (
    all_pairs,
    draws_for,
    fewest_images,
    holm,
    holm_after_picking,
    images_needed,
    indistinguishable_groups,
    is_pareto_optimal,
    mean_ranks,
    paired_interval,
    ranks,
    spearman,
)

Array = NDArray[np.float64]


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


# The sign-flip test ---------------------------------------------------------------------------------------------------


def by_hand(differences: Array) -> float:
    """All sign flips in a loop that shares nothing with the code under test; integers, so that sums are exact."""
    seen, reached = abs(sum(differences.tolist())), 0
    for flips in itertools.product((1, -1), repeat=len(differences)):
        reached += abs(sum(f * d for f, d in zip(flips, differences.tolist(), strict=True))) >= seen
    return reached / 2 ** len(differences)


@pytest.mark.parametrize("n", [1, 2, 5, 9, EXACT])
def test_sign_flips_are_enumerated(n: int) -> None:
    whole = np.random.default_rng(n).integers(-9, 15, (4, n)).astype(np.float64)
    assert sign_flips(whole).tolist() == [by_hand(row) for row in whole]
    assert sign_flips(whole / 10).tolist() == [by_hand(row) for row in whole]  # 0.1 + 0.2 is not 0.3; ties still tie


def test_sign_flips_agree_with_scipy() -> None:
    for n in (8, 40):
        gaps = noise(n, seed=n) + 0.3
        expected = scipy_stats.permutation_test(
            (gaps,),
            lambda x, axis: np.mean(x, axis),
            permutation_type="samples",
            n_resamples=20_000,
            vectorized=True,
            rng=np.random.default_rng(1),
        ).pvalue
        (p_value,) = sign_flips(gaps[None], seed=5)
        assert p_value == pytest.approx(expected, abs=1e-12 if n == 8 else 0.01)


def test_many_sign_flips_agree_with_the_normal_law() -> None:
    gaps = noise(400, seed=3) + 0.1
    z = gaps.sum() / math.sqrt((gaps**2).sum())  # the flipped sum has this variance exactly
    (p_value,) = sign_flips(gaps[None], seed=0)
    assert p_value == pytest.approx(2 * scipy_stats.norm.sf(abs(z)), abs=0.005)


def test_sign_flips_have_a_seed() -> None:
    gaps = noise(3, 30, seed=1) + 0.3
    assert np.array_equal(sign_flips(gaps, 4), sign_flips(gaps, 4))
    assert not np.array_equal(sign_flips(gaps, 4), sign_flips(gaps, 5))


def test_flips_that_are_drawn_never_give_a_p_of_nothing() -> None:
    """What was seen is itself one of the flips: however large the difference, p is one of so many."""
    assert sign_flips(np.ones((1, 60)), draws=400)[0] == 1 / 401


def test_undefined_differences_are_not_compared() -> None:
    gaps = noise(7, seed=2)
    with_gaps = np.insert(gaps, [1, 4], np.nan)
    assert sign_flips(with_gaps[None])[0] == sign_flips(gaps[None])[0]
    assert paired_interval(with_gaps, 3) == mean_interval(gaps, 3)


def test_nothing_and_no_difference_are_no_evidence() -> None:
    assert sign_flips(np.zeros((2, 20))).tolist() == sign_flips(np.zeros((2, 5))).tolist() == [1, 1]
    assert sign_flips(np.empty((2, 0))).tolist() == [1, 1]


@pytest.mark.parametrize("n", [1, 4, 5, 6, 10])
def test_the_smallest_p_is_reached(n: int) -> None:
    assert sign_flips(np.arange(1.0, n + 1)[None])[0] == smallest_p(n)
    assert (smallest_p(n) < LEVEL) == (n >= 6)


def test_the_fewest_images() -> None:
    """One less, and not even differences of one sign everywhere survive the correction."""
    assert [fewest_images(methods) for methods in (2, 4, 14)] == [6, 8, 12]
    for methods in (2, 4, 14):
        for n, possible in ((fewest_images(methods), True), (fewest_images(methods) - 1, False)):
            p = holm_after_picking(sign_flips(np.ones((methods - 1, n))))
            assert bool((p < LEVEL).all()) == bool((p < LEVEL).any()) == possible


# Holm -----------------------------------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    # sorted: 0.005·4 = 0.02; 0.01·3 = 0.03; 0.03·2 = 0.06; 0.04·1 = 0.04, raised to 0.06
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.8])).tolist() == [1, 1]
    assert holm(np.array([])).tolist() == []


def test_holm_is_the_closed_test_of_bonferroni() -> None:
    """A hypothesis is rejected if every set with it is, by its smallest p: brute force over all sets."""
    for seed in range(20):
        p = np.random.default_rng(seed).uniform(0, 0.2, 6)
        sets = [s for size in range(1, 7) for s in itertools.combinations(range(6), size)]
        closed = [max(min(1, len(s) * min(p[list(s)])) for s in sets if index in s) for index in range(6)]
        assert holm(p) == pytest.approx(closed)


def test_picking_counts_the_pairs_still_in_play() -> None:
    # 4 methods: 6 pairs, then 3, then 1
    assert holm_after_picking(np.array([0.04, 0.001, 0.01])) == pytest.approx([0.04, 0.006, 0.03])
    assert holm_after_picking(np.array([0.02])).tolist() == [0.02]
    assert (holm_after_picking(np.array([0.2, 0.1, 0.3])) >= holm(np.array([0.2, 0.1, 0.3]))).all()


def picked(values: Array, seed: int) -> tuple[int, Array, Array]:
    """The best of [K, n], the p-values of the others against it as they are, and adjusted."""
    best = int(values.mean(1).argmax())
    others = [index for index in range(len(values)) if index != best]
    p = sign_flips(values[best] - values[others], seed, 2000)
    return best, holm(p), holm_after_picking(p)


def test_noise_has_no_winner() -> None:
    """200 studies of 8 methods that are alike: whoever comes first, hardly ever does it beat one, let alone all.

    Holm alone, for a best that is picked on the same images, would say too often that somebody was beaten.
    """
    winners = beaten = beaten_by_holm = 0
    for study in range(200):
        values = noise(8, 16, seed=study) + noise(16, seed=1000 + study) * 3  # images are hard or easy for all
        _, plain, adjusted = picked(values, study)
        winners += bool((adjusted < LEVEL).all())
        beaten += bool((adjusted < LEVEL).any())
        beaten_by_holm += bool((plain < LEVEL).any())
    assert winners <= 10
    assert beaten <= 10
    assert beaten_by_holm > 12  # why holm_after_picking is there


def test_two_best_methods_have_no_winner() -> None:
    """The worst case for a winner: all but two are far behind, so that nothing but the last test stands in its way."""
    wrong = 0
    for study in range(200):
        values = noise(6, 16, seed=study) + np.array([3, 3, 0, 0, 0, 0])[:, None]
        _, _, adjusted = picked(values, study)
        wrong += bool((adjusted < LEVEL).all())
    assert 0 < wrong <= 18  # 5 % of 200 is 10, ± 2.6 standard errors


@pytest.mark.parametrize("lead", [0.3, 0.6, 1.2])
def test_no_lead_of_some_over_others_makes_wrong_claims(lead: float) -> None:
    """Two good methods and four worse ones, at any distance: who is picked is called better only than worse ones."""
    wrong, true = 0, np.array([lead, lead, 0, 0, 0, 0])
    for study in range(200):
        values = noise(6, 16, seed=study) + true[:, None]
        best, _, adjusted = picked(values, study)
        others = [index for index in range(6) if index != best]
        wrong += bool(((adjusted < LEVEL) & (true[others] >= true[best])).any())
    assert wrong <= 18  # 5 % of 200 is 10, ± 2.6 standard errors


def test_a_true_winner_is_found() -> None:
    hits = 0
    for study in range(100):
        best, _, adjusted = picked(noise(8, 30, seed=study) + np.array([1.5, *[0] * 7])[:, None], study)
        hits += best == 0 and bool((adjusted < LEVEL).all())
    assert hits >= 95


def test_enough_flips_for_many_methods() -> None:
    for comparisons in (1, 91, 1770):
        assert comparisons / (1 + draws_for(comparisons)) < LEVEL / 4


# Groups ---------------------------------------------------------------------------------------------------------------


def test_all_pairs_are_holm_over_pairs() -> None:
    values = noise(4, 10, seed=1) + np.array([0, 0.2, 1, 2])[:, None]
    pairs = list(itertools.combinations(range(4), 2))
    gaps = np.stack([values[i] - values[j] for i, j in pairs])
    expected = holm(np.maximum([by_hand_real(gap) for gap in gaps], skewed_t(gaps)))
    adjusted = all_pairs(values)
    assert [adjusted[i, j] for i, j in pairs] == pytest.approx(expected)
    assert np.array_equal(adjusted, adjusted.T)
    assert np.diag(adjusted).tolist() == [1] * 4


def by_hand_real(gaps: Array) -> float:
    tosses = np.array(list(itertools.product((1, -1), repeat=len(gaps))))
    return float((np.abs(tosses @ gaps) >= abs(gaps.sum()) - 1e-12).mean())


def test_groups_of_a_critical_difference_diagram() -> None:
    apart = np.ones((5, 5))
    for i, j in [(0, 2), (0, 3), (0, 4), (1, 4), (2, 4), (3, 4)]:
        apart[i, j] = apart[j, i] = 0.01
    assert indistinguishable_groups([0, 1, 2, 3, 4], apart) == [(0, 1), (1, 2, 3)]
    assert indistinguishable_groups([0, 1, 2], np.ones((3, 3))) == [(0, 1, 2)]
    assert indistinguishable_groups([0, 1, 2], np.zeros((3, 3))) == []
    assert indistinguishable_groups([2, 0, 1], np.ones((3, 3))) == [(2, 0, 1)]


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_ranks_agree_with_scipy() -> None:
    values = np.random.default_rng(0).integers(0, 5, (6, 9)).astype(np.float64)  # with ties
    assert np.array_equal(ranks(values), scipy_stats.rankdata(-values, axis=-1))
    assert ranks(np.array([0.1, np.nan, 0.5])).tolist() == [2, 3, 1]


def test_mean_ranks() -> None:
    values = np.array([[[1.0, 5], [2, 4], [3, 3]], [[9.0, np.nan], [7, np.nan], [8, np.nan]]])  # [2, 3, 2]
    assert mean_ranks(values).tolist() == [[2, 1], [3 - 0.5, 2], [1.5, 3]]
    assert np.isnan(mean_ranks(np.full((2, 3, 1), np.nan))).all()


def test_spearman_agrees_with_scipy() -> None:
    for seed in range(5):
        first, second = np.random.default_rng(seed).integers(0, 6, (2, 12)).astype(np.float64)
        assert spearman(first, second) == pytest.approx(scipy_stats.spearmanr(first, second).statistic)
    assert spearman(np.arange(5.0), -np.arange(5.0)) == pytest.approx(-1)
    assert math.isnan(spearman(np.ones(5), np.arange(5.0)))
    assert math.isnan(spearman(np.arange(2.0), np.arange(2.0)))
    assert spearman(np.array([1, 2, np.nan, 3]), np.array([1, 2, 9, 3.0])) == pytest.approx(1)


def test_wilcoxon_and_sign_flips_tell_the_same_story() -> None:
    """The test by ranks is another question, yet on plain data nearly the same answer."""
    for shift in (0.0, 0.4, 0.8):
        gaps = noise(12, seed=7) + shift
        (ours,) = sign_flips(gaps[None])
        assert ours == pytest.approx(scipy_stats.wilcoxon(gaps).pvalue, abs=0.1)


# The front ------------------------------------------------------------------------------------------------------------


def test_the_front_by_brute_force() -> None:
    values = np.random.default_rng(0).integers(0, 4, (30, 3)).astype(np.float64)
    expected = [not any((b >= a).all() and (b > a).any() for b in values) for a in values]
    assert is_pareto_optimal(values).tolist() == expected
    assert 0 < sum(expected) < 30


def test_edges_of_the_front() -> None:
    assert is_pareto_optimal(np.array([[1.0, 1], [1, 1], [0, 0]])).tolist() == [
        True,
        True,
        False,
    ]  # twins are both on it
    assert is_pareto_optimal(np.array([[1.0, np.nan], [0.5, 0.1], [0.9, np.nan]])).tolist() == [True, True, False]


# How many images ------------------------------------------------------------------------------------------------------


def test_images_needed_by_closed_form() -> None:
    """One rival: ((1.96 + 0.84) sd / mean)², up to the draws; twice the spread needs four times as many."""
    gaps = noise(200, seed=1)
    gaps = (gaps - gaps.mean()) / gaps.std(ddof=1) + 0.1
    needed, doubled = images_needed(gaps[None]), images_needed(gaps[None] + (gaps[None] - 0.1))
    assert needed is not None
    assert doubled is not None
    assert abs(needed / (2.8 / 0.1) ** 2 - 1) < 0.05
    assert abs(doubled / needed - 4) < 0.02
    twins = np.stack([gaps, gaps])  # the same gap twice: one event, which is tested at 5 % / 3
    level = scipy_stats.norm.isf(LEVEL / 6) + scipy_stats.norm.ppf(0.8)
    assert abs((images_needed(twins) or 0) / (level / 0.1) ** 2 - 1) < 0.05


def test_images_needed_is_not_known_without_a_gap() -> None:
    assert images_needed(np.zeros((1, 5))) is None
    assert images_needed(np.ones((1, 1))) is None
    assert images_needed(np.array([[1.0, 2.0, 3.0], [1.0, -1.0, -3.0]])) is None
    assert images_needed(np.array([[1.0, np.nan, 2.0], [np.nan, 3.0, 4.0]])) is None  # one image in common
    assert images_needed(np.array([[1.0, 1.01]])) == 6
