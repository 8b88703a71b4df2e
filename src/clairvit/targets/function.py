"""Function targets: the user's own differentiable function of the scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.targets.base import CUSTOM_SCORE, Function, ScoreContext, Target, TargetBatch, call_function


@dataclass(frozen=True)
class FunctionTarget(Target):
    """A function of the scores [B, C] that returns one number per image [B]."""

    function: Function

    @property
    def title(self) -> str:
        """Return the name of the function."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return "custom target" if name == "<lambda>" else name

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the target, after one call of the function."""
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
