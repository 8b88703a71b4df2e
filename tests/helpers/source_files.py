"""Every file of the package, parsed once for all the tests that look at the source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent / "src" / "clairvit"


@functools.cache
def source_trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file by its path below the package, such as "methods/explain.py"."""
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def violations(rule: Callable[[ast.Module], list[str]], folders: tuple[str, ...] | None = None) -> dict[str, list[str]]:
    """Return what a rule finds in each file where it finds something; in some folders of the package only, if given."""
    faults = {
        place: rule(tree)
        for place, tree in source_trees().items()
        if folders is None or place.partition("/")[0] in folders
    }
    return {place: lines for place, lines in faults.items() if lines}
