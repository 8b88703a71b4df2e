"""Numeric checks of a trace: completeness of the linear rules, residual cancellation, outlier tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clairvit.diagnostics.context import DoctorContext, abbreviated, check, failed, passed, plural, skipped, warned
from clairvit.diagnostics.report import Check
from clairvit.errors import NotApplicable
from clairvit.methods.fullgrad import completeness_sums
from clairvit.numerics import widened
from clairvit.tracing.module_state import own_grad_mode
from clairvit.tracing.outlier_tokens import FEWEST_PATCHES, OUTLIER_RATIO, has_comparable_tokens, norm_ratios
from clairvit.tracing.recorders.bias_terms import LearnedBiasTerms
from clairvit.tracing.recorders.residual_sums import ResidualSums
from clairvit.tracing.recording import Recording, record
from clairvit.tracing.rules import rule_table
from clairvit.tracing.rules.coverage import note_on
from clairvit.tracing.structure import model_structure
from clairvit.tracing.trace import Trace, run_backward

# Two independent terms of one size give C = √2; at C = 2 the sum is half as large as its terms, and a rule that splits
# relevance in proportion (AttnLRP) passes on twice as much as it got, with opposite signs.
MAX_CANCELLATION = 2.0
RULE_TABLES = ("attnlrp", "linear", "chefer")
AMPLIFIED_TABLES = ("attnlrp", "reslrp")  # without and with a bound on how much relevance grows at residual sums


@check("token gradient", needs=("trace", "gradient"))
@own_grad_mode()
def gradient_reaches_tokens(context: DoctorContext) -> Check:
    """Check that the scores depend on the tokens, not only on the pixels."""
    if not context.model.classifier:
        return skipped("The output is an embedding: there is no score to take the gradient of.")
    recording = record(context.model, context.pixels)
    trace = run_backward(recording, context.target, "plain", keep=False)
    if not trace.layers:
        return skipped("This model has no blocks.")
    names = [name for name, is_zero in zip(context.batch.names, trace.zero_gradient.tolist(), strict=True) if is_zero]
    if names:
        return failed(
            "The gradient of the score reaches the pixels, but not the tokens after the last block (of "
            f"{abbreviated(names)}): the score bypasses the blocks.",
            "Look for a second path from the pixels to the head, or a branch that is multiplied by zero. Token maps "
            "of this model are zero.",
            images=names,
        )
    return passed("The gradient of the score reaches the tokens after the last block.")


@check("rules", needs=("trace", "gradient"))
@own_grad_mode()
def rules_cover_operations(context: DoctorContext) -> Check:
    """Check that rule tables have a rule for every operation of the model that needs one."""
    recording = record(context.model, context.pixels[:1], rules=RULE_TABLES)
    without = {rules: recording.operations_without_rule(rule_table(rules)) for rules in RULE_TABLES}
    recording.release_graph()
    details: dict[str, Any] = {"without_rule": without}
    notes = [note_on(names, rules) for rules, names in without.items() if names]
    if notes:
        return failed(
            " ".join(dict.fromkeys(notes)),
            "Do not trust lrp, deep-taylor, transatt, cp-lrp, decompx, attnlrp, reslrp and libra-* here. Use "
            "torch.nn.LayerNorm, torch.nn.GELU or torch.nn.Linear for the operation, or methods with true gradients: "
            "ixg, gradcam, genatt.",
            **details,
        )
    return passed("Every operation that is not linear in the tokens has a rule (AttnLRP, CP-LRP, LRP).", **details)


@check("completeness", needs=("token gradient",))
@own_grad_mode()
def completeness_of_linear_rules(context: DoctorContext) -> Check:
    """Check that Σ x · dx + Σ b · db is the score if attention, norms and activation slopes are held fixed."""
    if not context.model.classifier:
        return skipped("The output is an embedding: there is no score that relevance could add up to.")
    structure = model_structure(context.model, context.pixels)
    if not structure.layers:
        return skipped("The sum is taken over the tokens of the first block, and this model has no blocks.")
    precision = context.precisions[-1]  # float64 if possible
    recording = record(precision.model, precision.pixels, rules=("linear",), recorders=(LearnedBiasTerms,))
    trace = run_backward(recording, context.target, "linear", keep=False)
    try:
        sums, scores = completeness_sums(trace, 0, "learned", "linear")
        terms = absolute_sum(trace)
    except NotApplicable as error:
        return skipped(str(error))
    gaps = (sums - scores).double().abs()
    bounds = precision.rounding.of_terms(1.0) * terms.double()
    shares = (gaps / scores.double().abs().clamp(min=torch.finfo(torch.float64).tiny)).tolist()
    details: dict[str, Any] = {
        "score": scores.tolist(),
        "sum": sums.tolist(),
        "difference": gaps.tolist(),
        "bound": bounds.tolist(),
        "precision": precision.name,
    }
    worst = int((gaps / bounds.clamp(min=torch.finfo(torch.float64).tiny)).argmax())
    sentence = (
        f"tokens and biases add up to {float(sums[worst]):.5g} and the score is {float(scores[worst]):.5g}, a "
        f"difference of {float(gaps[worst]):.2g} in {precision.name} (rounding explains {float(bounds[worst]):.2g})"
    )
    if bool((gaps > bounds).any()):
        return warned(
            f"Under the linear rules (decompx, cp-lrp) {sentence}: {shares[worst]:.1%} of the score is lost or added.",
            "An operation of the model has no rule of its own (a custom activation, a gate, a product of tokens). Use "
            "methods with true gradients: ixg, gradcam, genatt.",
            **details,
        )
    return passed(f"Under the linear rules {sentence}.", **details)


def absolute_sum(trace: Trace) -> Tensor:
    """Return Σ |x · dx| + Σ |b · db| of each image, [B]: the magnitude of the terms."""
    layer, biases = trace.layers[0], trace[LearnedBiasTerms].checked()
    tokens = (widened(layer.x) * widened(layer.dx)).abs().sum((1, 2))
    return tokens + biases.tokens.abs().sum((0, 2)) + biases.other.abs().sum(0)


@check("residual cancellation", needs=("trace", "gradient"))
@own_grad_mode()
def residual_cancellation(context: DoctorContext) -> Check:
    """Check C = Σ(|z_in| + |z_up|) / Σ|z_out| and A = Σ(|R_in| + |R_up|) / Σ|R_out| at residual sums."""
    recording = record(context.model, context.pixels, rules=AMPLIFIED_TABLES, recorders=(ResidualSums,))
    ratios = recording[ResidualSums].by_sum
    if not any(ratios):
        return skipped("No residual sum of tokens was seen: a CNN, or blocks without one.")
    largest = [max(layer, default=math.nan) for layer in ratios]
    finite = [(value, index) for index, value in enumerate(largest) if not math.isnan(value)]
    maximum, layer = max(finite)
    amplification = _amplification(context, recording)
    growth = " and ".join(f"{max(values):.2f} under {rules}" for rules, values in amplification.items() if any(values))
    grows = f" Relevance grows by up to A = {growth} in a layer." if growth else ""
    details: dict[str, Any] = {"ratios": ratios, "threshold": MAX_CANCELLATION, "amplification": amplification}
    if maximum > MAX_CANCELLATION:
        layers = [str(index) for value, index in finite if value > MAX_CANCELLATION]
        return warned(
            f"Blocks cancel the residual stream: C = Σ(|z_in|+|z_up|)/Σ|z_out| reaches {maximum:.2f} in layer "
            f"{layer}, and is above {MAX_CANCELLATION:g} in layer{'s' * (len(layers) > 1)} {', '.join(layers)}. There "
            f"rules that split relevance in proportion amplify it, with opposite signs, and maps become noisy.{grows}",
            "Prefer a sum over layers, attnlrp+plus or decompx+skipplus, methods that read attention (genatt, legrad), "
            "or reslrp, which bounds the growth, to attnlrp, lrp and decompx from the first layer.",
            **details,
        )
    return passed(
        f"C = Σ(|z_in|+|z_up|)/Σ|z_out| is {min(finite)[0]:.2f} to {maximum:.2f} (most in layer {layer}); from "
        f"{MAX_CANCELLATION:g} on, half of the terms cancel and AttnLRP amplifies noise.{grows}",
        **details,
    )


def _amplification(context: DoctorContext, recording: Recording) -> dict[str, list[float]]:
    """Return A of each layer, the mean over the images, under each table; nothing for an embedding without scores."""
    if not context.model.classifier:
        return {}
    traces = {rules: run_backward(recording, context.target, rules) for rules in AMPLIFIED_TABLES}
    means = {rules: trace[ResidualSums].amplification.nanmean(1) for rules, trace in traces.items()}
    return {rules: [value for value in mean.tolist() if not math.isnan(value)] for rules, mean in means.items()}


@check("outlier tokens", needs=("trace",))
def outlier_tokens(context: DoctorContext) -> Check:
    """Check for patch tokens of many times the median norm, which attract attention wherever the object is."""
    recording = record(context.model, context.pixels, differentiable=False)
    trace = run_backward(recording, None, None)
    structure = recording.structure
    if structure.layout is None or not has_comparable_tokens(structure):
        return skipped(
            "Norms are compared among the patch tokens of a plain ViT, and this model has windows or stages."
        )
    if structure.layout.patches < FEWEST_PATCHES:
        return skipped(f"There are only {structure.layout.patches} patch tokens to compare.")
    try:
        outliers = find_outliers(trace)
    except NotApplicable as error:
        return skipped(str(error))
    details: dict[str, Any] = {
        "threshold": OUTLIER_RATIO,
        "largest_ratio": outliers.ratios,
        "count": outliers.counts,
        "attention_share": outliers.shares,
        "layer": outliers.layers,
        "images": list(context.batch.names),
    }
    affected = [image for image, count in enumerate(outliers.counts) if count]
    largest = max(outliers.ratios)
    if not affected:
        return passed(
            f"None: no patch token has more than {OUTLIER_RATIO:g} times the median norm (at most {largest:.1f} "
            "times).",
            **details,
        )
    worst = max(affected, key=lambda image: outliers.shares[image])
    return warned(
        f"{plural(len(affected), 'image')} of {len(outliers.counts)} with patch tokens of more than {OUTLIER_RATIO:g} "
        f"times the median norm, up to {largest:.0f} times. In {context.batch.names[worst]} {outliers.counts[worst]} "
        f"of {structure.layout.patches} patches get {outliers.shares[worst]:.0%} of the attention in layer "
        f"{outliers.layers[worst]}: such tokens hold global information in patches of no importance.",
        "Do not trust raw-attention and rollout; use gradient-weighted methods that add up late layers (genatt, "
        "legrad, attnlrp+plus, decompx+skipplus), or the variant of the model with registers.",
        **details,
    )


@dataclass(frozen=True)
class Outliers:
    """Patch tokens with a large norm per image, in the layer where they get the most attention."""

    ratios: list[float]  # largest norm over the median norm of the patch tokens
    counts: list[int]
    shares: list[float]  # of the attention, mean over heads and queries
    layers: list[int]


def find_outliers(trace: Trace) -> Outliers:
    """Return outliers among the patch tokens that each block takes; inputs of the first block are embeddings."""
    patches, batch = trace.layout.patch_slice, len(trace.pixels)
    ratios, counts, shares, layers = [0.0] * batch, [0] * batch, [0.0] * batch, [0] * batch
    for layer in trace.layers[1:] or trace.layers:
        ratio = norm_ratios(layer.x[:, patches])  # [B, patches]
        is_outlier = ratio > OUTLIER_RATIO
        attended = layer.A.mean((1, 2))[:, patches] if bool(is_outlier.any()) else torch.zeros_like(ratio)
        for image in range(batch):
            ratios[image] = max(ratios[image], float(ratio[image].max()))
            share = float(attended[image][is_outlier[image]].sum())
            if bool(is_outlier[image].any()) and share >= shares[image]:
                counts[image], shares[image], layers[image] = int(is_outlier[image].sum()), share, layer.index
    return Outliers(ratios, counts, shares, layers)
