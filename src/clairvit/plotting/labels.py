"""What is written beside a map: class names with probabilities, costs, map statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from clairvit.methods.explanation import Cost, Explanation
from clairvit.models.activation import probabilities
from clairvit.plotting.overlay import numbers
from clairvit.targets.base import class_name

SIGNED = "±"
CLASS_AGNOSTIC = "∀"  # one map for all classes


@dataclass(frozen=True)
class Guess:
    """One class the model considers."""

    index: int
    name: str
    probability: float | None  # None where the model's scores are raw
    score: float  # the model's own output for the class, before any activation


def guesses(explanation: Explanation, item: int, count: int = 5) -> list[Guess]:
    """Return the highest classes of one image, best first; none where the output is an embedding, not class scores."""
    if not explanation.classifier:
        return []
    logits = explanation.logits[item].detach().to("cpu", torch.float64)
    chances = probabilities(logits, explanation.activation)
    values = logits if chances is None else chances
    return [
        Guess(
            index,
            class_name(explanation.labels, index),
            None if chances is None else float(chances[index]),
            float(logits[index]),
        )
        for index in values.topk(min(count, len(values))).indices.tolist()
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


def score_text(score: float) -> str:
    """37.0 -> 'score 37.0': a score that is no probability."""
    return f"score {score:#.3g}" if abs(score) < 1000 else f"score {score:.4g}"


def named(name: str, probability: float | None, score: float | None = None) -> str:
    """Return 'Egyptian Mau 92%'; where there is no probability 'age (score 37.0)', or the name alone."""
    if probability is None and score is not None:
        return f"{name} ({score_text(score)})"
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
