"""DatasetContext: all images of a set, for metrics that need several of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from clairvit._cost import Cost
from clairvit.data.dataset import ImageDataset
from clairvit.execution import ExecutionOptions
from clairvit.methods.planner import record_for, run_all, spent_on
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.context import Notes
from clairvit.models.model import Model
from clairvit.targets.resolve import resolve_for


@dataclass(eq=False)
class DatasetContext:
    """N images with the model's logits, and M methods to explain images that are composed of them."""

    model: Model
    dataset: ImageDataset
    specs: tuple[MethodSpec, ...]
    rows: tuple[int, ...]  # [N], in the dataset: the images that could be read
    logits: Tensor  # [N, C]
    labels: tuple[int | None, ...] | None  # [N], the true classes
    seed: int
    notes_log: Notes
    cost: Cost = field(default_factory=Cost)
    options: ExecutionOptions = field(default_factory=ExecutionOptions)

    def __len__(self) -> int:
        return len(self.rows)

    def pixels(self, indices: Sequence[int]) -> Tensor:
        """Read the images again, [n, 3, H, W]."""
        images = torch.stack([self.dataset.read(self.rows[index], self.model).pixels for index in indices])
        return images.to(self.model.device, self.model.dtype)

    def explain(self, pixels: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return maps [M, T, rows, cols] of one image [3, H, W] for T classes, and its logits [C]."""
        recording = record_for(self.specs, self.model, pixels[None], self.options)
        targets = resolve_for(self.model, list(classes), recording.logits.detach(), single=True)
        results = run_all(self.specs, recording, targets, seed=self.seed)
        self.cost += spent_on(recording, self.specs, len(targets))
        maps = []
        for spec in self.specs:
            for result in results[spec.text]:
                if result.error is not None:
                    raise result.error
            class_maps = [result.maps for result in results[spec.text] if result.maps is not None]
            maps.append(torch.cat([values.detach().double() for values in class_maps]))
        finest = max(tuple(values.shape[-2:]) for values in maps)
        same_size = [F.interpolate(values[:, None], finest, mode="nearest-exact")[:, 0] for values in maps]
        return torch.stack(same_size), recording.logits[0].detach()
