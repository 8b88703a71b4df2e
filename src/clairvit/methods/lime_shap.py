"""Surrogates: a linear model of what the score does when features go. LIME weighs what is near, KernelSHAP is fair.

Features are patches, cells of patches or superpixels (perturbation/segments.py).
All sums are made in float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.explanation import Cost
from clairvit.methods.registry import FORWARD, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.perturbation.probe import Probe, probing
from clairvit.perturbation.removal import Removal
from clairvit.perturbation.segments import (
    Coalitions,
    Features,
    Segmentation,
    coalitions,
    groups_of,
    halves,
    scores_keeping,
)
from clairvit.tracing.trace import Trace

LIME_WIDTH = 0.25
FURTHER = 2048  # samples that shap takes on top of two for each feature
ROUND_OFF = 1e-10  # directions that the samples say less than this about, in parts of the best known, are not known


# The fit: weighted least squares of few unknowns, and how much the draw of the samples decides


@dataclass(frozen=True, eq=False)
class Fit:
    """values = argmin sum_i w_i (y_i − rows_i · values)² + ridge · |values|², the shortest where several are."""

    values: Tensor  # [B, M]
    pull: Tensor  # [M, n] what one unit more in y_i does to the values
    residuals: Tensor  # [B, n]
    leverage: Tensor  # [n] how far each row follows its own y, 0…1
    rank: int  # how many directions of the unknowns the rows say something about


def fit(rows: Tensor, weights: Tensor, targets: Tensor, ridge: float = 0.0) -> Fit:
    """rows [n, M], weights [n], targets [B, n], by the normal equations in float64."""
    weighted = rows.mT * weights  # [M, n]
    strength, directions = torch.linalg.eigh(weighted @ rows)
    known = strength > ROUND_OFF * strength.amax()
    inverse = torch.where(known | (ridge > 0), 1 / (strength.clamp(min=0) + ridge), 0)
    pull = directions @ (inverse[:, None] * (directions.mT @ weighted))
    values = targets @ pull.mT
    return Fit(values, pull, targets - values @ rows.mT, (rows * pull.mT).sum(1), int(known.sum()))


def standard_errors(found: Fit, chance: Tensor, onto: Tensor, base: Tensor | float = 0.0) -> Tensor:
    """Of `onto` [P, M] of the values, if other samples had been drawn: [B, P], the heteroscedasticity-robust sandwich.

    `chance` [n] is how much of each sample was left to chance: 0 for one that is always there, 1 for one of infinitely
    many. Residuals are widened by what their own fit took from them (HC2); `base` is leverage that the fit does not
    know of, an intercept's.
    """
    drawn = chance > 0
    pull = onto @ found.pull[:, drawn]  # [P, drawn]
    freedom = 1 - found.leverage - base
    # A row that the fit must follow has no residual, and says nothing of what another row would have done.
    gaps = torch.where(freedom > ROUND_OFF, found.residuals / freedom.clamp(min=ROUND_OFF).sqrt(), math.nan)[:, drawn]
    count = torch.tensor(float(gaps.shape[1]))
    errors = []
    for gap in gaps:
        changes = pull * gap
        changes = changes - changes.mean(1, keepdim=True)
        errors.append((changes.square() @ chance[drawn] * count / (count - 1)).sqrt())
    return torch.stack(errors) if drawn.any() else torch.zeros_like(found.values @ onto.mT)


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
    samples: int = 1000,
    width: float = LIME_WIDTH,
    alpha: float = 1.0,
    features: Features = "patches",
    cells: int | None = None,
    removal: Removal = "token",
    seed: int = 0,
) -> MapResult:
    """argmin_b sum_z exp(−D(z)²/w²) (f(z) − a − b·z)² + alpha |b|²: a ridge fit to random halves of the image.

    Each feature is kept with probability 1/2; D is the cosine distance from everything kept, which is the first sample.
    `features` are the patches, a coarser grid of `cells` × `cells` of them, or superpixels (quickshift); every patch
    gets the coefficient of its feature. `preset=lime` has that package's kernel, exp(−D²/2w²), and its superpixels.
    """
    _check_samples(samples, "samples=1000")
    _check_positive("width", width, width > 0, "more than 0, such as width=0.25")
    _check_positive("alpha", alpha, alpha >= 0, "0 (least squares) or more, such as alpha=1")
    with probing(trace, removal, what="lime", forwards=samples - 1, seed=seed) as probe:
        groups = groups_of(probe, features, cells)
        kept = [halves(samples - 1, own.count, seed) for own in groups]
        parts, notes = [], _single_feature_notes(groups, "lime")
        for own, keep, found, original in _asked(probe, groups, kept):
            if samples < own.count:
                notes.append(
                    f"lime: {samples} samples are fewer than the {own.count} features, so that the ridge decides much; "
                    "raise samples, or use cells=7"
                )
            seen = torch.cat([torch.ones(1, own.count), keep]).double()  # [n, M]
            parts.append(local_fit(seen, torch.cat([original[:, None], found], 1), own.shares, width, alpha))
    return _on_grid(parts, probe, notes)


def closeness(seen: Tensor, width: float) -> Tensor:
    """exp(−D²/w²) of samples [n, M] of 0 and 1, D the cosine distance to all ones (1 if nothing is left)."""
    distance = 1 - seen.mean(1).sqrt()
    return torch.exp(-((distance / width) ** 2))


def local_fit(seen: Tensor, scores: Tensor, onto: Tensor, width: float, alpha: float) -> tuple[Tensor, Tensor]:
    """The coefficients of samples [n, M] with scores [B, n], and their standard errors, on patches: two [B, P].

    The first sample, everything kept, is no draw.
    """
    weights = closeness(seen, width)
    share = weights / weights.sum()
    rows, targets = seen - share @ seen, scores - (scores @ share)[:, None]  # so that the intercept is free
    found = fit(rows, weights, targets, alpha)
    chance = torch.ones(len(seen), dtype=torch.float64)
    chance[0] = 0
    errors = standard_errors(found, chance, onto, base=share)
    determined = alpha > 0 or found.rank == seen.shape[1] < len(seen) - 1
    return found.values @ onto.mT, errors if determined else torch.full_like(errors, math.nan)


# KernelSHAP


def _most_forwards(samples: int | None, patches: int, features: str, cells: int | None, **_: Any) -> Cost:
    """Exact for patches; how many superpixels there are shows on the way, and more than patches add no samples."""
    most = patches if cells is None else min(patches, cells * cells)
    pairs = _pairs(samples, patches if features == "superpixels" else most)
    return Cost(2 * min(pairs, 2 ** (most - 1) - 1 if features == "patches" else pairs) + 1)


def _pairs(samples: int | None, features: int) -> int:
    return (2 * features + FURTHER if samples is None else samples) // 2


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
    samples: int | None = None,
    features: Features = "patches",
    cells: int | None = None,
    removal: Removal = "token",
    seed: int = 0,
) -> MapResult:
    """argmin_v sum_S k(|S|) (f(S) − f(∅) − v(S))², sum v = f(x) − f(∅): each feature's fair share of the score.

    k is the Shapley kernel. `samples` coalitions, in pairs with their complements (None: 2 · features + 2048, as shap
    does): all of them where they suffice, which gives the exact Shapley values, else all of the smallest and largest
    and a draw of the others. `features` and `cells` as in lime. The values of the features add up exactly; a feature of
    several patches gives each of them its whole value.
    """
    if samples is not None:
        _check_samples(samples, "samples=2048")
    patches = trace.layout.patches
    forwards = _most_forwards(samples, patches, features, cells).forwards
    with probing(trace, removal, what="kernelshap", forwards=forwards, seed=seed) as probe:
        groups = groups_of(probe, features, cells)
        drawn = [coalitions(own.count, _pairs(samples, min(own.count, patches)), seed) for own in groups]
        kept = [torch.cat([own.sets.new_zeros(1, own.sets.shape[1]), own.sets, ~own.sets]) for own in drawn]
        parts, notes = [], _single_feature_notes(groups, "kernelshap")
        for index, (own, _, found, original) in enumerate(_asked(probe, groups, kept)):
            count = len(drawn[index].sets)
            halved = (found[:, 1 : 1 + count] - found[:, 1 + count :]) / 2
            values, errors, rank = fair_fit(drawn[index], halved, original - found[:, 0], own.shares)
            if rank < own.count - 1:
                notes.append(
                    f"kernelshap: {2 * count} samples tell {rank} of the {own.count - 1} differences between features; "
                    "what they leave open is shared equally, and there is no standard error. "
                    f"Raise samples to {4 * own.count} or more, or use cells=7"
                )
            parts.append((values, errors))
    return _on_grid(parts, probe, notes)


def fair_fit(asked: Coalitions, halved: Tensor, total: Tensor, onto: Tensor) -> tuple[Tensor, Tensor, int]:
    """Values and standard errors on patches, two [B, P], and how many differences between features are known.

    `halved` [B, n] is (f(S) − f(rest))/2, `total` [B] what all features add up to. With the constraint a set and its
    complement say the same of the values: v(S) − total/2 = halved. So v = total/M + d, where d adds up to zero: the
    rows are the sets less their mean, and the shortest solution adds up to zero by itself.
    """
    sets = asked.sets.double()
    part = sets.mean(1)  # |S|/M
    features = sets.shape[1]
    found = fit(sets - part[:, None], asked.weights, halved - (part - 0.5) * total[:, None])
    differences = found.values - found.values.mean(1, keepdim=True)
    values = (total[:, None] / features + differences) @ onto.mT
    if found.rank < features - 1:
        return values, torch.full_like(values, math.nan), found.rank
    return values, standard_errors(found, asked.unseen, onto), found.rank


# Both


def _asked(
    probe: Probe, groups: list[Segmentation], kept: list[Tensor]
) -> Iterator[tuple[Segmentation, Tensor, Tensor, Tensor]]:
    """Groups, what was kept of them, scores [B, V] and the original score [B]; image by image where they differ."""
    scores = scores_keeping(probe, groups, kept)
    originals = [probe.original] if len(groups) == 1 else list(probe.original[:, None])
    for own, keep, found, original in zip(groups, kept, scores, originals, strict=True):
        yield own, keep, found.double().cpu(), original.double().cpu()


def _single_feature_notes(groups: list[Segmentation], what: str) -> list[str]:
    single = any(segmentation.count == 1 for segmentation in groups)
    note = f"{what}: there is one feature only, so the map is flat; use features=patches, or more cells"
    return [note] if single else []


def _on_grid(parts: list[tuple[Tensor, Tensor]], probe: Probe, notes: list[str]) -> MapResult:
    """Return maps [B, rows, cols] with their standard errors, where any is known."""
    values, errors = (torch.cat(one).reshape(-1, *probe.grid).to(probe.original) for one in zip(*parts, strict=True))
    error = errors if errors.isfinite().any() else None
    return MapResult.from_probe(values, probe, standard_error=error, notes=notes)


def _check_samples(samples: int, such_as: str) -> None:
    if samples < 2:
        raise BadInput(f"samples={samples} was given; expected 2 or more variants of the image, such as {such_as}.")


def _check_positive(name: str, value: float, holds: bool, expected: str) -> None:
    if not holds or not math.isfinite(value):
        raise BadInput(f"{name}={value:g} was given; expected {expected}.")
