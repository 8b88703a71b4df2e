"""`clairvit calibrate` end to end: the recipe is cv.calibrate's, a second run reads the cache; the page's recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import clairvit as cv
from clairvit.cli import main
from clairvit.errors import BadInput, UnknownName
from clairvit.methods.recipe import read_recipe
from clairvit.web.app import create_app
from clairvit.web.state import create_state, resolve_request
from helpers.small_study import ARCHITECTURE, photos, weights

Captured = pytest.CaptureFixture[str]
METRIC = "deletion(steps=2)"


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model and eight photos in the working directory."""
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 8)
    model = weights(tmp_path / "tiny.safetensors")
    return ["--model", model, "--arch", f"timm:{ARCHITECTURE}"]


def test_a_recipe_from_photos_to_every_command(typed: list[str], capsys: Captured) -> None:
    quick = ["--sets", "2", "--metric", METRIC]
    assert main(["calibrate", "photos/*/*.png", *typed, *quick, "--out", "mine.json"]) == 0
    printed = capsys.readouterr().out
    recipe = read_recipe("mine.json")
    flat = " ".join(printed.split())
    for sentence in recipe.answer:
        assert sentence in flat
    assert "Wrote mine.json; use it by: clairvit explain IMAGE" in flat
    model = cv.load(typed[1], arch=typed[3])
    files = sorted(str(file) for file in Path("photos").glob("*/*.png"))
    again = cv.calibrate(model, files, sets=2, metrics=[METRIC])
    assert again.calibration == recipe.calibration
    stored = {file.name for file in Path("mine.cache").iterdir()}
    assert main(["calibrate", "photos/*/*.png", *typed, *quick, "--out", "mine.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["calibration"]["weights"] == {
        kind: list(values) for kind, values in again.calibration.weights.items()
    }
    assert {file.name for file in Path("mine.cache").iterdir()} == stored
    for command in (
        ["explain", files[0], "--out", "one.json"],
        ["evaluate", files[0], "--metric", METRIC, "--out", "scores.json"],
    ):
        assert main([*command, *typed, "--method", "mine.json", "--quiet"]) == 0
    assert main(["compare", files[0], *typed, "--method", "mine.json,ixg", "--out", "both", "--quiet"]) == 0
    assert json.loads(Path("one.json").read_text())["method"] == f"mine.json#{recipe.calibration.hash}"
    capsys.readouterr()
    assert main(["explain", files[0], "--method", "mine.json"]) == 2, "the built-in model is another one"
    errors = capsys.readouterr().err
    assert "calibrated for" in errors
    assert "this is pets" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["photos/0/*.png"], "3 images were given; expected 8 or more"),
        (["photos/*/*.png", "--out", "mine.txt"], "expected one that ends in .json"),
        (["photos/*/*.png", "--metric", "no-such-metric"], "There is no metric 'no-such-metric'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, typed: list[str], capsys: Captured) -> None:
    assert main(["calibrate", *arguments, *typed]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    (error,) = [line for line in errors.splitlines() if not line.startswith("clairvit: note: ")]
    assert message in error


def test_the_page_offers_recipes_that_it_was_started_with_and_opens_no_others(typed: list[str]) -> None:
    model = cv.load(typed[1], arch=typed[3])
    files = sorted(str(file) for file in Path("photos").glob("*/*.png"))
    recipe = cv.calibrate(model, files, sets=2, metrics=[METRIC])
    recipe.save("mine.json")
    cv.Recipe(method="ixg", model="pets", weights="").save("chosen.json")
    state = create_state([model], recipes=["mine.json"])
    (spec,) = state.recipes
    assert spec.text == f"mine.json#{recipe.calibration.hash}"  # type: ignore[union-attr]
    with TestClient(create_app(state), base_url="http://127.0.0.1") as client:
        cards = {card["name"]: card for card in client.get("/api/methods").json()["methods"]}
        assert cards[spec.text]["backwards"] == spec.backwards
        answer = client.post("/api/explain", data={"photo": "demo", "method": [spec.text, "ixg"]}).json()
        assert [item["method"] for item in answer["explanations"]] == [spec.text, "ixg"]
    for text in ("mine.json", "chosen.json", "smooth(chosen.json)", "mine.json#000000000000"):
        with pytest.raises(UnknownName, match="this server has not read"):
            resolve_request([text], 16)
    with pytest.raises(BadInput, match="recipe without weights"):
        create_state([model], recipes=["chosen.json"])
