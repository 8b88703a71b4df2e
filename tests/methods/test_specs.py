"""Specs and options as values: equality, pickling, what is parsed when, and what every option says of itself."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from torch import Tensor

import clairvit as cv
from clairvit._spec import Registered
from clairvit.aggregation import Total
from clairvit.errors import BadInput, UnknownName
from clairvit.methods import calibrated, ensembles, spec
from clairvit.methods.registry import METHODS, PLUS_MODE, list_methods
from clairvit.metrics import registry as metrics
from clairvit.metrics.registry import list_metrics
from clairvit.option_types import Doc, LocalPath, Option, Range, options_of

if TYPE_CHECKING:
    from decimal import Decimal

WRAPPERS = (ensembles.smoothed, ensembles.shifted, ensembles.combined)
TEXTS = (
    *("rollout", "rollout(fusion=max)+skipplus", "genatt+from:-2", "attnlrp(preset=vit)+plus", "focusvit(m=3)"),
    *("grad-rollout(preset=jacobgil,fusion=max)", "gmar-l1(preset=joita)+rollout"),
    *("smooth(genatt+plus,n=5)", "shift(ixg)", "ensemble(legrad,rollout(fusion=min),by=max)"),
)


def documented_options() -> Iterator[tuple[str, Option]]:
    """Yield each option of each method, metric, preset and function of methods, with what it belongs to."""
    entries: list[Registered] = [*list_methods(), *list_metrics()]
    variants = [preset for entry in entries for preset in entry.presets.values() if isinstance(preset, Registered)]
    for entry in (*entries, *variants):
        yield from ((entry.name, option) for option in entry.option_list)
    for function in WRAPPERS:
        yield from ((function.__name__, o) for o in options_of(function, ("inner", "trace", "seed", "maps")).values())
    yield "a sum over layers", PLUS_MODE


def test_every_option_says_what_it_means() -> None:
    for owner, option in documented_options():
        words = set(option.doc.lower().replace(",", " ").replace(";", " ").split())
        name = set(option.name.lower().split("_"))
        assert len(words - name - {"the", "a", "of"}) >= 3, f"{owner}({option.name}): {option.doc!r}"
        assert not option.doc.endswith("."), f"{owner}({option.name}) is a fragment: {option.doc!r}"
        assert option.allowed, f"{owner}({option.name})"


def test_every_option_takes_its_default_and_refuses_what_is_outside_its_range() -> None:
    """By the one mechanism: a function checks for itself only what depends on the image or on other options."""
    kinds = {"text", "number", "whole number", "true", "false", "none"}
    for owner, option in documented_options():
        words = {kind for kind in option.alternatives if isinstance(kind, str | int) and not isinstance(kind, type)}
        assert set(option.choices.split(" | ")) <= kinds | set(map(str, words)), f"{owner}({option.name})"
        assert option.checked(option.default) == option.default
        with pytest.raises(BadInput, match=rf"^{option.name}=.* was given; expected "):
            option.checked(object())
        bounds = option.range
        if bounds is not None:
            below = bounds.gt if bounds.ge is None else bounds.ge - 1
            assert below is not None, f"{owner}({option.name}) has no lower bound"
            outside = [below] + [bound for bound in (bounds.lt, bounds.le and bounds.le + 1) if bound]
            whole = int in option.alternatives
            for value in outside:
                with pytest.raises(BadInput, match=rf"^{option.name}=.* was given; expected {re.escape(str(bounds))}"):
                    option.checked(int(value) if whole else value)


def test_there_are_about_four_hundred_options() -> None:
    """A list of more is hard to read: what other people's code computes is a preset (`compat`).

    412 of them, and 18 of the seven metrics of answers, bounds and objects that came later.
    """
    assert sum(len(entry.option_list) for entry in (*list_methods(), *list_metrics())) <= 430


def test_an_alias_has_its_own_doc_unless_the_parameter_has_another() -> None:
    shared = Annotated[int, Range(ge=1), Doc("of all")]

    types = {"plain": shared, "other": Annotated[shared, Doc("of one")], "optional": shared | None}
    assert {name: Option(name, None, kind).doc for name, kind in types.items()} == {
        "plain": "of all",
        "other": "of one",
        "optional": "of all",
    }


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        (Option("n", 1, Annotated[int, Range(ge=1, unit="passes")]), "whole number, 1 or more passes"),
        (Option("n", None, Annotated[int, Range(ge=1)] | None), "whole number, 1 or more | none"),
        (Option("by", "a", Literal["a", "b"] | int), "a | b | whole number"),
        (Option("flag", True, bool), "true | false"),
        (Option("path", "x", Annotated[str, LocalPath()]), "text"),
    ],
)
def test_what_an_option_takes_in_words(option: Option, allowed: str) -> None:
    assert option.allowed == allowed


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (float, 2, 2.0),
        (Literal["none", "all"], None, "none"),
        (Literal["none", "all"] | None, None, "none"),
        (float | None, None, None),
        (int | Literal["half"], "half", "half"),
        (bool, False, False),
    ],
)
def test_values_take_the_type_of_their_option(kind: object, given: object, value: object) -> None:
    checked = Option("x", None, kind).checked(given)
    assert checked == value
    assert type(checked) is type(value)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (int, True, "x=True was given; expected a number."),
        (int, 1.0, "x=1.0 was given; expected a number."),
        (bool, 1, "x=1 was given; expected True or False."),
        (float | None, "1", "x=1 was given; expected a number or None."),
        (int | Literal["half"], "hal", "x=hal was given; expected 'half' or a number. Did you mean 'half'?"),
        (Annotated[int, Range(ge=2)] | None, 1, "x=1 was given; expected 2 or more."),
        (Annotated[float, Range(gt=0, example=1)], float("nan"), "x=nan was given; expected more than 0, such as x=1."),
    ],
)
def test_values_of_another_type_are_refused(kind: object, given: object, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        Option("x", None, kind).checked(given)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", TEXTS)
def test_methods_are_values(text: str) -> None:
    method = cv.parse_method(text)
    for same in (cv.parse_method(text), pickle.loads(pickle.dumps(method)), copy.deepcopy(method)):
        assert same == method
        assert hash(same) == hash(method)
        assert (same.options, same.aggregation, same.relu) == (method.options, method.aggregation, method.relu)
    assert cv.parse_method(str(method)) == method
    assert method != cv.parse_method("raw-attention")
    assert method != cv.parse_metric("deletion")


def test_metrics_are_values() -> None:
    metric = cv.parse_metric("deletion(preset=rise,steps=3)")
    for same in (cv.parse_metric(str(metric)), pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric)):
        assert same == metric
        assert same.options == metric.options
    assert len({metric, cv.parse_metric(str(metric)), cv.parse_metric("deletion")}) == 2


def test_a_calibrated_method_carries_its_weights() -> None:
    weights = {"attnlrp": (0.5, 1.0), "ixg": (0.0, 0.25)}
    calibration = calibrated.Calibration(weights, "tiny", "0" * 64, (32, 32), (4, 4))
    method = calibrated.calibrated_spec(calibration, "mine.json")
    load = "method = pickle.load(sys.stdin.buffer)"
    dump = "pickle.dump((method, [*map(str, method.members)]), sys.stdout.buffer)"
    process = [sys.executable, "-c", f"import pickle, sys; {load}; {dump}"]
    restored, members = pickle.loads(subprocess.check_output(process, input=pickle.dumps(method)))
    assert restored == method
    assert members == [str(member) for member in method.members]


def test_a_method_of_another_function_is_another_value() -> None:
    first = cv.parse_method("rollout")
    with METHODS.restored():

        @cv.method("rollout", output="matrix", aggregation=Total(), overwrite=True)
        def attention(layer: cv.extend.LayerView) -> Tensor:
            return layer.A.mean(1)

        assert cv.parse_method("rollout") != first
    assert cv.parse_method("rollout") == first


def test_options_on_top_of_a_spec_override_its_own() -> None:
    method = cv.parse_method("rollout(fusion=max,discard_ratio=0.5)+skipplus")
    assert str(cv.parse_method(method, fusion=2)) == "rollout(discard_ratio=0.5,fusion=2)+skipplus"
    smooth = cv.parse_method("smooth(genatt,n=5)")
    assert str(cv.parse_method(smooth, n=7, sigma=0.2)) == "smooth(genatt,n=7,sigma=0.2)"
    metric = cv.parse_metric("deletion(steps=3)")
    assert str(cv.parse_metric(metric, preset="chefer")) == str(cv.parse_metric("deletion(preset=chefer,steps=3)"))
    with pytest.raises(UnknownName, match="has no preset 'nobody'"):
        cv.parse_metric(metric, preset="nobody")


def test_specs_are_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    method, metric = cv.parse_method("smooth(genatt+plus,n=2)"), cv.parse_metric("deletion(steps=2)")
    genatt = cv.parse_method("genatt+plus")

    def refuse(text: object) -> None:
        raise AssertionError(f"{text!r} was parsed")

    monkeypatch.setattr(spec, "parse_spec", refuse)
    monkeypatch.setattr(metrics, "parse_spec", refuse)
    assert str(cv.parse_method(method, n=3)) == "smooth(genatt+plus,n=3)"
    assert cv.ensembles.smooth(genatt, n=2) == str(method)
    assert str(cv.parse_metric(metric, steps=4)) == "deletion(steps=4)"
    assert pickle.loads(pickle.dumps(method)) == method


def test_an_annotation_that_only_a_type_checker_can_read_leaves_the_others_readable() -> None:
    def function(layer: Decimal, power: Annotated[float, Range(gt=0), Doc("of it all")] = 1.0) -> Decimal:
        return layer

    option = options_of(function)["power"]
    assert (option.doc, option.allowed) == ("of it all", "number, more than 0")
