"""Print docs/what-works.md from runs of tiny models:  python docs/generate_what_works.py > docs/what-works.md"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.families import COLUMNS, FAMILIES, PERTURBATION, Family, Runs, reasons, table_row, what_runs

INTRODUCTION = f"""# What works

*Made by `python docs/generate_what_works.py`; do not edit.*

Each row is a tiny model of that family with random weights, built by the library that is named
(`tests/helpers/families.py`). Each cell is a run: *yes*: every quick method of the family gave a map; *3 of 8*: so many
of them did; *no*: all were refused. A refusal is an error in one sentence, never a wrong map; [the sentences](#refused)
are below. Perturbation methods are {", ".join(f"`{method}`" for method in PERTURBATION)}. *Targets* are
those that a gradient method explained; methods were run with the first of them.

That the maps are right is shown elsewhere: [Testing](testing.md). Your own model: `clairvit doctor`,
[Doctor](doctor.md)."""


def page() -> str:
    """Return the page in Markdown."""
    runs: list[tuple[Family, Runs]] = [(family, what_runs(family)) for family in FAMILIES]
    header = ["model", "from", *COLUMNS, "perturbation", "targets"]
    lines = [INTRODUCTION, "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [table_row(family, result) for family, result in runs]
    lines += ["", "## Refused"]
    families_of: dict[tuple[str, ...], list[str]] = {}
    for family, result in runs:
        families_of.setdefault(reasons(family, result), []).append(f"{family.name} ({family.examples})")
    for details, names in families_of.items():
        if details:
            lines += ["", f"**{'; '.join(names)}**", "", *details]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
