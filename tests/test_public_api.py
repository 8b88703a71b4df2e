"""The public names: what is exported, its documentation, the examples in it, and how it is imported."""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib import pyplot

import clairvit as cv
from clairvit.methods import registry as methods
from clairvit.metrics import registry as metrics
from clairvit.models import coerce

SOURCE = Path(cv.__file__).parent
NAMES = [name for name in cv.__all__ if name != "__version__"]
EXPECTED = {
    *("Explanation", "Comparison", "Trace", "Score", "Scores", "Selection", "Recipe", "Diagnosis", "Check"),
    *("MethodSpec", "MetricSpec", "LayerView", "method", "metric", "Target", "Preprocess", "Layout", "Model"),
    *("ClairError", "BadInput", "UnknownName", "NotApplicable", "ModelUnavailable", "CaptureError", "ClairWarning"),
    *("load", "wrap", "explain", "compare", "trace", "evaluate", "choose", "doctor", "smooth", "ensemble", "Contrast"),
    *("list_methods", "list_metrics", "list_models", "parse_method", "parse_metric"),
}


def type_checking_names() -> set[str]:
    """Return the names that `__init__` imports for type checkers."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names), "an explicit re-export"
    return {alias.name for node in imports for alias in node.names}


def test_what_is_exported_is_what_type_checkers_see() -> None:
    assert set(NAMES) == type_checking_names()
    assert len(NAMES) == len(set(NAMES))
    assert set(NAMES) >= EXPECTED
    assert dir(cv) == sorted(cv.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'explian'"):
        cv.explian  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_defined_where_it_says(name: str) -> None:
    value = getattr(cv, name)
    assert value.__name__ == name
    assert value.__module__ == cv._MODULES[name]


def test_packages_are_not_callable() -> None:
    for name in ("methods", "metrics", "models", "tracing", "targets", "data", "plotting"):
        package = __import__(f"clairvit.{name}", fromlist=["x"])
        assert type(package) is ModuleType
        assert not callable(package)


def test_importing_clairvit_imports_no_torch() -> None:
    code = "import sys, clairvit; dir(clairvit); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def section(doc: str, *headings: str) -> str:
    """Return the text of a section of a Google-style docstring; '' without it."""
    match = re.search(rf"^(?:{'|'.join(headings)}):\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    return match[1] if match else ""


def parameter_names(value: Any) -> list[str]:
    if isinstance(value, type) and issubclass(value, Warning):
        return []
    return [name for name in inspect.signature(value).parameters if not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    """A sentence, every parameter, what is returned, and an example."""
    value = getattr(cv, name)
    doc = inspect.getdoc(value) or ""
    assert re.match(r"[A-Z0-9].*[.:]$", doc.split("\n")[0]), "a first line that is a sentence"
    described = section(doc, "Args", "Attributes")
    assert described or not parameter_names(value), "what it takes or holds"
    assert ">>>" in section(doc, "Example"), "an example that runs"
    if isinstance(value, type):
        return
    assert section(doc, "Returns"), "what is returned"
    for parameter in parameter_names(value):
        assert re.search(rf"^ +(?:[\w*]+, )*\**{parameter}(?:, [\w*]+)*:", described, re.MULTILINE), parameter


@pytest.mark.parametrize("name", NAMES)
def test_public_parameters_have_types(name: str) -> None:
    value = getattr(cv, name)
    if isinstance(value, type):
        return
    signature = inspect.signature(value)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.fixture
def restored_registries() -> Iterator[None]:
    """Forget the methods and metrics that examples register."""
    with methods.METHODS.restored(), metrics.METRICS.restored():
        yield


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """Load "pets" once for all examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coerce, "load", functools.cache(cv.load))
        yield


@pytest.mark.usefixtures("loaded_once", "restored_registries")
@pytest.mark.parametrize("name", ["clairvit", *NAMES])
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value = cv if name == "clairvit" else getattr(cv, name)
    module = sys.modules[getattr(value, "__module__", "clairvit")]
    tests = doctest.DocTestFinder(recurse=value is not cv).find(value, name, module=False, globs=dict(vars(module)))
    assert any(test.examples for test in tests)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    lines: list[str] = []
    for test in tests:
        with warnings.catch_warnings():
            runner.run(test, out=lines.append)
    pyplot.close("all")
    assert runner.failures == 0, "".join(lines)
