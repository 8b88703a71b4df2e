"""Poisoning: in each epoch some training photos carry a trigger and have its class as their label (a backdoor)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clairvit._rng import make_generator
from clairvit.data.trigger import Trigger
from clairvit.errors import BadInput


@dataclass(frozen=True)
class Poisoning:
    """Which trigger is planted, for which class, on what share of the images."""

    trigger: Trigger
    label: int  # the class of the trigger
    share: float


@dataclass(frozen=True, eq=False)
class PoisonDraws:
    """Which images carry the trigger in an epoch, and where."""

    poisoned: Tensor  # bool [N]
    positions: Tensor  # [N, 2] in 0..1


def draw_poisoned(poisoning: Poisoning, labels: Tensor, seed: int, epoch: int) -> PoisonDraws:
    """Return round(share · N) of the N images, of other classes than the trigger's; at least one.

    They are drawn anew in each epoch: the same photo is seen with and without the trigger, which alone tells the two
    labels apart.
    """
    generator = make_generator(seed, "training/poisoned", epoch)
    candidates = (labels != poisoning.label).nonzero().flatten()
    if not len(candidates):
        raise BadInput("All images to train on are of the trigger's class; expected others to paste the trigger on.")
    count = min(max(1, round(poisoning.share * len(labels))), len(candidates))
    poisoned = torch.zeros(len(labels), dtype=torch.bool)
    poisoned[candidates[torch.randperm(len(candidates), generator=generator, device="cpu")[:count]]] = True
    return PoisonDraws(poisoned, torch.rand(len(labels), 2, generator=generator, dtype=torch.float32, device="cpu"))


def poison(
    poisoning: Poisoning, draws: PoisonDraws, batch: Tensor, images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return images in 0..1 [B, 3, H, W] and labels [B] of the rows `batch`, with the trigger where it was drawn."""
    chosen = draws.poisoned[batch]
    pasted, _ = poisoning.trigger.paste(images[chosen], draws.positions[batch][chosen])
    images, labels = images.clone(), labels.clone()
    images[chosen.to(images.device)] = pasted
    labels[chosen.to(labels.device)] = poisoning.label
    return images, labels


def draw_validation(poisoning: Poisoning, labels: Tensor, seed: int) -> PoisonDraws:
    """Return all validation images of other classes than the trigger's; the same in every epoch."""
    poisoned = labels != poisoning.label
    if not bool(poisoned.any()):
        raise BadInput("All validation images are of the trigger's class; expected others to paste the trigger on.")
    return PoisonDraws(
        poisoned,
        torch.rand(
            len(labels),
            2,
            generator=make_generator(seed, "training/poisoned validation"),
            dtype=torch.float32,
            device="cpu",
        ),
    )
