"""Mistakes: the wrong and unsure answers of a data set as a table, what made the difference, and the rules of kinds.

With p_1 ≥ p_2 ≥ … the probabilities of an answer, c its class and t the true class, the first rule that holds names it:

    confident and wrong   c ≠ t and p_1 ≥ confident
    far down              c ≠ t, and t is after place `far` of the list
    between two           p_1 + p_2 ≥ confident, and t, where it is known, is one of the two
    among many            all others
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from clairvit._cost import Cost
from clairvit._io import to_json, write_text
from clairvit._rows import RowSequence, first, joined, per_row, same, union
from clairvit._tables import SUFFIXES, TableRow, Tabular, check_suffix
from clairvit.errors import BadInput
from clairvit.metrics.confidence_intervals import share_interval
from clairvit.numerics import map_statistics

Kind = Literal["confident and wrong", "far down", "between two", "among many"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Order = Literal["cost", "confidence"]
ORDERS: tuple[str, ...] = get_args(Order)
PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
HTML = ".html"


@dataclass(frozen=True)
class MistakeRules:
    """The numbers that kinds of mistakes are told apart by.

    Args:
        confident: The probability from which an answer is confident, and from which two share it between them.
        far: The last place of the list of classes that is not far down.
        unsure: The probability below which a right answer, or one without a true class, is unsure.
    """

    confident: float = 0.8
    far: int = 5
    unsure: float = 0.5

    def __post_init__(self) -> None:
        for name in ("confident", "unsure"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise BadInput(f"{name}={value!r} was given; expected a probability from 0 to 1.")
        if isinstance(self.far, bool) or not isinstance(self.far, int) or self.far < 1:
            raise BadInput(f"far={self.far!r} was given; expected a place in the list of classes, 1 or more.")

    def is_listed(self, first: float, rank: int | None) -> bool:
        """Return whether an answer is in the table: it is wrong, or unsure.

        Args:
            first: The probability of the answer.
            rank: The place of the true class, from 1; None where it is not known.
        """
        return (rank is not None and rank > 1) or first < self.unsure

    def kind(self, first: float, second: float, rank: int | None) -> Kind:
        """Return the kind of mistake, given the first two probabilities and the place of the true class."""
        wrong = rank is not None and rank > 1
        if wrong and first >= self.confident:
            return "confident and wrong"
        if rank is not None and rank > self.far:
            return "far down"
        if first + second >= self.confident and (rank is None or rank <= 2):
            return "between two"
        return "among many"


@dataclass(frozen=True)
class ConfusedPair:
    """How often a true class was given another answer.

    Args:
        true: The true class.
        predicted: The answer.
        count: The number of images.
        of: The number of images of the true class.
        low, high: The 95 % interval of count / of (Clopper and Pearson's); NaN with fewer than 6 images of the class.
    """

    true: str
    predicted: str
    count: int
    of: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Return count / of."""
        return self.count / self.of


class Mistakes(RowSequence, Tabular):
    """B wrong or unsure answers, each with its contrast map and the patches that made the difference.

    A sequence, the worst first: `result[0]`, `result[:5]`, `result.of_kind("confident and wrong")`.

    Args:
        rows: B places of the images in the data set, from 0.
        names: B names of images.
        true: B names of true classes; None where it is not known.
        predicted: B answers.
        second: B second answers.
        probabilities: [B, 2], of the answer and of the second one.
        true_probabilities: [B], of the true class; NaN where it is not known.
        ranks: B places of the true class in the list of classes, from 1; None where it is not known.
        kinds: B kinds of mistake, by `rules`.
        contrasts: B names of what the maps explain: the answer − the true class, or − the second answer where the
            answer is right or the true class not known.
        maps: [B, rows, columns], raw and signed: positive values speak for the answer and against the other class.
        parts: bool [B, rows, columns], the patches that made the difference: the smallest set of top patches, of the
            sizes that were tried, without which the other class is the answer; none where no size does it.
        needed: B numbers of these patches; None where no size does it.
        random_wins: B numbers of random sets as large, of `draws`, without which the other class is the answer too;
            None where `needed` is None.
        differences: [B, 1 + sizes], logit of the answer − logit of the other class: of the whole image, then without
            the top patches of each size.
        photos: B photos as the model saw them, uint8 [H, W, 3]; None behind the first few.
        sizes: The numbers of patches that were tried.
        model: The name of the model.
        method: The method of the maps.
        by: What they are ordered by: cost or confidence.
        rules: The numbers behind the kinds.
        removal: How patches are removed.
        draws: How many random sets of patches.
        seed: The seed of everything random.
        images: How many images were answered.
        labelled: Of how many of them the true class is known.
        wrong: How many of these were answered wrong.
        pairs: True and predicted class of all wrong answers, the most frequent pair first.
        left_out: Names of images that could not be read, each with the reason.
        cost: Passes per image of the table.
        notes: Fallbacks and the like.

    Example:
        >>> import clairvit as cv
        >>> result = cv.mistakes("pets", ["demo"], labels=["Beagle"])
        >>> result.predicted, result.true, result.contrasts
        (('Bengal',), ('Beagle',), ('Bengal − Beagle',))
    """

    rows: tuple[int, ...] = per_row()
    names: tuple[str, ...] = per_row()
    true: tuple[str | None, ...] = per_row()
    predicted: tuple[str, ...] = per_row()
    second: tuple[str, ...] = per_row()
    probabilities: Tensor = per_row()
    true_probabilities: Tensor = per_row()
    ranks: tuple[int | None, ...] = per_row()
    kinds: tuple[Kind, ...] = per_row()
    contrasts: tuple[str, ...] = per_row()
    maps: Tensor = per_row()
    parts: Tensor = per_row()
    needed: tuple[int | None, ...] = per_row()
    random_wins: tuple[int | None, ...] = per_row()
    differences: Tensor = per_row()
    photos: tuple[Tensor | None, ...] = per_row(repr=False)
    sizes: tuple[int, ...] = same()
    model: str = same()
    method: str = same()
    by: Order = same(default="cost")
    rules: MistakeRules = same(default=MistakeRules())
    removal: str = same(default="token")
    draws: int = same(default=0)
    seed: int = first(default=0)
    images: int = first(default=0)
    labelled: int = first(default=0)
    wrong: int = first(default=0)
    pairs: tuple[ConfusedPair, ...] = first(default=())
    left_out: tuple[tuple[str, str], ...] = union(default=())
    cost: Cost = joined(Cost.of_batches, default_factory=Cost)
    notes: tuple[str, ...] = union(default=())

    @property
    def costs(self) -> tuple[float | None, ...]:
        """Return −log p of the true class of each image; None where it is not known."""
        return tuple(
            None if math.isnan(p) else math.inf if p == 0 else -math.log(p) for p in self.true_probabilities.tolist()
        )

    @property
    def is_wrong(self) -> tuple[bool, ...]:
        """Return which answers are wrong; the others are unsure."""
        return tuple(rank is not None and rank > 1 for rank in self.ranks)

    @property
    def wrong_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the share of wrong answers among images like those with a true class."""
        return share_interval(self.wrong, self.labelled)

    @property
    def kind_counts(self) -> dict[Kind, int]:
        """Return how many answers are of each kind."""
        return {kind: self.kinds.count(kind) for kind in KINDS}

    def of_kind(self, kind: Kind) -> Mistakes:
        """Return the answers of one kind.

        Args:
            kind: One of "confident and wrong", "far down", "between two" and "among many".

        Returns:
            These rows.

        Raises:
            BadInput: There is no such kind.
        """
        if kind not in KINDS:
            raise BadInput(f"There is no kind of mistake {kind!r}; expected one of {', '.join(KINDS)}.")
        return self.take([row for row, name in enumerate(self.kinds) if name == kind])

    def of_pair(self, true: str, predicted: str) -> Mistakes:
        """Return the answers of one pair of classes.

        Args:
            true: The name of the true class.
            predicted: The name of the answer.

        Returns:
            These rows.
        """
        pairs = zip(self.true, self.predicted, strict=True)
        return self.take([row for row, pair in enumerate(pairs) if pair == (true, predicted)])

    @property
    def sentence(self) -> str:
        """Return how many answers are wrong or unsure, in words."""
        unsure = f"{sum(not wrong for wrong in self.is_wrong)} others are unsure (below {self.rules.unsure:g})"
        if not self.labelled:
            unsure = f"{len(self)} of {self.images} answers are unsure (below {self.rules.unsure:g})"
            return f"No true classes are known, so only unsure answers are listed: {unsure}."
        low, high = self.wrong_interval
        interval = "" if math.isnan(low) else f", 95 % interval {100 * low:.1f} % to {100 * high:.1f} %"
        share = f"{100 * self.wrong / self.labelled:.1f} %{interval}"
        return f"{self.wrong} of {self.labelled} answers are wrong ({share}); {unsure}."

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        """Return one line: the model, and how many answers are wrong or unsure."""
        wrong = sum(self.is_wrong)
        return f"Mistakes({self.model}: {wrong} wrong, {len(self) - wrong} unsure of {self.images} answers)"

    def to_dict(self, values: bool = True) -> dict[str, Any]:
        """Return everything as JSON values, without the photos.

        Args:
            values: Include the maps and the patches that made the difference.

        Returns:
            The content of the .json file.
        """
        low, high = self.wrong_interval
        records = self._table()
        if values:
            for record, values_of_map, parts in zip(records, self.maps.tolist(), self.parts.tolist(), strict=True):
                record |= {"map": values_of_map, "parts": parts}
        for record, differences in zip(records, self.differences.tolist(), strict=True):
            record["differences"] = differences
        content = {
            "model": self.model,
            "method": self.method,
            "sentence": self.sentence,
            "images": self.images,
            "labelled": self.labelled,
            "wrong": self.wrong,
            "interval": [low, high],
            "by": self.by,
            "rules": asdict(self.rules),
            "kinds": self.kind_counts,
            "pairs": [{**asdict(pair), "share": pair.share} for pair in self.pairs],
            "sizes": self.sizes,
            "removal": self.removal,
            "draws": self.draws,
            "seed": self.seed,
            "mistakes": records,
            "left_out": [{"image": name, "reason": reason} for name, reason in self.left_out],
            "cost": vars(self.cost),
            "notes": self.notes,
        }
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per answer, in their order."""
        costs, patches = self.costs, math.prod(self.maps.shape[1:])
        return [
            {
                "image": self.names[row],
                "true": self.true[row],
                "predicted": self.predicted[row],
                "probability": float(self.probabilities[row, 0]),
                "second": self.second[row],
                "second_probability": float(self.probabilities[row, 1]),
                "true_probability": float(self.true_probabilities[row]),
                "true_rank": self.ranks[row],
                "kind": self.kinds[row],
                "cost": costs[row],
                "contrast": self.contrasts[row],
                "difference": float(self.differences[row, 0]),
                "needed": self.needed[row],
                "patches": patches,
                "random_wins": self.random_wins[row],
            }
            | {f"map_{name}": value for name, value in map_statistics(self.maps[row]).items()}
            for row in range(len(self))
        ]

    def plot(self, photos: int = 12) -> Any:
        """Draw the first mistakes: the photo, the contrast map with the patches that made the difference, and without.

        Args:
            photos: At most so many rows.

        Returns:
            An array of matplotlib axes [rows, 3].

        Example:
            >>> import clairvit as cv
            >>> cv.mistakes("pets", ["demo"], labels=["Beagle"]).plot().shape
            (1, 3)
        """
        from clairvit.plotting.mistakes import plot_mistakes  # drawing comes after the audit

        return plot_mistakes(self, photos)

    def save(self, path: str | PathLike[str], photos: int = 12) -> Path:
        """Write a file by its suffix: a picture as `plot` draws it, .html a page, .json, .csv (a row per answer).

        Args:
            path: The file to write; readers never see a partial file.
            photos: At most so many photos in a picture or a page, which say how many there are.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix, or a picture of no mistakes.
        """
        suffix = check_suffix(path, (*PICTURES, HTML, *SUFFIXES))
        if suffix == HTML:
            from clairvit.reports.mistakes import mistakes_page  # reports come last

            return write_text(mistakes_page(self, photos), Path(path))
        from clairvit.plotting.mistakes import save_mistakes

        return save_mistakes(self, Path(path), photos)

    def _repr_html_(self) -> str:
        """Return the sentence and the first rows, as a notebook shows them."""
        from clairvit.plotting.mistakes import mistakes_html

        return mistakes_html(self)


def confused_pairs(answers: Sequence[tuple[str, str]]) -> tuple[ConfusedPair, ...]:
    """Return the pairs of different classes among (true, predicted) of all images, the most frequent first."""
    images: dict[str, int] = {}
    counts: dict[tuple[str, str], int] = {}
    for true, predicted in answers:
        images[true] = images.get(true, 0) + 1
        if true != predicted:
            counts[true, predicted] = counts.get((true, predicted), 0) + 1
    pairs = [
        ConfusedPair(true, predicted, count, images[true], *share_interval(count, images[true]))
        for (true, predicted), count in counts.items()
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair.count, pair.true, pair.predicted)))
