"""A study file means the same from Python and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import clairvit as cv
from clairvit.bench import METHODS, METRICS
from clairvit.bench.config import DataConfig, ModelConfig, StudyConfig
from clairvit.bench.plan import Shard
from clairvit.bench.store import Store
from clairvit.bench.study_file import study_of
from clairvit.cli import main
from helpers.small_study import ARCHITECTURE, photos, weights

SMALL = f"""
models = [{{spec = "file:tiny.safetensors", arch = "timm:{ARCHITECTURE}"}}]
data = "folder:photos"
methods = "legrad,raw-attention"
metrics = ["sparseness"]
limit = 3
"""


@pytest.fixture
def study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "tiny.safetensors")
    photos(tmp_path / "photos", 6)
    (tmp_path / "study.toml").write_text(SMALL)
    return tmp_path / "study.toml"


def test_a_study_computed_in_python_is_done_for_the_command_line(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = cv.run_study(cv.Study.from_toml(study_file), "store")
    assert outcome.failed == ()
    assert outcome.computed == 1
    assert main(["bench", str(study_file), "--out", "store", "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["cells"], plan["done"]) == (12, 12), "3 images × 2 methods and 2 baselines × 1 metric"


def test_a_report_is_files(study_file: Path) -> None:
    store = Store.open("store")
    cv.run_study(cv.Study.from_toml(study_file), store)
    files = cv.report(store, "pages/", formats=["html", "csv"], gallery=False)
    assert files[0] == Path("pages/report.html")
    assert all(file.is_file() for file in files)
    assert any(file.name == "report-ranking.csv" for file in files)
    with pytest.raises(cv.errors.BadInput, match=r"'r\.pdf' ends in '\.pdf'"):
        cv.report("store", "r.pdf")
    with pytest.raises(cv.errors.BadInput, match="There is no store in 'nowhere'"):
        cv.report("nowhere")


def test_a_report_of_a_part_warns(study_file: Path) -> None:
    study = replace(cv.Study.from_toml(study_file), at_once=1)
    shards = [Shard(number, 2) for number in range(2)]
    parts = [cv.run_study(study, f"part-{shard.index}", shard=shard) for shard in shards]
    assert sum(outcome.computed for outcome in parts) == 3
    smaller = min(range(2), key=lambda number: parts[number].computed)
    with pytest.warns(cv.ClairWarning, match="complete"):
        cv.report(f"part-{smaller}", "part.md", gallery=False)


def test_what_a_study_names_not_is_the_default_of_the_command_line() -> None:
    study = study_of(StudyConfig(data=(DataConfig("scenes:2"),)))
    assert (study.methods, study.metrics) == (METHODS, METRICS)
    assert study.models == (ModelConfig("pets"),)
    with pytest.raises(cv.errors.BadInput, match=r"Which images\? Expected data = … in the file"):
        study_of(StudyConfig())
    with pytest.raises(cv.errors.BadInput, match=r"methods = \[\] in the file names nothing"):
        study_of(StudyConfig(data=study.data, methods=()))


def test_options_beside_the_file_win_also_where_they_are_zero() -> None:
    config = StudyConfig(data=(DataConfig("scenes:9", limit=5),), methods=("rollout",), seed=7, maps="abs")
    study = study_of(config, StudyConfig(seed=0, limit=2, metrics=("sparseness",)))
    assert (study.seed, study.data[0].limit, study.methods, study.maps) == (0, 2, ("rollout",), "abs")
    assert study.metrics == ("sparseness",)


def test_own_methods_of_a_file_are_imported(study_file: Path) -> None:
    study_file.write_text(f'import = ["nowhere.py"]\n{SMALL}')
    with pytest.raises(cv.errors.BadInput, match=r"nowhere\.py"):
        cv.Study.from_toml(study_file)
