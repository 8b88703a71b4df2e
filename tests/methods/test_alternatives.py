"""Errors of lower packages name a kind of method; the method layer adds the names of registered methods."""

from __future__ import annotations

import pickle
from typing import get_args

import pytest

from clairvit.errors import Alternative, NotApplicable
from clairvit.methods.alternatives import ALTERNATIVES, advice, with_named_methods
from clairvit.methods.registry import find_method


def test_every_alternative_has_registered_methods() -> None:
    assert set(ALTERNATIVES) == set(get_args(Alternative))
    for names in ALTERNATIVES.values():
        assert names
        assert [find_method(name).name for name in names] == list(names)


def test_methods_are_named_once() -> None:
    error = NotApplicable("Windows were seen.", alternative="a gradient method", parameters={"a": "b"})
    assert str(error) == "Windows were seen. Use a gradient method."
    named = with_named_methods(error)
    assert str(named) == "Windows were seen. Use a gradient method: ixg, saliency or gradcam."
    assert named.parameters == {"a": "b"}
    assert with_named_methods(named) is named
    single = with_named_methods(NotApplicable("No tokens.", alternative="a method of pixel gradients"))
    assert str(single) == "No tokens. Use a method of pixel gradients: saliency."


def test_an_error_with_an_alternative_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NotApplicable("Windows.", alternative="a gradient method")))
    assert (str(error), error.alternative) == ("Windows. Use a gradient method.", "a gradient method")


def test_advice_is_added_only_where_there_is_none() -> None:
    with pytest.raises(NotApplicable, match=r"^No convolution\. Use level=patch\.$"), advice("Use level=patch."):
        raise NotApplicable("No convolution.")
    with pytest.raises(NotApplicable, match=r"^Windows\. Use a gradient method\.$"), advice("Use level=patch."):
        raise NotApplicable("Windows.", alternative="a gradient method")
