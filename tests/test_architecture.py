"""Check how the packages are put together; names are those of the field. Imports: `make lint`, import-linter."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

from clairvit.methods.registry import list_methods
from helpers.source_files import TESTS, violations

SOURCE = Path(__file__).parent.parent / "src" / "clairvit"


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


VAGUE = {"asked", "found", "known", "made", "own", "said", "told"}
VAGUE_IN_SENTENCES = {"said", "told"}  # the name of a test is a sentence, in which "found" and "own" may be plain words
ALLOWED = {"own_code"}  # the code of methods that are the user's own: `clairvit.metrics.own_code`


def given_names(tree: ast.Module) -> set[str]:
    """Return the names that a file gives: to variables, parameters, imports, functions, classes and attributes."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)) | ast.alias(name=str(name)):
                names.add(name)
    return names


def vague_names(tree: ast.Module) -> list[str]:
    """Return the names that do not say what they hold, such as `found_maps` or `as_told`, and metaphors."""
    return sorted(
        name
        for name in given_names(tree) - ALLOWED
        if (VAGUE_IN_SENTENCES if name.startswith("test_") else VAGUE | METAPHORS) & set(name.lower().split("_"))
    )


def test_names_in_tests_say_what_they_hold() -> None:
    """`explanation`, `scores`, `message`, `expected`: what a reader of PyTorch code guesses and can search for."""
    code = "def test_it_is_told(known_maps):\n    for made, (*OWN, _) in known_maps:\n        self.found_here = unknown"
    assert vague_names(ast.parse(code)) == ["OWN", "found_here", "known_maps", "made", "test_it_is_told"]
    assert vague_names(ast.parse("def own_code(unknown): return explanation.found")) == []
    assert vague_names(ast.parse("def wish(): room = 1")) == ["room", "wish"]
    assert vague_names(ast.parse("import said.so as well, told\ndef test_the_best_is_found(): pass")) == ["told"]
    assert violations(vague_names, root=TESTS) == {}


LOWER_PACKAGES = ("models", "targets", "data", "tracing", "perturbation")
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
