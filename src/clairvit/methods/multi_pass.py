"""Many passes: gradients averaged over noise (SmoothGrad), along a path (Integrated Gradients), over brightness (TAM).

All three run the same model on variants of the images for the same target. A variant k is a whole batch [B, …]; several
variants are run at once. Their passes are counted by `Trace.rerun`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._progress import report_progress
from clairvit._rng import make_generator
from clairvit.errors import BadInput
from clairvit.methods.aggregation import layer_index, reading
from clairvit.methods.gradient import Level, at_level
from clairvit.methods.layer_view import mean_of_heads, tokens_to_grid
from clairvit.methods.registry import FORWARD, NOTHING, ExtraCost, Requires, method
from clairvit.methods.result import MapResult
from clairvit.numerics import widened
from clairvit.option_types import Doc, Passes, Range
from clairvit.perturbation.batching import BatchBudget, in_batches
from clairvit.tracing.trace import GradientScope, Trace

T = TypeVar("T")
Rule = Annotated[
    Literal["midpoint", "crowded", "right", "trapezoid", "gauss"],
    Doc("where the points of the path lie and what each counts"),
]
Sigma = Annotated[
    float,
    Range(ge=0, unit="parts of the image's range", example=0.1),
    Doc("standard deviation of the noise, as a part of the image's range"),
]

PIXELS_AT_ONCE = 8 * 224 * 224  # in one batch of variants: eight usual images keep a processor busy
AT_PIXELS = GradientScope(attention=False, tokens=False)
AT_TOKENS = GradientScope(attention=False, pixels=False)


def trace_variants(
    trace: Trace, count: int, variant: Callable[[int], Tensor], scope: GradientScope, label: str
) -> Iterator[tuple[range, Trace]]:
    """Yield traces of variant(0) … variant(count - 1), several at once: pixels [B, 3, H, W] or tokens x^0 [B, N, d]."""

    def run(ks: range) -> Trace:
        return trace.rerun(torch.cat([variant(k) for k in ks]).to(trace.pixels.dtype), scope=scope)

    return run_variants(trace, count, run, label)


def run_variants(trace: Trace, count: int, run: Callable[[range], T], label: str) -> Iterator[tuple[range, T]]:
    """Yield run(ks) for variants 0 … count - 1 of the whole batch, several at once; progress is reported as `label`."""
    images, pixels = len(trace.pixels), trace.pixels[:, 0].numel()
    # A target function of the whole batch may know images by their index: then one variant at a time.
    whole_batch = trace.target is not None and trace.target.is_batch_function
    budget = BatchBudget(pixels if whole_batch else PIXELS_AT_ONCE, trace.recording.options.batch_size)
    with report_progress(label, count) as advance:
        for ks, output in in_batches(count, budget, pixels, run, images_per_variant=images):
            yield ks, output
            advance(len(ks))


def by_variant(tensor: Tensor, trace: Trace) -> Tensor:
    """Return [V·B, …] as [V, B, …], in float32 at least."""
    return widened(tensor).reshape(-1, len(trace.pixels), *tensor.shape[1:])


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
    n: Annotated[Passes, Doc("how many noisy copies are averaged")] = 50,
    sigma: Sigma = 0.1,
    base: Annotated[Literal["grad", "ixg"], Doc("what is averaged: gradients, or input × gradient")] = "grad",
    each: Annotated[
        Literal["signed", "abs", "square"],
        Doc("whether gradients are averaged with their signs, as absolute values or as squares"),
    ] = "signed",
    level: Level = "patch",
    seed: int = 0,
) -> Tensor:
    """max_channel |mean_k dy/dpixel(x + e_k)|, averaged over each patch, e_k noise: saliency without its flicker.

    The noise has std sigma·(max − min) of the normalised image. `each` is what is averaged: gradients as they are,
    their absolute values or squares. `base=ixg` averages (x + e_k) × gradient and adds it up over a patch, signs kept.
    """
    noisy = noisy_images(trace, sigma, seed)
    total = torch.zeros_like(widened(trace.pixels))
    for _, variants in trace_variants(trace, n, noisy, AT_PIXELS, "smoothgrad"):
        g = variants.dpixels if base == "grad" else widened(variants.pixels) * widened(variants.dpixels)
        g = by_variant(g, trace)  # [V, B, 3, H, W]
        total += {"signed": lambda g: g, "abs": torch.abs, "square": torch.square}[each](g).sum(0)
    mean = total / n
    if base == "grad":
        return at_level(mean.abs().amax(1), trace, level, "mean")
    return at_level(mean.sum(1), trace, level, "sum")


def noisy_images(trace: Trace, sigma: float, seed: int) -> Callable[[int], Tensor]:
    """Return k -> images with their k-th noise, [B, 3, H, W]: x + e, e normal with std sigma·(max x − min x)."""
    x = widened(trace.pixels)
    axes = tuple(range(1, x.ndim))
    std = sigma * (x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True))  # [B, 1, 1, 1]
    seeds = trace.image_seeds(seed)
    return lambda k: x + std * torch.stack([normal_noise(image_seed, k, x) for image_seed in seeds])


def normal_noise(image_seed: int, k: int, like: Tensor) -> Tensor:
    """Return the k-th standard normal image of a seed, [3, H, W] for images `like` [B, 3, H, W]."""
    return torch.randn(
        like.shape[1:], generator=make_generator(image_seed, "smoothgrad/noise", k), dtype=torch.float32, device="cpu"
    ).to(like)


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
    steps: Annotated[Passes, Doc("how many points of the path are computed")] = 50,
    rule: Rule = "midpoint",
    path: Annotated[
        Literal["pixel", "token"], Doc("whether the path is one of pixels, or of the first block's tokens")
    ] = "pixel",
    baseline: Annotated[
        Literal["zero", "black", "white"], Doc("the colour that the path starts from; zero is the mean colour")
    ] = "zero",
    level: Level = "patch",
) -> MapResult:
    """(x − x')·mean_k dy/dx(x' + alpha_k (x − x')): what each patch adds to the score on the way from x' to the image.

    x' is the mean colour (zero in normalised space), black or white. `path=token` goes from zeros at the patch tokens
    of the first block, other tokens kept. LayerNorm hides the length of a token, so most of that way happens in its
    first steps, where `rule=crowded` puts its points (alpha = u⁴). Other rules: midpoints, k/steps (right, the
    paper's), both ends (trapezoid), Gauss-Legendre (captum's). The notes say how far the map is from adding up to the
    score's rise.
    """
    if path == "token" and (baseline != "zero" or level != "patch"):
        raise BadInput(
            f"path=token was given with baseline={baseline} and level={level}; on that path there are tokens and no "
            "pixels. Leave both out, or use path=pixel."
        )
    alphas, weights = quadrature(rule, steps)
    if path == "token":
        trace.recording.structure.check_members(trace.recording.model.name, "path=token")
        layout = trace.in_order  # raises where there are no tokens
        x = widened(trace.layers[0].x)
        x0 = x.clone()
        x0[:, layout.patches_among(x.shape[1])] = 0
    else:
        x = widened(trace.pixels)
        x0 = baseline_image(baseline, trace).expand_as(x)

    def interpolated(k: int) -> Tensor:
        return torch.lerp(x0, x, alphas[k])

    scope = AT_TOKENS if path == "token" else AT_PIXELS
    mean_gradient = torch.zeros_like(x)
    for ks, variants in trace_variants(trace, steps, interpolated, scope, "integrated-gradients"):
        g = by_variant(variants.layers[0].dx if path == "token" else variants.dpixels, trace)  # [V, B, …]
        mean_gradient += torch.einsum("v,v...->...", g.new_tensor([weights[k] for k in ks]), g)
    attributions = (x - x0) * mean_gradient
    rise = target_scores(trace) - target_scores(trace.rerun(x0.to(trace.pixels.dtype), None))
    remedy = "more steps" if path == "pixel" or rule == "crowded" else "rule=crowded or more steps"
    note = completeness_note(attributions.flatten(1).sum(1), rise, remedy)
    if path == "token":
        return MapResult(tokens_to_grid(attributions.sum(-1), trace, 0), notes=(note,))
    return MapResult(at_level(attributions.sum(1), trace, level, "sum"), notes=(note,))


def quadrature(rule: Rule, steps: int) -> tuple[list[float], list[float]]:
    """Return points in 0…1 and weights that add up to 1."""
    if rule == "gauss":
        points, weights = np.polynomial.legendre.leggauss(steps)
        return ((points + 1) / 2).tolist(), (weights / 2).tolist()
    if rule == "trapezoid":
        if steps < 2:
            raise BadInput(f"steps={steps} was given with rule=trapezoid, which has two ends; expected 2 or more.")
        ends = [0.5 if k in (0, steps - 1) else 1.0 for k in range(steps)]
        return [k / (steps - 1) for k in range(steps)], [w / (steps - 1) for w in ends]
    midpoints = [(k + 0.5) / steps for k in range(steps)]
    if rule == "crowded":  # midpoints in u, alpha = u⁴
        return [u**4 for u in midpoints], [((k + 1) / steps) ** 4 - (k / steps) ** 4 for k in range(steps)]
    return midpoints if rule == "midpoint" else [(k + 1) / steps for k in range(steps)], [1 / steps] * steps


def baseline_image(baseline: str, trace: Trace) -> Tensor:
    """Return one colour, [C, 1, 1] or, for clips, [C, 1, 1, 1], normalised as the model's images are."""
    preprocess = trace.recording.model.preprocess
    shape = (preprocess.channels, *(1,) * (trace.pixels.ndim - 2))
    zero = widened(trace.pixels).new_zeros(shape)
    mean, std = (zero.new_tensor(values).reshape(shape) for values in (preprocess.mean, preprocess.std))
    return zero if baseline == "zero" else (float(baseline == "white") - mean) / std


def target_scores(trace: Trace) -> Tensor:
    """Return the target's score of each image, [B], in float32 at least."""
    assert trace.target is not None
    return widened(trace.target(trace.logits))


def completeness_note(
    total: Tensor, rise: Tensor, remedy: str, name: str = "integrated-gradients", start: str = "baseline"
) -> str:
    """Return how far a map's sum [B] is from the rise [B] of the score; `remedy` is what would bring it closer."""
    residuals = (total - rise).tolist()
    shares = [abs(gap) / max(abs(total_rise), 1e-12) for gap, total_rise in zip(residuals, rise.tolist(), strict=True)]
    gaps = ", ".join(f"{gap:+.2g} ({share:.1%})" for gap, share in zip(residuals, shares, strict=True))
    rises, sums = (", ".join(f"{value:.3g}" for value in values.tolist()) for values in (rise, total))
    advice = f"; {remedy} should make it smaller" if max(shares) > 0.05 else ""
    return (
        f"{name}: completeness: the score rises by {rises} from the {start} and the map adds up to "
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
    steps: Annotated[Passes, Doc("how many paler images the gradient is averaged over")] = 20,
    start_layer: Annotated[int, Doc("the layer nearest to the image that the chain goes down to")] = 4,
    with_integral: Annotated[
        bool, Doc("average the gradient over paler images; false takes it at the image alone")
    ] = True,
    first_state: Annotated[bool, Doc("leave the chain out: the last attention alone")] = False,
) -> MapResult:
    """s * mean_h relu(mean_k G(alpha_k x)), s = A prod_l (A + I): the last attention, propagated down the layers.

    A are head means, G the last layer's gradient at paler images (alpha_k = 0 … 1, zero is the mean colour), both read
    as the head reads. The chain goes down to `start_layer`; `first_state` leaves it out. `with_integral=False` takes
    the gradient at the image alone, as steps=1 does. The map of layer l is that of the chain that ends there.
    """
    rows, count = trace.readout_rows, len(trace.layers)
    read = trace.readout_weights if rows is None else trace.readout_weights[:, rows]  # the head's weights of the rows
    last = trace.layers[-1].between_tokens()
    G = last.G(trace.layers[-1].dO, rows)  # [B, H, rows, N]
    if with_integral and steps > 1:
        scope = GradientScope(count - 1, tokens=False, pixels=False)
        for _, variants in trace_variants(trace, steps - 1, lambda k: trace.pixels * (k / (steps - 1)), scope, "tam"):
            layer = variants.layers[-1]
            G = G + by_variant(layer.between_tokens().G(layer.dO, rows), trace).sum(0)
        G = G / steps
    weight = reading(mean_of_heads(G.clamp(min=0)), read)  # [B, N]
    attended = reading(mean_of_heads(last.A(rows)), read)  # [B, N]
    start, notes = (count - 1, ()) if first_state else chain_start(start_layer, count)
    state = next(itertools.islice(chain_states(trace, attended), count - 1 - start, None))

    def layers() -> Tensor:
        states = [tokens_to_grid(state * weight, trace, 0) for state in chain_states(trace, attended)]
        return torch.stack(states[::-1])

    return MapResult(tokens_to_grid(state * weight, trace, 0), notes=notes, layers=layers)


def chain_states(trace: Trace, attended: Tensor) -> Iterator[Tensor]:
    """Yield TAM's states [B, N] from the last layer's attention down: A_L prod_l (A + I) to each lower layer."""
    state = attended
    yield state
    for index in reversed(range(len(trace.layers) - 1)):
        state = state + reading(mean_of_heads(trace.layers[index].A), state)
        yield state


def chain_start(start_layer: int, count: int) -> tuple[int, tuple[str, ...]]:
    """Return the lowest layer of TAM's chain, and a note where a model of `count` layers is too shallow for it."""
    deepest = max(count - 2, 0)
    start = layer_index(start_layer, count) if start_layer < 0 else start_layer
    if start <= deepest:
        return start, ()
    return deepest, (
        f"tam: start_layer={start_layer} leaves no chain in {count} layers; it was taken down to layer {deepest}",
    )
