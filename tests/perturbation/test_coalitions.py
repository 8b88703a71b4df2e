"""Which features are kept: the Shapley kernel is met exactly where sizes are enumerated, on average where drawn."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from clairvit.perturbation.segments import random_halves, shapley_coalitions
from helpers.rounding import assert_same


def kernel_sum(features: int) -> Tensor:
    """sum over all proper sets of k(S) z zᵀ, [M, M], from the definition of the kernel."""
    total = torch.zeros(features, features, dtype=torch.float64)
    for bits in itertools.product([0.0, 1.0], repeat=features):
        size = int(sum(bits))
        if 0 < size < features:
            z = torch.tensor(bits, dtype=torch.float64)
            total += (features - 1) / (math.comb(features, size) * size * (features - size)) * torch.outer(z, z)
    return total


def sum_by_hand(features: int, pairs: int, seed: int) -> Tensor:
    """The same sum over the pairs: each set and its complement at half the pair's weight."""
    coalitions = shapley_coalitions(features, pairs, seed)
    both = torch.cat([coalitions.sets, ~coalitions.sets]).double()
    return (both.mT * coalitions.weights.repeat(2) / 2) @ both


@pytest.mark.parametrize("features", [2, 3, 7, 8])
def test_all_of_them_are_the_kernel(features: int) -> None:
    every = 2 ** (features - 1) - 1
    for pairs in (every, every + 1, 1000):
        coalitions = shapley_coalitions(features, pairs, seed=0)
        assert len({row.numpy().tobytes() for row in torch.cat([coalitions.sets, ~coalitions.sets])}) == 2 * every
        assert not coalitions.unseen.any()
        assert_same(sum_by_hand(features, pairs, 0), kernel_sum(features))


@pytest.mark.parametrize(("features", "pairs"), [(8, 20), (8, 90), (9, 60), (8, 126)])
def test_a_draw_is_the_kernel_on_average(features: int, pairs: int) -> None:
    """Equal weights for what was drawn: with the kernel's weight on top the small sizes would count twice."""
    seeds = 400
    sums = torch.stack([sum_by_hand(features, pairs, seed) for seed in range(seeds)])
    error = sums.std(0) / math.sqrt(seeds)
    off = (sums.mean(0) - kernel_sum(features)).abs()
    assert (off <= 4.5 * error + 1e-9).all()
    # and it is a sharp statement: the kernel's own entries differ by far more than that
    assert error.max() < 0.03 * kernel_sum(features).max()


def test_sizes_get_their_share_and_no_set_comes_twice() -> None:
    features, pairs = 16, 200
    coalitions = shapley_coalitions(features, pairs, seed=3)
    assert len(coalitions.sets) == pairs
    assert len({row.numpy().tobytes() for row in torch.cat([coalitions.sets, ~coalitions.sets])}) == 2 * pairs
    sizes = coalitions.sets.sum(1)
    weight = {k: (1 if k == 8 else 2) * 15 / (k * (16 - k)) for k in range(1, 9)}
    assert (coalitions.unseen == 0).sum() == 16  # the single features: 200 · W_1 / sum W = 64 would be their share
    assert (sizes[:16] == 1).all()
    assert coalitions.weights[:16].tolist() == pytest.approx([weight[1] / 16] * 16)
    rest = sum(weight[k] for k in range(2, 9))
    for k in range(2, 9):
        assert abs(int((sizes == k).sum()) - 184 * weight[k] / rest) < 1
    assert coalitions.weights[16:].tolist() == pytest.approx([rest / 184] * 184)
    assert coalitions.unseen[sizes == 2].tolist() == pytest.approx(
        [1 - int((sizes == 2).sum()) / 120] * int((sizes == 2).sum())
    )


def test_chance_comes_from_the_seed_alone() -> None:
    assert torch.equal(shapley_coalitions(20, 50, 7).sets, shapley_coalitions(20, 50, 7).sets)
    assert not torch.equal(shapley_coalitions(20, 50, 7).sets, shapley_coalitions(20, 50, 8).sets)
    assert torch.equal(random_halves(50, 20, 7), random_halves(50, 20, 7))
    assert not torch.equal(random_halves(50, 20, 7), random_halves(50, 20, 8))
    assert abs(random_halves(4000, 5, 1).double().mean() - 0.5) < 0.02


def test_one_feature_has_no_coalitions() -> None:
    assert shapley_coalitions(1, 100, 0).sets.shape == (0, 1)
