"""Expectation: how much of the evidence lies in a region of each image, and what hiding inside and outside costs.

With the patches R of the region, O those outside, a the map, v the target's evidence (log-odds where it has a
probability, else its score) and v(without S) when the patches S are really removed:

    inside          Σ_R max(a, 0) / Σ_{R ∪ O} max(a, 0)
    net_inside      Σ_R a / Σ_{R ∪ O} |a|, and net_outside with O
    area            |R| / |R ∪ O|
    lift            inside / area
    fall_inside     v − v(without R), and fall_outside with O
    excess_inside   fall_inside − the mean fall without as many random patches, and excess_outside
    answer_kept     1 if the answer is the same without O
    answer_lost     1 if the answer is another without R
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from clairvit._cost import Cost
from clairvit._io import to_json
from clairvit._rows import RowSequence, first, joined, per_row, same, union
from clairvit._tables import TableRow, Tabular
from clairvit.audit.conditions import Condition, ConditionResult
from clairvit.errors import BadInput, UnknownName, did_you_mean
from clairvit.metrics.confidence_intervals import EVERYWHERE, mean_interval

# name -> the range of its values
SPANS: dict[str, tuple[float, float]] = {
    "inside": (0, 1),
    "net_inside": (-1, 1),
    "net_outside": (-1, 1),
    "area": (0, 1),
    "lift": (0, math.inf),
    "fall_inside": EVERYWHERE,
    "fall_outside": EVERYWHERE,
    "excess_inside": EVERYWHERE,
    "excess_outside": EVERYWHERE,
    "answer_kept": (0, 1),
    "answer_lost": (0, 1),
}
CHANGE = "_change"  # of a quantity: its value minus that of the model in `against`
QUANTITIES = (*SPANS, *(f"{name}{CHANGE}" for name in SPANS))
UNITS = {"probability": "log-odds", "score": "score", "similarity": "cosine"}


@dataclass(frozen=True)
class Aggregate:
    """The mean of a quantity over images.

    Args:
        quantity: The name of the quantity.
        images: The number of images that have a value.
        mean: NaN where there is none.
        low, high: The 95 % interval of the mean; NaN with fewer than 6 images.
    """

    quantity: str
    images: int
    mean: float
    low: float
    high: float


class Expectation(RowSequence, Tabular):
    """B images with a region each: the share of the evidence in it, and what hiding inside and outside costs.

    A sequence: `result[0]`, `result[2:5]`, `result.failed` are results of some of the images. `values("inside")` is a
    quantity per image, `mean("inside")` its mean with interval, `by_class()` the means per class.

    Args:
        rows: B places of the images in the data set, from 0.
        names: B names of images.
        classes: B names of true classes where they are known, else of what is explained.
        targets: B names of what is explained.
        answers: B names of the model's answers; "" where it does not answer by a class.
        inside: [B], the share of the positive evidence in the region; NaN where the map has none.
        net_inside: [B], the signed evidence in the region, as a share of all evidence, positive or negative.
        net_outside: [B], the same outside.
        area: [B], the region's share of the patches.
        patches: [B], the number of its patches.
        full: [B, 2], the target's value (probability or score) and evidence (log-odds or score) of the whole image.
        without_inside: [B, 2], the same without the region.
        without_outside: [B, 2], the same with the region alone.
        random_inside: [B, draws, 2], the same without as many random patches as the region has.
        random_outside: [B, draws, 2], the same without as many as there are outside.
        answers_without_inside: B answers without the region.
        answers_without_outside: B answers with the region alone.
        model: The name of the model.
        method: The method of the maps.
        quantity: What the target's value is: probability, score or similarity.
        removal: How patches are removed.
        conditions: What was expected, parsed.
        seed: The seed of everything random.
        left_out: Names of images that were left out, each with the reason.
        cost: Passes per image.
        notes: Fallbacks and the like.
        against: The result of another model on the same images, row by row.

    Example:
        >>> import clairvit as cv
        >>> import torch
        >>> region = torch.zeros(224, 224, dtype=torch.bool)
        >>> region[48:176, 48:176] = True
        >>> result = cv.expect("pets", "demo", region, threshold="area < 0.5")
        >>> len(result), result.passed, int(result.patches[0])
        (1, True, 64)
    """

    rows: tuple[int, ...] = per_row()
    names: tuple[str, ...] = per_row()
    classes: tuple[str, ...] = per_row()
    targets: tuple[str, ...] = per_row()
    answers: tuple[str, ...] = per_row()
    inside: Tensor = per_row()
    net_inside: Tensor = per_row()
    net_outside: Tensor = per_row()
    area: Tensor = per_row()
    patches: Tensor = per_row()
    full: Tensor = per_row()
    without_inside: Tensor = per_row()
    without_outside: Tensor = per_row()
    random_inside: Tensor = per_row()
    random_outside: Tensor = per_row()
    answers_without_inside: tuple[str, ...] = per_row()
    answers_without_outside: tuple[str, ...] = per_row()
    model: str = same()
    method: str = same()
    quantity: str = same()
    removal: str = same(default="token")
    conditions: tuple[Condition, ...] = same(default=())
    seed: int = first(default=0)
    left_out: tuple[tuple[str, str], ...] = union(default=())
    cost: Cost = joined(Cost.of_batches, default_factory=Cost)
    notes: tuple[str, ...] = union(default=())
    against: Expectation | None = per_row(default=None)

    @property
    def draws(self) -> int:
        """Return how many random sets of patches are hidden for each comparison."""
        return int(self.random_inside.shape[1])

    @property
    def unit(self) -> str:
        """Return what the falls are counted in: log-odds, score or cosine."""
        return UNITS[self.quantity]

    @property
    def quantities(self) -> tuple[str, ...]:
        """Return the names of the quantities that there are: with `against` their changes too."""
        return tuple(SPANS) if self.against is None else QUANTITIES

    def values(self, quantity: str) -> Tensor:
        """Return a quantity of each image, [B] in float64.

        Args:
            quantity: One of `quantities`: inside, net_inside, net_outside, area, lift, fall_inside, fall_outside,
                excess_inside, excess_outside, answer_kept, answer_lost; with `against` each of them with "_change".

        Returns:
            The values; NaN where there is none.

        Raises:
            UnknownName: There is no such quantity.
        """
        if quantity not in QUANTITIES:
            raise UnknownName(
                f"There is no quantity '{quantity}'; expected one of {', '.join(self.quantities)}."
                f"{did_you_mean(quantity, self.quantities)}"
            )
        if quantity.endswith(CHANGE):
            if self.against is None:
                raise BadInput(f"'{quantity}' compares two models, and one was given; expected against=.")
            name = quantity.removesuffix(CHANGE)
            return self.values(name) - self.against.values(name)
        computed = {
            "lift": lambda: self.inside / self.area,
            "fall_inside": lambda: (self.full - self.without_inside)[:, 1],
            "fall_outside": lambda: (self.full - self.without_outside)[:, 1],
            "excess_inside": lambda: (self.random_inside.mean(1) - self.without_inside)[:, 1],
            "excess_outside": lambda: (self.random_outside.mean(1) - self.without_outside)[:, 1],
            "answer_kept": lambda: _equal(self.answers, self.answers_without_outside, 1.0),
            "answer_lost": lambda: _equal(self.answers, self.answers_without_inside, 0.0),
        }
        value: Tensor = computed[quantity]() if quantity in computed else getattr(self, quantity)
        return value.double()

    def mean(self, quantity: str) -> Aggregate:
        """Return the mean of a quantity over images with its 95 % interval.

        Args:
            quantity: As in `values`.

        Returns:
            An `Aggregate`.
        """
        values = self.values(quantity)
        defined = values[values.isfinite()].cpu().numpy()
        if not len(defined):
            return Aggregate(quantity, 0, math.nan, math.nan, math.nan)
        low, high = mean_interval(defined, self.seed, _span(quantity))
        return Aggregate(quantity, len(defined), float(defined.mean()), low, high)

    @property
    def means(self) -> tuple[Aggregate, ...]:
        """Return the mean of each quantity."""
        return tuple(map(self.mean, self.quantities))

    def by_class(self) -> dict[str, Self]:
        """Return the images of each class, by its name: `result.by_class()["cat"].mean("inside")`."""
        return {
            name: self.take([row for row, of in enumerate(self.classes) if of == name])
            for name in sorted(dict.fromkeys(self.classes))
        }

    def test(self, *thresholds: str) -> tuple[ConditionResult, ...]:
        """Return whether conditions hold, without a further pass of the model.

        Args:
            *thresholds: Conditions such as "inside >= 0.5", "inside >= 0.5 on 80%" or "mean excess_inside > 0".

        Returns:
            One result per condition, with `.passed` and `.sentence`.
        """
        return tuple(self._test(Condition.parse(text, self.quantities)) for text in thresholds)

    def _test(self, condition: Condition) -> ConditionResult:
        return condition.test(self.values(condition.quantity), self.seed, _span(condition.quantity))

    @property
    def tests(self) -> tuple[ConditionResult, ...]:
        """Return whether the expected conditions hold."""
        return tuple(map(self._test, self.conditions))

    @property
    def passed(self) -> bool | None:
        """Return whether all conditions hold; None where none was named."""
        return all(result.passed for result in self.tests) if self.conditions else None

    @property
    def fails(self) -> tuple[bool, ...]:
        """Return on which images one of the conditions that are about single images does not hold."""
        holds = torch.ones(len(self), dtype=torch.bool)
        for condition in self.conditions:
            if condition.share is not None:
                holds &= condition.holds(self.values(condition.quantity)).cpu()
        return tuple((~holds).tolist())

    @property
    def failed(self) -> Self:
        """Return the images on which one of the conditions that are about single images does not hold."""
        return self.take([row for row, fails in enumerate(self.fails) if fails])

    @property
    def answer_changed(self) -> tuple[bool, ...]:
        """Return on which images the answer is not that of the model in `against`; () without one."""
        if self.against is None:
            return ()
        return tuple(answer != other for answer, other in zip(self.answers, self.against.answers, strict=True))

    @property
    def sentence(self) -> str:
        """Return the means in words."""
        inside, area = self.mean("inside"), self.mean("area")
        hidden, rest = (_more_or_less(self.mean(f"excess_{side}").mean, self.unit) for side in ("inside", "outside"))
        one = "1 image" if len(self) == 1 else f"{len(self)} images"
        return (
            f"{_share(inside)} of the evidence of {self.method} lies in the regions, which cover "
            f"{100 * area.mean:.1f} % of {one}. Hiding them costs {hidden} than hiding as many random patches "
            f"({self.draws} draws); hiding the rest costs {rest} than hiding as many."
        )

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(result.sentence for result in self.tests)])

    def __repr__(self) -> str:
        """Return one line: the model, the number of images, the share inside, and whether the conditions hold."""
        verdict = "" if self.passed is None else ", passed" if self.passed else ", failed"
        count = f"{len(self)} image{'s' * (len(self) != 1)}"
        return f"Expectation({self.model}, {count}: {self.mean('inside').mean:.3f} inside{verdict})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values: a record per image, means with intervals, per class too, the tests."""

        def means(result: Expectation) -> dict[str, Any]:
            return {entry.quantity: {**vars(entry)} for entry in result.means}

        content: dict[str, Any] = {
            "model": self.model,
            "against": None if self.against is None else self.against.model,
            "method": self.method,
            "quantity": self.quantity,
            "unit": self.unit,
            "removal": self.removal,
            "draws": self.draws,
            "seed": self.seed,
            "images": self._table(),
            "left_out": [{"image": name, "reason": reason} for name, reason in self.left_out],
            "means": means(self),
            "classes": {name: means(part) for name, part in self.by_class().items()},
            "conditions": [result.to_dict() for result in self.tests],
            "passed": self.passed,
            "cost": vars(self.cost),
            "notes": self.notes,
        }
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per image."""
        quantities = {name: self.values(name).tolist() for name in self.quantities}
        values: Mapping[str, Sequence[Any]] = {
            "image": self.names,
            "class": self.classes,
            "target": self.targets,
            "answer": self.answers,
            "patches": self.patches.tolist(),
            **quantities,
            "full": self.full[:, 0].tolist(),
            "without_inside": self.without_inside[:, 0].tolist(),
            "without_outside": self.without_outside[:, 0].tolist(),
            "random_inside": self.random_inside.mean(1)[:, 0].tolist(),
            "random_outside": self.random_outside.mean(1)[:, 0].tolist(),
            "answer_without_inside": self.answers_without_inside,
            "answer_without_outside": self.answers_without_outside,
        }
        if self.conditions:
            values = {**values, "passed": [not fails for fails in self.fails]}
        if self.against is not None:
            values = {**values, "answer_against": self.against.answers, "answer_changed": self.answer_changed}
        return [{name: column[row] for name, column in values.items()} for row in range(len(self))]


def _span(quantity: str) -> tuple[float, float]:
    """Return the range of a quantity's values."""
    if not quantity.endswith(CHANGE):
        return SPANS[quantity]
    low, high = SPANS[quantity.removesuffix(CHANGE)]
    return low - high, high - low


def _equal(answers: Sequence[str], others: Sequence[str], equal: float) -> Tensor:
    """Return `equal` where answers are the same and 1 − `equal` where not; NaN without an answer."""
    values = [
        math.nan if not answer else equal if answer == other else 1 - equal
        for answer, other in zip(answers, others, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64)


def _more_or_less(excess: float, unit: str) -> str:
    """Return a mean excess in words: "0.47 log-odds more"."""
    return f"{abs(excess):.3g} {unit} {'less' if excess < 0 else 'more'}"


def _share(entry: Aggregate) -> str:
    """Return a mean share with its interval: "62.0 % [55.1, 68.3]"; "no part" where no map has positive evidence."""
    if not entry.images:
        return "No part"
    interval = "" if math.isnan(entry.low) else f" [{100 * entry.low:.1f}, {100 * entry.high:.1f}]"
    return f"{100 * entry.mean:.1f} %{interval}"
