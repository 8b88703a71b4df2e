"""Every file of the package and of its tests, parsed once for all the tests that look at the source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parent.parent
SOURCE = TESTS.parent / "src" / "clairvit"


def source_trees(root: Path = SOURCE) -> dict[str, ast.Module]:
    """Return the syntax tree of each file by its path below the package or the tests, such as "methods/explain.py"."""
    return _trees(root)


@functools.cache
def _trees(root: Path) -> dict[str, ast.Module]:
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(root.rglob("*.py"))
    }


def violations(
    rule: Callable[[ast.Module], list[str]], folders: tuple[str, ...] | None = None, *, root: Path = SOURCE
) -> dict[str, list[str]]:
    """Return what a rule finds in each file where it finds something; in some folders of the package only, if given."""
    faults = {
        place: rule(tree)
        for place, tree in source_trees(root).items()
        if folders is None or place.partition("/")[0] in folders
    }
    return {place: lines for place, lines in faults.items() if lines}
