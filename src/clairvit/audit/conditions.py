"""Conditions: what is expected of a quantity, as a text that is parsed once, such as "inside >= 0.5 on 80%".

inside >= 0.5                 holds on every image
inside >= 0.5 on 80%          holds on 80 % of the images or more
mean excess_inside > 0        holds for the whole 95 % interval of the mean over images
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from clairvit._io import to_json
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.metrics.confidence_intervals import EVERYWHERE, FEWEST, mean_interval, share_interval

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_CONDITION = re.compile(
    rf"(?P<mean>mean\s+)?(?P<quantity>[a-z_]+)\s*(?P<operator>>=|<=|>|<)\s*(?P<level>{_NUMBER})"
    rf"(?:\s+on\s+(?P<share>{_NUMBER})\s*(?P<percent>%)?)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Condition:
    """What is expected of a quantity.

    Args:
        quantity: The name of the quantity.
        operator: >=, >, <= or <.
        level: What it is compared with.
        share: The share of the images on which it must hold; None: it is about the mean over images.
    """

    quantity: str
    operator: str
    level: float
    share: float | None = 1.0

    @classmethod
    def parse(cls, text: str, quantities: Sequence[str]) -> Condition:
        """Return the condition of a text; raise an error for another form or a quantity that there is not."""
        match = _CONDITION.fullmatch(str(text).strip().replace("≥", ">=").replace("≤", "<="))
        if match is None or (match["mean"] and match["share"]):
            raise BadInput(
                f"The threshold {text!r} is no condition; expected one such as 'inside >= 0.5', "
                "'inside >= 0.5 on 80%' or 'mean excess_inside > 0'."
            )
        quantity = match["quantity"].lower()
        if quantity not in quantities:
            raise UnknownName(
                f"There is no quantity '{quantity}'; expected one of {', '.join(quantities)}."
                f"{did_you_mean(quantity, quantities)}"
            )
        if match["mean"]:
            return cls(quantity, match["operator"], float(match["level"]), None)
        share = Fraction(match["share"] or "1") / (100 if match["percent"] else 1)
        if not 0 < share <= 1:
            raise BadInput(
                f"The threshold {text!r} names {float(share):g} of all images; expected a share such as 80%."
            )
        return cls(quantity, match["operator"], float(match["level"]), float(share))

    def __str__(self) -> str:
        if self.share is None:
            return f"mean {self.quantity} {self.operator} {self.level:g}"
        share = "" if self.share == 1 else f" on {_percent(self.share)}"
        return f"{self.quantity} {self.operator} {self.level:g}{share}"

    def holds(self, values: Tensor) -> Tensor:
        """Return on which images the condition holds, bool [B]; never where the value is not defined."""
        result: Tensor = OPERATORS[self.operator](values, self.level)
        return result & values.isfinite()

    def test(self, values: Tensor, seed: int = 0, span: tuple[float, float] = EVERYWHERE) -> ConditionResult:
        """Return whether the condition holds for values [B], and how far."""
        defined = values[values.isfinite()].double().cpu().numpy()
        undefined = len(values) - len(defined)
        if self.share is None:
            low, high = mean_interval(defined, seed, span) if len(defined) else (math.nan, math.nan)
            edge = low if self.operator in (">=", ">") else high
            passed = bool(np.isfinite(edge) and OPERATORS[self.operator](edge, self.level))
            mean = float(defined.mean()) if len(defined) else math.nan
            return ConditionResult(self, passed, len(values), undefined, mean, low, high)
        held = int(self.holds(values).sum())
        low, high = share_interval(held, len(values))
        needed = Fraction(str(self.share)) * len(values)
        share = held / len(values) if len(values) else math.nan
        return ConditionResult(self, held >= needed and len(values) > 0, len(values), undefined, share, low, high, held)


@dataclass(frozen=True)
class ConditionResult:
    """Whether a condition holds.

    Args:
        condition: The condition.
        passed: Whether it holds.
        images: The number of images.
        undefined: On how many of them the quantity has no value: a condition does not hold there, and a mean is
            without them.
        value: The share of images on which it holds, or the mean.
        low, high: The 95 % interval of that share or mean over images like these; NaN with fewer than 6.
        held: On how many images it holds; None for a mean.
    """

    condition: Condition
    passed: bool
    images: int
    undefined: int
    value: float
    low: float
    high: float
    held: int | None = None

    @property
    def sentence(self) -> str:
        """Return the result in words."""
        verdict = "passed" if self.passed else "failed"
        known = not math.isnan(self.low)
        without = f", {self.undefined} without a value" if self.undefined else ""
        if self.held is not None:
            interval = f", 95 % interval {_percent(self.low, 1)} to {_percent(self.high, 1)}" if known else ""
            share = f"{_percent(self.value, 1)}{interval}{without}" if self.images else "no image is left"
            return f"{self.condition}: {verdict}, it holds on {self.held} of {self.images} images ({share})."
        if not known:
            few = self.images - self.undefined
            return f"{self.condition}: {verdict}, {few} values are too few for an interval; expected {FEWEST} or more."
        interval = f"95 % interval {self.low:.4g} to {self.high:.4g}, {self.images} images{without}"
        return f"{self.condition}: {verdict}, the mean is {self.value:.4g} ({interval})."

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON values, with the sentence."""
        return dict(to_json({**asdict(self), "condition": str(self.condition), "sentence": self.sentence}))

    def __str__(self) -> str:
        return self.sentence


def _percent(share: float, digits: int = 6) -> str:
    """Return 0.9 as "90 %"."""
    return f"{round(100 * share, digits):g} %"
