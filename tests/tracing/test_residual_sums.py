"""C and A of residual sums: in closed form on a block written by hand, and against the relevance written out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import clairvit as cv
from clairvit.errors import NotApplicable
from clairvit.recorders import ResidualSums
from clairvit.tracing.recording import record
from helpers.custom_vits import Block, Halving, HalvingInPlace, HomeMade, MatmulAttention
from helpers.exact_models import TARGETS, build, images_for, wrapped
from helpers.reference_rules import amplification
from helpers.reference_vit import forward, written_out
from helpers.rounding import assert_same
from helpers.tiny_models import cnn, double, fresh_double, shaken

TABLES = {"plain": 2.0, "attnlrp": 2.0, "linear": 2.0, "reslrp": 4 / 3, "reslrp(gamma=0.5)": (1 + 2.0) / 2}


@pytest.mark.parametrize("block", [Halving, HalvingInPlace])
@pytest.mark.parametrize("rules", TABLES)
def test_a_block_in_closed_form(block: type[Block], rules: str) -> None:
    """C = (1 + 3/2) / (1 + 1/2). Both sums have the same relevance, so that A is the mean of 1 and that of x − x/2:

    3 in proportion; (w + 1/2) / (w − 1/2) with w = 1 + gamma, the factor of the term that has the sign of the sum.
    """
    module = shaken(HomeMade(lambda: block(MatmulAttention), depth=2), 0).double().eval()
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trace = cv.trace(cv.wrap(module, size=(32, 32)), image, target=TARGETS, rules=rules, recorders=(ResidualSums,))
    sums = trace[ResidualSums]
    assert_same(sums.cancellation, torch.full((2, 2), 5 / 3, dtype=torch.float64))
    assert_same(sums.amplification, torch.full((2, 2), TABLES[rules], dtype=torch.float64))
    assert_same(sums.by_sum, [[1.0, 3.0]] * 2)


@pytest.mark.parametrize("kind", ["plain", "registers", "swiglu-packed", "rope-swiglu", "torchvision", "avg", "map"])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_both_against_the_model_written_out(kind: str, gamma: float) -> None:
    module = build(kind)
    pixels, vit = images_for(module), written_out(module)
    with torch.no_grad():
        run = forward(vit, vit.embed(pixels))
    rules = f"reslrp(gamma={gamma})"
    sums = cv.trace(wrapped(module), pixels, target=TARGETS, rules=rules, recorders=(ResidualSums,))[ResidualSums]
    for C, parts in zip(sums.cancellation, run.blocks, strict=True):
        over = sum((part.x.abs() + (part.end - part.x).abs()).sum((1, 2)) for part in parts)
        assert_same(C, over / sum(part.end.abs().sum((1, 2)) for part in parts))
    assert_same(sums.amplification, amplification(vit, run, TARGETS, gamma))
    assert sums.amplification.min() > 1
    if gamma:
        assert sums.amplification.max() <= 1 + 2 / gamma


def test_each_backward_has_its_own_values() -> None:
    """Of another target, and of a table whose sums have a rule over the whole image."""
    model, image = double("timm-vit")
    trace = cv.trace(model, image, target=1, rules="attnlrp", recorders=(ResidualSums,))
    first = trace[ResidualSums].amplification
    second = trace.retarget(2)[ResidualSums].amplification
    again = cv.trace(model, image, target=2, rules="attnlrp", recorders=(ResidualSums,))[ResidualSums]
    assert_same(second, again.amplification)
    assert (first - second).abs().max() > 1e-6
    assert torch.equal(first, trace[ResidualSums].amplification)
    chefer = cv.trace(model, image, target=1, rules="chefer", recorders=(ResidualSums,))[ResidualSums]
    assert chefer.amplification.isfinite().all()


def test_images_do_not_depend_on_their_batch() -> None:
    for kind in ("timm-vit", "home-sequence-first", "home-lucid"):
        model, image = double(kind)
        together = cv.trace(model, image, target=1, rules="reslrp", recorders=(ResidualSums,))[ResidualSums]
        for row in range(2):
            alone = cv.trace(model, image[row], target=1, rules="reslrp", recorders=(ResidualSums,))[ResidualSums]
            assert_same(together.cancellation[:, row], alone.cancellation[:, 0])
            assert_same(together.amplification[:, row], alone.amplification[:, 0])


def test_without_a_graph_or_blocks_there_are_none() -> None:
    model, image = double("timm-vit")
    sums = record(model, image, differentiable=False, recorders=(ResidualSums,))[ResidualSums]
    assert sums.cancellation.isnan().all()
    raised = sums.missing(0)
    assert isinstance(raised, NotApplicable)
    assert "without gradients" in str(raised)
    plain = cv.wrap(cnn().eval(), size=(32, 32))
    none = cv.trace(plain, torch.randn(1, 3, 32, 32), target=1, recorders=(ResidualSums,))[ResidualSums]
    assert none.cancellation.shape == (0, 1)


def test_the_graph_is_freed_with_the_trace() -> None:
    model, image = fresh_double("timm-vit")
    gc.collect()
    gc.disable()
    try:
        trace = cv.trace(model, image, target=1, rules="reslrp", recorders=(ResidualSums,))
        logits = weakref.ref(trace.recording.logits)
        del trace
        assert logits() is None
    finally:
        gc.enable()
