"""Time explanations of this library and of others in one run, and how the cost grows with tokens, batch and layers.

    make bench                                                                   # installs the extra `bench` first
    OMP_WAIT_POLICY=passive python benchmarks/peers.py --rounds 9 --out out/bench.md
    python benchmarks/peers.py --processor                                       # on a CPU that others use, too
    python benchmarks/peers.py --only timm,torchvision --rounds 1                # some tables, quickly
    python benchmarks/peers.py --only growth --sizes 224,384 --batches 1,4 --depths 6
    python benchmarks/peers.py --device cuda --dtype bfloat16 --batch 32 --out out/bench-gpu.md

Every row is timed in every round, right after FB, one plain forward + backward to the input of the same model; medians
of the ratios are shown. Where FB takes more than 5 s, there is one round. A library that is not installed, or does not
run here, has a row with the reason. Where a library computes what ours does, the difference stands below the table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import importlib.metadata
import io
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

import clairvit as cv
from clairvit.compat.quantus import numpy_subsets
from clairvit.errors import ClairWarning
from metrics import scoring, scoring_by_quantus

Work = Callable[[], object]
Jobs = dict[tuple[str, str], Work]  # (task, library) -> the work of one row
GROWTH_METHODS = ("genatt", "attnlrp+plus", "rollout")
LONG = 5.0  # seconds of FB, from which one round is enough
QUANTUS_RUNS = 20
PACKAGES = (
    "captum",
    "grad-cam",
    "legrad-torch",
    "lxt",
    "quantus",
    "timm",
    "torchvision",
    "open_clip_torch",
    "transformers",
)


@dataclass(frozen=True)
class Row:
    """One line of a table: a piece of work next to FB of the same model."""

    task: str
    library: str
    seconds: float = 0.0
    ratio: float = 0.0
    plain: float = 0.0  # seconds of FB
    rounds: int = 0
    reason: str = ""  # why it was not run


@dataclass(frozen=True)
class Setting:
    """The options of a run."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    rounds: int
    processor: bool  # seconds of this process instead of the clock's

    def images(self, size: int = 224, batch: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch or self.batch, 3, size, size, generator=generator)
        return images.to(self.device, self.dtype)

    def prepared(self, module: nn.Module) -> nn.Module:
        return module.eval().requires_grad_(False).to(self.device, self.dtype)

    @property
    def warm_up(self) -> int:
        """The rounds before those that count; on a GPU the fourth replays a captured graph."""
        return 4 if self.device.type == "cuda" else 1

    def timed(self, work: Work) -> float:
        started = self.clock()
        work()
        return self.clock() - started

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.processor else time.perf_counter()


def plain_pass(module: nn.Module, pixels: Tensor) -> None:
    """FB: one forward and one backward to the input, with frozen weights."""
    image = pixels.clone().requires_grad_(True)
    torch.autograd.grad(module(image)[:, 0].sum(), image)


def measured(jobs: Jobs, plain: Work, setting: Setting) -> list[Row]:
    """Time each job right after FB in every round; one that fails has a row with the reason."""
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in jobs}  # (seconds, those of FB)
    failures: dict[tuple[str, str], str] = {}
    warm_up, rounds, turn = setting.warm_up, setting.rounds, 0
    while turn < warm_up + rounds:
        for key in [key for key in jobs if key not in failures]:
            reference = setting.timed(plain)
            try:
                spent = setting.timed(jobs[key])
            except Exception as error:  # another library's failure is a row of the table, not the end of the run
                failures[key] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            rounds = 1 if reference > LONG else rounds
            if turn >= warm_up:
                times[key].append((spent, reference))
        turn += 1
    return [Row(*key, reason=failures[key]) if key in failures else _median_row(key, times[key]) for key in jobs]


def _median_row(key: tuple[str, str], times: Sequence[tuple[float, float]]) -> Row:
    spent, plain = (statistics.median(column) for column in zip(*times, strict=True))
    return Row(*key, spent, statistics.median(a / b for a, b in times), plain, len(times))


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


PATCHED_BY_LXT: tuple[Any, ...] = (nn.GELU, nn.LayerNorm, nn.MultiheadAttention)


def lxt(module: Any, pixels: Tensor) -> Callable[[], Tensor]:
    """CP-LRP of lxt on torchvision's ViT: input × gradient with the classes of torch replaced by its own.

    lxt 2.1 replaces them for the rest of the process; here they are put back after each map, so that FB and our rows
    run on torch's own.
    """
    original = [kind.forward for kind in PATCHED_BY_LXT]
    try:
        _import_lxt().monkey_patch(importlib.import_module("torchvision.models.vision_transformer"))
        replaced = [kind.forward for kind in PATCHED_BY_LXT]
    finally:
        _set_forwards(original)
    if any(new is old for new, old in zip(replaced, original, strict=True)):
        raise RuntimeError("lxt did not replace all classes that its rules are for")

    def run() -> Tensor:
        _set_forwards(replaced)
        try:
            image = pixels.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(module(image)[:, 0].sum(), image)
        finally:
            _set_forwards(original)
        return (image * gradient).sum(1).detach()

    return run


def _import_lxt() -> Any:
    """Import lxt 2.1, whose copy of BERT imports a function that transformers 5 no longer has.

    Only `prune_heads` of that copy calls it, and no ViT does: the name alone is enough.
    """
    utilities: Any = importlib.import_module("transformers.pytorch_utils")
    if not hasattr(utilities, "find_pruneable_heads_and_indices"):
        utilities.find_pruneable_heads_and_indices = None
    return importlib.import_module("lxt.efficient")


def _set_forwards(forwards: Sequence[Any]) -> None:
    for kind, forward in zip(PATCHED_BY_LXT, forwards, strict=True):
        kind.forward = forward


def legrad(model: Any, pixels: Tensor) -> Work:
    library: Any = importlib.import_module("legrad")
    with contextlib.redirect_stdout(io.StringIO()):
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


def compare_on_timm(setting: Setting) -> str:
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
    return table("timm ViT-B/16", measured(jobs, functools.partial(plain_pass, module, pixels), setting))


def compare_metric(setting: Setting) -> str:
    """Time one metric by us and by Quantus, with the same parameters and draws, on a map that is there already."""
    module = setting.prepared(timm.create_model("vit_base_patch16_224"))
    model, pixels = cv.wrap(module, name="ViT-B/16"), setting.images()
    score = scoring(model, pixels, [f"faithfulness-correlation(compat=quantus,runs={QUANTUS_RUNS})"])

    def ours() -> Any:
        numpy_subsets.cache_clear()  # Quantus draws its sets each time
        return score()

    theirs: Any = unavailable(
        lambda _, images: scoring_by_quantus(model, images, "FaithfulnessCorrelation", nr_runs=QUANTUS_RUNS),
        module,
        pixels,
    )

    def agreement() -> str:
        np.random.seed(0)  # noqa: NPY002 - Quantus draws from this state, and ours, with seed 0, as it does
        return f"The scores: {float(ours()[0][0, 0]):.6f} and {float(theirs()[0]):.6f}."

    task = f"faithfulness correlation, {QUANTUS_RUNS} runs of 224 values"
    jobs = {(task, "clairvit `faithfulness-correlation(compat=quantus)`"): ours, (task, "Quantus"): theirs}
    rows = measured(jobs, functools.partial(plain_pass, module, pixels), setting)
    return table("A metric, timm ViT-B/16", rows, noted(agreement) if len(pixels) == 1 else "")


def compare_on_open_clip(setting: Setting) -> str:
    open_clip: Any = importlib.import_module("open_clip")
    tower: Any = setting.prepared(open_clip.create_model("ViT-B-16"))
    other = setting.prepared(open_clip.create_model("ViT-B-16"))  # LeGrad's wrapper changes what it is given
    pixels = setting.images(batch=1)
    model = cv.wrap(tower.visual, size=224, name="open_clip ViT-B/16")
    jobs = {
        ("LeGrad, every layer", "clairvit `legrad`"): explaining(model, pixels, "legrad"),
        ("LeGrad, every layer", "legrad_torch"): unavailable(legrad, other, pixels),
    }
    rows = measured(jobs, functools.partial(plain_pass, tower.visual, pixels), setting)
    return table("open_clip ViT-B/16, one image", rows)


def compare_on_torchvision(setting: Setting) -> str:
    models: Any = importlib.import_module("torchvision.models")
    module: Any = models.vit_b_16()
    nn.init.normal_(module.heads.head.weight, std=0.02)  # torchvision's are zero: so would be every map
    setting.prepared(module)
    pixels, method = setting.images(), "cp-lrp(level=pixel)"
    jobs = {
        ("CP-LRP", f"clairvit `{method}`"): explaining(cv.wrap(module, name="torchvision ViT-B/16"), pixels, method),
        ("CP-LRP", "lxt"): unavailable(lxt, module, pixels),
    }
    rows = measured(jobs, functools.partial(plain_pass, module, pixels), setting)
    return table("torchvision ViT-B/16", rows, noted(functools.partial(agreement_with_lxt, module, pixels[:1])))


def agreement_with_lxt(module: nn.Module, pixels: Tensor) -> str:
    """Return how far our map and plain input × gradient are from that of lxt, in float64, summed over patches."""
    exact, image = copy.deepcopy(module).double(), pixels.double()
    ours = cv.explain(cv.wrap(exact, name="float64"), image, "cp-lrp(level=pixel)", target=0).maps
    leaf = image.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(exact(leaf)[:, 0].sum(), leaf)
    theirs, plain = (by_patch(maps, ours) for maps in (lxt(exact, image)(), (image * gradient).sum(1)))
    largest = theirs.abs().max()
    off, plain_off = (float((maps.to(theirs) - theirs).abs().max() / largest) for maps in (ours, plain))
    return (
        f"Largest difference from the map of lxt in float64, of its largest value: ours {off:.1e}, plain input × "
        f"gradient {plain_off:.1e}."
    )


def by_patch(maps: Tensor, like: Tensor) -> Tensor:
    """Return sums over patches [B, rows, cols] of maps [B, H, W]."""
    side = maps.shape[-1] // like.shape[-1]
    return nn.functional.avg_pool2d(maps, side, divisor_override=1)


def noted(note: Callable[[], str]) -> str:
    try:
        return note()
    except Exception as error:  # of a library that is missing: its row has the reason
        return f"Not compared: {type(error).__name__}: {error}"


def growth(
    setting: Setting, sizes: Sequence[int], batches: Sequence[int], depths: Sequence[int]
) -> Iterator[tuple[int, list[Row]]]:
    """Yield tokens and rows for each side, batch and depth: FB grows with them, and the ratio should not.

    A patch has 16 pixels a side, or 14 for sides that 16 does not divide, such as 518 and 1022.
    """
    cases: list[tuple[str, dict[str, int], int, int]] = []
    for size in sizes:
        patch = 16 if size % 16 == 0 else 14
        cases.append((f"{size} px, patches of {patch}", {"img_size": size, "patch_size": patch}, size, 1))
    cases += [(f"batch {batch}", {}, 224, batch) for batch in batches]
    cases += [(f"{depth} layers", {"depth": depth}, 224, 1) for depth in depths]
    for name, options, size, batch in cases:
        module: Any = setting.prepared(timm.create_model("vit_small_patch16_224", **options))
        model, pixels = cv.wrap(module, size=size, name="ViT-S"), setting.images(size, batch)
        jobs = {(name, method): explaining(model, pixels, method) for method in GROWTH_METHODS}
        tokens = module.patch_embed.num_patches + module.num_prefix_tokens
        yield tokens, measured(jobs, functools.partial(plain_pass, module, pixels), setting)


def explaining(model: cv.Model, pixels: Tensor, method: str) -> Work:
    return lambda: cv.explain(model, pixels, method, target=0)


def table(title: str, rows: Sequence[Row], note: str = "") -> str:
    lines = [f"### {title}", "", "| task | library | ms | FB |", "|---|---|---|---|"]
    for row in rows:
        figures = f"{1000 * row.seconds:.1f} | {row.ratio:.2f}" if not row.reason else f"not run | {row.reason}"
        lines.append(f"| {row.task} | {row.library} | {figures} |")
    plain = [f"{1000 * row.plain:.1f}" for row in rows if not row.reason]
    lines += ["", f"FB next to each row: {', '.join(plain)} ms. {note}".rstrip()]
    return "\n".join([*lines, ""])


def growth_table(cases: Iterator[tuple[int, list[Row]]]) -> str:
    """Return the table of all cases; its rows are printed to stderr on the way."""
    lines = ["### ViT-S as it grows, in FB of the model of that size", ""]
    lines.append(f"| | tokens | FB, ms | {' | '.join(GROWTH_METHODS)} | rounds |")
    lines.append("|---" * (len(GROWTH_METHODS) + 4) + "|")
    for tokens, rows in cases:
        cells = [f"{row.ratio:.2f}" if not row.reason else row.reason for row in rows]
        done = [row for row in rows if not row.reason]
        plain = f"{1000 * statistics.median(row.plain for row in done):.0f}" if done else ""
        rounds = max((row.rounds for row in done), default=0)
        lines.append(f"| {rows[0].task} | {tokens} | {plain} | {' | '.join(cells)} | {rounds} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def versions() -> str:
    found = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


TABLES: dict[str, Callable[[Setting, argparse.Namespace], str]] = {
    "timm": lambda setting, _: compare_on_timm(setting),
    "metric": lambda setting, _: compare_metric(setting),
    "open_clip": lambda setting, _: compare_on_open_clip(setting),
    "torchvision": lambda setting, _: compare_on_torchvision(setting),
    "growth": lambda setting, options: growth_table(growth(setting, options.sizes, options.batches, options.depths)),
}


def names(text: str) -> list[str]:
    listed = text.split(",")
    if unknown := [name for name in listed if name not in TABLES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(TABLES)}")
    return listed


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor", action="store_true", help="processor seconds of this process (CPU)")
    parser.add_argument("--only", type=names, default=list(TABLES), help=f"some of {','.join(TABLES)}")
    parser.add_argument("--sizes", type=numbers, default=[224, 384, 518, 1022], help="multiples of 16 or 14 pixels")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--depths", type=numbers, default=[6, 12, 24])
    parser.add_argument("--out", type=Path, help="a Markdown file for the tables, written after each")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ClairWarning)  # zero maps of random models
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    processor_time = options.processor and device.type == "cpu"
    setting = Setting(device, getattr(torch, options.dtype), options.batch, options.rounds, processor_time)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    heading = (
        f"{date.today()}, {machine}, {options.threads} thread(s), torch {torch.__version__}, {options.dtype}, batch "
        f"{options.batch}, median of {options.rounds} rounds, {'processor' if processor_time else 'wall-clock'} time; "
        f"{versions()}.\n"
    )
    parts = [heading]
    print(heading, flush=True)
    for name in options.only:
        parts.append(TABLES[name](setting, options))
        print(parts[-1], flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
