"""A study from beginning to end, offline: scenes whose evidence is known, a store, what it says, a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clairvit.bench.results import combinations, read_scores
from clairvit.bench.store import Store
from clairvit.cli import main

Captured = pytest.CaptureFixture[str]
ARGUMENTS = (
    *("bench", "--model", "scenes", "--data", "scenes:12", "--split", "part", "--target", "label", "--out", "store"),
    *("--method", "genatt,rollout", "--metric", "pointing-game(tolerance=0),deletion(steps=3)", "--json"),
)


def test_a_study_of_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Gradient attention points at the badge that decides the class, a random map hardly ever does."""
    monkeypatch.chdir(tmp_path)
    assert main(list(ARGUMENTS)) == 0
    first = json.loads(capsys.readouterr().out)
    store = Store.open("store", create=False)
    ((_, weights, data, settings),) = combinations(store)
    scores = read_scores(store, weights, data, settings)
    assert {method for method, _ in scores} == {"genatt", "rollout", "random", "center"}
    (pointing,) = {metric for _, metric in scores if metric.startswith("pointing-game")}
    assert scores["genatt", pointing].mean > 0.8
    assert scores["random", pointing].mean < 0.3
    assert sum(prediction.predicted == prediction.label for prediction in scores.predictions) >= 11
    values = {key: score.values.tolist() for key, score in scores.items()}

    parts = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "store" / "parts").iterdir()}
    assert main(list(ARGUMENTS)) == 0
    again = json.loads(capsys.readouterr().out)
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "store" / "parts").iterdir()} == parts
    assert first.keys() == again.keys()
    assert {key: score.values.tolist() for key, score in read_scores(store, weights, data, settings).items()} == values

    assert main(["report", "store", "--out", "report.html", "--quiet"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "genatt" in page
    assert "scenes" in page
    assert 'src="http' not in page
