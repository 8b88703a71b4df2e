"""Every row of the speed table with its goal next to it, and why a row costs what it does.

    python benchmarks/goals.py                                               # GPU: ViT-B/16, batch 32, bfloat16
    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/goals.py --device cpu    # built-in, ViT-B/16, batch 1
    python benchmarks/goals.py --device cpu --counts                         # operations only, no times
    python benchmarks/goals.py --device cpu --parts                          # what every call pays beside the passes

A time is in FB, one plain forward + backward in the same round, or in F, one plain forward of one image; rows are timed
one after the other in every round, and the median of the ratios is shown, next to the ratio of the shortest times.
`captured` are the torch calls that went through Python, `launches` the kernels that the host started (on a CPU the aten
operations that compute something), `busy` the milliseconds of the GPU's kernels, those of a graph too, and `top` the
functions with the largest share of the device's time.
On a machine with other work use --processor: seconds of this process instead of the clock's (CPU only).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from trace import frozen, method_groups, plain_pass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import clairvit as cv
from clairvit.errors import ClairWarning
from clairvit.models.images import prepare
from clairvit.models.state_hash import state_hash
from clairvit.tracing.capture import Capture
from clairvit.tracing.fingerprint import fingerprint
from clairvit.tracing.module_state import frozen_eval
from clairvit.tracing.recording import record
from clairvit.tracing.structure import model_structure
from metrics import scoring

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync")
# Operations that only describe memory, or that are made of others.
NO_KERNEL = """
    view reshape transpose permute t detach detach_ expand expand_as slice select unsqueeze squeeze
    as_strided unbind alias narrow flatten unflatten chunk split view_as _unsafe_view _reshape_alias
    reshape_as numpy_T mT empty empty_like empty_strided new_empty resize_ set_ lift_fresh is_nonzero
    item result_type linear matmul layer_norm softmax to contiguous clone _to_copy
    scaled_dot_product_attention ones zeros full ones_like zeros_like full_like new_zeros new_ones
    new_full conv2d convolution
"""
DELETION_IMAGES, SAMPLES = 8, 2000


@dataclass(frozen=True)
class Row:
    """One row: what is run, its goal, and the unit: "FB", or "F" per `images` images or samples."""

    name: str
    action: Callable[[], object]
    goal: float | None = None
    unit: str = "FB"
    images: int = 1


def trace_rows(model: cv.Model, pixels: Tensor, goals: dict[str, float]) -> list[Row]:
    """Return the rows of one trace; `goals` by the names used here."""
    groups = dict(zip(("16", "28", "29", "33"), method_groups().values(), strict=False))
    alone = ("rollout", "genatt", "attnlrp+plus", "legrad", "globenc", "alti", "transatt", "lrp", "deep-taylor")
    rows = [Row("FB", lambda: plain_pass(model, pixels))]
    rows += [Row(n, functools.partial(cv.explain, model, pixels, n, target=0), goals.get(n)) for n in alone]
    for name, methods in groups.items():
        run = functools.partial(cv.compare, model, pixels, methods, target=0, skip=True)
        rows.append(Row(f"{len(methods)} methods", run, goals.get(name)))
    return rows


def perturbation_rows(model: cv.Model, vit: cv.Model, dtype: torch.dtype) -> list[Row]:
    """Return the rows whose unit is F: deletion with insertion, and KernelSHAP."""
    images = torch.randn(DELETION_IMAGES, 3, 224, 224, device=model.device)
    one = torch.randn(1, 3, 224, 224, device=vit.device, dtype=dtype)
    scores = scoring(model, images, ["deletion", "insertion"])

    def forward(net: cv.Model, pixels: Tensor) -> None:
        with torch.no_grad():
            net.logits(pixels)

    samples = one.expand(256, -1, -1, -1).contiguous()
    return [
        Row("F (built-in, batch 8)", lambda: forward(model, images), unit="F", images=DELETION_IMAGES),
        Row("deletion + insertion", scores, 12.0, "F", DELETION_IMAGES),
        Row("F (ViT-B/16, batch 256)", lambda: forward(vit, samples), unit="F", images=256),
        Row(
            "kernelshap, 2000 samples",
            lambda: cv.explain(vit, one, f"kernelshap(samples={SAMPLES})", target=0),
            1.0,
            "F",
            SAMPLES,
        ),
    ]


def measure(rows: list[Row], rounds: int, pixels: Tensor, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return seconds per row and round; rounds come before to warm up: on a GPU the fourth replays a captured graph."""
    seconds: dict[str, list[float]] = {row.name: [] for row in rows}
    warm_up = 4 if pixels.is_cuda else 2
    for turn in range(rounds + warm_up):
        for row in rows:
            started = clock()
            row.action()
            if pixels.is_cuda:
                torch.cuda.synchronize()
            if turn >= warm_up:
                seconds[row.name].append(clock() - started)
    return seconds


@contextmanager
def captured_calls() -> Iterator[list[int]]:
    """Count the torch calls that reach a capture, inside the `with`."""
    count, original = [0], Capture.__torch_function__

    def counted(self: Capture, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count[0] += 1
        return original(self, func, types, args, kwargs)

    Capture.__torch_function__ = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Capture.__torch_function__ = original  # type: ignore[method-assign]


def counts(row: Row, cuda: bool) -> tuple[int, int, float, str]:
    """Return captured calls, launches, the GPU's milliseconds, and what took most of the device's time."""
    row.action()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with captured_calls() as captured, profile(activities=activities) as profiler:
        row.action()
    events = profiler.key_averages()
    if cuda:
        launches = sum(event.count for event in events if event.key in LAUNCHES)
        shares = {event.key: event.self_device_time_total for event in events}
    else:
        described = NO_KERNEL.split()
        computed = [event for event in events if event.key.startswith("aten::") and event.key[6:] not in described]
        launches = sum(event.count for event in computed)
        shares = {event.key: event.self_cpu_time_total for event in events}
    total = sum(shares.values()) or 1
    top = sorted(shares, key=shares.__getitem__, reverse=True)[:3]
    busy = sum(event.self_device_time_total for event in events if event.device_type.name == "CUDA") / 1000
    return captured[0], launches, busy, ", ".join(f"{name[:40]} {shares[name] / total:.0%}" for name in top)


def report(title: str, rows: list[Row], pixels: Tensor, rounds: int, clock: Callable[[], float]) -> None:
    """Print one table; rounds 0: counts alone."""
    seconds = measure(rows, rounds, pixels, clock) if rounds else {}
    print(f"\n{title}")
    counted = f"{'captured':>9s} {'launches':>9s} {'busy':>7s}"
    print(f"  {'':26s} {'ms':>9s} {'ratio':>7s} {'of min':>7s} {'goal':>6s} {counted}  top")
    base = rows[0]
    for row in rows:
        if row.unit == "F" and row.name.startswith("F "):
            base = row
        captured, launches, busy, top = counts(row, pixels.is_cuda)
        if rounds:
            scale = base.images / row.images if row.unit == "F" else 1.0
            pairs = zip(seconds[row.name], seconds[base.name], strict=True)
            median = statistics.median(a / b * scale for a, b in pairs)
            least = min(seconds[row.name]) / min(seconds[base.name]) * scale
            times = f"{statistics.median(seconds[row.name]) * 1000:9.1f} {median:7.2f} {least:7.2f}"
        else:
            times = f"{'':9s} {'':7s} {'':7s}"
        goal = "" if row.goal is None else f"{row.goal:.2f}"
        print(f"  {row.name:26s} {times} {goal:>6s} {captured:9d} {launches:9d} {busy:7.1f}  {top}", flush=True)


def report_parts(name: str, model: cv.Model, pixels: Tensor, rounds: int, clock: Callable[[], float]) -> None:
    """Print the time of what every call pays beside its passes: the shortest of the rounds."""

    def freeze() -> None:
        with frozen_eval(model.module):
            pass

    parts: dict[str, Callable[[], object]] = {
        "FB": lambda: plain_pass(model, pixels),
        "forward with its graph": lambda: model.logits(pixels.clone().requires_grad_(True)),
        "record": lambda: record(model, pixels),
        "state_hash": lambda: state_hash(model.module),
        "prepare": lambda: prepare(pixels, model),
        "frozen_eval": freeze,
        "model_structure": lambda: model_structure(model, pixels),
        "fingerprint": lambda: fingerprint(model.module),
    }
    seconds = measure([Row(part, action) for part, action in parts.items()], rounds, pixels, clock)
    print(f"\n{name}: milliseconds, the shortest of {rounds}")
    for part, values in seconds.items():
        print(f"  {part:26s} {min(values) * 1000:9.3f}")


# Goals of issue 18, in FB.
H200 = {
    "genatt": 1.15, "rollout": 0.6, "16": 1.3, "28": 1.6, "29": 2.0, "33": 3.6, "attnlrp+plus": 1.5, "globenc": 2.0,
    "alti": 4.0,
}  # fmt: skip
CPU = {
    "pets": {"genatt": 1.08, "28": 1.4, "29": 1.6, "33": 2.6},
    "timm:vit_base_patch16_224": {"28": 1.1, "29": 1.25, "33": 2.2, "transatt": 3.0, "lrp": 2.4, "deep-taylor": 2.6},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="", help="on a CPU: some of pets,timm:vit_base_patch16_224")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", action="store_true", help="time what every call pays beside the passes")
    parser.add_argument("--counts", action="store_true", help="count operations, measure no time")
    parser.add_argument("--processor", action="store_true", help="processor seconds of this process (CPU)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ClairWarning)  # zero maps of random models
    rounds = 0 if arguments.counts else arguments.rounds
    clock = time.process_time if arguments.processor else time.perf_counter
    if arguments.device == "cuda":
        vit, dtype = frozen("timm:vit_base_patch16_224"), torch.bfloat16
        vit.module.to(dtype)
        pixels = torch.randn(32, 3, 224, 224, device="cuda", dtype=dtype)
        title = f"ViT-B/16, batch 32, bfloat16, {torch.cuda.get_device_name()}"
        report(title, trace_rows(vit, pixels, H200), pixels, rounds, clock)
        rows = perturbation_rows(frozen("pets"), vit, dtype)
        report("Perturbation", rows, pixels, min(rounds, 3), clock)
        return
    torch.set_num_threads(1)
    for name in arguments.models.split(",") if arguments.models else CPU:
        model, pixels = frozen(name, "cpu"), torch.randn(1, 3, 224, 224)
        if arguments.parts:
            report_parts(name, model, pixels, arguments.rounds, clock)
            continue
        report(f"{name}, batch 1, float32, one thread", trace_rows(model, pixels, CPU[name]), pixels, rounds, clock)


if __name__ == "__main__":
    main()
