"""DoctorContext: one model, a few images and the passes that checks share; the registry of checks and their order."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
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
from clairvit.methods.planner import run_all
from clairvit.methods.registry import list_methods
from clairvit.methods.runs import Question, iter_runs
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.models.images import Batch
from clairvit.models.model import Model
from clairvit.targets.base import TargetBatch
from clairvit.targets.resolve import resolve_for
from clairvit.tracing.module_state import own_grad_mode

MAX_IMAGES = 8  # of all checks but deletion


@dataclass(frozen=True, eq=False)
class Precision:
    """A model in one precision, with the bound on rounding errors of its scores."""

    model: Model
    pixels: Tensor  # [B, 3, H, W]
    rounding: RoundingBound
    name: str  # "float32", "float64", "float64 with float32 inside"


@dataclass(frozen=True)
class Gap:
    """The largest difference of two scores in one precision, and the bound on its rounding error."""

    precision: str
    difference: float
    bound: float

    def __str__(self) -> str:
        return f"by {self.difference:.2g} in {self.precision} (rounding explains {self.bound:.2g})"


@dataclass(eq=False)
class DoctorContext:
    """What checks share. Passes that several of them need run once."""

    model: Model  # with the inputs of the first image, where each has a row of its own
    model_of_all: Model  # with those of all images
    batch: Batch  # the first MAX_IMAGES images
    images: Any  # all of them, as `cv.evaluate` takes them
    method: MethodSpec | None  # for the check 'deletion'; None: the first of a list that applies
    seed: int
    before: dict[str, Any]  # snapshot of the module
    checks: dict[str, Check] = field(default_factory=dict)
    changed_by_forward: tuple[str, ...] = ()  # names in the snapshot that a plain forward pass changes

    @property
    def pixels(self) -> Tensor:
        """Return the first images, [B, 3, H, W]."""
        return self.batch.pixels

    @functools.cached_property
    def pair(self) -> Tensor:
        """Return the first image and its mirror image with red and blue exchanged, [2, 3, H, W]."""
        return with_mirror_image(self.pixels)

    @functools.cached_property
    def forward(self) -> Inspection:
        """Return one forward pass of the images."""
        return inspect_forward(self.model, self.pixels)

    @functools.cached_property
    def backward(self) -> BackwardPass:
        """Return one backward pass from the scores of the first image."""
        return inspect_backward(self.model, self.pixels[:1])

    @functools.cached_property
    def rounding(self) -> RoundingBound:
        """Return the bound on rounding errors in the model's own precision."""
        return rounding_bound(self.model, self.pixels, self.forward)

    @functools.cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """Return the model as it is and, if possible, a copy in float64, in which rounding is negligible."""
        original = Precision(self.model, self.pixels, self.rounding, _dtype_name(self.forward.dtype))
        wide = self.float64
        return (original,) if isinstance(wide, str) else (original, wide)

    @functools.cached_property
    def float64(self) -> Precision | str:
        """Return the copy in float64, or why there is none."""
        if coarsest_dtype(self.model) == torch.float64:
            return "the model is in float64 already"
        copied = float64_copy(self.model)
        if isinstance(copied, str):
            return copied
        pixels = self.pixels.double()
        try:
            inspection = inspect_forward(copied, pixels)
        except Exception as error:  # user code that mixes fixed dtypes with float64
            return f"the forward fails in float64 ({type(error).__name__}: {first_line(error)})"
        if inspection.logits.dtype != torch.float64:
            return f"the forward returns {_dtype_name(inspection.logits.dtype)} whatever its weights are"
        coarsest = _dtype_name(inspection.dtype)
        name = "float64" if coarsest == "float64" else f"float64 with {coarsest} inside"
        return Precision(copied, pixels, rounding_bound(copied, pixels, inspection), name)

    @property
    def classes(self) -> int:
        """Return the number of scores per image."""
        return int(self.forward.logits.shape[-1])

    @functools.cached_property
    def target(self) -> TargetBatch:
        """Return the predicted class of each image as a target."""
        (target,) = resolve_for(self.model, None, self.forward.logits.detach())
        return target

    def status(self, name: str) -> Status:
        """Return the status of a check that ran before."""
        return self.checks[name].status

    @functools.cached_property
    def single_pass_methods(self) -> tuple[MethodSpec, ...]:
        """Return the methods without passes of their own, which cost a few backward passes together."""
        specs = [resolve_method(method.name) for method in list_methods() if not method.slow]
        return tuple(spec for spec in specs if not (spec.own_cost().forwards or spec.own_cost().backwards))

    @functools.cached_property
    def applicability(self) -> dict[str, Result | ClairError]:
        """Return the result per method for the first image, or why there is none."""
        refused = {spec.text: reason for spec in self.single_pass_methods if (reason := self._refusal(spec))}
        usable = [spec for spec in self.single_pass_methods if spec.text not in refused]
        return {**run_methods(self.model, self.pixels[:1], usable, self.seed), **refused}

    def _refusal(self, spec: MethodSpec) -> ClairError | None:
        """Return why a method cannot apply, so that it is not run."""
        if spec.method.class_specific and not self.model.classifier:
            return NotApplicable("They explain a score, and the output is an embedding. Give prompts or a target.")
        if spec.passes in ("backward", "local") and self.status("gradient") != "pass":
            cause = self.checks["gradient"].details.get("because", "gradient")
            return NotApplicable(f"They need a gradient, see '{cause}'.")
        return None


class UnexpectedError(ClairError):
    """An exception inside a method that is none of ClairViT's own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"It failed with {type(error).__name__}: {first_line(error)}.")


@own_grad_mode()
def run_methods(model: Model, pixels: Tensor, specs: Sequence[MethodSpec], seed: int) -> dict[str, Result | ClairError]:
    """Return the results of methods for the predicted class: in one run, or one by one if that raises.

    An exception that is none of ClairViT's own is returned as an `UnexpectedError`.
    """
    try:
        batch = Batch(pixels, tuple(f"image {number + 1}" for number in range(len(pixels))))
        with closing(iter_runs(Question.of(model, batch), specs)) as runs:
            run = next(runs)
        results = run_all(specs, run.recording, run.targets, seed=seed)
        return {text: runs[0] if runs[0].error is None else runs[0].error for text, runs in results.items()}
    except Exception as error:  # forward and backward run the user's code, which may raise anything
        if len(specs) == 1:
            clair_error = error if isinstance(error, ClairError) else UnexpectedError(error)
            return {specs[0].text: clair_error.with_traceback(None)}
        single_runs: dict[str, Result | ClairError] = {}
        for spec in specs:
            single_runs |= run_methods(model, pixels, [spec], seed)
        return single_runs


@dataclass(frozen=True)
class RegisteredCheck:
    """A check function, and the checks that it presupposes."""

    name: str
    needs: tuple[str, ...]
    function: Callable[[DoctorContext], Check]

    def run(self, context: DoctorContext) -> Check:
        """Return the check's outcome; skip it if a presupposed check did not pass, fail it on an exception."""
        missing = [name for name in self.needs if context.status(name) in ("fail", "skip")]
        if missing:
            cause = context.checks[missing[0]].details.get("because", missing[0])
            return Check(self.name, "skip", f"Not checked, because of '{cause}'.", details={"because": cause})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the report has the same content
                return replace(self.function(context), name=self.name)
        except ClairError as error:
            return Check(self.name, "fail", str(error))
        except Exception as error:  # user code may raise anything; it becomes the finding, and the other checks run
            return Check(
                self.name,
                "fail",
                f"The check failed with {type(error).__name__}: {first_line(error)}",
                "Call the model's forward on the same image by hand; if that works, this is a bug of ClairViT.",
            )


_checks: list[RegisteredCheck] = []


def check(name: str, needs: tuple[str, ...] = ()) -> Callable[[Callable[[DoctorContext], Check]], Callable[..., Check]]:
    """Register a function as a check; checks run in the order in which they are registered."""

    def register(function: Callable[[DoctorContext], Check]) -> Callable[..., Check]:
        _checks.append(RegisteredCheck(name, needs, function))
        return function

    return register


def registered_checks() -> tuple[RegisteredCheck, ...]:
    """Return all checks in the order in which they run."""
    from clairvit.diagnostics import arithmetic, explanations, forward, settings, structure

    order = [module.__name__ for module in (settings, forward, structure, arithmetic, explanations)]
    return tuple(sorted(_checks, key=lambda registered: order.index(registered.function.__module__)))


def passed(finding: str, advice: str = "", **details: Any) -> Check:
    return Check("", "pass", finding, advice, details)


def warned(finding: str, advice: str, **details: Any) -> Check:
    return Check("", "warn", finding, advice, details)


def failed(finding: str, advice: str, **details: Any) -> Check:
    return Check("", "fail", finding, advice, details)


def skipped(finding: str, advice: str = "", **details: Any) -> Check:
    return Check("", "skip", finding, advice, details)


def abbreviated(names: Sequence[str], limit: int = 3) -> str:
    """Return "a, b, c and 4 more"."""
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"


def plural(count: int, noun: str) -> str:
    """Return "1 image" or "2 images"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def with_mirror_image(pixels: Tensor) -> Tensor:
    """Return the first image and its mirror image with red and blue exchanged, [2, 3, H, W]."""
    first = pixels[:1]
    return torch.cat([first, first.flip(-1).flip(1)])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]
