"""MapResult: what a method returns when it has more to say than its map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from clairvit.perturbation.probe import Probe


@dataclass(frozen=True, eq=False)
class MapResult:
    """A method's maps with what goes with them; a method that has the maps only returns them as a tensor.

    Args:
        maps: [B, rows, cols].
        standard_error: [B, rows, cols], of maps that are estimated from random samples.
        chosen: Bool [B, rows, cols], the patches that a search selected.
        notes: Sentences for `Explanation.notes`.
        unmoved: [B] or empty: images whose score stayed the same whatever was removed.
        layers: A function that returns the map of each layer, [L, B, rows, cols]; called only where layers are asked
            for.

    Example:
        >>> import clairvit as cv, torch
        >>> cv.extend.MapResult(torch.zeros(1, 14, 14), notes=("a sentence",)).notes
        ('a sentence',)
    """

    maps: Tensor  # [B, rows, cols]
    standard_error: Tensor | None = None  # [B, rows, cols], of maps that are estimated from random samples
    chosen: Tensor | None = None  # bool [B, rows, cols]: the patches that a search selected
    notes: tuple[str, ...] = ()
    unmoved: Sequence[bool] = ()  # [B] or empty: images whose score stayed the same whatever was removed
    layers: Callable[[], Tensor] | None = None  # gives [L, B, rows, cols]; called only where layers are asked for

    @classmethod
    def from_probe(
        cls, maps: Tensor, probe: Probe, *, standard_error: Tensor | None = None, notes: Sequence[str] = ()
    ) -> MapResult:
        """Return the result of a method that removed patches: the probe's notes come first."""
        return cls(maps, standard_error, notes=(*probe.notes, *notes), unmoved=probe.unmoved())


@dataclass(frozen=True)
class LayerGrid:
    """A layer whose map has another size than those of the others.

    Args:
        name: Of the stage of a CNN ("layer4"), or "layer 3".
        rows: Of its map.
        columns: Of its map.
    """

    name: str
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class NumbersNote:
    """A note that is made of numbers on the model's device: read when the maps are, so that no pass waits for it.

    Args:
        numbers: [k, B].
        text: The note of these k lists of B numbers; None if there is nothing to say.
        prefix: What comes before it.
    """

    numbers: Tensor
    text: Callable[[list[list[float]]], str | None]
    prefix: str = ""

    def read(self) -> list[str]:
        """Return the note, if there is one: waits for the device."""
        text = self.text(self.numbers.tolist())
        return [] if text is None else [self.prefix + text]


MapFunction = Callable[..., Tensor | MapResult]  # a layer's map (a tensor), or the map of a whole trace


def as_map_result(output: Tensor | MapResult) -> MapResult:
    """Return what a method returned as a MapResult."""
    return output if isinstance(output, MapResult) else MapResult(output)
