"""Places: which pixels or channel values of an image go, in which order, and what the model says as they do."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, Upsampling
from clairvit.metrics.noise import Draws, numpy_chance
from clairvit.metrics.threshold import steady
from clairvit.perturbation.probe import Probe
from clairvit.perturbation.rng import make_generator

VALUES = 2001  # a stream of an image's chance that no other metric draws from


def pixel_ranks(case: EvalContext, upsampling: Upsampling) -> Tensor:
    """[M, B, H·W] the place of each pixel, highest first; ties in an order drawn from seed and image."""
    count = math.prod(case.size)
    luck = torch.stack([torch.randperm(count, generator=make_generator(mark, 1)) for mark in case.marks]).to(
        case.maps.device
    )
    return torch.stack([_places(maps.flatten(1), luck) for maps in _levelled(case, upsampling)])


def _levelled(case: EvalContext, upsampling: Upsampling) -> Iterator[Tensor]:
    """Method by method [B, H, W]; what is equal but for the round-off of an interpolation is equal."""
    for raw, fine in zip(case.raw, case.fine(upsampling), strict=True):
        computed = upsampling != "nearest" and raw.shape[-2:] != fine.shape[-2:]
        yield steady(fine) if computed else fine


def value_ranks(case: EvalContext, upsampling: Upsampling) -> Tensor:
    """[M, B, C·H·W] the place of each channel value; those of one pixel, whose map is the same, follow one another."""
    channels = case.trace.pixels.shape[1]
    own = torch.arange(channels, device=case.maps.device)[:, None]
    return (channels * pixel_ranks(case, upsampling)[:, :, None] + own).flatten(2)


def _places(values: Tensor, luck: Tensor) -> Tensor:
    """[B, n] -> the place of each, highest first; ties in the order of `luck`, a permutation [B, n]."""
    shuffled = values.nan_to_num(nan=-math.inf).gather(1, luck)
    order = luck.gather(1, shuffled.argsort(dim=1, descending=True, stable=True))
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def squares(case: EvalContext, side: int) -> tuple[Tensor, int]:
    """The number of the square that each pixel is in, [H·W], row by row, and how many squares there are.

    Where the side does not divide the image, squares stick out at both ends, half a pixel more at the far one.
    """
    if not 1 <= side <= min(case.size):
        raise BadInput(
            f"Squares of {side} × {side} pixels were asked for; expected a side of 1 to {min(case.size)}, such as 8."
        )
    (rows, down), (cols, across) = (_along(length, side) for length in case.size)
    return (rows[:, None] * across + cols).flatten().to(case.maps.device), down * across


def _along(length: int, side: int) -> tuple[Tensor, int]:
    """Which stretch of `side` each of so many pixels is in, and how many stretches there are."""
    count = math.ceil(length / side)
    return (torch.arange(length) + (count * side - length) // 2) // side, count


def square_ranks(case: EvalContext, side: int, upsampling: Upsampling) -> tuple[Tensor, int]:
    """[M, B, squares] the place of each square of pixels, by the sum of the map in it, highest first."""
    own, count = squares(case, side)
    sums = torch.stack(
        [maps.new_zeros(len(maps), count).index_add_(1, own, maps.flatten(1)) for maps in case.fine(upsampling)]
    )
    luck = torch.stack([torch.randperm(count, generator=make_generator(mark, 1)) for mark in case.marks]).to(own.device)
    return torch.stack([_places(one, luck) for one in sums]), count


def without(case: EvalContext, rank: Tensor, first: Tensor, end: Tensor, removal: str, score: str, what: str) -> Tensor:
    """[M, B, S] scores when what has a place from first[s] up to, and without, end[s] is gone.

    Each step starts from the clean image. rank [M, B, n], n the pixels or all channel values; first and end [S].
    """
    methods, steps = len(rank), len(first)
    with case.probe(removal, what, methods * steps) as probe:
        check_paints(probe)

        def variant(ks: range) -> Tensor:
            own = torch.tensor(list(ks), device=rank.device)
            place, step = rank[own // steps], (own % steps)[:, None, None]  # [k, B, n]
            gone = (place >= first[step]) & (place < end[step])
            return painted(probe, gone.transpose(0, 1))

        found = probe.score_images(methods * steps, variant, score=case.value(score)).double()
    return found.reshape(-1, methods, steps).transpose(0, 1)


def painted(probe: Probe, gone: Tensor) -> Tensor:
    """[B, k, C, H, W]: the background where `gone`, bool [B or 1, k, H·W or C·H·W]."""
    shaped = gone.reshape(*gone.shape[:2], -1, *probe.size)
    return torch.where(shaped, probe.background[:, None], probe.pixels[:, None])


def check_paints(probe: Probe) -> None:
    if not probe.paints:
        raise BadInput(
            f"Single pixels or channel values were asked for with removal={probe.removal}, which takes whole patches; "
            "expected one that paints: mean, black, minimum, blur, gaussian-blur or noise."
        )


def random_values(case: EvalContext, runs: int, size: int, draws: Draws) -> Tensor:
    """[B or 1, runs, size] places among the C·H·W channel values of an image, none twice in a run."""
    count = case.trace.pixels[0].numel()
    if draws == "quantus":
        return numpys_values(case.seed, runs, count, size)[None].to(case.maps.device)
    found = []
    for mark in case.marks:
        chance = make_generator(mark, VALUES)
        found.append(torch.stack([torch.randperm(count, generator=chance)[:size] for _ in range(runs)]))
    return torch.stack(found).to(case.maps.device)


@functools.lru_cache(maxsize=4)
def numpys_values(seed: int, runs: int, count: int, size: int) -> Tensor:
    """[runs, size] as Quantus draws them for an image alone after np.random.seed(seed); the same for every image.

    Between two sets it draws a fill value, which it uses for `uniform` fills only.
    """
    chance = numpy_chance(seed)
    found = []
    for _ in range(runs):
        found.append(chance.choice(count, size, replace=False))
        chance.uniform()
    return torch.from_numpy(np.stack(found))


def scores_without_values(case: EvalContext, places: Tensor, removal: str, score: str, what: str) -> Tensor:
    """[B, R] scores when the channel values at places [B or 1, R, k] are gone, which all methods share."""
    runs = places.shape[1]
    with case.probe(removal, what, runs) as probe:
        check_paints(probe)
        whole, under = (one.flatten(1)[:, None] for one in (probe.pixels, probe.background))

        def variant(ks: range) -> Tensor:
            own = places[:, ks.start : ks.stop].expand(len(whole), -1, -1)  # [B, k, size]
            copies = whole.repeat(1, len(ks), 1)
            copies.scatter_(2, own, under.expand(-1, len(ks), -1).gather(2, own))
            return copies.reshape(len(whole), len(ks), *probe.pixels.shape[1:])

        return probe.score_images(runs, variant, score=case.value(score)).double()


def sums_at_values(case: EvalContext, places: Tensor, upsampling: Upsampling) -> Tensor:
    """[M, B, R] sums of the map over places [B or 1, R, k]; every channel of a pixel has the pixel's value."""
    pixels = places % math.prod(case.size)
    found = []
    for maps in case.fine(upsampling):
        own = pixels.expand(len(maps), -1, -1)
        found.append(maps.flatten(1).gather(1, own.flatten(1)).reshape(own.shape).sum(-1))
    return torch.stack(found)
