"""Show that certificates hold as often as they say: on simulated sizes, and on photos that were held out.

    python benchmarks/certify.py --simulate
    python benchmarks/certify.py --data pets:PATH --photos 200 --json sizes.json
    python benchmarks/certify.py --data folder:PATH --model file:vitb.safetensors --arch timm:vit_base_patch16_224 \\
        --mean 0.5 --std 0.5 --photos 200 --json vitb.json
    python benchmarks/certify.py --read sizes.json

Prints Markdown tables. The sizes k_i of all photos are computed once (`sufficient-size`, `necessary-size`); then the
photos are split at random, again and again, into as many calibration photos as others. A split gives a certified size q
and the share of the other photos with k_i ≤ q, its coverage. `--json` keeps the sizes, which `--read` prints again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clairvit as cv
from clairvit._io import write_json
from clairvit.data.open import open_data
from clairvit.metrics.answer_size import size_grid
from clairvit.metrics.certificate import conformal_quantile, conformal_rank, fewest_photos

METHODS = ("attnlrp+plus", "genatt", "rollout", "random")
METRICS = {"sufficient-size": "the top q alone keep the answer", "necessary-size": "hiding the top q changes it"}
LOADED = ("arch", "labels", "resize", "mean", "std")  # arguments of cv.load
SPLITS = 200
DRAWS = 20_000
SIMULATED = (9, 19, 20, 50, 100, 200)  # calibration photos
PATCHES = 196
Array = NDArray[np.float64]


def simulate(keep: float, seed: int) -> None:
    """Print how often a further size is at most the quantile of n, for sizes that all differ and for those of a grid.

    Sizes of a photo are a log-normal number of patches, rounded up to the sizes that are tried for the second column.
    """
    generator = np.random.default_rng(seed)
    grid = np.array(size_grid(PATCHES))
    print(f"\n{DRAWS} draws of n + 1 sizes, keep = {keep:g}\n")
    print("| n | rank | exact, all sizes differ | simulated | simulated, sizes of the grid |\n|--:|--:|--:|--:|--:|")
    for count in SIMULATED:
        if count < fewest_photos(keep):
            continue
        rank = conformal_rank(count, keep)
        sizes = np.exp(generator.normal(3.0, 0.8, (DRAWS, count + 1)))
        on_grid = grid[np.searchsorted(grid, np.minimum(sizes, PATCHES))]
        cells = []
        for drawn in (sizes, on_grid):
            quantile = np.sort(drawn[:, :-1], 1)[:, rank - 1]
            covered = float((drawn[:, -1] <= quantile).mean())
            cells.append(f"{covered:.4f} ± {math.sqrt(covered * (1 - covered) / DRAWS):.4f}")
        print(f"| {count} | {rank} | {rank / (count + 1):.4f} | {cells[0]} | {cells[1]} |")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the answer sizes of all photos by metric and method, as shares of the patches."""
    given: dict[str, Any] = {name: value for name in LOADED if (value := getattr(arguments, name)) is not None}
    model = cv.load(arguments.model, **given)
    dataset = open_data(arguments.data, split=arguments.split, limit=arguments.photos, seed=arguments.seed).dataset
    methods = list(arguments.method or METHODS)
    metrics = list(arguments.metric or METRICS)
    scores = cv.evaluate(model, dataset, methods, metrics, baselines=False, seed=arguments.seed)
    sizes = {name: {text: scores[text, name].values.tolist() for text in methods} for name in metrics}
    return {"model": model.name, "photos": len(dataset), "seed": arguments.seed, "sizes": sizes}


def coverage(sizes: Array, keep: float, splits: int, seed: int) -> tuple[Array, Array]:
    """Return the certified size and the coverage of each random split of the photos into two halves."""
    generator = np.random.default_rng(seed)
    quantiles, shares = np.empty(splits), np.empty(splits)
    for split in range(splits):
        order = generator.permutation(len(sizes))
        half = len(sizes) // 2
        quantiles[split] = conformal_quantile(sizes[order[:half]].tolist(), keep)
        shares[split] = float((sizes[order[half:]] <= quantiles[split]).mean())
    return quantiles, shares


def print_coverage(measured: dict[str, Any], keeps: Sequence[float], splits: int) -> None:
    """Print q of all photos, and q and coverage over the splits: mean, and the range of 95 % of the splits."""
    half = measured["photos"] // 2
    print(f"\n{measured['model']}, {measured['photos']} photos; {splits} splits into {half} and {half}")
    for metric, by_method in measured["sizes"].items():
        print(f"\n{METRICS.get(metric, metric)}; shares of the patches\n")
        print("| keep | map | q, all photos | q of a split | coverage of a split |\n|--:|---|--:|--:|--:|")
        for keep in keeps:
            for method, listed in by_method.items():
                sizes = np.asarray(listed, dtype=np.float64)
                sizes = sizes[np.isfinite(sizes)]
                quantiles, shares = coverage(sizes, keep, splits, measured["seed"])
                whole = conformal_quantile(sizes.tolist(), keep)
                print(f"| {keep:g} | {method} | {whole:.3f} | {_range(quantiles)} | {_range(shares)} |")


def _range(values: Array) -> str:
    low, high = np.quantile(values, [0.025, 0.975])
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="simulated sizes")
    parser.add_argument("--data", help="photos: pets:PATH, folder:PATH, …")
    parser.add_argument("--split", help="of the data set")
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--model", default="pets")
    parser.add_argument("--arch", help="of a weights file, e.g. timm:vit_base_patch16_224")
    parser.add_argument("--labels", help="of a weights file")
    parser.add_argument("--resize", type=int, help="of a weights file: the short side before the crop, in pixels")
    parser.add_argument("--mean", type=float, help="of a weights file")
    parser.add_argument("--std", type=float, help="of a weights file")
    parser.add_argument("--method", action="append", help="repeatable")
    parser.add_argument("--metric", action="append", help="repeatable")
    parser.add_argument("--keep", action="append", type=float, help="repeatable; 0.8, 0.9 and 0.95")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for the sizes")
    parser.add_argument("--read", type=Path, help="a file that --json wrote, in place of photos")
    arguments = parser.parse_args()
    keeps = arguments.keep or [0.8, 0.9, 0.95]
    if arguments.simulate:
        for keep in keeps:
            simulate(keep, arguments.seed)
    measured = json.loads(arguments.read.read_text(encoding="utf-8")) if arguments.read else None
    if arguments.data:
        measured = measure(arguments)
        if arguments.json:
            write_json(measured, arguments.json)
    if measured is not None:
        print_coverage(measured, keeps, arguments.splits)


if __name__ == "__main__":
    main()
