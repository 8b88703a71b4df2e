"""Calibrated explanations against attnlrp+plus: fitted on some photos, scored on others.

    python benchmarks/calibrate.py --data data/oxford-iiit-pet                                  # the built-in model
    python benchmarks/calibrate.py --data data/oxford-iiit-pet --model file:dinov2.safetensors --labels labels.json \\
        --arch "timm:vit_small_patch14_dinov2" --size 224 --device cuda --out dinov2.json

Calibration and evaluation photos are disjoint parts of one random order of the test split, from the seed. Prints a
Markdown table: mean ± standard error, and the paired gain over attnlrp+plus with its 95 % interval.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import clairvit as cv
from clairvit._io import write_json
from clairvit.data.open import open_data
from clairvit.methods.calibrated import PRIOR_METHOD
from clairvit.metrics.score import lead

METHODS = (PRIOR_METHOD, "attnlrp", "reslrp+plus", "decompx+skipplus", "genatt", "random", "center")
METRICS = (
    *("insertion-deletion(steps=9)", "insertion-deletion(removal=mean,steps=9)"),
    *("faithfulness-correlation(runs=72,score=prob)", "sensitivity-n(runs=8,score=prob,sizes=9)", "ap"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pets", help="as for cv.load")
    parser.add_argument("--arch", help="the architecture of file:… weights")
    parser.add_argument("--labels", help="a JSON list of class names")
    parser.add_argument("--size", type=int, help="image size, where the architecture leaves a choice")
    parser.add_argument("--resize", type=int, help="short side before the crop")
    parser.add_argument("--data", required=True, help="the folder of Oxford-IIIT Pet")
    parser.add_argument("--calibration", type=int, default=50, help="photos to fit to")
    parser.add_argument("--evaluation", type=int, default=200, help="photos to score on")
    parser.add_argument("--sets", type=int, default=8, help="random token sets per keep rate")
    parser.add_argument("--backwards", type=int, help="at most so many backward passes per explanation")
    parser.add_argument("--method", action="append", help=f"methods to compare with; default: {', '.join(METHODS)}")
    parser.add_argument("--metric", action="append", help=f"default: {', '.join(METRICS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu (default), cuda")
    parser.add_argument("--cache", help="a folder for the data of calibration photos")
    parser.add_argument("--recipe", help="where the recipe is written, a name that ends in .json")
    parser.add_argument("--out", help="where the numbers are written as JSON")
    return parser.parse_args()


def load(typed: argparse.Namespace) -> cv.Model:
    options = {name: getattr(typed, name) for name in ("arch", "labels", "size", "resize", "device")}
    return cv.load(typed.model, **{name: value for name, value in options.items() if value is not None})


def table(scores: cv.Scores, methods: list[str], metrics: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the lines of a Markdown table and the same numbers as records."""
    lines = [f"| map | {' | '.join(metrics)} |", f"|---{'|---' * len(metrics)}|"]
    records: list[dict[str, Any]] = []
    for method in methods:
        cells = []
        for metric in metrics:
            score, prior = scores[method, metric], scores[PRIOR_METHOD, metric]
            gain, (low, high) = lead(score, prior)
            cell = f"{score.mean:.3f} ± {score.standard_error:.3f}"
            cells.append(cell if method == PRIOR_METHOD else f"{cell}, {gain:+.3f} [{low:+.3f}, {high:+.3f}]")
            record = {"method": method, "metric": metric, "mean": score.mean, "standard_error": score.standard_error}
            records.append({**record, "gain": gain, "interval": [low, high], "n": score.n_valid})
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines, records


def main() -> None:
    typed = arguments()
    model = load(typed)
    photos = open_data(f"pets:{typed.data}", split="test").dataset
    order = np.random.default_rng(typed.seed).permutation(len(photos)).tolist()
    count = typed.calibration + typed.evaluation
    if count > len(order):
        raise SystemExit(f"{count} photos were asked for, and there are {len(order)}.")
    started, cpu_started = time.perf_counter(), time.process_time()
    recipe = cv.calibrate(
        model,
        photos.take(order[: typed.calibration]),
        sets=typed.sets,
        backwards=typed.backwards,
        cache=typed.cache,
        seed=typed.seed,
    )
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    if typed.recipe:
        recipe.save(Path(typed.recipe))
    spent = f"{seconds:.0f} s ({cpu_seconds:.0f} s of CPU time)"
    print(f"{model.name}: fitted to {typed.calibration} photos in {spent} on {model.device}.", flush=True)
    print("\n".join(recipe.answer), flush=True)
    methods = list(dict.fromkeys([PRIOR_METHOD, *(typed.method or METHODS)]))
    metrics = [str(cv.parse_metric(text)) for text in typed.metric or METRICS]
    spec = recipe.spec
    scores = cv.evaluate(
        model,
        photos.take(order[typed.calibration : count]),
        [str(spec), *methods],
        metrics,
        baselines=False,
        seed=typed.seed,
    )
    lines, records = table(scores, [str(spec), *methods], metrics)
    print(f"\n{typed.evaluation} other photos, 1 forward and {spec.backwards} backwards per calibrated map:\n")
    print("\n".join(lines))
    if typed.out:
        document = {
            "arguments": vars(typed),
            "model": model.name,
            "fit_seconds": seconds,
            "fit_cpu_seconds": cpu_seconds,
            "backwards": spec.backwards,
            "strength": recipe.settings["strength"],
            "cross_fitted": recipe.ranking,
            "answer": recipe.answer,
            "scores": records,
        }
        write_json(document, Path(typed.out))


if __name__ == "__main__":
    main()
