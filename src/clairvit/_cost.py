"""Cost: how many passes a map or a score takes, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Passes and seconds. For a map computed together with others: as if alone, so the shared trace counts in each.

    Args:
        forwards: Forward passes per image.
        backwards: Backward passes per image.
        seconds: Wall-clock time.
        own_seconds: Of these, the method's own arithmetic on top of the trace.

    Example:
        >>> import clairvit as cv
        >>> cost = cv.explain("pets", "demo", "legrad").cost
        >>> cost.forwards, cost.backwards
        (1, 1)
    """

    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forwards + other.forwards,
            self.backwards + other.backwards,
            self.seconds + other.seconds,
            self.own_seconds + other.own_seconds,
        )

    @staticmethod
    def of_batches(costs: Sequence[Cost]) -> Cost:
        """Return passes per image and the seconds of all batches; parts of one batch share one object, counted once."""
        batches = list({id(cost): cost for cost in costs}.values())
        return Cost(
            max(cost.forwards for cost in batches),
            max(cost.backwards for cost in batches),
            sum(cost.seconds for cost in batches),
            sum(cost.own_seconds for cost in batches),
        )
