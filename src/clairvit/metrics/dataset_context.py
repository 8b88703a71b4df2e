"""Gallery: all images of a set, for metrics that need several of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clairvit.data.dataset import ImageDataset
from clairvit.execution import ExecutionOptions
from clairvit.methods.explanation import Cost
from clairvit.methods.planner import record_for, run_all, spent_on
from clairvit.methods.spec import MethodSpec
from clairvit.metrics.context import Notes
from clairvit.models.model import Model
from clairvit.targets.resolve import resolve


@dataclass(eq=False)
class DatasetContext:
    """N images, what the model says of each, and M methods to explain what is made of them."""

    model: Model
    dataset: ImageDataset
    specs: tuple[MethodSpec, ...]
    rows: tuple[int, ...]  # [N], in the album: the images that could be read
    logits: Tensor  # [N, C]
    labels: tuple[int | None, ...] | None  # [N], the true classes
    seed: int
    aside: Notes
    spent: Cost = field(default_factory=Cost)
    options: ExecutionOptions = field(default_factory=ExecutionOptions)

    def __len__(self) -> int:
        return len(self.rows)

    def pixels(self, places: Sequence[int]) -> Tensor:
        """[n, 3, H, W], read again."""
        found = torch.stack([self.dataset.read(self.rows[place], self.model).pixels for place in places])
        return found.to(self.model.device, self.model.dtype)

    def explained(self, pixels: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Maps [M, T, rows, cols] of one image [3, H, W] for T classes, and its logits [C]."""
        recording = record_for(self.specs, self.model, pixels[None], self.options)
        targets = resolve(
            list(classes),
            recording.logits.detach(),
            self.model.labels,
            single=True,
            activation=self.model.activation,
        )
        found = run_all(self.specs, recording, targets, seed=self.seed)
        self.spent += spent_on(recording, self.specs, len(targets))
        maps = []
        for spec in self.specs:
            own = found[spec.text]
            for result in own:
                if result.error is not None:
                    raise result.error
            maps.append(torch.cat([result.maps.detach().double() for result in own if result.maps is not None]))
        grids = {tuple(one.shape[-2:]) for one in maps}
        finest = max(grids)
        same = [torch.nn.functional.interpolate(one[:, None], finest, mode="nearest-exact")[:, 0] for one in maps]
        return torch.stack(same), recording.logits[0].detach()
