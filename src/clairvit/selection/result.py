"""Selection: the result of `choose`, which can be saved as a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from clairvit._io import to_json
from clairvit._tables import TableRow, Tabular
from clairvit.methods.calibrated import Calibration
from clairvit.methods.collect import versions
from clairvit.methods.recipe import Recipe
from clairvit.metrics.score import Scores
from clairvit.selection.ranking import Row
from clairvit.selection.start_layer import StartLayer


@dataclass(frozen=True, eq=False)
class Selection(Tabular):
    """A ranking of methods, the scores that it is computed from, and the conclusion in sentences.

    Attributes:
        best: The best method.
        ranking: A row per method, best first, with its interval.
        clear: Whether the best is significantly better than all others.
        tied: The methods that cannot be told from the best.
        answer: The result in sentences.
        scores: The scores that the ranking rests on.
        recipe: What `cv.explain` needs to repeat the choice; `save("recipe.json")` writes it.

    Example:
        >>> import clairvit as cv
        >>> picked = cv.choose("pets", ["demo"] * 2, ["legrad", "rollout"], ["deletion(steps=3)"])
        >>> picked.best in ("legrad", "rollout", "random", "center"), picked.recipe.method == picked.best
        (True, True)
    """

    best: str  # the method
    ranking: tuple[Row, ...]
    scores: Scores
    by: str  # the metric that ranks, or "mean-rank"
    better: str
    metrics: tuple[str, ...]
    clear: bool  # is the best significantly better than all others?
    tied: tuple[str, ...]  # methods that do not differ significantly from the best
    groups: tuple[tuple[str, ...], ...]  # neighbours in the ranking of which no two differ significantly
    agreement: Mapping[tuple[str, str], float]  # Spearman's rho of two metrics over methods
    tuned: Mapping[str, StartLayer]
    answer: tuple[str, ...]  # in words
    model: str
    weights: str
    settings: Mapping[str, Any]
    seed: int
    skipped: Mapping[str, str] = field(default_factory=dict)  # method -> why it does not fit the model
    model_record: Mapping[str, Any] = field(default_factory=dict)  # preprocessing, weights' hash, assumptions
    calibration: Calibration | None = None  # the weights of a calibrated method, if one was fitted

    @property
    def front(self) -> tuple[str, ...]:
        """Return the methods that are Pareto-optimal in faithfulness, localisation and cost."""
        return tuple(row.method for row in self.ranking if row.is_pareto_optimal)

    @property
    def images(self) -> int:
        return len(next(iter(self.scores.values())).values)

    @property
    def recipe(self) -> Recipe:
        """Return what `explain` needs, with the numbers; no seconds, so that the same choice gives the same file."""
        rows = [asdict(row) for row in self.ranking]
        for row in rows:
            row["cost"] = {"forwards": row["cost"]["forwards"], "backwards": row["cost"]["backwards"]}
        return Recipe(
            method=self.best,
            model=self.model,
            weights=self.weights,
            model_record=dict(self.model_record),
            metrics=self.metrics,
            by=self.by,
            settings=dict(self.settings),
            images=self.images,
            seed=self.seed,
            clear=self.clear,
            answer=self.answer,
            ranking=tuple(rows),
            starts={base: start.method for base, start in self.tuned.items()},
            tuned=tuple(start.to_dict() for start in self.tuned.values()),
            calibration=self.calibration,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking and all that it rests on, as JSON values.

        Returns:
            The content of what `clairvit choose --json` prints.
        """
        content = {
            "model": self.model,
            "weights": self.weights,
            **self.model_record,
            "best": self.best,
            "clear": self.clear,
            "tied": self.tied,
            "by": self.by,
            "better": self.better,
            "metrics": self.metrics,
            "settings": self.settings,
            "seed": self.seed,
            "images": [prediction.image for prediction in self.scores.predictions],
            "ranking": [asdict(row) for row in self.ranking],
            "front": self.front,
            "groups": self.groups,
            "agreement": [{"metrics": pair, "spearman": rho} for pair, rho in self.agreement.items()],
            "tuned": [start.to_dict() for start in self.tuned.values()],
            "answer": self.answer,
            "skipped": self.skipped,
            "versions": versions(),
        }
        return dict(to_json(content))

    def _table(self) -> list[TableRow]:
        """Return a row per method, the best first."""
        nested = ("interval", "gap_interval", "means", "cost")
        return [
            {name: value for name, value in vars(row).items() if name not in nested}
            | {"low": row.interval[0], "high": row.interval[1]}
            | {"gap_low": row.gap_interval[0], "gap_high": row.gap_interval[1]}
            | {"forwards": row.cost.forwards, "backwards": row.cost.backwards, "seconds": row.cost.seconds}
            | dict(row.means)
            for row in self.ranking
        ]

    def save(self, path: PathLike[str] | str) -> Path:
        """Write the recipe (.json), which `cv.explain(…, "recipe.json")` follows, or the ranking (.csv, .png, …).

        Args:
            path: The file to write; readers never see a partial file.

        Returns:
            The path.

        Raises:
            BadInput: Another suffix.
        """
        from clairvit.plotting.axes import save_plot  # drawing comes after selection

        path = Path(path)
        return self.recipe.save(path) if path.suffix.lower() == ".json" else save_plot(self, path)

    def plot(self, ax: Any = None) -> Any:
        """Draw the ranking: a mean with its 95 % interval per method, the best on top.

        Args:
            ax: Matplotlib axes; None makes a figure.

        Returns:
            The axes.
        """
        return self.recipe.plot(ax)

    def _repr_html_(self) -> str:
        """Return the ranking and the conclusion, as a notebook shows them."""
        return self.recipe._repr_html_()

    def __repr__(self) -> str:
        return f"Selection({self.best}; {self.answer[0]})"
