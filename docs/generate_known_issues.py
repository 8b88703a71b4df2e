"""Print docs/known-issues-in-the-wild.md and, with --pictures, draw docs/images/issues/*.jpg.

python docs/generate_known_issues.py --pictures > docs/known-issues-in-the-wild.md
"""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from scipy import stats

import clairvit as cv

HERE = Path(__file__).parent
TEXTS = HERE / "known_issues.toml"
PICTURES = HERE / "images" / "issues"
SIDE = 3.2  # inches of a tile


@dataclass(frozen=True)
class Side:
    """One side of an issue: what is computed, and its title."""

    title: str
    method: str
    target: str | None = None
    score: str | None = None

    @property
    def command(self) -> str:
        """The command that draws it."""
        options = [f"--target '{self.target}'"] * (self.target is not None)
        options += [f"--score {self.score}"] * (self.score is not None)
        return " ".join(["clairvit explain demo --method", f"'{self.method}'", *options])


@dataclass(frozen=True)
class Issue:
    """What papers or code get wrong: a text, and two maps or commands for metrics."""

    name: str
    title: str
    text: str
    where: str
    sides: tuple[Side, ...] = ()
    commands: tuple[str, ...] = ()


def read_issues() -> list[Issue]:
    """Return the issues of known_issues.toml."""
    table = tomllib.loads(TEXTS.read_text(encoding="utf-8"))
    return [
        Issue(
            name,
            entry["title"],
            " ".join(entry["text"].split()),
            " ".join(entry["where"].split()),
            tuple(Side(**side) for side in entry.get("sides", ())),
            tuple(entry.get("commands", ())),
        )
        for name, entry in table.items()
    ]


def explain(model: cv.Model, side: Side) -> cv.Explanation:
    """Return the explanation of the demo photo for one side."""
    return cv.explain(model, "demo", side.method, side.target, score=side.score)


def draw(issue: Issue, explanations: list[cv.Explanation]) -> None:
    """Write the two maps next to each other."""
    figure, axes = pyplot.subplots(1, 2, figsize=(2 * SIDE, SIDE + 0.5), layout="constrained")
    for ax, side, explanation in zip(axes, issue.sides, explanations, strict=True):
        explanation.plot(ax)
        ax.set_title(side.title, fontsize=10)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{issue.name}.jpg", dpi=90, pil_kwargs={"quality": 88})
    pyplot.close(figure)


def agreement(explanations: list[cv.Explanation]) -> str:
    """Return how far the two maps order the patches alike."""
    left, right = (explanation.numpy().ravel() for explanation in explanations)
    if not (left.any() and right.any()):
        return "One of the two maps is zero everywhere (and ClairViT warns of it): there is no correlation"
    correlation: Any = stats.spearmanr(left, right).statistic
    return f"Spearman correlation of the two maps: {round(float(correlation), 2) + 0.0:.2f}".replace("-", "−")


def section(issue: Issue, model: cv.Model, pictures: bool) -> str:
    """Return the Markdown of one issue."""
    lines = [f"## {issue.title}", "", issue.text, "", f"**Seen in** {issue.where}", ""]
    if issue.sides:
        explanations = [explain(model, side) for side in issue.sides]
        if pictures:
            draw(issue, explanations)
        lines += [f"![{' and '.join(side.title for side in issue.sides)}](images/issues/{issue.name}.jpg)", ""]
        lines += [f"{agreement(explanations)}.", ""]
    commands = [*(side.command for side in issue.sides), *issue.commands]
    return "\n".join([*lines, "```", *commands, "```", ""])


INTRODUCTION = """\
# Known issues in the wild

What papers and popular code get wrong about explanations of vision transformers, found while their formulas were
reproduced. No scorn: most of it is easy to write and hard to see, and we have made such mistakes too. Each issue
names where it was seen, and can be reproduced here: `preset=` and options give the other side of each picture, the
default is what the formula says. Pictures and figures are of the built-in model and photo, by

```
python docs/generate_known_issues.py --pictures > docs/known-issues-in-the-wild.md
```

A correlation far below 1 says that the slip changes which patches are shown as important; it does not say which side
is more faithful: [results](results.md) and `clairvit evaluate` do. The columns "papers differ" of
[methods](methods.md) and [metrics](metrics.md) list all discrepancies, of every method.
"""


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    pictures = parser.parse_args().pictures
    model = cv.load("pets")
    print(INTRODUCTION)
    print("\n".join(section(issue, model, pictures) for issue in read_issues()), end="")


if __name__ == "__main__":
    main()
