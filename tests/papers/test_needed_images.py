"""How many images a printed difference needs: the power by simulation, and where its deviation is from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from clairvit.metrics.score import Score
from clairvit.papers.needed_images import images_for, needed_images
from clairvit.papers.paper import find_paper


@pytest.mark.parametrize("effect", [0.35, 0.8, 1.5])
def test_so_many_images_have_the_power_by_simulation(effect: float) -> None:
    images = images_for(effect, 1.0)
    assert images is not None
    generator = np.random.default_rng(0)

    def power(count: int) -> float:
        draws = generator.normal(effect, 1.0, (20_000, count))
        p = stats.ttest_1samp(draws, 0.0, axis=1)
        return float(((p.pvalue < 0.05) & (p.statistic > 0)).mean())

    assert power(images) > 0.8 - 0.015
    assert images == 6 or power(images - 1) < 0.8 + 0.015


def test_edges() -> None:
    assert images_for(0.0, 1.0) is None
    assert images_for(1e-9, 1.0) is None, "more than anybody has"
    assert images_for(1.0, 0.0) == 6, "fewer claim nothing"
    assert images_for(100.0, 1.0) == 6
    assert images_for(1.0, math.nan) is None
    assert images_for(0.2, 1.0) == images_for(-0.2, 1.0) == images_for(20.0, 100.0)


def score(method: str, values: np.ndarray) -> Score:
    names = tuple(str(row) for row in range(len(values)))
    flat = torch.zeros(len(values), dtype=torch.bool)
    return Score("iou", method, torch.from_numpy(values), "higher", (0, 1), flat, names, "m")


def test_the_deviation_is_ours_in_the_unit_of_the_paper() -> None:
    joita = find_paper("joita")
    names = [entry.name for entry in joita.methods if not entry.extra]
    values = np.random.default_rng(1).uniform(0, 1, (len(names), 9))
    scores = {(name, "mIoU"): score(name, row) for name, row in zip(names, values, strict=True)}
    entries = needed_images(joita, scores)
    assert len(entries) == 6, "pairs of four printed methods, of the one measure that has scores"
    assert sum(entry.next_in_rank for entry in entries) == 3
    first = entries[0]
    assert (first.better, first.other, first.had) == ("LeGrad (code)", "GMAR-L1", 14)
    assert first.difference == pytest.approx(42.96 - 5.00)
    differences = 100 * (values[names.index("LeGrad (code)")] - values[names.index("GMAR-L1")])
    assert first.deviation == pytest.approx(differences.std(ddof=1))
    assert first.images == images_for(first.difference, first.deviation)
    assert (first.estimated_on, first.estimated_from) == ("ours", 9)
    few = {key: value.take(range(5)) for key, value in scores.items()}
    assert needed_images(joita, few) == needed_images(joita, {}) == ()


def test_a_table_with_numbers_by_image_has_its_own_deviation() -> None:
    cmi = find_paper("cmi")
    entries = [entry for entry in needed_images(cmi, {}) if entry.measure == "FAF"]
    (entry,) = entries
    assert (entry.estimated_on, entry.estimated_from, entry.had) == ("paper's", 11, 11)
    (table,) = cmi.tables
    rows = table.per_image["FAF"]
    differences = np.subtract(rows["Gradient Attention Rollout"], rows["Attention Rollout"])
    assert entry.difference == pytest.approx(differences.mean())
    assert entry.deviation == pytest.approx(differences.std(ddof=1))
