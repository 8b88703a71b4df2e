"""What a sample costs, in F = one plain forward of one image, measured before and after every row of the same run.

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/perturb.py             # 1000 samples, built-in model
    pip install captum scikit-learn                                                    # for the rows of captum
    python benchmarks/perturb.py --model timm:vit_base_patch16_224 --device cuda --batch 256

Forwards are images that went through the model, counted by a hook at its head; F a sample is seconds over those of
a plain forward in batches of the same size. A forward of half the tokens is a forward, and about half an F.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import clairvit as cv
from clairvit.models.images import prepare

OURS = ["lime", "lime(removal=mean)", "kernelshap", "kernelshap(removal=mean)", "rise", "hsic"]


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    forwards: int
    plain: float  # seconds of a plain forward of one image, around this row


def plain_forward(model: cv.Model, pixels: Tensor, batch: int) -> float:
    """Seconds for one image, the median of three."""
    images = pixels.expand(batch, -1, -1, -1).contiguous()
    seconds_per_image = []
    for _ in range(3):
        started = time.perf_counter()
        with torch.no_grad():
            model.logits(images)
        settled(pixels)
        seconds_per_image.append((time.perf_counter() - started) / batch)
    return statistics.median(seconds_per_image)


def settled(pixels: Tensor) -> None:
    if pixels.is_cuda:
        torch.cuda.synchronize()


def patch_labels(model: cv.Model, pixels: Tensor) -> Tensor:
    """[1, 1, H, W]: the number of the patch that each pixel is in, which captum calls a feature mask."""
    rows, cols = cv.trace(model, pixels).layout.grid
    numbers = torch.arange(rows * cols, device=pixels.device).reshape(1, 1, rows, cols)
    return numbers.repeat_interleave(pixels.shape[2] // rows, 2).repeat_interleave(pixels.shape[3] // cols, 3)


def captums(model: cv.Model, pixels: Tensor, target: int, samples: int, batch: int) -> dict[str, Callable[[], object]]:
    """captum over the same patches, as many variants in a pass as we use; nothing where it is not installed."""
    try:
        attr: Any = importlib.import_module("captum.attr")
    except ImportError:
        return {}
    labels = patch_labels(model, pixels)
    options = {"target": target, "feature_mask": labels, "n_samples": samples, "perturbations_per_eval": batch}
    return {
        f"captum {kind}": functools.partial(getattr(attr, kind)(model.logits).attribute, pixels, **options)
        for kind in ("Lime", "KernelShap")
    }


def ours(model: cv.Model, pixels: Tensor, target: int, samples: int, batch: int | None) -> dict[str, Callable[[], Any]]:
    return {
        name: functools.partial(cv.explain, model, pixels, name, target, samples=samples, batch_size=batch)
        for name in OURS
    }


def measured(
    name: str, action: Callable[[], object], warm_up: Callable[[], object], model: cv.Model, pixels: Tensor, batch: int
) -> Row:
    """Seconds, images through the model and F, all of this one run."""
    batch_sizes: list[int] = []
    warm_up()
    head = list(model.module.children())[-1]
    before = plain_forward(model, pixels, batch)
    hook = head.register_forward_hook(lambda module, args, out: batch_sizes.append(len(out)))
    try:
        with torch.no_grad():
            started = time.perf_counter()
            action()
            settled(pixels)
            seconds = time.perf_counter() - started
    finally:
        hook.remove()
    return Row(name, seconds, sum(batch_sizes), (before + plain_forward(model, pixels, batch)) / 2)


def report(rows: list[Row], samples: int) -> None:
    print(f"| {samples} samples | seconds | forwards | F = ms | F a sample |")
    print("|---|---|---|---|---|")
    for row in rows:
        each = row.seconds / row.plain / samples
        print(f"| {row.name} | {row.seconds:.1f} | {row.forwards} | {1000 * row.plain:.1f} | {each:.2f} |")
    by_name = {row.name: row.seconds / row.plain for row in rows}
    for method, captum_name in (("lime", "captum Lime"), ("kernelshap", "captum KernelShap")):
        if captum_name in by_name:
            print(
                f"{captum_name} / {method}: {by_name[captum_name] / by_name[method]:.2f} times the forward-equivalents"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pets")
    parser.add_argument("--device", default=None)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="variants in one pass of captum and of a plain forward")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    model = cv.load(arguments.model, pretrained=arguments.model == "pets", device=arguments.device)
    model.module.to(getattr(torch, arguments.dtype))
    pixels = prepare("demo", model).pixels.to(model.device, model.dtype)
    target = int(model.logits(pixels).argmax())
    cv.explain(model, pixels, "lime", target, samples=20)  # how tokens are dropped is found out once, not per map
    rows = []
    actions = captums(model, pixels, target, arguments.samples, arguments.batch) | ours(
        model, pixels, target, arguments.samples, arguments.batch if arguments.device else None
    )
    few = captums(model, pixels, target, 20, arguments.batch) | ours(
        model, pixels, target, 20, None
    )  # imports, kernels
    for name, action in actions.items():
        rows.append(measured(name, action, few[name], model, pixels, arguments.batch))
    if len(actions) == len(OURS):
        print("captum is not installed, so its rows are missing: pip install captum scikit-learn")
    report(rows, arguments.samples)


if __name__ == "__main__":
    main()
