"""Validate the verdicts of `ex.check()`: real maps against the same maps with their patches shuffled.

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/check.py PHOTOS --photos 40
    python benchmarks/check.py PHOTOS --photos 200 --device cuda
    python benchmarks/check.py PHOTOS --photos 60 --second --method attnlrp+plus --method genatt
    python benchmarks/check.py PHOTOS --model file:mine.safetensors --arch timm:vit_small_patch14_dinov2 --labels l.json

Prints Markdown tables. A check is useful if good methods are supported, and if shuffled maps, which say nothing about
places, are not. The separation is the AUC of the mean effect between the two: the share of pairs (real, shuffled) in
which the real map has the larger effect; ties count half. `--json FILE` keeps every check, so that other thresholds can
be tried without running the model again. `--second` also checks maps of the second class as if they were of the first.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

import clairvit as cv
from clairvit._io import write_json
from clairvit._rng import make_generator
from clairvit.metrics.check import DRAWS, FRACTIONS
from clairvit.metrics.check_result import CHANCE, SUPPORTED, Verdict

METHODS = ("attnlrp+plus", "genatt", "legrad", "rollout", "ixg", "gradcam", "center", "random")
GOOD = ("attnlrp+plus", "genatt", "legrad")  # of which the separation is reported together
VERDICTS: tuple[Verdict, ...] = ("supported", "weak", "not better than chance")
LOADED = ("arch", "labels", "resize")  # arguments of cv.load
BATCH = {"cpu": 8, "cuda": 32}


@dataclass(frozen=True)
class Row:
    """The check of one map of one photo."""

    method: str
    shuffled: bool
    check: cv.results.MapCheck


def shuffled_maps(maps: Tensor, seed: int) -> Tensor:
    """Return each map [B, rows, cols] with its patches in a random order."""
    flat = maps.flatten(1)
    orders = torch.stack(
        [
            torch.randperm(flat.shape[1], generator=make_generator(seed, "benchmarks/shuffled maps", k))
            for k in range(len(flat))
        ]
    )
    return flat.gather(1, orders.to(flat.device)).reshape(maps.shape)


def check_photos(model: cv.Model, photos: Sequence[Path], methods: Sequence[str], seed: int) -> list[Row]:
    """Explain and check some photos by all methods, each map as it is and shuffled."""
    rows = []
    comparison = cv.compare(model, list(photos), list(methods), seed=seed, skip=True)
    for method, explanation in comparison.items():
        rows += [Row(method, False, check) for check in explanation.check(seed=seed)]
        shuffled = replace(explanation, maps=shuffled_maps(explanation.maps, seed))
        rows += [Row(method, True, check) for check in shuffled.check(seed=seed)]
    return rows


def check_second(model: cv.Model, photos: Sequence[Path], methods: Sequence[str], seed: int) -> list[Row]:
    """Check maps of each photo's second class for its first one: maps that are not of the class that is asked about."""
    rows = []
    first, second = cv.explain(model, list(photos), "center").logits.topk(2).indices.T.tolist()
    for method in methods:
        maps = cv.explain(model, list(photos), method, target=second, seed=seed).maps
        checks = cv.check_maps(model, list(photos), maps, first, seed=seed)
        rows += [Row(f"{method} of the second class", False, check) for check in checks]
    return rows


def area_under_roc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Return P(positive > negative) + P(positive = negative) / 2."""
    if not positive or not negative:
        return float("nan")
    a, b = torch.tensor(positive, dtype=torch.float64), torch.tensor(negative, dtype=torch.float64)
    larger = (a[:, None] > b).double() + 0.5 * (a[:, None] == b).double()
    return float(larger.mean())


def effects(rows: Sequence[Row], methods: Sequence[str], shuffled: bool) -> list[float]:
    """Return the mean effect of each check of these methods."""
    return [row.check.effect for row in rows if row.method in methods and row.shuffled == shuffled]


def verdict_line(name: str, checks: Sequence[cv.results.MapCheck]) -> str:
    """Return one line of the table of verdicts."""
    counts = Counter(check.verdict for check in checks)
    shares = " | ".join(f"{counts[verdict] / len(checks):.0%}".replace("%", " %") for verdict in VERDICTS)
    values = torch.tensor([check.effect for check in checks], dtype=torch.float64)
    return f"| {name} | {shares} | {float(values.median()):.1f} |"


def expected_shares() -> dict[Verdict, float]:
    """Return the shares of verdicts of a random map if the evidence is a sum over patches with normal values.

    The mean of the two effects then is √((1 + ρ) / 2) times Student's t with F (K − 1) degrees of freedom, where the
    effects of nested removals correlate by ρ = √(f (1 − g) / (g (1 − f))) / (1 + 1/K), f < g.
    """
    smaller, larger = FRACTIONS
    nested = math.sqrt(smaller * (1 - larger) / (larger * (1 - smaller)))
    scale = math.sqrt((1 + nested / (1 + 1 / DRAWS)) / 2)
    above = [float(stats.t.sf(bound / scale, len(FRACTIONS) * (DRAWS - 1))) for bound in (SUPPORTED, CHANCE)]
    return {"supported": above[0], "weak": above[1] - above[0], "not better than chance": 1 - above[1]}


def print_tables(rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Print the shares of verdicts per method, and how well effects separate real from shuffled maps."""
    print(f"\n| map | {' | '.join(VERDICTS)} | median effect |\n|---|---|---|---|---|")
    for shuffled in (False, True):
        for method in dict.fromkeys(row.method for row in rows if row.shuffled == shuffled):
            checks = [row.check for row in rows if row.method == method and row.shuffled == shuffled]
            print(verdict_line(f"{method}, shuffled" if shuffled else method, checks))
    print(verdict_line("all shuffled maps", [row.check for row in rows if row.shuffled]))
    shares = " | ".join(f"{share:.0%}".replace("%", " %") for share in expected_shares().values())
    print(f"| random, in theory | {shares} | 0.0 |")
    print("\n| method | AUC, real against shuffled |\n|---|---|")
    for method in methods:
        separation = area_under_roc(effects(rows, [method], False), effects(rows, [method], True))
        print(f"| {method} | {separation:.3f} |")
    good = [method for method in methods if method in GOOD]
    if good:
        separation = area_under_roc(effects(rows, good, False), effects(rows, good, True))
        print(f"| {', '.join(good)} together | {separation:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of photos")
    parser.add_argument("--model", default="pets")
    parser.add_argument("--arch", help="of a weights file, e.g. timm:vit_small_patch14_dinov2")
    parser.add_argument("--labels", help="of a weights file")
    parser.add_argument("--resize", type=int, help="of a weights file: the short side before the crop, in pixels")
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--method", action="append", help="repeatable")
    parser.add_argument("--second", action="store_true", help="also maps of the second class, checked for the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="a file for all checks")
    arguments = parser.parse_args()
    given: dict[str, Any] = {name: value for name in LOADED if (value := getattr(arguments, name)) is not None}
    model = cv.load(arguments.model, device=arguments.device, **given)
    photos = sorted(path for path in arguments.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    photos = random.Random(arguments.seed).sample(photos, min(arguments.photos, len(photos)))
    size = BATCH.get(arguments.device, 8)
    rows: list[Row] = []
    for start in range(0, len(photos), size):
        rows += check_photos(model, photos[start : start + size], arguments.method or METHODS, arguments.seed)
        if arguments.second:
            rows += check_second(model, photos[start : start + size], arguments.method or METHODS, arguments.seed)
        print(f"{min(start + size, len(photos))} of {len(photos)} photos", flush=True)
    methods = list(dict.fromkeys(row.method for row in rows if row.shuffled))
    print(
        f"\n{model.name}, {len(photos)} photos, seed {arguments.seed}; supported ≥ {SUPPORTED:g}, chance < {CHANCE:g}"
    )
    print_tables(rows, methods)
    if arguments.json:
        content = [{"method": row.method, "shuffled": row.shuffled, **row.check.to_dict()} for row in rows]
        write_json({"model": model.name, "rows": content}, arguments.json)


if __name__ == "__main__":
    main()
