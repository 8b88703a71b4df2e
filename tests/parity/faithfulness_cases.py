"""What Quantus and this project are both asked about: two small models, and fine maps in which no two pixels tie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parity.peers_models import vit
from parity.small_cnn import small_cnn

TARGETS = [1, 3]
SEED = 11
RUNS = 30
STEP = {"cnn": 24, "vit": 6}  # divides the pixels, as Quantus wants, and is whole pixels: their three values tie
MODELS = {"cnn": small_cnn, "vit": vit}
SQUARES = {"cnn": 8, "vit": 8}  # fits 24 × 40, does not fit 12 × 20: squares stick out


class Whole(nn.Module):
    """Sums of channel values with weights that binary holds exactly."""

    def forward(self, image: Tensor) -> Tensor:
        first = image[:, 0].sum((1, 2)) * 4 + image[:, 1].sum((1, 2)) * 2
        return torch.stack([first, torch.zeros_like(first)], 1)


def photos(name: str) -> tuple[nn.Module, Tensor]:
    """The model in float64, images that float32 holds exactly: Quantus hands its models nothing finer."""
    module, images = MODELS[name]()
    return module, images.float().double()


def maps_of(images: Tensor) -> Tensor:
    """[B, H, W], signed; float64."""
    generator = torch.Generator().manual_seed(21)
    return torch.randn(len(images), *images.shape[-2:], generator=generator, dtype=torch.float64)


def dyadic() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, an image of zeros and ones, and a map that adds up to 16 exactly.

    That is what the first channel adds to the first class; the second adds 8 more.
    """
    image = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    image[0, :2, :2, :2] = 1
    maps = torch.full((1, 8, 8), 0.25, dtype=torch.float64)
    maps[0, 0, 0] = 1  # the largest, so that dividing by it changes nothing
    maps[0, -1, -1] = 16 - float(maps.sum()) + 0.25
    return Whole().eval(), image, maps
