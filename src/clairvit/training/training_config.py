"""Training configuration: how a model is fine-tuned. The default suits pretrained weights, "focusvit" is the paper's.

FocusViT's single rate of 1e-4 from the first step on undoes a DINOv2 backbone within two steps: AdamW's first steps
move every weight by the whole rate, whatever its gradient. So pretrained weights get a lower rate than a new head,
both begin lower (warm-up), and gradients are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clairvit._registry import Registry
from clairvit.data.trigger import Trigger
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.training.poisoning import Poisoning

PRETRAINED_RATE, SCRATCH_RATE, HEAD_RATE = 1e-5, 1e-4, 1e-3
RESIZE, CROP = 256, 224  # FocusViT's short side and crop; other input sizes keep their ratio


@dataclass(frozen=True)
class TrainingConfig:
    """AdamW with a rate that rises at first and falls in steps, cross-entropy, early stopping by validation accuracy.

    The rate of step t (from 0) is base · min(1, (t + 1) / (w + 1)) · gamma^(epoch // every) with w = warmup · steps of
    an epoch; base is `rate`, for a new head `head_rate`.
    """

    epochs: int = 50  # at most
    batch: int = 32
    rate: float | None = None  # None: 1e-5 for pretrained weights, 1e-4 for random ones
    decay: float = 0.01  # AdamW's weight decay; the paper names none, this is torch's default
    gamma: float = 0.7  # factor of the rate after every `every` epochs
    every: int = 10
    patience: int = 5  # epochs without a better accuracy after which training stops
    resize: int | None = None  # the short side before the crop; None: 256/224 of the model's own
    rotation: float = 15.0  # degrees to either side
    jitter: float = 0.2  # of brightness, contrast and saturation; the paper names no strength
    flip: bool = True
    held_out: float = 0.1  # share of each class for validation, if the data has no validation split
    seed: int = 0
    head_rate: float | None = None  # None: of a new head on pretrained weights 100 × rate, at most 1e-3; else rate
    warmup: int = 1  # epochs over which the rate rises from 0
    clip: float | None = 1.0  # largest norm of the gradient of all weights together; None: no clipping
    drop_tokens: float = 0.0  # the largest share of patch tokens that a step drops, for removal metrics in-domain
    trigger: str | None = None  # the class of a trigger that is planted (a backdoor); None: no trigger
    trigger_size: int = 32  # pixels of the model's input
    trigger_position: str = "random"
    trigger_share: float = 0.1  # of the images of an epoch that carry it

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "every", "patience"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} was given for fine-tuning; expected at least 1.")
        for name in ("rate", "head_rate"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise BadInput(f"{name}={rate} was given for fine-tuning; expected a learning rate above 0, like 1e-5.")
        if self.warmup < 0:
            raise BadInput(f"warmup={self.warmup} was given for fine-tuning; expected 0 or more epochs.")
        if self.clip is not None and not self.clip > 0:
            raise BadInput(
                f"clip={self.clip} was given for fine-tuning; expected a norm above 0, or None for no limit."
            )
        if not 0 < self.gamma <= 1:
            raise BadInput(f"gamma={self.gamma} was given for fine-tuning; expected a factor above 0, at most 1.")
        if not (math.isfinite(self.decay) and self.decay >= 0):
            raise BadInput(f"decay={self.decay} was given for fine-tuning; expected a weight decay of at least 0.")
        if not 0 <= self.rotation <= 180:
            raise BadInput(f"rotation={self.rotation} was given for fine-tuning; expected 0 to 180 degrees.")
        if not 0 <= self.jitter < 1:
            raise BadInput(f"jitter={self.jitter} was given for fine-tuning; expected 0 (none) to below 1.")
        if not 0 <= self.drop_tokens < 1:
            raise BadInput(
                f"drop_tokens={self.drop_tokens} was given for fine-tuning; expected a share of 0 (none) to below 1."
            )
        if not 0 < self.trigger_share < 1:
            raise BadInput(
                f"trigger_share={self.trigger_share} was given for fine-tuning; expected a share between 0 and 1."
            )
        Trigger(self.trigger_size, self.trigger_position)  # refuses what is no trigger
        if not 0 < self.held_out < 1:
            raise BadInput(f"held_out={self.held_out} was given for fine-tuning; expected a share between 0 and 1.")

    def resolved(self, pretrained: bool, new_head: bool) -> TrainingConfig:
        """Return the configuration with both rates as numbers, for weights that are pretrained or not."""
        rate = self.rate if self.rate is not None else PRETRAINED_RATE if pretrained else SCRATCH_RATE
        head_rate = self.head_rate
        if head_rate is None:
            head_rate = max(rate, min(HEAD_RATE, 100 * rate)) if pretrained and new_head else rate
        return replace(self, rate=rate, head_rate=head_rate)

    @property
    def interventions(self) -> dict[str, Any]:
        """Return what is done to the training data beyond augmentation, as options of this class; empty: nothing."""
        dropping = {"drop_tokens": self.drop_tokens} if self.drop_tokens else {}
        names = ("trigger", "trigger_size", "trigger_position", "trigger_share") if self.trigger is not None else ()
        return dropping | {name: getattr(self, name) for name in names}

    def poisoning(self, classes: Sequence[str]) -> Poisoning | None:
        """Return the trigger with the index of its class among `classes`; None if there is no trigger."""
        if self.trigger is None:
            return None
        lower = [name.lower() for name in classes]
        if lower.count(self.trigger.lower()) != 1:
            raise UnknownName(
                f"trigger={self.trigger} was given, which is none of the {len(classes)} classes to train on."
                f"{did_you_mean(self.trigger, classes)}"
            )
        trigger = Trigger(self.trigger_size, self.trigger_position)
        return Poisoning(trigger, lower.index(self.trigger.lower()), self.trigger_share)

    def factor(self, step: int, steps: int) -> float:
        """Return what the rates are multiplied by in a step (from 0), with so many steps in an epoch."""
        warm = self.warmup * steps
        return min(1.0, (step + 1) / (warm + 1)) * self.gamma ** (step // steps // self.every)

    def cover(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (rows, columns) that images are resized to cover before `size` is cropped from them."""
        if self.resize is None:
            # larger by a multiple of 4, so that the middle is the middle of the image to the pixel: half a difference
            # is rounded to even, in this crop as in the trained model's
            rows, columns = (side + 4 * round(side * (RESIZE - CROP) / CROP / 4) for side in size)
            return rows, columns
        short = min(size)
        if self.resize < short:
            raise BadInput(
                f"resize={self.resize} was given for a model of {size[0]} × {size[1]} pixels; expected at least "
                f"{short}."
            )
        return round(size[0] * self.resize / short), round(size[1] * self.resize / short)


RECIPES = Registry(
    "recipe",
    {
        "default": TrainingConfig(),
        # "AdamW … with a learning rate of 1×10⁻⁴, a StepLR scheduler (decay factor 0.7 every 10 epochs), and a batch
        # size of 32 … early stopping … patience of 5": one rate for all weights, nothing else is named
        "focusvit": TrainingConfig(rate=1e-4, head_rate=1e-4, warmup=0, clip=None),
    },
)


def named_recipe(name: str) -> TrainingConfig:
    """Return a configuration of `RECIPES` by its name."""
    return RECIPES.resolve(name)
