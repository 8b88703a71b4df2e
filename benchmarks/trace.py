"""What explanations cost, in FB = one plain forward + backward to the input, measured in the same run.

    OMP_WAIT_POLICY=passive python benchmarks/trace.py                       # built-in model and ViT-B/16, one thread
    OMP_WAIT_POLICY=passive python benchmarks/trace.py --memory              # peak memory at ViT-B/8 (N = 785)

Every round times all rows one after the other, so that a busy machine slows them alike; medians are shown.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import clairvit as cv
from clairvit.methods.method import methods


def plain_pass(model: cv.Model, pixels: Tensor) -> None:
    image = pixels.clone().requires_grad_(True)
    torch.autograd.grad(model.logits(image)[:, 0].sum(), image)


# The methods of first light, which the first budgets speak of: one backward of the plain table serves these …
ONE_BACKWARD = [
    "raw-attention", "rollout", "grad-rollout", "attcam", "genatt", "gradsam",
    "gmar-l1", "gmar-l2", "focusvit", "ixg", "saliency", "gradcam",
    "cat", "attcat", "random", "center",
]  # fmt: skip
OWN_BACKWARD = ["legrad"]  # … LeGrad goes back through each block by itself …
OTHER_TABLES = ["decompx", "attnlrp"]  # … and each of these has a table of its own.


def rows(model: cv.Model, pixels: Tensor) -> dict[str, Callable[[], object]]:
    one_trace = [m.name for m in methods() if not m.slow]
    alone = [
        "attcam",
        "genatt",
        "gradsam",
        "gmar-l1",
        "focusvit",
        "grad-rollout",
        "legrad",
        "rollout",
        "decompx+skipplus",
    ]
    together = {
        f"first light, one plain backward ({len(ONE_BACKWARD)})": ONE_BACKWARD,
        f"… and legrad ({len(ONE_BACKWARD) + 1})": ONE_BACKWARD + OWN_BACKWARD,
        f"… and linear, attnlrp ({len(ONE_BACKWARD) + 3})": ONE_BACKWARD + OWN_BACKWARD + OTHER_TABLES,
        f"all one-trace methods ({len(one_trace)})": one_trace,
    }
    return {
        "FB": lambda: plain_pass(model, pixels),
        **{name: functools.partial(cv.explain, model, pixels, name, target=0) for name in alone},
        **{name: functools.partial(cv.compare, model, pixels, some, target=0) for name, some in together.items()},
    }


def timings(model: cv.Model, pixels: Tensor, rounds: int) -> None:
    measured: dict[str, list[float]] = {}
    table = rows(model, pixels)
    for turn in range(rounds + 2):  # two to warm up
        for name, action in table.items():
            started = time.perf_counter()
            action()
            if pixels.is_cuda:
                torch.cuda.synchronize()
            if turn >= 2:
                measured.setdefault(name, []).append(time.perf_counter() - started)
    plain = statistics.median(measured["FB"])
    print(
        f"\n{model.name}, batch {len(pixels)}, {pixels.dtype}, {pixels.device}: "
        f"FB = {plain * 1000:.1f} ms, median of {rounds}"
    )
    for name, seconds in measured.items():
        ratios = [s / fb for s, fb in zip(seconds, measured["FB"], strict=True)]
        print(f"  {name:38s} {statistics.median(seconds) * 1000:8.1f} ms   {statistics.median(ratios):5.2f} FB")


def peak(task: str) -> float:
    """Peak memory of one task above the loaded model, in MB: of the GPU if there is one, else of this process."""
    model = frozen("timm:vit_base_patch8_224")
    pixels = torch.randn(1, 3, 224, 224, device=model.device)
    actions: dict[str, Callable[[], object]] = {
        "FB": lambda: plain_pass(model, pixels),
        "all plain methods": lambda: cv.compare(
            model, pixels, [m.name for m in methods() if not m.slow and m.rules in (None, "plain")], target=0
        ),
        "legrad": lambda: cv.explain(model, pixels, "legrad", target=0),
        "genatt": lambda: cv.explain(model, pixels, "genatt", target=0),
        "all methods": lambda: cv.compare(model, pixels, [m.name for m in methods() if not m.slow], target=0),
    }
    action = actions[task]
    action()  # once to warm up: a first call also looks at the model's anatomy
    if pixels.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    action()
    return (resident("VmHWM") - before) / 1024


def resident(which: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which))


def frozen(name: str) -> cv.Model:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = cv.load(name, pretrained=name == "pets", device=device)
    model.module.requires_grad_(False)  # the fairest baseline: FB spends nothing on weights
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="peak memory at ViT-B/8 instead of time")
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # one task of --memory, in its own process
    parser.add_argument("--models", default="pets,timm:vit_base_patch16_224")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(peak(given.peak))
    elif given.memory:
        tasks = ("FB", "genatt", "legrad", "all plain methods", "all methods")
        # Freed memory goes back at once, so that the peak is what was in use and not how the heap was cut up.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        found = {
            task: float(subprocess.check_output([sys.executable, __file__, "--peak", task], env=environment))
            for task in tasks
        }
        print("\nPeak memory at ViT-B/8, 224 px (N = 785), above the loaded model")
        for task, megabytes in found.items():
            print(f"  {task:38s} {megabytes:8.0f} MB   {megabytes / found['FB']:5.2f} FB")
    else:
        for name in given.models.split(","):
            model = frozen(name)
            model.module.to(getattr(torch, given.dtype))
            pixels = torch.randn(given.batch, 3, 224, 224, device=model.device, dtype=model.dtype)
            timings(model, pixels, given.rounds)


if __name__ == "__main__":
    main()
