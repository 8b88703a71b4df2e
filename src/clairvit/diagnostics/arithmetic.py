"""Numeric checks of a trace: completeness of the linear rules, residual cancellation, outlier tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clairvit.diagnostics.context import DoctorContext, abbreviated, check, failed, passed, plural, skipped, warned
from clairvit.diagnostics.report import Check
from clairvit.errors import NotApplicable
from clairvit.methods.fullgrad import completeness_sums
from clairvit.models.model import Model
from clairvit.numerics import widened
from clairvit.tracing import ops
from clairvit.tracing.module_state import frozen_eval, own_grad_mode, this_thread_only
from clairvit.tracing.outlier_tokens import FEWEST_PATCHES, OUTLIER_RATIO, has_comparable_tokens, norm_ratios
from clairvit.tracing.recorders.bias_terms import LearnedBiasTerms
from clairvit.tracing.recording import record
from clairvit.tracing.structure import ModelStructure, model_structure, tokens_among
from clairvit.tracing.trace import Trace, run_backward

# Two independent terms of one size give C = √2; at C = 2 the sum is half as large as its terms, and a rule that splits
# relevance in proportion (AttnLRP) passes on twice as much as it got, with opposite signs.
MAX_CANCELLATION = 2.0


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
    names = [name for name, is_zero in zip(context.batch.names, trace.has_zero_gradient, strict=True) if is_zero]
    if names:
        return failed(
            "The gradient of the score reaches the pixels, but not the tokens after the last block (of "
            f"{abbreviated(names)}): the score bypasses the blocks.",
            "Look for a second path from the pixels to the head, or a branch that is multiplied by zero. Token maps "
            "of this model are zero.",
            images=names,
        )
    return passed("The gradient of the score reaches the tokens after the last block.")


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


@check("residual cancellation", needs=("trace",))
def residual_cancellation(context: DoctorContext) -> Check:
    """Check C = Σ(|z_in| + |z_up|) / Σ|z_out| at each residual sum z_out = z_in + z_up (METHODS-2026, section 2)."""
    structure = model_structure(context.model, context.pixels)
    ratios = cancellation_by_layer(context.model, context.pixels, structure)
    if not any(ratios):
        return skipped("No residual sum of tokens was seen: a CNN, or blocks that are no modules.")
    largest = [max(layer, default=math.nan) for layer in ratios]
    finite = [(value, index) for index, value in enumerate(largest) if not math.isnan(value)]
    maximum, layer = max(finite)
    details: dict[str, Any] = {"ratios": ratios, "threshold": MAX_CANCELLATION}
    if maximum > MAX_CANCELLATION:
        layers = [str(index) for value, index in finite if value > MAX_CANCELLATION]
        return warned(
            f"Blocks cancel the residual stream: C = Σ(|z_in|+|z_up|)/Σ|z_out| reaches {maximum:.2f} in layer "
            f"{layer}, and is above {MAX_CANCELLATION:g} in layer{'s' * (len(layers) > 1)} {', '.join(layers)}. There "
            "rules that split relevance in proportion amplify it, with opposite signs, and maps become noisy.",
            "Prefer a sum over layers, attnlrp+plus or decompx+skipplus, or methods that read attention (genatt, "
            "legrad), to attnlrp, lrp and decompx from the first layer.",
            **details,
        )
    return passed(
        f"C = Σ(|z_in|+|z_up|)/Σ|z_out| is {min(finite)[0]:.2f} to {maximum:.2f} (most in layer {layer}); from "
        f"{MAX_CANCELLATION:g} on, half of the terms cancel and AttnLRP amplifies noise.",
        **details,
    )


def cancellation_by_layer(model: Model, pixels: Tensor, structure: ModelStructure) -> list[list[float]]:
    """Return C of each residual sum by layer, in the order of execution; one forward pass without gradients."""
    sums = ResidualSums()
    hooks = []

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        tokens = tokens_among(args, kwargs)
        if tokens is not None:
            sums.enter_block(tokens)

    blocks = {id(part.block): part.block for part in structure.layers if part.block is not None}
    with frozen_eval(model.module), torch.no_grad():
        try:
            watched = this_thread_only(enter)
            hooks = [block.register_forward_pre_hook(watched, with_kwargs=True) for block in blocks.values()]
            with sums:
                model.logits(pixels)
        finally:
            for hook in hooks:
                hook.remove()
    return sums.ratios


@dataclass(eq=False)
class _Stream:
    """The residual stream of one block: its input, sums that it is a term of, and norms of such sums."""

    tensors: dict[int, Tensor] = field(default_factory=dict)

    def __contains__(self, value: Any) -> bool:
        return self.tensors.get(id(value)) is value and value is not None

    def add(self, tensor: Tensor) -> None:
        self.tensors[id(tensor)] = tensor


class ResidualSums(TorchFunctionMode):
    """Record C of every sum that has the residual stream of a block as a term."""

    def __init__(self) -> None:
        super().__init__()
        self.ratios: list[list[float]] = []
        self._stream = _Stream()
        self._sums = _Stream()

    def enter_block(self, tokens: Tensor) -> None:
        """Start the layer whose block takes these tokens."""
        self.ratios.append([])
        self._stream, self._sums = _Stream(), _Stream()
        self._stream.add(tokens)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = ops.kind_of(func)
        residual = kind in ops.SUMS and self._is_residual(args)
        size = _size(args[0]) + _size(args[1]) if residual else 0.0
        out = func(*args, **kwargs)
        if residual:
            total = _size(out)
            self.ratios[-1].append(size / total if total else math.nan)
            self._stream.add(out)
            self._sums.add(out)
        elif kind == ops.NORM and ops.first_argument(args, kwargs) in self._sums:
            self._stream.add(out)  # a post-norm block adds to the norm of the last sum
        elif args and isinstance(out, Tensor) and _is_view(out, args[0]):
            for stream in (self._stream, self._sums):
                if args[0] in stream:
                    stream.add(out)
        return out

    def _is_residual(self, args: tuple[Any, ...]) -> bool:
        if len(args) != 2 or not self.ratios or not all(isinstance(a, Tensor) for a in args):
            return False
        return args[0].shape == args[1].shape and args[0].ndim >= 3 and any(a in self._stream for a in args)


def _is_view(out: Tensor, source: Any) -> bool:
    """Return whether a tensor is a reshaped view of all of another one."""
    return isinstance(source, Tensor) and out.numel() == source.numel() and out.data_ptr() == source.data_ptr()


def _size(tensor: Tensor) -> float:
    """Return Σ|t|, summed in float64 if the device has it."""
    dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
    return float(tensor.detach().abs().sum(dtype=dtype))


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
    prefix, batch = trace.layout.prefix, len(trace.pixels)
    ratios, counts, shares, layers = [0.0] * batch, [0] * batch, [0.0] * batch, [0] * batch
    for layer in trace.layers[1:] or trace.layers:
        ratio = norm_ratios(layer.x, prefix)  # [B, patches]
        is_outlier = ratio > OUTLIER_RATIO
        attended = layer.A.mean((1, 2))[:, prefix:] if bool(is_outlier.any()) else torch.zeros_like(ratio)
        for image in range(batch):
            ratios[image] = max(ratios[image], float(ratio[image].max()))
            share = float(attended[image][is_outlier[image]].sum())
            if bool(is_outlier[image].any()) and share >= shares[image]:
                counts[image], shares[image], layers[image] = int(is_outlier[image].sum()), share, layer.index
    return Outliers(ratios, counts, shares, layers)
