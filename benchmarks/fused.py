"""What large layers cost when they are read without [B, H, N, N] tensors. On a GPU, one command for everything:

    python benchmarks/fused.py      # parity and time of the kernels; memory and time of all plain methods

and on a CPU, memory alone (one process per row):

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/fused.py --sizes 518 --depth 6 --width 512

Three ways are compared: "matrices" (A and G of a layer at once, as before), "tiles" (of query rows) and, on a GPU,
"kernels" (sums computed in registers). FB is one plain forward + backward to the input in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from trace import decomposition_methods, one_trace, plain_pass, resident  # benchmarks/trace.py

import timm
import torch
from torch import Tensor

import clairvit as cv
from clairvit._entries import Entry, WeightedEntries
from clairvit.cuda import kernels
from clairvit.cuda.graphs import without_cuda_graphs
from clairvit.cuda.reductions import KernelReductions
from clairvit.errors import ClairWarning
from clairvit.tracing import attention_call
from clairvit.tracing.attention_call import AttentionCall
from clairvit.tracing.attention_reductions import AttentionReductions

WAYS = ("matrices", "tiles", "kernels")
PATCH = 14
# What the plan of all plain methods reads of a layer: rollout, two kinds of gmar, attcat; genatt, grad-rollout, gradsam
ROW_SUMS: list[Entry] = ["A", "AG+", "|G|"]
COLUMN_SUMS: list[Entry] = ["A", "A", "A", "A", "AG+", "AG+", "AG+"]


def choose_way(way: str) -> None:
    """Make the executor read every layer in one of the three ways."""
    attention_call.TILE_SHARE = 1e9 if way == "matrices" else 0.25
    if way == "tiles":
        kernels.attention_applies = lambda call: False


def vision_transformer(size: int, depth: int, width: int, dtype: torch.dtype) -> cv.Model:
    """Return ViT-L/14 (depth 24, width 1024) or a smaller one, with heads of 64 and random weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = timm.models.vision_transformer.VisionTransformer(
        img_size=size, patch_size=PATCH, embed_dim=width, depth=depth, num_heads=width // 64, num_classes=1000
    )
    module = module.eval().requires_grad_(False).to(device, dtype)
    return cv.wrap(module, size=size, name=f"ViT {width}×{depth}/{PATCH} at {size} px")


def plans() -> dict[str, list[str]]:
    plain = [name for name in one_trace("plain") if name not in decomposition_methods()]
    return {"genatt": ["genatt"], "all plain but legrad": [n for n in plain if n != "legrad"], "all plain": plain}


def action(model: cv.Model, pixels: Tensor, task: str) -> Callable[[], object]:
    if task == "FB":
        return lambda: plain_pass(model, pixels)
    return lambda: cv.compare(model, pixels, plans()[task], target=0, skip=True)


def peak(model: cv.Model, pixels: Tensor, task: str) -> float:
    """Return the peak memory above the loaded model, in MB: of the GPU if there is one, else of this process."""
    run = action(model, pixels, task)
    run()  # a first call also inspects the model
    if pixels.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    run()
    return (resident("VmHWM") - before) / 1024


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of a call; on a GPU between synchronisations."""
    run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[rounds // 2]


def random_call(tokens: int, heads: int, dtype: torch.dtype) -> tuple[AttentionCall, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dO = torch.randn(4, 1, heads, tokens, 64, generator=generator, device="cuda").to(dtype)
    return AttentionCall(v=v, outputs=(v,), forms=(lambda out: out,), q=q, k=k, scale=64**-0.5), dO


def all_sums(call: AttentionCall, dO: Tensor, *, use_kernels: bool) -> list[Tensor]:
    """Return all row and column sums that the plan of all plain methods reads of a layer."""
    kind = KernelReductions if use_kernels else AttentionReductions
    sums = kind(call, dO, attention_call.tile_bytes(call, 24))
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.rand(
        len(COLUMN_SUMS), 1, call.v.shape[1], call.queries, generator=generator, device="cuda", dtype=torch.float64
    )
    weights = weights.to(torch.promote_types(call.v.dtype, torch.float32))
    pairs = [WeightedEntries(entry, w) for entry, w in zip(COLUMN_SUMS, weights, strict=True)]
    return [*sums.row_sums(ROW_SUMS), *sums.column_sums(pairs)]


def kernel_table(rounds: int) -> None:
    """Print how far the kernels are from float64, and their time next to tiles of matrices."""
    print("\nOne layer, 16 heads of 64: row sums of A, AG+, |G| and seven column sums")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (197, 1370, 5330):
            call, dO = random_call(tokens, 16, dtype)
            assert call.q is not None
            assert call.k is not None
            exact_call = AttentionCall(
                v=call.v.double(),
                outputs=call.outputs,
                forms=call.forms,
                q=call.q.double(),
                k=call.k.double(),
                scale=call.scale,
            )
            exact = all_sums(exact_call, dO.double(), use_kernels=False)
            errors = {
                way: max(
                    float((a.double() - b).norm() / b.norm())
                    for a, b in zip(all_sums(call, dO, use_kernels=way == "kernels"), exact, strict=True)
                )
                for way in ("tiles", "kernels")
            }
            times = {
                way: seconds(functools.partial(all_sums, call, dO, use_kernels=way == "kernels"), rounds)
                for way in ("tiles", "kernels")
            }
            print(
                f"  {dtype!s:15s} N = {tokens:4d}   off float64: kernels {errors['kernels']:.1e}, tiles "
                f"{errors['tiles']:.1e}   ms: kernels {times['kernels'] * 1e3:.2f}, tiles {times['tiles'] * 1e3:.2f}"
            )


def map_table(size: int, depth: int, width: int) -> None:
    """Print how far the maps of kernels and tiles are from those of matrices, in float32."""
    model = vision_transformer(size, depth, width, torch.float32)
    pixels = torch.randn(1, 3, size, size, device=model.device, generator=torch.Generator("cuda").manual_seed(0))
    maps = {}
    for way in WAYS:
        applies = kernels.attention_applies
        choose_way(way)
        maps[way] = cv.compare(model, pixels, plans()["all plain"], target=0, skip=True)
        kernels.attention_applies = applies
    print(f"\nMaps of {model.name}, float32: |difference| / largest |value| of the map from matrices")
    for name, made in maps["matrices"].items():
        scale = float(made.maps.abs().max()) or 1.0
        apart = [float((maps[way][name].maps - made.maps).abs().max()) / scale for way in WAYS[1:]]
        if max(apart) > 0:
            print(f"  {name:20s} tiles {apart[0]:.1e}   kernels {apart[1]:.1e}")


def plan_table(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print peak memory and time of plans in each way, in this process: a GPU counts its own memory."""
    for size in arguments.sizes:
        model = vision_transformer(size, arguments.depth, arguments.width, dtype)
        pixels = torch.randn(1, 3, size, size, device=model.device, dtype=dtype)
        plain = (peak(model, pixels, "FB"), seconds(action(model, pixels, "FB"), arguments.rounds))
        print(f"\n{model.name}, N = {(size // PATCH) ** 2 + 1}, {dtype}: FB {plain[0]:.0f} MB, {plain[1] * 1e3:.1f} ms")
        for task in arguments.plans:
            for way in WAYS:
                applies = kernels.attention_applies
                choose_way(way)
                figures = (peak(model, pixels, task), seconds(action(model, pixels, task), arguments.rounds))
                kernels.attention_applies = applies
                ratios = f"{figures[0] / plain[0]:.2f} FB memory, {figures[1] / plain[1]:.2f} FB time"
                print(f"  {task:22s} {way:9s} {figures[0]:8.0f} MB  {figures[1] * 1e3:8.1f} ms   {ratios}")
        del model, pixels


def memory_of_processes(arguments: argparse.Namespace) -> None:
    """Print peak memory of plans on the CPU, each in a process of its own."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once
    shape = ["--depth", str(arguments.depth), "--width", str(arguments.width)]
    tasks = [("FB", ""), *((task, way) for task in arguments.plans for way in WAYS[:2])]
    for size in arguments.sizes:
        print(
            f"\nViT {arguments.width}×{arguments.depth}/{PATCH} at {size} px, N = {(size // PATCH) ** 2 + 1}, float32"
        )
        plain = 0.0
        for task, way in tasks:
            command = [sys.executable, __file__, *shape, "--sizes", str(size), "--task", task, "--way", way]
            megabytes = float(subprocess.check_output(command, env=environment).split()[-1])
            plain = plain or megabytes
            print(f"  {task:22s} {way:9s} {megabytes:8.0f} MB   {megabytes / plain:5.2f} FB", flush=True)


@without_cuda_graphs()  # the memory of a replay was taken when it was captured
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[518, 1022], help="pixels a side")
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plans", nargs="+", choices=list(plans()), default=list(plans()), help="rows of the tables")
    parser.add_argument("--task", help=argparse.SUPPRESS)  # one row of the CPU's table, in its own process
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ClairWarning)  # zero maps of random models
    if arguments.task:
        choose_way(arguments.way)
        model = vision_transformer(arguments.sizes[0], arguments.depth, arguments.width, torch.float32)
        pixels = torch.randn(1, 3, arguments.sizes[0], arguments.sizes[0])
        print(peak(model, pixels, arguments.task))
    elif torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        kernel_table(arguments.rounds)
        map_table(arguments.sizes[0], min(4, arguments.depth), arguments.width)
        for dtype in (torch.float32, torch.bfloat16):
            plan_table(arguments, dtype)
    else:
        memory_of_processes(arguments)


if __name__ == "__main__":
    main()
