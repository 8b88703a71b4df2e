"""CheckResult: two answers about each map, by stated thresholds, in words and numbers.

Is the map right? `MapCheck.verdict` follows from how well the map predicts what hiding random parts does (`partial`)
and from a removal that a person sees (`shown`), and from nothing else: see `judge`. Whether the map is specific to its
class is a statement of its own (`is_specific`). Does the answer mean anything? `MapCheck.answer` says it; where there
is nothing to explain, the map is not judged.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
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
AnswerStatus = Literal["no objection", "take care", "nothing to explain"]
BadgeStyle = Literal["supported", "weak", "chance", "unknown"]

# Chosen on photos of their own, judged on others: docs/check.md, benchmarks/check.py.
SUPPORTED = 2.0  # mean effect of hiding what the map marks, in standard deviations of hiding as many random patches
CHANCE = 1.0
PREDICTS = 0.1  # partial correlation with what hiding random sets does
YARDSTICK = 0.7  # of the largest partial correlation that the target's own maps have
SPECIFIC = 0.3  # correlation with what hiding does to the difference to the runner-up
CLEAR_FALL = 0.05  # of a probability, beyond that of random parts: a person sees it
LARGEST_EFFECT = 99.0  # where all random removals cost the same, an effect has no bound
UNSTABLE = 0.5  # rank correlation with the map of a noisy copy
OUTLIERS_MATTER = 0.25  # share of outlier tokens among the brightest patches
MOST_TIMES = 20.0  # as much; above it, and where random parts cost next to nothing, no number is named

BADGES: dict[Verdict | None, str] = {
    "supported": "Map supported by a test",
    "weak": "Map weakly supported",
    "not better than chance": "Map no better than chance",
    None: "Map not tested",
}
NOTHING_BADGE = "Nothing here to explain"
NO_OBJECTION = "Nothing speaks against it; whether it is right is not tested."


@dataclass(frozen=True)
class RemovalEffect:
    """What hiding the patches that the map marks most does, against hiding as many random patches.

    Args:
        fraction: The share of the patches that are hidden.
        patches: Their number.
        top: The value without the brightest ones.
        random: The values without random ones, one per draw: a block of the check's random sets.
        effect: (mean of random − top) / standard deviation, on the scale of the evidence (docs/check.md).

    Example:
        >>> import clairvit as cv
        >>> removal = cv.explain("pets", "demo", "genatt").check()[0].removals[0]
        >>> removal.patches, len(removal.random)
        (36, 8)
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

    @property
    def fall(self) -> float:
        """Return how much lower the value is than with as many random patches hidden."""
        return self.random_mean - self.top

    def is_clear(self, quantity: Quantity) -> bool:
        """Return whether a person sees the fall: 5 points of a probability, else a clear effect on the score."""
        return self.fall >= CLEAR_FALL if quantity == "probability" else self.effect >= SUPPORTED


@dataclass(frozen=True)
class AnswerCheck:
    """Whether the answer that a map explains means anything.

    Args:
        status: "nothing to explain" where the map has no meaning whatever it shows, "take care" where the answer may
            have none, "no objection" where nothing speaks against it. None of them says that the answer is right.
        reasons: Why, one sentence each.

    Example:
        >>> import clairvit as cv
        >>> cv.explain("pets", "demo").check()[0].answer.status
        'no objection'
    """

    status: AnswerStatus = "no objection"
    reasons: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Return what was seen and what follows from it, in words for a person."""
        lead = ("There is nothing here to explain.",) if self.status == "nothing to explain" else ()
        return " ".join([*lead, *self.reasons] or [NO_OBJECTION])

    def to_dict(self) -> dict[str, Any]:
        """Return status, reasons and sentence as JSON has them."""
        return {"status": self.status, "reasons": list(self.reasons), "sentence": self.sentence}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> AnswerCheck:
        """Return what `to_dict` described."""
        return cls(content["status"], tuple(content["reasons"]))


@dataclass(frozen=True)
class MapCheck:
    """The check of one map.

    Args:
        name: The name of the image.
        target: The name of what is scored.
        method: The method; "" for maps of unknown origin.
        quantity: What the values are: probability, score, or similarity of embeddings.
        full: The value of the whole image.
        removals: Without the patches that the map marks most, against as many random ones.
        prediction: The correlation of what the map predicts with what hiding random sets does.
        partial: The same after both are freed of what a map of the middle and of the photo's edges predict.
        yardstick: The largest `partial` of the target's own maps by the default method and GenAtt.
        specific: The correlation with what hiding does to the difference of the class and its runner-up, of random sets
            and of what the map marks; None where the target is no class that competes with others.
        rival: The runner-up.
        stability: The rank correlation with the map of a noisy copy; None where the method costs too much to repeat.
        agreement: Method of another family -> rank correlation with its map; None where it is undefined.
        outliers: The number of high-norm outlier tokens; None where norms cannot be compared.
        outlier_share: Their share among the brightest 10 %.
        verdict: Of the map; None if it cannot be checked, or if there is nothing to explain.
        answer: Whether the answer means anything.
        remarks: What else a reader must know of the map, one sentence each.
        grid: The patches as rows and columns, for clips as frames, rows and columns.
        brightest: The numbers of the patches that the largest removal hides, row by row, the brightest first.

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
    prediction: float | None
    partial: float | None
    yardstick: float | None
    specific: float | None
    rival: str | None
    stability: float | None
    agreement: Mapping[str, float | None]
    outliers: int | None
    outlier_share: float | None
    verdict: Verdict | None
    answer: AnswerCheck = field(default_factory=AnswerCheck)
    remarks: tuple[str, ...] = ()
    grid: tuple[int, ...] = ()
    brightest: tuple[int, ...] = ()

    @property
    def effect(self) -> float:
        """Return the mean effect of hiding what the map marks; 0 where nothing could be hidden."""
        return math.fsum(removal.effect for removal in self.removals) / max(len(self.removals), 1)

    @property
    def share(self) -> float:
        """Return the share of what hiding random sets does that the map predicts: the square of `prediction`."""
        return max(self.prediction or 0.0, 0.0) ** 2

    @property
    def is_specific(self) -> bool | None:
        """Return whether the map is shown to be specific to its class; None where that is not asked."""
        if self.specific is None or self.verdict not in ("supported", "weak"):
            return None
        return self.specific >= SPECIFIC

    @property
    def shown(self) -> RemovalEffect | None:
        """Return the removal that the sentence is about: the smallest that a person sees, else the clearest."""
        if not self.removals:
            return None
        clear = [removal for removal in self.removals if removal.is_clear(self.quantity)]
        return clear[0] if clear else max(self.removals, key=lambda removal: removal.fall)

    @property
    def marked(self) -> tuple[int, ...]:
        """Return the numbers of the patches that the sentence is about, the brightest first."""
        return () if self.shown is None or self.verdict is None else self.brightest[: self.shown.patches]

    @property
    def badge(self) -> str:
        """Return the verdict in the words that badges have."""
        if self.answer.status == "nothing to explain":
            return NOTHING_BADGE
        is_doubtful = self.verdict == "supported" and self.answer.status == "take care"
        return f"{BADGES[self.verdict]}, but take care" if is_doubtful else BADGES[self.verdict]

    @property
    def badge_style(self) -> BadgeStyle:
        """Return what gives a badge its colour: "supported", which is green, only where the answer is not in doubt."""
        if self.verdict is None:
            return "unknown"
        if self.verdict == "supported":
            return "supported" if self.answer.status == "no objection" else "weak"
        return "weak" if self.verdict == "weak" else "chance"

    @property
    def sentence(self) -> str:
        """Return what was measured of the map and what follows from it, in words for a person."""
        if self.answer.status == "nothing to explain":
            return "The map is not judged."
        shown = self.shown
        if self.verdict is None or shown is None:
            return " ".join(["This map cannot be checked.", *self.remarks])
        return " ".join([self._comparison(shown), self._conclusion(shown), *self._specificity()])

    @property
    def about_the_map(self) -> str:
        """Return the sentence with the remarks."""
        return " ".join([self.sentence, *(self.remarks if self.verdict is not None else ())])

    def _comparison(self, removal: RemovalEffect) -> str:
        """Return what hiding the marked patches costs against random ones, with all values."""
        lead = f"Hiding the {100 * removal.fraction:.0f} % of the photo that the map marks most"
        start, end, random = (self._text(value) for value in (self.full, removal.top, removal.random_mean))
        change = f"stays at {start}" if start == end else "falls" if removal.top < self.full else "rises"
        if start != end:
            change += f" from {start} to {end}"
        values = f"{self._subject} {change}; with random parts hidden it is {random}."
        return f"{lead} costs {self._times(removal)} hiding as many random parts: {values}"

    def _times(self, removal: RemovalEffect) -> str:
        """Return "4 × as much as", "far more than" or "no more than"."""
        cost, by_chance = self.full - removal.top, self.full - removal.random_mean
        if not removal.fall > 0 or not cost > 0:
            return "no more than"
        if by_chance * MOST_TIMES <= cost:
            return "far more than" if removal.is_clear(self.quantity) else "hardly more than"
        times = cost / by_chance
        text = f"{times:.0f}" if times >= 2.95 else f"{times:.1f}".removesuffix(".0")
        return "hardly more than" if text == "1" else f"{text} × as much as"

    def _conclusion(self, removal: RemovalEffect) -> str:
        predicts = f"it predicts {100 * self.share:.0f} % of what hiding parts does"
        if self.verdict == "supported":
            return f"The map is supported: {predicts}."
        if self.verdict == "weak":
            is_behind = (self.partial or 0.0) < YARDSTICK * (self.yardstick or 0.0)
            behind = f", clearly less than another map of {self.target}" if is_behind else ""
            return f"The map is weakly supported: {predicts}{behind}. Do not rely on it alone."
        if not removal.is_clear(self.quantity):
            return "The map is not better than chance."
        if self.effect < CHANCE:
            return "The map is not better than chance: hiding as many random parts may cost as much."
        beyond = "what it says beyond the middle and the edges of the photo does not tell what hiding parts does"
        return f"The map is not better than chance: {beyond}."

    def _specificity(self) -> list[str]:
        """Return whether the map is specific to its class, as one sentence; nothing where that is not asked."""
        if self.is_specific is None:
            return []
        if self.is_specific:
            return [f"It is specific to {self.target}."]
        return [f"It is not shown to be specific to {self.target} rather than {self.rival}."]

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
        """Return the values as JSON has them, with the words for them."""
        content = asdict(self) | {"agreement": dict(self.agreement), "answer": self.answer.to_dict()}
        removals = [
            asdict(removal) | {"random_mean": removal.random_mean, "random_spread": removal.random_spread}
            for removal in self.removals
        ]
        computed = {
            "removals": removals,
            "effect": self.effect,
            "share": self.share,
            "is_specific": self.is_specific,
            "marked": list(self.marked),
            "badge": self.badge,
            "badge_style": self.badge_style,
            "sentence": self.sentence,
        }
        return dict(to_json(content | computed))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MapCheck:
        """Return the check that `to_dict` described; null is NaN where a number is expected."""

        def removal(values: Mapping[str, Any]) -> RemovalEffect:
            random = tuple(_number(value) for value in values["random"])
            top, effect = _number(values["top"]), _number(values["effect"])
            return RemovalEffect(values["fraction"], values["patches"], top, random, effect)

        read: dict[str, Any] = {entry.name: content[entry.name] for entry in fields(cls)}
        read |= {name: tuple(content[name]) for name in ("remarks", "grid", "brightest")}
        read |= {"full": _number(content["full"]), "removals": tuple(map(removal, content["removals"]))}
        return cls(**read | {"answer": AnswerCheck.from_dict(content["answer"])})

    def __str__(self) -> str:
        """Return both answers: of the map with its remarks, then of the answer."""
        return f"{self.about_the_map} Answer: {self.answer.sentence}"

    def _repr_html_(self) -> str:
        """Return the badge, the sentences about the map and the line about the answer as HTML."""
        return f"<p><b>{html.escape(self.badge)}</b>: {html.escape(str(self))}</p>"


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
        (1, 'supported', 68)
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
            "thresholds": {
                "supported": SUPPORTED,
                "chance": CHANCE,
                "predicts": PREDICTS,
                "yardstick": YARDSTICK,
                "specific": SPECIFIC,
                "clear_fall": CLEAR_FALL,
            },
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
            *(
                "method",
                "verdict",
                "is_specific",
                "quantity",
                "full",
                "effect",
                "prediction",
                "partial",
                "yardstick",
                "specific",
            ),
            *("rival", "stability", "outliers", "outlier_share", "sentence"),
        )
        return [
            {"image": check.name, "target": check.target}
            | {name: getattr(check, name) for name in names}
            | {"answer": check.answer.status, "about_the_answer": check.answer.sentence}
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


def percent_in_words(probability: float) -> str:
    """Return 0.831 as '83 %' and 0.0001 as 'less than 0.1 %'."""
    return percent(probability).replace("%", " %").replace("<", "less than ")


def judge(effect: float, partial: float, yardstick: float | None, is_clear: bool) -> Verdict:
    """Return the verdict on a map, by two tests that both must hold.

    Hiding what it marks has an effect of at least SUPPORTED that a person sees, and it predicts what hiding random sets
    does: the partial correlation is at least PREDICTS, and YARDSTICK times that of the target's own maps. Not better
    than chance: an effect below CHANCE, or a correlation below PREDICTS. Weak: everything between.
    """
    if not effect >= CHANCE or not partial >= PREDICTS:
        return "not better than chance"
    near = partial >= YARDSTICK * (yardstick or 0.0)
    return "supported" if effect >= SUPPORTED and is_clear and near else "weak"
