"""Time the kernels of rollouts and of decomposition norms next to torch's own operations, on a GPU.

    python benchmarks/kernels.py                     # ViT-B/16, batch 32: 12 layers, 12 heads, 197 tokens, width 768

Torch's operations of a rollout are timed in a CUDA graph, so that the host does not count.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from clairvit.cuda import kernels
from clairvit.methods.aggregation import Product

LAYERS, HEADS, WIDTH = 12, 12, 768


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        work()
    event: Any = torch.cuda.Event  # carries no types
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def rollouts(batch: int, tokens: int) -> None:
    maps = torch.rand(LAYERS, batch, tokens, tokens, device="cuda") / tokens
    row = torch.rand(batch, 3, tokens, device="cuda")
    for product in (Product(), Product(normalise="rows")):
        by_kernel = milliseconds(functools.partial(product.steps, row, maps, row[:, 0]))
        with mock.patch.object(kernels, "rollout_applies", return_value=False):
            product.steps(row, maps, row[:, 0])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                product.steps(row, maps, row[:, 0])
        in_graph = milliseconds(graph.replay)
        print(f"rollout, normalise={product.normalise}: {by_kernel:.3f} ms, torch in a graph {in_graph:.3f}")


def distances(batch: int, tokens: int) -> None:
    from clairvit.cuda.kernels import decomposition

    A = torch.randn(batch, HEADS, tokens, tokens, device="cuda").softmax(-1)
    x, y = (torch.randn(batch, tokens, WIDTH, device="cuda") for _ in range(2))
    scale, rows = torch.ones(batch, tokens, 1, device="cuda"), torch.arange(tokens, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        f = torch.randn(HEADS, batch, tokens, WIDTH, device="cuda", dtype=dtype).transpose(0, 1)
        alti = milliseconds(functools.partial(decomposition.distances, A, scale, f, x, y, rows, 1))
        globenc = milliseconds(functools.partial(decomposition.distances, A, scale, f, x, None, rows, 2))
        print(f"one layer, {dtype}: L1 distances (alti) {alti:.3f} ms, L2 norms (globenc) {globenc:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=197)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("There is no GPU here; the kernels are tested on a CPU by tests/cuda/test_*_kernel*.py.")
    rollouts(options.batch, options.tokens)
    distances(options.batch, options.tokens)


if __name__ == "__main__":
    main()
