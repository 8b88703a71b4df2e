"""LIME and KernelSHAP: linear surrogates, fitted to the scores of images of which random features are kept.

Features are patches, cells of patches or superpixels (perturbation/segments.py).
All sums are computed in float64 on the CPU; on a GPU, what does not depend on scores while they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit.methods.registry import FORWARD, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.segments import (
    Cells,
    Coalitions,
    Features,
    Segmentation,
    random_halves,
    score_features,
    segmentations,
    shapley_coalitions,
)
from clairvit.tracing.trace import Trace

LIME_WIDTH = 0.25
FURTHER_SAMPLES = 2048  # that shap takes on top of two per feature
ROUND_OFF = 1e-10  # eigenvalues below this part of the largest one count as 0
Samples = Annotated[
    int,
    Range(ge=2, unit="variants of the image", example=1000),
    Doc("how many images with some features removed are scored"),
]


# Weighted least squares, and its standard errors


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """argmin sum_i w_i (y_i − X_i · beta)² + ridge · |beta|² over beta, for any y.

    Of several solutions it is the one of least norm.
    """

    X: Tensor  # [n, M]
    hat: Tensor  # d beta / d y_i, [M, n]
    leverage: Tensor  # d (X beta)_i / d y_i, 0…1, [n]
    rank: int  # of X

    @staticmethod
    def of(X: Tensor, weights: Tensor, ridge: float = 0.0) -> LeastSquares:
        """Solve the normal equations of X [n, M] with weights [n], in float64."""
        weighted = X.mT * weights  # Xᵀ W, [M, n]
        eigenvalues, eigenvectors = torch.linalg.eigh(weighted @ X)
        nonzero = eigenvalues > ROUND_OFF * eigenvalues.amax()
        inverse = torch.where(nonzero | (ridge > 0), 1 / (eigenvalues.clamp(min=0) + ridge), 0)
        hat = eigenvectors @ (inverse[:, None] * (eigenvectors.mT @ weighted))
        return LeastSquares(X, hat, (X * hat.mT).sum(1), int(nonzero.sum()))

    def fit(self, y: Tensor) -> Fit:
        """Return the solution for y [B, n]."""
        coefficients = y @ self.hat.mT
        return Fit(self, coefficients, y - coefficients @ self.X.mT)


@dataclass(frozen=True, eq=False)
class Fit:
    """The solution of a least-squares problem for one y per image."""

    problem: LeastSquares
    coefficients: Tensor  # beta, [B, M]
    residuals: Tensor  # y − X beta, [B, n]


def standard_errors(fitted: Fit, randomness: Tensor, onto: Tensor, base: Tensor | float = 0.0) -> Tensor:
    """Return the standard errors [B, P] of `onto` [P, M] @ beta: the heteroscedasticity-robust sandwich, HC2.

    `randomness` [n] is the share of a sample that was drawn at random: 0 for one that is always there, 1 for one of
    infinitely many. HC2 divides residuals by sqrt(1 − leverage); `base` is leverage that the fit does not include, an
    intercept's.
    """
    drawn = randomness > 0
    hat = onto @ fitted.problem.hat[:, drawn]  # [P, drawn]
    freedom = 1 - fitted.problem.leverage - base
    # A row that the fit must follow has no residual, so the error of another row in its place is unknown.
    scaled = fitted.residuals / freedom.clamp(min=ROUND_OFF).sqrt()
    residuals = torch.where(freedom > ROUND_OFF, scaled, math.nan)[:, drawn]  # [B, drawn]
    count = torch.tensor(float(residuals.shape[1]))
    errors = []
    for residual in residuals:
        influence = hat * residual
        influence = influence - influence.mean(1, keepdim=True)
        errors.append((influence.square() @ randomness[drawn] * count / (count - 1)).sqrt())
    return torch.stack(errors) if drawn.any() else torch.zeros_like(fitted.coefficients @ onto.mT)


# LIME


@method(
    "lime",
    family="perturbation",
    paper="Ribeiro et al., 2016",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(lambda samples, **_: Cost(samples - 1), slow=True),
    score="prob",
    signed=True,
    presets={"lime": {"width": LIME_WIDTH * math.sqrt(2), "features": "superpixels", "removal": "mean"}},
)
def lime(
    trace: Trace,
    *,
    samples: Samples = 1000,
    width: Annotated[
        float,
        Range(gt=0, example=LIME_WIDTH),
        Doc("the width of the kernel that weighs images by how much of them is left"),
    ] = LIME_WIDTH,
    alpha: Annotated[
        float, Range(ge=0, unit="(0: least squares)", example=1), Doc("how strongly the ridge fit shrinks coefficients")
    ] = 1.0,
    features: Features = "patches",
    cells: Cells | None = None,
    removal: Removal = "token",
    seed: int = 0,
) -> MapResult:
    """argmin_b sum_z exp(−D(z)²/w²) (f(z) − a − b·z)² + alpha |b|²: a ridge fit to random halves of the image.

    Each feature is kept with probability 1/2; D is the cosine distance from everything kept, which is the first sample.
    `features` are the patches, a coarser grid of `cells` × `cells` of them, or superpixels (quickshift); every patch
    gets the coefficient of its feature. `preset=lime` has that package's kernel, exp(−D²/2w²), and its superpixels.
    """
    with probing(trace, removal, label="lime", forwards=samples - 1, seed=seed) as probe:
        segments_per_image = segmentations(probe, features, cells)
        kept = [random_halves(samples - 1, segments.count, seed) for segments in segments_per_image]
        parts, notes = [], _single_feature_notes(segments_per_image, "lime")
        for segments, keep, scores, original in _scored(probe, segments_per_image, kept):
            if samples < segments.count:
                notes.append(
                    f"lime: {samples} samples are fewer than the {segments.count} features, so that the ridge decides "
                    "much; raise samples, or use cells=7"
                )
            z = torch.cat([torch.ones(1, segments.count), keep]).double()  # [n, M]
            parts.append(lime_fit(z, torch.cat([original[:, None], scores], 1), segments.shares, width, alpha))
    return _on_grid(parts, probe, notes)


def lime_kernel(z: Tensor, width: float) -> Tensor:
    """Return exp(−D²/w²), [n], of samples z [n, M] of 0 and 1, D the cosine distance to all ones (1 if z is all 0)."""
    D = 1 - z.mean(1).sqrt()
    return torch.exp(-((D / width) ** 2))


def lime_fit(z: Tensor, scores: Tensor, onto: Tensor, width: float, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the coefficients of samples z [n, M] with scores [B, n] and their standard errors, on patches: two [B, P].

    The first sample keeps everything and is not random. Scores may be on a GPU that is still computing them: they are
    read when all that does not depend on them is done.
    """
    weights = lime_kernel(z, width)
    share = weights / weights.sum()
    problem = LeastSquares.of(z - share @ z, weights, alpha)  # centred: the intercept is not penalised
    scores = scores.cpu()
    fitted = problem.fit(scores - (scores @ share)[:, None])
    randomness = torch.ones(len(z), dtype=torch.float64)
    randomness[0] = 0
    errors = standard_errors(fitted, randomness, onto, base=share)
    is_determined = alpha > 0 or problem.rank == z.shape[1] < len(z) - 1
    return fitted.coefficients @ onto.mT, errors if is_determined else torch.full_like(errors, math.nan)


# KernelSHAP


def _most_forwards(samples: int | None, patches: int, features: str, cells: int | None, **_: Any) -> Cost:
    """Return the forwards for at most as many features as patches; exact for patches."""
    most = patches if cells is None else min(patches, cells * cells)
    pairs = _pairs(samples, patches if features == "superpixels" else most)
    return Cost(2 * min(pairs, 2 ** (most - 1) - 1 if features == "patches" else pairs) + 1)


def _pairs(samples: int | None, features: int) -> int:
    return (2 * features + FURTHER_SAMPLES if samples is None else samples) // 2


@method(
    "kernelshap",
    family="perturbation",
    paper="Lundberg & Lee, 2017",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(_most_forwards, at_most=True, slow=True),
    score="prob",
    signed=True,
)
def kernelshap(
    trace: Trace,
    *,
    samples: Samples | None = None,
    features: Features = "patches",
    cells: Cells | None = None,
    removal: Removal = "token",
    seed: int = 0,
) -> MapResult:
    """argmin_v sum_S k(|S|) (f(S) − f(∅) − v(S))², sum v = f(x) − f(∅): each feature's fair share of the score.

    k is the Shapley kernel. `samples` coalitions, in pairs with their complements (None: 2 · features + 2048, as shap
    does): all of them where they suffice, which gives the exact Shapley values, else all of the smallest and largest
    and a draw of the others. `features` and `cells` as in lime. The values of the features add up exactly; a feature of
    several patches gives each of them its whole value.
    """
    patches = trace.layout.patches
    forwards = _most_forwards(samples, patches, features, cells).forwards
    with probing(trace, removal, label="kernelshap", forwards=forwards, seed=seed) as probe:
        segments_per_image = segmentations(probe, features, cells)
        drawn = [
            shapley_coalitions(segments.count, _pairs(samples, min(segments.count, patches)), seed)
            for segments in segments_per_image
        ]
        sets_per_image = [coalitions.sets for coalitions in drawn]
        kept = [torch.cat([sets.new_zeros(1, sets.shape[1]), sets, ~sets]) for sets in sets_per_image]
        parts, notes = [], _single_feature_notes(segments_per_image, "kernelshap")
        for index, (segments, _, scores, original) in enumerate(_scored(probe, segments_per_image, kept)):
            count = len(drawn[index].sets)
            halved = (scores[:, 1 : 1 + count] - scores[:, 1 + count :]) / 2
            values, errors, rank = shapley_fit(drawn[index], halved, original - scores[:, 0], segments.shares)
            if rank < segments.count - 1:
                notes.append(
                    f"kernelshap: {2 * count} samples tell {rank} of the {segments.count - 1} differences between "
                    "features; what they leave open is shared equally, and there is no standard error. "
                    f"Raise samples to {4 * segments.count} or more, or use cells=7"
                )
            parts.append((values, errors))
    return _on_grid(parts, probe, notes)


def shapley_fit(drawn: Coalitions, halved: Tensor, total: Tensor, onto: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return Shapley values and standard errors on patches, two [B, P], and the number of determined differences.

    `halved` [B, n] is (f(S) − f(rest))/2, `total` [B] the sum of all values. With the constraint a set and its
    complement give the same equation: v(S) − total/2 = halved. So v = total/M + d, where d adds up to zero: the rows
    of X are the sets less their mean, and the shortest solution adds up to zero by itself. `halved` and `total` may be
    on a GPU that is still computing them: they are read when all that does not depend on them is done.
    """
    sets = drawn.sets.double()
    part = sets.mean(1)  # |S|/M
    features = sets.shape[1]
    problem = LeastSquares.of(sets - part[:, None], drawn.weights)
    halved, total = halved.cpu(), total.cpu()
    fitted = problem.fit(halved - (part - 0.5) * total[:, None])
    differences = fitted.coefficients - fitted.coefficients.mean(1, keepdim=True)
    values = (total[:, None] / features + differences) @ onto.mT
    if problem.rank < features - 1:
        return values, torch.full_like(values, math.nan), problem.rank
    return values, standard_errors(fitted, drawn.unseen, onto), problem.rank


# Both


def _scored(
    probe: Probe, segmentations: list[Segmentation], kept: list[Tensor]
) -> Iterator[tuple[Segmentation, Tensor, Tensor, Tensor]]:
    """Yield segments, what was kept of them, scores [B, V] and original scores [B]; per image where segments differ.

    Scores are on the model's device, which may still be computing them.
    """
    scores = score_features(probe, segmentations, kept)
    originals = [probe.original] if len(segmentations) == 1 else list(probe.original[:, None])
    for segments, keep, image_scores, original in zip(segmentations, kept, scores, originals, strict=True):
        yield segments, keep, image_scores.double(), original.double()


def _single_feature_notes(segmentations: list[Segmentation], method: str) -> list[str]:
    is_single = any(segments.count == 1 for segments in segmentations)
    note = f"{method}: there is one feature only, so the map is flat; use features=patches, or more cells"
    return [note] if is_single else []


def _on_grid(parts: list[tuple[Tensor, Tensor]], probe: Probe, notes: list[str]) -> MapResult:
    """Return maps [B, rows, cols] with their standard errors, where any is known."""
    values, errors = (
        torch.cat(tensors).reshape(-1, *probe.grid).to(probe.original) for tensors in zip(*parts, strict=True)
    )
    error = errors if errors.isfinite().any() else None
    return MapResult.from_probe(values, probe, standard_error=error, notes=notes)
