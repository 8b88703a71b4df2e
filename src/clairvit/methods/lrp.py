"""LRP: relevance R = x · dy/dx under a rule table that replaces the gradients of single operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit.errors import NotApplicable
from clairvit.methods.aggregation import Product, Single
from clairvit.methods.alternatives import advice
from clairvit.methods.gradient import Level, TokenLevel, input_x_gradient, token_gradients
from clairvit.methods.layer_view import LayerView, mean_of_heads, tokens_to_grid
from clairvit.methods.registry import Caveats, Requires, method
from clairvit.methods.result import MapResult
from clairvit.numerics import pool_to_grid
from clairvit.option_types import Doc, Range
from clairvit.tracing.recorders.patch_embedding import PatchEmbedding
from clairvit.tracing.rules import DEEP_TAYLOR, RuleTable, rule_table
from clairvit.tracing.rules.attnlrp import attnlrp, cp_lrp
from clairvit.tracing.rules.reslrp import reslrp
from clairvit.tracing.trace import Trace

LRP = Annotated[
    Literal["lrp", "chefer"],
    Doc("which of the TransAtt authors' rule files: that of their LRP baselines (lrp) or their own (chefer)"),
]
Gamma = Annotated[float, Range(ge=0, example=0.05)]
_DIVIDES = "relevance is divided by sums (a + b of a residual, a score before the softmax) that come near zero"


def token_relevance(
    layer: LayerView,
    level: TokenLevel = "token",
    gamma_lin: Annotated[
        Gamma, Doc("how much more counts, in linear layers, what agrees in sign with the output")
    ] = 0.0,
    gamma_conv: Annotated[Gamma, Doc("the same for convolutions; it shows in maps of pixels")] = 0.0,
    eps: Annotated[Gamma, Doc("a small number that takes relevance from outputs near zero")] = 0.0,
    inside: Annotated[bool, Doc("apply the rules to the projections of torch's own multi-head attention too")] = True,
) -> Tensor:
    """sum_d R_d at a block's input, R propagated from the score by rules: each token's share of the score.

    At gamma 0 and eps 0 this is gradient × input under swapped backward rules. `gamma_lin` and `gamma_conv` favour, in
    linear layers and convolutions, what agrees in sign with the output (zennit's signed gamma rule); `eps` takes
    relevance from outputs near zero. Token maps do not see the patch embedding, so `gamma_conv` shows at level=pixel.
    The authors tune gamma for each ViT; preset `vit` is a choice inside their grid. `inside=False` leaves out the
    projections of torch's own MultiheadAttention, as lxt with zennit does (it hooks modules, and those are none).
    """
    return input_x_gradient(layer, level)


def residual_relevance(
    layer: LayerView,
    gamma: Annotated[
        Gamma, Doc("how much more counts, in a residual sum, the term that has the sign of the sum; 0 is AttnLRP")
    ] = 1.0,
    level: TokenLevel = "token",
    gamma_lin: Annotated[
        Gamma, Doc("how much more counts, in linear layers, what agrees in sign with the output")
    ] = 0.0,
    gamma_conv: Annotated[Gamma, Doc("the same for convolutions; it shows in maps of pixels")] = 0.0,
    eps: Annotated[Gamma, Doc("a small number that takes relevance from outputs near zero")] = 0.0,
    inside: Annotated[bool, Doc("apply the rules to the projections of torch's own multi-head attention too")] = True,
) -> Tensor:
    """sum_d R_d at a block's input, R by AttnLRP with w = 1 + gamma·[z·z_out > 0] at residual sums.

    z_out = z_in + z_up shares R out as R_in = w_in z_in / (w_in z_in + w_up z_up) · R_out, R_up likewise: relevance is
    conserved, and where the stream and a branch cancel it grows 1 + 2/gamma times at most, instead of without bound.
    gamma=0 is attnlrp. A residual sum adds to the stream what was computed from it; position embeddings and biases are
    none. Where z_out is 0 nothing is passed on (its relevance is 0). The other options are those of attnlrp.
    """
    return input_x_gradient(layer, level)


def _requires_rules(table: Callable[..., RuleTable]) -> Callable[..., Requires]:
    """Return options -> Requires, for a function of the options to a rule table."""
    return lambda level, **numbers: Requires(rules=table(**numbers), gradients=token_gradients(level))


_VIT = {"gamma_lin": 0.05, "gamma_conv": 0.25}
method(
    "cp-lrp",
    family="relevance",
    paper="Ali et al., ICML 2022, eps 0 (= decompx)",
    output="tokens",
    aggregation=Single(0),
    requires=_requires_rules(cp_lrp),
    signed=True,
    presets={"vit": _VIT, "lxt": {**_VIT, "eps": 1e-6, "inside": False}},
)(token_relevance)
method(
    "attnlrp",
    family="relevance",
    paper="Achtibat et al., ICML 2024, eps 0",
    output="tokens",
    aggregation=Single(0),
    requires=_requires_rules(attnlrp),
    signed=True,
    presets={"vit": _VIT},
)(token_relevance)
method(
    "reslrp",
    family="relevance",
    paper="Berend, Achtibat et al., 2026 (ResLRP), eps 0",
    output="tokens",
    aggregation=Single(0),
    requires=_requires_rules(reslrp),
    signed=True,
    presets={"vit": _VIT},
)(residual_relevance)


@method(
    "transatt",
    family="relevance",
    paper="Chefer et al., CVPR 2021 (transformer attribution)",
    output="matrix",
    aggregation=Product(residual=1.0),
    requires=lambda rules, **_: Requires(second_rules=rule_table(rules)),
    presets={"evaluation": {"start_layer": 1}},
    caveats=Caveats(
        numerically_unstable=_DIVIDES,
        weak_class_signal="the identity of the residual, which outweighs it where the head reads the patches "
        "themselves",
    ),
)
def transformer_attribution(layer: LayerView, rules: LRP = "chefer") -> Tensor:
    """prod_l (I + mean_h relu(G * R_A)), R_A the relevance of the attention: rollout over what matters to the class.

    R_A comes from the authors' rules (layers_ours): z+ at linear layers, half to each factor of a product, identity at
    norms, activations and softmax, sums rescaled by their branches' totals. Not row-normalised, as in their ViT code.
    Preset `evaluation` leaves out the first block, as their evaluation scripts do. Sums are rescaled for each image on
    its own; the authors' code does it over the batch and is right for one image only. rules=lrp takes R_A from their
    other rule file (see partial-lrp).
    """
    return mean_of_heads((layer.G * layer.A * layer.G_under(rules) / 2).clamp(min=0))  # [B, rows, N]


def _requires_relevance(rules: str, gradient: bool, **_: object) -> Requires:
    return Requires(second_rules=rule_table(rules)) if gradient else Requires(rules=rule_table(rules))


def positive_attention_relevance(
    layer: LayerView,
    rules: LRP = "lrp",
    gradient: Annotated[bool, Doc("multiply relevance by the attention's gradient before the ReLU")] = False,
) -> Tensor:
    """mean_h relu(R_A), R_A the relevance of the attention under LRP rules: where the class's relevance passes.

    rules=lrp is the rule file that the authors of TransAtt use for LRP baselines (positive and negative inputs of a
    linear layer are normalised apart, so relevance can double), rules=chefer the one of TransAtt itself.
    gradient=True multiplies R_A by the attention's gradient before the ReLU: the authors' ablation flag.
    """
    if gradient:
        return transformer_attribution(layer, rules)
    return mean_of_heads((layer.A * layer.G / 2).clamp(min=0))  # [B, rows, N]


method(
    "partial-lrp",
    family="relevance",
    paper="Voita et al., ACL 2019, as in Chefer et al., CVPR 2021 (lrp_last_layer)",
    output="matrix",
    aggregation=Single(-1),
    requires=_requires_relevance,
    caveats=Caveats(
        numerically_unstable=_DIVIDES,
        zero_reason="its ReLU keeps what speaks for the target, and nothing that the last layer's attention carries "
        "does",
    ),
)(positive_attention_relevance)
method(
    "lrp-rollout",
    family="relevance",
    paper="Chefer et al., CVPR 2021 (code: method rollout)",
    output="matrix",
    aggregation=Product(residual=1.0),
    requires=_requires_relevance,
    presets={"evaluation": {"start_layer": 1}},
    caveats=Caveats(numerically_unstable=_DIVIDES),
)(positive_attention_relevance)


def relevance_at_embedding(trace: Trace, level: Level) -> Tensor:
    """Return relevance at the patch embedding, [B, rows, cols], or, by the z^B rule, at the pixels, [B, H, W]."""
    recording, embedding = trace.recording, trace[PatchEmbedding]
    output, c = embedding.output, embedding.gradient
    if output is None or c is None:
        if trace.layers:
            _ = trace.layers[0].dx  # neither a convolution nor a first block was seen: say what is missing
        raise NotApplicable(
            "No patch embedding was seen in this model, and relevance is read there.", methods=("partial-lrp",)
        )
    R = output.to(torch.promote_types(c.dtype, torch.float32)) * c
    if level == "pixel":
        with advice("Use level=patch."):
            return embedding.to_pixels(R).sum(1)
    if embedding.input is None:
        return tokens_to_grid(recording.as_tokens(R).sum(-1), trace, 0)
    layout = recording.structure.layout
    return R.sum(1) if layout is None else pool_to_grid(R.sum(1), layout.grid, "sum")


def notes_on_embedding(trace: Trace, name: str) -> tuple[str, ...]:
    """Return a note where patches are cut without a convolution, so that relevance is read elsewhere."""
    if trace[PatchEmbedding].input is not None:
        return ()
    where = "relevance was read at the first block's input, position embedding included"
    return (f"{name}: no convolution reads the pixels of this model; {where}",)


@method(
    "lrp",
    family="relevance",
    paper="Bach et al., 2015, as in Chefer et al., CVPR 2021 (full LRP)",
    output="image",
    requires=lambda rules, **_: Requires(
        rules=rule_table(rules), recorders=(PatchEmbedding,), gradients=("embedding",)
    ),
    signed=True,
    caveats=Caveats(numerically_unstable=_DIVIDES),
)
def full_lrp(trace: Trace, level: Level = "patch", rules: LRP = "lrp") -> MapResult:
    """R propagated from the class (as 1) through every layer to the patch embedding by z+ rules: each patch's share.

    rules=lrp is what the authors' full LRP uses (see partial-lrp); rules=chefer is TransAtt's rule file. level=pixel
    goes on to the pixels with the z^B rule, which conserves each patch's relevance, so level=patch is its sum. A
    model that cuts its patches by hand is read at the first block's input, position embedding included.
    """
    return MapResult(relevance_at_embedding(trace, level), notes=notes_on_embedding(trace, "lrp"))


@method(
    "deep-taylor",
    family="relevance",
    paper="Montavon et al., Pattern Recognition 2017, carried over to ViTs",
    output="image",
    requires=Requires(rules=DEEP_TAYLOR, recorders=(PatchEmbedding,), gradients=("embedding",)),
    caveats=Caveats(
        numerically_unstable="a mean over tokens has no rule of its own; signed shares of a mean near zero are large"
    ),
)
def deep_taylor(trace: Trace, level: Level = "patch") -> MapResult:
    """R propagated from the class (as 1) by positive contributions alone to the pixels (z+, z^B): never negative.

    The paper is about ReLU networks. Here attention is held fixed, which makes it a layer of weights like any other,
    and sums too are split by their positive terms (in proportion where there is none). What means or other operations
    without a rule leave negative is dropped at the patch embedding.
    """
    R = relevance_at_embedding(trace, level).clamp(min=0)
    return MapResult(R, notes=notes_on_embedding(trace, "deep-taylor"))
