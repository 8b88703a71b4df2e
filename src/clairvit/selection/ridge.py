"""Ridge regression towards a prior, with its strength by cross-validation over images. Pure functions on arrays.

minimise_w  Σ_images ‖y − A w‖² + λ ‖w − w₀‖²,   w = w₀ + (Σ AᵀA + λI)⁻¹ (Σ Aᵀy − Σ AᵀA w₀)

Everything is a function of the moments AᵀA, Aᵀy and yᵀy of each image, so that leaving images out is a difference of
sums. λ is given as a multiple of the mean diagonal entry of Σ AᵀA; infinity is w = w₀.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clairvit._rows import Rows, per_row
from clairvit.metrics.confidence_intervals import Array

Indices = NDArray[np.int64]
STRENGTHS = (*(float(strength) for strength in np.logspace(-4, 2, 13)), np.inf)
FOLDS = 5
ODDS_MARGIN = 1e-12


def centred(values: Array, groups: Indices) -> Array:
    """Return values [S, …] minus the mean of their group [S]."""
    result = values.astype(np.float64, copy=True)
    for group in np.unique(groups):
        result[groups == group] -= result[groups == group].mean(0)
    return result


def log_odds(probabilities: Array) -> Array:
    """Return log p − log(1 − p), with p at least 1e-12 from 0 and 1: near both, small changes of p say much."""
    clipped = probabilities.clip(ODDS_MARGIN, 1 - ODDS_MARGIN)
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


class Moments(Rows):
    """Moments of n images: AᵀA [n, F, F], Aᵀy [n, F] and yᵀy [n]."""

    gram: Array = per_row()
    cross: Array = per_row()
    power: Array = per_row()

    @classmethod
    def of(cls, sums: Sequence[Array], scores: Sequence[Array], groups: Sequence[Indices]) -> Moments:
        """Return the moments of sums of features [S, F] over token sets and scores [S], image by image.

        Both are centred within each group of sets of one size; scores are divided by their standard deviation. An image
        whose score never changes counts for nothing.
        """
        grams, crosses, powers = [], [], []
        for features, image_scores, sizes in zip(sums, scores, groups, strict=True):
            design, observed = centred(features, sizes), centred(image_scores, sizes)
            spread = observed.std()
            scale = 0.0 if spread <= np.finfo(np.float64).eps * np.abs(image_scores).max() else 1 / spread
            design = design * (scale > 0)
            grams.append(design.T @ design)
            crosses.append(design.T @ observed * scale)
            powers.append(float(observed @ observed) * scale**2)
        return cls(np.stack(grams), np.stack(crosses), np.array(powers))

    def losses(self, weights: Array) -> Array:
        """Return ‖y − A w‖² of each image, [n]."""
        return np.asarray(self.power - 2 * self.cross @ weights + np.einsum("f,nfg,g->n", weights, self.gram, weights))


@dataclass(frozen=True, eq=False)
class Candidate:
    """Features that may have weight, bool [F], and the direction that weights are shrunk to, [F]."""

    features: NDArray[np.bool_]
    direction: Array


@dataclass(frozen=True, eq=False)
class Fit:
    """Weights [F], and the candidate and strength that they were fitted with."""

    weights: Array
    candidate: int
    strength: float


def scaled_prior(gram: Array, cross: Array, direction: Array) -> Array:
    """Return w₀ = max(0, a) · d, a = dᵀAᵀy / dᵀAᵀA d: the direction d [F] scaled to the data by least squares."""
    norm = float(direction @ gram @ direction)
    return direction * (max(0.0, float(direction @ cross) / norm) if norm > 0 else 0.0)


def ridge_path(moments: Moments, candidate: Candidate, strengths: Sequence[float] = STRENGTHS) -> Array:
    """Return the weights for each strength, [len(strengths), F]; features outside the candidate have weight 0."""
    gram, cross = moments.gram.sum(0), moments.cross.sum(0)
    prior = scaled_prior(gram, cross, candidate.direction)
    used = np.flatnonzero(candidate.features)
    inner = gram[np.ix_(used, used)]
    scale = float(np.trace(inner)) / max(len(used), 1)
    values, vectors = np.linalg.eigh(inner)
    values = values.clip(min=0)
    residual = vectors.T @ (cross - gram @ prior)[used]
    path = np.repeat(prior[None], len(strengths), 0)
    for row, strength in zip(path, strengths, strict=True):
        penalty = strength * scale
        if np.isfinite(penalty) and penalty > 0:  # infinity: the prior itself; 0: no data at all
            row[used] += vectors @ (residual / (values + penalty))
    return path


def folds(count: int, seed: int, parts: int = FOLDS) -> list[Indices]:
    """Return the images 0 … count − 1 in `parts` random parts of nearly equal size."""
    return [np.sort(part) for part in np.array_split(np.random.default_rng(seed).permutation(count), parts)]


def without(count: int, rows: Indices) -> Indices:
    """Return 0 … count − 1 without `rows`."""
    return np.setdiff1d(np.arange(count), rows)


def fit(moments: Moments, candidates: Sequence[Candidate], seed: int) -> Fit:
    """Return the weights fitted to all images; candidate and strength have the least loss in cross-validation."""
    losses = np.zeros((len(candidates), len(STRENGTHS)))
    for held_out in folds(len(moments), seed):
        training, rest = moments.take(without(len(moments), held_out).tolist()), moments.take(held_out.tolist())
        for number, candidate in enumerate(candidates):
            losses[number] += [rest.losses(weights).sum() for weights in ridge_path(training, candidate)]
    # Of equal losses the strongest: nothing speaks for leaving the prior.
    best, place = divmod(int(np.argmin(losses[:, ::-1])), len(STRENGTHS))
    strength = STRENGTHS[len(STRENGTHS) - 1 - place]
    return Fit(ridge_path(moments, candidates[best], [strength])[0], best, strength)


def cross_fit(moments: Moments, candidates: Sequence[Candidate], seed: int) -> list[tuple[Indices, Fit]]:
    """Return (images, weights fitted without them) for each part of the images.

    Strength and candidate are chosen without them too, by cross-validation inside the other images.
    """
    count = len(moments)
    return [(rows, fit(moments.take(without(count, rows).tolist()), candidates, seed)) for rows in folds(count, seed)]


def held_out_correlation(sums: Array, scores: Array, groups: Indices, weights: Array) -> float:
    """Return the correlation of A w and y of one image, both centred within groups; NaN if one of them is constant."""
    predicted, observed = centred(sums, groups) @ weights, centred(scores, groups)
    norm = float(np.linalg.norm(predicted) * np.linalg.norm(observed))
    return float(predicted @ observed) / norm if norm > 0 else float("nan")
