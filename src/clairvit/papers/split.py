"""Split: seeded parts of a set of images, to train on, to choose a start layer by, and to score."""

from __future__ import annotations

from collections.abc import Sequence

from clairvit._rng import make_generator
from clairvit.data.open import stratified_sample
from clairvit.errors import Argument, BadInput

Portion = int | float  # so many images, or a share of them


def check_portion(portion: Portion, name: str) -> None:
    """Raise `BadInput` unless a portion is a number of images, or a share between 0 and 1."""
    is_count = isinstance(portion, int) and not isinstance(portion, bool) and portion >= 0
    if not is_count and not (isinstance(portion, float) and 0 < portion < 1):
        raise BadInput(
            Argument(name, portion), " was given; expected a number of images, such as 200, or a share, such as 0.2."
        )


def portion_size(portion: Portion, total: int) -> int:
    """Return how many of so many images are meant; of a share at least one."""
    return portion if isinstance(portion, int) else max(1, round(portion * total))


def split_off(strata: Sequence[int | None], count: int, seed: int, stream: str) -> tuple[list[int], list[int]]:
    """Return `count` rows and the others, both ascending; each stratum has its share of them, up to one image.

    Args:
        strata: The class of each image; None where it is not known.
        count: How many images are split off.
        seed: Of the sample.
        stream: What the sample is for: parts for different purposes are drawn independently.
    """
    drawn = make_generator(seed, stream).initial_seed() % 2**63
    part = stratified_sample(strata, count, drawn) if count else []
    taken = set(part)
    return part, [row for row in range(len(strata)) if row not in taken]
