"""Complexity: how concise a map is. These look at the map alone; the model is not asked."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.registry import metric

Resolution = Literal["patch", "pixel"]


@metric(
    "sparseness",
    family="complexity",
    better="higher",
    span=(0, 1),
    paper="Chalasani et al., ICML 2020",
    presets={"quantus": {"offset": 1e-7, "resolution": "pixel"}, "focusvit": {"direction": "lower"}},
    discrepancies="Chalasani and Quantus call a sparse map good; FocusViT's tables read it the other way round "
    "(preset `focusvit`). Bilinear upsampling changes it, so the resolution is recorded. Quantus adds 1e-7 to values "
    "over the largest of all images; here they are over their own, as with one image at a time.",
)
def sparseness(
    case: EvalContext,
    resolution: Resolution = "patch",
    upsampling: Upsampling = "bilinear",
    offset: float = 0.0,
    direction: Literal["higher", "lower"] = "higher",
) -> Tensor:
    """sum_i (2i − n − 1) |a|_(i) / (n sum |a|): the Gini index, 0 for a constant map, 1 − 1/n for a single patch.

    `offset` is added to |a| / max |a| (Quantus: 1e-7). `direction` says which way is good and changes no number.
    """

    def index(maps: Tensor) -> Tensor:
        return gini(_over_largest(maps.flatten(1).abs()) + offset)

    return torch.stack([index(one) for one in _at(case, resolution, upsampling)])


def gini(values: Tensor) -> Tensor:
    """[B, n], not negative -> [B]; all zero is as even as can be."""
    n = values.shape[1]
    place = torch.arange(1, n + 1, dtype=values.dtype, device=values.device)
    ascending = values.sort(dim=1).values
    total = n * ascending.sum(1)
    return ((2 * place - n - 1) * ascending).sum(1) / torch.where(total == 0, torch.ones_like(total), total)


@metric(
    "complexity",
    family="complexity",
    better="lower",
    span=(0, math.inf),
    paper="Bhatt et al., IJCAI 2020",
    presets={"quantus": {"resolution": "pixel", "offset": 1e-12}},
    discrepancies="Quantus adds 1e-12 inside the logarithm (`offset`), and counts pixels (`preset=quantus`).",
)
def entropy(
    case: EvalContext, resolution: Resolution = "patch", upsampling: Upsampling = "bilinear", offset: float = 0.0
) -> Tensor:
    """−sum_i p_i ln p_i, p = |a| / sum |a|: the entropy of the map in nats, ln n for a constant one.

    `offset` is added inside the logarithm.
    """
    return torch.stack([_entropy(one.flatten(1).abs(), offset) for one in _at(case, resolution, upsampling)])


def _entropy(values: Tensor, offset: float) -> Tensor:
    even = values.sum(1, keepdim=True) == 0  # an all-zero map has no patch that stands out
    p = torch.where(even, torch.ones_like(values), values)
    p = p / p.sum(1, keepdim=True)
    sums: Tensor = torch.special.xlogy(p, p + offset).sum(1)
    return -sums


@metric(
    "effective-complexity",
    family="complexity",
    better="lower",
    span=(0, math.inf),
    paper="Nguyen & Martínez, 2020",
    presets={"quantus": {"resolution": "pixel"}},
    discrepancies="Quantus counts pixels and divides by the largest value of the whole batch, so that an image's score "
    "depends on the others; here each map is divided by its own, as with one image at a time (`preset=quantus`).",
)
def effective_complexity(
    case: EvalContext, threshold: float = 1e-5, resolution: Resolution = "patch", upsampling: Upsampling = "bilinear"
) -> Tensor:
    """#{i: |a_i| > threshold · max |a|}: how many patches say anything."""

    def counted(values: Tensor) -> Tensor:
        return (_over_largest(values) > threshold).sum(1).double()

    return torch.stack([counted(one.flatten(1).abs()) for one in _at(case, resolution, upsampling)])


def _over_largest(values: Tensor) -> Tensor:
    """[B, n], not negative, each row over its largest value; zeros stay."""
    largest = values.amax(1, keepdim=True)
    return values / torch.where(largest == 0, torch.ones_like(largest), largest)


def _at(case: EvalContext, resolution: Resolution, upsampling: Upsampling) -> list[Tensor]:
    return list(case.maps) if resolution == "patch" else list(case.fine(upsampling))
