"""What "Did you mean" offers: never a name that merely has some of the letters."""

from __future__ import annotations

import pytest

import clairvit as cv
from clairvit.errors import ClairError, UnknownName, did_you_mean
from clairvit.methods.registry import METHODS, list_methods
from clairvit.methods.spec import resolve_method


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("chefer", "Did you mean 'genatt' or 'transatt'?"),
        ("gradcam++", "Did you mean 'gradcam-pp'"),
        ("Grad-CAM++", "Did you mean 'gradcam-pp'"),
        ("shap", "Did you mean 'kernelshap'?"),
        ("attention_rollout", "Did you mean 'rollout'"),
        ("rolout", "Did you mean 'rollout'"),
        ("integrated gradients", "Did you mean 'integrated-gradients'"),
    ],
)
def test_names_of_papers_and_other_libraries_lead_to_ours(typed: str, offered: str) -> None:
    with pytest.raises(ClairError) as caught:
        cv.explain(None, None, typed)  # type: ignore[arg-type]
    assert offered in str(caught.value)


@pytest.mark.parametrize("typed", ["zzz", "q", "banana", "xyzzy"])
def test_nothing_is_offered_where_nothing_is_near(typed: str) -> None:
    with pytest.raises(UnknownName) as caught:
        resolve_method(typed)
    assert "Did you mean" not in str(caught.value)


def test_every_alias_leads_to_methods_that_exist() -> None:
    names = {method.name for method in list_methods()}
    assert {name for offered in METHODS.aliases.values() for name in offered} <= names
    assert not set(METHODS.aliases) & names, "a name of ours needs no alias"


def test_a_hub_id_without_its_source() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'hf:google/vit-base-patch16-224'\?"):
        cv.load("google/vit-base-patch16-224")


def test_alike_names_come_before_names_that_contain_the_word() -> None:
    assert did_you_mean("flw", ["attention-flow", "flow"]) == " Did you mean 'flow'?"
    assert did_you_mean("flow2", ["flow", "overflow2"]) == " Did you mean 'flow' or 'overflow2'?"
    assert did_you_mean("skip", ["plus", "skipplus"]) == " Did you mean 'skipplus'?"
    assert did_you_mean("center", ["chefer"]) == ""
    assert did_you_mean("rya", ["local", "ray"]) == " Did you mean 'ray'?", "letters that changed places"
