"""decompx+skipplus against a direct forward decomposition: seconds, extra memory, and whether the maps are the same.

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/decompose.py                # ViT-B/16, one thread
    python benchmarks/decompose.py --model timm:vit_tiny_patch16_224                         # quicker

The direct way carries a vector for every pair of tokens, D[i, j, :] = what token i has from token j, from each start
layer through all blocks above it. It is written for timm's VisionTransformer, as plainly and as fast as we could.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from trace import frozen, plain_pass, resident  # benchmarks/trace.py
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clairvit as cv
from clairvit.tracing.rules.table import gelu_slope

METHOD = "decompx+skipplus"


def directly(model: cv.Model, pixels: Tensor, target: int) -> Tensor:
    """[N]: the sum over start layers ceil(L/2) … L-1 of each token's share of the logit, without biases."""
    vit: Any = model.module
    with torch.no_grad():
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(pixels))))
        inputs = []
        for block in vit.blocks:
            inputs.append(x)
            x = block(x)
        depth = len(vit.blocks)
        total: Tensor = x.new_zeros(x.shape[1])
        for start in range((depth + 1) // 2, depth):
            D = torch.diag_embed(inputs[start][0].T).permute(1, 2, 0).contiguous()  # [N to, N from, d]
            for block, true in zip(vit.blocks[start:], inputs[start:], strict=True):
                D = through(block, D, true[0])
            total += normed(vit.norm, D[:1], x[0, :1])[0] @ vit.head.weight[target]
        return total


def through(block: Any, D: Tensor, x: Tensor) -> Tensor:
    """One block: x [N, d] are its true tokens, D [N, N, d] what they are made of."""
    N, d = x.shape
    attention, heads = block.attn, block.attn.num_heads
    q, k, _ = attention.qkv(block.norm1(x)).view(N, 3, heads, -1).permute(1, 2, 0, 3)
    A = (q @ k.transpose(-2, -1) * attention.scale).softmax(-1)  # [H, N, N]
    value = F.linear(normed(block.norm1, D, x), attention.qkv.weight[2 * d :])  # [N, N, d]
    by_head = value.view(N, N * 1, heads, d // heads).permute(2, 0, 1, 3).reshape(heads, N, -1)
    mixed = (A @ by_head).view(heads, N, N, -1).permute(1, 2, 0, 3).reshape(N, N, d)
    D = D + F.linear(mixed, attention.proj.weight)
    x = x + attention(block.norm1(x)[None])[0]
    hidden = block.mlp.fc1(block.norm2(x))
    inner = F.linear(normed(block.norm2, D, x), block.mlp.fc1.weight).mul_(gelu_slope(hidden)[:, None])
    return D + F.linear(inner, block.mlp.fc2.weight)


def normed(norm: Any, D: Tensor, x: Tensor) -> Tensor:
    """LayerNorm's linear part at the true spread of x."""
    spread = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()  # [N, 1]
    return (D - D.mean(-1, keepdim=True)).mul_(spread[:, None]).mul_(norm.weight)


def measure(way: str, name: str) -> tuple[float, float, Tensor]:
    """Seconds, peak megabytes above the loaded model, and the map."""
    model = frozen(name)
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(model.device)
    rows, cols = cv.trace(model, pixels, 0).layout.grid
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    seconds = []
    for _ in range(1 if way == "direct" else 7):
        started = time.perf_counter()
        if way == "FB":
            plain_pass(model, pixels)
            token_map = torch.zeros(rows, cols)
        elif way == "direct":
            token_map = directly(model, pixels, 0)[-rows * cols :].view(rows, cols)
        else:
            token_map = cv.explain(model, pixels, METHOD, target=0).maps[0]
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), (resident("VmHWM") - before) / 1024, token_map.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="timm:vit_base_patch16_224")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", help=argparse.SUPPRESS)  # one of the two, in its own process
    parser.add_argument("--to", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.way:
        torch.save(measure(arguments.way, arguments.model), arguments.to)
        return
    results = {}
    for way in ("FB", METHOD, "direct"):
        to = f"/tmp/clairvit-{os.getpid()}-{way}.pt"
        command = [
            sys.executable,
            __file__,
            "--model",
            arguments.model,
            "--threads",
            str(arguments.threads),
            "--way",
            way,
        ]
        subprocess.run([*command, "--to", to], check=True, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"})
        results[way] = torch.load(to, weights_only=True)
        Path(to).unlink()
        print(f"{way:18s} {results[way][0]:9.2f} s   {results[way][1]:9.1f} MB", flush=True)
    (_, plain, _), (quick, small, our_map), (slow, big, direct_map) = results.values()
    difference = (direct_map - our_map).abs().max() / direct_map.abs().max()
    print(f"{slow / quick:.0f} times faster, {big / small:.1f} times less memory, largest difference {difference:.1e}")
    print(f"above what a plain forward + backward takes: {small - plain:.1f} MB against {big - plain:.1f} MB")


if __name__ == "__main__":
    main()
