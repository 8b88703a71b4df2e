"""FullGrad: gradient × input leaves out what biases add to the score; here it is put back, token by token."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import Single, Total
from clairvit.methods.layer_view import LayerView
from clairvit.methods.multi_pass import Level, on_image, scores
from clairvit.methods.registry import Caveats, ExtraCost, OptionOverrides, Requires, method, register
from clairvit.methods.result import MapResult
from clairvit.tracing.attention import widened
from clairvit.tracing.recorders.bias_terms import BiasMaps, BiasTerms, ImplicitBiasTerms, LearnedBiasTerms, rescaled
from clairvit.tracing.rules import rule_table
from clairvit.tracing.trace import Trace

Kind = Literal["learned", "implicit"]
Rules = Literal["plain", "linear", "libra"]
SMALL = 5e-4  # parts of the score: a residual below is round-off in half and single precision


def full_gradient(layer: LayerView, biases: Kind = "learned", rules: Rules = "plain", each: bool = False) -> Tensor:
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
    told = added_by_biases(layer.trace, biases, rules).tokens[layer.index :]
    return (layer.x * layer.dx).sum(-1) + (told[0] if each else told.sum(0))  # [B, N]


def full_gradient_plus(layer: LayerView, biases: Kind = "learned", rules: Rules = "plain") -> Tensor:
    """sum_{l ≥ m} (x^l·dy/dx^l + biases of block l): FullGrad from every layer on, each bias counted once.

    The biases after the last block come with it. `fullgrad-plus+skipplus` starts in the middle.
    """
    return full_gradient(layer, biases, rules, each=True)


_RECORDERS: dict[str, type[BiasTerms]] = {"learned": LearnedBiasTerms, "implicit": ImplicitBiasTerms}


def added_by_biases(trace: Trace, biases: str, rules: str) -> BiasTerms:
    if biases == "implicit" and rules != "plain":
        raise BadInput(
            f"biases=implicit was given with rules={rules}; expected rules=plain: what a slope does not explain is "
            f"counted for the true slopes. With rules={rules} use biases=learned."
        )
    return trace[_RECORDERS[biases]].checked()


def totals(trace: Trace, start: int, biases: str, rules: str) -> tuple[Tensor, Tensor]:
    """All that tokens and biases add from a layer on, and the score that they should add up to; [B] each."""
    layer, told = trace.layers[start], added_by_biases(trace, biases, rules)
    wide = told.other.dtype
    tokens = (layer.x.to(wide) * layer.dx.to(wide)).sum((1, 2))
    found = tokens + told.tokens[start:].sum((0, 2)) + told.other[start:].sum(0)
    assert trace.target is not None
    score = trace.target(trace.logits).to(wide)
    return found, torch.ones_like(score) if rule_table(rules).unit else score


def completeness(
    trace: Trace, used: range, biases: Kind = "learned", rules: Rules = "plain", each: bool = False
) -> str | None:
    """How far tokens and biases are from adding up to the score, in words. A sum over start layers has no such sum."""
    if each and used.start != len(trace.layers) - 1:
        return None
    found, score = (values.tolist() for values in totals(trace, used.start, biases, rules))
    open_gap = rules == "plain" and biases == "learned"
    return in_words(found, score, "; rules=linear or biases=implicit closes it" if open_gap else "")


def in_words(found: list[float], score: list[float], advice: str = "", what: str = "tokens") -> str:
    gaps = [(sum_ - y, abs(sum_ - y) / max(abs(y), 1e-12)) for sum_, y in zip(found, score, strict=True)]
    if all(share < SMALL for _, share in gaps):
        return f"completeness: {what} and biases add up to the score"
    said, sums = (", ".join(f"{value:.3g}" for value in values) for values in (score, found))
    listed = ", ".join(f"{gap:+.2g} ({share:.1%})" for gap, share in gaps)
    return f"completeness: the score is {said}, {what} and biases add up to {sums}; residual {listed}{advice}"


SHARED: dict[str, Any] = {
    "family": "gradient",
    "output": "tokens",
    "signed": True,
    "requires": lambda biases, rules, **_: Requires(rules=rule_table(rules), recorders=(_RECORDERS[biases],)),
}
register(
    "fullgrad",
    full_gradient,
    paper="Srinivas & Fleuret, NeurIPS 2019; on tokens as in SkipPLUS",
    aggregation=Single(0),
    option_overrides=OptionOverrides(combined={"each": True}),
    caveats=Caveats(note=completeness),
    **SHARED,
)
register("fullgrad-plus", full_gradient_plus, paper="SkipPLUS (FullGrad+)", aggregation=Total(), **SHARED)


@method(
    "fullgrad-pixel",
    family="gradient",
    paper="Srinivas & Fleuret, NeurIPS 2019",
    output="image",
    requires=Requires(recorders=(BiasMaps,)),
    extra_cost=ExtraCost(slow=True),  # a map of the image for every channel of every bias
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
        image, total = image + maps.image, maps.total
        if not trace.recording.calls:  # no attention: images come first in every activation
            found = product.sum((1, 2, 3)) + total
            notes = (f"fullgrad-pixel: {in_words(found.tolist(), scores(trace).tolist(), what='pixels')}",)
    return MapResult(on_image(image, trace, level, "mean"), notes=notes)
