"""Complexity: how concise a map is. These metrics use the map alone, without the model."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.registry import metric
from clairvit.numerics import over_largest
from clairvit.option_types import Doc

Resolution = Annotated[Literal["patch", "pixel"], Doc("whether patches are counted, or pixels of the enlarged map")]


@metric(
    "sparseness",
    family="complexity",
    better="higher",
    span=(0, 1),
    paper="Chalasani et al., ICML 2020",
)
def sparseness(
    context: EvalContext,
    resolution: Resolution = "patch",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return the Gini index Σ_i (2i − n − 1) |a|_(i) / (n Σ |a|): 0 for a constant map, 1 − 1/n for a single patch."""
    maps = magnitudes(context, resolution, upsampling)
    return torch.stack([gini(over_largest(values, 1)) for values in maps])


def gini(values: Tensor) -> Tensor:
    """Return the Gini index [B] of values [B, n] >= 0; 0 where all are 0."""
    n = values.shape[1]
    position = torch.arange(1, n + 1, dtype=values.dtype, device=values.device)
    ascending = values.sort(dim=1).values
    total = n * ascending.sum(1)
    return ((2 * position - n - 1) * ascending).sum(1) / torch.where(total == 0, torch.ones_like(total), total)


@metric(
    "complexity",
    family="complexity",
    better="lower",
    span=(0, math.inf),
    paper="Bhatt et al., IJCAI 2020",
)
def entropy(context: EvalContext, resolution: Resolution = "patch", upsampling: Upsampling = "bilinear") -> Tensor:
    """Return the entropy −Σ_i p_i ln p_i of p = |a| / Σ |a|, in nats: ln n for a constant map."""
    return torch.stack([entropy_of(values) for values in magnitudes(context, resolution, upsampling)])


def entropy_of(values: Tensor, offset: float = 0.0) -> Tensor:
    """Return −Σ p ln(p + offset), [B], of values [B, n] >= 0; where all are 0, that of a constant map."""
    all_zero = values.sum(1, keepdim=True) == 0
    p = torch.where(all_zero, torch.ones_like(values), values)
    p = p / p.sum(1, keepdim=True)
    sums: Tensor = torch.special.xlogy(p, p + offset).sum(1)
    return -sums


@metric(
    "effective-complexity",
    family="complexity",
    better="lower",
    span=(0, math.inf),
    paper="Nguyen & Martínez, 2020",
)
def effective_complexity(
    context: EvalContext,
    threshold: Annotated[float, Doc("the share of the largest relevance above which a patch counts")] = 1e-5,
    resolution: Resolution = "patch",
    upsampling: Upsampling = "bilinear",
) -> Tensor:
    """Return #{i: |a_i| > threshold · max |a|}, the number of patches with noticeable relevance."""
    maps = magnitudes(context, resolution, upsampling)
    return torch.stack([(over_largest(values, 1) > threshold).sum(1).double() for values in maps])


@metric(
    "pnr",
    family="complexity",
    better="higher",
    span=(0, math.inf),
    paper="Su & Luo, PAKDD 2026 (BiCAM)",
    undefined="a map without negative values has no such ratio",
)
def positive_to_negative_ratio(context: EvalContext) -> Tensor:
    """Return Σ a⁺ / Σ a⁻, what a signed map says for the target over what it says against it.

    It describes an image more than a map: its authors take low values as a sign of an adversarial one. Undefined for a
    map without negative values.
    """
    values = context.maps.flatten(2)
    positive, negative = values.clamp(min=0).sum(-1), values.clamp(max=0).abs().sum(-1)
    return positive / negative.masked_fill(negative == 0, math.nan)


def magnitudes(context: EvalContext, resolution: Resolution, upsampling: Upsampling) -> list[Tensor]:
    """Return |a| of each method, [B, n], over the patches or the pixels."""
    maps = context.maps if resolution == "patch" else context.pixel_maps(upsampling)
    return [values.flatten(1).abs() for values in maps]
