"""What is written beside a map: class names with probabilities, costs, map statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from clairvit.methods.explanation import Cost, Explanation
from clairvit.models.target import SCORES, class_name
from clairvit.show.overlay import numbers

SIGNED = "±"
CLASS_AGNOSTIC = "∀"  # one map for all classes


@dataclass(frozen=True)
class Guess:
    """One class the model considers."""

    index: int
    name: str
    probability: float


def guesses(explanation: Explanation, item: int, count: int = 5) -> list[Guess]:
    """The most probable classes for one image, best first; none where the output is an embedding, not class scores."""
    if not explanation.classifier:
        return []
    probabilities = SCORES["prob"](explanation.logits[item].detach().to("cpu", torch.float64))
    best = probabilities.topk(min(count, len(probabilities)))
    return [
        Guess(index, class_name(explanation.labels, index), probability)
        for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def percent(probability: float | None) -> str:
    """0.923 -> '92%', 0.0042 -> '0.4%'; '' where there is no probability."""
    if probability is None or not math.isfinite(probability):
        return ""
    if probability < 0.0005:
        return "<0.1%"
    if probability < 0.0995:
        return f"{100 * probability:.1f}%"
    return f"{100 * probability:.0f}%" if probability < 0.995 else f"{math.floor(1000 * probability) / 10:g}%"


def named(name: str, probability: float | None) -> str:
    """'Egyptian Mau 92%'"""
    return f"{name} {percent(probability)}".rstrip()


def effort(cost: Cost) -> str:
    """'1 forward + 2 backward'"""
    passes = [f"{count} {word}" for count, word in ((cost.forwards, "forward"), (cost.backwards, "backward")) if count]
    return " + ".join(passes) or "no pass"


def marks(explanation: Explanation) -> list[str]:
    """What a reader must know about a map before comparing it with another."""
    return [SIGNED] * explanation.signed + [CLASS_AGNOSTIC] * (not explanation.class_specific)


def statistics(values: torch.Tensor) -> dict[str, float | None]:
    """Lowest, highest and mean finite value of a map; null where there is none."""
    array = numbers(values)
    finite = array[np.isfinite(array)]
    if finite.size == 0:
        return {"min": None, "mean": None, "max": None}
    return {"min": float(finite.min()), "mean": float(finite.mean()), "max": float(finite.max())}
