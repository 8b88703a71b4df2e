"""Count the options of all registered methods and metrics, and name those that nobody sets.

    python benchmarks/options.py --unset

An option is set by a preset, or by a string such as `rollout(fusion=max)` in a page, a notebook, a test or a data file.
Lists that are written from the registries do not count. A sweep in the tests tries every option; that does not count.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from clairvit._presets import preset_settings
from clairvit._spec import Registered
from clairvit.methods.registry import list_methods
from clairvit.metrics.registry import list_metrics

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("README.md", "docs/**/*.md", "docs/*.toml", "notebooks/*.ipynb", "tests/**/*.py", "src/**/*.toml")
GENERATED = ("methods.md", "metrics.md", "papers.md")


def texts() -> list[str]:
    """Return what people wrote: pages, notebooks, tests and data files."""
    files = (file for pattern in PATTERNS for file in sorted(ROOT.glob(pattern)))
    return [file.read_text(encoding="utf-8") for file in files if file.name not in GENERATED]


def is_set(name: str, option: str, written: Iterable[str]) -> bool:
    """Return whether NAME(…option=…) occurs, or "NAME", …, option=… in one line."""
    spec = re.compile(rf"(?<![\w-]){re.escape(name)}\((?:[^()]|\([^()]*\))*\b{option}=")
    keyword = re.compile(rf"[\"']{re.escape(name)}[\"'][^\n]*[,(\s{{\"']{option}[\"']?\s*[=:]")
    return any(spec.search(text) or keyword.search(text) for text in written)


def unset_options(entries: Sequence[Registered], written: Sequence[str]) -> list[str]:
    """Return NAME(option) of options that no preset and no text sets."""
    return [
        f"{entry.name}({option.name})"
        for entry in entries
        for option in entry.option_list
        if not any(option.name in preset_settings(entry, preset) for preset in entry.presets)
        and not is_set(entry.name, option.name, written)
    ]


def main() -> None:
    """Print the counts, and with --unset the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unset", action="store_true", help="name the options that nobody sets")
    arguments = parser.parse_args()
    written, total = texts(), 0
    print(f"{'':10}{'entries':>9}{'options':>9}{'presets':>9}{'unset':>9}")
    kinds: dict[str, list[Registered]] = {"methods": [*list_methods()], "metrics": [*list_metrics()]}
    unset = {kind: unset_options(entries, written) for kind, entries in kinds.items()}
    for kind, entries in kinds.items():
        options, presets = (
            sum(map(len, lists)) for lists in zip(*((e.option_list, e.presets) for e in entries), strict=True)
        )
        total += options
        print(f"{kind:10}{len(entries):9}{options:9}{presets:9}{len(unset[kind]):9}")
    print(f"{'together':10}{sum(map(len, kinds.values())):9}{total:9}")
    if arguments.unset:
        print("\n".join(name for names in unset.values() for name in names))


if __name__ == "__main__":
    main()
