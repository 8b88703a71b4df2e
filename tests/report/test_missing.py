"""The report of a study that was interrupted says what is missing, at the top, in the warnings and for machines."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clairvit.bench.executors import in_process
from clairvit.bench.plan import DataConfig, ModelConfig, Study
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.cli import main
from clairvit.reports.build import ReportOptions, build_report
from clairvit.reports.render import to_csv, to_html, to_markdown
from helpers.small_report import MODEL, Reader, dataset, study_of, worker_of

METHODS, METRICS = ("legrad", "rollout"), ("sparseness", "deletion")
NAMES = tuple(f"{place}.png" for place in range(6))


class Killed(Exception):
    """Stands for a process that is killed."""


def interrupted(path: Path, units: int, study: Study, worker: Worker) -> Store:
    """Return the store of a study that was killed after so many units."""

    def engine(study: Study, given: object, worker: Worker) -> Iterator[object]:
        for place, result in enumerate(in_process(study, given, worker)):  # type: ignore[arg-type]
            if place == units:
                raise Killed
            yield result

    store = Store.open(path)
    with pytest.raises(Killed):
        run_study(study, store, engine, worker)  # type: ignore[arg-type]
    return store


@pytest.fixture
def half(tmp_path: Path) -> tuple[Store, Study, Worker]:
    """Two data sets of six images, two images a unit: one unit of six is done, so 2 of 6 images of the first."""
    study = replace(study_of(METHODS, METRICS), data=(DataConfig("folder:one"), DataConfig("folder:two")), at_once=2)
    albums = {0: dataset(NAMES), 1: dataset(NAMES, seed=2)}
    worker = Worker(study, models={0: MODEL}, datasets=albums)
    return interrupted(tmp_path / "run", 1, study, worker), study, worker


def test_what_is_missing_stands_at_the_top_and_in_the_warnings(half: tuple[Store, Study, Worker]) -> None:
    store, _, worker = half
    document = build_report(store, ReportOptions(open_worker=lambda study: worker))
    page = to_html(document)
    first = (
        "tiny on folder:one: 2 of 6 images are complete, 16 of 48 scores. Not computed: sparseness, deletion of every "
        "method on 4 images."
    )
    second = "tiny on folder:two: nothing is computed (0 of 6 images)."
    assert document.warnings[0].startswith("This study is not complete")
    assert document.warnings[1:] == (first, second)
    top = page[: page.index("<main>")]
    assert first in top
    assert second in top
    reader = Reader(page)
    assert first in reader.section("Warnings")
    assert "None." not in reader.section("Warnings")
    assert "2 of 6" in reader.section("What was run")
    assert "0 of 48" in reader.section("What was run")


def test_markdown_csv_and_json_say_it_too(
    half: tuple[Store, Study, Worker], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, _, _ = half
    document = build_report(store, ReportOptions(gallery=False))
    text = to_markdown(document)
    assert text.index("This study is not complete") < text.index("## What was run")
    assert "2 of 6 images are complete" in text
    records = list(csv.DictReader(io.StringIO(to_csv(document.tables()["missing"]))))
    assert [(record["data"], record["metric"], record["images_missing"]) for record in records] == [
        ("folder:one", "sparseness", "4"),
        ("folder:one", "deletion", "4"),
        ("folder:two", "sparseness", "6"),
        ("folder:two", "deletion", "6"),
    ]
    out = str(tmp_path / "mid.html")
    assert main(["report", str(store.path), "--no-gallery", "--out", out, "--json"]) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert content["warnings"] == list(document.warnings)
    assert len(content["tables"]["missing"]) == 4
    assert "clairvit: warning: This study is not complete" in printed.err
    assert "nothing is computed (0 of 6 images)" in printed.err
    assert main(["report", str(store.path), "--no-gallery", "--out", out, "-q"]) == 0
    assert "This study is not complete" in capsys.readouterr().err, "also where nothing else is printed"


def test_a_study_that_went_on_has_nothing_missing(half: tuple[Store, Study, Worker]) -> None:
    store, study, worker = half
    run_study(study, store, worker=worker)
    document = build_report(store, ReportOptions(gallery=False))
    assert document.warnings == ()
    assert "missing" not in document.tables()
    assert 'class="warning"' not in to_html(document)
    assert set(re.findall(r"^> .*", to_markdown(document), re.MULTILINE)) == set()


def test_a_second_model_that_was_never_reached(tmp_path: Path) -> None:
    study = replace(study_of(METHODS, METRICS), models=(ModelConfig("tiny"), ModelConfig("other")))
    worker = Worker(study, models={0: MODEL, 1: MODEL}, datasets={0: dataset(NAMES)}, hashes={1: "other weights"})
    store = interrupted(tmp_path / "run", 1, study, worker)
    warnings = build_report(store, ReportOptions(gallery=False)).warnings
    assert warnings[1:] == ("other on folder:photos: nothing is computed (0 of 6 images).",)


def test_methods_that_were_added_later_are_named(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run")
    run_study(study_of(METHODS, METRICS), store, worker=worker_of(study_of(METHODS, METRICS)))
    more = study_of((*METHODS, "genatt"), METRICS)
    interrupted(tmp_path / "run", 0, more, worker_of(more))
    _, sentence = build_report(store, ReportOptions(gallery=False)).warnings
    assert sentence == (
        "tiny on folder:photos: 0 of 6 images are complete, 48 of 60 scores. Not computed: sparseness, deletion of "
        "genatt on 6 images."
    )


def test_a_study_without_a_plan_is_named(tmp_path: Path) -> None:
    """A store of an older version: what was planned is not known."""
    study = study_of(METHODS, METRICS)
    store = Store.open(tmp_path / "run")
    run_study(study, store, worker=worker_of(study))
    for file in (store.path / "plans").iterdir():
        file.unlink()
    (warning,) = build_report(store, ReportOptions(gallery=False)).warnings
    assert warning.startswith("1 study has no plan in the store")


def test_the_cost_is_of_the_patches_that_the_model_has(half: tuple[Store, Study, Worker]) -> None:
    """NEWCOMER B9: '196 patches' for a model of 256."""
    page = to_html(build_report(half[0], ReportOptions(gallery=False)))
    assert "for an image of 16 patches." in page, "32 pixels in patches of 8"
    assert "196" not in Reader(page).section("Cost")
