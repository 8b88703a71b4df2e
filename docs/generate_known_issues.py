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
from matplotlib.figure import Figure
from scipy import stats

import clairvit as cv

HERE = Path(__file__).parent
TEXTS = HERE / "known_issues.toml"
PICTURES = HERE / "images" / "issues"
SIDE = 3.2  # inches of a tile
RANKED = ("attnlrp+plus", "genatt", "gradcam", "rollout")  # the methods of a chart, unless an issue names others


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
class Chart:
    """One side of an issue about a metric: scores of some methods, and a title."""

    title: str
    metric: str
    methods: tuple[str, ...] = RANKED

    @property
    def command(self) -> str:
        """The command that prints the scores."""
        return f"clairvit evaluate demo --method {','.join(self.methods)} --metric '{self.metric}'"


@dataclass(frozen=True)
class Issue:
    """What papers or code get wrong: a text and two pictures, of maps, of scores, or of what a hook collects."""

    name: str
    title: str
    text: str
    where: str
    sides: tuple[Side, ...] = ()
    charts: tuple[Chart, ...] = ()
    hook: str | None = None  # the modules of this name get a forward hook, whose calls are counted
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
            tuple(
                Chart(chart["title"], chart["metric"], tuple(entry.get("methods", RANKED)))
                for chart in entry.get("charts", ())
            ),
            entry.get("hook"),
            tuple(entry.get("commands", ())),
        )
        for name, entry in table.items()
    ]


def explain(model: cv.Model, side: Side) -> cv.Explanation:
    """Return the explanation of the demo photo for one side."""
    return cv.explain(model, "demo", side.method, side.target, score=side.score)


def save(issue: Issue, figure: Figure) -> None:
    """Write the picture of an issue."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{issue.name}.jpg", dpi=90, pil_kwargs={"quality": 88})
    pyplot.close(figure)


def draw(issue: Issue, explanations: list[cv.Explanation]) -> None:
    """Write the two maps next to each other."""
    figure, axes = pyplot.subplots(1, 2, figsize=(2 * SIDE, SIDE + 0.5), layout="constrained")
    for ax, side, explanation in zip(axes, issue.sides, explanations, strict=True):
        explanation.plot(ax)
        ax.set_title(side.title, fontsize=10)
    save(issue, figure)


def score_rows(model: cv.Model, chart: Chart) -> list[tuple[str, float, bool]]:
    """Return (method, score on the demo photo, whether it is the best) in the chart's order."""
    scores = {method: cv.evaluate(model, "demo", method, chart.metric) for method in chart.methods}
    values = {method: float(score.mean) for method, score in scores.items()}
    lower = scores[chart.methods[0]].better == "lower"
    best = (min if lower else max)(values.values())
    return [(method, value, value == best) for method, value in values.items()]


def draw_charts(issue: Issue, sides: list[list[tuple[str, float, bool]]]) -> None:
    """Write two bar charts next to each other; what each calls the best is coloured."""
    figure, axes = pyplot.subplots(1, 2, figsize=(2 * SIDE, SIDE - 0.8), layout="constrained")
    for ax, chart, rows in zip(axes, issue.charts, sides, strict=True):
        methods, values, best = zip(*rows, strict=True)
        bars = ax.barh(methods, values, color=["#b5482a" if first else "#9a9a9a" for first in best])
        ax.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.25)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(chart.title, fontsize=10)
    save(issue, figure)


def count_hook_calls(model: cv.Model, name: str) -> tuple[int, int]:
    """Return how many modules have this name, and how often forward hooks on them are called by one forward pass."""
    pixels = cv.explain(model, "demo", "rollout").pixels
    calls: list[str] = []
    modules = [module for path, module in model.module.named_modules() if path.rpartition(".")[2] == name]
    hooks = [module.register_forward_hook(lambda *_: calls.append(name)) for module in modules]
    model.logits(pixels)
    for hook in hooks:
        hook.remove()
    return len(modules), len(calls)


def draw_hook(issue: Issue, model: cv.Model, modules: int, calls: int) -> None:
    """Write what the hooks collect next to the map of the attention that was captured."""
    figure, axes = pyplot.subplots(1, 2, figsize=(2 * SIDE, SIDE + 0.5), layout="constrained")
    axes[0].text(0.5, 0.5, f"{modules} hooks, {calls} calls:\nno attention, no map", ha="center", va="center")
    axes[0].set(xticks=[], yticks=[], aspect="equal", xlim=(0, 1), ylim=(0, 1))
    axes[0].set_title(f"hooks on {issue.hook}", fontsize=10)
    cv.explain(model, "demo", "rollout").plot(axes[1])
    axes[1].set_title("captured where it is computed", fontsize=10)
    save(issue, figure)


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
    if issue.charts:
        rows = [score_rows(model, chart) for chart in issue.charts]
        if pictures:
            draw_charts(issue, rows)
        lines += [f"![{' and '.join(chart.title for chart in issue.charts)}](images/issues/{issue.name}.jpg)", ""]
        lines += ["Scores on the demo photo. Coloured: what each side calls the best.", ""]
    if issue.hook:
        modules, calls = count_hook_calls(model, issue.hook)
        if pictures:
            draw_hook(issue, model, modules, calls)
        lines += [f"![hooks on {issue.hook} collect nothing; the rollout map](images/issues/{issue.name}.jpg)", ""]
        lines += [f"The built-in model has {modules} modules `{issue.hook}`; one forward pass calls {calls} hooks.", ""]
    commands = [*(part.command for part in (*issue.sides, *issue.charts)), *issue.commands]
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
