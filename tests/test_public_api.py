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
MODULES = ("aggregation", "ensembles", "errors", "extend", "models", "recorders", "results", "rules", "targets")
FLAT = [name for name in cv.__all__ if name not in ("__version__", *MODULES)]
# The names of 0.2, all flat.
OF_0_2 = (
    *("BadInput", "CaptureError", "Check", "CheckResult", "ClairError", "ClairWarning", "Comparison", "Contrast"),
    *("Cost", "Curve", "Diagnosis", "Direction", "EvalContext", "Explanation", "Heads", "LayerView", "Layout"),
    *("MapCheck", "MapResult", "MethodSpec", "MetricOutput", "MetricSpec", "Model", "ModelUnavailable", "Neuron"),
    *("NextToken", "NotApplicable", "Output", "PatchFeatures", "PatchSweep", "PatchedScores", "Preprocess", "Query"),
    *("Recipe", "Recommendation", "Recorder", "Region", "RemovalEffect", "Requires", "ResidualSums", "Score"),
    *("Scores", "Selection", "Similar", "Similarity", "Site", "Target", "TargetBatch", "Text", "TextEncoder"),
    *("TextRelevance", "Trace", "UnknownName", "WrongType", "calibrate", "check_maps", "choose", "cite", "compare"),
    *("concat", "doctor", "ensemble", "evaluate", "explain", "features", "generate", "list_methods", "list_metrics"),
    *("list_models", "load", "logit_lens", "method", "metric", "parse_method", "parse_metric", "patch", "patch_sweep"),
    *("recommended_methods", "shift", "similar", "smooth", "trace", "wrap"),
)
# Flat or, as "results.Check", in a module; what a module has beyond them has no example of its own.
NAMES = [
    *FLAT,
    *(name for name in cv._RENAMED.values() if name not in cv.__all__ and name != "Explanation.concat"),
    *(f"{module}.{name}" for module in ("models", "targets") for name in getattr(cv, module).__all__),
]
NAMES = sorted({*NAMES} - {f"{module}.{name}" for module in MODULES for name in FLAT} - {"targets.ScoreContext"})


def public(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), cv)


def test_the_flat_names_are_few() -> None:
    """49 of them, and the verbs certify, reference, expect and mistakes, which the issues ask for by these names."""
    assert len(FLAT) <= 53
    assert {*MODULES} < {*cv.__all__}
    assert all(isinstance(getattr(cv, module), ModuleType) for module in MODULES)
    assert dir(cv) == sorted(cv.__all__)
    with pytest.raises(AttributeError, match="module 'clairvit' has no attribute 'explian'"):
        cv.explian  # noqa: B018


def test_every_name_of_0_2_is_there_or_says_where_it_is() -> None:
    assert len(OF_0_2) == 83
    assert {name for name in OF_0_2 if name not in FLAT} == {*cv._RENAMED}
    changes = (SOURCE.parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    for old, new in cv._RENAMED.items():
        sentence = f"cv.{old} is called cv.{new} since 0.3."
        assert not hasattr(cv, old)
        assert callable(public(new))
        with pytest.raises(AttributeError, match=f"^{re.escape(sentence)}$"):
            getattr(cv, old)
        with pytest.raises(ImportError, match=f"^{re.escape(sentence)}$"):
            exec(f"from clairvit import {old}")
        assert re.search(rf"^\| `cv\.{old}` \| `cv\.{re.escape(new)}` \|$", changes, re.MULTILINE), old
    with pytest.raises(ImportError, match="cannot import name 'explian'"):
        exec("from clairvit import explian")


def stub_imports(stub: Path) -> dict[str, str]:
    """Return name -> module of what type checkers see in a package."""
    package = ".".join(stub.relative_to(SOURCE.parent).parent.parts)
    nodes = [node for node in ast.parse(stub.read_text(encoding="ascii")).body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in nodes for alias in node.names), "an explicit re-export"
    return {alias.name: f"{package}.{node.module}" for node in nodes if node.module for alias in node.names}


@pytest.mark.parametrize("package", ["", "models", "targets"])
def test_a_public_name_is_defined_where_the_stub_says(package: str) -> None:
    modules = stub_imports(SOURCE / package / "__init__.pyi")
    namespace = public(package) if package else cv
    assert {*modules} | {*MODULES, "Direction", "Neuron"} >= {*namespace.__all__} >= {*modules}
    assert dir(namespace) == sorted(namespace.__all__)
    for name, module in modules.items():
        value = getattr(namespace, name)
        if name != "__version__":
            assert (value.__name__, value.__module__) == (name, module)


def test_a_name_in_two_modules_is_one_object() -> None:
    by_name: dict[str, set[int]] = {}
    for namespace in (cv, *(getattr(cv, module) for module in MODULES)):
        for name in namespace.__all__:
            by_name.setdefault(name, set()).add(id(getattr(namespace, name)))
    assert [name for name, objects in by_name.items() if len(objects) > 1] == []


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
    value = public(name)
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
    value = public(name)
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
    value = cv if name == "clairvit" else public(name)
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
