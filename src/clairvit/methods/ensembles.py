"""Functions of methods: `smooth` and `shift` average one over noisy or shifted images, `ensemble` combines several.

cv.explain(model, "cat.jpg", smooth("genatt", n=20))            # "smooth(genatt,n=20)"
cv.explain(model, "cat.jpg", shift("ixg", n=9, pixels=8))       # "shift(ixg)"
cv.explain(model, "cat.jpg", ensemble("legrad", "decompx+skipplus"))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._rng import make_generator
from clairvit._spec import ParsedSpec, settled_options
from clairvit.errors import BadInput, NotApplicable
from clairvit.methods.aggregation import Product, Single, Suffixes, Total
from clairvit.methods.executor import Result
from clairvit.methods.layer_view import check_plane
from clairvit.methods.multi_pass import Sigma, by_variant, noisy_images, run_variants
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.registry import FORWARD, NOTHING, Caveats, ExtraCost, Method
from clairvit.methods.result import MapResult
from clairvit.methods.spec import MethodSpec, resolve_method, resolve_parsed, wraps
from clairvit.numerics import average_ranks, min_max, pool_to_grid, positive_over_largest
from clairvit.option_types import Doc, Range, options_of
from clairvit.option_types import Passes as PassCount
from clairvit.perturbation.removal import patches_to_pixels
from clairvit.tracing.trace import Trace

By = Annotated[
    Literal["rank", "minmax", "max"],
    Doc("how maps are made comparable: by ranks, scaled to 0 … 1, or over their largest value"),
]


def smooth(method: str | MethodSpec, n: int = 20, sigma: float = 0.1) -> str:
    """Return the method string that averages `method` over n noisy images.

    Args:
        method: A method string or spec.
        n: The number of noisy copies.
        sigma: The standard deviation of the noise, as a part of the image's range.

    Returns:
        A method string, "smooth(genatt,n=5)".

    Example:
        >>> import clairvit as cv
        >>> cv.ensembles.smooth("genatt", n=5)
        'smooth(genatt,n=5)'
    """
    return resolve_parsed(ParsedSpec("smooth", (method,), {"n": n, "sigma": sigma})).text


def shift(method: str | MethodSpec, n: int = 9, pixels: int = 8, **options: Any) -> str:
    """Return the method string that averages `method` over n shifted images, its maps shifted back.

    Args:
        method: A method string or spec.
        n: The number of copies, the image itself among them.
        pixels: How far they are shifted at most, to each side.
        **options: `shifts`, `border` and `level` of the function `shifted`.

    Returns:
        A method string, "shift(ixg,n=5)".

    Example:
        >>> import clairvit as cv
        >>> cv.ensembles.shift("ixg", n=5, border="wrap")
        'shift(ixg,border=wrap,n=5)'
    """
    return resolve_parsed(ParsedSpec("shift", (method,), {"n": n, "pixels": pixels, **options})).text


def ensemble(*methods: str | MethodSpec, by: By = "rank") -> str:
    """Return the method string that combines the maps of several methods.

    Args:
        *methods: Two or more method strings or specs.
        by: "rank" averages the ranks of patches, "minmax" the maps scaled to 0 … 1, "max" takes the largest.

    Returns:
        A method string, "ensemble(legrad,rollout)".

    Example:
        >>> import clairvit as cv
        >>> cv.ensembles.ensemble("legrad", "rollout")
        'ensemble(legrad,rollout)'
    """
    return resolve_parsed(ParsedSpec("ensemble", methods, {"by": by})).text


def starts(method: str | MethodSpec, count: int) -> list[str]:
    """Return the method string started at each of `count` layers; `cv.compare` computes all of them from one trace.

    starts("focusvit", 12) is focusvit(m=0) … focusvit(m=11): the suffix sums among which m* is searched.
    """
    spec = resolve_method(method)
    field = {Total: "start", Product: "start_layer", Suffixes: "start", Single: "layer"}.get(type(spec.aggregation))
    if field is None or getattr(spec.aggregation, "order", "later-left") == "forward":
        raise NotApplicable(
            f"'{spec.text}' does not start at a layer, so there is nothing to choose. "
            "Use a method that sums or multiplies layers, such as focusvit, genatt or decompx."
        )
    canonical = spec.canonical
    if isinstance(spec.aggregation, Single) or canonical.combinator:  # then it is the sum from layer m on
        return [resolve_parsed(replace(canonical, combinator=f"from:{m}")).text for m in range(count)]
    option = spec.method.option_overrides.words.get(field, field)
    return [resolve_method(spec, **{option: m}).text for m in range(count)]


def smoothed(
    inner: MethodSpec,
    trace: Trace,
    n: Annotated[PassCount, Doc("how many noisy copies are averaged")] = 20,
    sigma: Sigma = 0.1,
    seed: int = 0,
) -> MapResult:
    """mean_k M(x + e_k): a method averaged over noisy images, so that what depends on single pixels cancels.

    The noise has std sigma·(max − min) of the normalised image, as in SmoothGrad; n forwards, and n of each backward
    that the method needs.
    """
    runs = explain_variants(inner, trace, n, noisy_images(trace, sigma, seed), "smooth", seed)
    sums = [maps.sum(0) for _, maps, _ in runs]
    return MapResult(torch.stack(sums).sum(0) / n, notes=tuple(note for _, _, notes in runs for note in notes))


def shifted(
    inner: MethodSpec,
    trace: Trace,
    n: Annotated[PassCount, Doc("how many shifted copies are averaged, the image itself among them")] = 9,
    pixels: Annotated[
        int, Range(ge=0, unit="pixels", example=8), Doc("how far the image is shifted at most, to each side")
    ] = 8,
    shifts: Annotated[
        Literal["grid", "random"], Doc("whether shifts lie on a lattice, or are drawn at random")
    ] = "grid",
    border: Annotated[
        Literal["edge", "wrap"], Doc("what comes in at the border: its outermost pixels, or the other side")
    ] = "edge",
    level: Annotated[
        Literal["patch", "pixel"], Doc("whether the mean is read at the patches or at the pixels")
    ] = "patch",
    seed: int = 0,
) -> MapResult:
    """mean_k S_k⁻¹ M(S_k x): a method averaged over shifted images, each map shifted back onto the image.

    What depends on where patches happen to be cut cancels. The first copy is the image itself, the others are shifted
    by up to `pixels` to each side: on a lattice around it, or at random. A map of patches counts for all their pixels;
    `level=pixel` keeps the mean at the pixels, which is finer than the patches. `border=edge` repeats the outermost
    pixels, and a copy does not count for what it has pushed out; `border=wrap` brings that in on the other side. n
    forwards, and n of each backward that the method needs.
    """
    check_plane(trace, "shift")
    size = (int(trace.pixels.shape[-2]), int(trace.pixels.shape[-1]))
    if pixels >= min(size):
        raise BadInput(
            f"pixels={pixels} was given for images of {size[0]} × {size[1]}; expected less than a side, such as 8."
        )
    offsets = shift_offsets(n, pixels, shifts, seed)
    wrap = border == "wrap"
    runs = explain_variants(inner, trace, n, lambda k: moved(trace.pixels, offsets[k], wrap)[0], "shift", seed)
    grid = (int(runs[0][1].shape[-2]), int(runs[0][1].shape[-1]))
    total, count = runs[0][1].new_zeros(len(trace.pixels), *size), runs[0][1].new_zeros(size)
    for ks, maps, _ in runs:
        for k, variant_maps in zip(ks, maps, strict=True):
            dy, dx = offsets[k]
            aligned, inside = moved(patches_to_pixels(variant_maps, size), (-dy, -dx), wrap)
            total += torch.where(inside, aligned, 0)
            count += inside
    mean = total / count  # the image itself is among the copies: no count is 0
    notes = tuple(note for _, _, run_notes in runs for note in run_notes)
    return MapResult(mean if level == "pixel" else pool_to_grid(mean, grid), notes=notes)


def shift_offsets(n: int, pixels: int, shifts: Literal["grid", "random"], seed: int) -> list[tuple[int, int]]:
    """Return n offsets (dy, dx) of at most `pixels` each, (0, 0) first.

    The grid is the smallest odd lattice over ±pixels that has n points, those nearest to the middle.
    """
    if shifts == "random":
        drawn = torch.randint(
            -pixels, pixels + 1, (n - 1, 2), generator=make_generator(seed, "shift/offsets"), device="cpu"
        )
        return [(0, 0), *((int(dy), int(dx)) for dy, dx in drawn)]
    side = math.isqrt(n - 1) + 1
    side += 1 - side % 2
    if side > 2 * pixels + 1:
        raise BadInput(
            f"n={n} was given with pixels={pixels}, which has {2 * pixels + 1} × {2 * pixels + 1} different shifts; "
            "expected a larger pixels or a smaller n."
        )
    steps = [round(pixels * k / max(side // 2, 1)) for k in range(-(side // 2), side // 2 + 1)]
    lattice = [(dy, dx) for dy in steps for dx in steps]
    return sorted(lattice, key=lambda offset: offset[0] ** 2 + offset[1] ** 2)[:n]


def moved(images: Tensor, offset: tuple[int, int], wrap: bool) -> tuple[Tensor, Tensor]:
    """Return images [..., H, W] moved down and right by an offset, and which pixels come from inside, bool [H, W]."""
    rows, cols = (
        torch.arange(size, device=images.device) - by for size, by in zip(images.shape[-2:], offset, strict=True)
    )
    height, width = images.shape[-2:]
    if wrap:
        rows, cols = rows % height, cols % width
    inside = ((rows >= 0) & (rows < height))[:, None] & (cols >= 0) & (cols < width)
    return images[..., rows.clamp(0, height - 1)[:, None], cols.clamp(0, width - 1)], inside


def explain_variants(
    inner: MethodSpec, trace: Trace, n: int, variant: Callable[[int], Tensor], label: str, seed: int
) -> list[tuple[range, Tensor, Sequence[str]]]:
    """Return the maps of `inner` for variant(0) … variant(n - 1) of the images: variants, [V, B, rows, cols], notes."""

    def run(ks: range) -> Result:
        recording, target = trace.record_variants(
            torch.cat([variant(k) for k in ks]), functools.partial(record_for, [inner])
        )
        (result,) = run_all([inner], recording, [target], seed=seed)[inner.text]
        trace.recording.backwards += len(ks) * inner.backwards
        return result

    results = list(run_variants(trace, n, run, label))
    error = next((result.error for _, result in results if result.error is not None), None)
    if error is not None:
        raise error
    return [
        (ks, by_variant(result.maps, trace), result.note_texts()) for ks, result in results if result.maps is not None
    ]


def combined(maps: Sequence[Tensor], by: By = "rank") -> Tensor:
    """mean_m rank(M_m): each method's patches by their order, so that no method's scale outweighs another's.

    Ranks go from 0 (least) to 1; equal patches share the mean of their ranks. `by=minmax` averages the maps themselves,
    each scaled to 0 … 1 image by image. `by=max` takes the largest of the maps, each without what is negative and over
    its own largest value: how LayerCAM combines layers (its tanh for early layers is not here).
    """
    scales: dict[By, Callable[[Tensor], Tensor]] = {
        "rank": scaled_ranks,
        "minmax": min_max,
        "max": positive_over_largest,
    }
    scale = scales[by]
    scaled = torch.stack([scale(method_maps.flatten(1)).view_as(method_maps) for method_maps in maps])  # [M, B, …]
    return scaled.amax(0) if by == "max" else scaled.mean(0)


def scaled_ranks(flat: Tensor) -> Tensor:
    """Return the ranks of each row of [B, n] scaled to 0 … 1; equal values share the mean, NaN stays NaN."""
    return ((average_ranks(flat) - 1) / max(flat.shape[1] - 1, 1)).to(flat.dtype)


@wraps("smooth")
def _resolve_smooth(parsed: ParsedSpec) -> MethodSpec:
    return _resolve_average("smooth", smoothed, "noise as in Smilkov et al., 2017", parsed)


@wraps("shift")
def _resolve_shift(parsed: ParsedSpec) -> MethodSpec:
    spec = _resolve_average("shift", shifted, "shifts as in the averaging of DAVE, ICML 2026", parsed)
    options = dict(spec.options)
    shift_offsets(options["n"], options["pixels"], options["shifts"], 0)  # raise BadInput before anything is run
    return spec


def _resolve_average(name: str, function: Callable[..., MapResult], averaging: str, parsed: ParsedSpec) -> MethodSpec:
    """Return the spec of a function that averages one method over n variants of the image."""
    if len(parsed.inner) != 1:
        raise BadInput(f"{name}(…) was given {len(parsed.inner)} methods; expected one: {name}(genatt, n=20).")
    inner = resolve_method(parsed.inner[0])
    if any(spec.method.extra_cost.passes is not None or spec.on_tails for spec in inner.members or (inner,)):
        raise NotApplicable(
            f"'{inner.text}' makes many passes itself, and {name}(…) would repeat them all. "
            f"Use a method of one trace: {name}(genatt)."
        )
    options, canonical = wrapper_options(name, function, parsed, [inner])
    method = Method(
        name=f"{name}({inner.text})",
        family=inner.method.family,
        paper=f"{inner.method.paper}; {averaging}",
        function=functools.partial(function, inner),
        output="image",
        requires=replace(NOTHING, fitted_to=inner.misfit),
        signed=inner.method.signed and not inner.relu,
        class_specific=inner.method.class_specific,
        extra_cost=ExtraCost(lambda n, **_: Cost(n, n * inner.backwards), slow=True),
        caveats=Caveats(zero_reason=inner.method.caveats.zero_reason),
    )
    return MethodSpec(method=method, options=options, canonical=canonical)


@wraps("ensemble")
def _resolve_ensemble(parsed: ParsedSpec) -> MethodSpec:
    members = tuple({spec.text: spec for spec in map(resolve_method, parsed.inner)}.values())
    if len(members) < 2:
        raise BadInput(f"ensemble(…) was given {len(members)} methods; expected two or more: ensemble(genatt, legrad).")
    if any(spec.members for spec in members):
        raise BadInput("An ensemble was given another one as member; expected methods. Name all of them in one.")
    options, canonical = wrapper_options("ensemble", combined, parsed, members)
    method = Method(
        name="ensemble",
        family="ensemble",
        paper="; ".join(dict.fromkeys(spec.method.paper for spec in members)),
        function=combined,
        output="image",
        requires=FORWARD if any(spec.passes != "none" for spec in members) else NOTHING,
        class_specific=any(spec.method.class_specific for spec in members),
        extra_cost=ExtraCost(slow=any(spec.method.slow for spec in members)),
    )
    return MethodSpec(method=method, options=options, canonical=canonical, members=members)


def wrapper_options(
    name: str, function: Callable[..., Any], parsed: ParsedSpec, inner: Sequence[MethodSpec]
) -> tuple[tuple[tuple[str, Any], ...], ParsedSpec]:
    """Return all options of a method made of methods, such as smooth(…), checked, and its canonical form."""
    if parsed.combinator:
        raise NotApplicable(
            f"'{name}(…)+{parsed.combinator}' combines layers outside the parenthesis, where there are only maps. "
            f"Put it inside: {name}(genatt+{parsed.combinator}, …)."
        )
    options = options_of(function, ("inner", "trace", "seed", "maps"))
    values, changed = settled_options(name, [*options.values()], parsed.options)
    return tuple(sorted(values.items())), ParsedSpec(name, tuple(inner), changed)
