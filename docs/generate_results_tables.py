"""Print docs/results_tables.md from docs/results/*:  python docs/generate_results_tables.py > docs/results_tables.md"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from results_text import REPEATED, RESULTS, RUNS, read_text, title_and_table

from clairvit.selection.stats import spearman

EXPERIMENTS = [f"{paper}-{run}" for paper in ("focusvit", "skipplus", "coporan", "joita", "cmi") for run in REPEATED]
ARROWS = {"higher": "↑", "lower": "↓"}
SHORT = {
    "faithfulness-correlation": "faithf. corr.",
    "pointing-game": "pointing",
    "insertion-deletion": "ins − del",
    "insertion-deletion(removal=mean)": "ins − del, pixels",
}
ORDER = "insertion-deletion"  # the metric whose order the tables follow
SURE = {1: "yes", -1: "**no**", 0: "not shown"}


def main() -> None:
    runs = load_runs()
    print(read_text("tables.md", runs))
    for run in runs:
        print_scores(run, {record["method"] for other in runs for record in other["scores"]})
    for run in runs:
        print_agreement(run)
    print_claims(runs)
    print("\n" + read_text("experiments.md", runs))
    print_experiments()


def load_runs() -> list[dict[str, Any]]:
    return [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in RUNS]


def print_experiments() -> None:
    """The tables that `clairvit reproduce` wrote, folded away: every method's value and rank."""
    print("\n## The papers' experiments: every value and rank")
    for page in EXPERIMENTS:
        title, rows = title_and_table(page)
        print(f"\n<details><summary>{title}</summary>\n\n{rows.strip()}\n\n</details>")


def print_row(texts: list[str]) -> None:
    print("| " + " | ".join(texts) + " |")


def table_of(run: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """method -> metric -> record"""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for record in run["scores"]:
        rows.setdefault(record["method"], {})[record["metric"]] = record
    return rows


def print_scores(run: dict[str, Any], methods: set[str]) -> None:
    """Print every score of a run, and which of the methods of all runs it lacks."""
    metrics, rows = list(run["better"]), table_of(run)
    print(f"\n## {run['title']}\n")
    print(
        f"{len(rows) - len(run['baselines'])} methods, {run['images']} images. Mean ± standard error; the best of each "
        "column is bold, and so is all that its 95 % interval reaches. In the order of insertion − deletion. "
        "A dash: not computed, for methods of many passes."
    )
    if missing := sorted(methods - set(rows)):
        print(f"\nNot run on this model: {', '.join(f'`{method}`' for method in missing)}.")
    for name, why in run["skipped"].items():
        print(f"\n`{name}` is left out: {why}")
    print()
    print_row(["method", *(f"{SHORT.get(metric, metric)} {ARROWS[run['better'][metric]]}" for metric in metrics)])
    print_row(["---"] * (len(metrics) + 1))
    top = {metric: best(rows, metric, run) for metric in metrics}
    for method in sorted(rows, key=lambda name: -(mean_of(rows[name], ORDER) or 0.0)):
        cells = (cell(rows[method].get(metric), top[metric], run["better"][metric]) for metric in metrics)
        print_row([label(method, run), *cells])


def label(method: str, run: dict[str, Any]) -> str:
    return f"*{method}*" if method in run["baselines"] else f"`{method}`"


def best(rows: dict[str, Any], metric: str, run: dict[str, Any]) -> dict[str, Any]:
    sign = 1 if run["better"][metric] == "higher" else -1
    methods = [name for name in rows if name not in run["baselines"] and mean_of(rows[name], metric) is not None]
    winner: dict[str, Any] = rows[max(methods, key=lambda name: sign * rows[name][metric]["mean"])][metric]
    return winner


def mean_of(row: dict[str, Any], metric: str) -> float | None:
    mean: float | None = row[metric]["mean"] if metric in row else None
    return mean


def cell(record: dict[str, Any] | None, top: dict[str, Any], better: str) -> str:
    if record is None:
        return "–"
    if record["mean"] is None:
        return "undefined"
    text = f"{record['mean']:.3f} ± {record['standard_error']:.3f}"
    low, high = top["interval"]
    reached = record["mean"] >= low if better == "higher" else record["mean"] <= high
    few = f" (n = {record['n_valid']})" if record["n_invalid"] else ""
    return (f"**{text}**" if reached else text) + few


def print_agreement(run: dict[str, Any]) -> None:
    """Spearman's correlation of metrics over methods, each metric turned so that high is good."""
    metrics, rows = list(run["better"]), table_of(run)
    methods = [m for m in rows if m not in run["baselines"] and all(mean_of(rows[m], k) is not None for k in metrics)]
    good = {k: [(1 if run["better"][k] == "higher" else -1) * rows[m][k]["mean"] for m in methods] for k in metrics}
    print(f"\n### Do the metrics agree? {run['title']}\n")
    print(f"Spearman's correlation over {len(methods)} methods, every metric turned so that high is good.\n")
    print_row(["", *(SHORT.get(metric, metric) for metric in metrics)])
    print_row(["---"] * (len(metrics) + 1))
    for one in metrics:
        row = [spearman(np.array(good[one]), np.array(good[other])) for other in metrics]
        print_row([SHORT.get(one, one), *(f"{value:.2f}" for value in row)])


def verdict(pair: dict[str, Any]) -> str:
    low, high = pair["interval"]
    if low is None:
        return "undefined"
    sign = 1 if low > 0 else -1 if high < 0 else 0
    return f"{SURE[sign]} ({pair['gap']:+.3f})"


def print_claims(runs: list[dict[str, Any]]) -> None:
    print("\n## What the papers claim\n")
    print(
        "*yes*: the 95 % interval of the paired difference lies wholly on the paper's side; **no**: wholly on the "
        "other; in brackets the difference, positive where the paper is right."
    )
    for run in runs:
        metrics = list(run["better"])
        print(f"\n### {run['title']}\n")
        print_row(["claim", *(SHORT.get(metric, metric) for metric in metrics)])
        print_row(["---"] * (len(metrics) + 1))
        claims = dict.fromkeys((pair["better"], pair["worse"], pair["who"]) for pair in run["pairs"])
        for better, worse, who in claims:
            own = {p["metric"]: p for p in run["pairs"] if (p["better"], p["worse"], p["who"]) == (better, worse, who)}
            print_row(
                [
                    f"{who} (`{better}` > `{worse}`)",
                    *(verdict(own[metric]) if metric in own else "–" for metric in metrics),
                ]
            )


if __name__ == "__main__":
    main()
