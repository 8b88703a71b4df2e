"""Rank and remove single pixels, channel values or squares of pixels, for metrics finer than patches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clairvit.errors import BadInput
from clairvit.metrics.context import EvalContext, Upsampling, inverse_permutation, sort_with_ties
from clairvit.numerics import min_max
from clairvit.perturbation.probe import Probe


def merge_rounding_ties(maps: Tensor) -> Tensor:
    """Return maps [B, H, W] in 0 … 1 whose values are equal where only rounding makes them differ.

    Upsampling turns plateaus into values that differ in the last bits.
    """
    return min_max(maps, (1, 2)).round(decimals=9)


def rankable_maps(context: EvalContext, upsampling: Upsampling) -> Iterator[Tensor]:
    """Yield maps [B, H, W], method by method; those that were interpolated without ties broken by rounding."""
    for raw, maps in zip(context.raw, context.pixel_maps(upsampling), strict=True):
        interpolated = upsampling != "nearest" and raw.shape[-2:] != maps.shape[-2:]
        yield merge_rounding_ties(maps) if interpolated else maps


def pixel_ranks(context: EvalContext, upsampling: Upsampling) -> Tensor:
    """Return the rank of each pixel, [M, B, H·W], 0 for the highest; ties in a random order from seed and image."""
    maps = rankable_maps(context, upsampling)
    return _ranks(context, (values.flatten(1) for values in maps), math.prod(context.size))


def value_ranks(context: EvalContext, upsampling: Upsampling) -> Tensor:
    """Return the rank of each channel value, [M, B, C·H·W]; those of one pixel, which share its map, are adjacent."""
    channels = context.trace.pixels.shape[1]
    channel = torch.arange(channels, device=context.maps.device)[:, None]
    return (channels * pixel_ranks(context, upsampling)[:, :, None] + channel).flatten(2)


def _ranks(context: EvalContext, values: Iterator[Tensor], count: int) -> Tensor:
    """Return ranks [M, B, n] of values [B, n] per method, 0 for the highest."""
    tie_order = context.tie_order(count, "metrics/pixel ties")
    return torch.cat([inverse_permutation(sort_with_ties(rows[None], tie_order)) for rows in values])


def squares(context: EvalContext, side: int) -> tuple[Tensor, int]:
    """Return the index of the square that each pixel is in, [H·W], row by row, and the number of squares.

    Where the side does not divide the image, squares extend beyond both edges, half a pixel more at the far one.
    """
    if not 1 <= side <= min(context.size):
        raise BadInput(
            f"Squares of {side} × {side} pixels were asked for; expected a side of 1 to {min(context.size)}, such as 8."
        )
    (rows, down), (cols, across) = (_stretches(length, side) for length in context.size)
    return (rows[:, None] * across + cols).flatten().to(context.maps.device), down * across


def _stretches(length: int, side: int) -> tuple[Tensor, int]:
    """Return the index of the stretch of `side` pixels that each of `length` pixels is in, and their number."""
    count = math.ceil(length / side)
    return (torch.arange(length) + (count * side - length) // 2) // side, count


def square_ranks(context: EvalContext, side: int, upsampling: Upsampling) -> tuple[Tensor, int]:
    """Return the rank of each square of pixels, [M, B, squares], by the sum of the map in it, and their number."""
    square, count = squares(context, side)
    sums = (
        maps.new_zeros(len(maps), count).index_add_(1, square, maps.flatten(1))
        for maps in context.pixel_maps(upsampling)
    )
    return _ranks(context, sums, count), count


def score_without_ranks(
    context: EvalContext, rank: Tensor, first: Tensor, end: Tensor, removal: str, score: str, name: str
) -> Tensor:
    """Return scores [M, B, S] of the image without what has a rank in first[s] … end[s] - 1, for each step s.

    rank [M, B, n], n the pixels or all channel values; first and end [S].
    """
    methods, steps = len(rank), len(first)
    with context.probe(removal, name, methods * steps) as probe:
        check_paints(probe)

        def variant(ks: range) -> Tensor:
            variants = torch.tensor(list(ks), device=rank.device)
            ranks, step = rank[variants // steps], (variants % steps)[:, None, None]  # [k, B, n]
            removed = (ranks >= first[step]) & (ranks < end[step])
            return painted(probe, removed.transpose(0, 1))

        scores = probe.score_images(methods * steps, variant, score=context.score_function(score)).double()
    return scores.reshape(-1, methods, steps).transpose(0, 1)


def drops_and_sums_of_segments(
    context: EvalContext, labels: Tensor, removal: str, score: str, upsampling: Upsampling, name: str
) -> tuple[Tensor, Tensor]:
    """Return f(x) − f(x without segment k) [B, K] and the sums of the maps in it [M, B, K], for labels of pixels [H·W].

    The passes are shared by all methods.
    """
    count = int(labels.max()) + 1
    with context.probe(removal, name, count) as probe:
        check_paints(probe)

        def variant(ks: range) -> Tensor:
            return painted(probe, (labels == torch.tensor(list(ks), device=labels.device)[:, None])[None])

        scores = probe.score_images(count, variant, score=context.score_function(score)).double()
    sums = [
        maps.new_zeros(len(maps), count).index_add_(1, labels, maps.flatten(1))
        for maps in context.pixel_maps(upsampling)
    ]
    return context.original(score)[:, None] - scores, torch.stack(sums)


def painted(probe: Probe, removed: Tensor) -> Tensor:
    """Return [B, k, C, H, W]: the background where `removed`, bool [B or 1, k, H·W or C·H·W], else the image."""
    mask = removed.reshape(*removed.shape[:2], -1, *probe.size)
    return torch.where(mask, probe.background[:, None], probe.pixels[:, None])


def check_paints(probe: Probe) -> None:
    """Raise BadInput if the removal works on whole patches only."""
    if not probe.paints:
        raise BadInput(
            f"Single pixels or channel values were asked for with removal={probe.removal}, which takes whole patches; "
            "expected one that paints: mean, image-mean, black, minimum, blur, gaussian-blur or noise."
        )


def score_without_values(context: EvalContext, indices: Tensor, removal: str, score: str, name: str) -> Tensor:
    """Return scores [B, R] of images without the channel values at indices [B or 1, R, k], for all methods."""
    runs = indices.shape[1]
    with context.probe(removal, name, runs) as probe:
        check_paints(probe)
        images, background = (values.flatten(1)[:, None] for values in (probe.pixels, probe.background))

        def variant(ks: range) -> Tensor:
            removed = indices[:, ks.start : ks.stop].expand(len(images), -1, -1)  # [B, k, size]
            copies = images.repeat(1, len(ks), 1)
            copies.scatter_(2, removed, background.expand(-1, len(ks), -1).gather(2, removed))
            return copies.reshape(len(images), len(ks), *probe.pixels.shape[1:])

        return probe.score_images(runs, variant, score=context.score_function(score)).double()


def sums_at_values(context: EvalContext, indices: Tensor, upsampling: Upsampling) -> Tensor:
    """Return sums [M, B, R] of the map over channel values [B or 1, R, k]; all channels have the pixel's value."""
    pixels = indices % math.prod(context.size)
    sums = []
    for maps in context.pixel_maps(upsampling):
        own_pixels = pixels.expand(len(maps), -1, -1)
        sums.append(maps.flatten(1).gather(1, own_pixels.flatten(1)).reshape(own_pixels.shape).sum(-1))
    return torch.stack(sums)
