"""Time a large store: checking its checksums, listing its cells, and one query.

OMP_NUM_THREADS=1 python benchmarks/store.py [--parts 2000]

A part holds 8 images by 5 methods and 3 metrics, one of which keeps a curve, as `clairvit bench` writes it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable
from typing import Any

from clairvit.bench.plan import Unit
from clairvit.bench.store import Row, Store

IMAGES, METHODS, METRICS = 8, ("legrad", "rollout", "genatt", "random", "center"), ("deletion", "insertion", "ap")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def rows_of(part: int) -> tuple[Unit, list[Row]]:
    numbers = tuple(range(part * IMAGES, (part + 1) * IMAGES))
    image_hashes = tuple(digest(f"image {number}") for number in numbers)
    unit = Unit(digest(f"unit {part}")[:32], digest("model"), 0, 0, numbers, image_hashes, METHODS, METRICS, forwards=0)
    curve = [step / 14 for step in range(15)]
    rows: list[Row] = [
        {
            "unit": unit.key,
            "model": "pets",
            "model_hash": unit.weights,
            "data": "folder:photos",
            "image": f"{number:06}.jpg",
            "image_hash": image_hash,
            "predicted": 0,
            "probability": 0.5,
            "method": method,
            "metric": metric,
            "settings": "seed=0",
            "options": "{}",
            "better": "higher",
            "value": number % 7 / 7,
            "x": curve if metric == "deletion" else None,
            "y": curve if metric == "deletion" else None,
        }
        for (number, image_hash), method, metric in itertools.product(
            zip(numbers, image_hashes, strict=True), METHODS, METRICS
        )
    ]
    return unit, rows


def timed(title: str, work: Callable[[], Any]) -> None:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    print(f"{title:40} {sorted(seconds)[1]:8.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=2000)
    count = parser.parse_args().parts
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"{folder}/store")
        for part in range(count):
            store.write(*rows_of(part))
        images = count * IMAGES
        print(f"{count} parts, {images} images, {images * len(METHODS) * len(METRICS)} cells; medians of three")
        timed("all checksums", store.parts)
        timed("what is done", store.cells)
        timed(
            "means by method and metric", lambda: store.query("select avg(value) from results group by method, metric")
        )


if __name__ == "__main__":
    main()
