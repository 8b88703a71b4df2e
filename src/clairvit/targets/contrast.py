"""Contrast targets: why this and not that?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.models.model import Model
from clairvit.targets.base import CUSTOM_SCORE, ScoreContext, Target, TargetBatch
from clairvit.targets.class_ import ClassTarget, resolve_classes
from clairvit.targets.embedding import DIFFERENCE_OF


@dataclass(frozen=True)
class Contrast(Target):
    """Why a rather than b? The score of `a` minus the score of `b`.

    Args:
        a, b: Class indices or names, where None is the predicted class; or targets that read the same output, such as
            two prompts.

    Example:
        >>> import clairvit as cv
        >>> cv.explain("pets", "demo", "genatt", target=cv.Contrast("Bengal", "Egyptian Mau")).targets
        ('Bengal − Egyptian Mau',)
        >>> cv.Contrast("Beagle", None)
        Contrast(a='Beagle', b=None)
    """

    a: Any
    b: Any

    def readout(self, model: Model) -> Model:
        """Return the model that both targets read."""
        first, second = (_as_target(part).readout(model) for part in (self.a, self.b))
        if first is not second:
            raise BadInput(
                f"Contrast({self.a!r}, {self.b!r}) compares scores of two different outputs of the model; expected two "
                "targets of one kind, such as two classes or two prompts."
            )
        return first

    @property
    def subtracts(self) -> bool:
        """Return True: what both targets share cancels."""
        return True

    @property
    def region_forwards(self) -> int:
        """Return the passes of both targets."""
        return sum(_as_target(part).region_forwards for part in (self.a, self.b))

    def region(self, model: Model, pixels: Tensor) -> Tensor | None:
        """Return the parts of the image that either target is about."""
        regions = [_as_target(part).region(model, pixels) for part in (self.a, self.b)]
        present = [region for region in regions if region is not None]
        return functools.reduce(torch.logical_or, present) if present else None

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the target score[a] - score[b]."""
        if isinstance(self.a, Target) or isinstance(self.b, Target):
            return self._difference(context)
        pairs = list(zip(resolve_classes(self.a, context), resolve_classes(self.b, context), strict=True))
        same = [context.name(a) for a, b in pairs if a == b]
        if same:
            raise BadInput(f"Contrast of '{same[0]}' with itself is 0 everywhere; name two different classes.")
        names = [f"{context.name(a)} − {context.name(b)}" for a, b in pairs]
        return context.target(names, [None] * len(pairs), [((a, 1.0), (b, -1.0)) for a, b in pairs])

    def _difference(self, context: ScoreContext) -> TargetBatch:
        """Return the difference of two targets of any kind; each image has a function of its own."""
        if self.a == self.b:
            raise BadInput(f"Contrast of {self.a!r} with itself is 0 everywhere; name two different targets.")
        first, second = (_as_target(part).resolve(context) for part in (self.a, self.b))
        first, second = first.by_row(context.logits), second.by_row(context.logits)
        count = len(context)
        return TargetBatch(
            tuple(f"{a} − {b}" for a, b in zip(first.names, second.names, strict=True)),
            (None,) * count,
            DIFFERENCE_OF.get(first.score, first.score) if first.score == second.score else CUSTOM_SCORE,
            tuple(_difference_of(first.take([row]), second.take([row])) for row in range(count)),
            activation=context.activation,
        )


def _as_target(part: Any) -> Target:
    return part if isinstance(part, Target) else ClassTarget(part)


def _difference_of(first: TargetBatch, second: TargetBatch) -> Callable[[Tensor], Tensor]:
    """Return the difference of two targets of one image, for any number of rows of that image."""

    def difference(scores: Tensor) -> Tensor:
        rows = [0] * len(scores)
        return first.take(rows)(scores) - second.take(rows)(scores)

    return difference
