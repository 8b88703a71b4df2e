"""Fill the figures into the texts of docs/results/*.md, so that none of them is typed:

    {{mean RUN METHOD METRIC}}          the mean score of a method: 0.744
    {{gap RUN METHOD METRIC}}           its paired difference to the default, 95 % interval: +0.020 [0.002, 0.039]
    {{pair RUN BETTER WORSE METRIC}}    the paired difference of a paper's claim and its interval
    {{claims PAPER …}}                  what `clairvit reproduce PAPER` says of the paper's claims, both models
    {{answer FILE}}                     the sentences of `clairvit choose --out FILE`
    {{milliseconds METHOD}}             the time of a map, as docs/benchmarks.md has it of benchmarks/two_commits.py

RUN is "pets", "dinov2" or "vitb"; differences are positive where the method (or the paper's) is better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
RUNS = ("pets", "dinov2", "vitb")
REPEATED = RUNS[:2]  # the models that the papers' experiments were repeated on, one page each
FIELD = re.compile(r"\{\{(\w+) ([^}]+)\}\}")


def read_text(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return a text of docs/results with its fields filled."""
    by_name = dict(zip(RUNS, runs, strict=True))
    return FIELD.sub(
        lambda match: field(match[1], match[2].split(), by_name),
        (RESULTS / name).read_text(encoding="utf-8").rstrip(),
    )


def field(kind: str, words: list[str], runs: dict[str, dict[str, Any]]) -> str:
    """Return the text of one field; raise KeyError or ValueError for one that does not exist."""
    if kind == "claims":
        return claims_table(words)
    if kind == "answer":
        return "\n".join(f"> {sentence}" for sentence in recipe(words[0])["answer"])
    if kind == "milliseconds":
        return f"{milliseconds(words[0]):.0f}"
    name, *keys = words
    if kind == "mean":
        return f"{record(runs[name]['scores'], method=keys[0], metric=keys[1])['mean']:.3f}"
    if kind == "gap":
        return difference(record(runs[name]["to_default"], method=keys[0], metric=keys[1]))
    if kind == "pair":
        return difference(record(runs[name]["pairs"], better=keys[0], worse=keys[1], metric=keys[2]))
    raise ValueError(f"Unknown field {kind!r}; expected claims, answer, milliseconds, mean, gap or pair.")


def record(records: list[dict[str, Any]], **keys: str) -> dict[str, Any]:
    """Return the first record with these values."""
    for candidate in records:
        if all(candidate[key] == value for key, value in keys.items()):
            return candidate
    raise KeyError(f"No record has {keys}.")


def difference(paired: dict[str, Any]) -> str:
    """Return "+0.020 [0.002, 0.039]" for a paired difference and its interval."""
    low, high = paired["interval"]
    return f"{signed(paired['gap'], '+')} [{signed(low)}, {signed(high)}]"


def signed(value: float, plus: str = "") -> str:
    """Return a number with three decimals and a true minus sign; one that rounds to 0 has no sign."""
    text = f"{value:{plus}.3f}"
    return "0.000" if float(text) == 0 else text.replace("-", "−")


def milliseconds(method: str) -> float:
    """Return the time of one map ("after, ms") from the table of benchmarks/two_commits.py in docs/benchmarks.md."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    section = page.partition("## Before and after the reshape")[2]
    rows = section.partition("| row | before, ms | after, ms | ratio |")[2]
    match = re.search(rf"^\| `{re.escape(method)}` \| [\d.]+ \| ([\d.]+) \|", rows, re.MULTILINE)
    if match is None:
        raise KeyError(f"docs/benchmarks.md has no time of {method!r}.")
    return float(match[1])


def title_and_table(page: str) -> tuple[str, str]:
    """Return the title and the first table of a page that `clairvit reproduce` wrote."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    match = re.search(r"^(?:## |\*\*)([^\n]*\d+ images[^\n]*?)(?:\*\*)?\n+((?:\|[^\n]*\n)+)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"docs/results/{page}.md has no table of results.")
    return match[1], match[2]


def claims_of(page: str) -> dict[str, str]:
    """Return claim -> verdict of a page that `clairvit reproduce` wrote."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| the paper says \|[^\n]*\n\|[^\n]*\n((?:\|[^\n]*\n)+)", text, re.MULTILINE)
    if rows is None:
        raise ValueError(f"docs/results/{page}.md has no table of claims.")
    verdicts = {}
    for row in rows[1].splitlines():
        claim, _, verdict, true, surely, surely_not = (cell.strip() for cell in row.strip("|").split("|"))
        tested = "" if surely == "–" else f"; surely {surely}, surely not {surely_not}"
        verdicts[claim] = f"{verdict.replace('does not hold', '**does not hold**')} ({true}{tested})"
    return verdicts


def claims_table(papers: list[str]) -> str:
    """Return a Markdown table: the papers' claims, and what comes of them on both models."""
    lines = ["| paper | it says | built-in model | DINOv2-S |", "| --- | --- | --- | --- |"]
    for paper in papers:
        built_in, dinov2 = (claims_of(f"{paper}-{run}") for run in REPEATED)
        lines += [f"| `{paper}` | {claim} | {built_in[claim]} | {dinov2[claim]} |" for claim in built_in]
    return "\n".join(lines)


def recipe(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content
