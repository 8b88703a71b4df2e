"""Function targets: the user's own differentiable function of the scores, or of whatever the model returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.models.model import Model
from clairvit.targets.base import CUSTOM_SCORE, Function, ScoreContext, Target, TargetBatch, call_function


@dataclass(frozen=True)
class FunctionTarget(Target):
    """A function of the scores [B, C] that returns one number per image [B].

    Of a model without class scores it is a function of what the model returns, as `Output`.
    """

    function: Function

    @property
    def title(self) -> str:
        """Return the name of the function."""
        return function_name(self.function)

    def readout(self, model: Model) -> Model:
        """Return the model itself, or the function's values where the model has no class scores."""
        return Output(self.function).readout(model) if model.returns else model

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the target, after one call of the function."""
        if reads_output(context.model, self.function):
            return Output(self.function).resolve(context)
        _check_differentiable(self.function, context.logits)
        count = len(context)
        return TargetBatch(
            (self.title,) * count,
            (None,) * count,
            CUSTOM_SCORE,
            (self.function,) * count,
            is_batch_function=True,
            score_is_default=context.score_is_default,
            activation=context.activation,
        )


@dataclass(frozen=True)
class Output(Target):
    """A function of whatever the model's module returns: a tensor, tuple, mapping or dataclass.

    Args:
        function: Of the raw output for n images -> [n], one number per image. It must treat the images independently:
            perturbed copies of one image are run in batches of any size.
        name: The title; the function's name unless given.

    Example:
        >>> import clairvit as cv, torch
        >>> class Pair(torch.nn.Module):
        ...     def forward(self, pixels):
        ...         return {"depth": pixels.mean(1), "edges": pixels.amax(1)}
        >>> brightest = cv.Output(lambda output: output["depth"].amax((1, 2)), name="largest depth")
        >>> cv.explain(cv.wrap(Pair(), size=8), torch.randn(1, 3, 8, 8), "saliency", target=brightest).targets
        ('largest depth',)
    """

    function: Callable[[Any], Tensor]
    name: str = ""

    def readout(self, model: Model) -> Model:
        """Return the model whose only score is the function's value."""
        return model.read(("output", self.function), self.function, labels=(), classifier=False)

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the function's value as the score."""
        count, title = len(context), self.name or function_name(self.function)
        return TargetBatch(
            (title,) * count, (None,) * count, CUSTOM_SCORE, (((0, 1.0),),) * count, activation=context.activation
        )


def reads_output(model: Model | None, function: Callable[[Any], Tensor]) -> bool:
    """Return whether a model's score is this function of the module's raw output."""
    return model is not None and getattr(model.module, "function", None) is function


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function as a title."""
    name = getattr(function, "__name__", type(function).__name__)
    return "custom target" if name == "<lambda>" else name


def _check_differentiable(function: Function, logits: Tensor) -> None:
    """Call the function once on a copy, so that a mistake is found before the expensive part."""
    with torch.inference_mode(False), torch.enable_grad():
        value = call_function(function, logits.detach().clone().requires_grad_())
    if not value.requires_grad:
        raise BadInput(
            "The target function's result does not depend on the scores in a way that has a gradient; leave out "
            "argmax, detach, item and no_grad."
        )
    if not bool(value.detach().isfinite().all()):
        raise BadInput("The target function returned NaN or infinite values; expected finite numbers.")
