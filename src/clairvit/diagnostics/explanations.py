"""Checks of explanations: which methods apply, whether maps depend on the class and are better than random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clairvit.diagnostics.context import (
    DoctorContext,
    UnexpectedError,
    abbreviated,
    check,
    failed,
    passed,
    plural,
    run_methods,
    skipped,
    warned,
)
from clairvit.diagnostics.inspection import differences, snapshot
from clairvit.diagnostics.report import Check
from clairvit.errors import ClairError
from clairvit.methods.explain import compare
from clairvit.methods.registry import list_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.confidence_intervals import LEVEL, sign_flips, smallest_p
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.similarity import pearson
from clairvit.tracing.structure import model_structure

# In this order: the default (docs/results.md), then methods for other models.
DELETION_METHODS = ("attnlrp+plus", "ixg", "saliency", "rollout")
MIN_RANDOM_MAPS = 5  # in total over the images, at least one per image
CLASS_METHODS = ("ixg", "decompx", "gradcam")  # class-specific by their formulas, one backward pass each
SAME_CORRELATION = 0.999  # above it two maps are the same
SIMILAR_CORRELATION = 0.95


@check("class sensitivity", needs=("trace", "gradient", "scores"))
def class_sensitivity(context: DoctorContext) -> Check:
    """Check that the maps of the two most probable classes differ."""
    if not context.model.classifier or context.classes < 2:
        return skipped("There are no two classes to compare.")
    pixels, logits = context.pixels, context.forward.logits.detach()
    first, second = logits.topk(2, dim=1).indices.T.tolist()
    names = [name for name in CLASS_METHODS if not isinstance(context.applicability.get(name), ClairError)]
    if not names:
        return skipped("None of the methods ixg, decompx and gradcam applies.")
    maps = [compare(context.model, pixels, names, target, skip=True) for target in (first, second)]
    correlations = {
        name: pearson(maps[0][name].maps.double().flatten(1), maps[1][name].maps.double().flatten(1)).tolist()
        for name in names
        if name in maps[0] and name in maps[1]
    }
    means = {name: _mean(values) for name, values in correlations.items()}
    means = {name: value for name, value in means.items() if not math.isnan(value)}
    details: dict[str, Any] = {"correlation": correlations, "first": first, "second": second}
    if not means:
        return skipped(
            f"The maps of {abbreviated(names)} are constant for one of the two most probable classes.", **details
        )
    listed = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
    if min(means.values()) > SAME_CORRELATION:
        return failed(
            f"The maps of the two most probable classes are the same (correlation {listed}): the head does not "
            "distinguish these classes, whatever is in the image.",
            "Compare the head's rows of the two classes: equal rows mean an untrained or collapsed head.",
            **details,
        )
    if min(means.values()) > SIMILAR_CORRELATION:
        return warned(
            f"The maps of the two most probable classes are nearly the same (correlation {listed}).",
            "Ask why one rather than the other: target=cv.Contrast(first, second).",
            **details,
        )
    return passed(f"The maps of the two most probable classes differ (correlation {listed}).", **details)


def _mean(values: list[float]) -> float:
    """Return the mean of the values that are not NaN."""
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan


@dataclass(frozen=True)
class DeletionResult:
    """Deletion scores of a method and of random maps, paired over images."""

    method: str
    ours: NDArray[np.float64]  # [n], of the method
    random: NDArray[np.float64]  # [R, n]
    largest_change: float  # of the score on any curve

    @property
    def gains(self) -> NDArray[np.float64]:
        """Return mean random score - score of the method, [n]; lower deletion is better."""
        return np.asarray(self.random.mean(0) - self.ours)


@check("deletion", needs=("trace", "scores"))
def deletion_beats_random(context: DoctorContext) -> Check:
    """Check that removing the patches that a map ranks first lowers the score more than removing random ones."""
    if not context.model.classifier:
        return skipped("The output is an embedding: there is no score that could fall.")
    structure = model_structure(context.model, context.pixels)
    if structure.layout is None and not structure.stages:
        return skipped("There are no patches to remove: see 'layout'.")
    method = deletion_method(context)
    if method is None:
        return skipped(f"None of the methods {abbreviated(DELETION_METHODS, 9)} applies.")
    result = measure_deletion(context, method)
    return _compare_with_random(result, p=float(sign_flips(result.gains[None], context.seed)[0]))


def _compare_with_random(result: DeletionResult, p: float) -> Check:
    """Return the outcome of the check 'deletion' for measured scores and the p-value of a sign-flip test."""
    method, n, gain = result.method, len(result.gains), float(np.nanmean(result.gains))
    details: dict[str, Any] = {
        "method": method,
        "images": n,
        "random_maps": len(result.random),
        "deletion": result.ours.tolist(),
        "random": result.random.mean(0).tolist(),
        "gain": gain,
        "p": p,
    }
    if result.largest_change == 0:
        return failed(
            f"Removing patches ({method} or random) does not change the score at all on {plural(n, 'image')}; it "
            f"stays at {float(np.nanmean(result.ours)):.4g}.",
            "Either the score does not depend on the patches, or its probability is saturated: look for a head with "
            "huge weights or biases.",
            **details,
        )
    comparison = (
        f"deletion by {method} is {float(np.nanmean(result.ours)):.3g}, by random maps "
        f"{float(np.nanmean(result.random)):.3g} (lower is better)"
    )
    too_few = n < min_images_for_test()
    significance = (
        f"That is {plural(n, 'image')}, and with fewer than {min_images_for_test()} no test can tell it from chance."
        if too_few
        else f"p = {p:.2g} on {n} images, paired, by sign flips."
    )
    if not too_few and p < LEVEL:
        if gain > 0:
            return passed(f"Better than random: {comparison}; {significance}", **details)
        return failed(
            f"Worse than random: {comparison}; {significance}",
            "The maps of this model are misleading. Find a better method: cv.choose(model, images).",
            **details,
        )
    if gain > 0 and too_few:
        wins = int((result.random > result.ours).sum())
        return passed(
            f"Better than {wins} of {result.random.size} random maps: {comparison}. {significance}",
            f"Give {min_images_for_test()} or more images of your own for a test.",
            **details,
        )
    return warned(
        f"Not better than random: {comparison}. {significance}",
        "Give more images of the kind that the model was trained on, or look for a better method: "
        "cv.choose(model, images). A model with random weights has nothing to explain.",
        **details,
    )


def deletion_method(context: DoctorContext) -> MethodSpec | None:
    """Return the method that the user named, or the first of DELETION_METHODS that applies."""
    if context.method is not None:
        return context.method
    gradient = context.status("gradient") == "pass"
    for name in DELETION_METHODS:
        spec = resolve_method(name)
        if spec.passes == "backward" and not gradient:
            continue
        if not isinstance(run_methods(context.model, context.pixels[:1], [spec], 0)[spec.text], ClairError):
            return spec
    return None


def measure_deletion(context: DoctorContext, method: MethodSpec) -> DeletionResult:
    """Return deletion scores of a method and of enough random maps on all images."""
    model, images, seed = context.model_of_all, context.images, context.seed
    ours = evaluate(model, images, method, "deletion", baselines=False, seed=seed)
    count = max(1, math.ceil(MIN_RANDOM_MAPS / max(1, len(ours.values))))
    random = [evaluate(model, images, "random", "deletion", baselines=False, seed=seed + k) for k in range(count)]
    curves = [score.curve.y for score in (ours, *random) if score.curve is not None]  # [B, S] each
    change = max(float((y - y[:, :1]).abs().max()) for y in curves)
    values = np.stack([score.values.double().cpu().numpy() for score in random])
    return DeletionResult(method.text, ours.values.double().cpu().numpy(), values, change)


def min_images_for_test() -> int:
    """Return the smallest number of images for which a sign-flip test can reach the level."""
    return next(n for n in range(1, 100) if smallest_p(n) < LEVEL)


@check("methods", needs=("trace",))
def which_methods_apply(context: DoctorContext) -> Check:
    """Run every method that needs no passes of its own on the first image; report why others do not apply."""
    results = context.applicability
    refused = {text: str(result) for text, result in results.items() if isinstance(result, ClairError)}
    maps = {text: result.maps for text, result in results.items() if not isinstance(result, ClairError)}
    constant = [text for text, image_map in maps.items() if image_map is not None and _is_constant(image_map)]
    declared = {spec.text for spec in context.single_pass_methods if spec.method.caveats.zero_reason or spec.relu}
    untried = [method.name for method in list_methods() if method.name not in results]
    details: dict[str, Any] = {"apply": [*maps], "refused": refused, "constant": constant, "not_tried": untried}
    reasons: dict[str, list[str]] = {}
    for text, reason in refused.items():
        reasons.setdefault(_without_name(reason, text), []).append(text)
    explanation = " ".join(f"Not {abbreviated(names, 6)}: {reason}" for reason, names in reasons.items())
    summary = f"{len(maps)} of {len(results)} apply, and {len(untried)} that need many passes were not tried."
    broken = [text for text, result in results.items() if isinstance(result, UnexpectedError)]
    if broken:
        return failed(
            f"{summary} {explanation}", f"{abbreviated(broken)} should not fail so: please report it.", **details
        )
    if not maps:
        return failed(
            f"None applies. {explanation}", "Follow the first reason; without it nothing can be explained.", **details
        )
    if constant:
        summary += f" Constant on this image, so that they show nothing: {abbreviated(constant, 6)}."
    if {*constant} - declared:
        return warned(
            f"{summary} {explanation}".strip(), f"Leave {abbreviated(constant, 6)} out for this model.", **details
        )
    return passed(f"{summary} {explanation}".strip(), **details)


def _is_constant(maps: Tensor) -> bool:
    """Return whether a map has one value everywhere, up to the rounding of its own precision."""
    values = maps.detach().flatten(1).double()
    value_range = values.amax(1) - values.amin(1)
    return bool((value_range <= torch.finfo(maps.dtype).eps * values.abs().amax(1)).all())


def _without_name(reason: str, text: str) -> str:
    """Return the reason without the name of the method, so that methods can be grouped by reason."""
    return reason.replace(f"'{text}'", "the method").replace(f"'{text.partition('(')[0]}'", "the method")


@check("integrity")
def model_unchanged(context: DoctorContext) -> Check:
    """Check that parameters, buffers, flags and hooks are what they were before the checks."""
    changed = differences(context.before, snapshot(context.model.module))
    by_checks = [name for name in changed if name not in context.changed_by_forward]
    if by_checks:
        return failed(
            f"The checks changed {abbreviated(by_checks)}.",
            "The forward writes to them only in some calls, or this is a bug of ClairViT: please report it.",
            changed=by_checks,
        )
    if changed:
        return passed(
            "After all checks parameters, hooks and flags are what they were; the buffers that its own forward writes "
            "to are restored.",
            restored=changed,
        )
    return passed("After all checks parameters, buffers, hooks and flags are bit for bit what they were.")
