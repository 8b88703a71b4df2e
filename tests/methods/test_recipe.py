"""A recipe: written and read back, followed by `explain`, refused where it is none, and doubted for other weights."""

from __future__ import annotations

import functools
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clairvit as cv
from clairvit._io import to_json
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput, ClairError, ClairWarning
from clairvit.methods.recipe import KIND, Recipe, as_recipe, read_recipe
from clairvit.selection.result import Selection
from helpers.tiny_models import build, fresh, pixels, wrapped

METRIC = "insertion-deletion(steps=2)"
DEEP = "timm-deep"  # five layers


@functools.cache
def pick() -> Selection:
    model, images = wrapped(DEEP), pixels(DEEP, 4)
    return cv.choose(model, images, ["legrad", "rollout"], [METRIC, "sparseness"], tune_start=["focusvit", "genatt"])


def with_starts(**starts: str) -> Recipe:
    return replace(pick().recipe, starts=starts)


# The file -------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = pick().save(tmp_path / "new folder" / "recipe.json")
    recipe = read_recipe(path)
    assert recipe.method == pick().best
    assert recipe.model == pick().model
    assert recipe.weights == weights_hash(wrapped(DEEP))
    assert recipe.metrics == (METRIC, "sparseness")
    assert recipe.by == METRIC
    assert recipe.seed == 0
    assert recipe.images == 4
    assert recipe.version == cv.__version__
    assert recipe.answer == pick().answer
    assert recipe.starts == {base: start_layer.method for base, start_layer in pick().tuned.items()}
    assert recipe.settings == {"target": "predicted", "maps": "raw", "activation": "softmax"}
    assert [row["method"] for row in recipe.ranking] == [row.method for row in pick().ranking]
    assert [row["mean"] for row in recipe.ranking] == [row.mean for row in pick().ranking]
    assert recipe.tuned[0]["curve"][0]["mean"] == pick().tuned["focusvit"].means[0]
    assert not list(tmp_path.rglob(".*"))  # nothing is left beside it


def test_the_same_choice_is_the_same_file(tmp_path: Path) -> None:
    model, images = wrapped(DEEP), pixels(DEEP, 4)
    again = cv.choose(model, images, ["legrad", "rollout"], [METRIC, "sparseness"], tune_start=["focusvit", "genatt"])
    assert again.save(tmp_path / "b.json").read_bytes() == pick().save(tmp_path / "a.json").read_bytes()


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    odd = replace(pick().recipe, settings={"a": math.nan, "b": [math.inf, 1.5], "c": (1, "x", None, True)})
    stored = json.loads(odd.save(tmp_path / "r.json").read_text(encoding="utf-8"))
    assert stored["settings"] == {"a": None, "b": [None, 1.5], "c": [1, "x", None, True]}
    assert to_json({1: {2: -math.inf}}) == {"1": {"2": None}}


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ends in '\.txt'; write to a name that ends in \.png, .*\.json"):
        pick().save(tmp_path / "recipe.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="Cannot write"):
        pick().save(tmp_path / "file" / "recipe.json")
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(BadInput, match="Cannot write"):
        pick().save(tmp_path / "taken.json")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is JSON, and no recipe"),
        ('{"kind": "scores"}', "is JSON, and no recipe"),
        ({"format": 7, "version": "9.9"}, r"is a recipe of format 7, written by ClairViT 9\.9; this is .* format 1"),
        ({"weights": None}, "has no weights; expected text for each"),
        ({"method": 3, "model": None}, "has no method, model; expected"),
        ({"starts": {"genatt": 3}}, "'starts' of the recipe .* are no table of methods"),
        ({"starts": []}, "'starts' of the recipe .* are no table of methods"),
        ({"method": "legrod"}, "legrod.*Did you mean 'legrad'"),
        ({"starts": {"genatt": "genat+from:1"}}, "genat.*Did you mean 'genatt'"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "recipe.json"
    usual = {"kind": KIND, "format": 1, "method": "legrad", "model": "m", "weights": "w"}
    path.write_text(content if isinstance(content, str) else json.dumps({**usual, **content}), encoding="utf-8")
    with pytest.raises(ClairError, match=message):
        read_recipe(path)
    path.write_text(json.dumps({**usual, "of a later version": 1}), encoding="utf-8")
    assert read_recipe(path).method == "legrad"


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot be read: No such.*cv\.choose\(model, images\)\.save\('recipe\.json'"):
        read_recipe(tmp_path / "none.json")
    assert as_recipe(pick().recipe) is not None


# Followed by explain --------------------------------------------------------------------------------------------------


def test_explain_follows_a_recipe(tmp_path: Path) -> None:
    model, image = wrapped(DEEP), pixels(DEEP, 1)
    path = pick().save(tmp_path / "recipe.json")
    expected = cv.explain(model, image, pick().best)
    ways = [
        cv.explain(model, image, str(path)),
        cv.explain(model, image, path),
        cv.explain(model, image, pick().recipe),
        cv.explain(model, image, recipe=path),
        cv.explain(model, image, recipe=pick().recipe),
    ]
    for way in ways:
        assert way.method == expected.method
        assert torch.equal(way.maps, expected.maps)
    assert cv.explain(model, image).method == "attnlrp+plus"


def test_m_auto_is_the_recipes() -> None:
    model, image = wrapped(DEEP), pixels(DEEP, 1)
    recipe = with_starts(focusvit="focusvit(m=2)", genatt="genatt+from:1", legrad="legrad(start=1)")
    explanation = cv.explain(model, image, "focusvit(m=auto)", recipe=recipe)
    assert explanation.method == "focusvit(m=2)"
    assert torch.equal(explanation.maps, cv.explain(model, image, "focusvit(m=2)").maps)
    assert not torch.equal(explanation.maps, cv.explain(model, image, "focusvit(m=0)").maps)
    assert recipe.method_for("genatt+from:auto") == "genatt+from:1"
    assert recipe.method_for("legrad(start=auto)") == "legrad(start=1)"
    assert recipe.method_for("smooth(focusvit(m=auto), n=3)") == cv.ensembles.smooth("focusvit(m=2)", n=3)
    with pytest.raises(BadInput, match=r"^'m=auto' reads .*tune_start=\['focusvit'\]\)\.save\('recipe\.json'\)"):
        cv.explain(model, image, "focusvit(m=auto)")


@pytest.mark.parametrize("text", ["focusvit(m=auto)+rollout", "genatt(start=auto)+plus"])
def test_auto_with_another_combinator_is_refused(text: str) -> None:
    """The recipe's text would silently replace the combinator."""
    recipe = with_starts(focusvit="focusvit(m=2)", genatt="genatt+from:1")
    with pytest.raises(BadInput, match=r"has a start layer 'auto' and the combinator '\+\w+'.*expected one of the two"):
        recipe.method_for(text)


def test_m_auto_is_what_was_found() -> None:
    start_layer = pick().tuned["focusvit"]
    expected = "focusvit" if start_layer.best == start_layer.half else f"focusvit(m={start_layer.best})"
    assert pick().recipe.method_for("focusvit(m=auto)") == expected


def test_a_recipe_without_that_start() -> None:
    recipe = with_starts(genatt="genatt+from:1")
    with pytest.raises(BadInput, match=r"holds no layer where 'focusvit' starts; it has genatt\. .*tune_start="):
        recipe.method_for("focusvit(m=auto)")
    with pytest.raises(BadInput, match=r"no layer where 'focusvit\(head_weights=uniform\)' starts"):
        with_starts(focusvit="focusvit(m=1)").method_for("focusvit(head_weights=uniform,m=auto)")
    with pytest.raises(BadInput, match="it has none"):
        with_starts().method_for("focusvit(m=auto)")


def test_a_method_and_a_recipe_are_one_too_many() -> None:
    for text in ("rollout", "focusvit(m=2)", "smooth(rollout, n=2)"):
        with pytest.raises(BadInput, match=r"and a recipe for .* were given; expected one of the two"):
            cv.explain(wrapped(DEEP), pixels(DEEP, 1), text, recipe=pick().recipe)


# Other weights --------------------------------------------------------------------------------------------------------


def test_other_weights_are_a_warning(tmp_path: Path) -> None:
    image, path = pixels(DEEP, 1), pick().save(tmp_path / "recipe.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClairWarning)
        cv.explain(fresh(DEEP), image, path)
    module = build(DEEP)
    with torch.no_grad():
        next(module.parameters()).add_(1e-3)
    other = cv.wrap(module, name="other", size=(32, 32))
    with pytest.warns(ClairWarning, match=r"made for .* and this is other with other weights .* Run cv\.choose"):
        explanation = cv.explain(other, image, path)
    assert explanation.method == pick().best  # and it is followed


def test_the_hash_is_of_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tensors and labels are text: a file that is called so changes nothing, and they may be long."""
    model = wrapped(DEEP)
    before = weights_hash(model)
    monkeypatch.chdir(tmp_path)
    for name in model.module.state_dict():
        (tmp_path / name).write_text("something else")
    assert weights_hash(model) == before
    assert weights_hash(replace(model, labels=("a" * 200, "b" * 200, "c" * 200))) != before
