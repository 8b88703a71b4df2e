"""Ranked and thresholded localisation against scikit-learn's own numbers (tests/parity/make_sklearn.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from clairvit.metrics.registry import resolve_metric
from helpers.eval_contexts import case_of, values

THEIRS = np.load(Path(__file__).parent.parent / "fixtures" / "sklearn.npz")
MAPS, MASKS, VOID = (torch.from_numpy(THEIRS[name]) for name in ("maps", "masks", "void"))
VALUES = [name for name in THEIRS.files if name not in ("maps", "masks", "void")]
TIED, CONSTANT, PERFECT, OPPOSITE = 1, 3, 4, 5  # what kind of map each row is


@pytest.mark.parametrize("name", VALUES)
def test_as_scikit_learn_has_it(name: str) -> None:
    void = VOID if name.startswith("void ") else None
    context = case_of(MAPS, masks=MASKS, void=void, size=MAPS.shape[-1])
    (actual,) = values(name.removeprefix("void ").replace("pooled=true", "preset=chefer,upsampling=nearest"), context)
    assert actual.tolist() == pytest.approx(THEIRS[name].tolist(), abs=1e-12)


def test_the_file_holds_the_hard_cases() -> None:
    assert len(VALUES) == 2 * (3 + 2 * 4)
    assert len(MAPS[TIED].unique()) < 10
    assert len(MAPS[CONSTANT].unique()) == 1
    assert THEIRS["ap"][CONSTANT] == pytest.approx(float(MASKS[CONSTANT].double().mean())), "the score of a random map"
    assert THEIRS["roc-auc"][[CONSTANT, PERFECT, OPPOSITE]].tolist() == [0.5, 1, 0]
    assert THEIRS["ap(pooled=true)"][PERFECT] == 1


def test_chefers_preset_pools_the_two_channels() -> None:
    """Not the foreground's: a map that is right about a large background scores high."""
    context = case_of(MAPS, masks=MASKS, size=MAPS.shape[-1])
    nearest = resolve_metric("ap(preset=chefer,upsampling=nearest)")
    assert torch.equal(resolve_metric("ap(preset=chefer)")(context), nearest(context)), "maps as fine as the image"
    assert not torch.allclose(resolve_metric("ap")(context), resolve_metric("ap(preset=chefer)")(context), atol=0.01)
    coarse = case_of(MAPS[:, ::3, ::3], masks=MASKS, size=MAPS.shape[-1])
    bilinear = resolve_metric("ap(preset=chefer,upsampling=bilinear)")(coarse)
    assert torch.equal(resolve_metric("ap(preset=chefer)")(coarse), bilinear)
    assert not torch.allclose(bilinear, nearest(coarse), atol=1e-3)
