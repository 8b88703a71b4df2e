"""Reports: a page that stands alone, whose numbers are the store's and whose text can do no harm.

Studies here are real ones on a tiny model; file names are chosen to break out of HTML and Markdown."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clairvit.bench.plan import DataConfig, ModelConfig, Study
from clairvit.bench.results import combinations, read_scores
from clairvit.bench.store import Store
from clairvit.bench.worker import Worker
from clairvit.errors import BadInput
from clairvit.plotting.labels import decimals_for, format_number
from clairvit.reports.blocks import Document
from clairvit.reports.build import ReportOptions, build_report
from clairvit.reports.gallery import select_examples
from clairvit.reports.render import to_csv, to_html, to_markdown
from clairvit.reports.sections import _MetricColumn
from clairvit.reports.study_results import parse_study
from helpers.fixed_scores import fixed_score
from helpers.rounding import assert_same
from helpers.small_report import (
    METHODS,
    METRICS,
    MODEL,
    NAMES,
    NASTY,
    Reader,
    dataset,
    run,
    study_of,
    worker_of,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def document(store: Store) -> Document:
    return build_report(store, ReportOptions(open_worker=worker_of))


@pytest.fixture(scope="module")
def page(document: Document) -> Reader:
    return Reader(to_html(document))


def test_headings_are_in_order_and_every_link_leads_to_one(page: Reader) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    anchors = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(anchors)) == len(anchors)
    links = [attributes["href"] for attributes, _ in page.all("a")]
    assert len(links) == 4
    assert {link.lstrip("#") for link in links} <= set(anchors)


def test_the_page_has_every_section(page: Reader) -> None:
    heads = [text for tag in ("h2", "h3") for _, text in page.all(tag)]
    expected = ["Ranking", "Radar", "Curves", "Examples", "Classes", "Agreement between metrics", "Cost", "Warnings"]
    assert heads[:4] == ["In short", "What was run", f"{MODEL.name} on folder:photos", "Environment"]
    assert [head for head in heads if head in expected] == expected
    assert "could not be read" not in page.section("Warnings")


def test_tables_have_scopes_and_captions_figures_have_captions_and_pictures_have_words(page: Reader) -> None:
    heads = page.all("th")
    assert heads
    assert all(attributes.get("scope") in ("col", "row") for attributes, _ in heads)
    assert len(page.all("caption")) == len(page.all("table")) > 5
    assert len(page.all("figcaption")) == len(page.all("figure")) > 8
    assert all(attributes["alt"] for attributes, _ in page.all("img"))
    drawings = [attributes for attributes, _ in page.all("svg") if attributes.get("class") != "swatch"]
    assert len(drawings) == 6
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)
    assert page.all("html")[0][0]["lang"] == "en"


def test_nothing_is_fetched_and_only_our_script_may_run(document: Document, page: Reader) -> None:
    text = to_html(document)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|@font-face", text.replace("data:image/jpeg;base64,//", ""))
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:image/jpeg;base64,").startswith("data:image/jpeg;base64,")
        assert attributes.get("href", "#").startswith(("#", "data:,"))
    ((_, script),) = page.all("script")
    seal = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [a["content"] for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{seal}'"


def test_a_report_is_reproducible(store: Store, document: Document) -> None:
    again = build_report(store, ReportOptions(open_worker=worker_of))
    assert to_html(again) == to_html(document)
    assert to_markdown(again) == to_markdown(document)


def test_what_comes_from_files_is_text_and_nothing_else(document: Document, page: Reader) -> None:
    examples = page.all("figure", "example")
    assert examples
    assert all(NASTY in text for _, text in examples)
    assert all(NASTY in attributes["alt"] for attributes, _ in page.all("img"))
    assert "<script>alert" not in to_html(document)
    assert "<img src=x" not in to_html(document)


def test_a_model_or_data_with_a_bad_name_is_text_too(tmp_path: Path) -> None:
    study = study_of(("legrad",), ("sparseness",), spec="folder:<b onclick=x>&amp;")
    reader = Reader(to_html(build_report(run(tmp_path / "run", study), ReportOptions(open_worker=worker_of))))
    assert f"{MODEL.name} on folder:<b onclick=x>&amp;" in [text for _, text in reader.all("h2")]


def test_the_ranking_is_the_stores_scores(store: Store, document: Document) -> None:
    ((_, model_hash, data, settings),) = combinations(store)
    scores = read_scores(store, model_hash, data, settings)
    records = document.tables()["ranking"]
    assert len(records) == (len(METHODS) + 2) * len(METRICS)
    for record in records:
        score = scores[record["method"], record["metric"]]
        assert record["mean"] == score.mean
        assert (record["low"], record["high"]) == score.interval
        assert record["n"] == len(NAMES)
        assert record["baseline"] == (record["method"] in ("random", "center"))
        assert record["model_hash"] == model_hash
        assert record["settings"] == settings


def test_methods_are_in_the_order_of_mean_ranks_and_baselines_apart(document: Document, page: Reader) -> None:
    order = list(dict.fromkeys(record["method"] for record in document.tables()["ranking"]))
    rank = {record["method"]: record["mean_rank"] for record in document.tables()["ranking"]}
    assert order[-2:] == ["random", "center"]
    assert rank["random"] is None
    assert [rank[method] for method in order[:-2]] == sorted(rank[method] for method in order[:-2])
    apart = [text for attributes, text in page.all("tbody") if attributes.get("class") == "apart"]
    assert apart
    assert all(text.startswith("random") and "center" in text for text in apart)


def test_the_best_of_each_metric_is_bold_with_its_interval(document: Document, page: Reader) -> None:
    records = [record for record in document.tables()["ranking"] if not record["baseline"]]
    bold = [text for _, text in page.all("td", "best")]
    for metric in METRICS:
        rows = [record for record in records if record["metric"] == metric]
        best = (max if rows[0]["better"] == "higher" else min)(rows, key=lambda record: record["mean"])
        digits = decimals_for(record["mean"] for record in document.tables()["ranking"] if record["metric"] == metric)
        interval = f"[{format_number(best['low'], digits)}, {format_number(best['high'], digits)}]"
        assert any(text.startswith(format_number(best["mean"], digits)) and interval in text for text in bold)


def test_what_is_not_better_than_random_is_marked(document: Document, page: Reader) -> None:
    verdicts = [record["against_random"] for record in document.tables()["ranking"]]
    cells = [text.split("[")[0] for _, text in page.all("td", "number")]
    assert sum(text.endswith("†") for text in cells) == verdicts.count("unclear") > 0
    assert sum(text.endswith("‡") for text in cells) == verdicts.count("worse")
    column = _MetricColumn("deletion", {"a": fixed_score("a", [0.4] * 9)}, math.nan, 2, {"a": ("worse", 0.01)})
    assert column.cell("a").text == "0.40\u00a0‡"
    assert verdicts.count(None) == 2 * len(METRICS)  # the baselines themselves


def test_what_was_run_says_seed_target_methods_and_metrics(page: Reader) -> None:
    section = page.section("What was run")
    for word in ("legrad, rollout, genatt, raw-attention", "random, center", "the predicted one", "seed", *METRICS):
        assert word in section
    assert "Petsiuk" in section  # the paper of deletion


def test_the_environment_is_the_stores(page: Reader) -> None:
    from clairvit import __version__

    section = page.section("Environment")
    assert f"ClairViT {__version__}" in section
    assert f"torch {torch.__version__.split('+')[0]}" in section
    assert "No unit failed" in section


def test_examples_have_the_photo_and_a_map_for_each_method(page: Reader) -> None:
    rows = page.all("figure", "example")
    assert rows
    assert len(page.all("img")) == len(rows) * (1 + len(METHODS))
    reasons = " ".join(text for _, text in page.all("figcaption"))
    assert "Check of " in reasons
    assert "There is nothing here to explain" in reasons, "the photos are of few colours"
    for reason in ("best deletion of", "worst deletion of", "methods disagree most", "surest wrong prediction"):
        assert reason in reasons


def test_examples_are_those_that_the_scores_say(store: Store) -> None:
    from clairvit.reports.study_results import read_store

    (results,) = read_store(store).results
    chosen = {example.image: example.reasons for example in select_examples(results)}
    score = results.scores[results.methods[0], "deletion"]
    best = score.names[int(score.values.argmin())]  # lower is better
    assert f"best deletion of {results.methods[0]}" in chosen[best]
    worst = score.names[int(score.values.argmax())]
    assert f"worst deletion of {results.methods[0]}" in chosen[worst]
    values = torch.stack([results.scores[method, "deletion"].values for method in results.methods])
    most = values.std(0, correction=0).topk(2).indices.tolist()
    disagreed = {image for image, reasons in chosen.items() if "methods disagree most by deletion" in reasons}
    assert disagreed == {score.names[place] for place in most}
    wrong = [prediction for prediction in results.scores.predictions if prediction.label != prediction.predicted]
    surest = max(wrong, key=lambda prediction: prediction.probability)
    assert "surest wrong prediction" in chosen[surest.image]


def test_the_map_shown_is_of_the_studys_target_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import clairvit as cv
    from clairvit.reports import gallery
    from clairvit.reports.study_results import read_store

    drawn: list[np.ndarray] = []
    monkeypatch.setattr(gallery, "overlay", lambda photo, values, scale: drawn.append(values) or photo)
    study = replace(study_of(("rise(samples=8)", "genatt"), ("sparseness",)), seed=5, target="label")
    (results,) = read_store(run(tmp_path / "run", study)).results
    wrong = next(prediction for prediction in results.scores.predictions if prediction.predicted != prediction.label)
    source = gallery.load_source(results, [study], worker_of)
    assert isinstance(source, gallery.Source)
    gallery.draw_examples(results, [gallery.SelectedImage(wrong.image, ("it is wrong",))], source)
    image = source.dataset.read(NAMES.index(wrong.image), MODEL).pixels[None]
    for values, method in zip(drawn, results.methods, strict=True):
        maps = cv.explain(MODEL, image, method, target=wrong.label, seed=5).maps[0]
        assert_same(values, maps, magnitude=1.0)


def test_the_map_shown_is_the_studys(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pixels and method as `cv.explain` would get."""
    import clairvit as cv
    from clairvit.reports import gallery
    from clairvit.reports.study_results import read_store

    drawn: list[np.ndarray] = []
    monkeypatch.setattr(gallery, "overlay", lambda photo, values, scale: drawn.append(values) or photo)
    (results,) = read_store(store).results
    study = study_of()
    source = gallery.load_source(results, [study], worker_of)
    assert isinstance(source, gallery.Source)
    gallery.draw_examples(results, [gallery.SelectedImage(NAMES[4], ("it is nice",))], source)
    place = 4
    image = source.dataset.read(place, MODEL).pixels[None]
    expected = [cv.explain(MODEL, image, method).maps[0] for method in results.methods]
    assert len(drawn) == len(METHODS)
    for actual, reference in zip(drawn, expected, strict=True):
        assert_same(actual, reference, magnitude=1.0)


def test_without_the_data_the_report_says_so_and_goes_on(store: Store) -> None:
    def nothing(study: Study) -> Worker:
        class Lost(Worker):
            def dataset(self, place: int) -> object:
                raise BadInput("There is no folder 'photos'.")

        return Lost(study, models={0: MODEL})

    reader = Reader(to_html(build_report(store, ReportOptions(open_worker=nothing))))
    assert "cannot be loaded here: There is no folder 'photos'." in reader.section("Examples")
    assert not reader.all("img")
    assert len(reader.all("table")) > 5


def test_without_the_model_the_report_says_so(store: Store) -> None:
    from helpers.tiny_models import wrapped

    def another(study: Study) -> Worker:
        return Worker(study, models={0: wrapped("timm-vit-avg")}, datasets={0: dataset()})

    reader = Reader(to_html(build_report(store, ReportOptions(open_worker=another))))
    assert "has other weights now than when the study was run" in reader.section("Examples")


def test_an_image_that_changed_or_went_away_is_not_shown(store: Store) -> None:
    def changed(study: Study) -> Worker:
        return worker_of(study, dataset(seed=2))

    def fewer(study: Study) -> Worker:
        return worker_of(study, dataset(("other.png",)))

    assert "its picture, mask or class is not the one that was scored" in Reader(
        to_html(build_report(store, ReportOptions(open_worker=changed)))
    ).section("Examples")
    reader = Reader(to_html(build_report(store, ReportOptions(open_worker=fewer))))
    assert "is no longer in folder:photos" in reader.section("Examples")
    assert not reader.all("img")


def test_the_cost_of_scoring_a_map_is_that_of_all_its_metrics(store: Store) -> None:
    from clairvit.reports.sections import cost_section
    from clairvit.reports.study_results import read_store

    (results,) = read_store(store).results
    records = [record for table in cost_section(results).blocks for record in table.records]
    (record_of_method,) = [record for record in records if record["name"] == "genatt"]
    costs = [score.cost for (method, _), score in results.scores.items() if method == "genatt"]
    assert (
        record_of_method["scoring_forwards"]
        == sum(cost.forwards for cost in costs)
        > max(cost.forwards for cost in costs)
    )
    assert record_of_method["seconds"] == pytest.approx(sum(cost.seconds for cost in costs), rel=1e-9)
    (deletion,) = [record for record in records if record["name"] == "deletion"]
    assert deletion["forwards"] == results.scores["genatt", "deletion"].cost.forwards


def test_no_gallery_loads_nothing(store: Store) -> None:
    def never(study: Study) -> Worker:
        raise AssertionError("loaded")

    reader = Reader(to_html(build_report(store, ReportOptions(gallery=False, open_worker=never))))
    assert "--no-gallery" in reader.section("Examples")
    assert not reader.all("img")


def test_classes_are_the_true_ones_with_accuracy(store: Store, document: Document) -> None:
    ((_, model_hash, data, settings),) = combinations(store)
    scores = read_scores(store, model_hash, data, settings)
    records = document.tables()["classes"]
    assert {record["class"] for record in records} == {0, 1, 2}
    inside = [place for place, entry in enumerate(scores.predictions) if entry.label == 1]
    (row,) = [r for r in records if r["class"] == 1 and r["method"] == "legrad"]
    assert row["images"] == row["n"] == 3
    assert row["metric"] == "deletion"
    assert row["mean"] == pytest.approx(float(scores["legrad", "deletion"].values[inside].mean()), rel=1e-12)
    right = sum(scores.predictions[place].predicted == 1 for place in inside)
    assert row["accuracy"] == right / 3


def test_without_labels_classes_are_the_predicted_ones(tmp_path: Path) -> None:
    study = study_of(("legrad",), ("sparseness",))
    images = dataset(labels=None)
    reader = Reader(
        to_html(
            build_report(
                run(tmp_path / "run", study, images), ReportOptions(open_worker=lambda s: worker_of(s, images))
            )
        )
    )
    assert "predicted class" in reader.section("Classes")
    assert "accuracy" not in reader.section("Classes")
    assert "right and wrong predictions cannot be told apart" in reader.section("Examples")


def test_markdown_has_the_same_tables_and_cannot_be_broken_by_names(document: Document, page: Reader) -> None:
    text = to_markdown(document)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    bodies = sum(tag == "tr" for tag, _ in page.elements)
    assert len(rows) == bodies
    assert "<script" not in text
    assert "<img" not in text
    assert "a\\|b\\*c\\_d.png" in text
    for table_text in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table_text.splitlines()}
        assert len(widths) == 1


def test_csv_gives_the_records_back(document: Document) -> None:
    records = document.tables()["ranking"]
    rows = list(csv.DictReader(io.StringIO(to_csv(records))))
    assert [float(row["mean"]) for row in rows] == [record["mean"] for record in records]
    assert {row["mean_rank"] for row in rows if row["method"] == "random"} == {""}
    assert to_csv([{"a": "x,y"}, {"b": None}]) == 'a,b\n"x,y",\n,\n'


def test_a_study_comes_back_from_its_document() -> None:
    import json

    study = Study(
        (ModelConfig("file:x", "timm:y", ("cat", "dog"), False),),
        (DataConfig("folder:p", "test", 3, "m", "voc"),),
        ("legrad",),
        ("deletion",),
        seed=3,
        target="label",
        maps="abs",
    ).resolved()
    assert parse_study(json.loads(json.dumps(study.as_document()))) == study
