"""Explanation: what a method found, with everything needed to show it, store it and repeat it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from clairvit.models.activation import Activation
from clairvit.models.preprocess import Preprocess


@dataclass(frozen=True)
class Cost:
    """Passes and seconds. Of a map made beside others: as if made alone, so the shared trace counts in each."""

    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0  # the method's own arithmetic, on top of the trace

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forwards + other.forwards,
            self.backwards + other.backwards,
            self.seconds + other.seconds,
            self.own_seconds + other.own_seconds,
        )


FUSIONS = ("min", "mean", "max")


@dataclass(frozen=True, eq=False)
class Heads:
    """What each head says in each layer, and what is left when the heads of a layer are fused in one of three ways."""

    method: str  # whose layer maps these are: the explanation's own method, or raw-attention where it has no heads
    maps: Tensor  # [L, H, B, rows, cols]
    fused: Tensor  # [L, 3, B, rows, cols] by FUSIONS
    whole: Tensor | None = None  # [3, B, rows, cols] the method over all its layers, heads fused so in each of them


@dataclass(frozen=True, eq=False)
class Explanation:
    """B raw signed maps, one for each (image, target). Clipping, upsampling and colour come later, in `show`."""

    maps: Tensor  # [B, rows, cols]
    method: str  # canonical, e.g. "rollout(fusion=max)+skipplus"
    signed: bool
    targets: tuple[str, ...]  # B names: "Egyptian Mau", "Bengal − Egyptian Mau", "class 281"; "any class" if agnostic
    classes: tuple[int | None, ...]  # B class indices asked for; None for a contrast, a callable, several at once
    score: str  # logit | prob | logprob | …; "none" if class-agnostic
    logits: Tensor  # [B, C]
    probabilities: tuple[float | None, ...]  # B, the model's probability of the target class; None: it has none
    pixels: Tensor  # [B, 3, H, W] what the model saw, normalised
    names: tuple[str, ...]  # B image names
    model: str
    labels: tuple[str, ...]
    preprocess: Preprocess
    seed: int
    cost: Cost
    standard_error: Tensor | None = None  # [B, rows, cols] of the maps, where they were drawn by lot
    chosen: Tensor | None = None  # bool [B, rows, cols] the patches that a search settled on (counterfactual)
    layers: Tensor | None = None  # [L, B, rows, cols] what each layer says, where the method has layers
    heads: Heads | None = None  # what each head says, if that was asked for
    family: str = ""  # of the method, e.g. "gradient × attention"
    class_specific: bool = True  # False: the same map whatever the target
    classifier: bool = True  # False: logits are an embedding, so there are no probabilities
    activation: Activation = "softmax"  # what the logits mean; "raw": they are no logits and have no probabilities
    notes: tuple[str, ...] = ()  # fallbacks taken, zero maps, preprocessing that was assumed, …
    weights_hash: str = ""  # of the content of the model's parameters and buffers
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def class_scores(self) -> tuple[float | None, ...]:
        """Return the model's own score of each target class, before any activation; None for other targets."""
        return tuple(
            None if index is None else float(self.logits[row, index]) for row, index in enumerate(self.classes)
        )

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        return f"Explanation({self.method}, {self.model}, maps {tuple(self.maps.shape)}, targets {list(self.targets)})"

    def __getitem__(self, items: int | slice | Sequence[int]) -> Explanation:
        """Return the explanation of some of the maps: ex[0], ex[2:5], ex[[0, 3]]. Iterating yields one at a time."""
        from clairvit.plotting.parts import part

        if isinstance(items, slice):
            return part(self, range(len(self))[items])
        if isinstance(items, Sequence):
            return part(self, [range(len(self))[item] for item in items])
        return part(self, [range(len(self))[operator.index(items)]])

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows for a cell that ends with the explanation."""
        from clairvit.plotting.save import explanation_png

        return explanation_png(self)

    def save(self, path: str | Path, **display: Any) -> Path:
        """Write by suffix: .png/.pdf/.svg/.jpg an overlay, .json the record, .npz the raw maps. Returns the path."""
        from clairvit.plotting.save import save  # display comes after methods; this is the one door back

        return save(self, Path(path), **display)
