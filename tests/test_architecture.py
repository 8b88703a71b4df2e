"""Check how the packages are put together: imports go one way, names are those of the field."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from clairvit.methods.registry import list_methods
from helpers.source_files import violations

SOURCE = Path(__file__).parent.parent / "src" / "clairvit"
# A package imports from the packages before it only; cli and web import from all.
PACKAGES = [
    *("models", "targets", "data", "tracing", "perturbation", "methods", "metrics", "selection", "bench", "papers"),
    *("training", "diagnostics", "plotting", "reports"),
]
SHARED = {"errors", "execution", "numerics", "option_types", "compat", "plugins"}
SHARED |= {path.stem for path in SOURCE.glob("_[a-z]*.py")}
LAZY_EXCEPTIONS = {
    ("methods/explanation.py", "plotting"),  # Explanation.save, .plot and the picture in a notebook
    ("methods/explanation.py", "metrics"),  # Explanation.check
    ("methods/explanation_files.py", "metrics"),  # a check that lies in a file
    ("methods/explain.py", "plotting"),  # the same of Comparison
    ("methods/similarity.py", "plotting"),  # the same of Similarity
    ("methods/token_features.py", "plotting"),  # the same of PatchFeatures
    ("perturbation/patching.py", "plotting"),  # PatchSweep.plot
    ("metrics/score.py", "plotting"),  # the same of Scores
    ("selection/result.py", "plotting"),  # Selection.save
    ("methods/recipe.py", "plotting"),  # Recipe.plot and Selection.plot
}


def imported_packages(path: Path) -> set[str]:
    """Return the packages and modules directly below clairvit that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("clairvit.")}


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages == {*PACKAGES, "compat", "integrations", "cli", "web"}


def test_integrations_are_imported_by_nobody() -> None:
    users = {p.relative_to(SOURCE).parts[0] for p in SOURCE.rglob("*.py") if "integrations" in imported_packages(p)}
    assert users == {"integrations"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    allowed = {*PACKAGES[: PACKAGES.index(package) + 1], *SHARED}
    for path in sorted((SOURCE / package).rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        for other in imported_packages(path) - allowed:
            assert (place, other) in LAZY_EXCEPTIONS, f"{place} imports clairvit.{other}"


def test_only_the_serve_command_imports_the_web_server() -> None:
    users = {p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*.py") if "web" in imported_packages(p)}
    assert {place for place in users if not place.startswith("web/")} == {"cli/serve.py"}


def test_public_functions_stay_functions_after_importing_packages() -> None:
    code = (
        "import clairvit.tracing.capture, clairvit.methods.attention as attention, clairvit as cv; "
        "assert attention.raw_attention; assert callable(cv.trace); assert len(cv.list_methods()) > 10; "
        "assert not callable(cv.methods)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


METAPHORS = {
    *("album", "anatomy", "aside", "desk", "dice", "film", "found", "guest", "house", "lane", "ledger", "luck", "room"),
    *("said", "shelf", "tally", "told", "wish"),
}


def names_of(path: Path) -> set[str]:
    with path.open(encoding="utf-8") as file:
        return {token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME}


def test_names_are_no_metaphors() -> None:
    """A reader who knows PyTorch, LRP and captum finds things by the usual words."""
    used = {
        f"{path.relative_to(SOURCE).as_posix()}: {name}"
        for path in SOURCE.rglob("*.py")
        for name in names_of(path)
        if METAPHORS & set(name.lower().strip("_").split("_"))
    }
    assert used == set()


LOWER_PACKAGES = PACKAGES[: PACKAGES.index("methods")]
# Method names that are also ordinary words, or names of rule tables, which lower packages own.
ORDINARY = {"random", "center", "cat", "cam", "vanilla", "lrp", "attnlrp", "cp-lrp", "decompx", "deep-taylor", "hsic"}
ORDINARY |= {"reslrp"}  # a rule table too


def message_words(tree: ast.Module) -> set[str]:
    """Return the words of a file's strings that are no docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    return {word.strip(".,;:!?()'\"") for text in texts for word in text.split()}


def test_lower_packages_name_no_methods() -> None:
    """Errors name a kind of method (`errors.Alternative`); `methods/alternatives.py` adds the names."""
    methods = {method.name for method in list_methods()} - ORDINARY
    assert message_words(ast.parse("raise E('use legrad')")) & methods == {"legrad"}
    assert violations(lambda tree: sorted(message_words(tree) & methods), tuple(LOWER_PACKAGES)) == {}
