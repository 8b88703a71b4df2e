"""The errors: which built-in ones they are too, and how they read."""

from __future__ import annotations

import pickle

import pytest
from PIL import Image

import clairvit as cv
from clairvit.data.masks import read_mask
from clairvit.errors import Argument, user_stacklevel


def test_errors_are_the_built_in_kind_that_a_caller_expects() -> None:
    assert cv.errors.BadInput.__mro__[1:3] == (cv.ClairError, ValueError)
    assert cv.errors.UnknownName.__mro__[1:3] == (cv.ClairError, LookupError)
    assert issubclass(cv.errors.WrongType, cv.errors.BadInput)
    assert issubclass(cv.errors.WrongType, TypeError)
    assert not issubclass(cv.errors.UnknownName, cv.errors.BadInput)
    assert not issubclass(cv.errors.NotApplicable, ValueError | LookupError)
    assert issubclass(cv.ClairWarning, UserWarning)


@pytest.mark.parametrize(
    "kind",
    [
        cv.errors.BadInput,
        cv.errors.WrongType,
        cv.errors.UnknownName,
        cv.errors.NotApplicable,
        cv.errors.ModelUnavailable,
    ],
)
def test_messages_are_not_quoted_and_survive_another_process(kind: type[cv.ClairError]) -> None:
    error = kind("There is no 'x'.", advice=[Argument("arch", "timm:NAME")])
    assert str(error) == "There is no 'x'."
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.advice) == (kind, str(error), error.advice)


def test_unknown_names_of_every_kind() -> None:
    model = cv.load("pets")
    for call in (
        lambda: cv.explain(model, "demo", "rolout"),
        lambda: cv.explain(model, "demo", "rollout", fusoin="max"),
        lambda: cv.explain(model, "demo", "ixg", target="Bengali"),
        lambda: cv.evaluate(model, "demo", "rollout", "deletoin"),
        lambda: cv.trace(model, "demo", rules="planar"),
        lambda: cv.load("timm:vit_tinny_patch16_224"),
    ):
        with pytest.raises(LookupError) as caught:
            call()
        assert isinstance(caught.value, cv.errors.UnknownName)
        assert not str(caught.value).startswith(("'There", '"'))


def test_the_stacklevel_of_a_warning_is_that_of_the_caller() -> None:
    assert user_stacklevel() == 1, "called from outside the package"


def test_bad_input_is_not_taken_for_a_foreign_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """cv.errors.BadInput is a ValueError: code that catches those of other libraries must let it pass."""

    def refuse(*_: object) -> None:
        raise cv.errors.BadInput("The picture is odd; expected an even one.")

    monkeypatch.setattr("clairvit.data.masks.upright", refuse)
    with pytest.raises(cv.errors.BadInput, match=r"^The picture is odd; expected an even one\.$"):
        read_mask(Image.new("L", (4, 4)), (4, 4))
