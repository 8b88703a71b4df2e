"""Print docs/results.md, the front page, from docs/results/*:  python docs/generate_results.py > docs/results.md"""

from __future__ import annotations

from typing import Any

from generate_results_tables import ARROWS, HERE, ORDER, SHORT, label, load_runs, mean_of, print_row, table_of

from clairvit.methods.spec import resolve_method

SHOWN = 14  # methods per table, besides the baselines
FAITHFUL = (
    "insertion-deletion",
    "insertion-deletion(removal=mean)",
    "insertion",
    "deletion",
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
    "FocusViT": (("FocusViT",), ("faithfulness-correlation", "deletion", "insertion")),
    "CMI report": (("CMI report",), ("faf",)),
    "Coporan": (("Coporan",), ("ap", "pointing-game")),
    "SkipPLUS": (("SkipPLUS",), ("deletion", "insertion", "ap")),
    "Joita's report": (("Joita's report",), ("ap",)),
    "ResLRP": (("ResLRP",), ("srg", "ap")),
    "LibraGrad": (("LibraGrad",), ("deletion", "insertion", "ap")),
}


def main() -> None:
    runs = load_runs()
    print_text("introduction.md")
    print("\n## Faithful")
    for run in runs:
        print_best(run, FAITHFUL)
    print_text("faithful.md")
    print("\n## Localising")
    for run in runs:
        print_best(run, LOCALISING)
    print_text("localising.md")
    print_cost(runs)
    print_papers(runs)
    print_libra(runs)
    print_text("limits.md")


def print_text(name: str) -> None:
    print("\n" * (name != "introduction.md") + (HERE / name).read_text(encoding="utf-8").rstrip())


def print_best(run: dict[str, Any], metrics: tuple[str, ...]) -> None:
    """Print the best methods of a run by the first of these metrics that it has, and the baselines."""
    rows = table_of(run)
    shown = [metric for metric in metrics if metric in run["better"]]
    order, sign = shown[0], 1 if run["better"][shown[0]] == "higher" else -1
    scored = [m for m in rows if m not in run["baselines"] and mean_of(rows[m], order) is not None]
    ranked = sorted(scored, key=lambda method: -sign * float(mean_of(rows[method], order) or 0.0))
    print(f"\n**{run['title']}**, {run['images']} photos, the best {SHOWN} of {len(scored)} by {short(order)}:\n")
    print_row(["method", *(f"{short(metric)} {ARROWS[run['better'][metric]]}" for metric in shown)])
    print_row(["---", *["--:"] * len(shown)])
    for method in [*ranked[:SHOWN], *run["baselines"]]:
        print_row([label(method, run), *(score_cell(rows[method].get(m), with_error=m == order) for m in shown)])


def short(metric: str) -> str:
    return SHORT.get(metric, metric)


def score_cell(record: dict[str, Any] | None, *, with_error: bool) -> str:
    if record is None or record["mean"] is None:
        return "–"
    return f"{record['mean']:.3f}" + (f" ± {record['standard_error']:.3f}" if with_error else "")


def print_cost(runs: list[dict[str, Any]]) -> None:
    """Print, per number of passes, the most faithful method of the run that has insertion − deletion."""
    run = next(run for run in runs if ORDER in run["better"])
    print("\n## Cost\n")
    print(
        "Passes per map of one image and one target (14 × 14 patches); methods of one rule table share them. The most "
        f"faithful method at each price, by insertion − deletion ({run['title']}). Passes are not time: `alti` makes "
        "one forward pass and takes longer than `attnlrp+plus` (240 and 98 ms on one core of a Xeon).\n"
    )
    rows = table_of(run)
    prices: dict[tuple[int, int], tuple[float, str]] = {}
    for method in rows:
        mean = mean_of(rows[method], ORDER)
        if method in (*run["baselines"], "calibrated") or mean is None:
            continue
        cost = resolve_method(method).cost
        price = (cost.forwards, cost.backwards)
        prices[price] = max(prices.get(price, (-1.0, "")), (mean, method))
    print_row(["forwards", "backwards", "most faithful", "ins − del"])
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
            cells.append(f"{holds} of {len(pairs)} hold, {fails} are reversed" if pairs else "not run")
        print_row([paper, ", ".join(map(short, metrics)), *cells])


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
