"""CheckResult: how far each map can be trusted, as a verdict by stated thresholds, one sentence, and the numbers.

The verdict depends on the effects e_f of removing the brightest patches (`RemovalEffect.effect`), and on nothing else:

    supported                 (e_10% + e_30%) / 2 ≥ SUPPORTED
    not better than chance    (e_10% + e_30%) / 2 < CHANCE, or a map that ranks no patch above another
    weak                      between the two
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, overload

from numpy.typing import NDArray
from torch import Tensor

from clairvit._cost import Cost
from clairvit._io import to_json
from clairvit._rows import Indices, Rows, first, joined, per_row, row_numbers, union
from clairvit._tables import TableRow, Tabular
from clairvit.errors import BadInput
from clairvit.numerics import percent
from clairvit.targets.similar import SIMILAR_TO

Verdict = Literal["supported", "weak", "not better than chance"]
Quantity = Literal["probability", "score", "similarity"]

# A random ranking reaches SUPPORTED in about 1 % and CHANCE in about 7 % of the cases if patches add up; validated on
# photos, real maps against the same maps with their patches shuffled: docs/check.md, benchmarks/check.py.
SUPPORTED = 3.0  # mean effect, in standard deviations of a random removal
CHANCE = 1.5
SMALL_FALL = 0.01  # of a probability: a smaller one hardly shows in the sentence
CLEAR_FALL = 0.05  # of a probability; where the smaller removal costs less, the sentence is about the larger one
UNSTABLE = 0.5  # rank correlation with the map of a noisy copy
OUTLIERS_MATTER = 0.25  # share of outlier tokens among the brightest patches
LARGEST_EFFECT = 99.0  # where all random removals cost the same, an effect has no bound

CONCLUSIONS: dict[Verdict | None, str] = {
    "supported": "This map points at what the model uses.",
    "weak": "This map points at what the model uses in part; do not rely on it alone.",
    "not better than chance": "This map is not better than chance.",
    None: "This map cannot be checked.",
}


@dataclass(frozen=True)
class RemovalEffect:
    """What the removal of the brightest patches costs, against the removal of as many random patches.

    Args:
        fraction: The share of the patches that are removed.
        patches: Their number.
        top: The value without the brightest ones.
        random: The values without random ones, one per draw.
        effect: e = (mean of random − top) / standard deviation, on the scale of the evidence (docs/check.md).

    Example:
        >>> import clairvit as cv
        >>> removal = cv.explain("pets", "demo", "genatt").check()[0].removals[0]
        >>> removal.fraction, removal.patches, len(removal.random)
        (0.1, 20, 3)
    """

    fraction: float
    patches: int
    top: float
    random: tuple[float, ...]
    effect: float

    @property
    def random_mean(self) -> float:
        """Return the mean over the random draws."""
        return math.fsum(self.random) / len(self.random)

    @property
    def random_spread(self) -> float:
        """Return the standard deviation of the random draws (of a sample)."""
        mean, count = self.random_mean, len(self.random)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.random) / max(count - 1, 1))


@dataclass(frozen=True)
class MapCheck:
    """The check of one map.

    Args:
        name: The name of the image.
        target: The name of what is scored.
        method: The method; "" for maps of unknown origin.
        quantity: What the values are: probability, score, or similarity of embeddings.
        full: The value of the whole image.
        removals: Without the brightest 10 % and 30 % of the patches.
        kept: With the brightest 10 % alone.
        kept_random: With a random 10 % alone.
        stability: The rank correlation with the map of a noisy copy; None where the method costs too much to repeat.
        agreement: Method of another family -> rank correlation with its map; None where it is undefined.
        outliers: The number of high-norm outlier tokens; None where norms cannot be compared.
        outlier_share: Their share among the brightest 10 %.
        verdict: None if the map cannot be checked.
        remarks: What else a reader must know, one sentence each.

    Example:
        >>> import clairvit as cv
        >>> check = cv.explain("pets", "demo", "genatt").check()[0]
        >>> check.verdict, check.quantity
        ('supported', 'probability')
    """

    name: str
    target: str
    method: str
    quantity: Quantity
    full: float
    removals: tuple[RemovalEffect, ...]
    kept: float
    kept_random: float
    stability: float | None
    agreement: Mapping[str, float | None]
    outliers: int | None
    outlier_share: float | None
    verdict: Verdict | None
    remarks: tuple[str, ...] = ()

    @property
    def effect(self) -> float:
        """Return the mean effect of the removals, which the verdict depends on."""
        return math.fsum(removal.effect for removal in self.removals) / len(self.removals)

    @property
    def sentence(self) -> str:
        """Return what was measured and what follows from it, in words for a person."""
        if self.verdict is None or not self.removals:
            return " ".join([CONCLUSIONS[None], *self.remarks])
        removal = self.reported_removal
        start, end, random = (self._text(value) for value in (self.full, removal.top, removal.random_mean))
        change = f"stays at {start}"
        if start != end:
            change = f"{'falls' if removal.top < self.full else 'rises'} from {start} to {end}"
        return (
            f"Without the brightest {100 * removal.fraction:.0f} % of the photo {self._subject} {change}; random "
            f"patches: {random}. {CONCLUSIONS[self.verdict]}"
        )

    @property
    def reported_removal(self) -> RemovalEffect:
        """Return the removal that the sentence is about: the smaller one if it says enough, else what says most."""
        if self.quantity == "probability":
            return _first_or_largest(self.removals, lambda removal: removal.random_mean - removal.top, CLEAR_FALL)
        return _first_or_largest(self.removals, lambda removal: removal.effect, SUPPORTED)

    @property
    def _subject(self) -> str:
        if self.quantity == "probability":
            return f"the model's confidence in {self.target}"
        if self.quantity == "similarity":
            return "the similarity of the model's output to that of the whole photo"
        if self.target.startswith(SIMILAR_TO):
            return f"the similarity to {self.target.removeprefix(SIMILAR_TO)}"
        return f"the model's score for {self.target}"

    def _text(self, value: float) -> str:
        return percent_in_words(value) if self.quantity == "probability" else f"{value:.2f}"

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON has them, with the sentence and the mean effect."""
        content = asdict(self) | {"agreement": dict(self.agreement)}
        removals = [
            asdict(removal) | {"random_mean": removal.random_mean, "random_spread": removal.random_spread}
            for removal in self.removals
        ]
        computed = {"effect": self.effect if self.removals else None, "sentence": self.sentence, "removals": removals}
        return dict(to_json(content | computed))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MapCheck:
        """Return the check that `to_dict` described; null is NaN where a number is expected."""

        def removal(values: Mapping[str, Any]) -> RemovalEffect:
            random = tuple(_number(value) for value in values["random"])
            top, effect = _number(values["top"]), _number(values["effect"])
            return RemovalEffect(values["fraction"], values["patches"], top, random, effect)

        read: dict[str, Any] = {entry.name: content[entry.name] for entry in fields(cls)}
        read |= {name: _number(content[name]) for name in ("full", "kept", "kept_random")}
        read |= {"removals": tuple(map(removal, content["removals"])), "remarks": tuple(content["remarks"])}
        return cls(**read)

    def __str__(self) -> str:
        return " ".join([self.sentence, *(self.remarks if self.verdict is not None else ())])

    def _repr_html_(self) -> str:
        """Return the verdict as a badge and the sentence as HTML."""
        return f"<p><b>{html.escape(str(self.verdict or 'not checked'))}</b>: {html.escape(str(self))}</p>"


class CheckResult(Rows, Tabular, Sequence[MapCheck]):
    """The checks of B maps: a sequence of `MapCheck`. Printed, it is one sentence per map.

    Args:
        checks: One per map.
        cost: Passes per map.
        seed: The seed of random patches and noise.
        notes: Fallbacks, such as patches that are painted over where tokens cannot be dropped.

    Example:
        >>> import clairvit as cv
        >>> result = cv.explain("pets", "demo", "genatt").check()
        >>> len(result), result.verdict, result.cost.forwards
        (1, 'supported', 12)
        >>> result.to_dict()["checks"][0]["quantity"]
        'probability'
    """

    checks: tuple[MapCheck, ...] = per_row()
    cost: Cost = joined(Cost.of_batches, default_factory=Cost)
    seed: int = first(default=0)
    notes: tuple[str, ...] = union(default=())

    def __iter__(self) -> Iterator[MapCheck]:
        return iter(self.checks)

    @overload
    def __getitem__(self, items: int) -> MapCheck: ...
    @overload
    def __getitem__(self, items: slice | Sequence[int] | Tensor | NDArray[Any]) -> CheckResult: ...
    def __getitem__(self, items: Indices) -> MapCheck | CheckResult:
        """Return the check of one map, or the checks of some."""
        rows = row_numbers(items, len(self))
        is_single = hasattr(items, "__index__") and not getattr(items, "ndim", 0)
        return self.checks[rows[0]] if is_single else self.take(rows)

    def joined(self, others: Sequence[CheckResult]) -> CheckResult:
        """Return the checks of these maps, then those of other results."""
        return CheckResult.concat((self, *others))

    @property
    def verdicts(self) -> tuple[Verdict | None, ...]:
        """Return the verdict of each map."""
        return tuple(check.verdict for check in self.checks)

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict of a single map; raise BadInput for several."""
        return self._single.verdict

    @property
    def sentence(self) -> str:
        """Return the sentence of a single map; raise BadInput for several."""
        return self._single.sentence

    @property
    def _single(self) -> MapCheck:
        if len(self) != 1:
            raise BadInput(
                f"This is the check of {len(self)} maps; expected one: choose it, check[0], or read check.verdicts."
            )
        return self.checks[0]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, with the thresholds that the verdicts depend on."""
        return {
            "checks": [check.to_dict() for check in self.checks],
            "thresholds": {"supported": SUPPORTED, "chance": CHANCE},
            "seed": self.seed,
            "cost": vars(self.cost),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CheckResult:
        """Return the result that `to_dict` described."""
        checks = tuple(map(MapCheck.from_dict, content["checks"]))
        return cls(checks, Cost(**content["cost"]), content["seed"], tuple(content["notes"]))

    def _table(self) -> list[TableRow]:
        """Return a row per map: the verdict and the numbers behind it."""
        names = (
            "method",
            "verdict",
            "quantity",
            "full",
            "kept",
            "kept_random",
            "stability",
            "outliers",
            "outlier_share",
        )
        return [
            {"image": check.name, "target": check.target}
            | {name: getattr(check, name) for name in names}
            | {"effect": check.effect if check.removals else None, "sentence": check.sentence}
            for check in self.checks
        ]

    def __str__(self) -> str:
        several = len(self) > 1
        return "\n".join(f"{check.name}: {check}" if several else str(check) for check in self.checks)

    def _repr_html_(self) -> str:
        """Return one paragraph per map as HTML."""
        return "".join(check._repr_html_() for check in self.checks)


def _number(value: float | None) -> float:
    """Return NaN for null, which JSON has in its place."""
    return math.nan if value is None else value


def _first_or_largest(
    removals: Sequence[RemovalEffect], value: Callable[[RemovalEffect], float], enough: float
) -> RemovalEffect:
    """Return the first removal if its value is enough, else the one with the largest value."""
    return removals[0] if value(removals[0]) >= enough else max(removals, key=value)


def percent_in_words(probability: float) -> str:
    """Return 0.831 as '83 %' and 0.0001 as 'less than 0.1 %'."""
    return percent(probability).replace("%", " %").replace("<", "less than ")


def judge(effects: Sequence[float]) -> Verdict:
    """Return the verdict on the effects of removals, by the thresholds SUPPORTED and CHANCE on their mean."""
    mean = math.fsum(effects) / len(effects)
    return "supported" if mean >= SUPPORTED else "weak" if mean >= CHANCE else "not better than chance"
