"""Contrast targets: why this class and not that one?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clairvit.errors import BadInput
from clairvit.targets.base import ScoreContext, Target, TargetBatch
from clairvit.targets.class_ import resolve_classes


@dataclass(frozen=True)
class Contrast(Target):
    """Why a rather than b? The score of `a` minus the score of `b`; None is the predicted class."""

    a: Any
    b: Any

    def resolve(self, context: ScoreContext) -> TargetBatch:
        """Return the target score[a] - score[b]."""
        pairs = list(zip(resolve_classes(self.a, context), resolve_classes(self.b, context), strict=True))
        same = [context.name(a) for a, b in pairs if a == b]
        if same:
            raise BadInput(f"contrast of '{same[0]}' with itself is 0 everywhere; name two different classes.")
        names = [f"{context.name(a)} − {context.name(b)}" for a, b in pairs]
        return context.target(names, [None] * len(pairs), [((a, 1.0), (b, -1.0)) for a, b in pairs])


def contrast(a: int | str | None, b: int | str | None) -> Contrast:
    """Return the target for "why a and not b": the score of `a` minus the score of `b`.

    Args:
        a, b: Class indices or names; None is the predicted class.

    Returns:
        A target that every verb takes.

    Example:
        >>> import clairvit as cv
        >>> cv.explain("pets", "demo", "genatt", target=cv.contrast("Bengal", "Egyptian Mau")).targets
        ('Bengal − Egyptian Mau',)
        >>> cv.contrast("Beagle", None)
        Contrast(a='Beagle', b=None)
    """
    return Contrast(a, b)
