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
from clairvit._rng import make_generator
from clairvit._spec import ParsedSpec
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.ensembles import explain_variants, wrapper_options
from clairvit.methods.registry import FORWARD, ExtraCost, Method
from clairvit.methods.result import MapResult, Refinement, top_count
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
NOISE = 3.0  # λ: the variance of an equation's error over what the prior expects of it, as errors are computed
CAUTION = 2000.0  # the map itself uses max(λ, 2000 / N): few passes move it less than they would by λ alone
PRIOR_AGREEMENT, PRIOR_WEIGHT = 0.45, 8.0  # a one-pass map's correlation with removals before any is seen
LEAST_AGREEMENT = 0.05  # a prior map never turns around or vanishes by noise
DRAWS = 1000  # of the posterior, for the probability to be among the brightest
JITTER, TINY = 1e-9, 1e-300  # keep a covariance positive definite under rounding
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


def refined_by_fewer(spec: MethodSpec) -> list[str]:
    """Return the texts of a refined method with half as many passes, a quarter, …; empty for any other method."""
    if spec.canonical.name != "refine":
        return []
    passes, texts = dict(spec.options)["passes"] // 2, []
    while passes > 1:
        options = {**spec.canonical.options, "passes": passes}
        texts.append(resolve_parsed(replace(spec.canonical, options=options)).text)
        passes //= 2
    return texts


def check_seconds(seconds: float) -> None:
    """Raise BadInput for a time that is not a positive number."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise BadInput(f"seconds={seconds!r} was given; expected a positive number of seconds per map, such as 2.")


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
    """An estimate of φ after n equations, the covariance of its error, and the variance of a further equation's noise.

    Estimated with the λ of the equations it is the posterior mean, and the covariance is the posterior's.
    """

    mean: Tensor  # [P]
    covariance: Tensor  # [P, P]
    noise: float

    @property
    def standard_error(self) -> Tensor:
        """Return the posterior standard deviation of each patch, [P]."""
        return self.covariance.diagonal().clamp(min=0).sqrt()

    def in_top(self, generator: torch.Generator) -> Tensor:
        """Return the probability of each patch to be among the largest 10 %, [P], by draws; NaN without equations."""
        if not self.covariance.isfinite().all():
            return torch.full_like(self.mean, math.nan)
        variance = self.covariance.diagonal().mean()
        identity = torch.eye(len(self.mean), dtype=self.mean.dtype)
        root = torch.linalg.cholesky(self.covariance + (JITTER * variance + TINY) * identity)
        noise = torch.randn(DRAWS, len(self.mean), generator=generator, dtype=torch.float64, device="cpu")
        largest = (self.mean + noise @ root.mT).topk(top_count(len(self.mean)), dim=1).indices
        return torch.zeros_like(self.mean).index_add(0, largest.flatten(), torch.ones(largest.numel()).double()) / DRAWS

    def predictive_error(self, equations: Tensor) -> Tensor:
        """Return the standard deviations [m] of what equations [m, P] would give that were not seen."""
        return ((equations @ self.covariance * equations).sum(1) + self.noise).clamp(min=0).sqrt()


def posterior(
    equations: Tensor,
    values: Tensor,
    prior_mean: Tensor,
    covariance: Tensor,
    noise: float,
    shrinkage: float | None = None,
) -> Posterior:
    """Return what values [n] = K φ + ε of equations K [n, P] make of the prior φ ~ N(m, τ² C), ε ~ N(0, τ² g λ I).

    With g the mean diagonal of K C Kᵀ, M = K C Kᵀ / g + s I and B = C Kᵀ M⁻¹ / g the estimate is m + B (v − K m), and
    its error has the covariance τ² [(I − B K) C (I − B K)ᵀ + g λ B Bᵀ]. `noise` is λ and `shrinkage` s; where s = λ,
    the default, this is the posterior. τ² makes the squared leave-one-out residuals (with λ) as large as their
    variances, on average. Without equations τ is not known and the errors are NaN.
    """
    shrinkage = noise if shrinkage is None else shrinkage
    if not len(equations):
        return Posterior(prior_mean, torch.full_like(covariance, math.nan), math.nan)
    projected = equations @ covariance  # K C, [n, P]
    gram = projected @ equations.mT
    scale = float(gram.diagonal().mean())
    if scale == 0:  # no equation reads a patch
        return Posterior(prior_mean, torch.full_like(covariance, math.nan), math.nan)
    identity = torch.eye(len(values), dtype=values.dtype)
    unexplained = values - equations @ prior_mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram / scale + noise * identity))
    residuals = inverse @ unexplained
    variance = float((residuals.square() / inverse.diagonal()).mean() / scale)  # τ²
    if shrinkage != noise:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram / scale + shrinkage * identity))
    gain = projected.mT @ inverse / scale  # B, [P, n]
    left = covariance - gain @ projected  # (I − B K) C
    of_error = left - left @ equations.mT @ gain.mT + scale * noise * gain @ gain.mT
    return Posterior(prior_mean + gain @ unexplained, variance * of_error, variance * scale * noise)


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
    mean = scaled_prior(prior, equations, values)
    covariance = prior_covariance(prior, places, tokens)
    return posterior(equations, values, mean, covariance, NOISE, max(NOISE, CAUTION / len(keep)))


def log_odds(scores: Tensor, target: TargetBatch) -> Tensor:
    """Return log p / (1 − p) of probabilities [B or n, …] of a class; other scores are near to additive as they are."""
    rows = torch.tensor(in_log_odds(target), device=scores.device)
    odds = torch.logit(scores, eps=PROBABILITY_EDGE)
    return torch.where(rows.view(-1, *(1,) * (scores.ndim - 1)), odds, scores)


def in_log_odds(target: TargetBatch) -> list[bool]:
    """Return for each row whether its score is the probability of one class."""
    return [target.score == "prob" and is_class for is_class in target.single_class_rows]


# The method


def refined_further(spec: MethodSpec, passes: int, known: Tensor | None) -> MethodSpec:
    """Return the spec of a method refined by so many passes, for images whose first passes gave the scores `known`.

    A method that is refined already keeps its other options.
    """
    canonical = spec.canonical
    if canonical.name == "refine":
        spec = resolve_parsed(replace(canonical, options={**canonical.options, "passes": passes}))
    else:
        spec = refined_spec(spec, passes)
    inner = spec.canonical.inner[0]
    assert isinstance(inner, MethodSpec)
    return replace(spec, method=replace(spec.method, function=functools.partial(_refined_from, inner, known)))


def refined(
    inner: MethodSpec,
    trace: Trace,
    passes: PassBudget = 256,
    removal: Removal = "token",
    seed: int = 0,
) -> MapResult:
    """E[φ | v(S_1) … v(S_N)]: the one-pass map w, corrected by N passes in which random patches S are kept.

    v(S) = log-odds of the target with only the patches S = Z φ + a number for |S| + ε, φ ~ N(α w, τ² C). Sets come in
    blocks of 8 of one size, and orthonormal contrasts within a block take out what the size does. C is large for
    patches whose tokens at the last layer are alike and near each other; ε has 3 times the equations' mean prior
    variance, and the map is estimated as if it had max(3, 2000 / N) times that, so that few passes move it little. The
    standard error of a patch is that of this estimate. `passes` are nested: those of a smaller number are the first of
    a larger one. One forward more, and the backwards of the one-pass method.
    """
    return _refined_from(inner, None, trace, passes, removal, seed)


def _refined_from(
    inner: MethodSpec, known: Tensor | None, trace: Trace, passes: int, removal: Removal, seed: int
) -> MapResult:
    """Return the refined maps, given the scores [B, n] of the first passes where these were run before."""
    spent = 0 if known is None else min(known.shape[1], passes)
    ((_, (prior,), notes),) = explain_variants(inner, trace, 1, lambda k: trace.pixels, "refine", seed)
    assert trace.target is not None
    observed = replace(trace, target=trace.target.with_preferred_score("prob"))
    with probing(observed, removal, label="refine", forwards=passes - spent, seed=seed) as probe:
        keep = keep_sets(probe.patches, passes, seed)
        scores = log_odds(probe.score_kept(keep[None, spent:]), probe.target).cpu().double()  # [B, N]
        scores = scores if known is None else torch.cat([known[:, :spent].to(scores), scores], 1)
        if prior.shape[1:] != torch.Size(probe.grid):
            prior = pool_to_grid(prior, (int(probe.grid[-2]), int(probe.grid[-1])))
        flat = prior.flatten(1).cpu().double()
        places = torch.cartesian_prod(*(torch.arange(side, dtype=torch.float64) for side in probe.grid))
        tokens = last_patch_tokens(trace)
        posteriors = [
            refined_map(flat[row], keep, scores[row], places, None if tokens is None else tokens[row])
            for row in range(len(flat))
        ]
        maps, errors, in_top = (
            torch.stack(rows).reshape(-1, *probe.grid).to(prior)
            for rows in (
                [p.mean for p in posteriors],
                [p.standard_error for p in posteriors],
                [p.in_top(make_generator(seed, "refine/draws")) for p in posteriors],
            )
        )
        error = errors if errors.isfinite().any() else None
        in_odds = any(in_log_odds(probe.target)) and passes > 1
        unit = ("refine: the map says what each patch adds to the log-odds of the class",) if in_odds else ()
        refinement = None if error is None else Refinement(scores, in_top)
        return MapResult.from_probe(maps, probe, standard_error=error, notes=(*unit, *notes), refinement=refinement)


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
