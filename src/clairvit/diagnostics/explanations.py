"""Checks of the maps: which methods apply, whether maps ask for the class, and whether they beat random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clairvit.diagnostics.examination import (
    Examination,
    Unforeseen,
    check,
    failed,
    listed,
    passed,
    plural,
    results_of,
    skipped,
    warned,
)
from clairvit.diagnostics.inspection import differences, snapshot
from clairvit.diagnostics.report import Check
from clairvit.errors import ClairError
from clairvit.methods.explain import compare
from clairvit.methods.registry import list_methods
from clairvit.methods.spec import resolve_method
from clairvit.metrics.evaluate import evaluate
from clairvit.metrics.inference import LEVEL, sign_flips, smallest_p
from clairvit.metrics.similarity import pearson
from clairvit.tracing.structure import model_structure

# Tried in this order: the most faithful map without fitting (METHODS-2026, section 1), then what fits other models.
DELETED_BY = ("attnlrp+plus", "ixg", "saliency", "rollout")
RANDOM_MAPS = 5  # random maps that are deleted by in all, one per image at least
CLASS_METHODS = ("ixg", "decompx", "gradcam")  # class-specific by their formulas, one backward each
SAME_MAP = 0.999  # correlation from which on two maps show the same
NEARLY_SAME = 0.95


@check("class sensitivity", needs=("trace", "gradient", "scores"))
def class_sensitivity(examination: Examination) -> Check:
    """The maps of the two most probable classes must differ."""
    if not examination.model.classifier or examination.classes < 2:
        return skipped("There are no two classes to compare.")
    pixels, logits = examination.pixels, examination.forward.logits.detach()
    first, second = logits.topk(2, dim=1).indices.T.tolist()
    names = [name for name in CLASS_METHODS if not isinstance(examination.applicability.get(name), ClairError)]
    if not names:
        return skipped("None of the methods ixg, decompx and gradcam applies.")
    maps = [compare(examination.model, pixels, names, target, skip=True) for target in (first, second)]
    correlations = {
        name: pearson(maps[0][name].maps.double().flatten(1), maps[1][name].maps.double().flatten(1)).tolist()
        for name in names
        if name in maps[0] and name in maps[1]
    }
    means = {name: _mean(values) for name, values in correlations.items()}
    means = {name: value for name, value in means.items() if not math.isnan(value)}
    details: dict[str, Any] = {"correlation": correlations, "first": first, "second": second}
    if not means:
        return skipped(f"The maps of {listed(names)} are constant for one of the two most probable classes.", **details)
    said = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
    if min(means.values()) > SAME_MAP:
        return failed(
            f"The maps of the two most probable classes are the same (correlation {said}): the head does not tell "
            "these classes apart, whatever is in the image.",
            "Compare the head's rows of the two classes: equal rows mean an untrained or collapsed head.",
            **details,
        )
    if min(means.values()) > NEARLY_SAME:
        return warned(
            f"The maps of the two most probable classes are nearly the same (correlation {said}).",
            "Ask why one rather than the other: target=cv.contrast(first, second).",
            **details,
        )
    return passed(f"The maps of the two most probable classes differ (correlation {said}).", **details)


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


@dataclass(frozen=True)
class DeletionResult:
    """Deletion of one method and of random maps, paired over images."""

    method: str
    ours: NDArray[np.float64]  # [n]
    random: NDArray[np.float64]  # [R, n]
    largest_change: float  # of the score on any curve

    @property
    def gains(self) -> NDArray[np.float64]:
        """By how much the map is better than the mean of the random ones, [n]; lower deletion is better."""
        return np.asarray(self.random.mean(0) - self.ours)


@check("deletion", needs=("trace", "scores"))
def deletion_beats_random(examination: Examination) -> Check:
    """Taking away what a map marks must hurt the score more than taking away random patches."""
    if not examination.model.classifier:
        return skipped("The output is an embedding: there is no score that could fall.")
    plan = model_structure(examination.model, examination.pixels)
    if plan.layout is None and not plan.stages:
        return skipped("There are no patches to take away: see 'layout'.")
    method = deletion_method(examination)
    if method is None:
        return skipped(f"None of the methods {listed(DELETED_BY, 9)} applies.")
    result = measure_deletion(examination, method)
    n, gain = len(result.gains), float(np.nanmean(result.gains))
    p = float(sign_flips(result.gains[None], examination.seed)[0])
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
            f"Taking patches away ({method} or random) does not change the score at all on {plural(n, 'image')}; it "
            f"stays at {float(np.nanmean(result.ours)):.4g}.",
            "Either the answer does not depend on the patches, or its probability is saturated: look for a head with "
            "huge weights or biases.",
            **details,
        )
    said = (
        f"deletion by {method} is {float(np.nanmean(result.ours)):.3g}, by random maps "
        f"{float(np.nanmean(result.random)):.3g} (lower is better)"
    )
    few = n < fewest_images()
    caution = (
        f"That is {plural(n, 'image')}, and with fewer than {fewest_images()} no test can tell it from chance."
        if few
        else f"p = {p:.2g} on {n} images, paired, by sign flips."
    )
    if not few and p < LEVEL:
        if gain > 0:
            return passed(f"Better than random: {said}; {caution}", **details)
        return failed(
            f"Worse than random: {said}; {caution}",
            "The maps of this model mislead. Find a method that fits: cv.choose(model, images).",
            **details,
        )
    if gain > 0 and few:
        wins = int((result.random > result.ours).sum())
        return passed(
            f"Better than {wins} of {result.random.size} random maps: {said}. {caution}",
            f"Give {fewest_images()} or more images of your own for a test.",
            **details,
        )
    return warned(
        f"Not better than random: {said}. {caution}",
        "Give more images of the kind that the model was trained on, or look for a method that fits: "
        "cv.choose(model, images). A model with random weights has nothing to explain.",
        **details,
    )


def deletion_method(examination: Examination) -> str | None:
    """Return the method that was asked for, or the first of DELETED_BY that applies."""
    if examination.method is not None:
        return resolve_method(examination.method).text
    gradient = examination.status("gradient") == "pass"
    for name in DELETED_BY:
        spec = resolve_method(name)
        if spec.passes == "backward" and not gradient:
            continue
        if not isinstance(results_of(examination.model, examination.pixels[:1], [spec], 0)[spec.text], ClairError):
            return spec.text
    return None


def measure_deletion(examination: Examination, method: str) -> DeletionResult:
    """Score a method and enough random maps by deletion on all images."""
    model, images, seed = examination.model, examination.images, examination.seed
    ours = evaluate(model, images, method, "deletion", baselines=False, seed=seed)
    count = max(1, math.ceil(RANDOM_MAPS / max(1, len(ours.values))))
    random = [evaluate(model, images, "random", "deletion", baselines=False, seed=seed + k) for k in range(count)]
    curves = [score.curve.y for score in (ours, *random) if score.curve is not None]  # [B, S] each
    change = max(float((y - y[:, :1]).abs().max()) for y in curves)
    values = np.stack([score.values.double().cpu().numpy() for score in random])
    return DeletionResult(method, ours.values.double().cpu().numpy(), values, change)


def fewest_images() -> int:
    """Return how many images a sign-flip test needs to reach the level at all."""
    return next(n for n in range(1, 100) if smallest_p(n) < LEVEL)


@check("methods", needs=("trace",))
def which_methods_apply(examination: Examination) -> Check:
    """Try every method that needs no passes of its own on the first image; say why others do not apply."""
    results = examination.applicability
    refused = {text: str(result) for text, result in results.items() if isinstance(result, ClairError)}
    maps = {text: result.maps for text, result in results.items() if not isinstance(result, ClairError)}
    empty = [text for text, made in maps.items() if made is not None and _constant(made)]
    declared = {spec.text for spec in examination.single_pass_methods if spec.method.caveats.zero_reason or spec.relu}
    untried = [method.name for method in list_methods() if method.name not in results]
    details: dict[str, Any] = {"apply": [*maps], "refused": refused, "constant": empty, "not_tried": untried}
    reasons: dict[str, list[str]] = {}
    for text, reason in refused.items():
        reasons.setdefault(_without_name(reason, text), []).append(text)
    why = " ".join(f"Not {listed(names, 6)}: {reason}" for reason, names in reasons.items())
    said = f"{len(maps)} of {len(results)} apply, and {len(untried)} that need many passes were not tried."
    broken = [text for text, result in results.items() if isinstance(result, Unforeseen)]
    if broken:
        return failed(f"{said} {why}", f"{listed(broken)} should not stop so: please report it.", **details)
    if not maps:
        return failed(
            f"None applies. {why}", "Follow the first reason; without it nothing can be explained.", **details
        )
    said += f" Constant on this image, so that they show nothing: {listed(empty, 6)}." if empty else ""
    if {*empty} - declared:
        return warned(f"{said} {why}".strip(), f"Leave {listed(empty, 6)} out for this model.", **details)
    return passed(f"{said} {why}".strip(), **details)


def _constant(maps: Tensor) -> bool:
    """Return whether a map has one value everywhere, up to the rounding of its own precision."""
    values = maps.detach().flatten(1).double()
    spread = values.amax(1) - values.amin(1)
    return bool((spread <= torch.finfo(maps.dtype).eps * values.abs().amax(1)).all())


def _without_name(reason: str, text: str) -> str:
    """Return a refusal that several methods share: without the name of the one that it was said of."""
    return reason.replace(f"'{text}'", "the method").replace(f"'{text.partition('(')[0]}'", "the method")


@check("integrity")
def model_unchanged(examination: Examination) -> Check:
    """Parameters, buffers, flags and hooks must be what they were before the checks."""
    changed = differences(examination.before, snapshot(examination.model.module))
    by_us = [name for name in changed if name not in examination.changed_by_forward]
    if by_us:
        return failed(
            f"The checks changed {listed(by_us)}.",
            "The forward writes to them only now and then, or this is a bug of ClairViT: please report it.",
            changed=by_us,
        )
    if changed:
        return passed(
            "After all checks parameters, hooks and flags are what they were; the buffers that its own forward writes "
            "to are put back.",
            restored=changed,
        )
    return passed("After all checks parameters, buffers, hooks and flags are bit for bit what they were.")
