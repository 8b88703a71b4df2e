"""Print docs/results.md, the front page, from docs/results/*:  python docs/generate_results.py > docs/results.md"""

from __future__ import annotations

from typing import Any

from generate_results_tables import ARROWS, ORDER, SHORT, label, load_runs, mean_of, print_row, table_of
from results_text import difference, milliseconds, read_text, signed

from clairvit.methods.calibrated import KINDS
from clairvit.methods.calibrated import table_of as rule_table_of
from clairvit.methods.recommended import default_method
from clairvit.methods.spec import resolve_method

SHOWN = 14  # methods per table, besides the default, the calibrated method and the baselines
CALIBRATED = "calibrated"
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
# Libra's published deletion accuracy (MIF) on Oxford-IIIT Pet with a ViT-B (Mehri et al., CVPR 2025); None: not theirs
LIBRA: dict[str, float | None] = {
    "libra-fullgrad-plus": 57.3,
    "libra-attcat": 55.3,
    "genatt": 44.1,
    "tokentm": 44.0,
    "attcat": 37.3,
    "attnlrp": 30.3,
    "decompx": 22.5,
    "rollout": 21.2,
    "random": 13.7,
    default_method(): None,
    "center": None,
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
    print(read_text("introduction.md", runs))
    print("\n## Faithful")
    for run in runs:
        print_best(run, FAITHFUL)
    print("\n### The default against the other one-pass methods\n")
    print_default(runs)
    print("\n" + read_text("faithful.md", runs))
    print("\n## Localising")
    for run in runs:
        print_best(run, LOCALISING)
    print("\n" + read_text("localising.md", runs))
    print_cost(runs)
    print_papers(runs)
    print("\n" + read_text("papers.md", runs))
    print_libra(runs)
    print("\n" + read_text("limits.md", runs))


def print_best(run: dict[str, Any], metrics: tuple[str, ...]) -> None:
    """Print the best methods of a run by the first of these metrics, the default, the calibrated one, the baselines."""
    metrics = tuple(metric for metric in metrics if metric in run["better"])
    if not metrics:
        return
    rows, order = table_of(run), metrics[0]
    sign = 1 if run["better"][order] == "higher" else -1
    scored = [m for m in rows if m not in run["baselines"] and mean_of(rows[m], order) is not None]
    ranked = sorted(scored, key=lambda method: -sign * float(mean_of(rows[method], order) or 0.0))
    kept = [m for place, m in enumerate(ranked) if place < SHOWN or m in (default_method(), CALIBRATED)]
    shown = min(SHOWN, len(scored))
    more = " (and the default and the calibrated method)" if len(kept) > SHOWN else ""
    print(f"\n**{run['title']}**, {run['images']} photos, the best {shown} of {len(scored)} by {short(order)}{more}:\n")
    print_row(["method", *(f"{short(metric)} {ARROWS[run['better'][metric]]}" for metric in metrics)])
    print_row(["---", *["--:"] * len(metrics)])
    for method in [*kept, *run["baselines"]]:
        print_row([label(method, run), *(score_cell(rows[method].get(m), with_error=m == order) for m in metrics)])


def short(metric: str) -> str:
    return SHORT.get(metric, metric)


def model_name(run: dict[str, Any]) -> str:
    """Return the title of a run without what stands in brackets."""
    return str(run["title"]).split(" (")[0]


def score_cell(record: dict[str, Any] | None, *, with_error: bool) -> str:
    if record is None or record["mean"] is None:
        return "–"
    return signed(record["mean"]) + (f" ± {record['standard_error']:.3f}" if with_error else "")


def one_pass_rivals(run: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    """Return the paired differences to the default of methods of one forward and at most one backward, best first."""
    rivals = [
        paired
        for paired in run["to_default"]
        if paired["metric"] == metric
        and paired["gap"] is not None
        and paired["method"] not in (*run["baselines"], CALIBRATED)
        and resolve_method(paired["method"]).cost.forwards == 1
        and resolve_method(paired["method"]).cost.backwards <= 1
    ]
    return sorted(rivals, key=lambda paired: -float(paired["gap"]))


def print_default(runs: list[dict[str, Any]]) -> None:
    """Print, per measure and model, the place of the default among methods of its price and its best rival."""
    print(
        f"Methods of one forward and at most one backward pass, compared with `{default_method()}` photo by photo. "
        "Its place by the mean difference; the best of the others and its difference to the default (positive: better "
        "than the default) with the 95 % interval; which intervals lie wholly above 0 (*surely ahead*), and how many "
        "wholly below (*surely behind*).\n"
    )
    print_row(["model", "measure", "place", "best of the others", "surely ahead", "surely behind"])
    print_row(["---", "---", "--:", "---", "---", "--:"])
    for run in runs:
        for metric in [metric for metric in FAITHFUL if metric in run["better"]]:
            rivals = one_pass_rivals(run, metric)
            ahead = [paired["method"] for paired in rivals if paired["interval"][0] > 0]
            behind = sum(paired["interval"][1] < 0 for paired in rivals)
            place = 1 + sum(paired["gap"] > 0 for paired in rivals)
            best = f"`{rivals[0]['method']}` {difference(rivals[0])}"
            names = ", ".join(f"`{method}`" for method in ahead) or "none"
            print_row([model_name(run), short(metric), f"{place} of {len(rivals) + 1}", best, names, str(behind)])


def cost_of(method: str) -> tuple[int, int]:
    """Return forward and backward passes per map; the calibrated method makes a backward pass per rule table."""
    if method == CALIBRATED:
        return 1, len({rule_table_of(kind) for kind in KINDS} - {None})
    cost = resolve_method(method).cost
    return cost.forwards, cost.backwards


def print_cost(runs: list[dict[str, Any]]) -> None:
    """Print, per number of passes, the most faithful method of each run, and the baselines."""
    print("\n## Cost\n")
    print(
        "Passes per map of one image and one target (14 × 14 patches); methods of one rule table share them. The most "
        "faithful method at each price, by insertion − deletion; a dash: no method of this price was run. Passes are "
        f"not time: `alti` makes one forward pass and takes longer than `{default_method()}` "
        f"({milliseconds('alti'):.0f} and {milliseconds(default_method()):.0f} ms, "
        "[one thread of a Xeon](benchmarks.md#before-and-after-the-reshape)).\n"
    )
    best: dict[tuple[int, int], dict[str, tuple[float, str]]] = {}
    for run in runs:
        for method, row in table_of(run).items():
            mean = mean_of(row, ORDER)
            if method not in run["baselines"] and mean is not None:
                cells = best.setdefault(cost_of(method), {})
                cells[run["title"]] = max(cells.get(run["title"], (-1.0, "")), (mean, method))
    print_row(["forwards", "backwards", *(text for run in runs for text in (model_name(run), "ins − del"))])
    print_row(["--:", "--:", *["---", "--:"] * len(runs)])
    for (forwards, backwards), cells in sorted(best.items()):
        found = [cells.get(run["title"]) for run in runs]
        texts = [text for cell in found for text in ((f"`{cell[1]}`", f"{cell[0]:.3f}") if cell else ("–", "–"))]
        print_row([str(forwards), str(backwards), *texts])
    for baseline in runs[0]["baselines"]:
        means = [signed(mean_of(table_of(run)[baseline], ORDER) or 0.0) for run in runs]
        print_row(["0", "0", *(text for mean in means for text in (f"*{baseline}*", mean))])


def print_papers(runs: list[dict[str, Any]]) -> None:
    """Print one line per paper: how many of its claims hold, by the paper's kind of measure."""
    print("\n## What holds of each paper\n")
    print(
        'Claims of the form "A is better than B", by the kind of measure the paper uses: how many of the paired '
        "differences lie wholly on the paper's side (95 %), how many wholly on the other. "
        "[Every claim by every measure](results_tables.md#what-the-papers-claim).\n"
    )
    print_row(["paper", "measures", *map(model_name, runs)])
    print_row(["---"] * (len(runs) + 2))
    for paper, (starts, metrics) in PAPERS.items():
        cells = []
        for run in runs:
            pairs = [p for p in run["pairs"] if p["who"].startswith(starts) and p["metric"] in metrics]
            holds = sum(p["interval"][0] is not None and p["interval"][0] > 0 for p in pairs)
            fails = sum(p["interval"][1] is not None and p["interval"][1] < 0 for p in pairs)
            cells.append(f"{holds} of {len(pairs)} hold, {fails} reversed" if pairs else "not run")
        print_row([paper, ", ".join(map(short, metrics)), *cells])


def print_libra(runs: list[dict[str, Any]]) -> None:
    """Print LibraGrad's published column beside ours."""
    print("\n## Next to LibraGrad's table\n")
    print(read_text("libra.md", runs) + "\n")
    print_row(["method", "LibraGrad, ViT-B: MIF", *(f"ours, {model_name(run)}: 1 − deletion" for run in runs)])
    print_row(["---", "--:", *["--:"] * len(runs)])
    for method, published in LIBRA.items():
        cells = []
        for run in runs:
            mean = mean_of(table_of(run).get(method, {}), "deletion")
            cells.append("–" if mean is None else f"{100 * (1 - mean):.1f}")
        print_row([f"`{method}`", "–" if published is None else f"{published:.1f}", *cells])


if __name__ == "__main__":
    main()
