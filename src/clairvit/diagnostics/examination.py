"""Examination: one model, a few images, and what the checks share; the registry of checks and the order they run in."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clairvit.diagnostics.inspection import (
    BackwardPass,
    Inspection,
    RoundingBound,
    coarsest_dtype,
    float64_copy,
    inspect_backward,
    inspect_forward,
    rounding_bound,
)
from clairvit.diagnostics.report import Check, Status
from clairvit.errors import ClairError, NotApplicable
from clairvit.methods.executor import Result
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.registry import list_methods
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.targets.base import Target
from clairvit.targets.resolve import resolve
from clairvit.tracing.module_state import own_grad_mode

FEW_IMAGES = 8  # what all checks but deletion look at


@dataclass(frozen=True, eq=False)
class Precision:
    """A model in one precision, with the rounding that its scores may show."""

    model: Model
    pixels: Tensor  # [B, 3, H, W]
    rounding: RoundingBound
    words: str  # "float32", "float64", "float64 with float32 inside"


@dataclass(frozen=True)
class Gap:
    """The largest difference of two scores in one precision, and what rounding explains of it."""

    precision: str
    difference: float
    bound: float

    def __str__(self) -> str:
        return f"by {self.difference:.2g} in {self.precision} (rounding explains {self.bound:.2g})"


@dataclass(eq=False)
class Examination:
    """What the checks know. Passes that several of them need are made once."""

    model: Model
    batch: Batch  # the first FEW_IMAGES images
    images: Any  # all of them, as `cv.evaluate` takes them
    method: str | None  # whose maps are deleted by; None: the first of a list that applies
    seed: int
    before: dict[str, Any]  # snapshot of the module
    checks: dict[str, Check] = field(default_factory=dict)
    changed_by_forward: tuple[str, ...] = ()  # names in the snapshot that a plain forward changes

    @property
    def pixels(self) -> Tensor:
        """[B, 3, H, W]"""
        return self.batch.pixels

    @functools.cached_property
    def pair(self) -> Tensor:
        """[2, 3, H, W]: the first image, and its mirror image with red and blue exchanged."""
        return mirrored(self.pixels)

    @functools.cached_property
    def forward(self) -> Inspection:
        """One forward of the images."""
        return inspect_forward(self.model, self.pixels)

    @functools.cached_property
    def backward(self) -> BackwardPass:
        """One backward from the scores of the first image."""
        return inspect_backward(self.model, self.pixels[:1])

    @functools.cached_property
    def rounding(self) -> RoundingBound:
        return rounding_bound(self.model, self.pixels, self.forward)

    @functools.cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """The model as it is and, where that can be had, a copy in float64, in which rounding is out of the way."""
        as_it_is = Precision(self.model, self.pixels, self.rounding, _words(self.forward.dtype))
        made = self.float64
        return (as_it_is,) if isinstance(made, str) else (as_it_is, made)

    @functools.cached_property
    def float64(self) -> Precision | str:
        """The copy in float64, or why there is none."""
        if coarsest_dtype(self.model) == torch.float64:
            return "the model is in float64 already"
        copied = float64_copy(self.model)
        if isinstance(copied, str):
            return copied
        pixels = self.pixels.double()
        try:
            inspection = inspect_forward(copied, pixels)
        except Exception as error:  # user code: tensors of a fixed type meet float64
            return f"the forward fails in float64 ({type(error).__name__}: {_first_line(error)})"
        if inspection.logits.dtype != torch.float64:
            return f"the forward returns {_words(inspection.logits.dtype)} whatever its weights are"
        kind = _words(inspection.dtype)
        words = "float64" if kind == "float64" else f"float64 with {kind} inside"
        return Precision(copied, pixels, rounding_bound(copied, pixels, inspection), words)

    @property
    def classes(self) -> int:
        return int(self.forward.logits.shape[-1])

    @functools.cached_property
    def target(self) -> Target:
        """The predicted class of each image."""
        (target,) = resolve(None, self.forward.logits.detach(), self.model.labels, classifier=self.model.classifier)
        return target

    def status(self, name: str) -> Status:
        return self.checks[name].status

    @functools.cached_property
    def single_pass_methods(self) -> tuple[MethodSpec, ...]:
        """Methods without passes of their own, that can be tried at the cost of a few backwards."""
        specs = [resolve_method(method.name) for method in list_methods() if not method.slow]
        return tuple(spec for spec in specs if not (spec.own_cost().forwards or spec.own_cost().backwards))

    @functools.cached_property
    def applicability(self) -> dict[str, Result | ClairError]:
        """Method text -> what it gave for the first image, or why it gave nothing."""
        refused = {spec.text: reason for spec in self.single_pass_methods if (reason := self._refusal(spec))}
        usable = [spec for spec in self.single_pass_methods if spec.text not in refused]
        return {**results_of(self.model, self.pixels[:1], usable, self.seed), **refused}

    def _refusal(self, spec: MethodSpec) -> ClairError | None:
        """Why a method need not be tried."""
        if spec.method.class_specific and not self.model.classifier:
            return NotApplicable("They explain a score, and the output is an embedding. Give prompts or a target.")
        if spec.passes in ("backward", "local") and self.status("gradient") != "pass":
            cause = self.checks["gradient"].details.get("because", "gradient")
            return NotApplicable(f"They need a gradient, see '{cause}'.")
        return None


class Unforeseen(ClairError):
    """An exception inside a method that ClairViT did not foresee."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"It stopped with {type(error).__name__}: {_first_line(error)}.")


@own_grad_mode()
def results_of(model: Model, pixels: Tensor, specs: Sequence[MethodSpec], seed: int) -> dict[str, Result | ClairError]:
    """Run methods on the predicted class: all together, or one by one if one of them stops the others.

    An exception that is none of ClairViT's own is kept as a `ClairError` that names it.
    """
    try:
        recording = record_for(specs, model, pixels)
        if model.classifier:
            (target,) = resolve(None, recording.logits.detach(), model.labels)
        else:
            target = Target(("any class",) * len(pixels), (None,) * len(pixels), "none")
        results = run_all(specs, recording, [target], seed=seed)
        return {text: made[0] if made[0].error is None else made[0].error for text, made in results.items()}
    except Exception as error:
        if len(specs) == 1:
            kept = error if isinstance(error, ClairError) else Unforeseen(error)
            return {specs[0].text: kept.with_traceback(None)}
        apart: dict[str, Result | ClairError] = {}
        for spec in specs:
            apart |= results_of(model, pixels, [spec], seed)
        return apart


@dataclass(frozen=True)
class Step:
    """A check, and the checks that must not have failed for it to mean something."""

    name: str
    needs: tuple[str, ...]
    function: Callable[[Examination], Check]

    def run(self, examination: Examination) -> Check:
        """Return the check; an exception becomes a failure of this check and the others go on."""
        missing = [name for name in self.needs if examination.status(name) in ("fail", "skip")]
        if missing:
            cause = examination.checks[missing[0]].details.get("because", missing[0])
            return Check(self.name, "skip", f"Not checked, because of '{cause}'.", details={"because": cause})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the report names what they warn of
                return replace(self.function(examination), name=self.name)
        except ClairError as error:
            return Check(self.name, "fail", str(error))
        except Exception as error:
            return Check(
                self.name,
                "fail",
                f"The check stopped with {type(error).__name__}: {_first_line(error)}",
                "Call the model's forward on the same image by hand; if it works there, this is a bug of ClairViT.",
            )


_steps: list[Step] = []


def check(name: str, needs: tuple[str, ...] = ()) -> Callable[[Callable[[Examination], Check]], Callable[..., Check]]:
    """Register a function as a check; checks run in the order in which they are registered."""

    def enter(function: Callable[[Examination], Check]) -> Callable[..., Check]:
        _steps.append(Step(name, needs, function))
        return function

    return enter


def steps() -> tuple[Step, ...]:
    """Return all checks in their order."""
    from clairvit.diagnostics import arithmetic, explanations, forward, settings, structure

    order = [m.__name__ for m in (settings, forward, structure, arithmetic, explanations)]
    return tuple(sorted(_steps, key=lambda step: order.index(step.function.__module__)))


def passed(finding: str, advice: str = "", **details: Any) -> Check:
    return Check("", "pass", finding, advice, details)


def warned(finding: str, advice: str, **details: Any) -> Check:
    return Check("", "warn", finding, advice, details)


def failed(finding: str, advice: str, **details: Any) -> Check:
    return Check("", "fail", finding, advice, details)


def skipped(finding: str, advice: str = "", **details: Any) -> Check:
    return Check("", "skip", finding, advice, details)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return "a, b, c and 4 more"."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def mirrored(pixels: Tensor) -> Tensor:
    """Return the first image and its mirror image with red and blue exchanged, [2, 3, H, W]."""
    first = pixels[:1]
    return torch.cat([first, first.flip(-1).flip(1)])


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
