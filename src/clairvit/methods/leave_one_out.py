"""Leave-one-out and AtMan: the change of the score when one patch is removed, or attention to it suppressed."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit.errors import NotApplicable
from clairvit.methods.alternatives import advice
from clairvit.methods.registry import FORWARD, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.option_types import Doc, Range
from clairvit.perturbation.attention_override import ScoreTransform
from clairvit.perturbation.probe import probing
from clairvit.perturbation.removal import Removal
from clairvit.tracing.trace import Trace


@method(
    "leave-one-out",
    family="perturbation",
    paper="do(x_i) as in Coporan's survey",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(lambda patches, **_: Cost(patches), slow=True),
    score="prob",
    is_stochastic=False,
    signed=True,
)
def leave_one_out(trace: Trace, *, removal: Removal = "token", seed: int = 0) -> MapResult:
    """f(x) − f(x without patch i): the exact effect of do(remove i), one forward per patch.

    What every other method estimates, for one patch at a time: of two patches with the same content neither matters.
    """
    patches = trace.layout.patches
    with probing(trace, removal, label="leave-one-out", forwards=patches, seed=seed) as probe:
        scores = probe.score_kept(~torch.eye(patches, dtype=torch.bool)[None])  # [B, patches]
        drops = probe.original[:, None] - scores
        return MapResult.from_probe(drops.reshape(-1, *probe.grid), probe)


@method(
    "atman",
    family="perturbation",
    paper="Deb et al., NeurIPS 2023",
    output="image",
    requires=FORWARD,
    extra_cost=ExtraCost(lambda patches, **_: Cost(patches), slow=True),
    score="logprob",
    signed=True,
)
def atman(
    trace: Trace,
    *,
    factor: Annotated[
        float, Range(ge=0, lt=1, example=0.1), Doc("what is left of the attention to a suppressed patch")
    ] = 0.1,
    threshold: Annotated[
        Annotated[float, Range(ge=0, le=1, unit="(a cosine) or None", example=0.6)] | None,
        Doc("from which cosine similarity on similar patches are suppressed too; None: none"),
    ] = 0.6,
    shift_min: Annotated[
        bool, Doc("measure scores from each row's smallest one; false multiplies them as they are, as printed")
    ] = True,
) -> MapResult:
    """f(x) − f(x, attention to patch i suppressed in every layer): the rise of the target's cross-entropy, f = log p.

    In each row of scores S the keys of patch i and of patches similar to it become (S − min S)·m, with m = factor
    for i itself and (1 − factor)(1 − cos) + factor for patches whose tokens at the first block (positions included)
    have a cosine similarity of `threshold` or more to it; None suppresses patch i alone. `shift_min=False` is S·m as
    the paper prints it, which raises negative scores instead. Class and register tokens are never suppressed.
    """
    trace.recording.structure.check_members(trace.recording.model.name, "atman")
    if not trace.layers:
        seen = trace.recording.structure.attention_seen
        raise NotApplicable(
            f"{trace.recording.model.name}: {seen}, and atman suppresses attention.", methods=("leave-one-out",)
        )
    for layer in trace.layers:
        layer.between_tokens()  # windows, channels and convolutions are refused in words
    layout = trace.in_order
    m = suppression_factors(trace.layers[0].x[:, layout.patch_slice], factor, threshold)  # [B, patches, patches]
    m = layout.pad_patches(m, 1.0)  # [B, patches, tokens]
    # Nothing is removed from the image, so any removal that needs no tokens to be dropped will do.
    with probing(trace, "mean", label="atman", forwards=layout.patches) as probe, advice("Use leave-one-out."):
        scores = probe.score_with_attention(layout.patches, lambda images, ks: suppress_keys(m[images, ks], shift_min))
        drops = probe.original[:, None] - scores
        return MapResult.from_probe(drops.reshape(-1, *probe.grid), probe)


def suppression_factors(tokens: Tensor, factor: float, threshold: float | None) -> Tensor:
    """Return m [B, n, n] of tokens [B, n, d]: when patch i is suppressed, the score of key j is multiplied by m_ij."""
    identity = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    unit = F.normalize(tokens.double(), dim=-1)
    cosine = (unit @ unit.mT).clamp(-1, 1)
    similar = identity if threshold is None else (cosine >= threshold) | identity
    m = (1 - factor) * (1 - cosine.masked_fill(identity, 1)) + factor
    return torch.where(similar, m, torch.ones_like(cosine))


def suppress_keys(m: Tensor, shift_min: bool) -> ScoreTransform:
    """Return S -> S·m for m [n, tokens], S measured from the lowest score of each row or from zero."""

    def rewrite(scores: Tensor) -> Tensor:  # [n, H, queries, tokens]
        masked = scores <= torch.finfo(scores.dtype).min / 2  # by the model's own mask: stays masked
        low = scores.masked_fill(masked, float("inf")).amin(-1, keepdim=True) if shift_min else 0.0
        # The lowest score is added again: no change to a softmax over the row, and the scores of other keys stay.
        return torch.where(masked, scores, low + (scores - low) * m[:, None, None].to(scores.dtype))

    return rewrite
