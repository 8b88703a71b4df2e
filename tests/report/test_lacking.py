"""Reports of stores that lack results, images, methods or masks: each has a page that says what is not there."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from clairvit.bench.plan import Study
from clairvit.bench.store import Store
from clairvit.reports.build import ReportOptions, build_report
from clairvit.reports.render import to_html, to_markdown
from helpers.small_report import (
    NAMES,
    Reader,
    run,
    study_of,
    unreadable,
    worker_of,
)


def only(path: Path, study: Study | None = None) -> Reader:
    store = Store.open(path)
    if study is not None:
        store.add_study(study)
    return Reader(to_html(build_report(store)))


def test_an_empty_store_has_a_page(tmp_path: Path) -> None:
    reader = only(tmp_path / "run")
    assert "The store is empty" in reader.section("What was run")
    assert [text for _, text in reader.all("h2")] == ["What was run", "Environment"]
    assert to_markdown(build_report(Store.open(tmp_path / "run"))).startswith("# ")


def test_a_study_without_results_lists_its_settings(tmp_path: Path) -> None:
    section = only(tmp_path / "run", study_of()).section("What was run")
    assert "Nothing has been finished yet" in section
    assert "legrad, rollout" in section


def test_a_store_without_an_image_that_can_be_read(tmp_path: Path) -> None:
    images = unreadable(("x.png", "<i>.png"))
    reader = Reader(to_html(build_report(run(tmp_path / "run", images=images), ReportOptions(open_worker=worker_of))))
    assert "None of the images could be scored" in reader.section("Ranking")
    assert "<i>.png could not be read: <i>.png is no image." in reader.section("Warnings")


def test_one_method(tmp_path: Path) -> None:
    reader = Reader(
        to_html(build_report(run(tmp_path / "run", study_of(("legrad",))), ReportOptions(open_worker=worker_of)))
    )
    assert "legrad is the only method that was scored." in reader.section("Ranking")
    assert "compares two methods or more" in reader.section("Radar")
    assert "over three methods or more" in reader.section("Agreement between metrics")
    assert any("var(--s0)" in attributes["style"] for attributes, _ in reader.all("path"))


def test_one_metric(tmp_path: Path) -> None:
    store = run(tmp_path / "run", study_of(metrics=("sparseness",)))
    reader = Reader(to_html(build_report(store, ReportOptions(open_worker=worker_of))))
    assert "by sparseness" in reader.section("Ranking")
    assert "needs three metrics or more; 1 has scores here" in reader.section("Radar")
    assert "read off a curve" in reader.section("Curves")


def test_only_baselines(tmp_path: Path) -> None:
    reader = Reader(
        to_html(build_report(run(tmp_path / "run", study_of(("random",))), ReportOptions(open_worker=worker_of)))
    )
    assert "No method but the baselines was scored" in reader.section("Ranking")
    assert "random" in reader.section("Cost")


def test_a_metric_without_masks_is_a_failed_unit_and_the_page_says_so(tmp_path: Path) -> None:
    store = run(tmp_path / "run", study_of(metrics=("iou",)))
    assert store.failures()
    document = build_report(store, ReportOptions(open_worker=worker_of))
    section = Reader(to_html(document)).section("Environment")
    assert "failed:" in section
    assert "mask" in section
    assert "6 images" in section
    assert "iou" in section
    assert [record["kind"] for record in document.tables()["warnings"]] == ["failed"]


def test_methods_that_do_not_fit_and_constant_maps_are_warned_of(tmp_path: Path) -> None:
    from dataclasses import replace

    from clairvit.reports.study_results import read_store
    from clairvit.reports.study_warnings import study_warnings

    (results,) = read_store(run(tmp_path / "run", study_of(("legrad",)))).results
    score = results.scores["legrad", "deletion"]
    values = score.values.clone()
    values[:2] = math.nan
    flat = torch.tensor([True] + [False] * 5)
    results.scores["legrad", "deletion"] = replace(score, values=values, degenerate=flat, notes=("A note.",))
    results.scores["legrad", "insertion"] = replace(
        results.scores["legrad", "insertion"], values=values[:4], names=NAMES[:4]
    )
    grids = replace(score, metric="grid-pointing-game", values=values)
    results.scores["legrad", "grid-pointing-game"] = grids
    results = replace(results, metrics=(*results.metrics, "grid-pointing-game"))
    results.scores.skipped = {"tam": "It needs more layers."}
    warnings = {(warning.kind, warning.subject): warning.text for warning in study_warnings(results)}
    assert warnings["undefined", "deletion"] == "undefined for 2 images of 6, of legrad"
    assert "(images that are in no grid, because" in warnings["undefined", "grid-pointing-game"]
    assert warnings["incomplete", "random"] == "not scored by grid-pointing-game"
    assert warnings["incomplete", "insertion"] == "not computed yet for 2 images of 6, of legrad"
    assert warnings["note", "deletion"] == "A note."
    assert warnings["skipped", "tam"] == "does not fit the model: It needs more layers."
    assert warnings["degenerate", "legrad"].startswith("1 image of 6")


def test_warnings_cut_folders_off_images_and_nothing_off_metrics_and_methods(tmp_path: Path) -> None:
    from dataclasses import replace

    from clairvit.reports.blocks import Items
    from clairvit.reports.study_results import read_store
    from clairvit.reports.study_warnings import warnings_section

    (results,) = read_store(run(tmp_path / "run", study_of(("legrad",)))).results
    results.scores.skipped = {"tam": "It needs more layers."}
    score = results.scores["legrad", "deletion"]
    results.scores["legrad", "deletion"] = replace(score, notes=("A note.",))
    marks = {f"photos/all/{name}.png": ("0",) for name in "ab"}
    section = warnings_section(replace(results, image_hashes=marks, unreadable={"photos/all/a.png": "It is torn."}))
    (items,) = section.blocks
    assert isinstance(items, Items)
    assert [item.term for item in items.items] == ["a.png", "tam", "deletion"]


def test_broken_parts_and_several_versions_are_warned_of(tmp_path: Path) -> None:
    store = run(tmp_path / "run", study_of(("legrad",), ("sparseness",)))
    (store.path / "broken").mkdir()
    (store.path / "broken" / "0123456789.parquet").write_bytes(b"half")
    section = Reader(to_html(build_report(store, ReportOptions(gallery=False)))).section("Environment")
    assert "Part 01234567 could not be read" in section


def test_two_settings_of_one_model_have_two_sections(tmp_path: Path) -> None:
    from dataclasses import replace

    study = study_of(("legrad",), ("sparseness",))
    store = run(tmp_path / "run", study)
    run(tmp_path / "run", replace(study, seed=1))
    heads = [text for _, text in Reader(to_html(build_report(store, ReportOptions(gallery=False)))).all("h2")]
    assert sum("seed=0" in head for head in heads) == sum("seed=1" in head for head in heads) == 1
