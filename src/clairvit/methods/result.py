"""MapResult: what a method returns when it has more to say than its map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from clairvit._rows import Rows, per_row
from clairvit.perturbation.probe import Probe

SURE = 0.95  # the probability from which on a patch is surely among the brightest


class Refinement(Rows):
    """What the passes of a refined map showed: the scores, with which it can be refined further, and sure patches.

    Args:
        scores: [B, N], the target's score in each pass; log-odds where that is the probability of one class.
        in_top: [B, rows, cols], the probability that a patch is among the brightest 10 %, by 1,000 draws of the
            posterior.

    Example:
        >>> import clairvit as cv
        >>> refinement = cv.explain("pets", "demo", passes=16).refinement
        >>> tuple(refinement.scores.shape), tuple(refinement.in_top.shape)
        ((1, 16), (1, 14, 14))
    """

    scores: Tensor = per_row()
    in_top: Tensor = per_row()

    @property
    def passes(self) -> int:
        """Return how many passes have refined the maps."""
        return self.scores.shape[1]

    def sentence(self, row: int = 0) -> str:
        """Return how many of the brightest patches are surely among them.

        Args:
            row: The number of the map.

        Returns:
            One sentence.

        Example:
            >>> import clairvit as cv, torch
            >>> in_top = torch.tensor([[[0.99, 0.97, 0.6, 0.44], *[[0.0] * 4] * 7]])
            >>> cv.results.Refinement(torch.zeros(1, 64), in_top).sentence()
            'After 64 passes, 2 of the 3 brightest patches are in the top 3 with a probability of 95 % or more.'
        """
        count = top_count(self.in_top[row].numel())
        sure = min(int((self.in_top[row] >= SURE).sum()), count)
        which = f"{sure} of the {count} brightest patches {'is' if sure == 1 else 'are'}"
        if count == 1:
            which = "the brightest patch is" if sure else "the brightest patch is not"
        return f"After {self.passes} passes, {which} in the top {count} with a probability of 95 % or more."


def top_count(patches: int) -> int:
    """Return how many patches the brightest 10 % are, one at the least."""
    return max(round(patches / 10), 1)


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
        refinement: What the passes of a refined map showed.

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
    refinement: Refinement | None = None  # of maps that passes refined

    @classmethod
    def from_probe(
        cls,
        maps: Tensor,
        probe: Probe,
        *,
        standard_error: Tensor | None = None,
        notes: Sequence[str] = (),
        refinement: Refinement | None = None,
    ) -> MapResult:
        """Return the result of a method that removed patches: the probe's notes come first."""
        notes = (*probe.notes, *notes)
        return cls(maps, standard_error, notes=notes, unmoved=probe.unmoved(), refinement=refinement)


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
