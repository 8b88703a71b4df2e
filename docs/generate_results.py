"""Print docs/results.md, the front page, from docs/results/*:  python docs/generate_results.py > docs/results.md"""

from __future__ import annotations

from typing import Any

from generate_results_tables import HERE, SHORT, label, load_runs, mean_of, print_row, table_of

from clairvit.methods.spec import resolve_method

SHOWN = 14  # methods per table, besides the baselines
FAITHFUL = (
    "insertion-deletion",
    "insertion-deletion(removal=mean)",
    "faithfulness-correlation",
    "srg",
    "saco",
)
LOCALISING = ("ap", "pointing-game", "faf")
# Libra's published deletion accuracy (MIF) on Oxford-IIIT Pet with a ViT-B (Mehri et al., CVPR 2025)
LIBRA = {
    "libra-fullgrad-plus": 57.3,
    "libra-attcat": 55.3,
    "genatt": 44.1,
    "tokentm": 44.0,
    "attcat": 37.3,
    "attnlrp": 30.3,
    "decompx": 22.5,
    "rollout": 21.2,
    "random": 13.7,
}
# Per paper: (its claims in keep.py start with one of these words, the metrics that the paper judges by)
PAPERS = {
    "FocusViT": (("FocusViT",), ("faithfulness-correlation", "insertion-deletion")),
    "CMI report": (("CMI report",), ("faf",)),
    "Coporan": (("Coporan",), ("ap", "pointing-game")),
    "SkipPLUS": (("SkipPLUS",), ("insertion-deletion", "ap")),
    "Joita's report": (("Joita's report",), ("ap",)),
    "ResLRP": (("ResLRP",), ("srg", "ap")),
    "LibraGrad": (("LibraGrad",), ("insertion-deletion", "ap")),
}


def main() -> None:
    runs = load_runs()
    print((HERE / "introduction.md").read_text(encoding="utf-8").rstrip())
    print_best("Faithful", "insertion-deletion", FAITHFUL, runs)
    print((HERE / "faithful.md").read_text(encoding="utf-8").rstrip())
    print_best("Localising", "ap", LOCALISING, runs)
    print((HERE / "localising.md").read_text(encoding="utf-8").rstrip())
    print_cost(runs)
    print_papers(runs)
    print_libra(runs)
    print("\n" + (HERE / "limits.md").read_text(encoding="utf-8").rstrip())


def by_mean(run: dict[str, Any], metric: str) -> list[str]:
    """Return the methods that have a score, the best first."""
    rows = table_of(run)
    scored = [method for method in rows if mean_of(rows[method], metric) is not None]
    return sorted(scored, key=lambda method: -float(mean_of(rows[method], metric) or 0.0))


def print_best(title: str, order: str, metrics: tuple[str, ...], runs: list[dict[str, Any]]) -> None:
    """The best methods by the mean of both models' `order`, and the baselines."""
    tables = [table_of(run) for run in runs]
    baselines = runs[0]["baselines"]

    def total(method: str) -> float:
        return sum(float(mean_of(table[method], order) or 0.0) for table in tables)

    both = [m for m in by_mean(runs[0], order) if all(mean_of(table.get(m, {}), order) is not None for table in tables)]
    ranked = sorted((m for m in both if m not in baselines), key=total, reverse=True)
    print(f"\n## {title}\n")
    models = ("built-in", "DINOv2-S")
    print_row(["method", *(f"{SHORT.get(metric, metric)}, {model}" for model in models for metric in metrics)])
    print_row(["---"] * (2 * len(metrics) + 1))
    for method in [*ranked[:SHOWN], *baselines]:
        cells = [
            score_cell(table[method].get(metric), with_error=metric == order) for table in tables for metric in metrics
        ]
        print_row([label(method, runs[0]), *cells])


def score_cell(record: dict[str, Any] | None, *, with_error: bool) -> str:
    if record is None or record["mean"] is None:
        return "–"
    return f"{record['mean']:.3f}" + (f" ± {record['standard_error']:.3f}" if with_error else "")


def print_cost(runs: list[dict[str, Any]]) -> None:
    """Passes per map, of the best by faithfulness or localisation at each price."""
    print("\n## Cost\n")
    print(
        "Passes per map of one image and one target (14 × 14 patches); methods of one rule table share theirs. At each "
        "price the most faithful method on both models, by the mean of insertion − deletion.\n"
    )
    tables = [table_of(run) for run in runs]
    prices: dict[tuple[int, int], tuple[float, str]] = {}
    for method in tables[0]:
        if method in runs[0]["baselines"] or method == "calibrated" or method not in tables[1]:
            continue
        means = [mean_of(table[method], "insertion-deletion") for table in tables]
        if any(mean is None for mean in means):
            continue
        cost = resolve_method(method).cost
        price, mean = (cost.forwards, cost.backwards), sum(float(m or 0) for m in means) / len(means)
        if price not in prices or mean > prices[price][0]:
            prices[price] = (mean, method)
    print_row(["forwards", "backwards", "most faithful at this price", "ins − del, mean of both models"])
    print_row(["--:", "--:", "---", "--:"])
    for (forwards, backwards), (mean, method) in sorted(prices.items()):
        print_row([str(forwards), str(backwards), f"`{method}`", f"{mean:.3f}"])


def print_papers(runs: list[dict[str, Any]]) -> None:
    """One line per paper: how many of its claims hold, by the paper's kind of measure."""
    print("\n## What holds of each paper\n")
    print(
        'Claims of the form "A is better than B", by the kind of measure the paper uses: how many of the paired '
        "differences lie wholly on the paper's side (95 %), how many wholly on the other. "
        "[Every claim by every measure](results_tables.md#what-the-papers-claim).\n"
    )
    print_row(["paper", "measures", *(run["title"] for run in runs)])
    print_row(["---"] * (len(runs) + 2))
    for paper, (starts, metrics) in PAPERS.items():
        cells = []
        for run in runs:
            pairs = [p for p in run["pairs"] if p["who"].startswith(starts) and p["metric"] in metrics]
            holds = sum(p["interval"][0] is not None and p["interval"][0] > 0 for p in pairs)
            fails = sum(p["interval"][1] is not None and p["interval"][1] < 0 for p in pairs)
            cells.append(f"{holds} of {len(pairs)} hold, {fails} are reversed")
        print_row([paper, ", ".join(SHORT.get(metric, metric) for metric in metrics), *cells])


def print_libra(runs: list[dict[str, Any]]) -> None:
    """LibraGrad's published column beside ours."""
    print("\n## Next to LibraGrad's table\n")
    print((HERE / "libra.md").read_text(encoding="utf-8").rstrip() + "\n")
    print_row(["method", "LibraGrad, ViT-B: MIF", *(f"ours, {run['title']}: 1 − deletion" for run in runs)])
    print_row(["---", "--:", *["--:"] * len(runs)])
    for method, published in LIBRA.items():
        cells = []
        for run in runs:
            mean = mean_of(table_of(run).get(method, {}), "deletion")
            cells.append("–" if mean is None else f"{100 * (1 - mean):.1f}")
        print_row([f"`{method}`", f"{published:.1f}", *cells])


if __name__ == "__main__":
    main()
