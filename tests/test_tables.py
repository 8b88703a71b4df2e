"""Every result with rows is a document (.json), a table (.csv, pandas) and says so in one style."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

import clairvit as cv
from clairvit._tables import Tabular
from clairvit.errors import BadInput, ClairError
from clairvit.methods.compare_models import ModelComparison
from clairvit.methods.explanation import Heads, TextRelevance
from clairvit.methods.recipe import Recipe
from clairvit.metrics.score import Curve
from clairvit.selection.start_layer import StartLayer
from helpers.tiny_models import pixels, wrapped
from plotting.fakes import fake
from test_rows import (
    certified_patches,
    checks,
    expectation,
    mistakes,
    patch_features,
    score,
    score_with_baselines,
    sweep,
)

LAYERS, HEADS, CLASSES, IMAGES = 3, 2, 5, 2


def comparison() -> cv.Comparison:
    many = cv.Comparison()
    many.update({"legrad": fake(IMAGES), "genatt": fake(IMAGES, method="genatt")})
    return many


def scores() -> cv.Scores:
    several = cv.Scores()
    several["legrad", "deletion"] = several["genatt", "deletion"] = score()
    return several


def intervention() -> cv.results.InterventionScores:
    values = torch.arange(10.0).reshape(IMAGES, CLASSES)
    names = tuple(f"image {row + 1}" for row in range(IMAGES))
    return cv.results.InterventionScores(values, values + 1, (cv.Site(layer=1),), names, wrapped("timm-vit"))


def start_layer() -> StartLayer:
    methods = tuple(f"genatt+from:{start}" for start in range(LAYERS))
    interval = (0.0, 1.0)
    values = np.zeros((LAYERS, 4))
    return StartLayer(
        "genatt", "deletion", methods, (0.1, math.nan, 0.3), (interval,) * LAYERS, 2, 2, 0.0, interval, 1, values
    )


def selection() -> cv.Selection:
    model, images = wrapped("timm-vit"), pixels("timm-vit", batch=4)
    return cv.choose(model, images, ["saliency", "rollout"], ["sparseness", "complexity"], target=[1, 2, 3, 4])


def diagnosis() -> cv.results.Diagnosis:
    checks = (
        cv.results.Check("determinism", "pass", "Two runs agree."),
        cv.results.Check("pooling", "warn", "Two.", "", {"p": math.nan}),
    )
    return cv.results.Diagnosis("pets", ("demo",), checks)


def certificate() -> cv.results.Certificate:
    names = tuple(f"{row}.jpg" for row in range(5))
    return cv.results.Certificate(
        "keep", "legrad", 0.8, names, (1, 4, None, 2, 1), (1, 2, 4, 16), (4, 4), (64, 64), "pets", "abc"
    )


# A result -> how to make it, and the number of rows of its table.
RESULTS: dict[type[Tabular], tuple[Callable[[], Any], int]] = {
    cv.Explanation: (lambda: fake(IMAGES, layers=2), IMAGES),
    cv.Comparison: (comparison, 2 * IMAGES),
    ModelComparison: (lambda: ModelComparison({"a": comparison(), "b": comparison()}), 2 * 2 * IMAGES),
    cv.results.ImageMatch: (lambda: cv.results.ImageMatch(fake(2), 0.5), 2),
    cv.results.CheckResult: (checks, 4),
    cv.results.PatchFeatures: (patch_features, 4 * 2 * 2),
    cv.results.InterventionSweep: (sweep, 4 * LAYERS * HEADS),
    cv.results.InterventionScores: (intervention, IMAGES * CLASSES),
    cv.Score: (score_with_baselines, 4),
    cv.Scores: (scores, 2 * 4),
    cv.Selection: (selection, 4),  # with the two baselines
    StartLayer: (start_layer, LAYERS),
    cv.results.Diagnosis: (diagnosis, 2),
    Curve: (lambda: score().curve, 4 * 3),
    Heads: (lambda: Heads("genatt", torch.rand(2, 3, 1, 4, 4), torch.rand(2, 3, 1, 4, 4)), 2 * (3 + 3)),
    TextRelevance: (lambda: TextRelevance(("a", " cat"), torch.tensor([0.5, math.nan])), 2),
    Recipe: (lambda: selection().recipe, 4),
    cv.results.Certificate: (certificate, 5),
    cv.results.CertifiedPatches: (lambda: certified_patches(IMAGES), IMAGES),
    cv.results.Expectation: (lambda: expectation(against=True), 4),
    cv.results.Mistakes: (mistakes, 4),
}
NAMES = {result.__name__: result for result in RESULTS}


def subclasses(cls: type) -> Iterator[type]:
    for derived in cls.__subclasses__():
        yield derived
        yield from subclasses(derived)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[Any, int]:
    make, rows = RESULTS[NAMES[request.param]]
    return make(), rows


def test_every_result_with_rows_is_tested() -> None:
    assert {cls for cls in subclasses(Tabular) if cls.__module__.startswith("clairvit.")} == set(RESULTS)


def test_every_verb_returns_a_result_with_rows_or_no_result() -> None:
    """What is no result: models, traces, specs, texts, tensors, and what `run_study` wrote into a store."""
    others = {
        "Model",
        "Trace",
        "MethodSpec",
        "MetricSpec",
        "Recommendation",
        "NextToken",
        "Outcome",
        "Reference",
        "Tensor",
    }
    verbs = [value for name in cv.__all__ if isinstance(value := getattr(cv, name), FunctionType)]
    assert len(verbs) > 20
    for verb in verbs:
        hint = get_type_hints(verb, localns={"Recipe": Recipe, "ModelComparison": ModelComparison})["return"]
        kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and not get_args(kind)]
        ours = {kind for kind in kinds if kind.__module__.startswith(("clairvit.", "torch"))}
        assert {kind.__name__ for kind in ours if not issubclass(kind, Tabular)} <= others, verb.__name__


def test_the_document_is_json(case: tuple[Any, int], tmp_path: Path) -> None:
    result, _ = case
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    if not isinstance(result, cv.Selection):  # its .json is the recipe
        written = json.loads(result.save(tmp_path / "result.json").read_text())
        assert written == content
        assert list(written) == list(content)


def frame_of(result: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[str] | None]:
    """Return what pandas gets, by a stand-in that needs no pandas: rows and columns, or the values of a series."""
    stand_in = SimpleNamespace(
        DataFrame=lambda rows, columns: (rows, columns), Series=lambda values, **_: (values.tolist(), None)
    )
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pandas", stand_in)
        return result.to_pandas()  # type: ignore[no-any-return]


def test_the_table_has_a_line_per_row(case: tuple[Any, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, count = case
    with result.save(tmp_path / "result.csv").open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert len(lines) == count
    assert len(set(header)) == len(header)
    rows, columns = frame_of(result, monkeypatch)
    if columns is None:  # a single score is a series
        rows, columns = [(value,) for value in rows], ["value"]
        lines = [[line[header.index("value")]] for line in lines]
    else:
        assert columns == header
    for line, row in zip(lines, rows, strict=True):
        for cell, value in zip(line, row, strict=True):
            assert value is None or isinstance(value, str | int | float)
            if isinstance(value, float):
                assert float(cell or "nan") == value or (cell == "" and not math.isfinite(value))
            else:
                assert cell == ("" if value is None else str(value))


def test_pandas_is_named_where_it_is_missing(case: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ClairError, match=r"needs the package pandas.*pip install pandas"):
        case[0].to_pandas()


def test_other_suffixes_are_refused(case: tuple[Any, int], tmp_path: Path) -> None:
    result, _ = case
    with pytest.raises(BadInput, match=r"result\.exe"):
        result.save(tmp_path / "result.exe")
    assert not list(tmp_path.iterdir())


def test_a_checked_explanation_has_its_verdict_in_the_table(tmp_path: Path) -> None:
    model = wrapped("timm-vit")
    explanation = cv.explain(model, pixels("timm-vit", batch=2), "genatt", target=[1, 2]).with_check()
    assert explanation.checked is not None
    with explanation.save(tmp_path / "map.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["verdict"] for row in rows] == [verdict or "" for verdict in explanation.checked.verdicts]
    assert [row["answer"] for row in rows] == [check.answer.status for check in explanation.checked]


def test_checks_are_read_back_from_their_document() -> None:
    model = wrapped("timm-vit")
    result = cv.explain(model, pixels("timm-vit", batch=2), "genatt", target=[1, 2]).check()
    read = cv.results.CheckResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert (read.checks, read.cost, read.seed, read.notes) == (result.checks, result.cost, result.seed, result.notes)


def test_a_table_of_no_rows_is_an_empty_file(tmp_path: Path) -> None:
    assert cv.Scores().save(tmp_path / "none.csv").read_text().strip() == ""
