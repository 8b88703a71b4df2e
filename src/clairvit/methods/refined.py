"""Refine: a one-pass map as the prior of a linear model of what removing patches does, updated by real passes.

cv.explain(model, "cat.jpg", refine("attnlrp+plus", passes=256))       # "refine(attnlrp+plus,passes=256)"
cv.explain(model, "cat.jpg", passes=256)                               # the same with the default method

With only the patches S kept, the target's score is v(S) = Z φ + (what the number of patches does) + ε, Z the rows of
0 and 1. φ has the prior N(α w, τ² C): w the one-pass map, C larger for patches whose tokens are alike and near.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit._spec import ParsedSpec
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.ensembles import explain_variants, wrapper_options
from clairvit.methods.registry import FORWARD, ExtraCost, Method
from clairvit.methods.result import MapResult
from clairvit.methods.spec import MethodSpec, resolve_method, resolve_parsed, wraps
from clairvit.numerics import pool_to_grid
from clairvit.option_types import Doc, Range
from clairvit.perturbation.probe import probing
from clairvit.perturbation.random_sets import contrasts, keep_sets
from clairvit.perturbation.removal import Removal
from clairvit.targets.base import TargetBatch
from clairvit.tracing.trace import Trace

ALIKE, NEAR = 0.15, 2.5  # widths of the kernel: in cosine distance of tokens, and in patches
OWN_SHARE = 0.3  # of a patch's prior variance that it shares with no other patch
LEAST_NOISE, NOISE_OF_ONE = 3.0, 2000.0  # λ = max(3, 2000 / N)
PRIOR_AGREEMENT, PRIOR_WEIGHT = 0.45, 8.0  # a one-pass map's correlation with removals before any is seen
LEAST_AGREEMENT = 0.05  # a prior map never turns around or vanishes by noise
PROBABILITY_EDGE = 1e-15  # float64 holds no probability nearer to 1
PassBudget = Annotated[
    int,
    Range(ge=0, unit="passes", example=256),
    Doc("how many passes with random patches kept refine the map; 0: none"),
]


def refine(method: str | MethodSpec, passes: int = 256, removal: str = "token") -> str:
    """Return the method string that refines `method` by real passes.

    Args:
        method: A method string or spec of one trace, or an ensemble of such methods.
        passes: How many passes with random patches kept are run; those of fewer passes are the first of them.
        removal: What takes the place of removed patches.

    Returns:
        A method string, "refine(genatt,passes=64)".

    Example:
        >>> import clairvit as cv
        >>> cv.ensembles.refine("genatt", passes=64)
        'refine(genatt,passes=64)'
    """
    return resolve_parsed(ParsedSpec("refine", (method,), {"passes": passes, "removal": removal})).text


def refined_spec(method: str | MethodSpec, passes: int) -> MethodSpec:
    """Return the spec of a method that is refined by so many passes."""
    return resolve_parsed(ParsedSpec("refine", (method,), {"passes": passes}))


# The prior, and what passes make of it


def prior_covariance(prior: Tensor, places: Tensor, tokens: Tensor | None) -> Tensor:
    """Return C [P, P] of a map [P], places [P, 2 or 3] in patches and, where there are any, patch tokens [P, d].

    C_ij = s_i s_j [0.3 · 1(i = j) + 0.7 · exp((cos(t_i, t_j) − 1) / 0.15) · exp(−d_ij² / (2 · 2.5²))] with
    s_i² = 0.3 + |w_i| / mean |w|.
    """
    size = prior.abs().mean()
    scale = torch.ones_like(prior) if size == 0 else (0.3 + prior.abs() / size).sqrt()
    kernel = torch.exp(-torch.cdist(places, places).square() / (2 * NEAR**2))
    if tokens is not None:
        unit = F.normalize(tokens, dim=1)
        kernel = kernel * torch.exp(((unit @ unit.mT).clamp(-1, 1) - 1) / ALIKE)
    shared = OWN_SHARE * torch.eye(len(prior), dtype=prior.dtype) + (1 - OWN_SHARE) * kernel
    return scale[:, None] * shared * scale


@dataclass(frozen=True, eq=False)
class Posterior:
    """What is believed of φ after n equations: its mean, covariance, and the variance of a further equation's error."""

    mean: Tensor  # [P]
    covariance: Tensor  # [P, P]
    noise: float

    @property
    def standard_error(self) -> Tensor:
        """Return the posterior standard deviation of each patch, [P]."""
        return self.covariance.diagonal().clamp(min=0).sqrt()

    def predictive_error(self, equations: Tensor) -> Tensor:
        """Return the standard deviations [m] of what equations [m, P] would give that were not seen."""
        return ((equations @ self.covariance * equations).sum(1) + self.noise).clamp(min=0).sqrt()


def posterior(equations: Tensor, values: Tensor, prior_mean: Tensor, covariance: Tensor, noise: float) -> Posterior:
    """Return what values [n] = K φ + ε of equations K [n, P] make of the prior φ ~ N(m, τ² C).

    With g the mean diagonal of K C Kᵀ and M = K C Kᵀ / g + λ I: the mean is m + C Kᵀ M⁻¹ (v − K m) / g and the
    covariance τ² (C − C Kᵀ M⁻¹ K C / g); `noise` is λ. τ² makes the squared leave-one-out residuals as large as their
    variances, on average. Without equations τ is not known and the errors are NaN.
    """
    if not len(equations):
        return Posterior(prior_mean, torch.full_like(covariance, math.nan), math.nan)
    projected = equations @ covariance  # K C, [n, P]
    gram = projected @ equations.mT
    scale = float(gram.diagonal().mean())
    if scale == 0:  # no equation reads a patch
        return Posterior(prior_mean, torch.full_like(covariance, math.nan), math.nan)
    identity = torch.eye(len(values), dtype=values.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram / scale + noise * identity))
    residuals = inverse @ (values - equations @ prior_mean)
    variance = float((residuals.square() / inverse.diagonal()).mean() / scale)  # τ²
    return Posterior(
        prior_mean + projected.mT @ residuals / scale,
        variance * (covariance - projected.mT @ inverse @ projected / scale),
        variance * scale * noise,
    )


def scaled_prior(prior: Tensor, equations: Tensor, values: Tensor) -> Tensor:
    """Return α w [P]: the one-pass map w in the unit of the values v, never turned around.

    α = r · |v| / |K w|, r the correlation of K w with v, drawn towards 0.45 as if 8 equations had shown that, and 0.05
    at the least: with few passes the least-squares scale is noise, and may lose the map.
    """
    predicted = equations @ prior
    length, size = float(predicted.norm()), float(values.norm())
    if length == 0:
        return prior
    if size == 0:
        return torch.zeros_like(prior)
    agreement = float(predicted @ values) / (length * size)
    count = len(values)
    agreement = (count * agreement + PRIOR_WEIGHT * PRIOR_AGREEMENT) / (count + PRIOR_WEIGHT)
    return prior * (max(agreement, LEAST_AGREEMENT) * size / length)


def refined_map(prior: Tensor, keep: Tensor, scores: Tensor, places: Tensor, tokens: Tensor | None) -> Posterior:
    """Return what the scores [N] of sets `keep` [N, P] make of a one-pass map [P]; all in float64."""
    inputs = [prior, scores] if tokens is None else [prior, scores, tokens]
    if not all(values.isfinite().all() for values in inputs):  # of a model or a map that is NaN itself
        nothing = torch.full_like(prior, math.nan)
        return Posterior(nothing, nothing.diag(), math.nan)
    if len(keep) < 2:
        return posterior(torch.zeros(0, len(prior), dtype=prior.dtype), scores[:0], prior, torch.eye(len(prior)), 1.0)
    mixing = contrasts(len(keep))
    equations, values = mixing @ keep.to(prior.dtype), mixing @ scores
    noise = max(LEAST_NOISE, NOISE_OF_ONE / len(keep))
    mean = scaled_prior(prior, equations, values)
    return posterior(equations, values, mean, prior_covariance(prior, places, tokens), noise)


def log_odds(scores: Tensor, target: TargetBatch) -> Tensor:
    """Return log p / (1 − p) of a class's probability p; other scores are near enough to additive as they are."""
    if target.score != "prob" or not target.is_single_class:
        return scores
    return torch.logit(scores, eps=PROBABILITY_EDGE)


# The method


def refined(
    inner: MethodSpec, trace: Trace, passes: PassBudget = 256, removal: Removal = "token", seed: int = 0
) -> MapResult:
    """E[φ | v(S_1) … v(S_N)]: the one-pass map w, corrected by N passes in which random patches S are kept.

    v(S) = log-odds of the target with only the patches S = Z φ + a number for |S| + ε, φ ~ N(α w, τ² C). Sets come in
    blocks of 8 of one size, and orthonormal contrasts within a block take out what the size does. C is large for
    patches whose tokens at the last layer are alike and near each other; ε has λ = max(3, 2000 / N) times the
    equations' mean prior variance. The standard error of a patch is the posterior's. `passes` are nested: those of a
    smaller number are the first of a larger one. One forward more, and the backwards of the one-pass method.
    """
    ((_, (prior,), notes),) = explain_variants(inner, trace, 1, lambda k: trace.pixels, "refine", seed)
    assert trace.target is not None
    observed = replace(trace, target=trace.target.with_preferred_score("prob"))
    with probing(observed, removal, label="refine", forwards=passes, seed=seed) as probe:
        keep = keep_sets(probe.patches, passes, seed)
        scores = log_odds(probe.score_kept(keep[None]), probe.target).cpu().double()  # [B, N]
        if prior.shape[1:] != torch.Size(probe.grid):
            prior = pool_to_grid(prior, (int(probe.grid[-2]), int(probe.grid[-1])))
        flat = prior.flatten(1).cpu().double()
        places = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float64) for side in probe.grid))
        tokens = last_patch_tokens(trace)
        posteriors = [
            refined_map(flat[row], keep, scores[row], places, None if tokens is None else tokens[row])
            for row in range(len(flat))
        ]
        maps, errors = (
            torch.stack(rows).reshape(-1, *probe.grid).to(prior)
            for rows in ([p.mean for p in posteriors], [p.standard_error for p in posteriors])
        )
        error = errors if errors.isfinite().any() else None
        in_odds = probe.target.score == "prob" and probe.target.is_single_class and passes > 1
        unit = ("refine: the map says what each patch adds to the log-odds of the class",) if in_odds else ()
        return MapResult.from_probe(maps, probe, standard_error=error, notes=(*unit, *notes))


def last_patch_tokens(trace: Trace) -> Tensor | None:
    """Return the patches' tokens at the input of the last layer, [B, P, d]; None where they are not one per patch."""
    if not trace.layers:
        return None
    x = trace.layers[-1].x
    if x.ndim != 3 or x.shape[1] != trace.layout.tokens:
        return None
    return x[:, torch.tensor(trace.layout.patch_rows, device=x.device)].detach().cpu().double()


@wraps("refine")
def _resolve_refine(parsed: ParsedSpec) -> MethodSpec:
    if len(parsed.inner) != 1:
        raise BadInput(f"refine(…) was given {len(parsed.inner)} methods; expected one: refine(attnlrp+plus).")
    inner = resolve_method(parsed.inner[0])
    if any(spec.method.extra_cost.passes is not None for spec in inner.members or (inner,)):
        raise NotApplicable(
            f"'{inner.text}' makes many passes itself; refine(…) starts from a map of one trace. "
            "Use refine(attnlrp+plus), or leave the passes out."
        )
    options, canonical = wrapper_options("refine", refined, parsed, [inner])
    method = Method(
        name=f"refine({inner.text})",
        family="perturbation",
        paper=f"{inner.method.paper}; refined by removals (ClairViT)",
        function=functools.partial(refined, inner),
        output="image",
        requires=replace(FORWARD, fitted_to=inner.misfit),
        signed=True,
        class_specific=True,
        extra_cost=ExtraCost(lambda passes, **_: Cost(passes + 1, inner.backwards), slow=True),
        caveats=inner.method.caveats,
    )
    return MethodSpec(method=method, options=options, canonical=canonical)
