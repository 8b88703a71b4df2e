"""FullGrad: gradient × input, and what biases add to the score, which gradient × input leaves out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import Single, Total
from clairvit.methods.alternatives import advice
from clairvit.methods.gradient import Level, at_level
from clairvit.methods.layer_view import LayerView
from clairvit.methods.multi_pass import target_scores
from clairvit.methods.registry import Caveats, ExtraCost, OptionOverrides, Requires, method
from clairvit.methods.result import MapResult, NumbersNote
from clairvit.numerics import widened
from clairvit.option_types import Doc
from clairvit.tracing.recorders.bias_terms import BiasMaps, BiasTerms, ImplicitBiasTerms, LearnedBiasTerms, rescaled
from clairvit.tracing.rules import rule_table
from clairvit.tracing.trace import Trace

Kind = Annotated[
    Literal["learned", "implicit"],
    Doc("which biases count: learned ones, or also what a bent operation's slope leaves unexplained"),
]
Rules = Annotated[
    Literal["plain", "linear", "libra"],
    Doc("the backward pass: autograd's own (plain), linearised (linear) or LibraGrad's (libra)"),
]
CLOSED = "completeness: tokens and biases add up to the score"
ROUND_OFF = 5e-4  # parts of the score: a residual below is rounding in half and single precision


def full_gradient(
    layer: LayerView,
    biases: Kind = "learned",
    rules: Rules = "plain",
    each: Annotated[bool, Doc("count the biases of this block alone; false: of all blocks from this one on")] = False,
) -> Tensor:
    """x·dy/dx + sum_b b·dy/db over all biases from this block on: what tokens add, and what biases add at them.

    SkipPLUS's form: signed sums over channels, no absolute values. A bias counts where it is added, at the token whose
    row it is: linear layers, norms, and q, k, v alike. Pooled vectors and the classifier belong to no patch; their
    biases are in the sum that the notes report and not in the map (SkipPLUS puts them on the class token, which is cut
    off). Positions are part of the first tokens, not biases.

    The notes say how far tokens and biases are from adding up to the score. With learned biases and the plain slope
    they do not on a ViT; `rules=linear`, the linearised gradient, closes the gap, and so does `biases=implicit`, which
    also counts what a bent operation's slope does not explain: LayerNorm, softmax and GELU out − J·in, products −ab.
    `each` counts the block's own biases only, and those after the last block with it. So every combinator sees them:
    a sum over layers then has each bias once, which is FullGrad+, and `fullgrad(layer=3)` is FullGrad from layer 3.
    """
    terms = bias_terms(layer.trace, biases, rules).tokens[layer.index :]  # [L, B, N]
    return layer.x_dx + (terms[:1] if each else terms).sum(0)  # [B, N]; a CNN has no blocks


def full_gradient_plus(layer: LayerView, biases: Kind = "learned", rules: Rules = "plain") -> Tensor:
    """sum_{l ≥ m} (x^l·dy/dx^l + biases of block l): FullGrad from every layer on, each bias counted once.

    The biases after the last block come with it. `fullgrad-plus+skipplus` starts in the middle.
    """
    return full_gradient(layer, biases, rules, each=True)


_RECORDERS: dict[str, type[BiasTerms]] = {"learned": LearnedBiasTerms, "implicit": ImplicitBiasTerms}


def bias_terms(trace: Trace, biases: str, rules: str) -> BiasTerms:
    """Return what biases add to the score, or raise BadInput if the options exclude each other."""
    if biases == "implicit" and rules != "plain":
        raise BadInput(
            f"biases=implicit was given with rules={rules}; expected rules=plain: what a slope does not explain is "
            f"counted for the true slopes. With rules={rules} use biases=learned."
        )
    with advice("Use fullgrad-pixel, or ixg, which needs none."):
        return trace[_RECORDERS[biases]].checked()


def completeness_sums(trace: Trace, start: int, biases: str, rules: str) -> tuple[Tensor, Tensor]:
    """Return the sum of what tokens and biases add from a layer on, and the score that it should be; [B] each."""
    layer, terms = trace.layers[start], bias_terms(trace, biases, rules)
    dtype = terms.other.dtype
    tokens = (layer.x.to(dtype) * layer.dx.to(dtype)).sum((1, 2))
    total = tokens + terms.tokens[start:].sum((0, 2)) + terms.other[start:].sum(0)
    assert trace.target is not None
    score = trace.target(trace.logits).to(dtype)
    return total, torch.ones_like(score) if rule_table(rules).unit else score


def completeness(
    trace: Trace, used: range, biases: Kind = "learned", rules: Rules = "plain", each: bool = False
) -> NumbersNote | None:
    """Return how far tokens and biases are from adding up to the score; None for a sum over several start layers."""
    if each and used.start != len(trace.layers) - 1:
        return None
    has_gap = rules == "plain" and biases == "learned"
    remedy = "; rules=linear or biases=implicit closes it" if has_gap else ""
    hidden = bias_terms(trace, biases, rules).opaque
    if hidden:
        remedy = f"; biases inside {', '.join(hidden)} cannot be seen"
    sums = torch.stack(completeness_sums(trace, used.start, biases, rules))  # [2, B]
    return NumbersNote(sums, lambda numbers: completeness_note(numbers[0], numbers[1], remedy))


def missed_biases(
    trace: Trace, used: range, biases: Kind = "learned", rules: Rules = "plain"
) -> NumbersNote | str | None:
    """Return which operations may hide a bias, or how far tokens and biases are from the score where they must meet."""
    names = bias_terms(trace, biases, rules).opaque
    if names:
        return f"biases inside {', '.join(names)} cannot be seen; if there are any, the map leaves them out"
    if rules == "plain" and biases == "learned":
        return None
    sums = torch.stack(completeness_sums(trace, used.start, biases, rules))  # [2, B]

    def text(numbers: list[list[float]]) -> str | None:
        note = completeness_note(numbers[0], numbers[1])
        return None if note == CLOSED else note

    return NumbersNote(sums, text)


def completeness_note(total: list[float], score: list[float], remedy: str = "", summands: str = "tokens") -> str:
    """Return how far the sums of `summands` and biases are from the scores, image by image."""
    gaps = [(sum_ - y, abs(sum_ - y) / max(abs(y), 1e-12)) for sum_, y in zip(total, score, strict=True)]
    if all(share < ROUND_OFF for _, share in gaps):
        return CLOSED if summands == "tokens" else f"completeness: {summands} and biases add up to the score"
    scores, sums = (", ".join(f"{value:.3g}" for value in values) for values in (score, total))
    residuals = ", ".join(f"{gap:+.2g} ({share:.1%})" for gap, share in gaps)
    return f"completeness: the score is {scores}, {summands} and biases add up to {sums}; residual {residuals}{remedy}"


SHARED: dict[str, Any] = {
    "family": "gradient",
    "output": "tokens",
    "signed": True,
    "requires": lambda biases, rules, **_: Requires(rules=rule_table(rules), recorders=(_RECORDERS[biases],)),
}
method(
    "fullgrad",
    paper="Srinivas & Fleuret, NeurIPS 2019; on tokens as in SkipPLUS",
    aggregation=Single(0),
    option_overrides=OptionOverrides(combined={"each": True}),
    caveats=Caveats(note=completeness),
    **SHARED,
)(full_gradient)
method(
    "fullgrad-plus",
    paper="SkipPLUS (FullGrad+)",
    aggregation=Total(),
    caveats=Caveats(note=missed_biases),
    **SHARED,
)(full_gradient_plus)


@method(
    "fullgrad-pixel",
    family="gradient",
    paper="Srinivas & Fleuret, NeurIPS 2019",
    output="image",
    requires=Requires(recorders=(BiasMaps,), plane=True),
    extra_cost=ExtraCost(slow=True),  # a map of the image for every channel of every bias
    caveats=Caveats(
        no_tails="adds up the pixels and the biases of convolutions, which a sub-network of tokens has not"
    ),
)
def full_gradient_on_pixels(trace: Trace, level: Level = "patch") -> MapResult:
    """psi(x·dy/dx) + sum_b psi(b·dy/db), psi |·| scaled to 0…1: pixels and the biases of convolutions, as a picture.

    FullGrad as its authors made it for CNNs: biases of convolutions and BatchNorms (beta − gamma·mean/std), each map
    enlarged to the image and added up over channels. On a network of ReLUs pixels and biases add up to the score, and
    the notes say so. A ViT has one convolution; there `fullgrad` says more.
    """
    product = widened(trace.pixels) * widened(trace.dpixels)  # [B, 3, H, W]
    image = rescaled(product).sum(1)
    notes: tuple[str, ...] = ()
    maps = trace[BiasMaps]
    if maps.image is not None and maps.total is not None:
        image, bias_total = image + maps.image, maps.total
        if not trace.recording.calls:  # no attention: images come first in every activation
            added = product.sum((1, 2, 3)) + bias_total
            note = completeness_note(added.tolist(), target_scores(trace).tolist(), summands="pixels")
            notes = (f"fullgrad-pixel: {note}",)
    if not maps.sees_image:
        note = "no convolution reads the pixels of this model; a bias of its patch embedding is not in the map"
        notes = (*notes, f"fullgrad-pixel: {note}")
    return MapResult(at_level(image, trace, level, "mean"), notes=notes)
