"""Causal methods: what happens to the score when a patch is really taken away."""

from __future__ import annotations

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.explanation import Cost
from clairvit.methods.registry import FORWARD, ExtraCost, method
from clairvit.methods.result import MapResult
from clairvit.perturbation.attention_override import Rewrite
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
    """f(x) − f(x without patch i): the exact effect of do(remove i), one forward a patch.

    What every other method guesses at, for one patch at a time: two patches that say the same do not matter alone.
    """
    patches = trace.layout.patches
    with probing(trace, removal, what="leave-one-out", forwards=patches, seed=seed) as probe:
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
def atman(trace: Trace, *, factor: float = 0.1, threshold: float | None = 0.6, shift_min: bool = True) -> MapResult:
    """f(x) − f(x, attention to patch i turned down in every layer): the rise of the target's cross-entropy, f = log p.

    In each row of scores S the keys of patch i and of patches that look like it become (S − min S)·m, with m = factor
    for i itself and (1 − factor)(1 − cos) + factor for patches whose tokens at the first block (positions included)
    have a cosine similarity of `threshold` or more to it; None turns down patch i alone. `shift_min=False` is S·m as
    the paper prints it, which turns negative scores up instead. Class and register tokens are never turned down.
    """
    if not 0 <= factor < 1:
        raise BadInput(f"factor={factor:g} was given; expected 0 or more and below 1, such as factor=0.1.")
    if threshold is not None and not 0 <= threshold <= 1:
        raise BadInput(f"threshold={threshold:g} was given; expected a cosine from 0 to 1, such as 0.6, or None.")
    if not trace.layers:
        raise NotApplicable(
            "No attention call was seen in this model, and atman turns attention down. Use leave-one-out."
        )
    for layer in trace.layers:
        layer.between_tokens()  # windows, channels and convolutions are refused in words
    layout = trace.in_order
    weights = turned_down(trace.layers[0].x[:, layout.prefix :], factor, threshold)  # [B, patches, patches]
    weights = torch.nn.functional.pad(weights, (layout.prefix, 0), value=1.0)  # [B, patches, tokens]
    # Nothing is removed from the image, so any removal that needs no tokens to be dropped will do.
    with probing(trace, "mean", what="atman", forwards=layout.patches) as probe:
        scores = probe.score_with_attention(
            layout.patches, lambda images, ks: suppressing(weights[images, ks], shift_min)
        )
        drops = probe.original[:, None] - scores
        return MapResult.from_probe(drops.reshape(-1, *probe.grid), probe)


def turned_down(tokens: Tensor, factor: float, threshold: float | None) -> Tensor:
    """m [B, n, n] of tokens [B, n, d]: when patch i is suppressed, key j counts m[i, j] times."""
    own = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    alike = torch.nn.functional.normalize(tokens.double(), dim=-1)
    cosine = (alike @ alike.mT).clamp(-1, 1)
    near = own if threshold is None else (cosine >= threshold) | own
    softened = (1 - factor) * (1 - cosine.masked_fill(own, 1)) + factor
    return torch.where(near, softened, torch.ones_like(cosine))


def suppressing(weights: Tensor, shift_min: bool) -> Rewrite:
    """Scores times weights [n, tokens], measured from the lowest score of each row or from zero."""

    def rewrite(scores: Tensor) -> Tensor:  # [n, H, queries, tokens]
        hidden = scores <= torch.finfo(scores.dtype).min / 2  # by a mask of the model's own: stays so
        low = scores.masked_fill(hidden, float("inf")).amin(-1, keepdim=True) if shift_min else 0.0
        # The lowest score is added again: no change to a softmax over the row, and keys beside the image's stay level.
        return torch.where(hidden, scores, low + (scores - low) * weights[:, None, None].to(scores.dtype))

    return rewrite
