"""The house rules: data walks one way, docs are what the registry says, examples in the docs are true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "clairvit"
# data walks this way, never back
ROOMS = [
    *("models", "targets", "data", "tracing", "perturbation", "methods", "metrics", "selection", "bench", "papers"),
    *("training", "diagnostics", "plotting", "report"),
]
DOORS_BACK = {
    ("methods/explanation.py", "plotting"),  # Explanation.save and the picture in a notebook
    ("methods/explain.py", "plotting"),  # the same of Comparison
}


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("clairvit.")}


@pytest.mark.parametrize("room", ROOMS)
def test_data_walks_one_way(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "errors", "numerics", "_io", "_registry", "_version"}
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files
    for path in files:
        place = path.relative_to(SOURCE).as_posix()
        for other in imported_rooms(path) - allowed:
            assert (place, other) in DOORS_BACK, f"{place} imports clairvit.{other}"


def test_nobody_imports_the_web_page_but_its_command() -> None:
    users = {p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*.py") if "web" in imported_rooms(p)}
    assert {place for place in users if not place.startswith("web/")} == {"cli/serve.py"}


def test_verbs_stay_verbs_after_importing_rooms() -> None:
    code = (
        "import clairvit.tracing.capture, clairvit.methods.attention as attention, clairvit as cv; "
        "assert attention.rolled_attention; assert callable(cv.trace); assert len(cv.list_methods()) > 10"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_list_of_methods_in_the_docs_is_the_registry() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_methods.py")], check=True, capture_output=True, encoding="utf-8"
    )
    kept = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert made.stdout == kept, "run: python docs/generate_methods.py > docs/methods.md"


def test_the_list_of_metrics_in_the_docs_is_the_registry() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_metrics.py")], check=True, capture_output=True, encoding="utf-8"
    )
    kept = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert made.stdout == kept, "run: python docs/generate_metrics.py > docs/metrics.md"


def test_the_results_in_the_docs_are_made_from_what_was_measured() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_results.py")], check=True, capture_output=True, encoding="utf-8"
    )
    kept = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert made.stdout == kept, "run: python docs/generate_results.py > docs/results.md"


def test_the_readme_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    prelude = (
        "import timm; my_module = timm.create_model('vit_tiny_patch16_224', num_classes=2); my_names = ['a', 'b']\n"
    )
    subprocess.run([sys.executable, "-c", prelude + "\n".join(blocks)], check=True, cwd=tmp_path)
    assert (tmp_path / "cat.png").stat().st_size > 10_000


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_write_a_method_example_works() -> None:
    page = (ROOT / "docs" / "write-a-method.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    check = """
import clairvit as cv
ex = cv.explain(cv.load("pets"), "demo", "shy+skipplus")
assert ex.maps.shape == (1, 14, 14) and ex.maps.min() >= 0 and ex.maps.any()
"""
    subprocess.run([sys.executable, "-c", example + check], check=True)
