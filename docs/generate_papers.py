"""Print docs/papers.md from the registries and the papers' files:  python docs/generate_papers.py > docs/papers.md"""

from __future__ import annotations

import re
from collections.abc import Iterable

from clairvit.methods.registry import list_methods
from clairvit.metrics.registry import list_metrics
from clairvit.papers.paper import Paper, list_papers

INTRODUCTION = """# Papers and their discrepancies

*Made by `python docs/generate_papers.py`; do not edit.*

Where formula, text, tables and public code of one name disagree, and what is computed here. The default is the right or
the most common definition; what others compute under the same name is an option or a preset. None of this is meant as
blame: most of it was found because authors published their code.

* [The papers whose experiments can be repeated](#experiments): what their printed numbers do not add up to, and what
  their protocols leave open. `clairvit reproduce NAME` runs them ([how](reproduce.md)).
* [Methods](#methods) and [metrics](#metrics): one line for each that has several meanings.
* The same with pictures, for mistakes that change maps: [known issues in the wild](known-issues-in-the-wild.md).
* What holds of the papers' claims on the models that could be run here: [results](results.md#what-holds-of-each-paper).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION, "## Experiments\n", *map(_paper_section, list_papers())]
    methods = ((method.name, method.paper, method.caveats.discrepancies) for method in list_methods())
    metrics = ((metric.name, metric.paper, metric.discrepancies) for metric in list_metrics())
    parts += ["## Methods\n", _table("method", methods), "## Metrics\n", _table("metric", metrics)]
    return "\n".join(parts)


def _paper_section(paper: Paper) -> str:
    findings = paper.check()
    failing = [finding for finding in findings if not finding.holds]
    images = f" ({paper.images} images)" if paper.images[:1].isdigit() else ""
    lines = [f"### {paper.name}\n", f"{paper.citation}. {paper.models}; {paper.data}{images}.\n"]
    command = f"`clairvit reproduce {paper.name} --check`"
    if not findings:
        lines.append("Nothing that is printed can be computed again from other printed numbers.\n")
    elif not failing:
        lines.append(f"What is printed and can be computed again holds ({command}).\n")
    else:
        lines.append(f"Of what is printed and can be computed again ({command}), this does not hold:\n")
    if failing:
        lines += ["| does not hold | where | numbers |", "|---|---|---|"]
        lines += [_row(finding.statement, finding.source, finding.numbers) for finding in failing]
        lines.append("")
    lines += [f"* {' '.join(gap.split())}" for gap in paper.gaps]
    return "\n".join(lines) + "\n"


def _table(kind: str, entries: Iterable[tuple[str, str, str]]) -> str:
    """Return a row per entry that has a discrepancy of its own, not that of another ("As genatt.")."""
    lines = [f"| {kind} | paper | where definitions differ, and what is done here |", "|---|---|---|"]
    for name, paper, text in entries:
        if text and not re.fullmatch(r"As [\w-]+\.", text):
            lines.append(_row(f"[`{name}`]({kind}s.md#{name})", paper, " ".join(text.split())))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
