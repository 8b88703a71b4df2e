"""Bias maps: FullGrad's own form, for networks whose activations are images: |b · dy/dout| of every bias, as a picture.

As in `biases`, hooks do the work while the gradient passes and nothing of it is kept but one picture an image.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit.tracing.bias_contributions import CHANNELS_SECOND, bias_term
from clairvit.tracing.capture import Capture

EPS = 1e-6  # the authors'


@dataclass(eq=False)
class BiasMaps:
    """What one backward says of all biases, those of convolutions and BatchNorms as a picture."""

    pixels: torch.Size  # [B, 3, H, W]
    image: Tensor | None = None  # [B, H, W]
    total: Tensor | None = None  # [B], signed, of all biases of activations that have the images first
    open: bool = False

    def begin(self) -> None:
        self.image = self.total = None
        self.open = True

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Hook the output of an operation that adds a bias."""
        b = bias_term("learned", func, args, kwargs, out) if isinstance(out, Tensor) and out.requires_grad else None
        if b is None:
            return
        picture = func in CHANNELS_SECOND and out.ndim == 4
        if picture and isinstance(b, Tensor):
            b = b.detach()[:, None, None]

        def told(gradient: Tensor | None) -> None:
            if self.open and gradient is not None:
                numbers = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * b
                if len(numbers) == self.pixels[0]:
                    total = numbers.flatten(1).sum(1)
                    self.total = total if self.total is None else self.total + total
                if picture:
                    size = list(self.pixels[2:])
                    drawn = F.interpolate(rescaled(numbers), size, mode="bilinear", align_corners=True).sum(1)
                    self.image = drawn if self.image is None else self.image + drawn

        out.register_hook(told)

    def told(self) -> tuple[Tensor, Tensor] | None:
        """The picture [B, H, W] and the signed sum [B]; None if no bias had a gradient."""
        self.open = False
        if self.total is None:
            return None
        nothing = self.total.new_zeros(len(self.total), *self.pixels[2:])
        return (nothing if self.image is None else self.image), self.total


def rescaled(values: Tensor) -> Tensor:
    """|v|, from 0 to 1 over all channels [B, C, h, w] of an image."""
    size = values.abs()
    size = size - size.amin((1, 2, 3), keepdim=True)
    return size / (size.amax((1, 2, 3), keepdim=True) + EPS)


def drawn_on(capture: Capture, kinds: Iterable[str], pixels: torch.Size) -> BiasMaps | None:
    """The maps of this capture, if they are asked for; another observer goes on seeing."""
    if "maps" not in kinds:
        return None
    maps, before = BiasMaps(pixels), capture.observer

    def see(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if before is not None:
            before(func, args, kwargs, out)
        maps.see(func, args, kwargs, out)

    capture.observer = see
    return maps
