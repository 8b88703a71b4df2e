"""Many passes: gradients averaged over noise (SmoothGrad), on the way from a baseline (IG), over brightness (TAM).

All three run the same model on other inputs for the same target. A variant k is a whole batch [B, …]; `passes` runs
several variants at once and hands back their traces. What that costs is counted by `Trace.again`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.methods.aggregation import layer_index, reading
from clairvit.methods.explanation import Cost
from clairvit.methods.gradient import per_patch
from clairvit.methods.layer_view import mean_of_heads
from clairvit.methods.registry import FORWARD, NOTHING, ExtraCost, Requires, method
from clairvit.methods.result import MapResult
from clairvit.perturbation.batching import BatchBudget, in_batches
from clairvit.perturbation.progress import report_progress
from clairvit.perturbation.rng import image_seeds, make_generator
from clairvit.tracing.attention import widened
from clairvit.tracing.trace import GradientScope, Trace

Made = TypeVar("Made")
Level = Literal["patch", "pixel"]
Rule = Literal["midpoint", "crowded", "right", "trapezoid", "gauss"]

AT_ONCE = 8 * 224 * 224  # pixels in one batch of variants: eight usual images keep a processor busy
AT_PIXELS = GradientScope(attention=False, tokens=False)
AT_TOKENS = GradientScope(attention=False, pixels=False)


def passes(
    trace: Trace, count: int, variant: Callable[[int], Tensor], reach: GradientScope, what: str
) -> Iterator[tuple[range, Trace]]:
    """Traces of variant(0) … variant(count - 1), several at once. A variant is pixels [B, 3, H, W] or x^0 [B, N, d]."""

    def run(ks: range) -> Trace:
        return trace.again(torch.cat([variant(k) for k in ks]).to(trace.pixels.dtype), reach=reach)

    return several(trace, count, run, what)


def several(trace: Trace, count: int, run: Callable[[range], Made], what: str) -> Iterator[tuple[range, Made]]:
    """run(ks) for variants 0 … count - 1 of the whole batch, several at once."""
    images, each = len(trace.pixels), trace.pixels[:, 0].numel()
    # The user's own function may know the images of the batch by their place.
    alone = trace.target is not None and trace.target.together
    with report_progress(what, count) as tell:
        budget = BatchBudget(each if alone else AT_ONCE, trace.recording.options.batch_size)
        for ks, made in in_batches(count, budget, each, run, images_per_variant=images):
            yield ks, made
            tell(len(ks))


def by_variant(tensor: Tensor, trace: Trace) -> Tensor:
    """[V·B, …] -> [V, B, …], in float32 at least."""
    return widened(tensor).reshape(-1, len(trace.pixels), *tensor.shape[1:])


def on_grid(row: Tensor, trace: Trace) -> Tensor:
    """[B, N] without its prefix tokens, as [B, rows, cols]."""
    layout, first = trace.in_order, trace.layers[0]
    grid = first.grid if first.call is None and first.grid is not None else layout.grid  # a CNN's first stage is larger
    return row[:, layout.prefix :].reshape(len(row), *grid)


def at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise BadInput(f"{name}={value} was given; expected 1 or more passes, such as {name}=50.")


# SmoothGrad


@method(
    "smoothgrad",
    family="gradient",
    paper="Smilkov et al., 2017",
    output="image",
    requires=NOTHING,
    extra_cost=ExtraCost(lambda n, **_: Cost(n, n), slow=True),
)
def smoothgrad(
    trace: Trace,
    n: int = 50,
    sigma: float = 0.1,
    base: Literal["grad", "ixg"] = "grad",
    each: Literal["signed", "abs", "square"] = "signed",
    level: Level = "patch",
    seed: int = 0,
) -> Tensor:
    """max_channel |mean_k dy/dpixel(x + e_k)|, averaged over each patch, e_k noise: saliency without its flicker.

    The noise has std sigma·(max − min) of the normalised image. `each` is what is averaged: gradients as they are,
    their absolute values or squares. `base=ixg` averages (x + e_k) × gradient and adds it up over a patch, signs kept.
    """
    at_least_one("n", n)
    noisy = noisy_images(trace, sigma, seed)
    total = torch.zeros_like(widened(trace.pixels))
    for _, made in passes(trace, n, noisy, AT_PIXELS, "smoothgrad"):
        said = made.dpixels if base == "grad" else widened(made.pixels) * widened(made.dpixels)
        part = by_variant(said, trace)  # [V, B, 3, H, W]
        total += {"signed": lambda g: g, "abs": torch.abs, "square": torch.square}[each](part).sum(0)
    mean = total / n
    return (
        on_image(mean.abs().amax(1), trace, level, "mean")
        if base == "grad"
        else on_image(mean.sum(1), trace, level, "sum")
    )


def noisy_images(trace: Trace, sigma: float, seed: int) -> Callable[[int], Tensor]:
    """k -> the images with their k-th noise, [B, 3, H, W]; its std is sigma·(max − min) of each image."""
    if sigma < 0:
        raise BadInput(f"sigma={sigma} was given; expected 0 or more parts of the image's range, such as 0.1.")
    x = widened(trace.pixels)
    spread = sigma * (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))  # [B, 1, 1, 1]
    marks = image_seeds(trace.pixels, seed)
    return lambda k: x + spread * torch.stack([noise(mark, k, x) for mark in marks])


def noise(mark: int, k: int, like: Tensor) -> Tensor:
    """The k-th standard normal image [3, H, W] of a fingerprint."""
    return torch.randn(like.shape[1:], generator=make_generator(mark, k)).to(like)


def on_image(image: Tensor, trace: Trace, level: Level, how: Literal["sum", "mean"]) -> Tensor:
    """[B, H, W] as it is, or pooled to the patches; a model without patches (CNN) has pixels only."""
    layout = trace.recording.structure.layout
    return image if level == "pixel" or layout is None else per_patch(image, layout.grid, how)


# Integrated Gradients


@method(
    "integrated-gradients",
    family="gradient",
    paper="Sundararajan et al., ICML 2017",
    output="image",
    requires=FORWARD,
    # the baseline's own score is for the residual
    extra_cost=ExtraCost(lambda steps, **_: Cost(steps + 1, steps), slow=True),
    signed=True,
)
def integrated_gradients(
    trace: Trace,
    steps: int = 50,
    rule: Rule = "midpoint",
    path: Literal["pixel", "token"] = "pixel",
    baseline: Literal["zero", "black", "white"] = "zero",
    level: Level = "patch",
) -> MapResult:
    """(x − x')·mean_k dy/dx(x' + alpha_k (x − x')): what each patch adds to the score on the way from x' to the image.

    x' is the mean colour (zero in normalised space), black or white. `path=token` goes from zeros at the patch tokens
    of the first block, prefix kept. LayerNorm hides the length of a token, so most of that way happens in its first
    steps, where `rule=crowded` puts its points (alpha = u⁴). Other rules: midpoints, k/steps (right, the paper's), both
    ends (trapezoid), Gauss-Legendre (captum's). The notes say how far the map is from adding up to the score's rise.
    """
    at_least_one("steps", steps)
    if path == "token" and (baseline != "zero" or level != "patch"):
        raise BadInput(
            f"path=token was given with baseline={baseline} and level={level}; on that path there are tokens and no "
            "pixels. Leave both out, or use path=pixel."
        )
    alphas, weights = quadrature(rule, steps)
    if path == "token":
        prefix = trace.in_order.prefix
        x = widened(trace.layers[0].x)
        start = torch.cat([x[:, :prefix], torch.zeros_like(x[:, prefix:])], 1)
    else:
        x = widened(trace.pixels)
        start = baseline_image(baseline, trace).expand_as(x)

    def between(k: int) -> Tensor:
        return torch.lerp(start, x, alphas[k])

    slope = torch.zeros_like(x)
    for ks, made in passes(trace, steps, between, AT_TOKENS if path == "token" else AT_PIXELS, "integrated-gradients"):
        part = by_variant(made.layers[0].dx if path == "token" else made.dpixels, trace)  # [V, B, …]
        slope += torch.einsum("v,v...->...", part.new_tensor([weights[k] for k in ks]), part)
    shares = (x - start) * slope
    rise = scores(trace) - scores(trace.again(start.to(trace.pixels.dtype), None))
    closer = "more steps" if path == "pixel" or rule == "crowded" else "rule=crowded or more steps"
    note = residual(shares.flatten(1).sum(1), rise, closer)
    maps = on_grid(shares.sum(-1), trace) if path == "token" else on_image(shares.sum(1), trace, level, "sum")
    return MapResult(maps, notes=(note,))


def quadrature(rule: Rule, steps: int) -> tuple[list[float], list[float]]:
    """Points in 0…1 and weights that add up to 1."""
    if rule == "gauss":
        points, weights = np.polynomial.legendre.leggauss(steps)
        return ((points + 1) / 2).tolist(), (weights / 2).tolist()
    if rule == "trapezoid":
        if steps < 2:
            raise BadInput(f"steps={steps} was given with rule=trapezoid, which has two ends; expected 2 or more.")
        ends = [0.5 if k in (0, steps - 1) else 1.0 for k in range(steps)]
        return [k / (steps - 1) for k in range(steps)], [w / (steps - 1) for w in ends]
    middles = [(k + 0.5) / steps for k in range(steps)]
    if rule == "crowded":  # midpoints in u, alpha = u⁴
        return [u**4 for u in middles], [((k + 1) / steps) ** 4 - (k / steps) ** 4 for k in range(steps)]
    return middles if rule == "midpoint" else [(k + 1) / steps for k in range(steps)], [1 / steps] * steps


def baseline_image(baseline: str, trace: Trace) -> Tensor:
    """[3, 1, 1], one colour, normalised as the model's images are."""
    zero, looks = widened(trace.pixels).new_zeros(3, 1, 1), trace.recording.model.preprocess
    mean, std = (zero.new_tensor(values)[:, None, None] for values in (looks.mean, looks.std))
    return zero if baseline == "zero" else (float(baseline == "white") - mean) / std


def scores(trace: Trace) -> Tensor:
    """[B]"""
    assert trace.target is not None
    return widened(trace.target(trace.logits))


def residual(found: Tensor, rise: Tensor, closer: str) -> str:
    """In words, image by image; `closer` is what would make it smaller."""
    gap = (found - rise).tolist()
    share = [abs(g) / max(abs(r), 1e-12) for g, r in zip(gap, rise.tolist(), strict=True)]
    gaps = ", ".join(f"{g:+.2g} ({s:.1%})" for g, s in zip(gap, share, strict=True))
    rises, sums = (", ".join(f"{value:.3g}" for value in values.tolist()) for values in (rise, found))
    advice = f"; {closer} should make it smaller" if max(share) > 0.05 else ""
    return (
        f"integrated-gradients: completeness: the score rises by {rises} from the baseline and the map adds up to "
        f"{sums}; residual {gaps}{advice}"
    )


# TAM


@method(
    "tam",
    family="gradient × attention",
    paper="Yuan et al., 2021 (Transition Attention Maps)",
    output="image",
    requires=Requires(gradients=("attention",), first_layer=-1),
    # alpha = 1 is the image itself, whose trace is there already
    extra_cost=ExtraCost(
        lambda steps, with_integral, **_: Cost(steps - 1, steps - 1) if with_integral else Cost(), slow=True
    ),
)
def transition_attention(
    trace: Trace,
    steps: int = 20,
    start_layer: int = 4,
    with_integral: bool = True,
    first_state: bool = False,
) -> MapResult:
    """s * mean_h relu(mean_k G(alpha_k x)), s = A prod_l (A + I): the last attention, carried down the layers.

    A are head means, G the last layer's gradient at paler images (alpha_k = 0 … 1, zero is the mean colour), both read
    as the head reads. The chain goes down to `start_layer`; `first_state` leaves it out. `with_integral=False` takes
    the gradient at the image alone, as steps=1 does.
    """
    at_least_one("steps", steps)
    read, rows, count = trace.read, trace.read_rows, len(trace.layers)
    picked = read if rows is None else read[:, rows]
    last = trace.layers[-1].between_tokens()
    G = last.G(trace.layers[-1].dO, rows)  # [B, H, rows, N]
    if with_integral and steps > 1:
        reach = GradientScope(count - 1, tokens=False, pixels=False)
        for _, made in passes(trace, steps - 1, lambda k: trace.pixels * (k / (steps - 1)), reach, "tam"):
            layer = made.layers[-1]
            G = G + by_variant(layer.between_tokens().G(layer.dO, rows), trace).sum(0)
        G = G / steps
    weight = reading(mean_of_heads(G.clamp(min=0)), picked)  # [B, N]
    state = reading(mean_of_heads(last.A(rows)), picked)
    notes: tuple[str, ...] = ()
    if not first_state:
        start, notes = chain_start(start_layer, count)
        for index in reversed(range(start, count - 1)):
            state = state + reading(mean_of_heads(trace.layers[index].A), state)
    return MapResult(on_grid(state * weight, trace), notes=notes)


def chain_start(start_layer: int, count: int) -> tuple[int, tuple[str, ...]]:
    """Return the lowest layer of TAM's chain, and a note where a model of `count` layers is too shallow for it."""
    deepest = max(count - 2, 0)
    start = layer_index(start_layer, count) if start_layer < 0 else start_layer
    if start <= deepest:
        return start, ()
    return deepest, (
        f"tam: start_layer={start_layer} leaves no chain in {count} layers; it was taken down to layer {deepest}",
    )
