"""What explanations cost, in FB = one plain forward + backward to the input, measured in the same run.

    OMP_WAIT_POLICY=passive python benchmarks/trace.py                       # built-in model and ViT-B/16, one thread
    OMP_WAIT_POLICY=passive python benchmarks/trace.py --memory timm:vit_base_patch8_224       # peak memory, N = 785

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
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import ClairWarning
from clairvit.methods.registry import list_methods


def plain_pass(model: cv.Model, pixels: Tensor) -> None:
    image = pixels.clone().requires_grad_(True)
    torch.autograd.grad(model.logits(image)[:, 0].sum(), image)


# Methods that share one backward pass of the plain rule table.
PLAIN_TABLE_METHODS = [
    "raw-attention", "rollout", "grad-rollout", "attcam", "genatt", "gradsam",
    "gmar-l1", "gmar-l2", "focusvit", "ixg", "saliency", "gradcam",
    "cat", "attcat", "random", "center",
]  # fmt: skip
ALONE = ["attcam", "genatt", "gradsam", "gmar-l1", "focusvit", "grad-rollout", "legrad", "rollout", "decompx+skipplus"]
# Apart from the shared traces: other rule tables that sweep through every linear layer, many passes, a solver.
APART = ["transatt", "partial-lrp", "lrp", "deep-taylor", "globenc", "alti", "fullgrad(biases=implicit)"]
SLOW = ["tam", "smoothgrad", "integrated-gradients", "attention-flow(grid_pool=2)"]


def one_trace(*tables: str) -> list[str]:
    """Return the methods that need one forward and no more than one backward of each of these tables."""
    return [m.name for m in list_methods() if not m.slow and set(m.tables) <= set(tables)]


def decomposition_methods() -> list[str]:
    """Return the methods that decompose every block's sum in the forward pass: no table, but much work of their own."""
    return [m.name for m in list_methods() if m.family == "decomposition" and not m.tables]


def method_groups() -> dict[str, list[str]]:
    everything = one_trace("plain", "linear", "attnlrp")
    decomposed = decomposition_methods()
    plain, three = ([n for n in names if n not in decomposed] for names in (one_trace("plain"), everything))
    return {
        f"first light ({len(PLAIN_TABLE_METHODS)})": PLAIN_TABLE_METHODS,
        f"all plain but legrad ({len(plain) - 1})": [name for name in plain if name != "legrad"],
        f"all plain ({len(plain)})": plain,
        f"all plain, linear, attnlrp ({len(three)})": three,
        f"… and forward decomposition ({len(everything)})": everything,
    }


def rows(model: cv.Model, pixels: Tensor, slow: bool) -> dict[str, Callable[[], object]]:
    alone = [*ALONE, *APART, *(SLOW if slow else [])]
    return {
        "FB": lambda: plain_pass(model, pixels),
        **{name: functools.partial(cv.explain, model, pixels, name, target=0) for name in alone},
        **{
            name: functools.partial(cv.compare, model, pixels, methods, target=0, skip=True)
            for name, methods in method_groups().items()
        },
    }


def timings(model: cv.Model, pixels: Tensor, rounds: int, slow: bool) -> None:
    measured: dict[str, list[float]] = {}
    table = rows(model, pixels, slow)
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


def loaded(name: str, dtype: str) -> cv.Model:
    model = frozen(name)
    model.module.to(getattr(torch, dtype))
    return model


def peak(task: str, model: cv.Model) -> float:
    """Return the peak memory of one task above the loaded model, in MB: of the GPU, or without one of this process."""
    pixels = torch.randn(1, 3, *model.preprocess.size, device=model.device, dtype=model.dtype)
    actions: dict[str, Callable[[], object]] = {
        "FB": lambda: plain_pass(model, pixels),
        "legrad": lambda: cv.explain(model, pixels, "legrad", target=0),
        "genatt": lambda: cv.explain(model, pixels, "genatt", target=0),
        **{
            task: functools.partial(cv.compare, model, pixels, methods, target=0, skip=True)
            for task, methods in method_groups().items()
        },
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


def frozen(name: str, device: str | None = None) -> cv.Model:
    """Return a model with frozen weights, on the GPU if there is one and no device is named."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "pets":
        model = cv.load(name, device=device)
    else:
        module = timm.create_model(name.removeprefix("timm:"), num_classes=1000).eval().to(device)
        model = cv.wrap(module, size=module.pretrained_cfg["input_size"][-1], name=name)
    model.module.requires_grad_(False)  # the fairest baseline: FB spends nothing on weights
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", metavar="MODEL", help="peak memory of one image instead of time")
    parser.add_argument("--slow", action="store_true", help="time methods of many passes too")
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # one task of --memory, in its own process
    parser.add_argument("--models", default="pets,timm:vit_base_patch16_224")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ClairWarning)  # zero maps of random models
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak(arguments.peak, loaded(arguments.memory, arguments.dtype)))
    elif arguments.memory:
        tasks = ("FB", "genatt", "legrad", *method_groups())
        command = [sys.executable, __file__, "--memory", arguments.memory, "--dtype", arguments.dtype, "--peak"]
        if torch.cuda.is_available():  # torch itself counts GPU memory
            model = loaded(arguments.memory, arguments.dtype)
            peaks = {task: peak(task, model) for task in tasks}
        else:
            # Freed memory goes back at once, so that the peak is what was in use and not how the heap was cut up.
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            peaks = {
                task: float(subprocess.check_output([*command, task], env=environment).split()[-1]) for task in tasks
            }
        print(f"\nPeak memory at {arguments.memory}, {arguments.dtype}, above the loaded model")
        for task, megabytes in peaks.items():
            print(f"  {task:38s} {megabytes:8.0f} MB   {megabytes / peaks['FB']:5.2f} FB")
    else:
        for name in arguments.models.split(","):
            model = loaded(name, arguments.dtype)
            pixels = torch.randn(arguments.batch, 3, 224, 224, device=model.device, dtype=model.dtype)
            timings(model, pixels, arguments.rounds, arguments.slow)


if __name__ == "__main__":
    main()
