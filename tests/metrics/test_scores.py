"""Score and Scores as values: typed overloads, tables, plots, pandas, and images that cannot be read."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest

import clairvit as cv
from clairvit.errors import BadInput, ClairError, ClairWarning
from helpers.tiny_models import pixels, wrapped

KIND = "timm-vit"


@pytest.fixture(scope="module")
def scores() -> cv.Scores:
    return cv.evaluate(wrapped(KIND), pixels(KIND, 2), ["genatt", "rollout"], ["deletion", "sparseness"], target=3)


def test_one_of_each_is_a_score_and_lists_are_scores() -> None:
    model, images = wrapped(KIND), pixels(KIND)
    assert isinstance(cv.evaluate(model, images, "rollout", "sparseness"), cv.Score)
    assert isinstance(
        cv.evaluate(model, images, cv.explain(model, images, "rollout"), "sparseness", target=1), cv.Score
    )
    for methods, metrics in ((["rollout"], "sparseness"), ("rollout", ["sparseness"]), (("rollout",), ("sparseness",))):
        assert isinstance(cv.evaluate(model, images, methods, metrics), cv.Scores)  # type: ignore[call-overload]
    returned = [typing.get_type_hints(overload)["return"] for overload in typing.get_overloads(cv.evaluate)]
    assert returned == [cv.Score, cv.Scores, cv.Scores]


def test_a_notebook_shows_a_table(scores: cv.Scores) -> None:
    page = scores._repr_html_()
    assert page.startswith("<table>")
    assert page.count("<tr>") == 3
    assert page.count("<b>") == 2, "the best of each metric"
    assert "deletion ↓" in page
    assert scores["genatt", "deletion"]._repr_html_().count("<td") == 1
    assert repr(scores) == "Scores(2 methods × 2 metrics, 2 images)"
    score = scores["genatt", "deletion"]
    expected = f"Score(deletion of genatt: {score.mean:.4g}; random {score.baselines['random'].mean:.4g}, n = 2)"
    assert repr(score) == expected, "two images have no interval"


def test_scores_are_drawn(scores: cv.Scores) -> None:
    panels = scores.plot()
    assert [panel.get_title() for panel in panels] == ["deletion ↓", "sparseness ↑"]
    assert [len(panel.patches) for panel in panels] == [2, 2]
    _, axes = plt.subplots(1, 2)
    assert list(scores.plot(axes)) == list(axes)
    with pytest.raises(BadInput, match="1 axes were given for 2 metrics"):
        scores.plot(axes[0])
    with pytest.raises(BadInput, match="There are no scores to draw"):
        cv.Scores().plot()
    plt.close("all")


@pytest.mark.parametrize("metric", ["deletion", "sparseness"])
def test_a_score_is_drawn_on_given_axes(scores: cv.Scores, metric: str) -> None:
    figure, axes = plt.subplots()
    assert scores["genatt", metric].plot(axes) is axes
    assert axes.lines
    plt.close(figure)


def test_pandas_is_optional(scores: cv.Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for value in (scores, scores["genatt", "deletion"]):
        with pytest.raises(ClairError, match=r"needs the package pandas.*pip install pandas"):
            value.to_pandas()


def test_what_pandas_is_given(scores: cv.Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for pandas, so that the test needs none."""

    def frame(rows: list[Any], columns: list[str]) -> Any:
        return rows, columns

    def series(values: Any, index: list[str], name: str) -> Any:
        return values.tolist(), index, name

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame, Series=series))
    rows, columns = scores.to_pandas()
    assert columns == ["method", "metric", "image", "value", "better"]
    assert len(rows) == 2 * 2 * 2
    score = scores["rollout", "sparseness"]
    assert ("rollout", "sparseness", "image 1", score.values[0].item(), "higher") in rows
    assert score.to_pandas() == (score.values.tolist(), ["image 1", "image 2"], "rollout sparseness")


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    images, names = [str(broken), "demo"], []
    model = cv.load("pets")
    with pytest.raises(BadInput, match="is not an image"):
        cv.evaluate(model, images, "rollout", "sparseness")
    with pytest.warns(ClairWarning, match=r"broken\.png is left out: .* is not an image"):
        skipped = cv.evaluate(model, images, "rollout", "sparseness", on_error="skip")
    reported_scores = cv.evaluate(
        model, images, "rollout", "sparseness", on_error=lambda name, error: names.append(name)
    )
    assert skipped.names == reported_scores.names == ("demo",)
    assert names == [str(broken)]
    with pytest.raises(BadInput, match="on_error='ignore' was given; expected 'raise', 'skip' or a function"):
        cv.evaluate(model, images, "rollout", "sparseness", on_error="ignore")  # type: ignore[call-overload]
