"""Errors of lower packages name a kind of method; the method layer adds the names of registered methods."""

from __future__ import annotations

import pickle
import re
from typing import get_args

import pytest
import torch
from torch import Tensor

import clairvit as cv
from clairvit.errors import Alternative, Argument, NotApplicable
from clairvit.methods.alternatives import ALTERNATIVES, advice, with_named_methods
from clairvit.methods.registry import find_method, list_methods
from helpers.covering import method_model_pairs
from helpers.tiny_models import STRANGE, TINY, cnn, pixels, strange, wrapped


def test_every_alternative_has_registered_methods() -> None:
    assert set(ALTERNATIVES) == set(get_args(Alternative))
    for names in ALTERNATIVES.values():
        assert names
        assert [find_method(name).name for name in names] == list(names)


def test_methods_are_named_once() -> None:
    error = NotApplicable("Windows were seen.", alternative="a gradient method", advice=[Argument("a", "b")])
    assert str(error) == "Windows were seen. Use a gradient method."
    named = with_named_methods(error)
    assert str(named) == "Windows were seen. Use a gradient method: ixg, saliency or gradcam."
    assert named.advice == (Argument("a", "b"),)
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


def test_only_methods_that_fit_are_named() -> None:
    error = NotApplicable("Windows.", alternative="a gradient method")
    assert str(with_named_methods(error, {"saliency"}.__contains__)) == "Windows. Use a gradient method: saliency."
    assert str(with_named_methods(error, {"occlusion"}.__contains__)) == "Windows. Use occlusion."
    assert str(with_named_methods(error, lambda _: False)) == "Windows."
    listed = NotApplicable("No grid.", methods=("genatt", "globenc"))
    assert str(listed) == "No grid. Use genatt or globenc."
    assert str(with_named_methods(listed, {"globenc"}.__contains__)) == "No grid. Use globenc."
    assert str(pickle.loads(pickle.dumps(listed))) == str(listed)


FEW = {"lime": "lime(samples=10)", "kernelshap": "kernelshap(samples=10)", "rise": "rise(samples=4)"}
NAMES = {method.name for method in list_methods()}
QUICK = [method.name for method in list_methods() if not method.slow]
PAIRS = method_model_pairs(QUICK, TINY, seed="alternatives")
REFUSING = [*(f"strange {name}" for name in STRANGE), "cnn", *TINY]


def model_and_pixels(name: str) -> tuple[cv.Model, Tensor]:
    if name in TINY:
        return wrapped(name), pixels(name, 1)
    if name == "cnn":
        return cv.wrap(strange(cnn)), torch.randn(1, 3, 64, 64)
    odd = STRANGE[name.removeprefix("strange ")]
    return cv.wrap(strange(odd.make)), torch.randn(1, 3, *odd.size)


@pytest.mark.filterwarnings("ignore::clairvit.errors.ClairWarning")  # of maps that are zero
@pytest.mark.parametrize("name", REFUSING)
def test_every_method_that_a_refusal_names_works_on_that_model(name: str) -> None:
    model, images = model_and_pixels(name)
    target = None if model.classifier else (lambda scores: scores[:, 0])
    names = [method for method, kind in PAIRS if kind == name] if name in TINY else QUICK
    skipped = cv.compare(model, images, names, target=target, skip=True).skipped
    advised = {
        method
        for reason in skipped.values()
        if " Use " in reason
        for method in re.findall(r"[a-z][a-z0-9-]*", reason.rpartition(" Use ")[2])
        if method in NAMES
    }
    assert bool(advised) == bool(skipped)
    for method in advised:
        assert method not in skipped
        cv.explain(model, images, FEW.get(method, method), target=target)
