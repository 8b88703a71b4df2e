"""The radar against FocusViT's printed tables (METRICS 1.5), by hand, and at the edges; the CMI report's FAF means."""

from __future__ import annotations

import math

import pytest
import torch

from clairvit.errors import BadInput
from clairvit.metrics.radar import area_under_radar, radar
from clairvit.metrics.registry import resolve_metric
from helpers.eval_contexts import case_of

METHODS = ["LIME", "SHAP", "LRP", "Grad-CAM", "Attention", "Our"]
BETTER = ["higher", "lower", "lower", "lower"]
# FocusViT, Table 2, Flower: faithfulness correlation, max-sensitivity, sparseness, model randomisation
FLOWER = torch.tensor(
    [
        [0.0006, 0.0009, 0.0323, 0.0293, 0.0216, 0.0350],
        [3.7378, 13.3765, 1.0035, 1.0020, 1.0004, 1.0037],
        [0.9987, 0.3449, 0.4348, 0.5466, 0.5056, 0.1248],
        [0.1854, 0.0000, 0.1265, 0.1583, 0.0016, 0.0015],
    ],
    dtype=torch.float64,
).T
TABLE_3 = torch.tensor([0.0163, 1.1656, 1.0342, 0.7785, 1.1859, 1.9916], dtype=torch.float64)
SHAP = METHODS.index("SHAP")


def with_the_lost_sign() -> torch.Tensor:
    """The table prints SHAP's faithfulness as 0.0009; with a minus it gives the areas that the paper prints."""
    table = FLOWER.clone()
    table[SHAP, 0] = -0.0009
    return table


def test_the_areas_of_focusvits_flower_row() -> None:
    areas = area_under_radar(radar(with_the_lost_sign(), BETTER))
    off = (areas - TABLE_3).abs()
    others = [row for row in range(6) if row != SHAP]
    assert (off[others] < 1e-4).all(), dict(zip(METHODS, off.tolist(), strict=True))
    assert off[SHAP] > 0.1, "that cell cannot be had from the printed table (METRICS 1.5)"
    as_printed = area_under_radar(radar(FLOWER, BETTER))
    assert 1e-3 < (as_printed - TABLE_3)[others].abs().max() < 0.0164, "the sign is what makes it exact"


def test_the_radar_runs_from_the_worst_to_the_best_of_each_axis() -> None:
    r = radar(FLOWER, BETTER)
    assert torch.equal(r.amin(0), torch.zeros(4, dtype=torch.float64))
    assert torch.equal(r.amax(0), torch.ones(4, dtype=torch.float64))
    assert r[5, 0] == 1, "faithfulness: the highest"
    assert r[SHAP, 1] == 0, "sensitivity: the highest is the worst"


def test_areas_by_hand() -> None:
    """Full polygons are regular ones; a square's corners count by their products."""
    for axes, area in [(3, 3 * math.sqrt(3) / 4), (4, 2.0), (6, 3 * math.sqrt(3) / 2)]:
        assert float(area_under_radar(torch.ones(1, axes))) == pytest.approx(area, abs=1e-12)
    radii = torch.tensor([[0.5, 1.0, 0.25, 0.0]])
    assert float(area_under_radar(radii)) == pytest.approx((0.5 * 1 + 1 * 0.25 + 0 + 0) / 2, abs=1e-12)
    assert float(area_under_radar(radii)) == pytest.approx((0.5 + 0.25) * (1 + 0) / 2, abs=1e-12)
    swapped = radii[:, [0, 2, 1, 3]]
    assert float(area_under_radar(swapped)) != pytest.approx(float(area_under_radar(radii))), "the axes' order counts"


def test_an_axis_on_which_all_are_equal() -> None:
    table = torch.tensor([[1.0, 5.0, 3.0], [2.0, 5.0, 4.0]])
    assert radar(table, ["higher", "higher", "lower"]).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert radar(table, ["higher", "lower", "lower"], flat=1).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_tables_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadInput, match=r"1 method was given; expected 2 or more"):
        radar(torch.ones(1, 3), ["higher"] * 3)
    with pytest.raises(BadInput, match=r"for 3 axes; expected 'higher' or 'lower' for each"):
        radar(torch.ones(2, 3), ["higher"] * 2)
    with pytest.raises(BadInput, match=r"shape \[3\]; expected a table"):
        radar(torch.ones(3), ["higher"] * 3)
    with pytest.raises(BadInput, match="2 axes were given; expected 3 or more"):
        area_under_radar(torch.ones(2, 2))


# The CMI report's Table 2: attention on the foreground for 11 images, rollout and gradient rollout
ROLLOUT = [0.109, 0.012, 0.481, 0.294, 0.543, 0.241, 0.922, 0.193, 0.448, 0.467, 0.497]
GRADIENT = [0.143, 0.003, 0.703, 0.448, 0.497, 0.261, 0.927, 0.290, 0.672, 0.573, 0.738]


def test_the_means_of_the_cmi_reports_fractions() -> None:
    """Maps that put the printed fractions on the foreground have the printed means (METRICS 5)."""
    masks = torch.zeros(11, 16, 16, dtype=torch.bool)
    masks[:, :, :8] = True
    maps = []
    for fractions in (ROLLOUT, GRADIENT):
        inside = torch.tensor(fractions, dtype=torch.float64)[:, None]
        maps.append(torch.stack([inside, inside, 1 - inside, 1 - inside], -1).expand(11, 4, 4))
    context = case_of(*maps, masks=masks)
    forward, back = resolve_metric("faf")(context), resolve_metric("baf")(context)
    assert forward.mean(1).tolist() == pytest.approx([0.38245, 0.47773], abs=5e-6)
    assert (forward + back - 1).abs().max() < 1e-12
    assert int((forward[1] > forward[0]).sum()) == 9, "gradients help on 9 of 11"
