"""A probability is shown where there is one: titles, figures, records, tables, the report and the web page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clairvit.bench.plan import ModelConfig
from clairvit.bench.run import run_study
from clairvit.bench.store import Store
from clairvit.cli import main
from clairvit.methods.explanation import Explanation
from clairvit.plotting.comparison import comparison_figure
from clairvit.plotting.figures import explanation_figure
from clairvit.plotting.labels import class_label, score_text
from clairvit.plotting.style import PlotStyle
from clairvit.plotting.tiles import source_line, target_label
from helpers.rounding import assert_same
from helpers.small_study import ARCHITECTURE, photos, study, weights
from plotting.fakes import fake

Captured = pytest.CaptureFixture[str]


def raw(logits: Any = ((37.0, 3.0, -2.5, 0.2),)) -> Explanation:
    explanation = fake()
    return replace(
        explanation,
        logits=torch.tensor(logits),
        classes=(0,),
        targets=("age",),
        probabilities=(None,),
        activation="raw",
    )


def words_of(figure: Any) -> str:
    return " | ".join(text.get_text() for text in figure.texts)


# Words and figures


def test_names_with_what_is_known() -> None:
    assert class_label("cat", 0.95) == "cat 95%"
    assert class_label("cat", 0.95, 3.0) == "cat 95%"
    assert class_label("age", None, 37.0) == "age (score 37.0)"
    assert class_label("a − b", None) == "a − b"
    assert [score_text(v) for v in (37.0, -0.25, 12345.0)] == ["score 37.0", "score -0.250", "score 1.234e+04"]


def test_titles_and_captions_of_raw_scores() -> None:
    assert target_label(raw(), 0) == "age (score 37.0)"
    assert source_line(raw())[-1].endswith("explains the score")
    assert source_line(fake())[-1].endswith("explains the logit")
    assert source_line(replace(raw(), activation="sigmoid"))[-1].endswith("explains the logit")
    for figure in (
        explanation_figure(raw(), PlotStyle()),
        comparison_figure({"legrad": raw(), "ixg": raw()}, PlotStyle()),
    ):
        assert "score 37.0" in words_of(figure)
        assert "%" not in words_of(figure)
        assert "robabilit" not in words_of(figure)


def test_the_highest_classes_by_activation() -> None:
    scores = raw(((1.0, 3.0, -2.5, 0.2),))
    assert [(top_class.index, top_class.probability, top_class.score) for top_class in scores.top_classes(0, 2)] == [
        (1, None, 3.0),
        (0, None, 1.0),
    ]
    independent = replace(scores, activation="sigmoid").top_classes(0, 2)
    assert_same(
        [top_class.probability for top_class in independent], torch.tensor([3.0, 1.0], dtype=torch.float64).sigmoid()
    )
    assert [top_class.score for top_class in independent] == [3.0, 1.0]


def test_the_record_of_raw_scores_has_no_probability() -> None:
    content = raw().to_dict()
    assert content["activation"] == "raw"
    assert content["probabilities"] == [None]
    assert content["class_scores"] == [37.0]
    assert [entry["probability"] for entry in content["top"][0]] == [None] * 4
    assert content["top"][0][0]["score"] == 37.0
    assert fake().to_dict()["activation"] == "softmax"


# The command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model for three classes, and two photos."""
    monkeypatch.chdir(tmp_path)
    weights(tmp_path / "tiny.safetensors")
    photos(tmp_path / "photos", 2)
    return tmp_path


MODEL = ["--model", "file:tiny.safetensors", "--arch", f"timm:{ARCHITECTURE}"]


def test_explain_prints_scores_where_there_is_no_probability(folder: Path, capsys: Captured) -> None:
    image = "photos/0/000.png"
    assert main(["explain", image, *MODEL, "--activation", "raw", "--out", "a.json"]) == 0
    printed = capsys.readouterr().out
    assert "score" in printed
    assert "probability" not in printed
    assert "%" not in printed
    assert main(["explain", "photos", *MODEL, "--activation", "raw", "--out", "b.json"]) == 0
    assert "%" not in capsys.readouterr().out
    assert main(["explain", image, *MODEL, "--activation", "sigmoid", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["activation"] == "sigmoid"
    assert_same(
        [entry["probability"] for entry in result["top"][0]],
        torch.tensor([entry["score"] for entry in result["top"][0]], dtype=torch.float64).sigmoid(),
    )
    assert main(["explain", image, *MODEL, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["activation"] == "softmax"


@pytest.mark.parametrize("command", ["explain", "compare", "evaluate", "choose"])
def test_every_command_refuses_a_wrong_activation(command: str, folder: Path, capsys: Captured) -> None:
    assert main([command, "photos", *MODEL, "--activation", "softmaks"]) == 2
    printed = capsys.readouterr().err
    assert "activation='softmaks' was given; expected softmax" in printed
    assert "Did you mean 'softmax'?" in printed
    assert "Traceback" not in printed


def test_serve_and_reproduce_and_bench_refuse_a_wrong_one(folder: Path, capsys: Captured) -> None:
    data = ["--data", f"folder:{folder / 'photos'}", *MODEL, "--activation", "logits"]
    for command in (["serve", *MODEL, "--port", "0", "--activation", "logits"], ["bench", *data, "--out", "store"]):
        assert main(command) == 2
        assert "activation='logits' was given; expected softmax" in capsys.readouterr().err
    assert main(["reproduce", "joita", *data]) == 2
    assert "activation='logits' was given" in capsys.readouterr().err


def test_an_explicit_probability_of_raw_scores_is_refused(folder: Path, capsys: Captured) -> None:
    assert main(["explain", "photos/0/000.png", *MODEL, "--activation", "raw", "--score", "prob"]) == 2
    assert "this model's scores are raw: they have none" in capsys.readouterr().err


def test_evaluate_says_that_raw_scores_are_normalised(folder: Path, capsys: Captured) -> None:
    command = [
        "evaluate",
        "photos",
        *MODEL,
        "--method",
        "legrad",
        "--metric",
        "deletion",
        "--activation",
        "raw",
        "--json",
    ]
    assert main(command) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["activation"] == "raw"
    score = content["scores"][0]
    assert score["settings"]["score"] == "raw"
    assert score["settings"]["normalised_by"] == "full image − nothing left"
    assert score["curve"]["meaning"] == "normalised score"
    assert score["span"] == [None, None]
    assert any("normalised by (full image − nothing left)" in note for note in score["notes"])
    assert main([*command[:-1]]) == 0
    assert "normalised by (full image − nothing left)" in " ".join(capsys.readouterr().out.split())


def test_choose_says_the_activation_and_repeats_it_in_its_advice(folder: Path, capsys: Captured) -> None:
    command = ["choose", "photos", *MODEL, "--method", "legrad,rollout", "--metric", "deletion", "--by", "deletion"]
    assert main([*command, "--activation", "sigmoid"]) == 0
    assert "--activation sigmoid" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--activation", "sigmoid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["activation"] == "sigmoid"


def test_models_says_what_scores_mean(capsys: Captured) -> None:
    assert main(["models", "--json"]) == 0
    kinds = {entry["name"]: entry["activation"] for entry in json.loads(capsys.readouterr().out)}
    assert kinds["pets"] == "softmax"
    assert "SigLIP sigmoid" in kinds["hf:ID"]
    assert main(["models"]) == 0
    assert "What scores mean" in capsys.readouterr().out


# Studies and the report


def test_a_study_keeps_activations_apart_and_its_report_shows_no_probability(folder: Path, capsys: Captured) -> None:
    small_study = study(folder, methods=("legrad",), metrics=("deletion(steps=3)",)).resolved()
    (entry,) = small_study.models
    store = Store.open(folder / "store")
    for activation in (None, "raw"):
        variant = replace(small_study, models=(replace(entry, activation=activation),))
        assert run_study(variant, store).plan.done == 0, "numbers of one activation are not another's"
    rows = store.query("select distinct model_hash, probability is null, meaning, options from results")[1]
    by_null = {null: (mark, meaning, json.loads(options)) for mark, null, meaning, options in rows}
    assert by_null[True][0] != by_null[False][0]
    assert (by_null[True][1], by_null[False][1]) == ("normalised score", "prob")
    assert by_null[True][2]["normalised_by"] == "full image − nothing left"
    alone = Store.open(folder / "alone")
    run_study(replace(small_study, models=(replace(entry, activation="raw"),)), alone)
    assert main(["report", str(alone.path), "--out", "page.html"]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "normalised score" in page
    assert "robabilit" not in page
    assert "surest" not in page


def test_a_store_gives_back_that_a_score_has_no_bounds(folder: Path) -> None:
    from clairvit.bench.results import combinations, read_scores

    small_study = study(folder, methods=("legrad",), metrics=("deletion(steps=3)",)).resolved()
    store = Store.open(folder / "store")
    run_study(replace(small_study, models=(replace(small_study.models[0], activation="raw"),)), store)
    ((_, mark, data, settings),) = combinations(store)
    scores = read_scores(store, mark, data, settings)
    assert scores["legrad", "deletion(steps=3)"].span == (-float("inf"), float("inf"))
    assert all(prediction.probability is None for prediction in scores.predictions)


def test_a_study_file_names_the_activation(tmp_path: Path) -> None:
    from clairvit.bench.config import read_config
    from clairvit.errors import BadInput

    (tmp_path / "study.toml").write_text('models = [{spec = "pets", activation = "sigmoid"}]\n')
    assert read_config(tmp_path / "study.toml").models == (ModelConfig("pets", activation="sigmoid"),)
    text = 'methods = ["legrad"]\n[[models]]\nspec = "pets"\nactivation = "sigmod"\n'
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(BadInput, match=r"line 4: activation='sigmod' was given.*Did you mean 'sigmoid'\?"):
        read_config(tmp_path / "study.toml")
