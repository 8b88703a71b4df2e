"""Print a Markdown table of FunnyBirds' questions for many methods, on part scenes whose evidence is known.

Usage: python benchmarks/planted_truth.py --images 240 --device cuda > table.md

CSDC, PC, DC and D are controlled synthetic data check, preservation check, deletion check and distractibility at the
threshold t that is best for the method; Com. = ½ ((CSDC + PC + DC) / 3 + D), Cor. is single deletion and Con. target
sensitivity. Rows are ordered by the mean of these three; ± is half the width of a 95 % interval. `calibrated` is
fitted to other scenes (`--calibrate`, 0: none), by removing tokens, never parts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import clairvit as cv
from clairvit.data.open import open_data
from clairvit.methods.calibrated import PRIOR_METHOD
from clairvit.methods.explain import expand_all
from clairvit.metrics.score import Score, Scores, lead

CHECKS = ("controlled-synthetic-data-check", "preservation-check", "deletion-check", "distractibility")
SUMMARY = ("part-completeness", "single-deletion", "target-sensitivity")
MODEL = ("part-accuracy", "part-accuracy(removed=1)", "part-accuracy(removed=2)", "background-independence")
METHODS = "all;attnlrp+plus;decompx+skipplus;genatt+skipplus;ixg+skipplus"
FITTED_SEED = 3  # scenes that the calibrated method is fitted to: added to the seed of those that are scored
COLUMNS = ("method", "CSDC", "PC", "DC", "D", "Com.", "Cor.", "Con.", "mean", "t")


def interval(score: Score) -> str:
    low, high = score.interval
    return f"{score.mean:.3f} ± {(high - low) / 2:.3f}"


def row(scores: Scores, method: str, calibrated: str | None) -> list[str]:
    checks = [f"{scores[method, name].mean:.3f}" for name in CHECKS]
    threshold = scores[method, SUMMARY[0]].settings["threshold"]
    summary = [interval(scores[method, name]) for name in SUMMARY]
    name = "calibrated" if method == calibrated else method
    return [f"`{name}`", *checks, *summary, f"{mean(scores, method):.3f}", f"{threshold:.2f}"]


def mean(scores: Scores, method: str) -> float:
    return sum(scores[method, name].mean for name in SUMMARY) / len(SUMMARY)


def rank(value: float) -> float:
    """Return the sort key: highest first, undefined last."""
    return math.inf if math.isnan(value) else -value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="parts")
    parser.add_argument("--method", default=METHODS, help="separated by ';'; all is every method that is not slow")
    parser.add_argument("--images", type=int, default=240)
    parser.add_argument("--calibrate", type=int, default=50, help="scenes to fit the calibrated method to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    model, started = cv.load(arguments.model, device=arguments.device), time.monotonic()
    dataset = open_data(f"parts:{arguments.images}", seed=arguments.seed).dataset
    methods = expand_all(arguments.method.split(";"))
    calibrated = None
    if arguments.calibrate:
        others = open_data(f"parts:{arguments.calibrate}", seed=arguments.seed + FITTED_SEED).dataset
        recipe = cv.calibrate(model, others, seed=arguments.seed)
        print("\n".join(recipe.answer), file=sys.stderr)
        calibrated = recipe.method
        methods.append(cv.parse_method(calibrated))
    scores = cv.evaluate(
        model, dataset, methods, [*CHECKS, *SUMMARY, *MODEL], skip=True, baselines=False, seed=arguments.seed
    )
    rated = sorted(dict.fromkeys(method for method, _ in scores), key=lambda name: rank(mean(scores, name)))
    print(f"`{arguments.model}` on {len(dataset)} part scenes of seed {arguments.seed}: ", end="")
    print(", ".join(f"{name} {scores[rated[0], name].mean:.3f}" for name in MODEL) + ".\n")
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *(row(scores, method, calibrated) for method in rated)):
        print("| " + " | ".join(cells) + " |")
    if calibrated is not None and PRIOR_METHOD in rated:
        for name in SUMMARY:
            gain, (low, high) = lead(scores[calibrated, name], scores[PRIOR_METHOD, name])
            print(f"\n{name}, calibrated − {PRIOR_METHOD}, paired: {gain:+.3f} [{low:+.3f}, {high:+.3f}]")
    for method, reason in scores.skipped.items():
        print(f"left out: {method} ({reason})", file=sys.stderr)
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
