"""Time explanations of this library and of others in one run, and how the cost grows with tokens, batch and layers.

    make bench                                                                   # installs the extra `bench` first
    OMP_WAIT_POLICY=passive python benchmarks/peers.py --rounds 9 --out out/bench.md
    python benchmarks/peers.py --device cuda --dtype bfloat16 --batch 32 --out out/bench-gpu.md

Every row is timed in every round, next to FB, one plain forward + backward to the input of the same model; medians of
the ratios are shown. A library that is not installed, or does not run here, has a row with the reason.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.errors import ClairWarning

Work = Callable[[], object]
GROWTH_METHODS = ("genatt", "attnlrp+plus", "rollout")


@dataclass(frozen=True)
class Row:
    """One line of a table: a piece of work next to FB of the same model."""

    task: str
    library: str
    seconds: float = 0.0
    ratio: float = 0.0
    reason: str = ""  # why it was not run


@dataclass(frozen=True)
class Setting:
    """The options of a run."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    rounds: int

    def images(self, size: int = 224, batch: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch or self.batch, 3, size, size, generator=generator)
        return images.to(self.device, self.dtype)

    def prepared(self, module: nn.Module) -> nn.Module:
        return module.eval().requires_grad_(False).to(self.device, self.dtype)


def plain_pass(module: nn.Module, pixels: Tensor) -> None:
    """FB: one forward and one backward to the input, with frozen weights."""
    image = pixels.clone().requires_grad_(True)
    torch.autograd.grad(module(image)[:, 0].sum(), image)


def timed(work: Work, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measured(jobs: dict[tuple[str, str], Work], plain: Work, setting: Setting) -> list[Row]:
    """Time each job in every round next to FB; jobs that fail get a row with the reason."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    ratios: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    failures: dict[tuple[str, str], str] = {}
    for turn in range(setting.rounds + 1):  # one to warm up
        reference = timed(plain, setting.device)
        for key, work in jobs.items():
            if key in failures:
                continue
            try:
                spent = timed(work, setting.device)
            except Exception as error:  # another library's failure is a row of the table, not the end of the run
                failures[key] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if turn:
                seconds[key].append(spent)
                ratios[key].append(spent / reference)
    return [
        Row(*key, reason=failures[key])
        if key in failures
        else Row(*key, statistics.median(seconds[key]), statistics.median(ratios[key]))
        for key in jobs
    ]


# The other libraries: each function returns the work of one map, on the module and images it is given


def grad_cam(module: Any, pixels: Tensor) -> Work:
    library: Any = importlib.import_module("pytorch_grad_cam")
    targets: Any = importlib.import_module("pytorch_grad_cam.utils.model_targets")
    side = module.patch_embed.grid_size[0]

    def reshape(tokens: Tensor) -> Tensor:
        return tokens[:, module.num_prefix_tokens :].reshape(len(tokens), side, side, -1).permute(0, 3, 1, 2)

    cam = library.GradCAM(model=module, target_layers=[module.blocks[-1].norm1], reshape_transform=reshape)
    classes = [targets.ClassifierOutputTarget(0)] * len(pixels)
    return lambda: cam(input_tensor=pixels.clone().requires_grad_(True), targets=classes)


def captum(name: str, **options: Any) -> Callable[[Any, Tensor], Work]:
    def make(module: Any, pixels: Tensor) -> Work:
        attribution = getattr(importlib.import_module("captum.attr"), name)(module)
        return lambda: attribution.attribute(pixels.clone().requires_grad_(True), target=0, **options)

    return make


def naive_rollout(module: Any, pixels: Tensor) -> Work:
    """Attention rollout as most blog posts have it: explicit attention, hooks, matrix products of N × N."""
    fused = [block.attn.fused_attn for block in module.blocks]

    def run() -> Tensor:
        attentions: list[Tensor] = []
        for block in module.blocks:
            block.attn.fused_attn = False
        hooks = [
            block.attn.attn_drop.register_forward_hook(lambda _, __, output: attentions.append(output))
            for block in module.blocks
        ]
        try:
            with torch.no_grad():
                module(pixels)
        finally:
            for hook, block, before in zip(hooks, module.blocks, fused, strict=True):
                hook.remove()
                block.attn.fused_attn = before
        rolled = torch.eye(attentions[0].shape[-1], device=pixels.device, dtype=pixels.dtype)
        for attention in attentions:
            mean = attention.mean(1) + torch.eye(attention.shape[-1], device=pixels.device, dtype=pixels.dtype)
            rolled = mean / mean.sum(-1, keepdim=True) @ rolled
        return rolled[:, 0, 1:]

    return run


def lxt(module: Any, pixels: Tensor) -> Work:
    """CP-LRP of lxt on torchvision's ViT; it patches the classes of torchvision for the rest of the process."""
    library: Any = importlib.import_module("lxt.efficient")
    library.monkey_patch(importlib.import_module("torchvision.models.vision_transformer"))

    def run() -> Tensor:
        image = pixels.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(module(image)[:, 0].sum(), image)
        return (image * gradient).sum(1)

    return run


def legrad(model: Any, pixels: Tensor) -> Work:
    library: Any = importlib.import_module("legrad")
    wrapper = library.LeWrapper(model, layer_index=0)  # every layer, as ours; its default is the last two
    prompt = torch.nn.functional.normalize(torch.ones(1, model.visual.output_dim, device=pixels.device), dim=-1)
    return lambda: wrapper.compute_legrad(prompt.to(pixels.dtype), image=pixels[:1])


def unavailable(make: Callable[[Any, Tensor], Work], module: Any, pixels: Tensor) -> Work:
    """Return the work, or work that fails with the reason why the library cannot be set up."""
    try:
        return make(module, pixels)
    except Exception as error:  # a missing or broken library is a row of the table
        reason = error

        def fail() -> None:
            raise reason

        return fail


# Tables


def compare_on_timm(setting: Setting) -> list[Row]:
    module = setting.prepared(timm.create_model("vit_base_patch16_224"))
    model, pixels = cv.wrap(module, name="ViT-B/16"), setting.images()

    ours = functools.partial(explaining, model, pixels)

    def theirs(make: Callable[[Any, Tensor], Work]) -> Work:
        return unavailable(make, module, pixels)

    jobs: dict[tuple[str, str], Work] = {
        ("Grad-CAM", "clairvit `gradcam`"): ours("gradcam"),
        ("Grad-CAM", "pytorch-grad-cam"): theirs(grad_cam),
        ("saliency", "clairvit `saliency`"): ours("saliency"),
        ("saliency", "captum Saliency"): theirs(captum("Saliency")),
        ("input × gradient", "clairvit `ixg(level=pixel)`"): ours("ixg(level=pixel)"),
        ("input × gradient", "captum InputXGradient"): theirs(captum("InputXGradient")),
        ("integrated gradients, 20 steps", "clairvit `integrated-gradients(steps=20)`"): ours(
            "integrated-gradients(steps=20)"
        ),
        ("integrated gradients, 20 steps", "captum IntegratedGradients"): theirs(
            captum("IntegratedGradients", n_steps=20, internal_batch_size=len(pixels))
        ),
        ("rollout", "clairvit `rollout`"): ours("rollout"),
        ("rollout", "hooks and matrix products"): theirs(naive_rollout),
        ("the default", "clairvit `attnlrp+plus`"): ours("attnlrp+plus"),
    }
    return measured(jobs, functools.partial(plain_pass, module, pixels), setting)


def compare_on_open_clip(setting: Setting) -> list[Row]:
    open_clip: Any = importlib.import_module("open_clip")
    tower: Any = setting.prepared(open_clip.create_model("ViT-B-16"))
    other = setting.prepared(open_clip.create_model("ViT-B-16"))  # LeGrad's wrapper changes what it is given
    pixels = setting.images(batch=1)
    model = cv.wrap(tower.visual, size=224, name="open_clip ViT-B/16")
    jobs = {
        ("LeGrad, every layer", "clairvit `legrad`"): explaining(model, pixels, "legrad"),
        ("LeGrad, every layer", "legrad_torch"): unavailable(legrad, other, pixels),
    }
    return measured(jobs, functools.partial(plain_pass, tower.visual, pixels), setting)


def compare_on_torchvision(setting: Setting) -> list[Row]:
    models: Any = importlib.import_module("torchvision.models")
    module, other = (setting.prepared(models.vit_b_16()) for _ in range(2))
    pixels = setting.images()
    model = cv.wrap(module, name="torchvision ViT-B/16")
    task = "CP-LRP"
    plain = functools.partial(plain_pass, module, pixels)
    ours = {(task, "clairvit `cp-lrp`"): explaining(model, pixels, "cp-lrp")}
    rows = measured(ours, plain, setting)
    return rows + measured({(task, "lxt"): unavailable(lxt, other, pixels)}, plain, setting)


def growth(
    setting: Setting, sizes: Sequence[int], batches: Sequence[int], depths: Sequence[int]
) -> Iterator[list[Row]]:
    """Yield one table for each side, batch and depth: FB grows with them, and the ratio should not."""
    cases = [("side", size, {"img_size": size}, size, 1) for size in sizes]
    cases += [("batch", batch, {}, 224, batch) for batch in batches]
    cases += [("layers", depth, {"depth": depth}, 224, 1) for depth in depths]
    for name, value, options, size, batch in cases:
        module = setting.prepared(timm.create_model("vit_small_patch16_224", **options))
        model, pixels = cv.wrap(module, size=size, name="ViT-S/16"), setting.images(size, batch)
        jobs = {(f"{name} {value}", method): explaining(model, pixels, method) for method in GROWTH_METHODS}
        yield measured(jobs, functools.partial(plain_pass, module, pixels), setting)


def explaining(model: cv.Model, pixels: Tensor, method: str) -> Work:
    return lambda: cv.explain(model, pixels, method, target=0)


def table(title: str, rows: Sequence[Row]) -> str:
    lines = [f"### {title}", "", "| task | library | ms | FB |", "|---|---|---|---|"]
    for row in rows:
        figures = f"{1000 * row.seconds:.1f} | {row.ratio:.2f}" if not row.reason else f"not run | {row.reason}"
        lines.append(f"| {row.task} | {row.library} | {figures} |")
    return "\n".join([*lines, ""])


def growth_table(tables: Sequence[Sequence[Row]]) -> str:
    lines = ["### ViT-S/16 as it grows, in FB of the same model", "", f"| | {' | '.join(GROWTH_METHODS)} |"]
    lines.append("|---" * (len(GROWTH_METHODS) + 1) + "|")
    for rows in tables:
        cells = [f"{row.ratio:.2f}" if not row.reason else row.reason for row in rows]
        lines.append(f"| {rows[0].task} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=numbers, default=[224, 384, 512], help="sides in pixels, multiples of 16")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--depths", type=numbers, default=[6, 12, 24])
    parser.add_argument("--out", type=Path, help="a Markdown file for the tables")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ClairWarning)  # zero maps of random models
    torch.set_num_threads(options.threads)
    setting = Setting(torch.device(options.device), getattr(torch, options.dtype), options.batch, options.rounds)
    processor = torch.cuda.get_device_name() if setting.device.type == "cuda" else platform.processor() or "CPU"
    heading = (
        f"{date.today()}, {processor}, {options.threads} thread(s), torch {torch.__version__}, {options.dtype}, batch "
        f"{options.batch}, median of {options.rounds} rounds.\n"
    )
    parts = [heading]
    parts.append(table("timm ViT-B/16", compare_on_timm(setting)))
    print("\n".join(parts), flush=True)
    parts.append(growth_table(list(growth(setting, options.sizes, options.batches, options.depths))))
    print(parts[-1], flush=True)
    for title, compare in (
        ("open_clip ViT-B/16, one image", compare_on_open_clip),
        ("torchvision ViT-B/16", compare_on_torchvision),
    ):
        parts.append(table(title, compare(setting)))
        print(parts[-1], flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
