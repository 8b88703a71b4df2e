"""Estimate a study of 50,000 images by all methods and eight metrics on 1 and 8 GPUs, from rates measured here.

    OMP_NUM_THREADS=1 python benchmarks/imagenet_estimate.py                            # built-in model, this CPU
    python benchmarks/imagenet_estimate.py --model timm:vit_base_patch16_224 --random-weights --device cuda \\
        --batch-size 32 --images 32 --autocast bfloat16 --save rates.json               # on a GPU
    python benchmarks/imagenet_estimate.py --rates rates.json                           # the table again

Maps are timed by family, all methods of one together, and each metric on the maps of a few methods: seconds of one
image and map. On the CPU times are processor seconds of all threads, so that busy neighbours count less. The table
multiplies; it assumes that eight GPUs are eight times as fast, which holds while decoding and storing keep up: below
the table is what each needs and what was measured. A rate that was not measured is not guessed.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import clairvit as cv
from clairvit.cli.arguments import resolve_methods
from clairvit.methods.spec import resolve_method
from clairvit.models.image_files import EncodedImage, read_image
from clairvit.models.images import to_pixels

METRICS = ("deletion", "insertion", "aopc", "saco", "road", "faithfulness-correlation", "sparseness", "complexity")
SCORED = ("attnlrp+plus", "rollout", "genatt")  # maps on which metrics are timed
GPUS = (1, 8)
BYTES_PER_CELL = 55  # benchmarks/store.py prints it; curves of 15 steps in one metric of three
PARTS_OF = 8  # images of a unit


@dataclass(frozen=True)
class Rates:
    """What was measured."""

    machine: str
    model: str
    images: int  # of each measurement
    methods: dict[str, int]  # family -> number of methods
    maps: dict[str, float]  # family -> seconds of one image by all its methods
    metrics: dict[str, float]  # seconds of one image and one map
    decode: float  # seconds of one image of 500 × 375 pixels, one thread
    memory: float  # bytes, the largest of the process or on the GPU


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median of some runs, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        started = clock(device)
        work()
        times.append(clock(device) - started)
    return statistics.median(times)


def photo() -> bytes:
    """Return the built-in photo as a JPEG of the usual size of ImageNet's."""
    buffer = io.BytesIO()
    read_image("demo").resize((500, 375)).save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def measure(options: argparse.Namespace) -> Rates:
    random: dict[str, Any] = {"pretrained": False} if options.random_weights else {}
    model = cv.load(options.model, device=options.device, **random)
    device, count = model.device, options.images
    run: dict[str, Any] = {"batch_size": options.batch_size, "autocast": options.autocast}
    encoded = photo()
    decode = seconds(
        lambda: to_pixels(read_image(EncodedImage("photo.jpg", encoded)), model.preprocess), torch.device("cpu"), 9
    )
    pixels = to_pixels(read_image(EncodedImage("photo.jpg", encoded)), model.preprocess)
    noise = torch.randn(count, *pixels.shape, generator=torch.Generator().manual_seed(0)) / 50
    images = (pixels + noise).to(device, model.dtype)
    names = [text for text in resolve_methods("all") if fits(model, images[:1], text)]
    families: dict[str, list[str]] = {}
    for text in names:
        families.setdefault(resolve_method(text).method.family, []).append(text)
    maps = {
        family: seconds(partial(cv.compare, model, images, group, **run), device, options.repeats) / count
        for family, group in families.items()
    }
    scored = [text for text in SCORED if text in {resolve_method(name).text for name in names}]
    made = seconds(lambda: cv.compare(model, images, scored, **run), device, options.repeats)
    metrics = {}
    for metric in METRICS:
        total = seconds(partial(score, model, images, scored, metric, run), device, options.repeats)
        metrics[metric] = max(0.0, total - made) / (count * len(scored))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    memory = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else peak
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.processor()}, 1 process"
    counts = {family: len(group) for family, group in families.items()}
    return Rates(machine, options.model, count, counts, maps, metrics, decode, memory)


def score(model: cv.Model, images: torch.Tensor, methods: list[str], metric: str, run: dict[str, Any]) -> None:
    cv.evaluate(model, images, methods, [metric], baselines=False, **run)


def fits(model: cv.Model, image: torch.Tensor, method: str) -> bool:
    try:
        cv.explain(model, image, method)
    except cv.NotApplicable:
        return False
    return True


def duration(value: float) -> str:
    """Return '40 s', '12 min', '3.5 h' or '4.1 days'."""
    for limit, divisor, unit in ((100.0, 1.0, "s"), (6000.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if value < limit:
            return f"{value / divisor:.3g} {unit}"
    return f"{value / 86400:.1f} days"


def report(rates: Rates, images: int) -> None:
    methods = sum(rates.methods.values())
    print(f"{rates.machine}; {rates.model}; rates of {rates.images} images; {images} images × {methods} methods × 8\n")
    print("| part | s per image | " + " | ".join(f"{gpus} device{'s' * (gpus > 1)}" for gpus in GPUS) + " |")
    print("|---|---|" + "---|" * len(GPUS))
    rows = {f"maps: {family} ({rates.methods[family]})": value for family, value in rates.maps.items()}
    rows |= {f"{metric} of {methods} maps": value * methods for metric, value in rates.metrics.items()}
    total = sum(rows.values())
    for title, value in {**rows, "all": total}.items():
        times = " | ".join(duration(value * images / gpus) for gpus in GPUS)
        print(f"| {title} | {value:.4g} | {times} |")
    print("\nWhat would break first:")
    cells = images * methods * len(METRICS)
    for gpus in GPUS:
        needed = gpus / total
        print(
            f"* decoding: {gpus} × {1 / total:.3g} images/s need {needed * rates.decode:.2g} threads of "
            f"{1 / rates.decode:.0f} images/s; one map alone by the quickest family "
            f"{gpus * rates.decode / min(rates.maps.values()):.2g}"
        )
    print(
        f"* the store: {cells / 1e6:.1f} million cells, about {cells * BYTES_PER_CELL / 1e9:.1f} GB, "
        f"{-(-images // PARTS_OF)} parts before --compact; a part every {PARTS_OF * total / max(GPUS):.2g} s from "
        f"{max(GPUS)} devices"
    )
    print(f"* memory: {rates.memory / 2**30:.2f} GiB at most with {rates.images} images at once; it does not grow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pets")
    parser.add_argument("--random-weights", action="store_true", help="download none: times are the same")
    parser.add_argument("--device")
    parser.add_argument("--images", type=int, default=4, help="images of each measurement")
    parser.add_argument("--total", type=int, default=50_000, help="images of the study")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--autocast")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rates", type=Path, help="read the rates instead of measuring them")
    parser.add_argument("--save", type=Path, help="write the rates as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore", cv.ClairWarning)  # of maps that are zero
    rates = Rates(**json.loads(options.rates.read_text())) if options.rates else measure(options)
    if options.save:
        options.save.write_text(json.dumps(asdict(rates), indent=1))
    report(rates, options.total)


if __name__ == "__main__":
    main()
