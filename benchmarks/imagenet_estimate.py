"""Estimate a study of 50,000 images by all methods and eight metrics on 1 and 8 GPUs, from rates measured here.

    OMP_NUM_THREADS=1 python benchmarks/imagenet_estimate.py                            # built-in model, this CPU
    python benchmarks/imagenet_estimate.py --model timm:vit_base_patch16_224 --random-weights --device cuda \\
        --batch-size 32 --images 32 --autocast bfloat16 --save rates.json               # on a GPU
    python benchmarks/imagenet_estimate.py … --families cam,relevance --metrics road --save rates.json    # these alone
    python benchmarks/imagenet_estimate.py --rates rates.json                           # the table again

Maps are timed by family, all methods of one together, and each metric on the maps of a few methods: seconds of one
image and map. A first run warms up and is not counted, unless it took more than 5 s: then it is the measurement, and
there is no second. On the CPU times are processor seconds of all threads, so that busy neighbours count less. Each
measurement is printed to stderr and written to the file of --save when it is made, so that a run that is cut off keeps
what it has. --families and --metrics measure only what they name (an empty text: nothing) and add it to that file.

The table multiplies; it assumes that eight GPUs are eight times as fast, which holds while decoding and storing keep
up: below the table is what each needs and what was measured. A rate that was not measured is not guessed: the table
says which are missing, and is then of the methods that were measured.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import clairvit as cv
from clairvit.cli.arguments import resolve_methods
from clairvit.methods.registry import list_methods
from clairvit.models.image_files import EncodedImage, read_image
from clairvit.models.images import to_pixels

METRICS = ("deletion", "insertion", "aopc", "saco", "road", "faithfulness-correlation", "sparseness", "complexity")
SCORED = ("attnlrp+plus", "rollout", "genatt")  # maps on which metrics are timed
GPUS = (1, 8)
BYTES_PER_CELL = 55  # benchmarks/store.py prints it; curves of 15 steps in one metric of three
PARTS_OF = 8  # images of a unit
LONG = 5.0  # seconds: a first run that takes longer is the measurement


@dataclass
class Rates:
    """What was measured, and under which settings."""

    machine: str
    model: str
    images: int  # of each measurement
    batch_size: int | None
    autocast: str | None
    decode: float = 0.0  # seconds of one image of 500 × 375 pixels, one thread
    memory: float = 0.0  # bytes, the largest of the process or on the GPU
    methods: dict[str, int] = field(default_factory=dict)  # family -> number of methods that fit the model
    maps: dict[str, float] = field(default_factory=dict)  # family -> seconds of one image by all its methods
    metrics: dict[str, float] = field(default_factory=dict)  # seconds of one image and one map

    @property
    def settings(self) -> tuple[object, ...]:
        return self.machine, self.model, self.images, self.batch_size, self.autocast

    @property
    def missing(self) -> list[str]:
        """Return the rows that were not measured."""
        families = [f"maps of {family}" for family in families_of_all() if family not in self.maps]
        return families + [metric for metric in METRICS if metric not in self.metrics]

    def save(self, path: Path | None) -> None:
        """Write the file in one step, so that a run that is cut off leaves a whole one."""
        if path is not None:
            new = path.with_name(path.name + ".new")
            new.write_text(json.dumps(asdict(self), indent=1))
            new.replace(path)


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def timed(work: Callable[[], object], device: torch.device) -> float:
    started = clock(device)
    work()
    return clock(device) - started


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median of some runs after one that is not counted, or the first run if that is long."""
    first = timed(work, device)
    return first if first > LONG else statistics.median(timed(work, device) for _ in range(repeats))


def photo() -> bytes:
    """Return the built-in photo as a JPEG of the usual size of ImageNet's."""
    buffer = io.BytesIO()
    read_image("demo").resize((500, 375)).save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def families_of_all() -> dict[str, list[str]]:
    """Return family -> its methods; those of many passes stand each by itself. What does not fit is left out later."""
    families: dict[str, list[str]] = {}
    for spec in resolve_methods("all"):
        families.setdefault(spec.method.family, []).append(spec.text)
    return families | {method.name: [method.name] for method in list_methods() if method.slow}


class Measurement:
    """Times families and metrics of one model on a few images; every rate is shown and saved as soon as it is there."""

    def __init__(self, options: argparse.Namespace) -> None:
        random: dict[str, Any] = {"pretrained": False} if options.random_weights else {}
        self.model = cv.load(options.model, device=options.device, **random)
        self.device, self.repeats, self.path = self.model.device, options.repeats, options.save
        self.run: dict[str, Any] = {"batch_size": options.batch_size, "autocast": options.autocast}
        encoded = EncodedImage("photo.jpg", photo())
        pixels = to_pixels(read_image(encoded), self.model.preprocess)
        noise = torch.randn(options.images, *pixels.shape, generator=torch.Generator().manual_seed(0)) / 50
        self.images = (pixels + noise).to(self.device, self.model.dtype)
        cuda = self.device.type == "cuda"
        machine = torch.cuda.get_device_name() if cuda else f"{platform.processor() or platform.machine()}, 1 process"
        self.rates = Rates(machine, options.model, options.images, **self.run)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # processor seconds count threads that wait, too
        self.rates.decode = seconds(
            lambda: to_pixels(read_image(encoded), self.model.preprocess), torch.device("cpu"), 9
        )
        torch.set_num_threads(threads)

    def merge(self, earlier: Rates) -> None:
        """Keep what was measured earlier with the same settings."""
        if earlier.settings != self.rates.settings:
            raise SystemExit(
                f"{self.path} is of {earlier.settings}, and this run of {self.rates.settings}; choose another --save."
            )
        self.rates.methods, self.rates.maps, self.rates.metrics = earlier.methods, earlier.maps, earlier.metrics
        self.rates.memory = earlier.memory

    def explain(self, methods: list[str]) -> None:
        """Make the maps, and take the methods that do not fit the model off the list: no run to find out."""
        if methods:
            methods[:] = cv.compare(self.model, self.images, methods, skip=True, **self.run)

    def families(self, names: Iterable[str]) -> None:
        groups = families_of_all()
        for family in names:
            fitting = list(groups[family])
            value = seconds(partial(self.explain, fitting), self.device, self.repeats) / len(self.images)
            self.rates.methods[family], self.rates.maps[family] = len(fitting), value
            self.show(f"maps of {family} ({len(fitting)})", value)

    def metrics(self, names: Iterable[str]) -> None:
        scored, made = list(SCORED), None
        for metric in names:
            if made is None:
                made = seconds(partial(self.explain, scored), self.device, self.repeats)
            work = partial(cv.evaluate, self.model, self.images, scored, [metric], baselines=False, **self.run)
            total = seconds(work, self.device, self.repeats)
            self.rates.metrics[metric] = max(0.0, total - made) / (len(self.images) * len(scored))
            self.show(f"{metric} of one map", self.rates.metrics[metric])

    def show(self, title: str, value: float) -> None:
        cuda = self.device.type == "cuda"
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        memory = float(torch.cuda.max_memory_allocated()) if cuda else process
        self.rates.memory = max(self.rates.memory, memory)
        self.rates.save(self.path)
        print(f"{title}: {value:.4g} s per image", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> Rates:
    """Measure all, or only what is named, next to what the file has."""
    measurement = Measurement(options)
    everything = options.families is None and options.metrics is None
    if not everything and options.save and options.save.exists():
        measurement.merge(Rates(**json.loads(options.save.read_text())))
    measurement.families(families_of_all() if everything else options.families or ())
    measurement.metrics(METRICS if everything else options.metrics or ())
    return measurement.rates


def duration(value: float) -> str:
    """Return '40 s', '12 min', '3.5 h' or '4.1 days'."""
    for limit, divisor, unit in ((100.0, 1.0, "s"), (6000.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if value < limit:
            return f"{value / divisor:.3g} {unit}"
    return f"{value / 86400:.1f} days"


def report(rates: Rates, images: int) -> None:
    """Print the table, which rows it does not have, and what else a study needs."""
    methods, missing = sum(rates.methods.values()), rates.missing
    print(
        f"{rates.machine}; {rates.model}; rates of {rates.images} images; {images} images × {methods} methods × "
        f"{len(rates.metrics)} metrics\n"
    )
    print("| part | s per image | " + " | ".join(f"{gpus} device{'s' * (gpus > 1)}" for gpus in GPUS) + " |")
    print("|---|---|" + "---|" * len(GPUS))
    rows = {f"maps: {family} ({rates.methods[family]})": value for family, value in rates.maps.items()}
    rows |= {f"{metric} of {methods} maps": value * methods for metric, value in rates.metrics.items()}
    total = sum(rows.values())
    for title, value in {**rows, "the rows above" if missing else "all": total}.items():
        times = " | ".join(duration(value * images / gpus) for gpus in GPUS)
        print(f"| {title} | {value:.4g} | {times} |")
    if missing:
        print(f"\nNot measured, and in no figure here: {', '.join(missing)}.")
    if total and methods:
        report_limits(rates, images, methods, total)


def report_limits(rates: Rates, images: int, methods: int, total: float) -> None:
    """Print what decoding, the store and memory need for a study of `total` seconds per image."""
    print("\nWhat would break first:")
    quickest = min(value for family, value in rates.maps.items() if rates.methods[family])
    cells = images * methods * len(rates.metrics)
    for gpus in GPUS:
        needed = gpus / total
        print(
            f"* decoding: {gpus} × {1 / total:.3g} images/s need {needed * rates.decode:.2g} threads of "
            f"{1 / rates.decode:.0f} images/s; one map alone by the quickest family "
            f"{gpus * rates.decode / quickest:.2g}"
        )
    print(
        f"* the store: {cells / 1e6:.1f} million cells, about {cells * BYTES_PER_CELL / 1e9:.1f} GB, "
        f"{-(-images // PARTS_OF)} parts before --compact; a part every {PARTS_OF * total / max(GPUS):.2g} s from "
        f"{max(GPUS)} devices"
    )
    print(f"* memory: {rates.memory / 2**30:.2f} GiB at most with {rates.images} images at once; it does not grow")


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of names separated by commas, each one of those known."""
    choices = list(known)

    def parse(text: str) -> list[str]:
        names = [part.strip() for part in text.split(",") if part.strip()]
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(choices)}")
        return names

    return parse


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
    parser.add_argument("--families", type=names_of(families_of_all()), help="measure these alone, e.g. cam,relevance")
    parser.add_argument("--metrics", type=names_of(METRICS), help="measure these alone")
    parser.add_argument("--rates", type=Path, help="read the rates instead of measuring them")
    parser.add_argument("--save", type=Path, help="write the rates as JSON, after every measurement")
    options = parser.parse_args()
    warnings.simplefilter("ignore", cv.ClairWarning)  # of maps that are zero
    report(Rates(**json.loads(options.rates.read_text())) if options.rates else measure(options), options.total)


if __name__ == "__main__":
    main()
