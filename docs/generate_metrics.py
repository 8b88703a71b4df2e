"""Print docs/metrics.md from the registry:  python docs/generate_metrics.py > docs/metrics.md"""

from __future__ import annotations

import inspect
from pathlib import Path

from generate_methods import print_options

from clairvit._presets import preset_formula, preset_settings
from clairvit.metrics.registry import Metric
from clairvit.plotting.labels import ARROWS, default_forwards, metrics_by_family, needs_label, value_range_label

COLUMNS = ("metric", "better", "range", "needs", "forwards", "formula", "paper")
INTRODUCTION = """# Metrics

*Made by `python docs/generate_metrics.py`; do not edit.*

How good is a map? `clairvit evaluate photos/ --method legrad,rollout --metric deletion,insertion` or
`cv.evaluate(model, images, "legrad", "deletion")`. Every score comes with a value for each image, its mean,
standard error and 95 % interval over images, and what a random and a centred map score on the same images.
A score that is not defined (a map with NaN, an image without a mask) is NaN; it is counted and left out of the mean.
The range below is that of the default options; an option may change it (`faf(lift=true)`, `aopc(preset=quantus)`), and
so may a target that is not the probability of one class. [Intervals](#intervals) are cut at the range that applies.

↑ higher is better, ↓ lower is better. *Forwards* are of one map of 14 × 14 patches with the default options. A metric
that *explains again* runs the method on other images or models; its backwards, and forwards beyond one a run, come on
top. Options are written `NAME(option=value)`, published variants `NAME(preset=…)`.

**Between models** areas and drops do not compare: how far they can go depends on the model and the image, so that the
better map of one model may have the smaller area. `naopc` is the place between the smallest and the largest area that
any order of removal reaches on this model and image; use it where numbers of two models stand side by side.

**Models without probabilities** (`Model.activation` is `raw`: a regression, a single CLIP prompt; see
[models](models.md#what-a-score-means)). `score=prob` is a preference: where there is no probability, the raw score f
takes its place, `Score.settings` says `score: raw`, and areas and drops are divided by |f(x) − f(nothing left)|, the
score of the whole image minus that of an image of which nothing is left, under the metric's own removal: one more
forward, `normalised_by` in the settings, and a note. A curve then runs from 1 (−1 where the whole image lowers the
score) to 0 and may leave that range; where nothing changes the score it is undefined (NaN).

* Normalised: `deletion`, `insertion`, `insertion-deletion`, `aopc`, `comprehensiveness`, `sufficiency`, `road`, `irof`,
  `srg`, `f-fidelity`.
* Not normalised, because they have no unit: `faithfulness-correlation`, `sensitivity-n`, `faithfulness-estimate`,
  `idsds` (correlations), `saco` (a share of pairs), `monotonicity` (a share of steps), `completeness` (relative
  already), `naopc` (a place between two bounds).
* Not normalised, in the unit of the score squared: `infidelity`.
* As it is asked for: with `score=logit` every model's output is taken as it is. `score=logprob` and `log-odds` of raw
  scores, and `grid-pointing-game`, which takes images that the model is sure of, are refused."""
INTERVALS = """
## Intervals

An interval holds every mean that two tests of 5 % do not reject: sign flips, and Student's t with the skewness taken
out (Hall 1992), as far as no edge gets further from the mean than 2.5 times Student's t has it
([why two](choose.md#what-may-be-said)). Scores that are all 0 or 1 have Clopper and Pearson's exact interval. Below is
what `python benchmarks/intervals.py` printed: `ours` is this interval, `uncapped` takes out all skewness, as ClairViT
0.2 did. *Bimodal* is 0.9 in nine of ten cases and 0.1 in the tenth: no interval of the values alone can know of a mode
that was not drawn.
"""


def main() -> None:
    print(INTRODUCTION)
    family = ""
    listed = metrics_by_family()
    for metric in listed:
        if metric.family != family:
            family = metric.family
            print(f"\n## Family: {family}\n")
            print_row(COLUMNS)
            print_row(["---"] * len(COLUMNS))
            for one in listed:
                if one.family == family:
                    print_row(cells(one))
        section(metric)
    print(INTERVALS)
    print((Path(__file__).parent / "results" / "intervals.md").read_text(encoding="utf-8").strip())


def print_row(texts: list[str] | tuple[str, ...]) -> None:
    """One line of the table. A bar inside a cell would end it, even inside a formula."""
    print("| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |")


def cells(metric: Metric) -> list[str]:
    return [
        f"[`{metric.name}`](#{metric.name})",
        ARROWS[metric.better],
        value_range_label(metric),
        ", ".join(needs_label(metric)) or "–",
        str(default_forwards(metric)),
        f"``{formula(metric.summary)}``",  # double, for it may name an option in backticks
        metric.paper,
    ]


def formula(summary: str) -> str:
    """The docstring's first line up to its colon; one inside a set, {k: …}, is part of the formula."""
    depth = 0
    for place, letter in enumerate(summary):
        depth += (letter == "{") - (letter == "}")
        if letter == ":" and not depth:
            return summary[:place].strip()
    return summary.rstrip(".")


def section(metric: Metric) -> None:
    print(f"\n### `{metric.name}`\n\n{inspect.getdoc(metric.function) or ''}\n")
    print(f"* Paper: {metric.paper}")
    print_options(metric.option_list)
    for name in metric.presets:
        sets = ", ".join(f"`{key}={value}`" for key, value in preset_settings(metric, name).items())
        parts = [part for part in (sets, preset_formula(metric, name)) if part]
        print(f"* Preset `{name}`: {'; '.join(parts) or 'the defaults'}")
    if metric.discrepancies:
        print(f"* Discrepancies: {metric.discrepancies}")


if __name__ == "__main__":
    main()
