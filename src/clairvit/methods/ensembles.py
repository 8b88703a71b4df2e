"""Functions on methods: `smooth` averages a method over noisy images, `ensemble` joins the maps of several.

cv.explain(model, "cat.jpg", smooth("genatt", n=20))            # "smooth(genatt,n=20)"
cv.explain(model, "cat.jpg", ensemble("legrad", "decompx+skipplus"))
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from clairvit.errors import BadInput, NotApplicable, UnknownName, did_you_mean
from clairvit.methods.aggregation import Product, Single, Suffixes, Total
from clairvit.methods.executor import Result
from clairvit.methods.explanation import Cost
from clairvit.methods.multi_pass import at_least_one, by_variant, noisy_images, several
from clairvit.methods.parsing import ParsedSpec, parse_spec
from clairvit.methods.planner import record_for, run_all
from clairvit.methods.registry import FORWARD, NOTHING, Caveats, ExtraCost, Method, parameters
from clairvit.methods.result import MapResult
from clairvit.methods.spec import MethodSpec, checked, resolve_method, wraps
from clairvit.numerics import average_ranks
from clairvit.tracing.trace import Trace

By = Literal["rank", "minmax", "max"]


def smooth(method: str | MethodSpec, n: int = 20, sigma: float = 0.1) -> str:
    """The method string that averages `method` over n noisy images.

    Args:
        method: A method string or spec.
        n: The number of noisy copies.
        sigma: The standard deviation of the noise, as a part of the image's range.

    Returns:
        A method string, "smooth(genatt,n=5)".

    Example:
        >>> import clairvit as cv
        >>> cv.smooth("genatt", n=5)
        'smooth(genatt,n=5)'
    """
    return resolve_method(f"smooth({method})", n=n, sigma=sigma).text


def ensemble(*methods: str | MethodSpec, by: By = "rank") -> str:
    """The method string that joins the maps of several methods.

    Args:
        *methods: Two or more method strings or specs.
        by: "rank" averages the ranks of patches, "minmax" the maps scaled to 0 … 1, "max" takes the largest.

    Returns:
        A method string, "ensemble(legrad,rollout)".

    Example:
        >>> import clairvit as cv
        >>> cv.ensemble("legrad", "rollout")
        'ensemble(legrad,rollout)'
    """
    return resolve_method(f"ensemble({','.join(map(str, methods))})", by=by).text


def starts(method: str, count: int) -> list[str]:
    """The same method started at each of `count` layers; `cv.compare` makes all of them from one trace.

    starts("focusvit", 12) is focusvit(m=0) … focusvit(m=11): the suffix sums among which m* is looked for.
    """
    spec = resolve_method(method)
    field = {Total: "start", Product: "start_layer", Suffixes: "start", Single: "layer"}.get(type(spec.aggregation))
    if field is None or getattr(spec.aggregation, "order", "later-left") == "forward":
        raise NotApplicable(
            f"'{spec.text}' does not start at a layer, so there is nothing to choose. "
            "Use a method that sums or multiplies layers, such as focusvit, genatt or decompx."
        )
    if (
        isinstance(spec.aggregation, Single) or parse_spec(method).combinator
    ):  # "from layer m on" is then the sum from there
        base = method.rpartition("+")[0] or method
        return [resolve_method(f"{base}+from:{m}").text for m in range(count)]
    word = spec.method.option_overrides.words.get(field, field)
    return [resolve_method(method, **{word: m}).text for m in range(count)]


def smoothed(inner: MethodSpec, trace: Trace, n: int = 20, sigma: float = 0.1, seed: int = 0) -> MapResult:
    """mean_k M(x + e_k): a method averaged over noisy images, so that what depends on single pixels cancels.

    The noise has std sigma·(max − min) of the normalised image, as in SmoothGrad; n forwards, and n of each backward
    that the method needs.
    """
    at_least_one("n", n)
    noisy = noisy_images(trace, sigma, seed)

    def run(ks: range) -> Result:
        recording, target = trace.rerecorded(torch.cat([noisy(k) for k in ks]), functools.partial(record_for, [inner]))
        (result,) = run_all([inner], recording, [target], seed=seed)[inner.text]
        trace.recording.backwards += len(ks) * inner.backwards
        return result

    found = [result for _, result in several(trace, n, run, "smooth")]
    refused = next((result.error for result in found if result.error is not None), None)
    if refused is not None:
        raise refused
    sums = [by_variant(result.maps, trace).sum(0) for result in found if result.maps is not None]
    return MapResult(torch.stack(sums).sum(0) / n, notes=tuple(note for result in found for note in result.notes))


def joined(maps: Sequence[Tensor], by: By = "rank") -> Tensor:
    """mean_m rank(M_m): each method's patches by their order, so that no method's scale outweighs another's.

    Ranks go from 0 (least) to 1; equal patches share the mean of their ranks. `by=minmax` averages the maps themselves,
    each scaled to 0 … 1 image by image. `by=max` takes the largest of the maps, each without what is negative and over
    its own largest value: how LayerCAM joins layers (its tanh for early layers is not here).
    """
    if by == "max":
        return torch.stack([over_its_largest(one.flatten(1)).view_as(one) for one in maps]).amax(0)
    scaled = ranks if by == "rank" else from_zero_to_one
    return torch.stack([scaled(one.flatten(1)).view_as(one) for one in maps]).mean(0)


def ranks(flat: Tensor) -> Tensor:
    """Return the ranks of each row of [B, n] scaled to 0 … 1; equal values share the mean, NaN stays NaN."""
    return ((average_ranks(flat) - 1) / max(flat.shape[1] - 1, 1)).to(flat.dtype)


def from_zero_to_one(flat: Tensor) -> Tensor:
    """[B, n] -> [B, n]; a constant map becomes zero."""
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return (flat - low) / torch.where(high == low, torch.ones_like(high), high - low)


def over_its_largest(flat: Tensor) -> Tensor:
    """relu(M) / max M, [B, n]; a map that is nowhere positive becomes zero."""
    high = flat.amax(1, keepdim=True)
    return flat.clamp(min=0) / torch.where(high > 0, high, torch.ones_like(high))


@wraps("smooth")
def _smooth(written: ParsedSpec, given: dict[str, Any]) -> MethodSpec:
    if len(written.inner) != 1:
        raise BadInput(f"smooth(…) was given {len(written.inner)} methods; expected one: smooth(genatt, n=20).")
    inner = resolve_method(written.inner[0])
    if any(one.method.extra_cost.passes is not None for one in inner.members or (inner,)):
        raise NotApplicable(
            f"'{inner.text}' makes many passes itself, and smooth(…) would repeat them all. "
            "Use a method of one trace: smooth(genatt)."
        )
    options = _options("smooth", smoothed, written, given)
    wrapping = Method(
        name=f"smooth({inner.text})",
        family=inner.method.family,
        paper=f"{inner.method.paper}; noise as in Smilkov et al., 2017",
        function=functools.partial(smoothed, inner),
        output="image",
        requires=NOTHING,
        signed=inner.method.signed and not inner.relu,
        class_specific=inner.method.class_specific,
        extra_cost=ExtraCost(lambda n, **_: Cost(n, n * inner.backwards), slow=True),
        caveats=Caveats(zero_reason=inner.method.caveats.zero_reason),
    )
    return MethodSpec(
        wrapping, tuple(sorted(options.items())), None, False, _text("smooth", smoothed, [inner], options)
    )


@wraps("ensemble")
def _ensemble(written: ParsedSpec, given: dict[str, Any]) -> MethodSpec:
    members = tuple({one.text: one for one in map(resolve_method, written.inner)}.values())
    if len(members) < 2:
        raise BadInput(f"ensemble(…) was given {len(members)} methods; expected two or more: ensemble(genatt, legrad).")
    if any(one.members for one in members):
        raise BadInput("An ensemble was given another one as member; expected methods. Name all of them in one.")
    options = _options("ensemble", joined, written, given)
    wrapping = Method(
        name="ensemble",
        family="ensemble",
        paper="; ".join(dict.fromkeys(one.method.paper for one in members)),
        function=joined,
        output="image",
        requires=FORWARD if any(one.passes != "none" for one in members) else NOTHING,
        class_specific=any(one.method.class_specific for one in members),
        extra_cost=ExtraCost(slow=any(one.method.slow for one in members)),
    )
    text = _text("ensemble", joined, members, options)
    return MethodSpec(wrapping, tuple(sorted(options.items())), None, False, text, members)


def _options(name: str, function: Any, written: ParsedSpec, given: dict[str, Any]) -> dict[str, Any]:
    if written.combinator:
        raise NotApplicable(
            f"'{name}(…)+{written.combinator}' combines layers outside the parenthesis, where there are only maps. "
            f"Put it inside: {name}(genatt+{written.combinator}, …)."
        )
    own = {key: p.default for key, p in parameters(function).items() if key not in ("inner", "maps")}
    for key, value in (written.options | given).items():
        if key not in own:
            raise UnknownName(f"'{name}' has no option '{key}'; it has {', '.join(own)}.{did_you_mean(key, own)}")
        own[key] = checked(get_type_hints(function)[key], key, value)
    return own


def _text(name: str, function: Any, inner: Sequence[MethodSpec], options: dict[str, Any]) -> str:
    defaults = parameters(function)
    changed = [f"{key}={value}" for key, value in sorted(options.items()) if value != defaults[key].default]
    return f"{name}({','.join([*(one.text for one in inner), *changed])})"
