"""Settings of torch around a call: the default dtype and device change no random draw, autocast is noted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import clairvit as cv
from clairvit.errors import BadInput
from helpers.rounding import assert_same
from helpers.tiny_models import double, growth_of, pixels, wrapped

SOURCE = Path(__file__).parent.parent / "src" / "clairvit"
pytestmark = pytest.mark.numeric
NAME, TARGET = "timm-vit", 3
# What draws random numbers: noise, masks, subsets, shifts, orders
DRAWING = [
    *("random", "rise(samples=40)", "lime(samples=40)", "kernelshap(samples=40)", "hsic(samples=40)"),
    *("hsic(samples=40,design=random)", "smoothgrad(n=3)", "vit-cx", "shift(genatt,n=3)"),
    *("expected-gradients(samples=3)", "leave-one-out"),
]
METRICS = ["deletion", "irof", "sensitivity-n", "max-sensitivity", "infidelity"]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)


@pytest.mark.parametrize("method", DRAWING)
def test_the_default_dtype_changes_no_map(method: str) -> None:
    model, images = wrapped(NAME), pixels(NAME)
    expected = cv.explain(model, images, method, target=TARGET).maps
    torch.set_default_dtype(torch.float64)
    maps = cv.explain(model, images, method, target=TARGET).maps
    assert maps.dtype == torch.float32
    assert_same(maps, expected, growth=16 * growth_of(NAME))


@pytest.mark.parametrize("metric", METRICS)
def test_the_default_dtype_changes_no_score(metric: str) -> None:
    model, images = double(NAME)
    expected = cv.evaluate(model, images, "ixg", metric, target=TARGET, baselines=False).values
    torch.set_default_dtype(torch.float64)
    assert_same(cv.evaluate(model, images, "ixg", metric, target=TARGET, baselines=False).values, expected)


def test_every_draw_states_its_dtype_and_device() -> None:
    """Drawn in another dtype, a seed gives other numbers; a generator of the CPU draws on the CPU alone."""
    draws = 0
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "torch.rand" in text else ():
            function = node.func if isinstance(node, ast.Call) else None
            if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "torch":
                continue
            if function.attr in ("rand", "randn", "randint", "randperm"):
                stated = {keyword.arg for keyword in node.keywords}
                needed = {"generator", "device"} | ({"dtype"} if function.attr in ("rand", "randn") else set())
                assert needed <= stated, f"{path.name}:{node.lineno}: torch.{function.attr} without {needed - stated}"
                draws += 1
    assert draws > 40


def test_autocast_around_a_call_is_noted() -> None:
    model, images = wrapped(NAME), pixels(NAME)
    words = "The model ran under torch.autocast (bfloat16), which was on where this was called"
    for method in ("genatt", "raw-attention", "rise(samples=10)"):
        assert not [note for note in cv.explain(model, images, method, target=TARGET).notes if words in note]
        with torch.autocast("cpu", torch.bfloat16):
            notes = cv.explain(model, images, method, target=TARGET).notes
        assert len([note for note in notes if words in note]) == 1
        assert not [note for note in notes if "Two passes" in note]
        # An option of the call says what runs less exactly: the perturbed passes
        notes = cv.explain(model, images, method, target=TARGET, autocast="bfloat16").notes
        assert not [note for note in notes if words in note]


def test_meta_as_the_default_device_is_refused_for_what_it_is() -> None:
    model, images = wrapped(NAME), pixels(NAME)
    with torch.device("meta"), pytest.raises(BadInput, match=r"default device is 'meta'.*Leave the block"):
        cv.explain(model, images, "genatt", target=TARGET)
    torch.set_default_device("meta")
    with pytest.raises(BadInput, match="default device is 'meta'"):
        cv.evaluate(model.module, images, "genatt", "deletion", target=TARGET)
