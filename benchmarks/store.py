"""Time a large store before and after its parts are compacted: checksums, what is computed, a query, its size.

Times are CPU seconds, which other processes of the machine do not change.

OMP_NUM_THREADS=1 python benchmarks/store.py [--parts 500] [--methods 49] [--metrics 8]

A part holds 8 images by all methods and metrics; one metric in three keeps a curve of 15 steps.
The last column multiplies by 20 million cells over the cells measured: an estimate, for what grows with the cells.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clairvit.bench import store as store_module
from clairvit.bench.plan import Unit
from clairvit.bench.store import Row, Store

IMAGES = 8  # of a part
GOAL = 20_000_000  # cells: 50,000 images by 49 methods and 8 metrics


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def rows_of(part: int, methods: int, metrics: int) -> tuple[Unit, list[Row]]:
    numbers = tuple(range(part * IMAGES, (part + 1) * IMAGES))
    image_hashes = tuple(digest(f"image {number}")[:32] for number in numbers)
    method_names = tuple(f"method-{index}" for index in range(methods))
    metric_names = tuple(f"metric-{index}" for index in range(metrics))
    key = digest(f"unit {part}")[:32]
    unit = Unit(key, digest("model")[:32], 0, 0, numbers, image_hashes, method_names, metric_names, forwards=0)
    x, draw = [step / 14 for step in range(15)], random.Random(part)
    rows: list[Row] = []
    for (number, image_hash), method, (place, metric) in itertools.product(
        zip(numbers, image_hashes, strict=True), method_names, enumerate(metric_names)
    ):
        curve = [draw.random() for _ in x] if place % 3 == 0 else None
        rows.append(
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
                "value": draw.random(),
                "x": None if curve is None else x,
                "y": curve,
                "version": "1",
            }
        )
    return unit, rows


def timed(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of this process, all its threads together."""
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(title: str, store: Store, cells: int) -> None:
    """Print what one process pays that opens the store anew."""
    forget: Any = getattr(store_module, "forget_checks", lambda: None)
    forget()
    seconds = {
        "all checksums": timed(store.parts),
        "all checksums, again": timed(store.parts),
        "what is computed": timed(store.cells),
        "means by method and metric": timed(
            lambda: store.query("select method, metric, avg(value) from results group by all")
        ),
        "the same, again": timed(lambda: store.query("select method, metric, avg(value) from results group by all")),
    }
    files = list((store.path / "parts").glob("*.parquet"))
    size = sum(file.stat().st_size for file in files)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{title}: {len(files)} files, {size / 1e6:.0f} MB ({size / cells:.0f} bytes a cell)")
    print(f"peak memory of the process so far {peak:.0f} MB")
    for name, value in seconds.items():
        print(f"  {name:30} {value:8.2f} s   × {GOAL / cells:.0f}: {value * GOAL / cells:8.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=500)
    parser.add_argument("--methods", type=int, default=49)
    parser.add_argument("--metrics", type=int, default=8)
    parser.add_argument("--folder", help="keep the store here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        store = Store.open(Path(options.folder or temporary) / "store")
        started = time.process_time()
        if not store.parts()[0]:
            for part in range(options.parts):
                store.write(*rows_of(part, options.methods, options.metrics))
        cells = options.parts * IMAGES * options.methods * options.metrics
        print(f"{options.parts} parts, {options.parts * IMAGES} images, {cells} cells")
        print(f"written in {time.process_time() - started:.0f} s of the CPU")
        measure("as written", store, cells)
        if hasattr(store, "compact"):
            print(f"\ncompacted in {timed(store.compact):.1f} s of the CPU")
            measure("compacted", store, cells)


if __name__ == "__main__":
    main()
