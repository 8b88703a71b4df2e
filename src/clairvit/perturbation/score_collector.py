"""Tally: from the logits of many variants to the target's scores, in order; and whether any of them moved."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from clairvit.targets.base import Target
from clairvit.tracing.attention import widened

Value = Callable[[Tensor, list[int]], Tensor]  # (logits [n, C], images [n]) -> [n, …]
Found = list[tuple[Tensor, Tensor]]  # places, and the values that belong there


class ScoreCollector:
    """Scores of variants of a batch of images whose own logits are known."""

    def __init__(self, target: Target, logits: Tensor) -> None:
        self.target, self.logits = target, logits  # [B, C]
        self._seen: list[Tensor] = []  # lowest and highest score of each image, [2, B]

    @functools.cached_property
    def original(self) -> Tensor:
        """[B]"""
        return self._scored(self.target, self.logits)

    def valued(self, logits: Tensor, images: Tensor, value: Value | None) -> Tensor:
        """What is kept of a pass: logits [n, C] of variants of `images` [n]."""
        if value is not None:
            return value(widened(logits), images.tolist())
        if self.target.together:
            return widened(logits)  # the user's own function wants all images at once, in their order
        return self._scored(self.target.take(images.tolist()), logits)

    @staticmethod
    def _scored(target: Target, logits: Tensor) -> Tensor:
        """[n] in float64: what removals change is small beside the score. The user's functions get what they know."""
        own = all(isinstance(row, tuple) for row in target.rows)
        return target(logits.double() if own else widened(logits)).double()

    def by_image(self, values: Tensor, variants: int, images: Tensor | None = None) -> Tensor:
        """[rows·V, …] -> scores [rows, V]; rows are the whole batch, or variants of these `images`."""
        values = values.reshape(-1, variants, *values.shape[1:])
        if self.target.together and variants:
            values = torch.stack([self._together(values[:, v], images) for v in range(variants)], 1)
        if values.numel():
            self._see(values, images)
        return values

    def _together(self, logits: Tensor, images: Tensor | None) -> Tensor:
        """[rows] scores by the user's own function; logits [rows, C] of `images` are shown to it among the others."""
        if images is None:
            return self.target(logits).double()
        whole = widened(self.logits)
        shown = [whole.index_put((images[i],), logits[i]) for i in range(len(images))]
        return torch.stack([self.target(one)[image].double() for one, image in zip(shown, images, strict=True)])

    def _see(self, scores: Tensor, images: Tensor | None) -> None:
        """Remember the lowest and highest of scores [rows, V]; images that were not asked about have neither."""
        count = len(self.logits)
        every = torch.arange(count, device=scores.device) if images is None else images
        low, high = (scores.new_full((count,), end) for end in (math.inf, -math.inf))
        low = low.scatter_reduce(0, every, scores.amin(1), "amin")
        self._seen.append(torch.stack([low, high.scatter_reduce(0, every, scores.amax(1), "amax")]))

    def unmoved(self) -> list[bool]:
        """Images whose score stayed exactly what it was under all that was tried."""
        if not self._seen:
            return [False] * len(self.logits)
        low, high = torch.stack(self._seen).unbind(1)
        same: list[bool] = ((low.amin(0) == self.original) & (high.amax(0) == self.original)).tolist()
        return same


def in_order(found: Found) -> Tensor:
    """Values of places, put where they belong."""
    order = torch.cat([places for places, _ in found]).argsort()
    return torch.cat([part for _, part in found])[order]
