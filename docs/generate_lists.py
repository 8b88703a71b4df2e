"""Write all that lists methods and metrics, from the registries: python docs/generate_lists.py (make lists).

docs/methods.md, docs/metrics.md, docs/papers.md, the number of methods in README.md, and tests/registry.txt, which
keeps a method or metric from disappearing, or changing its kind, unnoticed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import generate_methods
import generate_metrics
import generate_papers

from clairvit.methods.registry import list_methods
from clairvit.metrics.registry import list_metrics

ROOT = Path(__file__).parent.parent
COUNT = re.compile(r"(?<=by )\d+(?= methods)")


def texts() -> dict[str, str]:
    """Return file -> text."""
    return {
        "docs/methods.md": _printed(generate_methods),
        "docs/metrics.md": _printed(generate_metrics),
        "docs/papers.md": generate_papers.page(),
        "README.md": COUNT.sub(str(len(list_methods())), (ROOT / "README.md").read_text(encoding="utf-8")),
        "tests/registry.txt": "".join(f"{line}\n" for line in registry_lines()),
    }


def registry_lines() -> Iterator[str]:
    """Yield a line per method and metric, in the order of lists: what it is, not what is said of it."""
    for method in list_methods():
        depends = "class" if method.class_specific else "class-agnostic"
        sign = "signed" if method.signed else "unsigned"
        slow = ["slow"] * method.slow
        yield "  ".join(["method", method.name, method.family, method.output, depends, sign, *slow])
    for metric in list_metrics():
        yield "  ".join(["metric", metric.name, metric.family, metric.scope, metric.better, *metric.needs])


def _printed(generator: object) -> str:
    with redirect_stdout(io.StringIO()) as text:
        generator.main()  # type: ignore[attr-defined]
    return text.getvalue()


if __name__ == "__main__":
    for name, text in texts().items():
        if not (ROOT / name).exists() or (ROOT / name).read_text(encoding="utf-8") != text:
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
