"""Recipe: how a model is fine-tuned. The defaults are FocusViT's where the paper gives a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clairvit.errors import BadInput

RESIZED, CUT = 256, 224  # FocusViT's short side and crop; other input sizes keep their ratio


@dataclass(frozen=True)
class Recipe:
    """AdamW with a rate that falls in steps, cross-entropy, and early stopping on the validation images' accuracy."""

    epochs: int = 50  # at most
    batch: int = 32
    rate: float = 1e-4
    decay: float = 0.01  # AdamW's weight decay; the paper names none, this is torch's own
    gamma: float = 0.7  # the rate's factor …
    every: int = 10  # … after so many epochs
    patience: int = 5  # epochs without a better accuracy after which training stops
    resize: int | None = None  # the short side before the crop; None: 256/224 of the model's own
    rotation: float = 15.0  # degrees to either side
    jitter: float = 0.2  # of brightness, contrast and saturation; the paper says no strength
    flip: bool = True
    held_out: float = 0.1  # of each class, for validation, where the data has no such part
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "every", "patience"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} was given for fine-tuning; expected at least 1.")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise BadInput(f"rate={self.rate} was given for fine-tuning; expected a learning rate above 0, like 1e-4.")
        if not 0 < self.gamma <= 1:
            raise BadInput(f"gamma={self.gamma} was given for fine-tuning; expected a factor above 0, at most 1.")
        if not (math.isfinite(self.decay) and self.decay >= 0):
            raise BadInput(f"decay={self.decay} was given for fine-tuning; expected a weight decay of at least 0.")
        if not 0 <= self.rotation <= 180:
            raise BadInput(f"rotation={self.rotation} was given for fine-tuning; expected 0 to 180 degrees.")
        if not 0 <= self.jitter < 1:
            raise BadInput(f"jitter={self.jitter} was given for fine-tuning; expected 0 (none) to below 1.")
        if not 0 < self.held_out < 1:
            raise BadInput(f"held_out={self.held_out} was given for fine-tuning; expected a share between 0 and 1.")

    def box(self, size: tuple[int, int]) -> tuple[int, int]:
        """What pictures are resized to cover before (rows, columns) are cut out of them."""
        if self.resize is None:
            # by a multiple of 4, so that the middle of the box is the middle of the picture, to the pixel: half a
            # difference is rounded to even, in the box's crop as in the finished model's
            rows, columns = (side + 4 * round(side * (RESIZED - CUT) / CUT / 4) for side in size)
            return rows, columns
        short = min(size)
        if self.resize < short:
            raise BadInput(
                f"resize={self.resize} was given for a model of {size[0]} × {size[1]} pixels; expected at least "
                f"{short}."
            )
        return round(size[0] * self.resize / short), round(size[1] * self.resize / short)
