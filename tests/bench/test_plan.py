"""A plan has a unit for all that is missing and for nothing else, and a unit is known by its content alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import clairvit.bench.plan as plan_module
from clairvit.bench.plan import (
    Cell,
    DataConfig,
    ModelConfig,
    Plan,
    Study,
    forwards_of,
    make_plan,
    settings_of,
)
from clairvit.data.dataset import ImageDataset
from clairvit.data.hashing import weights_hash
from clairvit.errors import BadInput
from helpers.tiny_models import wrapped


def dataset(marks: Sequence[str]) -> ImageDataset:
    def never(*_: object) -> Any:
        raise AssertionError("a plan reads no image")

    return ImageDataset(tuple(f"{mark}.png" for mark in marks), never, lambda row: marks[row])


def study(**others: Any) -> Study:
    usual: dict[str, Any] = {"methods": ("legrad", "rollout"), "metrics": ("deletion", "sparseness"), "at_once": 2}
    return Study((ModelConfig("pets"),), (DataConfig("folder:x"),), **usual | others).resolved()


def planned(
    small_study: Study,
    marks: Sequence[str],
    done: frozenset[Cell] = frozenset(),
    weights: str = "w",
    most_forwards: float = math.inf,
) -> Plan:
    return make_plan(small_study, [weights], [dataset(marks)], done, most_forwards=most_forwards)


def cells(small_study: Study, plan: Plan) -> list[Cell]:
    return [
        Cell(unit.weights, mark, method, metric, settings_of(small_study), unit.image_set)
        for unit in plan.units
        for mark in unit.image_hashes
        for method in unit.methods
        for metric in unit.metrics
    ]


def test_every_cell_is_in_one_unit() -> None:
    small_study = study()
    plan = planned(small_study, "abcde")
    assert [unit.rows for unit in plan.units] == [(0, 1), (2, 3), (4,)]
    assert small_study.methods == ("legrad", "rollout", "random", "center")
    plan_cells = cells(small_study, plan)
    assert len(plan_cells) == len(set(plan_cells)) == plan.cells == 5 * 4 * 2
    assert plan.done == 0
    assert plan.images == (tuple((f"{mark}.png", mark) for mark in "abcde"),)


def test_what_is_done_is_not_planned() -> None:
    small_study = study()
    everything = frozenset(cells(small_study, planned(small_study, "abcde")))
    again = planned(small_study, "abcde", everything)
    assert (again.units, again.done, again.cells) == ((), 40, 40)


def test_images_that_move_to_other_units_are_not_computed_again() -> None:
    small_study = study()
    everything = frozenset(cells(small_study, planned(small_study, "abcde")))
    assert planned(small_study, "edcba", everything).units == ()
    assert planned(small_study, "bde", everything).units == ()
    assert planned(study(at_once=5), "abcde", everything).units == ()
    (more,) = planned(small_study, "xabcde", everything).units
    assert (more.image_hashes, more.rows) == (("x",), (0,))


def test_an_image_that_changed_is_computed_alone() -> None:
    small_study = study()
    everything = frozenset(cells(small_study, planned(small_study, "abcde")))
    plan = planned(small_study, "abXde", everything)
    assert [(unit.rows, unit.methods, unit.metrics) for unit in plan.units] == [
        ((2,), small_study.methods, small_study.metrics)
    ]
    assert plan.done == 32


def test_a_method_or_metric_that_is_added_is_computed_alone() -> None:
    small_study = study()
    everything = frozenset(cells(small_study, planned(small_study, "abcde")))
    more = study(methods=("legrad", "rollout", "genatt"))
    assert {(unit.methods, unit.metrics) for unit in planned(more, "abcde", everything).units} == {
        (("genatt",), small_study.metrics)
    }
    more = study(metrics=("deletion", "sparseness", "complexity"))
    assert {(unit.methods, unit.metrics) for unit in planned(more, "abcde", everything).units} == {
        (small_study.methods, ("complexity",))
    }
    both = study(methods=("legrad", "genatt"), metrics=("deletion", "complexity"))
    plan_cells = cells(both, planned(both, "ab", everything))
    assert len(plan_cells) == len(set(plan_cells)) == 2 * (4 * 1 + 1 * 1)
    assert not set(plan_cells) & everything


@pytest.mark.parametrize("change", [{"seed": 1}, {"target": "label"}, {"maps": "abs"}])
def test_what_a_number_depends_on_is_in_its_cell(change: dict[str, Any]) -> None:
    small_study = study()
    everything = frozenset(cells(small_study, planned(small_study, "ab")))
    assert planned(study(**change), "ab", everything).done == 0
    assert planned(small_study, "ab", everything, weights="other").done == 0


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"target": "label"}, {"maps": "abs"}, {"methods": ("legrad",)}, {"metrics": ("deletion",)}],
)
def test_a_unit_has_another_key_if_any_of_its_numbers_may_differ(change: dict[str, Any]) -> None:
    """By its key a unit is known to be there: with the same one, the other would never be computed."""
    usual = planned(study(), "ab").units[0].key
    assert planned(study(), "ab").units[0].key == usual
    assert planned(study(**change), "ab").units[0].key != usual
    assert planned(study(), "ac").units[0].key != usual
    assert planned(study(), "ab", weights="other").units[0].key != usual


@pytest.mark.parametrize("metric", ["grid-pointing-game", "part-completeness"])
def test_a_metric_of_a_whole_set_is_of_that_set_only(metric: str) -> None:
    small_study = study(metrics=("sparseness", metric))
    plan = planned(small_study, "abcde")
    (whole,) = (unit for unit in plan.units if unit.image_set)
    assert (whole.rows, whole.metrics) == ((0, 1, 2, 3, 4), (metric,))
    everything = frozenset(cells(small_study, plan))
    assert planned(small_study, "abcde", everything).units == ()
    (again,) = planned(small_study, "abcd", everything).units  # its scores of five images are no scores of four
    assert (again.rows, again.metrics) == ((0, 1, 2, 3), (metric,))


@pytest.mark.parametrize("error", [BadInput("There is no file 'b.png'."), PermissionError(13, "Permission denied")])
def test_an_image_that_is_not_there_costs_only_itself(error: Exception) -> None:
    def mark(row: int) -> str:
        if row == 1:
            raise error
        return "abc"[row]

    small_study = study()
    there = dataclasses.replace(dataset("abc"), content_hash=mark)
    plan = make_plan(small_study, ["w"], [there], frozenset())
    everything = frozenset(cells(small_study, plan))
    assert make_plan(small_study, ["w"], [there], everything).units == ()
    (unit,) = make_plan(small_study, ["w"], [dataset("abc")], everything).units  # now it is there
    assert unit.image_hashes == ("b",)


def test_the_hash_of_a_model_is_of_all_that_decides_what_it_says() -> None:
    model = wrapped("timm-vit")
    usual = weights_hash(model)
    assert weights_hash(wrapped("timm-vit")) == usual
    many = dataclasses.replace(model, labels=tuple(f"a long name of a class {number}" for number in range(99)))
    other = dataclasses.replace(model, preprocess=dataclasses.replace(model.preprocess, interpolation="nearest"))
    seen = {usual, weights_hash(many), weights_hash(other)}
    with torch.no_grad():
        next(iter(model.module.parameters())).view(-1)[0] += 1e-3
    assert len(seen | {weights_hash(model)}) == 4
    assert weights_hash(dataclasses.replace(model, name="another")) == weights_hash(model)


def test_names_that_are_files_are_still_names(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_study = study()
    before = planned(small_study, "ab")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").write_text("weights")
    (tmp_path / settings_of(small_study)).write_text("settings")
    assert planned(small_study, "ab") == before


def test_the_cost_is_of_maps_and_metrics() -> None:
    assert forwards_of(["legrad"], ["sparseness"]) == 1
    one_method, two_methods = (
        forwards_of(["legrad"], ["deletion(steps=4)"]),
        forwards_of(["legrad", "rollout"], ["deletion(steps=4)"]),
    )
    assert two_methods - 1 == 2 * (one_method - 1) > 0
    unit, *_ = planned(study(), "abc").units
    assert unit.forwards == 2 * forwards_of(study().methods, study().metrics)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"methods": ()}, "at least one"), ({"target": "cat"}, "'label'"), ({"at_once": 0}, "1 or more")],
)
def test_a_study_that_makes_no_sense(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        study(**change)


# The size of a unit


def test_a_unit_that_costs_much_has_fewer_images_and_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = study(at_once=8, metrics=("deletion(steps=9)",))
    cost = forwards_of(whole.methods, whole.metrics)
    assert [unit.rows for unit in planned(whole, "abcdefgh").units] == [tuple(range(8))]
    pairs = planned(whole, "abcdefgh", most_forwards=2 * cost)
    assert [unit.rows for unit in pairs.units] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    monkeypatch.setattr(plan_module, "MOST_REPEATED", 0.1)
    plan = planned(whole, "abc", most_forwards=cost // 2 + 1)
    assert [(unit.rows, unit.methods) for unit in plan.units[:2]] == [
        ((0,), ("legrad", "rollout")),
        ((0,), ("random", "center")),
    ]
    plan_cells = cells(whole, plan)
    assert len(plan_cells) == len(set(plan_cells)) == plan.cells
    assert planned(whole, "abc", frozenset(plan_cells)).units == ()
    assert plan.forwards <= 1.1 * 3 * cost


def test_methods_that_share_what_is_dear_stay_together() -> None:
    explained_again = study(metrics=("max-sensitivity(samples=50)",))
    units = planned(explained_again, "ab", most_forwards=10).units
    assert [(unit.rows, unit.methods) for unit in units] == [((row,), explained_again.methods) for row in (0, 1)]


def test_stores_with_larger_units_are_read() -> None:
    small_study = study(at_once=8)
    everything = frozenset(cells(small_study, planned(small_study, "abcde")))
    assert planned(small_study, "abcde", everything, most_forwards=1).units == ()
    (unit,) = planned(study(at_once=8, metrics=("sparseness",)), "abcdef", everything).units
    assert unit.rows == (5,)
