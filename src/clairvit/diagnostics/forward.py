"""Checks of forward and backward pass: finite, deterministic, independent of the batch, differentiable."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from clairvit.diagnostics.context import (
    DoctorContext,
    Gap,
    abbreviated,
    check,
    failed,
    passed,
    plural,
    skipped,
    warned,
    with_mirror_image,
)
from clairvit.diagnostics.inspection import (
    RoundingBound,
    coarsest_dtype,
    differences,
    first_difference,
    first_not_finite,
    inspect_forward,
    plain_forward,
    snapshot,
)
from clairvit.diagnostics.report import Check
from clairvit.errors import ClairError
from clairvit.models.forward_errors import forward_failure
from clairvit.models.through_no_grad import ThroughNoGrad
from clairvit.tracing.gradient_barriers import gradient_barriers
from clairvit.tracing.structure import model_structure

CHECKPOINTING_FLAGS = ("grad_checkpointing", "gradient_checkpointing")


@check("forward", needs=("device", "compile", "parameters"))
def forward_runs(context: DoctorContext) -> Check:
    """Check that the model maps [B, 3, H, W] to one row of scores per image."""
    rows, columns = context.pixels.shape[-2:]
    try:
        logits = context.forward.logits
    except ClairError:
        raise
    except Exception as error:  # the forward pass is user code; what it raises becomes the finding
        return failed(*forward_failure(context.model, context.pixels, error))
    return passed(
        f"{plural(len(logits), 'image')} of {rows} × {columns} pixels → {plural(context.classes, 'score')} each.",
        shape=list(logits.shape),
    )


@check("finite scores", needs=("forward",))
def finite_scores(context: DoctorContext) -> Check:
    """Check that scores and weights are finite."""
    inspection, module = context.forward, context.model.module
    broken = [name for name, p in module.named_parameters() if not bool(p.detach().isfinite().all())]
    finite = bool(inspection.logits.isfinite().all())
    if broken:
        return failed(
            f"{plural(len(broken), 'parameter tensor')} with NaN or infinite values: {abbreviated(broken)}.",
            "Load the weights again; if they were trained so, training diverged.",
            parameters=broken,
        )
    if finite:
        return passed(f"All scores are finite; the largest activation is {inspection.largest:.3g}.")
    call = first_not_finite(inspection)
    where = "" if call is None else f" The first is {call.name} ({call.kind}), whose input is still finite."
    dtype = coarsest_dtype(context.model)
    if dtype == torch.float16:
        return failed(
            f"The scores are NaN or infinite.{where} float16 ends at 65,504, and the weights are finite: it overflows.",
            "Run the model in float32 or bfloat16: cv.load(…, dtype='float32').",
            module=None if call is None else call.name,
        )
    return failed(
        f"The scores are NaN or infinite although the weights are finite.{where}",
        "Look there for a division by zero, a logarithm or a root of something not positive, and check the "
        "preprocessing.",
        module=None if call is None else call.name,
    )


@check("side effects", needs=("forward",))
def side_effects(context: DoctorContext) -> Check:
    """Check that a forward pass in eval mode writes to no parameter or buffer."""
    module = context.model.module
    before = snapshot(module)
    plain_forward(context.model, context.pixels[:1])
    changed = differences(before, snapshot(module))
    context.changed_by_forward = tuple(changed)
    if changed:
        return failed(
            f"A forward in eval mode changes {abbreviated(changed)}: the model's state depends on the number of calls.",
            "Update it in training mode only: if self.training: …. ClairViT calls the model many times.",
            changed=changed,
        )
    return passed("A forward in eval mode changes no parameter and no buffer.")


@check("determinism", needs=("finite scores",))
def deterministic(context: DoctorContext) -> Check:
    """Check that two forward passes of the same images agree."""
    first, state = context.forward, _generator_states(context.pixels.device)
    second = inspect_forward(context.model, context.pixels)
    uses_rng = any(not torch.equal(a, b) for a, b in zip(state, _generator_states(context.pixels.device), strict=True))
    gap = largest_gap(first.logits, second.logits)
    if gap == 0:
        return passed("Two forwards of the same image agree to the last bit.", difference=0.0)
    where = first_difference(first, second)
    at = f" The first submodule whose output differs is {where}." if where else ""
    unit = torch.finfo(first.dtype).eps / 2
    bound = RoundingBound(unit, first.operations, first.width, first.largest, amplified=0.0).scores
    details: dict[str, Any] = {"difference": gap, "bound": bound, "draws": uses_rng, "module": where}
    if gap <= bound and not uses_rng:
        return warned(
            f"Two forwards of the same image differ by {gap:.2g}, which rounding explains (up to {bound:.2g}).{at}",
            "Some kernels add in no fixed order: torch.use_deterministic_algorithms(True) makes maps repeatable.",
            **details,
        )
    return failed(
        f"Two forwards of the same image in eval mode differ by {gap:.3g}"
        f"{', and the forward draws random numbers' if uses_rng else ''}.{at}",
        "Look for F.dropout without training=self.training, drop path, random masking (ViTMAE: mask_ratio=0) or "
        "shuffled tokens, and switch it off in eval mode."
        if uses_rng
        else "Look for state that a forward changes: a cache, a counter, running statistics.",
        **details,
    )


def _generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators on the CPU and on the model's device."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@check("batch independence", needs=("determinism", "quantisation"))
def batch_independence(context: DoctorContext) -> Check:
    """Check that an image's scores do not depend on the other images of its batch."""
    gaps = []
    for precision in context.precisions:
        pair = with_mirror_image(precision.pixels)
        alone = torch.cat([plain_forward(precision.model, image[None]) for image in pair])
        gap = largest_gap(alone, plain_forward(precision.model, pair))
        gaps.append(Gap(precision.name, gap, precision.rounding.scores))
    details: dict[str, Any] = {"gaps": [vars(gap) for gap in gaps]}
    broken = [gap for gap in gaps if gap.difference > gap.bound]
    if broken:
        return failed(
            f"The scores of an image change {broken[0]} when another image is in the batch.",
            "Look for statistics over the batch axis (BatchNorm without running statistics, x.mean(0), a softmax over "
            "dim 0) and for squeeze(). Until then explain one image at a time.",
            **details,
        )
    return passed(f"Scores alone and in a batch differ {' and '.join(map(str, gaps))}.", **details)


@check("scores", needs=("determinism",))
def scores_vary(context: DoctorContext) -> Check:
    """Check that scores differ between classes and between images."""
    # One by one: rows of a batch may be rounded differently, even for equal images.
    rows = [plain_forward(context.model, image) for image in torch.split(context.pair, 1)]
    logits = torch.cat(rows).double()
    between_images = largest_gap(logits[:1], logits[1:])
    if context.classes > 1 and context.model.classifier:
        between_classes = float((logits.amax(1) - logits.amin(1)).max())
        if between_classes == 0:
            return failed(
                f"All {context.classes} classes have the same score ({float(logits[0, 0]):.3g}).",
                "The head is untrained: all zeros, or all rows equal. Load a trained one.",
            )
    if between_images == 0:
        return failed(
            "Two different images get exactly the same scores: the model ignores its input.",
            "Look for a branch that is multiplied by zero, or an input that is not passed on.",
        )
    return passed(
        f"They differ between classes, and between two images by up to {between_images:.3g}.",
        between_images=between_images,
    )


@check("checkpointing", needs=("forward",))
def gradient_checkpointing(context: DoctorContext) -> Check:
    """Check for torch.utils.checkpoint in the forward pass; a trace turns flags of timm and transformers off."""
    module = context.model.module
    flags = [
        f"{name or 'the module'}.{flag}"
        for name, part in module.named_modules()
        for flag in CHECKPOINTING_FLAGS
        if vars(part).get(flag) is True
    ]
    try:
        recomputed = context.backward.recomputed
    except RuntimeError:
        recomputed = ()  # the check 'gradient' reports the error
    if recomputed:
        return failed(
            f"{abbreviated(recomputed)} ran again in the backward pass: torch.utils.checkpoint inside the forward, "
            "which cannot be traced.",
            "Turn off gradient checkpointing in the model; it saves memory in training only.",
            recomputed=list(recomputed),
        )
    if flags:
        return passed(f"On ({abbreviated(flags)}); a trace turns it off and on again.", flags=flags)
    return passed("Off.")


@check("gradient", needs=("finite scores", "determinism", "scores", "quantisation", "checkpointing"))
def gradient_reaches_pixels(context: DoctorContext) -> Check:
    """Check that the scores are a differentiable function of the pixels."""
    model, pixels = context.model, context.pixels[:1]
    try:
        backward = context.backward
    except RuntimeError:  # a forward that takes no tensor with a gradient (numpy)
        reasons = [barrier.reason for barrier in model_structure(model, pixels).barriers if barrier.reason]
        if not reasons:
            raise
        return failed(
            f"No gradient leads from the scores to the image: {reasons[0]}.",
            "Methods that need no gradient remain: leave-one-out, occlusion, lime.",
        )
    if not backward.reaches_scores:
        return failed(
            f"No gradient leads from the scores to the image: it ends {backward.blocked_by}.",
            "Look for detach(), .data, torch.no_grad(), numpy or argmax in the forward; gradient methods need a "
            "differentiable one. cv.wrap(…, through_no_grad=True) keeps gradients on under torch.no_grad().",
            module=backward.blocked_by,
        )
    with ThroughNoGrad() if model.through_no_grad else nullcontext():
        barriers = [str(barrier) for barrier in gradient_barriers(model.module, pixels)]
    if barriers:
        return failed(
            f"A gradient leads from the scores to the image, but none passes {abbreviated(barriers)}, so that it "
            "is incomplete and gradient methods do not apply.",
            "Look there for numpy, torch.no_grad(), detach() or rounding. Methods that need no gradient remain: "
            "leave-one-out, occlusion, lime.",
            barriers=barriers,
        )
    if math.isnan(backward.largest):
        return failed(
            "The gradient of the scores at the pixels is NaN or infinite.",
            "Look for roots and divisions at zero (x.norm() of a zero vector), or run the model in float32.",
        )
    if backward.largest == 0:
        return failed(
            "The gradient of the scores at the pixels is exactly zero, although the scores depend on the image.",
            "Look for rounding, thresholds, argmax or a saturated softmax in the forward.",
        )
    return passed(
        f"It leads from the scores to the pixels; the largest entry is {backward.largest:.3g}.",
        largest=backward.largest,
    )


@check("activation", needs=("scores",))
def activation(context: DoctorContext) -> Check:
    """Check that the outputs are not probabilities already; report what a score means."""
    if not context.model.classifier:
        return passed("The output is an embedding: it has no classes and no probabilities.", activation="raw")
    name, reason = stated_activation(context)
    logits = torch.cat([context.forward.logits.detach(), plain_forward(context.model, context.pair)])
    logits = logits.double()
    details: dict[str, Any] = {"activation": name, "reason": reason, "columns": context.classes}
    why = f" ({reason})" if reason else ""
    in_unit_range = bool((logits >= 0).all() and (logits <= 1).all())
    slack = context.rounding.unit * 2 * context.classes
    sums_to_one = context.classes > 1 and bool(((logits.sum(1) - 1).abs() <= slack).all())
    if in_unit_range and sums_to_one and name != "raw":
        return failed(
            f"The {context.classes} outputs lie between 0 and 1 and add up to 1: the model applies a softmax "
            f"itself, and they would be read through a second {name}.",
            "Return the logits from the forward, or state activation='raw' when you wrap the model.",
            **details,
        )
    if in_unit_range and name != "raw" and context.classes > 1:
        return warned(
            f"All outputs lie between 0 and 1 on {plural(len(logits), 'image')}, and are read through a {name}: the "
            "model seems to apply a sigmoid itself.",
            "Return the logits from the forward, or state activation='raw' when you wrap the model.",
            **details,
        )
    if context.classes == 1:
        meaning = {"raw": "raw: it has no probability", "sigmoid": "a yes/no score by a sigmoid"}.get(name, name)
        return passed(f"One output, read as {meaning}{why}.", **details)
    if name == "sigmoid":
        return passed(f"Sigmoid{why}: {context.classes} labels, each with a probability of its own.", **details)
    if name == "raw":
        suffix = "; they are probabilities already" if in_unit_range and sums_to_one else ""
        return passed(f"Raw{why}: scores are taken as they are{suffix}.", **details)
    if bool((logits.logsumexp(1).abs() <= slack).all()):
        return passed(
            f"Softmax{why}: one class of {context.classes}. The outputs are log-probabilities already, which a "
            "softmax leaves as they are.",
            **details,
        )
    return passed(f"Softmax{why}: one class of {context.classes}.", **details)


def stated_activation(context: DoctorContext) -> tuple[str, str]:
    """Return the activation ("softmax", "sigmoid" or "raw"), and where it was stated."""
    model = context.model
    return model.activation_of(context.forward.logits), model.activation_reason


@check("labels", needs=("forward",))
def labels_fit(context: DoctorContext) -> Check:
    """Check that there is one label per class."""
    labels, classes = context.model.labels, context.classes
    if not context.model.classifier:
        return skipped("The output is an embedding: it has no classes.")
    if not labels:
        return passed(f"None: classes are named by their numbers, 0 to {classes - 1}.", labels=0, outputs=classes)
    if len(labels) != classes:
        return failed(
            f"There are {len(labels)} labels for {classes} outputs, so that classes get the wrong names.",
            f"Give exactly {classes} labels, in the order of the outputs: labels=[…].",
            labels=len(labels),
            outputs=classes,
        )
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        return warned(
            f"{len(labels)} labels for {classes} outputs, and {abbreviated([*map(repr, repeated)])} more than once.",
            "Name such classes by their numbers.",
            labels=len(labels),
            outputs=classes,
        )
    return passed(f"{len(labels)} labels for {classes} outputs.", labels=len(labels), outputs=classes)


def largest_gap(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((a.detach().double() - b.detach().double()).abs().max())
